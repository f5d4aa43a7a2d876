"""The ``deepspeed`` command: ranks of one host or many, on torch.distributed's elastic agent."""
