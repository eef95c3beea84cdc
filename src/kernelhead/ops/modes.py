"""When kernels of our own may stand in for torch's operations."""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transformed() -> bool:
    """Whether torch.func or forward mode is at work, which cannot look into kernels with first derivatives only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@lru_cache
def runs_kernels(device: torch.device) -> bool:
    """Whether those that multiply bfloat16 run there: on CUDA, and where triton is installed."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and find_spec("triton") is not None
    )
