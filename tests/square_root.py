"""torch's square root, rounded correctly on every processor.

torch takes it from Intel's MKL, which on an AMD processor is off by one spacing in every sixth number. The
kernel uses the processor's instruction, as torch's fused optimizers do. Tests that expect the bits of torch's
plain optimizers need those optimizers to round as arithmetic says.
"""

import torch

_own = torch.Tensor.sqrt


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """From float64, whose 53 bits are more than twice 24 and two: rounding twice is rounding once."""
    return _own(tensor.double()).to(tensor.dtype)


def round_correctly() -> None:
    """Replaces `torch.Tensor.sqrt` in this process, unless torch rounds correctly here."""
    values = torch.linspace(1.0, 4.0, 10_000)
    if not torch.equal(_own(values), _rounded(values)):
        torch.Tensor.sqrt = _rounded  # type: ignore[method-assign]
