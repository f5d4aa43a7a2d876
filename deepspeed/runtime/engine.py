"""`DeepSpeedEngine`: forward, backward, step; everything else is delegated."""

from __future__ import annotations

import atexit
import gc
import logging
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.checkpoint.agreement import Agreement
from deepspeed.runtime.checkpoint.engine_mixin import CheckpointMixin
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine_settings import AbsentCalls, ConfigCalls
from deepspeed.runtime.engine_setup import (
    cast_floats,
    choose_lr_scheduler,
    choose_optimizer,
    data_parallel_comm,
    make_loss_scaler,
    place_model,
    training_device,
    zero_settings,
)
from deepspeed.runtime.plain_backward import PlainBackward
from deepspeed.runtime.rank_agreement import check_ranks_agree
from deepspeed.runtime.reporting import RunReporter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.memory_timeline import MemoryTimeline
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer
from deepspeed.utils.unsupported import refuse
from deepspeed.version import __version__

logger = logging.getLogger("DeepSpeed")


@dataclass
class Progress:
    """How far training has come."""

    global_steps: int = 0  # optimizer steps attempted, skipped ones included
    global_samples: int = 0
    micro_steps: int = 0  # calls of engine.step()
    boundary: bool | None = None  # what set_gradient_accumulation_boundary said last; None: the engine counts
    backwards: int = 0  # calls of engine.backward() since the last engine.step()
    no_sync_warned: bool = False
    step_applied: bool = False  # the last call of engine.step() changed the weights


class DeepSpeedEngine(ConfigCalls, AbsentCalls, CheckpointMixin, torch.nn.Module):
    """Trains a module under DeepSpeed's API: `loss = engine(x); engine.backward(loss); engine.step()`.

    Goal: one object that behaves like the module and decides when a step is due.
    Pattern: `backward` scales the loss and lets the ZeRO optimizer collect gradients; `step` counts
    micro-batches, and at an accumulation boundary steps the optimizer and, if the optimizer did step, the
    schedule.
    Lifetime: until `destroy`, after which the module is an ordinary one again.

    Args:
        args: may carry `device_rank`, the index of the device.
        model: the module; it is moved, cast and broadcast in place.
        optimizer: a torch optimizer over its parameters, or a callable that makes one.
        model_parameters: parameters or groups for an optimizer named in the configuration.
        training_data: a dataset for the built-in loader.
        lr_scheduler: a schedule, or a callable that makes one from an optimizer.
        mpu: names the data-parallel group.
        collate_fn: for the built-in loader.
        config: the configuration, checked.

    Raises:
        ValueError: an optimizer or schedule that cannot work here.
    """

    def __init__(
        self,
        args: Any,
        model: torch.nn.Module,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        collate_fn: Any = None,
        *,
        config: DeepSpeedConfig,
    ) -> None:
        super().__init__()
        self._config = config
        self._progress = Progress()
        self.memory_timeline = MemoryTimeline(config.memory_breakdown)
        self._comm = data_parallel_comm(mpu)
        self._reporter = RunReporter(config)
        self.device = training_device(args)  # first: whatever talks to other ranks does so from there
        self._agreement = Agreement.make(self._comm.rank, self._comm.world)
        inner = choose_optimizer(optimizer, model_parameters, model, config)
        check_ranks_agree(config, model, inner, self._comm)
        place_model(model, config, self.device, self._comm)
        self.module = model
        loss_scaler = make_loss_scaler(config)
        self._plain_backward = PlainBackward(loss_scaler, config.gradient_accumulation_steps)
        self.optimizer: DeepSpeedZeroOptimizer | None = None
        if inner is not None:
            settings = zero_settings(config, self.device)
            self.optimizer = DeepSpeedZeroOptimizer(
                inner, list(model.named_parameters()), settings, self._comm, loss_scaler
            )
        self.lr_scheduler = choose_lr_scheduler(lr_scheduler, config, self.optimizer)
        self.training_dataloader = None
        if training_data is not None:
            self.training_dataloader = self.deepspeed_io(training_data, collate_fn=collate_fn)
        self._log_start()
        self.memory_timeline.mark("initialize", self.memory_report)
        if self._comm.group is not None and self._comm.on_host:
            atexit.register(_let_go, weakref.ref(self))

    # -- what clients read ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have is the module's, as in stock: `engine.generate`, for example."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            return getattr(self.module, name)

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._progress.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of all ranks so far."""
        return self._progress.global_samples

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self._progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite."""
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the weights."""
        return self._progress.step_applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients over all ranks, before clipping; None before the first step."""
        return self.optimizer.grad_norm if self.optimizer is not None else None

    @property
    def cur_scale(self) -> float:
        """The present loss scale."""
        return self.optimizer.loss_scale if self.optimizer is not None else 1.0

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    @property
    def monitor(self) -> MonitorMaster:
        """Where events go; a script may write its own."""
        return self._reporter.monitor

    @property
    def timers(self) -> SynchronizedWallClockTimer | NoopTimer:
        """Timers of `wall_clock_breakdown`; without it, ones that do nothing."""
        return self._reporter.timers

    def get_mom(self) -> list[Any]:
        """Momentum, or Adam's betas, of each parameter group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("momentum", 0) or group.get("betas", 0) for group in groups]

    def memory_report(self) -> list[dict[str, Any]]:
        """Every buffer that the engine owns now: name, nbytes, pinned, owner, device, reserved_nbytes.

        `deepspeed.utils.memory.memory_table` sets it against what the machine measures.
        """
        if self.optimizer is None:
            return []
        return [asdict(entry) for entry in self.optimizer.parts.buffers()]

    # -- train ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; under `fp16.auto_cast` floating inputs are cast first."""
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = cast_floats(args, torch.float16), cast_floats(kwargs, torch.float16)
        with self._reporter.part("fwd"):
            output = self.module(*args, **kwargs)
        scales = self.gradient_accumulation_steps() > 1 or self._config.fp16.enabled
        if scales and self.optimizer is not None and torch.is_grad_enabled():
            return self._plain_backward.watch(output)
        return output

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as `backward` would scale it, for `engine.scale(loss).backward()`."""
        optimizer = self._training_optimizer("scale")
        scaled = optimizer.scale_loss(loss / self.gradient_accumulation_steps())
        return self._plain_backward.scaled_before(scaled)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of one micro-batch.

        Args:
            loss: scalar.
            retain_graph: as torch's.
            scale_wrt_gas: divide by the number of accumulation steps; False when the caller has done so.

        Returns:
            The loss, divided if asked for.

        Raises:
            RuntimeError: the engine has no optimizer, or the loss depends on no trainable parameter.
        """
        optimizer = self._training_optimizer("backward")
        if not loss.requires_grad:
            raise RuntimeError(
                "backward: expected a loss that depends on parameters that require grad, got a detached one: "
                "no gradient would arrive. Compute it from the engine's output, outside torch.no_grad()."
            )
        accumulation = self.gradient_accumulation_steps()
        self._reporter.saw_loss(loss if scale_wrt_gas else loss.detach() * accumulation)
        if scale_wrt_gas and accumulation > 1:
            loss = loss / accumulation
        with (
            self._reporter.backward(),
            optimizer.backward_pass(self.is_gradient_accumulation_boundary()),
            self._plain_backward.inactive(),
            self._reporter.backward_inner(),
        ):
            optimizer.scale_loss(loss).backward(retain_graph=retain_graph)
        self._progress.backwards += 1
        self.memory_timeline.mark("first backward", self.memory_report)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at an accumulation boundary, step optimizer and schedule.

        Args:
            lr_kwargs: passed to the schedule's `step`.
        """
        boundary = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        with self._reporter.part("step"):
            self._end_micro_batch(boundary, lr_kwargs)
        self._reporter.end_micro_step()
        if boundary:
            self._reporter.end_step(self.global_samples, self.get_lr(), self.cur_scale)
            self._log_progress()

    def _end_micro_batch(self, boundary: bool, lr_kwargs: dict[str, Any] | None) -> None:
        optimizer = self._training_optimizer("step")
        progress = self._progress
        if not progress.backwards:
            # The gradients come from loss.backward() without the engine and are still in param.grad.
            self._check_plain_backward()
        if not progress.backwards or not self.managed_gradient_accumulation():
            with optimizer.backward_pass(boundary):
                pass
        progress.step_applied = False
        if boundary:
            optimizer.step()
            self.memory_timeline.mark("first step", self.memory_report)
            progress.step_applied = not optimizer.overflow
            progress.global_steps += 1
            progress.global_samples += self._samples_of_step()
            if progress.step_applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        progress.micro_steps += 1
        progress.backwards = 0
        self._plain_backward.end_micro_step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` steps the optimizer by the engine's count.

        Without `managed_gradient_accumulation` there is no count: every `step` does, and this is False.
        """
        if self._progress.boundary is not None:
            return self._progress.boundary
        if not self.managed_gradient_accumulation():
            return False
        return (self._progress.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide from now on, instead of the engine's count, whether `step` steps the optimizer.

        Raises:
            RuntimeError: `managed_gradient_accumulation` is false: `step` itself is the boundary.
        """
        if not self.managed_gradient_accumulation():
            raise RuntimeError(
                "set_gradient_accumulation_boundary: expected managed_gradient_accumulation to be true, got "
                "false, with which every step() is a boundary. Call step() only where one is due."
            )
        self._progress.boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing.

        At stage 2 gradients are reduced all the same, since no rank keeps them whole.
        """
        if self.zero_optimization_stage() >= 2:
            self._warn_no_sync()
        before, self._progress.boundary = self._progress.boundary, False
        try:
            yield
        finally:
            self._progress.boundary = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no pass has reduced yet."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)
        else:
            self.module.zero_grad(set_to_none)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A data loader over this rank's part of a dataset.

        Args:
            dataset: map-style or iterable.
            batch_size: samples a batch; by default those of a micro-batch.
            route: accepted; every loader shuffles unless a sampler says otherwise.
            pin_memory: batches are page-locked, for faster copies to a GPU.
            data_sampler: in place of the one that gives each rank its part.
            collate_fn: makes a batch of samples.
            num_local_io_workers: processes that load; none by default.

        Source: signature of DeepSpeed 0.19.8, which starts two workers a device and page-locks by default.
        """
        from deepspeed.runtime.dataloader import DeepSpeedDataLoader

        options: dict[str, Any] = {"pin_memory": pin_memory, "num_workers": num_local_io_workers or 0}
        if data_sampler is not None:
            options["sampler"] = data_sampler
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            data_parallel_rank=self._comm.rank,
            data_parallel_world_size=self._comm.world,
            collate_fn=collate_fn,
            drop_last=self._config.dataloader_drop_last,
            **options,
        )

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module in place; parameter names stay as they are.

        Args:
            backend: of torch.compile; its default by default.
            compile_kwargs: more of torch.compile's arguments.
            schedule: of DeepCompile's passes; refused.
            compiled_autograd_enabled: refused when on.

        Raises:
            NotImplementedError: DeepCompile or compiled autograd is asked for.
        """
        if schedule is not None or compiled_autograd_enabled:
            refuse("compile", "DeepCompile or compiled autograd", "Leave schedule and the switch out.")
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)

    @property
    def is_compiled(self) -> bool:
        """Whether the module was compiled, by this engine or before."""
        return self.module._compiled_call_impl is not None

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """As `DeepSpeedZeroOptimizer.offload_states`: lend the device's memory to somebody else."""
        self._training_optimizer("offload_states").offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` moved."""
        self._training_optimizer("reload_states").reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Do nothing: what ZeRO-3 would cache does not exist here."""

    def destroy(self) -> None:
        """Return every byte; the module stays usable as an ordinary one."""
        self.wait_for_checkpoint()
        if self.optimizer is not None:
            self.optimizer.destroy()
            self.optimizer = None
        self.lr_scheduler = None

    # -- inner ---------------------------------------------------------------------------------------------

    def _samples_of_step(self) -> int:
        if self.managed_gradient_accumulation():
            return self.train_batch_size()
        return self._progress.backwards * self.train_micro_batch_size_per_gpu() * self._comm.world

    def _training_optimizer(self, call: str) -> DeepSpeedZeroOptimizer:
        if self.optimizer is None:
            raise RuntimeError(
                f"{call}: expected an optimizer, got none. Name one in the configuration or pass it to "
                "deepspeed.initialize; without one the engine only evaluates."
            )
        return self.optimizer

    def _warn_no_sync(self) -> None:
        if not self._progress.no_sync_warned:
            self._progress.no_sync_warned = True
            logger.warning("no_sync: no effect at zero_optimization.stage 2, where every pass is reduced")

    def _check_plain_backward(self) -> None:
        """Raises if gradients came by a way on which the loss scale cannot have been applied."""
        optimizer = self._training_optimizer("step")
        if self.cur_scale != 1.0 and not self._plain_backward.scaled and optimizer.has_local_grads():
            raise RuntimeError(
                f"step: expected gradients of a loss times the loss scale ({self.cur_scale:g}), got some "
                "from a backward pass that started beside the engine. Call engine.backward(loss), or "
                "compute the loss from engine(...)."
            )

    def _log_start(self) -> None:
        if self._comm.rank:
            return
        config, zero = self._config, self._config.zero_optimization
        logger.info(
            "DeepSpeed info: version=%s, zero stage=%d, offload=%s, dtype=%s, world=%d, clipping=%g%s",
            __version__,
            zero.stage,
            zero.offloads_optimizer,
            config.dtype,
            self._comm.world,
            config.gradient_clipping,
            " (the default of 0.19.8; set gradient_clipping to 0 for none)"
            if config.gradient_clipping_is_default
            else "",
        )
        if config.dump_state:
            logger.info("configuration: %s", config.model_dump_json(indent=2, by_alias=True))
        for notice in config.notices:
            logger.warning(notice)

    def _log_progress(self) -> None:
        every = self._config.steps_per_print
        if self._comm.rank or not every or math.isinf(every) or self.global_steps % int(every):
            return
        logger.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())


def _let_go(reference: weakref.ref[DeepSpeedEngine]) -> None:
    """Hold nothing any longer, at the interpreter's exit, so that a gloo group ends before it.

    One that outlives the interpreter aborts the process in one of three exits (torch 2.13), after a job that
    had succeeded.
    """
    engine = reference()
    if engine is not None:
        engine.__dict__.clear()
        gc.collect()  # hooks and closures hold one another
