"""Masters, gradients and moments in host memory that forked children do not share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .host_memory import HostMemory
from .shapes import Shape
from .stage_base import Stage12, ZeroOptimizer, adam_is_stocks

# A private name of stock's stage 3, as Python spells it outside its class.
_GRAD_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class HostState12(Stage12):
    """Stages 1 and 2. Memory: master 4, gradient 4, moments 8 bytes an element of the shard, once."""

    SHAPES: ClassVar[dict[str, Shape]] = {
        "initialize_optimizer_states": Shape(
            ("self",), ("single_partition_of_fp32_groups", "partition_size", "grad", "Adagrad")
        ),
        "load_state_dict": Shape(
            (
                "self",
                "state_dict_list",
                "load_optimizer_states",
                "load_from_fp32_weights",
                "checkpoint_folder",
                "load_serial",
                "param_shapes",
            )
        ),
        "_optimizer_step": Shape(("self", "group_no"), ("param_groups", "step")),
        "_lazy_init_hp_params_optimizer_state": Shape(("self",), ("_hp_optimizer_states_linked",)),
    }

    def initialize_optimizer_states(self) -> None:
        """Moves masters, and makes gradients where they are to stay."""
        if not self.on_host or isinstance(self.optimizer, torch.optim.Adagrad):
            super().initialize_optimizer_states()
            return
        memory = self.lean.memory
        for index, master in enumerate(self.single_partition_of_fp32_groups):
            memory.move(f"master[{index}]", master)
            numel = int(self.partition_size[index])
            gradient = memory.zeros(f"gradient[{index}]", torch.Size([numel]), master.dtype)
            # Stock's own copies to the host go to the gradient itself.
            if self.cpu_offload_pin_memory:
                gradient = _accelerator().pin_memory(gradient)
            master.grad = gradient

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As stock's; moments that came with the file are moved."""
        super().load_state_dict(*args, **kwargs)
        if self.on_host:
            for index, group in enumerate(self.optimizer.param_groups):
                for param in group["params"]:
                    self.lean.memory.move_moments(self.optimizer, param, str(index))
            self._relink_moments()

    def _relink_moments(self) -> None:
        """Have parameters look at their moments where these are now, if they looked at any."""
        mappings = [getattr(param, "_hp_mapping", None) for group in self.bit16_groups for param in group]
        if any(mapping is not None and mapping.optim_fragment for mapping in mappings):
            self._hp_optimizer_states_linked = False
            self._lazy_init_hp_params_optimizer_state()

    def _optimizer_step(self, group_no: int) -> None:
        if self.on_host and adam_is_stocks(self.optimizer):
            for param in self.optimizer.param_groups[group_no]["params"]:
                self.lean.memory.hold_moments(self.optimizer, param, str(group_no))
        super()._optimizer_step(group_no)


class HostState3(ZeroOptimizer):
    """Stage 3 with the optimizer on the host, not on NVMe."""

    SHAPES: ClassVar[dict[str, Shape]] = {
        "_setup_for_real_optimizer": Shape(
            ("self",),
            ("grad_partitions_flat_buffer", _GRAD_PARTITIONS, "narrow", "initialize_optimizer_states"),
        ),
        "initialize_optimizer_states": Shape(("self",), ("fp32_partitioned_groups_flat", "grad")),
        "_optimizer_step": Shape(("self", "sub_group_id"), ("fp32_partitioned_groups_flat",)),
    }
    lean_memory: HostMemory | None = None

    def _setup_for_real_optimizer(self) -> None:
        super()._setup_for_real_optimizer()
        if not self.offload_optimizer or self.swap_optimizer or self.zenflow:
            return
        memory = self.lean_memory = HostMemory("DeepSpeedZeroOptimizer_Stage3")
        for index, master in enumerate(self.fp32_partitioned_groups_flat):
            memory.move(f"master[{index}]", master)
            if master.grad is not None:
                memory.move(f"gradient[{index}]", master.grad)
        self._move_grad_partitions(memory)

    def _move_grad_partitions(self, memory: HostMemory) -> None:
        """Move the buffer in which gradients arrive; every parameter holds a part of it."""
        flat = self.grad_partitions_flat_buffer
        before = flat.data_ptr()
        memory.move("gradient partitions", flat)
        if flat.data_ptr() != before:
            parts = getattr(self, _GRAD_PARTITIONS)
            for key, part in parts.items():
                parts[key] = flat.narrow(0, part.storage_offset(), part.numel())

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As stock's; moments that came with the file are moved."""
        super().load_state_dict(*args, **kwargs)
        if self.lean_memory is not None:
            for index, master in enumerate(self.fp32_partitioned_groups_flat):
                self.lean_memory.move_moments(self.optimizer, master, str(index))

    def _optimizer_step(self, sub_group_id: int) -> None:
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        if self.lean_memory is not None and master.device.type == "cpu" and adam_is_stocks(self.optimizer):
            self.lean_memory.hold_moments(self.optimizer, master, str(sub_group_id))
        super()._optimizer_step(sub_group_id)


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
