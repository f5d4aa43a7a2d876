"""The ``deepspeed`` command: one node, on torch.distributed's elastic agent."""
