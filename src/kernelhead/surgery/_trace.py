"""One run of a copy of a network on tensors without data, written down as a graph.

The copy shares no tensor with the network and computes nothing: running statistics, caches and random numbers of the
network stay as they are, and a large network costs no memory. Where a network looks at its numbers while it runs,
which tensors without data don't have, a real copy runs instead.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a network
Prepare = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], None]
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@dataclass(eq=False)
class Node:
    """A tensor of the run and the operation that made it."""

    op: str
    """The operation's name, as "mean"; "" for a parameter, a constant or an input of the network."""
    shape: tuple[int, ...]
    inputs: tuple["Node", ...] = ()
    """What it was made of, parameters and constants left out."""
    arguments: tuple[Any, ...] = ()
    scope: tuple[str, ...] = ()
    """Names of the modules that were running, the innermost last."""
    constant: bool = False
    floating: bool = True

    @property
    def sources(self) -> tuple["Node", ...]:
        """Its inputs without masks and indices, where there are others."""
        return tuple(node for node in self.inputs if node.floating) or self.inputs


@dataclass(eq=False)
class Call:
    """One call of a module (of the copy): its first argument and its result, where they are tensors."""

    name: str
    module: nn.Module
    input: Node | None
    scope: tuple[str, ...]
    output: Node | None = None


@dataclass(eq=False)
class Trace:
    """What happened in a run, in order."""

    calls: list[Call] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    """The logits; several tensors where the network doesn't say which of them are the logits."""
    attempt: int = 0
    """Which of the inputs went through."""

    def calls_of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation, and through hooks every call of a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {module: name for name, module in model.named_modules()}
        for module in self.names:
            self._watch(module)

    def start(self, inputs: Inputs) -> None:
        """Begin anew, with these inputs."""
        self.trace = Trace()
        self.open: list[Call] = []
        self.nodes: dict[int, Node] = {}
        self.kept: list[Tensor] = []  # so that no address is used twice
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                self._add(tensor, Node("", tuple(tensor.shape), floating=tensor.is_floating_point()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = tuple(node for tensor in tensors if not (node := self.node(tensor)).constant)
        scope = tuple(call.name for call in self.open)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                floating = tensor.is_floating_point()
                node = Node(
                    func.overloadpacket.__name__, tuple(tensor.shape), inputs, args, scope, not inputs, floating
                )
                self.trace.nodes.append(node)
                self._add(tensor, node)
        return result

    def node(self, tensor: Tensor) -> Node:
        """The node of a tensor. One never seen was made outside of the run: a constant."""
        if id(tensor) not in self.nodes:
            self._add(tensor, Node("", tuple(tensor.shape), constant=True))
        return self.nodes[id(tensor)]

    def _add(self, tensor: Tensor, node: Node) -> None:
        self.kept.append(tensor)
        self.nodes[id(tensor)] = node

    def _watch(self, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = self.node(args[0]) if args and isinstance(args[0], Tensor) else None
            call = Call(self.names[module], module, first, tuple(call.name for call in self.open))
            self.trace.calls.append(call)
            self.open.append(call)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.open.pop().output = self.node(output) if isinstance(output, Tensor) else None

        # Outermost on both sides, so that hooks of the module's own belong to its call.
        module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(leave, with_kwargs=True)


def logits_of(output: Any) -> list[Tensor]:
    """The tensors among which the logits are: `output.logits` where there is such a thing."""
    logits = getattr(output, "logits", None)
    return [logits] if isinstance(logits, Tensor) else [x for x in tree_leaves(output) if isinstance(x, Tensor)]


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def trace(
    model: nn.Module,
    inputs: Callable[[], Iterable[Inputs]],
    prepare: Prepare | None = None,
) -> Trace:
    """Run a copy of `model` in evaluation mode on the first of `inputs` that goes through.

    `prepare(copy, twin)` changes the copy before it runs; `twin(module)` is what it may put in for another module.
    Raises the error of the first input where none goes through.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        return _run(model, inputs, prepare, mode)
    except NEEDS_DATA:
        return _run(model, inputs, prepare, None)


def _run(
    model: nn.Module,
    inputs: Callable[[], Iterable[Inputs]],
    prepare: Prepare | None,
    mode: FakeTensorMode | None,
) -> Trace:
    def make_twin(module: nn.Module) -> nn.Module:
        memo = {} if mode is None else {id(tensor): mode.from_tensor(tensor) for tensor in tensors_of(module)}
        return copy.deepcopy(module, memo)  # what stands in the memo is not copied

    twin = make_twin(model)
    first_error: Exception | None = None
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad(), mode or nullcontext():
        if prepare is not None:
            prepare(twin, make_twin)
        twin.eval()
        recorder = _Recorder(twin)
        for attempt, given in enumerate(inputs()):
            args, kwargs = given if mode is None else _fake(mode, given)
            recorder.start((args, kwargs))
            try:
                with recorder:
                    output = twin(*args, **kwargs)
                recorder.trace.outputs = [recorder.node(tensor) for tensor in logits_of(output)]
                recorder.trace.attempt = attempt
                return recorder.trace
            except NEEDS_DATA:
                raise
            except Exception as error:  # whatever a network raises on input it can't take
                first_error = first_error or error
    raise first_error or ValueError("no input is known for it")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of operations that fail: a try that fails is no error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _fake(mode: FakeTensorMode, inputs: Inputs) -> Inputs:
    def convert(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x

    args, kwargs = tree_map(convert, inputs)
    return args, kwargs
