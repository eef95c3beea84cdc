"""Networks and heads as files that run without this library: ONNX, and PyTorch's own exported programs (pt2).

Heads are frozen on the way (`Head.freeze`), and the batch may have any size. Every file is run and compared with the
network before it is kept.
"""

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernelhead.files import write_bytes
from kernelhead.heads import Head

OPSET = 20
CHECKED_BATCHES = (1, 3)
MAX_DIFFERENCE, MAX_HALF_DIFFERENCE = 1e-3, 0.1  # as shares of the largest logit; the second in half precision
MAX_ONNX_BYTES = 2**31 - 2**24  # protocol buffers end at 2 GiB

Run = Callable[[Tensor], Tensor]
Encode = Callable[[torch.export.ExportedProgram], tuple[bytes, Run]]


@dataclass(frozen=True)
class Exported:
    """A file that was written, and the largest difference of its logits from the network's."""

    path: Path
    bytes: int
    difference: float


def export_onnx(
    module: nn.Module,
    path: str | Path,
    example_input: Tensor,
    *,
    input_name: str = "input",
    metadata: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a module as one ONNX file with an input of any batch size and the output `logits`.

    Args:
        module: any module that makes one tensor of one tensor; it stays as it is. It is exported in evaluation mode.
        path: the file to write, whole or not at all.
        example_input: `(N, ...)`, of the type and, apart from N, the shape that the file will take.
        input_name: the name of the file's input.
        metadata: the file's own metadata. Values that are not text are written as JSON.

    Example:
        >>> export_onnx(kernelhead.KernelHead(64, 10), "head.onnx", torch.randn(1, 64)).difference < 1e-3
        True
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"ONNX export needs {name}; pip install 'kernelhead[export]'", name=name)

    import onnxruntime

    def encode(program: torch.export.ExportedProgram) -> tuple[bytes, Run]:
        size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
        if size > MAX_ONNX_BYTES:
            raise ValueError(f"an ONNX file holds 2 GiB; the network has {size / 2**30:.1f}, export it as pt2 instead")
        content = _onnx_bytes(program, input_name, metadata or {})
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            reason = f"onnxruntime cannot run the exported network: {_first_line(error)}"
            raise ValueError(f"{reason}; nothing was written") from error
        return content, lambda x: torch.from_numpy(session.run(None, {input_name: x.numpy()})[0])

    return _export(module, path, example_input, encode)


def export_pt2(
    module: nn.Module, path: str | Path, example_input: Tensor, *, metadata: Mapping[str, Any] | None = None
) -> Exported:
    """Write a module as a pt2 file, for `torch.export.load(path).module()`.

    Arguments as of `export_onnx`. The metadata go into the extra file `kernelhead.json`.
    """

    def encode(program: torch.export.ExportedProgram) -> tuple[bytes, Run]:
        buffer = io.BytesIO()
        extra = {"kernelhead.json": json.dumps(metadata or {}, ensure_ascii=False)}
        torch.export.save(program, buffer, extra_files=extra)
        return buffer.getvalue(), torch.export.load(io.BytesIO(buffer.getvalue())).module()

    return _export(module, path, example_input, encode)


@torch.no_grad()
def _export(module: nn.Module, path: str | Path, example_input: Tensor, encode: Encode) -> Exported:
    """Write what `encode` makes of the module's program, if running it gives the module's outputs."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file to write")
    if not isinstance(example_input, Tensor) or not example_input.is_floating_point() or example_input.dim() < 2:
        kind = getattr(example_input, "dtype", type(example_input).__name__)
        raise TypeError(f"example_input needs to be one floating-point tensor (N, ...); got {kind}")
    name, dtype, shape = type(module).__name__, example_input.dtype, example_input.shape[1:]
    copied = copy.deepcopy(module).cpu().eval()
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, *shape, generator=random).to(dtype) for n in CHECKED_BATCHES]
    outputs = [copied(x) for x in inputs]
    if not isinstance(outputs[0], Tensor):
        raise TypeError(f"{name} gives a {type(outputs[0]).__name__}; export a module that gives one tensor")
    example, batch = torch.zeros(2, *shape, dtype=dtype), torch.export.Dim("batch")  # a batch of one would stay one
    root = nn.ModuleDict({"module": copied})
    for path_of_head, head in list(root.named_modules(remove_duplicate=False)):
        if isinstance(head, Head):
            root.set_submodule(path_of_head, head.freeze())
    with _quiet():
        try:
            program = torch.export.export(root["module"], (example,), dynamic_shapes=({0: batch},), strict=False)
        except Exception as error:
            raise ValueError(f"{name} cannot be exported for batches of any size: {_first_line(error)}") from error
        for node in program.graph.nodes:  # names of files on this machine
            node.meta.pop("stack_trace", None)
        content, run = encode(program)
        found = [run(x) for x in inputs]
    share = MAX_DIFFERENCE if dtype.itemsize > 2 else MAX_HALF_DIFFERENCE
    differences: list[float] = []
    for output, its in zip(outputs, found, strict=True):
        limit = share * max(1.0, output.abs().max().item())
        differences.append((its.double() - output.double()).abs().max().item())
        if not differences[-1] <= limit:
            given = f"{differences[-1]:.2g}, more than {limit:.2g}"
            raise ValueError(f"the exported file differs from the network by {given}; nothing was written")
    write_bytes(Path(path), content)
    return Exported(Path(path), len(content), max(differences))


def _onnx_bytes(program: torch.export.ExportedProgram, input_name: str, metadata: Mapping[str, Any]) -> bytes:
    from onnxscript import optimizer

    exported = torch.onnx.export(
        program,
        dynamic_shapes=({0: "batch"},),  # a name for the file
        input_names=[input_name],
        output_names=["logits"],
        opset_version=OPSET,
        external_data=False,
        optimize=False,  # it would take constants below 1e-8 for zero, such as those that keep a quotient finite
        verbose=False,
    )
    assert exported is not None
    optimizer.fold_constants(exported.model)
    optimizer.remove_unused_nodes(exported.model)
    model = exported.model_proto
    graph = model.graph
    # The exporter's notes on every node name files on this machine, and make up most of a small file.
    for noted in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del noted.metadata_props[:]
    for key, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        model.metadata_props.add(key=key, value=text)
    return bytes(model.SerializeToString())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' notes to their own developers from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
