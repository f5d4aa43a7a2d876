"""Adam and AdamW on the host, by one fused pass over memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ..op_builder import CPUAdamBuilder
from .host_threads import host_threads

# (name, numel, dtype) -> host tensor of that size
Allocator = Callable[[str, int, torch.dtype], torch.Tensor]

# torch's method without the wrapper that keeps torch.compile out of it: the wrapper imports the whole
# compiler, 76 MB of host memory a rank and a second of start, to protect code that nobody compiles here.
_ADD_PARAM_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamSlice:
    """A run of a flat parameter with everything that its step reads and writes; all on the host.

    Args:
        master: `[n]` floating; or int16, what the bf16 weight in `out` lacks of it.
        grad: `[n]` floating.
        exp_avg, exp_avg_sq: `[n]` floating; or uint8 codes.
        out: `[n]` floating, receives the new master in its own type; or None.
        ties: `[ceil(n / 16)]` int16, with an int16 master: see `ResidualMaster`.
        exp_avg_scale, exp_avg_sq_scale: `[ceil(n / 256)]` fp32, with codes: see `QuantizedMoment`.
        noise_key: 32 bits with which bf16 moments are rounded by chance; -1 to round to nearest.
        first: number of the first element, for that.
    """

    master: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor | None
    ties: torch.Tensor | None = None
    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None
    noise_key: int = -1
    first: int = 0

    @property
    def streams(self) -> tuple[torch.Tensor | None, ...]:
        """What every op takes."""
        return self.master, self.grad, self.exp_avg, self.exp_avg_sq, self.out

    @property
    def forms(self) -> dict[str, Any]:
        """What only the compiled op takes; empty when nothing is in a smaller form."""
        if self.ties is None and self.exp_avg_scale is None and self.noise_key < 0:
            return {}
        return {
            "ties": self.ties,
            "exp_avg_scale": self.exp_avg_scale,
            "exp_avg_sq_scale": self.exp_avg_sq_scale,
            "noise_key": self.noise_key,
            "first": self.first,
        }


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """Adam or AdamW on host tensors: fp32, bf16 or fp16 parameters, gradients of any of these types.

    One pass over memory a step: reads parameter, gradient and both moments, writes parameter and moments, 28
    bytes a parameter in fp32. State is `step` (an int of each parameter), `exp_avg` and `exp_avg_sq`: 8 bytes
    a parameter, or 4 with `fp32_optimizer_states=False` under 16-bit parameters. The step allocates nothing
    once state exists. Rounding follows torch.optim.Adam and AdamW, operation by operation; denormal values
    count as zero.

    There is no native object behind an instance, so there is nothing to free. Parameter groups are kept as
    the caller's own dict objects and read at each step; keys that torch's optimizers add are accepted.

    `num_threads` is how many threads a step uses; it may be set.

    Args:
        model_params: parameters or groups of them; contiguous, and on the host when `step` is called. lr:
        learning rate. bias_correction: correct the moments for their start at zero. betas: decay rates of the
        two moments. eps: added to the root of the second moment. weight_decay: decoupled (AdamW) or added to
        the gradient (Adam). 0 in both modes unless given. amsgrad: not supported. adamw_mode: AdamW if true,
        else Adam. fp32_optimizer_states: keep moments in fp32 whatever the parameter's type; else in the
        parameter's type. adam_w_mode: the same as `adamw_mode`, as FusedAdam spells it.

    Raises:
        NotImplementedError: amsgrad or maximize.
        RuntimeError: the op does not compile here.
        ValueError: a setting out of range.

    Source: signature and state names of DeepSpeed 0.19.8; arithmetic of torch.optim.AdamW.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        adam_w_mode: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
        }
        self.adam_w_mode = adamw_mode if adam_w_mode is None else adam_w_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, defaults)
        self._op: ModuleType = CPUAdamBuilder().load()
        self.num_threads = host_threads()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what copies and pickles keep: all but the op, which each process loads for itself."""
        return {key: value for key, value in self.__dict__.items() if key != "_op"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, or (from torch) groups that another optimizer saved."""
        super().__setstate__(state)
        if "_op" not in self.__dict__:
            self._op = CPUAdamBuilder().load()
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, checked.

        Args:
            param_group: `params` and any settings that differ from the defaults.
        """
        _check_settings({**self.defaults, **param_group})
        _ADD_PARAM_GROUP(self, param_group)

    def init_state(self, param: torch.Tensor, allocate: Allocator | None = None) -> None:
        """Creates the state of one parameter: step 0 and zeroed moments.

        Args:
            param: a parameter of this optimizer.
            allocate: makes a moment from its name, numel and dtype; zeroed here. By default torch does.
        """
        moment_dtype = torch.float32 if self.fp32_optimizer_states else param.dtype
        state: dict[str, Any] = {"step": 0}
        for name in _MOMENTS:
            if allocate is None:
                state[name] = torch.zeros(param.shape, dtype=moment_dtype, device="cpu")
            else:
                state[name] = allocate(name, param.numel(), moment_dtype).zero_()
        self.state[param] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: recomputes the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a parameter, gradient or moment that is not a contiguous float tensor on the host.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                _check_place(param)
                if not self.state[param]:
                    self.init_state(param)
                state = self.state[param]
                state["step"] = int(state["step"]) + 1
                moments = state["exp_avg"], state["exp_avg_sq"]
                numbers = self._hyper(group, state["step"], 1.0)
                self._op.adam_step(param, param.grad, *moments, None, *numbers, self.num_threads)
        return loss

    def make_queue(self, num_threads: int) -> Any:
        """Returns threads that compute slices in order beside the caller, or None if the op has none.

        Args:
            num_threads: how many; they sleep while nothing is queued, and end with the object.
        """
        return self._op.AdamQueue(num_threads) if hasattr(self._op, "AdamQueue") else None

    def step_slice(self, group: dict[str, Any], step: int, part: AdamSlice, grad_scale: float) -> None:
        """Updates a part of a flat parameter; outputs are written past the cache.

        Args:
            group: settings, read now.
            step: number of this step, from 1.
            part: what to update.
            grad_scale: multiplies the gradient first.
        """
        hyper = self._hyper(group, step, grad_scale)
        self._op.adam_step(*part.streams, *hyper, self.num_threads, **part.forms)

    def submit_slice(
        self, queue: Any, group: dict[str, Any], step: int, part: AdamSlice, grad_scale: float
    ) -> Callable[[], None]:
        """As `step_slice`, on a queue's threads, with the output left in the cache.

        Args:
            queue: from `make_queue`. The others: see `step_slice`.

        Returns:
            A function that waits for it, and keeps the tensors alive.
        """
        ticket = queue.submit(*part.streams, *self._hyper(group, step, grad_scale), **part.forms)
        return partial(_wait_ticket, queue, ticket, part)

    def _hyper(self, group: dict[str, Any], step: int, grad_scale: float) -> tuple[float, ...]:
        """The numbers that the op takes, in its order."""
        beta1, beta2 = group["betas"]
        return (
            step,
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            self.adam_w_mode,
            bool(group["bias_correction"]),
            grad_scale,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state, moments in the type they were saved in.

        torch's own loading casts state to the parameter's type: fp32 moments of bf16 parameters would be
        rounded. Moments that exist already in the saved shape and type are overwritten in place.

        Args:
            state_dict: of this class, or of torch.optim.Adam or AdamW.
        """
        present = dict(self.state)
        super().load_state_dict({**state_dict, "state": {}})
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved, state = state_dict["state"].get(saved_id), present.get(param)
            if not saved and not state:
                continue
            state = self.state[param] = state or {}
            state["step"] = int(saved["step"]) if saved else 0
            for name in _MOMENTS:
                _load_moment(state, name, saved)


def _wait_ticket(queue: Any, ticket: int, part: AdamSlice) -> None:
    queue.wait(ticket)


def _load_moment(state: dict[str, Any], name: str, saved: dict[str, Any] | None) -> None:
    """Takes a moment from a saved state into the tensor that is there, if it fits.

    Without a saved state, zeros.
    """
    own = state.get(name)
    if not saved:
        state[name].zero_()
    elif own is not None and (own.shape, own.dtype) == (saved[name].shape, saved[name].dtype):
        own.copy_(saved[name])
    else:
        state[name] = saved[name].detach().to("cpu", copy=True).contiguous()


def _check_place(param: torch.Tensor) -> None:
    if param.device.type != "cpu" or not param.is_contiguous():
        raise ValueError(
            f"params: expected contiguous CPU tensors, got shape {tuple(param.shape)} with strides "
            f"{param.stride()} on {param.device}. Keep them contiguous on the host, or use FusedAdam."
        )


def _check_settings(group: dict[str, Any]) -> None:
    for key in ("amsgrad", "maximize"):
        if group.get(key):
            raise NotImplementedError(
                f"{key}: expected False, got {group[key]}. Leave it out, or use torch.optim.AdamW."
            )
    beta1, beta2 = group["betas"]
    ranges = {
        "lr": (float(group["lr"]) >= 0, "a number of 0 or more"),
        "eps": (group["eps"] >= 0, "a number of 0 or more"),
        "weight_decay": (group["weight_decay"] >= 0, "a number of 0 or more"),
        "betas": (0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers from 0 up to but without 1"),
    }
    for key, (valid, constraint) in ranges.items():
        if not valid:
            raise ValueError(
                f"{key}: expected {constraint}, got {group[key]}. Correct the optimizer's settings."
            )
