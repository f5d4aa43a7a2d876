"""Base classes that clients test wrapped optimizers against."""


class DeepSpeedOptimizer:
    """What every optimizer returned by ``deepspeed.initialize`` derives from."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """What every optimizer that partitions its state derives from."""
