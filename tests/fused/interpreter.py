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


def captured(compute, *inputs):
    """Whether two calls as parallel branches of a CUDA graph give the bits of a plain one.

    `compute` takes tensors and returns some, gradients among them: each branch has inputs of its own, as a gradient
    belongs to the stream on which its input was made.
    """
    expected = [x.detach() for x in compute(*inputs)]
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        branches = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                own = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
                branches.append([x.detach() for x in compute(*own)])
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
    for _ in range(3):
        for branch in branches:
            for tensor in branch:
                tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not all(torch.equal(*pair) for branch in branches for pair in zip(branch, expected, strict=True)):
            return False
    return True


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
