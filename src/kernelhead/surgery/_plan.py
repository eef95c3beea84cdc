"""What is to be changed on a network, found before anything is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import nn

from kernelhead.surgery import _libraries as libraries
from kernelhead.surgery._find import find_auxiliary, find_classifiers, find_relus, is_linear
from kernelhead.surgery._hooks import Fold, Unfold, channels_first, channels_last
from kernelhead.surgery._inputs import guesses
from kernelhead.surgery._places import Place, find_place, has_places
from kernelhead.surgery._relu import Edit, find_removal
from kernelhead.surgery._relu import replace as replace_module
from kernelhead.surgery._trace import Call, Inputs, Node, Trace, trace


@dataclass(frozen=True)
class Slot:
    """A layer that gives way to a head."""

    name: str
    in_features: int
    num_classes: int | None
    """Of the layer; None where there is only a placeholder."""
    convolution: bool
    unfold: Unfold | None = None
    """How a head that pools gets its places."""

    def install(self, model: nn.Module, head: nn.Module) -> None:
        """Put a head in the layer's place."""
        if self.unfold is not None:
            head.register_forward_pre_hook(self.unfold.before)
            head.register_forward_hook(self.unfold.after)
        elif self.convolution:
            head.register_forward_pre_hook(channels_last)
            head.register_forward_hook(channels_first)
        replace_module(model, self.name, head)


@dataclass
class Plan:
    """The layers to replace, and what else there is to do."""

    slots: list[Slot]
    removals: dict[str, Edit | None] = field(default_factory=dict)
    """By the name of the module that has a ReLU before the features, what takes it away; None where nothing can."""
    auxiliary: list[str] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trace: Trace | None = None

    @property
    def num_classes(self) -> int | None:
        return self.slots[0].num_classes


def find_plan(model: nn.Module, layers: tuple[str, ...] | None, inputs: Inputs | None) -> Plan:
    """Find the layers that make the logits, unless they are named, and the ReLUs around them."""
    named = [_named(model, name) for name in layers or ()]
    try:
        run = trace(model, _tries(model, inputs))
    except Exception as error:  # whatever a network raises
        words = " ".join(str(error).split())[:200]
        if inputs is not None:
            raise ValueError(f"{type(model).__name__} does not run on these inputs: {words}") from error
        names = [name for name, _ in named] or [_last(model, words)]
        slots = [_slot(model, name, None) for name in names]
        return Plan(slots, notes=[f"not run, as no input is known for it ({words}): a ReLU before the features stays"])
    after: list[Node] = []
    if named:
        calls = [call for name, _ in named for call in run.calls_of(name)[:1]]
        if len(calls) < len(named):
            missing = next(name for name, _ in named if not run.calls_of(name))
            raise ValueError(f"{type(model).__name__} does not use the layer {missing!r} when it runs")
    else:
        try:
            found = find_classifiers(run, libraries.classifier_names(model))
        except LookupError as error:
            raise _not_found(model, str(error)) from error
        calls, after = found.calls, found.relus
    calls = list({call.name: call for call in calls}.values())
    slots = [_slot(model, call.name, call) for call in calls]
    if len({slot.num_classes for slot in slots}) > 1:
        sizes = ", ".join(f"{slot.name!r}: {slot.num_classes}" for slot in slots)
        raise _not_found(model, f"the layers before its output differ in their number of classes ({sizes})")
    relus = [relu for call in calls if call.input is not None for relu in find_relus(call.input)]
    plan = Plan(slots, trace=run)
    for relu in [*relus, *after]:
        removal = find_removal(run, model, relu)
        plan.removals[removal[0] if removal else relu.scope[-1]] = removal[1] if removal else None
    if plan.num_classes is not None:
        plan.auxiliary = find_auxiliary(run, model, [slot.name for slot in slots], plan.num_classes)
    return plan


def _tries(model: nn.Module, inputs: Inputs | None) -> Callable[[], Iterable[Inputs]]:
    return (lambda: guesses(model)) if inputs is None else (lambda: [inputs])


def _again(model: nn.Module, inputs: Inputs | None, plan: Plan) -> Callable[[], Iterable[Inputs]]:
    """The inputs of the plan's own run alone: on others there may be no places, and nothing to see."""
    assert plan.trace is not None
    attempt = plan.trace.attempt
    return lambda: islice(_tries(model, inputs)(), attempt, attempt + 1)


def _named(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} has no layer {name!r}; {_candidates(model)}") from error
    if name == "" or not (is_linear(module) or isinstance(module, nn.Identity)):
        raise ValueError(
            f"layer {name!r} is a {type(module).__name__}, not an nn.Linear, a 1x1 convolution or an nn.Identity; "
            f"{_candidates(model)}"
        )
    return name, module


def _slot(model: nn.Module, name: str, call: Call | None) -> Slot:
    module = model.get_submodule(name)
    if isinstance(module, nn.Linear):
        return Slot(name, module.in_features, module.out_features, False)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Slot(name, module.in_channels, module.out_channels, True)
    if call is None or call.input is None:
        raise ValueError(f"the number of features at {name!r} is not known without a run: give inputs")
    shape = call.input.shape
    # Vectors and tokens have their features last, and maps first, unless the network says otherwise.
    last = len(shape) in (2, 3) or shape[1] != getattr(model, "num_features", shape[1]) == shape[-1]
    return Slot(name, shape[-1] if last else shape[1], None, not last)


def _last(model: nn.Module, why: str) -> str:
    """The last layer with weights, in the order of definition: what is left to go by without a run."""
    owners: list[str] = [
        name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    ]
    if not owners or not is_linear(model.get_submodule(owners[-1])):
        raise _not_found(model, f"it could not be run ({why}), and its last layer is neither")
    return owners[-1]


def _candidates(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if is_linear(module)]
    return f"its last linear layers are {', '.join(map(repr, names[-3:]))}" if names else "it has no linear layer"


def _not_found(model: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__}: looked for the nn.Linear or the 1x1 convolution that makes the logits, but {why}; "
        f"name it with layer='...' ({_candidates(model)}), or give inputs=..., a batch that the network takes"
    )


def pooling_plan(
    model: nn.Module, plan: Plan, inputs: Inputs | None, edits: list[Edit], heads: dict[str, nn.Module]
) -> tuple[Plan, tuple[str, ...]]:
    """Where the heads, by the name of the layer, get their places from: tried on a copy, after `edits`."""
    if libraries.reads_padded_sequences(model):
        raise ValueError(
            f"{type(model).__name__} reads padded texts or sounds, and a mean over places would count the padding; "
            "use a head that takes the network's own features"
        )
    if plan.trace is None:
        raise ValueError(f"{type(model).__name__}: where it pools can only be seen in a run: give inputs")
    ways = [_around_pooling]
    if libraries.is_timm(model):
        ways.insert(0, _without_pooling)
    reasons = []
    for way in ways:
        try:
            pooling, description = way(model, plan, inputs)
            _try(model, pooling, inputs, edits, heads)
            return pooling, description
        except LookupError as error:
            reasons.append(str(error))
    windows = "smaller windows, none, or " * any(getattr(head, "window", 1) > 1 for head in heads.values())
    raise ValueError(
        f"{type(model).__name__}: looked for the map or the tokens that its features are pooled from, but "
        f"{reasons[-1]}; use {windows}a head that takes pooled features"
    )


def _without_pooling(model: nn.Module, plan: Plan, inputs: Inputs | None) -> tuple[Plan, tuple[str, ...]]:
    """Timm's own way: the network gives up its pooling, and the head receives the map or the tokens."""
    try:
        run = trace(model, _again(model, inputs, plan), lambda copy, _: libraries.stop_pooling(copy))
    except Exception as error:  # a network that cannot do without
        raise LookupError(f"it does not run without its pooling ({error})") from error
    prefix, slots = libraries.unpooled_prefix(model), []
    for slot in plan.slots:
        calls = run.calls_of(slot.name)
        shape = calls[0].input.shape if calls and calls[0].input is not None else ()
        if not has_places(shape):
            raise LookupError("it pools even where it is told not to")
        axis = 1 if len(shape) > 3 and shape[1] == slot.in_features else -1
        if shape[axis] != slot.in_features:
            raise LookupError(f"its features without pooling are {list(shape)}")
        slots.append(replace(slot, unfold=Unfold(None, axis, prefix if axis == -1 else 0)))
    pooling = replace(plan, slots=slots, edits=[libraries.stop_pooling])
    return pooling, ("what it gives without its global pooling",)


def _around_pooling(model: nn.Module, plan: Plan, inputs: Inputs | None) -> tuple[Plan, tuple[str, ...]]:
    """Any network: every place goes through the pooling by itself."""
    assert plan.trace is not None
    folds: dict[Place, Fold] = {}
    slots, edits = [], []
    for slot in plan.slots:
        call = plan.trace.calls_of(slot.name)[0]
        if call.input is None:
            raise LookupError(f"{slot.name!r} is given more than a tensor")
        axis, rank = (1 if slot.convolution else -1), len(call.input.shape)
        if has_places(call.input.shape):
            slots.append(replace(slot, unfold=Unfold(None, axis, rank=rank)))
            continue
        place = find_place(plan.trace, call.input)
        if place not in folds:
            folds[place] = Fold(place.channel, place.prefix)
            edits.append(_fold_at(place, folds[place]))
        slots.append(replace(slot, unfold=Unfold(folds[place], axis, rank=rank)))
    pooling = replace(plan, slots=slots, edits=edits)
    return pooling, tuple(map(str, folds)) or tuple(f"what {slot.name!r} receives" for slot in slots)


def _fold_at(place: Place, fold: Fold) -> Edit:
    def edit(model: nn.Module) -> None:
        module = model.get_submodule(place.module)
        if place.before:
            module.register_forward_pre_hook(fold.before)
        else:
            module.register_forward_hook(fold.after)

    return edit


def _try(model: nn.Module, plan: Plan, inputs: Inputs | None, edits: list[Edit], heads: dict[str, nn.Module]) -> None:
    """Change a copy, run it, and look at its logits."""
    assert plan.trace is not None

    def prepare(copy: nn.Module, twin: Callable[[nn.Module], nn.Module]) -> None:
        for edit in [*edits, *plan.edits]:
            edit(copy)
        for slot in plan.slots:
            slot.install(copy, twin(heads[slot.name]))

    try:
        run = trace(model, _again(model, inputs, plan), prepare)
    except Exception as error:  # whatever a network raises
        words = " ".join(str(error).split())[:200]
        raise LookupError(f"it does not run with a head that takes them ({words})") from error
    head: Any = heads[plan.slots[0].name]
    expected = (plan.trace.outputs[0].shape[0], int(head.num_classes))
    if run.outputs[0].shape != expected:
        raise LookupError(f"its logits would be {list(run.outputs[0].shape)}, not {list(expected)}")
    rows, before = ([output.shape[:1] for output in each.outputs] for each in (run, plan.trace))
    if rows != before:
        raise LookupError("it gives more than logits behind the pooling, which would be of every place")
