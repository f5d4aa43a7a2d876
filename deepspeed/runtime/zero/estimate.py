"""What ZeRO-2 costs before anything is allocated, under DeepSpeed's names for it."""

from __future__ import annotations

import torch

_WEIGHT_NBYTES = 2  # 16-bit, whole on every device
_MASTER_AND_ADAM_NBYTES = 4 + 4 + 4  # fp32 master and two moments


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
    gradient_accumulation_steps: int = 2,
) -> tuple[int, int]:
    """Bytes that 16-bit training with Adam holds, staging and buckets (tens of MiB a rank) apart.

    Args:
        total_params: trainable parameters.
        num_gpus_per_node: ranks on a node.
        num_nodes: nodes.
        cpu_offload: whether the optimizer is on the host.
        additional_buffer_factor: multiplies the result; DeepSpeed's default of 1.5 stands for buffers that
            do not exist here.
        gradient_accumulation_steps: with 1, offloaded gradients stay 16-bit: 14 bytes a parameter, not 16.

    Returns:
        `(host bytes a node, device bytes a GPU)`.

    Source: name and meaning of DeepSpeed 0.19.8's function; the figures are this package's own.
    """
    grad_nbytes = 2 if cpu_offload and gradient_accumulation_steps == 1 else 4
    per_param = _MASTER_AND_ADAM_NBYTES + grad_nbytes
    host, device = 0.0, float(total_params * _WEIGHT_NBYTES)
    if cpu_offload:
        host = total_params * per_param / num_nodes
    else:
        device += total_params * per_param / (num_gpus_per_node * num_nodes)
    return int(host * additional_buffer_factor), int(device * additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the estimate for a model, with and without offload. Arguments as above."""
    numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
    estimate_zero2_model_states_mem_needs_all_cold(
        numel, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the estimate for a number of parameters, with and without offload. Arguments as above."""
    print(f"{total_params / 1e6:.0f} M parameters, {num_nodes} node(s) of {num_gpus_per_node} GPU(s)")
    print("host a node | device a GPU | offload_optimizer")
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f"{host / 2**30:7.2f} GiB | {device / 2**30:8.2f} GiB | {'cpu' if offload else 'none'}")
