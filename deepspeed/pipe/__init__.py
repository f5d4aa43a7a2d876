"""Pipeline parallelism, which is not here; the names that clients import."""

from deepspeed.utils.unsupported import Unsupported

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class _Pipeline(Unsupported):
    feature = "pipeline parallelism"
    instead = "Pass an ordinary torch.nn.Module to deepspeed.initialize; use data parallelism only."


class PipelineModule(_Pipeline):
    """A module cut into pipeline stages."""


class LayerSpec(_Pipeline):
    """A layer to build on one stage."""


class TiedLayerSpec(_Pipeline):
    """A layer whose weights several stages share."""
