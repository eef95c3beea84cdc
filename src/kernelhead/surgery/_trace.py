"""A run of a copy of a network on tensors without data, recorded as a graph.

The copy shares no tensor with the network and computes nothing: the network's running statistics, caches and random
numbers stay as they are, and a large network costs no memory. A network that looks at its numbers while it runs, which
tensors without data don't have, is run as a real copy instead.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a network
Heads = Mapping[str, nn.Module]  # by the names of their layers
Edit = Callable[[nn.Module, Heads], None]  # a change to a network, or to a copy of it
SIDES = (224, 32, 28, 64, 256, 128, 384, 299)  # of images, if the network doesn't say
TOKENS = 8
NEEDS_DATA = (  # errors of a run without data
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)


@dataclass(eq=False)
class Node:
    """A tensor of the run and the operation that made it."""

    op: str  # such as "mean"; "" for an input of the network
    shape: tuple[int, ...]
    floating: bool
    inputs: tuple["Node", ...] = ()  # the tensors that it was made of, without parameters and constants
    arguments: tuple[Any, ...] = ()
    scope: tuple[str, ...] = ()  # names of the modules that were running, the innermost last

    @property
    def sources(self) -> tuple["Node", ...]:
        """The floating-point inputs, without masks and indices; all inputs where there is no other."""
        return tuple(node for node in self.inputs if node.floating) or self.inputs

    def __str__(self) -> str:
        return f"{self.op!r}" + (f" in {self.scope[-1]!r}" if any(self.scope) else "")


@dataclass(eq=False)
class Call:
    """One call of a module of the copy: its first argument and its result, where they depend on the network's input."""

    name: str
    module: nn.Module
    input: Node | None
    output: Node | None = None


def walk_back(nodes: Iterable[Node], beyond: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield nodes and the tensors that they were made of, each once, and go beyond a node only where told to."""
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if beyond(node):
                waiting.extend(node.sources)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A copy of a network, and every operation and every call of a module in its latest run, in order."""

    def __init__(self, model: nn.Module, edit: Edit | None, heads: Heads, fake: fake_tensor.FakeTensorMode | None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        tensors = [tensor for module in (model, *heads.values()) for tensor in tensors_of(module)]
        memo = {} if fake is None else {id(each): fake.from_tensor(each) for each in tensors}
        self.twin, heads = copy.deepcopy((model, heads), memo)  # tensors in the memo are not copied
        if edit is not None:
            with fake or nullcontext():
                edit(self.twin, heads)
        self.twin.eval()
        for name, module in self.twin.named_modules():
            # Outermost on both sides, so that hooks of the module's own belong to its call.
            module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
            module.register_forward_hook(self._leave)

    def run(self, given: Inputs) -> "Trace":
        """Run the copy on these inputs. Several outputs stay where the network doesn't say which are the logits."""
        self.given = given
        self.calls: list[Call] = []
        self.open: list[Call] = []
        self.nodes: list[Node] = []
        self.known: dict[int, tuple[Node, Tensor]] = {}  # by address. A tensor is kept, so that no other gets its own
        args, kwargs = given if self.fake is None else tree_map_only(Tensor, self.fake.from_tensor, given)
        for tensor in _leaves(args, kwargs):
            self.known[id(tensor)] = Node("", tuple(tensor.shape), tensor.is_floating_point()), tensor
        with self.fake or nullcontext(), self:
            output = self.twin(*args, **kwargs)
        logits = getattr(output, "logits", None)
        found = map(self.node, _leaves(output if logits is None else logits))
        self.outputs = [node for node in found if node is not None]
        return self

    def calls_of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = tuple(node for tensor in _leaves(args, kwargs) if (node := self.node(tensor)) is not None)
        name, scope = func.overloadpacket.__name__, tuple(call.name for call in self.open)
        for tensor in _leaves(result) if inputs else ():
            node = Node(name, tuple(tensor.shape), tensor.is_floating_point(), inputs, args, scope)
            self.nodes.append(node)
            self.known[id(tensor)] = node, tensor
        return result

    def node(self, value: Any) -> Node | None:
        """Return the node of a tensor that depends on the network's input."""
        return self.known.get(id(value), (None,))[0]

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.open.append(Call(name, module, self.node(args[0]) if args else None))
        self.calls.append(self.open[-1])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.open.pop().output = self.node(output)


def _leaves(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers."""
    return chain(model.parameters(), model.buffers())


def trace(model: nn.Module, inputs: Iterable[Inputs], edit: Edit | None = None, heads: Heads | None = None) -> Trace:
    """Run a copy of `model` in evaluation mode on the first of `inputs` that goes through, or raise the first's error.

    `edit` changes the copy before it runs, with copies of `heads`.
    """
    first_error: Exception | None = None
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True  # a try that fails is no error
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            run = Trace(model, edit, heads or {}, fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
            for given in inputs:
                try:
                    try:
                        return run.run(given)
                    except NEEDS_DATA:
                        run = Trace(model, edit, heads or {}, None)
                        return run.run(given)
                except Exception as error:  # whatever a network raises on input it can't take
                    first_error = first_error or error
    finally:
        logger.disabled = before
    raise first_error or ValueError("no input is known for it")


def guesses(model: nn.Module) -> Iterator[Inputs]:
    """Yield inputs that are worth a try, the likeliest first."""
    like = next((tensor for tensor in tensors_of(model) if tensor.is_floating_point()), torch.empty(0))
    named = getattr(model, "main_input_name", None)  # of transformers
    end = getattr(getattr(model, "config", None), "eos_token_id", None)
    for batch in (2, 1):  # some networks of transformers take a single text if no padding token is set
        for shape in _shapes(model, named):
            tensor = like.new_zeros(batch, *shape)
            if shape == (TOKENS,):
                tensor = torch.ones_like(tensor, dtype=torch.int64)
                tensor[:, -1] = end if isinstance(end, int) else 1  # some networks look there for the end of the text
            yield ((), {named: tensor}) if isinstance(named, str) else ((tensor,), {})


def _shapes(model: nn.Module, named: object) -> Iterator[tuple[int, ...]]:
    """Yield shapes of a sample."""
    kinds = nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d
    first = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if named == "input_ids" or (named is None and isinstance(first, nn.Embedding)):
        yield (TOKENS,)
        return
    if named is None and isinstance(first, nn.Linear):
        yield from ((first.in_features,), (5, first.in_features))
    if isinstance(first, nn.Conv1d):
        yield from ((first.in_channels, length) for length in (64, 16, 1024, 16000))
    if isinstance(first, nn.Conv3d):
        yield first.in_channels, 16, 112, 112
    config = getattr(model, "config", None)
    owners = [getattr(model, "patch_embed", None), model, config, getattr(config, "vision_config", None)]
    sizes = [getattr(owner, name, None) for owner in owners for name in ("img_size", "image_size")]
    said: Any = getattr(model, "pretrained_cfg", None) or {}  # of timm
    own, *known = said.get("input_size") or (None,)
    channels = [own] if own else [first.in_channels, 3] if isinstance(first, nn.Conv2d) else [3]
    size: Any
    for size in [*sizes, known, *SIDES]:
        pair = (size, size) if isinstance(size, int) else size
        if isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(side, int) for side in pair):
            yield from ((each, *pair) for each in dict.fromkeys(channels))
