"""Tensors of stock's that live in host buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .host_buffer import HostBuffer, Ledger

_MOMENTS = ("exp_avg", "exp_avg_sq")


class HostMemory:
    """Makes host buffers for one optimizer, and moves tensors into them where they are.

    A tensor that is moved stays the same object: whoever holds it sees the new memory. What was narrowed from
    it before still sees the old.

    Args:
        owner: what the ledger says of the buffers.
    """

    def __init__(self, owner: str) -> None:
        self.ledger = Ledger()
        self._owner = owner
        self._buffers = WeakIdKeyDictionary()  # tensor -> its HostBuffer

    def zeros(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor; its pages become resident when they are written.

        Args:
            name: for the ledger.
            shape: any.
            dtype: element type.
        """
        buffer = HostBuffer(name, shape.numel(), dtype, self.ledger, owner=self._owner)
        tensor = buffer.tensor.view(shape)
        self._buffers[tensor] = buffer
        return tensor

    def move(self, name: str, tensor: torch.Tensor) -> None:
        """Give a tensor a buffer of its own, unless it has one, is page-locked, or is on a device.

        Page-locked memory is not shared with forked children, so there is nothing to gain.

        Args:
            name: for the ledger.
            tensor: any shape and dtype; keeps its values.
        """
        held = self._buffers.get(tensor)
        if held is not None and held.tensor.data_ptr() == tensor.data_ptr():
            return
        if tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.is_pinned():
            return
        buffer = HostBuffer(name, tensor.numel(), tensor.dtype, self.ledger, owner=self._owner)
        place = buffer.tensor.view(tensor.shape)
        place.copy_(tensor.detach())
        tensor.data = place
        self._buffers[tensor] = buffer

    def hold_moments(self, optimizer: Any, param: torch.Tensor, name: str) -> None:
        """Give a parameter of stock's DeepSpeedCPUAdam its state in host buffers before the first step does.

        Args:
            optimizer: the DeepSpeedCPUAdam.
            param: a flat master with a gradient.
            name: what follows the moment's name in the ledger.
        """
        state = optimizer.state[param]
        if not state:
            dtype = torch.float32 if optimizer.fp32_optimizer_states else param.dtype
            state["step"] = 0
            for moment in _MOMENTS:
                state[moment] = self.zeros(f"{moment}[{name}]", param.shape, dtype)
        self.move_moments(optimizer, param, name)

    def move_moments(self, optimizer: Any, param: torch.Tensor, name: str) -> None:
        """Move the moments that a parameter has.

        Args:
            optimizer: any torch optimizer. The others: see `hold_moments`.
        """
        for moment in _MOMENTS:
            tensor = optimizer.state.get(param, {}).get(moment)
            if isinstance(tensor, torch.Tensor):
                self.move(f"{moment}[{name}]", tensor)
