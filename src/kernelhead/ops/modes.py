"""What torch may be doing to our operations beside plain autograd."""

import torch
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transformed() -> bool:
    """Whether torch.func or forward mode is at work, which cannot look into kernels with first derivatives only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
