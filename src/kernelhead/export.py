"""Networks and heads as files that run without this library: ONNX, and PyTorch's own exported programs (pt2).

Kernel heads are frozen on the way (`KernelClassifier.freeze`), the batch may be of any size, and every file is run
and compared with the network before it is put in its place.
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

from kernelhead.heads import KernelClassifier
from kernelhead.results import write_bytes

OPSET = 20
METADATA_FILE = "kernelhead.json"  # among the extra files of a pt2 file
CHECKED_BATCHES = (1, 3)
LIMITS = {torch.float64: 1e-3, torch.float32: 1e-3}  # of the largest logit; what differs by more is not written
LIMIT_OF_HALVES = 0.1
LARGEST_ONNX = 2**31 - 2**24  # bytes; protocol buffers end at 2 GiB


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how far its logits are from the network's at most, where that could be checked."""

    path: Path
    bytes: int
    difference: float | None


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
        example_input: (N, ...), of the shape and type that the file will take, but for N.
        input_name: what the file's input is called.
        metadata: goes into the file's own metadata, a key each, values that are not text as JSON.
    """
    _need("onnx", "onnxscript")
    path = _checked(path)
    prepared = _Prepared(module, example_input)
    if prepared.bytes > LARGEST_ONNX:
        size = prepared.bytes / 2**30
        raise ValueError(f"the network has {size:.1f} GiB, and an ONNX file can hold 2; export it as pt2 instead")
    with _quiet():
        content = _onnx_bytes(prepared.program(), input_name, metadata or {})
        session = _session(content) if find_spec("onnxruntime") else None
    difference = None
    if session is not None:
        difference = prepared.compare(lambda x: torch.from_numpy(session.run(None, {input_name: x.numpy()})[0]))
    return _write(path, content, difference)


def export_pt2(
    module: nn.Module, path: str | Path, example_input: Tensor, *, metadata: Mapping[str, Any] | None = None
) -> Exported:
    """Write a module as a pt2 file, for `torch.export.load(path).module()`.

    Arguments as of `export_onnx`; the metadata are the extra file `kernelhead.json`.
    """
    path = _checked(path)
    prepared = _Prepared(module, example_input)
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(prepared.program(), buffer, extra_files={METADATA_FILE: _as_json(metadata or {})})
        content = buffer.getvalue()
        loaded = torch.export.load(io.BytesIO(content)).module()
        difference = prepared.compare(loaded)
    return _write(path, content, difference)


class _Prepared:
    """A copy of a module, ready to be exported, and what the original gives for some inputs."""

    def __init__(self, module: nn.Module, example_input: Tensor) -> None:
        if not isinstance(example_input, Tensor) or not example_input.is_floating_point() or example_input.dim() < 2:
            raise TypeError("the example input must be one floating-point tensor whose first dimension is the batch")
        copied = copy.deepcopy(module).cpu().eval()
        random = torch.Generator().manual_seed(0)
        shape, self._dtype = example_input.shape[1:], example_input.dtype
        self._inputs = [torch.randn(n, *shape, generator=random).to(self._dtype) for n in CHECKED_BATCHES]
        with torch.no_grad():
            self._expected = [copied(x) for x in self._inputs]
        if not all(isinstance(logits, Tensor) for logits in self._expected):
            kind = type(self._expected[0]).__name__
            raise TypeError(
                f"{type(module).__name__} gives a {kind}; only modules that give one tensor can be exported"
            )
        self._module = _with_frozen_heads(copied)

    @property
    def bytes(self) -> int:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def program(self) -> torch.export.ExportedProgram:
        """The module as a program for batches of any size."""
        example = torch.zeros(2, *self._inputs[0].shape[1:], dtype=self._dtype)  # a batch of one would stay one
        batch = ({0: torch.export.Dim("batch")},)
        try:
            with torch.no_grad():
                program = torch.export.export(self._module, (example,), dynamic_shapes=batch, strict=False)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            name = type(self._module).__name__
            raise ValueError(f"{name} cannot be exported for batches of any size ({reason})") from error
        for node in program.graph.nodes:  # names of files on this machine, which are nobody's business
            node.meta.pop("stack_trace", None)
        return program

    def compare(self, run: Callable[[Tensor], Tensor]) -> float:
        """The largest difference between what `run` gives and what the original gave."""
        largest = 0.0
        for x, expected in zip(self._inputs, self._expected, strict=True):
            with torch.no_grad():
                difference = (run(x).double() - expected.double()).abs().max().item()
            limit = LIMITS.get(self._dtype, LIMIT_OF_HALVES) * max(1.0, expected.abs().max().item())
            if not difference <= limit:
                raise ValueError(
                    "the exported file does not compute what the network does: its output differs by "
                    f"{difference:.2g}; nothing was written"
                )
            largest = max(largest, difference)
        return largest


def _with_frozen_heads(module: nn.Module) -> nn.Module:
    """The same module with its kernel heads frozen; a class of somebody's own that computes otherwise is left alone."""

    def frozen(head: nn.Module) -> nn.Module:
        is_ours = isinstance(head, KernelClassifier) and type(head).forward is KernelClassifier.forward
        return head.freeze() if is_ours else head  # type: ignore[operator]

    if isinstance(module, KernelClassifier):
        return frozen(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, KernelClassifier):
                setattr(parent, name, frozen(child))
    return module


def _onnx_bytes(program: torch.export.ExportedProgram, input_name: str, metadata: Mapping[str, Any]) -> bytes:
    from onnxscript import optimizer

    names: dict[str, Any] = {"input_names": [input_name], "output_names": ["logits"]}
    # Not optimize=True: that takes constants below 1e-8 for zero, such as those that keep a quotient finite.
    options: dict[str, Any] = {"opset_version": OPSET, "external_data": False, "optimize": False, "verbose": False}
    exported = torch.onnx.export(program, dynamo=True, **names, **options)
    assert exported is not None
    optimizer.fold_constants(exported.model)
    optimizer.remove_unused_nodes(exported.model)
    model = exported.model_proto
    graph = model.graph
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == symbol:
                dimension.dim_param = "batch"
    # The exporter's notes on every node name files on this machine, and are most of a small file.
    for noted in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del noted.metadata_props[:]
    del model.metadata_props[:]
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value if isinstance(value, str) else _as_json(value))
    content: bytes = model.SerializeToString()
    return content


def _session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"onnxruntime cannot run the exported network ({reason}); nothing was written") from error


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file to write")
    return path


def _write(path: Path, content: bytes, difference: float | None) -> Exported:
    write_bytes(path, content)
    return Exported(path, len(content), difference)


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _need(*packages: str) -> None:
    for name in packages:
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f"an ONNX file needs {name}; pip install 'kernelhead[export]' brings it", name=name
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the exporters say to their own developers is kept from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
