"""ZeRO-3's parameter hooks, by name only: clients import the class to patch it."""

from deepspeed.utils.unsupported import Unsupported


class DeepSpeedZeRoOffload(Unsupported):
    """Fetches and releases ZeRO-3 parameters around modules, which is not here."""

    feature = "ZeRO stage 3"
    instead = "Set zero_optimization.stage to 2 or less."
