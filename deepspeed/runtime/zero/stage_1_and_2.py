"""ZeRO stages 0, 1 and 2: composes layout, buckets, master and publisher into one optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.precision import LossScalerBase
from deepspeed.runtime.zero import collectives
from deepspeed.runtime.zero.buckets import GradReducer
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.forms import EncodedFlat, as_tensor
from deepspeed.runtime.zero.host_buffer import LedgerEntry
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.param_access import ParamAccess
from deepspeed.runtime.zero.parts import ZeroParts, build_parts
from deepspeed.runtime.zero.settings import ZeroSettings

__all__ = [
    "DeepSpeedZeroOptimizer",
    "StepStatus",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

logger = logging.getLogger("DeepSpeed")

# Keeps the clip factor finite for a zero norm; the same constant as torch.nn.utils.clip_grad_norm_ and stock.
_CLIP_EPS = 1e-6


@dataclass
class StepStatus:
    """What is known about the step under way and the last one.

    One object for life, since clients proxy attributes.
    """

    overflow: bool = False  # the last step was skipped because a gradient was not finite
    grad_norm: float | None = None  # of the last step: over all ranks, unscaled, before clipping
    skipped_steps: int = 0
    states_away: bool = False  # between offload_states and reload_states


@dataclass(frozen=True)
class _Totals:
    """What all ranks together know before a step."""

    sum_of_squares: float
    seen: int  # gradients that arrived, summed over ranks
    pending: int  # gradients that no round has reduced yet
    unused: int  # parameters that saw none, summed over ranks


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Shards the optimizer (stage 1) and the gradients (stage 2) over data-parallel ranks.

    Goal: each rank keeps the master weights and optimizer state of its shard only, on its device or, with
    offload, in host memory at 16 bytes a parameter (see `HostMaster`). Stage 0 is the same machine with one
    shard that every rank owns.
    Pattern: gradients flow from `param.grad` through fixed buckets to their owner (`GradReducer`) and into
    the master's gradient. `step` then is three phases: collect what is still outstanding; decide, by one
    all-reduce, for all ranks alike, whether to skip and how much to clip; apply, publishing fresh weights as
    they are computed.
    Lifetime: from `deepspeed.initialize` to `destroy`. The inner optimizer's group dictionaries are the
    user's own objects; their `params` are the flat fp32 masters meanwhile and the model's parameters again
    after `destroy`. Memory, bytes a parameter of the shard: see `HostMaster` and `DeviceMaster`; plus the
    buckets in flight.

    Args:
        optimizer: the inner optimizer, over the model's parameters.
        model_params: the model's `(name, parameter)` pairs in model order.
        settings: how to shard, reduce and keep.
        comm: the data-parallel ranks.
        loss_scaler: what the loss was multiplied by.

    Source: Rajbhandari and others, 2020, ZeRO, sections 5.1 and 5.2; Ren and others, 2021, ZeRO-Offload,
    section 4.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model_params: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ZeroSettings,
        comm: Comm,
        loss_scaler: LossScalerBase,
    ) -> None:
        # By a name of its own: under a wrapper of Fabric's, `self.optimizer` is this object itself.
        self._inner = optimizer
        self.loss_scaler = loss_scaler
        self._settings = settings
        self._comm = comm
        self._status = StepStatus()
        self._user_params = [list(group["params"]) for group in optimizer.param_groups]
        self._parts: ZeroParts = build_parts(optimizer, model_params, settings, comm)
        self._access = ParamAccess(self._parts, comm, optimizer, loss_scaler)
        self._access.attach()

    # -- what clients read ---------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, of the client's own class when it passed one."""
        return self._inner

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self._status.overflow

    @property
    def skipped_steps(self) -> int:
        """Steps skipped since the beginning."""
        return self._status.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's gradients over all ranks, unscaled, before clipping.

        None before the first step.
        """
        return self._status.grad_norm

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by at present."""
        return self.loss_scaler.loss_scale

    @property
    def cur_scale(self) -> float:
        """The same as `loss_scale`, under stock's other name."""
        return self.loss_scaler.loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: the user's own dictionaries."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The inner optimizer's state, by flat master."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self._inner.defaults

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's masters, one a group, `[shard_numel]` fp32, without padding.

        Copies, if masters are kept in a smaller form.
        """
        return [as_tensor(master) for master in self._parts.master.masters]

    def host_buffers(self) -> list[LedgerEntry]:
        """Every host buffer of this rank; `parts.buffers()` has those on the device too."""
        return [entry for entry in self._parts.buffers() if entry.device == "cpu"]

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the model's gradients on the wire."""
        return self._parts.wire_dtype

    # -- what checkpoints read and write -------------------------------------------------------------------

    @property
    def parts(self) -> ZeroParts:
        """Layouts, parameters and masters."""
        return self._parts

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self._settings.stage

    @property
    def user_params(self) -> list[list[torch.nn.Parameter]]:
        """For each group the model's parameters as the client gave them, frozen and empty ones included."""
        return self._user_params

    def restore_skipped_steps(self, count: int) -> None:
        """Go on counting skipped steps from a checkpoint."""
        self._status.skipped_steps = count

    def publish_masters(self) -> None:
        """Bring the masters' present values to the parameters. Collective."""
        self._parts.master.publish(self._parts.publisher)

    # -- backward ------------------------------------------------------------------------------------------

    @contextmanager
    def backward_pass(self, is_boundary: bool) -> Iterator[None]:
        """Around a backward pass that every rank makes: takes its gradients, and reduces them at the end.

        At stages 0 and 1 that happens only if the step follows; otherwise gradients stay in `param.grad`, as
        do those of a pass outside this context. Nothing is launched then: without an end that all ranks agree
        on, a reduction could meet a collective of the caller's on another rank.

        Args:
            is_boundary: whether the step follows.
        """
        self._check_states_are_here("backward")
        reducer = self._parts.reducer
        reducer.armed = self._settings.reduces_every_pass(self._comm.world) or is_boundary
        try:
            yield
            if reducer.armed:
                reducer.flush()
        finally:
            reducer.armed = False

    def has_local_grads(self) -> bool:
        """Whether this rank holds gradients that no pass has reduced yet."""
        return self._parts.reducer.pending_count() > 0

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, fp32 when a scale applies."""
        return loss.float() * self.loss_scale if self.loss_scale != 1.0 else loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of one micro-batch that a step follows, as stock's method of that name."""
        with self.backward_pass(is_boundary=True):
            self.scale_loss(loss).backward(retain_graph=retain_graph)

    # -- step ----------------------------------------------------------------------------------------------

    def step(self, closure: None = None) -> None:
        """Collect, decide, apply.

        Raises:
            RuntimeError: no gradient arrived on any rank, or a parameter saw none although
                `zero_optimization.ignore_unused_parameters` is false.
        """
        if closure is not None:
            raise NotImplementedError("step: expected no closure, got one. Call backward first, then step().")
        self._check_states_are_here("step")
        totals = self._collect()
        factor = self._decide(totals)
        self._apply(factor)

    def _collect(self) -> _Totals:
        """Phase 1: every gradient of the step is in its owner's master, on all ranks alike."""
        reducer = self._parts.reducer
        if not reducer.rounds:
            reducer.flush()
        totals = self._totals()
        while totals.pending:
            reducer.flush()
            totals = self._totals()
        return totals

    def _decide(self, totals: _Totals) -> float | None:
        """Phase 2: the one factor for all gradients, or None to skip; the same on every rank."""
        self._check_arrivals(totals)
        norm = math.sqrt(totals.sum_of_squares) / self.loss_scale if totals.sum_of_squares >= 0 else math.nan
        finite = math.isfinite(norm)
        self._status.grad_norm = norm
        self._status.overflow = not finite and self._settings.skip_nonfinite
        return None if self._status.overflow else self._clip_factor(norm)

    def _apply(self, factor: float | None) -> None:
        """Phase 3: step and publish, or forget the gradients."""
        if factor is None:
            self._status.skipped_steps += 1
            self._parts.master.clear_grads()
            self._log_skip()
        else:
            self._parts.master.step(factor, self._parts.publisher)
        self.loss_scaler.update_scale(factor is None)
        self._parts.reducer.begin_step()

    def _totals(self) -> _Totals:
        """One all-reduce of this rank's numbers."""
        reducer: GradReducer = self._parts.reducer
        # A shard that every rank owns counts once.
        owns = self._settings.stage > 0 or self._comm.rank == 0
        own = self._parts.master.sum_of_squares() if owns else 0.0
        unused = len(self._parts.params) - len(reducer.seen)
        sums = collectives.all_reduce_sum(
            [own, len(reducer.seen), reducer.pending_count(), unused], self._comm, self._settings.device
        )
        return _Totals(sums[0], int(sums[1]), int(sums[2]), int(sums[3]))

    def _check_arrivals(self, totals: _Totals) -> None:
        if not totals.seen and self._parts.params:
            raise RuntimeError(
                "step: expected gradients, got none on any rank. Call engine.backward(loss) before "
                "engine.step(), with a loss that depends on parameters that require grad and are in the "
                "optimizer's groups."
            )
        if totals.unused and not self._settings.ignore_unused_parameters:
            seen = self._parts.reducer.seen
            names = [self._parts.names[index] for index in self._parts.params if index not in seen]
            raise RuntimeError(
                "zero_optimization.ignore_unused_parameters: expected a gradient for every parameter because "
                f"it is false, got none for {names or 'parameters of other ranks'}. Use them in the loss, "
                "freeze them, or set it to true."
            )

    def _clip_factor(self, norm: float) -> float:
        """Unscale and clip as one multiplication."""
        clip = self._settings.gradient_clipping
        factor = 1.0 / self.loss_scale
        if clip > 0 and math.isfinite(norm):
            factor *= min(1.0, clip / (norm + _CLIP_EPS))
        return factor

    def _log_skip(self) -> None:
        if self._comm.rank == 0:
            logger.warning(
                "step skipped: the gradient is not finite (norm %s, loss scale %g); %d skipped so far",
                self._status.grad_norm,
                self.loss_scale,
                self._status.skipped_steps,
            )

    # -- lending the device's memory to somebody else ------------------------------------------------------

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to the host until `reload_states`; with offload they are there anyway.

        Args:
            include: what to move, by default all but the weights, which stay where the module needs them.
            device: "cpu".
            pin_memory: no effect: the host memory is never page-locked.
            non_blocking: no effect: the memory is free on return.

        Raises:
            NotImplementedError: `include` names the weights.
            ValueError: another device.

        Source: arguments of DeepSpeed 0.19.8.
        """
        if device != OffloadDeviceEnum.cpu:
            raise ValueError(
                f'device: expected "cpu", got "{OffloadDeviceEnum(device).value}". Leave it out.'
            )
        kinds = (
            set(OffloadStateTypeEnum) - {OffloadStateTypeEnum.lp_params} if include is None else set(include)
        )
        if OffloadStateTypeEnum.lp_params in kinds:
            raise NotImplementedError(
                "include: expected states of the optimizer, got lp_params. Leave it out, and move the module "
                "itself with .to() when nobody trains it."
            )
        self._status.states_away = self._parts.master.move_to_host(kinds)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` moved."""
        self._parts.master.move_back()
        self._status.states_away = False

    def _check_states_are_here(self, call: str) -> None:
        if self._status.states_away:
            raise RuntimeError(
                f"{call}: expected the optimizer's states on the device, got them moved to the host by "
                "offload_states. Call engine.reload_states() first."
            )

    # -- torch's optimizer surface -------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no pass has reduced yet; those that a step still needs stay, as in stock."""
        for param in self._parts.params.values():
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.zero_()

    def unscale_and_clip_grads(self, total_norm: float | torch.Tensor) -> None:
        """Unscale and clip the shard's gradients in place, without a buffer.

        `step` does the same as a factor; this is for code that wants to see unscaled gradients.

        Args:
            total_norm: norm of the gradients as they are, loss scale included.
        """
        self._parts.master.scale_grads(self._clip_factor(float(total_norm) / self.loss_scale))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the flat layout is fixed at initialize."""
        raise NotImplementedError(
            "add_param_group: expected all parameter groups at deepspeed.initialize, got another one. "
            "Give it to initialize (frozen until needed, with lr 0)."
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: loss scaler, inner optimizer, masters.

        Copies only what is kept in a smaller form.
        """
        inner = self._inner.state_dict()
        for entries in inner["state"].values():
            entries.update({k: as_tensor(v) for k, v in entries.items() if isinstance(v, EncodedFlat)})
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "overflow": self.overflow,
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": self.single_partition_of_fp32_groups,
            "zero_stage": self._settings.stage,
            "partition_count": self._comm.world,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` of the same shard returned.

        Raises:
            ValueError: it was saved with another number of ranks or other groups.
        """
        masters, saved = self._parts.master.masters, state_dict["single_partition_of_fp32_groups"]
        if [master.numel() for master in masters] != [master.numel() for master in saved]:
            raise ValueError(
                "single_partition_of_fp32_groups: expected shards of "
                f"{[m.numel() for m in masters]} elements, got {[m.numel() for m in saved]}. Load it into "
                "the same model, groups and number of ranks."
            )
        self._parts.master.wait_readers()
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self._load_inner_state(state_dict["base_optimizer_state"])
        for master, values in zip(masters, saved, strict=True):
            master.copy_(values)
        self._parts.master.publish(self._parts.publisher)

    def _load_inner_state(self, state: dict[str, Any]) -> None:
        """Load the inner optimizer. torch replaces its group dictionaries; the user's are put back."""
        groups = list(self._inner.param_groups)
        self._inner.load_state_dict(state)
        for index, (own, loaded) in enumerate(zip(groups, list(self._inner.param_groups), strict=True)):
            own.update(loaded)
            self._inner.param_groups[index] = own

    def refresh_fp32_params(self) -> None:
        """Set the masters from the parameters' present values, after weights were loaded into the model."""
        self._access.refresh_masters()

    def destroy(self) -> None:
        """Return all memory and give the parameters back to the inner optimizer; the model stays usable."""
        self._access.detach()
        self._parts.close()
        for group, params in zip(self._inner.param_groups, self._user_params, strict=True):
            group["params"] = params
