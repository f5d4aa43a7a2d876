"""The expert layer, by name only."""

from deepspeed.utils.unsupported import Unsupported


class MoE(Unsupported):
    """A mixture-of-experts layer with its experts spread over ranks, which is not here."""

    feature = "expert parallelism"
    instead = "Keep every expert on every rank: ordinary modules with experts train under ZeRO 0 to 2."
