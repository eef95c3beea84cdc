"""What `kernelhead train` can be told: a file of settings, flags over it, and defaults for the rest."""

import difflib
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from kernelhead.backbones import expected_input, is_small
from kernelhead.data.cifar import CLASSES
from kernelhead.data.large import SETS, SHORT_SIDE
from kernelhead.heads import PRESETS, resolve
from kernelhead.results import write_bytes
from kernelhead.train.run import Run
from kernelhead.train.schedule import Schedule

# What may differ when a training goes on. Data may have moved: the checkpoint knows their labels.
FREE = ("data", "device", "compile", "workers", "evaluate_every", "checkpoint_seconds", "tensorboard")
FEW = 3  # batches an epoch, which a batch size that nobody chose leaves
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "nothing"}


@dataclass(frozen=True)
class TrainConfig:
    """One training. Fields that are None where it is made are filled in by `completed`."""

    data: str
    backbone: str = ""
    head: str = "kernel"
    head_options: dict[str, Any] = field(default_factory=dict)
    rectified: bool = False
    kervolution: str | None = None
    pretrained: bool | None = None
    weights: str | None = None
    teacher: str | None = None
    temperature: float = 20.0
    mixup: bool = False
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    head_rate: float | None = None
    weight_decay: float | None = None
    momentum: float = 0.9
    warmup_epochs: int = 5
    seed: int = 0
    size: int | None = None
    short_side: int = SHORT_SIDE
    holdout: float = 0.2
    compile: bool = False
    device: str = "auto"
    workers: int | None = None
    evaluate_every: int = 1
    checkpoint_seconds: float = 60.0
    tensorboard: bool = False

    @property
    def small(self) -> bool:
        """Whether the data are 32x32 images that live on the device."""
        return self.data in CLASSES

    @property
    def name(self) -> str:
        """A name for the folder of this training."""
        presets = (name for name in PRESETS if resolve(name, self.head_options) == (self.head, self.head_options))
        words = [Path(self.data).resolve().stem, self.backbone.replace("/", "-"), next(presets, self.head)]
        words += ["mixup", f"seed{self.seed}"] if self.mixup else [f"seed{self.seed}"]
        return "-".join(words)

    def completed(self) -> "TrainConfig":
        """The same with defaults where nothing was said; they depend on data and backbone."""
        backbone = self.backbone or ("cifar_resnet20" if self.small else "resnet50")
        head, head_options = resolve(self.head, self.head_options)  # what a preset means may change some day
        pretrained = self.pretrained
        if pretrained is None:
            pretrained = not is_small(backbone) and not self.small and self.weights is None
        started = pretrained or self.weights is not None
        learning_rate, head_rate = _fine_tuning_rates(head, head_options) if started else (0.1, 1.0)
        usual = {
            "epochs": 200 if self.small else 30,
            "batch_size": 128 if self.small else 64,
            "learning_rate": learning_rate,
            "head_rate": head_rate,
            "weight_decay": 5e-4 if self.small else 1e-4,
        }
        size = self.size
        if size is None:
            size = 32 if self.small or is_small(backbone) else expected_input(backbone).size
        missing = {name: value for name, value in usual.items() if getattr(self, name) is None}
        complete = replace(
            self, backbone=backbone, head=head, head_options=head_options, pretrained=pretrained, size=size,
            **missing,  # type: ignore[arg-type]
        )  # fmt: skip
        complete._check()
        return complete

    def fitted(self, images: int, processes: int = 1) -> "TrainConfig":
        """The same with the batch size halved until `images` make a few batches; for one that nobody chose."""
        assert self.batch_size is not None
        batch_size = self.batch_size
        while images // batch_size < FEW and batch_size // 2 >= max(2, processes):
            batch_size //= 2
        return replace(self, batch_size=batch_size)

    def run(self) -> Run:
        options = {"rectified": self.rectified, "kervolution": self.kervolution}
        start = {"pretrained": self.pretrained, "weights": self.weights}
        given = {name: value for name, value in {**options, **start}.items() if value}
        assert self.learning_rate is not None
        assert self.weight_decay is not None
        assert self.head_rate is not None
        return Run(
            self.backbone,
            self.head,
            self.learning_rate,
            self.weight_decay,
            self.seed,
            self.head_options,
            given,
            teacher=self.teacher,
            temperature=self.temperature,
            mixup=self.mixup,
            head_rate=self.head_rate,
        )

    def schedule(self) -> Schedule:
        assert self.epochs is not None
        assert self.batch_size is not None
        return Schedule(self.epochs, self.batch_size, self.momentum, self.warmup_epochs)

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    def _check(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
        for name in ("epochs", "batch_size", "learning_rate", "head_rate", "size", "short_side", "temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_epochs", "evaluate_every", "checkpoint_seconds", "workers"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be at least 0 and below 2**32, got {self.seed}")
        if not 0 < self.holdout < 1:
            raise ValueError(f"the share to hold out is {self.holdout}; it has to lie between 0 and 1")
        if self.small and self.size != 32:
            raise ValueError(f"the images of {self.data} are 32x32; size {self.size} is for large images")
        self.run()  # refuses what does not go together


def _fine_tuning_rates(head: str, options: dict[str, Any]) -> tuple[float, float]:
    """For a trained network, and how many times that for a kind of head, after held-out images (docs/tables.md).

    Trained features are long, and a head that does not scale them to unit length takes small steps only. One that does
    begins with small scores, and learns too slowly at rates that the network bears. Landmarks and channels are
    standardised; measured were 2048 over places, and at 0.003 and 0.01 these channels have equal accuracy on Pets, at
    0.01 a better NLL.
    """
    if head == "expansion" or options.get("landmarks"):
        return 0.01, 1.0
    return (0.01, 10.0) if head in ("linear", "kernel") else (0.003, 1.0)


def make_config(file: Path | None, given: dict[str, Any]) -> TrainConfig:
    """Defaults, then what the file says, then what was `given`, where None means nothing.

    Options of the head are put together one by one. Paths become absolute: a training may go on, and a classifier be
    evaluated, from elsewhere.
    """
    settings = _read(file) if file is not None else {}
    options = {**settings.get("head_options", {}), **(given.get("head_options") or {})}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings["head_options"] = {name: _number(value) for name, value in options.items()}
    if not settings.get("data"):
        known = ", ".join([*CLASSES, *SETS])
        raise ValueError(f"no data: say --data with one of {known}, a folder or a packed file")
    for name in ("data", "weights", "teacher"):
        path = Path(settings.get(name) or "").expanduser()
        if settings.get(name) not in (None, *CLASSES, *SETS) and path.exists():
            settings[name] = str(path.resolve())
    return TrainConfig(**settings).completed()


def says(file: Path | None, given: dict[str, Any], name: str) -> bool:
    """Whether a setting is said in a file or `given`, and not left to its default."""
    return given.get(name) is not None or (file is not None and _read(file).get(name) is not None)


def save_config(path: Path, config: TrainConfig) -> None:
    write_bytes(path, config.to_yaml().encode())


def check_same(file: Path, config: TrainConfig) -> None:
    """See that `config` describes the training that was begun with the settings in `file`."""
    begun, now = asdict(make_config(file, {})), asdict(config)
    for name in begun:
        if name not in FREE and begun[name] != now[name]:
            raise ValueError(
                f"the training in {file.parent} was begun with {name} {begun[name]}, not {now[name]}: leave that as it "
                "was to go on with it, or name another place with --out"
            )


def _read(file: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {file}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is not readable YAML ({' '.join(str(error).split())})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} must hold one setting a line, such as 'epochs: 10'")
    kinds = {known.name: known.type for known in fields(TrainConfig)}
    for name, value in settings.items():
        if name not in kinds:
            near = difflib.get_close_matches(str(name), kinds, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(kinds)}"
            raise ValueError(f"{file} has an unknown setting {name!r}; {hint}")
        settings[name] = _as(kinds[name], value, f"{file}: {name}")
    return settings


def _as(kind: Any, value: Any, what: str) -> Any:
    """`value`, if it is of the kind that a field of `TrainConfig` has; 1 counts as 1.0, and '5e-4' too."""
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{what} is {value!r}, and has to be options with their values, such as {{degree: 9}}")
        return value
    allowed = get_args(kind) or (kind,)
    if type(value) in allowed:
        return value
    number = _number(value)
    if float in allowed and type(number) in (int, float):
        return float(number)
    raise ValueError(f"{what} is {value!r}, and has to be {' or '.join(KINDS[each] for each in allowed)}")


def _number(value: Any) -> Any:
    """A text that reads as a number, as that number: YAML 1.1 takes 5e-4 for a text."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value
