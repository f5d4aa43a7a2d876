"""ZeRO-3's optimizer, by name only: clients import it to patch it."""

from deepspeed.utils.unsupported import Unsupported


class DeepSpeedZeroOptimizer_Stage3(Unsupported):
    """The optimizer of ZeRO stage 3, which is not here."""

    feature = "ZeRO stage 3"
    instead = "Set zero_optimization.stage to 2 or less."
