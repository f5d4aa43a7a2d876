"""Optimizer steps on the host, and the compiled op behind them."""

from . import adagrad, adam, aio, lion, op_builder

__all__ = ["adagrad", "adam", "aio", "lion", "op_builder"]

# What clients ask before they offer a feature: op name -> does this distribution have it. Nothing is built to
# answer.
__compatible_ops__: dict[str, bool] = {
    "async_io": False,
    "cpu_adagrad": True,
    "cpu_adam": True,
    "cpu_lion": True,
    "deepspeed_not_implemented": False,
    "fused_adam": True,
}
