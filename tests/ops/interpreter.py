"""For test files that run as programs: the GPU where there is one, else Triton's interpreter. See `conftest.found`."""

import numpy as np
import torch


def choose_device() -> str:
    """The device to test on; on a CPU the interpreter is made ready."""
    if torch.cuda.is_available():
        return "cuda"
    _interpret_bfloat16()
    np.seterr(all="ignore")  # outside of a tile
    return "cpu"


def _interpret_bfloat16():
    """Triton's interpreter multiplies the bits of bfloat16 as integers; here they become float32 first."""
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
