"""When hand-written operations may stand in for torch's."""

from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

HAS_TRITON = find_spec("triton") is not None  # imported where it is used only


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def transformed() -> bool:
    """Whether torch.func or forward mode is at work, which cannot look into operations with first derivatives only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiated_by_torch() -> bool:
    """Whether a compiler, an exporter or a transform needs plain differentiable operations."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or transformed()


def at_hand(x: Tensor) -> bool:
    """Whether numbers of x can be asked for: on a CPU, where asking does not wait, and not of a fake or batched x."""
    plain = x.device.type == "cpu" and x.numel() > 0 and type(x) in (Tensor, nn.Parameter)
    return plain and not differentiated_by_torch()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels with bfloat16 run there: on CUDA from Ampere on, where triton is installed."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()  # it is not for a tensor without data
    return on_gpu and HAS_TRITON and torch.cuda.get_device_capability(device) >= (8, 0)
