"""`save_checkpoint`, `load_checkpoint` and what belongs to them, as methods of the engine."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed.runtime.checkpoint.agreement import Agreement
from deepspeed.runtime.checkpoint.background import PendingSave
from deepspeed.runtime.checkpoint.load import Loaded, Loader, LoadRequest, load_into
from deepspeed.runtime.checkpoint.model_states import (
    Counters,
    ModelParts,
    client_state_of,
    counters_of,
    model_states,
    without_frozen,
)
from deepspeed.runtime.checkpoint.names import MODEL_STATES, default_tag, optim_states_name
from deepspeed.runtime.checkpoint.optim_states import optim_states
from deepspeed.runtime.checkpoint.save import Saver, SaveRequest
from deepspeed.runtime.checkpoint.stage_0 import stage_0_state
from deepspeed.runtime.checkpoint.weights import write_weights
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.change_gate import ChangeGate
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class CheckpointMixin:
    """The engine's side of checkpoints: says what there is to save and takes over what was loaded."""

    module: torch.nn.Module
    optimizer: DeepSpeedZeroOptimizer | None
    lr_scheduler: Any
    _config: DeepSpeedConfig
    _comm: Comm
    _progress: Any
    _agreement: Agreement
    _pending_save: PendingSave | None = None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save model, optimizer, schedule and counters. Every rank calls it.

        What stood in the folder stays loadable until the new checkpoint is complete on disk. Nothing is
        copied in memory.

        Args:
            save_dir: the checkpoint folder, the same on every rank.
            tag: name of the subfolder, the same on every rank; by default `global_step<N>`.
            client_state: the client's own values, returned by `load_checkpoint`.
            save_latest: let the file `latest` name this tag.
            exclude_frozen_parameters: leave out weights that require no gradient.

        Returns:
            True.

        Raises:
            CheckpointError: it cannot be written, a rank is missing, or the ranks disagree; the same on every
            rank.

        Source: signature and files of DeepSpeed 0.19.8.
        """
        zero_stage = int(self._config.zero_optimization.stage)
        request = SaveRequest(
            folder=Path(save_dir),
            tag=default_tag(self._progress.global_steps) if tag is None else str(tag),
            save_latest=save_latest,
            sharded=self.optimizer is not None and zero_stage > 0,
            bf16=self._config.bf16.enabled,
            node_local=self._config.checkpoint.use_node_local_storage,
        )
        self.wait_for_checkpoint()
        saver = Saver(self._comm, self._agreement)
        contents = partial(
            self._checkpoint_contents,
            request,
            saver.is_committer(request),
            client_state,
            exclude_frozen_parameters,
        )
        gate = self._checkpoint_gate(request)
        if gate is None:
            saver.save(request, contents)
        else:
            self._pending_save = saver.save_later(request, contents, gate)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until a save under `checkpoint.async_save` is complete; nothing to do without one.

        The next save, load and `destroy` do so by themselves.

        Raises:
            CheckpointError: that save failed; the same on every rank.
        """
        pending, self._pending_save = self._pending_save, None
        if pending is not None:
            pending.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` or stock saved, on any number of ranks. Every rank calls it.

        Everything is checked before anything changes. If the optimizer's state is not loaded, its masters are
        set from the loaded weights.

        Args:
            load_dir: the checkpoint folder.
            tag: name of the subfolder; by default what the file `latest` names.
            load_module_strict: model and file must have the same names.
            load_optimizer_states: load masters, optimizer state and loss scale.
            load_lr_scheduler_states: load the schedule.
            load_module_only: load weights and nothing else.
            custom_load_fn: called as `custom_load_fn(src=weights, dst=module)` instead of the module's way.

        Returns:
            The path of the model file and the client's state, or (None, None) if no tag is given and there
            is no `latest`.

        Raises:
            CheckpointError: it is incomplete, damaged or does not fit; the same on every rank.

        Source: signature and returned values of DeepSpeed 0.19.8.
        """
        wants_optimizer = load_optimizer_states and not load_module_only
        request = LoadRequest(
            folder=Path(load_dir),
            tag=None if tag is None else str(tag),
            strict=load_module_strict,
            node_local=self._config.checkpoint.use_node_local_storage,
        )
        self.wait_for_checkpoint()
        loader = Loader(self._comm, self._agreement)
        loaded = loader.check(
            request,
            self.module if custom_load_fn is None else None,
            self.optimizer if wants_optimizer else None,
        )
        if loaded is None:
            return None, None
        steps: list[Callable[[], Any]] = [
            partial(self.load_module_state_dict, loaded.model, load_module_strict, custom_load_fn)
        ]
        steps += self._optimizer_steps(loaded)
        if not load_module_only:
            steps.append(partial(self._load_progress, loaded.model, load_lr_scheduler_states))
        loader.copy(steps)
        return str(loaded.path), client_state_of(loaded.model)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the module's state dictionary as it is, for use without DeepSpeed. Every rank calls it.

        Args:
            save_dir: folder; made if absent.
            save_filename: name of the file.
            exclude_frozen_parameters: leave out weights that require no gradient.

        Returns:
            True.

        Source: signature and file of DeepSpeed 0.19.8.
        """
        self.wait_for_checkpoint()
        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        write_weights(Path(save_dir) / save_filename, weights, self._comm.rank == 0, self._agreement)
        return True

    def save_fp16_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """The older name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Mapping[str, torch.Tensor]:
        """The module's state dictionary; what `save_checkpoint` saves under `module`.

        Args:
            destination: dictionary to fill, as torch's.
            prefix: of every name.
            keep_vars: parameters instead of detached tensors.
            exclude_frozen_parameters: leave out weights that require no gradient.
        """
        weights = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return without_frozen(self.module, weights, prefix) if exclude_frozen_parameters else weights

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load weights into the module.

        Args:
            checkpoint: the content of a model file; its weights are under `module`. strict: model and file
            must have the same names. custom_load_fn: called as `custom_load_fn(src=weights, dst=module)`
            instead of the module's own way.
        """
        weights = checkpoint["module"]
        if custom_load_fn is not None:
            custom_load_fn(src=weights, dst=self.module)
        else:
            self.module.load_state_dict(OrderedDict(weights), strict=strict)

    def _checkpoint_gate(self, request: SaveRequest) -> ChangeGate | None:
        """What lets training go on behind a save; None if it has to wait for the save."""
        if not self._config.checkpoint.async_save or self.optimizer is None or not request.sharded:
            return None
        master = self.optimizer.parts.master
        gate = ChangeGate(len(self.optimizer.parts.groups))
        return gate if master.guard(gate) else None

    def _checkpoint_contents(
        self, request: SaveRequest, commits: bool, client_state: Mapping[str, Any], exclude_frozen: bool
    ) -> dict[str, Any]:
        """The content of each file that this rank writes, by file name."""
        contents: dict[str, Any] = {}
        config, clip_grad = dict(self._config.raw), self._config.gradient_clipping
        if commits:
            whole = None
            if self.optimizer is not None and not request.sharded:
                whole = stage_0_state(self.optimizer, clip_grad)
            parts = ModelParts(
                module=self.module,
                weights=self.module_state_dict(exclude_frozen_parameters=exclude_frozen),
                zero=self.optimizer.parts if self.optimizer is not None else None,
                optimizer=whole,
                lr_scheduler=self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
                counters=self._counters(),
                world=self._comm.world,
                ds_config=config,
            )
            contents[MODEL_STATES] = model_states(parts, client_state, exclude_frozen)
        if request.sharded:
            assert self.optimizer is not None
            name = optim_states_name(self._comm.rank, request.bf16)
            contents[name] = optim_states(self.optimizer, clip_grad, config)
        return contents

    def _optimizer_steps(self, loaded: Loaded) -> list[Callable[[], Any]]:
        """What brings the optimizer to the loaded state, or its masters to the loaded weights."""
        if self.optimizer is None:
            return []
        if loaded.optimizer is None:
            return [self.optimizer.refresh_fp32_params]
        steps: list[Callable[[], Any]] = [partial(load_into, loaded, self.optimizer, self._comm.rank == 0)]
        weights, params = loaded.model["module"], self.optimizer.parts
        if any(
            weights[name].dtype != params.params[i].dtype
            for i, name in params.names.items()
            if name in weights
        ):
            # Weights saved in another type are rounded twice, or not exact: take them from the masters.
            steps.append(self.optimizer.publish_masters)
        return steps

    def _counters(self) -> Counters:
        progress = self._progress
        skipped = self.optimizer.skipped_steps if self.optimizer is not None else 0
        return Counters(skipped, progress.global_steps, progress.global_samples, progress.micro_steps)

    def _load_progress(self, model: Mapping[str, Any], load_lr_scheduler_states: bool) -> None:
        """Take over the schedule and the counters; an accumulation under way does not resume."""
        counters = counters_of(model)
        self._progress.global_steps = counters.global_steps
        self._progress.global_samples = counters.global_samples
        self._progress.micro_steps = (
            counters.micro_steps - counters.micro_steps % self._config.gradient_accumulation_steps
        )
        if self.optimizer is not None:
            self.optimizer.restore_skipped_steps(counters.skipped_steps)
        if (
            load_lr_scheduler_states
            and self.lr_scheduler is not None
            and model.get("lr_scheduler") is not None
        ):
            self.lr_scheduler.load_state_dict(model["lr_scheduler"])
