"""When kernels of our own may stand in for torch's operations."""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transformed() -> bool:
    """Whether torch.func or forward mode is at work, which cannot look into kernels with first derivatives only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs_kernels(device: torch.device) -> bool:
    """Whether those that multiply bfloat16 run there: on CUDA from Ampere on, and where triton is installed.

    They import it where they are used: `import kernelhead` does without.
    """
    return _runs_kernels(device)


@lru_cache
def _runs_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available():  # as for a tensor without data
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and find_spec("triton") is not None
