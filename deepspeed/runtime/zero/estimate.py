"""What training costs, before anything is allocated: DeepSpeed's functions, and a table over settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepspeed.runtime.zero.forms import MasterForm, MomentForm, StateForms
from deepspeed.runtime.zero.host_buffer import LedgerEntry
from deepspeed.runtime.zero.needs import Facts, memory_needs
from deepspeed.runtime.zero.settings import Accumulation, ZeroSettings

_GIB = 2**30
_DEVICE = torch.device("cuda")
_WEIGHTS = torch.bfloat16
_STATE_OWNERS = ("HostShard", "HostMaster", "DeviceMaster", "optimizer")
_NOTHING = "-"


@dataclass(frozen=True)
class Job:
    """What is to be trained, where: 16-bit weights, Adam, GPUs.

    Args:
        numel: trainable parameters.
        gpus_per_node: ranks on a node.
        nodes: nodes.
        accumulation: micro-batches of a step.
        pins: `pin_memory`.
    """

    numel: int
    gpus_per_node: int = 1
    nodes: int = 1
    accumulation: int = 2
    pins: bool = False

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.gpus_per_node * self.nodes

    def __str__(self) -> str:
        """Return the job in one line."""
        return (
            f"{self.numel / 1e6:.0f} M parameters, {self.nodes} node(s) of {self.gpus_per_node} GPU(s), "
            f"gradient_accumulation_steps {self.accumulation}"
        )


@dataclass(frozen=True)
class Estimate:
    """What one rank of a job holds under some settings.

    Args:
        stage: `zero_optimization.stage`.
        offload: `offload_optimizer.device` is "cpu".
        grad_accum_dtype: `data_types.grad_accum_dtype`, or "-" for the default.
        master_weights: `offload_optimizer.master_weights`.
        optimizer_states: `offload_optimizer.optimizer_states`.
        host: buffers on the host.
        device: buffers on the device, and the weights.
        gpus_per_node: ranks on a node.
    """

    stage: int
    offload: bool
    grad_accum_dtype: str
    master_weights: str
    optimizer_states: str
    host: Sequence[LedgerEntry]
    device: Sequence[LedgerEntry]
    gpus_per_node: int

    @property
    def host_nbytes(self) -> int:
        """Host memory of a rank."""
        return sum(entry.nbytes for entry in self.host)

    @property
    def device_nbytes(self) -> int:
        """Device memory of a rank."""
        return sum(entry.nbytes for entry in self.device)

    @property
    def host_node_nbytes(self) -> int:
        """Host memory of a node."""
        return self.gpus_per_node * self.host_nbytes

    @property
    def device_node_nbytes(self) -> int:
        """Device memory of a node."""
        return self.gpus_per_node * self.device_nbytes


def estimates(job: Job) -> Iterator[Estimate]:
    """Estimate a job under every stage, with and without offload, and under every form of state."""
    for stage in (0, 1, 2):
        yield _estimate(job, stage, None)
    gradients = (None,) if job.accumulation == 1 else (None, _WEIGHTS)
    for stage, master, moments, dtype in itertools.product((1, 2), MasterForm, MomentForm, gradients):
        yield _estimate(job, stage, StateForms(master, moments), dtype)


def estimate_table(rows: Sequence[Estimate], factor: float = 1.0) -> str:
    """Lay estimates out as text, in GiB.

    Args:
        rows: the estimates.
        factor: multiplies every figure.
    """
    ends = "|     rank      node |     rank      node"
    lines = [
        f"{'':<61}|     host, GiB     |    device, GiB",
        f"stage  offload  grad_accum  master_weights  optimizer_states {ends}",
    ]
    for row in rows:
        numbers = (row.host_nbytes, row.host_node_nbytes, row.device_nbytes, row.device_node_nbytes)
        host, host_node, device, device_node = (f"{factor * nbytes / _GIB:9.2f}" for nbytes in numbers)
        lines.append(
            f"{row.stage:>5}  {'cpu' if row.offload else 'none':<7}  {row.grad_accum_dtype:<10}  "
            f"{row.master_weights:<14}  {row.optimizer_states:<16} "
            f"|{host} {host_node} |{device} {device_node}"
        )
    return "\n".join(lines)


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
    whole = Job(total_params, accumulation=gradient_accumulation_steps)
    estimate = _estimate(whole, 2, StateForms() if cpu_offload else None)
    state = sum(entry.nbytes for entry in (*estimate.host, *estimate.device) if entry.owner in _STATE_OWNERS)
    host, device = 0.0, float(total_params * _WEIGHTS.itemsize)
    if cpu_offload:
        host = state / num_nodes
    else:
        device += state / (num_gpus_per_node * num_nodes)
    return int(host * additional_buffer_factor), int(device * additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print what stage 2 holds for a model under all settings. Arguments as above."""
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
    """Print what stage 2 holds for a number of parameters under all settings. Arguments as above."""
    for accumulation in (1, 2):
        job = Job(int(total_params), num_gpus_per_node, num_nodes, accumulation)
        print(job)
        print(estimate_table([row for row in estimates(job) if row.stage == 2], additional_buffer_factor))


def _estimate(
    job: Job, stage: int, forms: StateForms | None, grad_dtype: torch.dtype | None = None
) -> Estimate:
    """Estimate one row.

    Args:
        job: the job.
        stage: the stage.
        forms: forms on the host; None: no offload.
        grad_dtype: in which micro-batches are added; None: the default.
    """
    settings = ZeroSettings(
        stage=stage,
        device=_DEVICE,
        offload=forms is not None,
        pin_memory=job.pins and forms is not None,
        overlap_comm=False,
        accumulation=Accumulation(grad_dtype, keeps_16bit=job.accumulation == 1),
        forms=forms or StateForms(),
    )
    needs = memory_needs(settings, Facts.of_numel(job.numel, job.world, settings, _WEIGHTS))
    weights = LedgerEntry("weights", job.numel * _WEIGHTS.itemsize, owner="model", device=str(_DEVICE))
    return Estimate(
        stage=stage,
        offload=forms is not None,
        grad_accum_dtype="bf16" if grad_dtype is not None else _NOTHING,
        master_weights=forms.master.value if forms is not None else _NOTHING,
        optimizer_states=forms.moments.value if forms is not None else _NOTHING,
        host=needs.on(on_host=True),
        device=[weights, *needs.on(on_host=False)],
        gpus_per_node=job.gpus_per_node,
    )
