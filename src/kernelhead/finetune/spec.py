"""What is trained, and what comes of it: the two nouns of every training."""

import dataclasses
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Self, get_args, get_origin

# Settings that change how a training runs, not what comes of it.
MACHINE = "device compile deterministic workers evaluate_every checkpoint_seconds tensorboard report".split()


def kinds_of(annotation: Any) -> list[type]:
    """Return the types of a field: `float | None` is [float, NoneType], and `dict[str, int]` is [dict]."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return [get_origin(each) or each for each in members]


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a value that JSON or YAML gave is of a field's type; 1 counts as 1.0."""
    kinds = kinds_of(annotation)
    return type(value) in kinds or (float in kinds and type(value) is int)


@dataclass(frozen=True)
class TrainSpec:
    """One training. A setting that is None is filled in by `resolved`, from the data, the network and the head.

    `kernelhead train --help` says what each setting means. A search over learning rates is
    `dataclasses.replace(spec, learning_rate=...)`.
    """

    data: str
    backbone: str = "torchvision/resnet50"
    head: str = "landmarks"
    head_options: dict[str, Any] = field(default_factory=dict)
    rectified: bool = False
    pretrained: bool | None = None
    weights: str | None = None
    freeze_backbone: bool = False
    augment: str = "auto"
    mirror: bool = True
    image_size: int | None = None
    test_size: int | None = None
    resize: str = "crop"
    val: float = 0.0
    test: float = 0.2
    skip_empty: bool = False
    mixup: bool = False
    label_smoothing: float = 0.0
    class_weight: str = "none"
    teacher: str | None = None
    temperature: float = 4.0
    epochs: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    optimizer: str = "sgd"
    learning_rate: float | None = None
    head_rate: float | None = None
    weight_decay: float | None = None
    momentum: float = 0.9
    layer_decay: float = 1.0
    clip: float = 0.0
    ema: float = 0.0
    warmup_epochs: int = 5
    keep: str = "last"
    patience: int = 0
    amp: str = "auto"
    seed: int = 0
    compile: bool = False
    deterministic: bool = False
    device: str = "auto"
    workers: int | None = None
    evaluate_every: int = 1
    checkpoint_seconds: float = 60.0
    tensorboard: bool = False
    report: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Every setting as JSON and YAML hold it."""
        return dataclasses.asdict(self)

    def recipe(self) -> dict[str, Any]:
        """The settings that decide what comes out, without those of the machine."""
        return {name: value for name, value in self.as_dict().items() if name not in MACHINE}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Make the spec that `as_dict` or `recipe` described."""
        known = {each.name for each in dataclasses.fields(cls)}
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]!r}; {cls.__name__} has {', '.join(sorted(known))}")
        types = {each.name: each.type for each in dataclasses.fields(cls)}
        for each in dataclasses.fields(TrainSpec):  # a subclass may have another type
            own = each.name in settings and types[each.name] == each.type
            if own and not fits(settings[each.name], each.type):
                raise ValueError(f"{each.name} is {settings[each.name]!r}, which is no {each.type}")
        return cls(**settings)


@dataclass(frozen=True)
class TrainResult:
    """What came of a training: what a result file holds. Without an accuracy where the training diverged."""

    spec: TrainSpec
    images: dict[str, int]
    """How many were for training ("train"), for testing ("test"), and could not be read ("left_out")."""
    parameters: dict[str, int]
    """How many numbers "backbone" and "head" train."""
    seconds: float
    curve: dict[str, list[float | None]]
    """Means of each epoch: "loss" and training "accuracy"."""
    diverged_at: int | None = None
    """The step whose loss, or whose update, was the first that was not finite; steps count from 0."""
    accuracy: float | None = None
    top5: float | None = None
    nll: float | None = None
    ece: float | None = None
    alpha: list[float] | None = None
    """The kernel's coefficients at the end."""
    at_once: int = 1
    """How many trainings shared the machine; `seconds` are divided by it."""
    choosing: bool = False
    """Whether it was tested on held-out training images, to choose settings by."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What only some tables measure."""
