"""What decides a run: a file of settings, flags over it, and defaults for the rest."""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from kernelhead.files import plain_file
from kernelhead.finetune.backbones import create_network, expected_input, without_memory
from kernelhead.finetune.checkpoint import History
from kernelhead.finetune.images import DATA_SETS
from kernelhead.finetune.spec import TrainSpec, fits, kinds_of
from kernelhead.heads import create_head

CONFIG_FILE, CHECKPOINT_FILE = "config.yaml", "checkpoint.safetensors"
RESULT_FILE, MODEL_FILE = "result.json", "model.safetensors"
CHOICES = {
    "augment": ("auto", "none", "light", "imagenet", "randaugment"),
    "resize": ("crop", "squash", "pad"),
    "class_weight": ("none", "balanced"),
    "optimizer": ("sgd", "adamw"),
    "keep": ("last", "best"),
    "amp": ("auto", "none", "bfloat16", "float16"),
}
SIZES = ("image_size", "test_size", "batch_size", "accumulate")
POSITIVE = ("epochs", "learning_rate", "head_rate", "layer_decay", "temperature", *SIZES)
NOT_NEGATIVE = ("weight_decay", "warmup_epochs", "clip", "patience", "evaluate_every", "checkpoint_seconds", "workers")
BELOW_ONE = ("momentum", "ema", "label_smoothing")
MOST_POINTS = 10**6
MOST = {"image_size": 4096, "test_size": 4096, "epochs": 10**6}
MAX_SETTINGS_BYTES = 2**20
SMALL_IMAGE = 64  # pixels; larger images are cropped and scaled at random as on ImageNet
MIN_BATCHES_PER_EPOCH = 3  # which a batch size that nobody chose leaves
GOOD_BATCHES_PER_EPOCH, GOOD_SMALL_BATCH = 30, 32  # from scratch, batches get smaller down to that for so many steps
# Learning rate of a trained network, and its multiple for the head, as held-out images chose them. Trained features are
# long: a head that does not normalise them bears small steps only. One that does begins with small logits.
FINE_TUNING_RATES = {
    **dict.fromkeys(("landmarks", "expansion"), (0.01, 1.0)),
    **dict.fromkeys(("kernel", "prototypes", "cosine"), (0.01, 10.0)),
}
# From scratch, the mixing of standardised values outruns a network that has little time to learn: in 15 epochs of 1,200
# images a tenth of the rate is 1.4 to 2.3 points better on held-out ones. Whole trainings, of 200 epochs, do without.
SHORT_HEAD_RATES, SHORT_EPOCHS = {"landmarks": 0.1}, 30
KINDS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"},
    dict: "options with their values, such as {degree: 9}",
}


def resolved(spec: TrainSpec, *, images: int | None = None, processes: int = 1) -> TrainSpec:
    """Fill in the settings that are None, and check all. The batch size waits for the number of training `images`."""
    pretrained = ":" not in spec.backbone and spec.weights is None if spec.pretrained is None else spec.pretrained
    trained = pretrained or spec.weights is not None
    size = spec.image_size or expected_input(spec.backbone, create_network(spec.backbone)).size
    epochs = spec.epochs or (30 if trained else 200)
    learning_rate, head_rate = 0.1, SHORT_HEAD_RATES.get(spec.head, 1.0) if epochs <= SHORT_EPOCHS else 1.0
    if trained:
        learning_rate, head_rate = FINE_TUNING_RATES.get(spec.head, (0.003, 1.0))
    weight_decay = 1e-4 if trained else 5e-4
    if spec.optimizer == "adamw":
        learning_rate, head_rate, weight_decay = 1e-4 if trained else 1e-3, 10.0 if trained else 1.0, 0.05
    defaults: dict[str, Any] = {
        "pretrained": pretrained,
        "image_size": size,
        "test_size": size,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "head_rate": head_rate,
        "weight_decay": weight_decay,
    }
    if images is not None:
        batch_size = 64 if trained else 128
        fewest = MIN_BATCHES_PER_EPOCH if trained else GOOD_BATCHES_PER_EPOCH
        while images // batch_size < fewest and batch_size // 2 >= max(2, processes):
            batch_size //= 2
            fewest = MIN_BATCHES_PER_EPOCH if batch_size <= GOOD_SMALL_BATCH else fewest
        defaults["batch_size"] = batch_size
    missing = {name: value for name, value in defaults.items() if getattr(spec, name) is None}
    if spec.augment == "auto":
        missing["augment"] = "light" if size <= SMALL_IMAGE else "imagenet"
    complete = replace(spec, **missing)
    check(complete)
    return complete


def check(spec: TrainSpec) -> None:
    """Refuse settings that cannot be."""
    for name, value in spec.as_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")
        if name in POSITIVE and value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
        if name in NOT_NEGATIVE and (value or 0) < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(CHOICES[name])}")
        if name in BELOW_ONE and not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
        if name in MOST and (value or 0) > MOST[name]:
            raise ValueError(f"{name} must be at most {MOST[name]:,}, got {value}")
    for name, value in spec.head_options.items():
        if isinstance(value, int) and value > MOST_POINTS:
            raise ValueError(f"{name} must be at most {MOST_POINTS:,}, got {value}")
    if spec.layer_decay > 1:
        raise ValueError(f"layer_decay must be at most 1, got {spec.layer_decay}")
    for name in ("mixup", "teacher"):
        others = {"mixup", "label_smoothing", "class_weight"} - {name}
        if getattr(spec, name) and any(getattr(spec, other) not in (0, "none") for other in others):
            raise ValueError(f"{name} has a loss of its own; leave out {', '.join(sorted(others))}, or {name}")
    if spec.teacher is not None and not Path(spec.teacher).exists():
        raise FileNotFoundError(f"there is no teacher {spec.teacher}; give a run, or a folder of kernelhead.save")
    if spec.freeze_backbone and spec.pretrained is False and not spec.weights and ":" not in spec.backbone:
        raise ValueError("freeze_backbone needs a trained network; give weights, or leave it out")
    if not 0 <= spec.seed < 2**32:
        raise ValueError(f"seed must be at least 0 and below 2**32, got {spec.seed}")
    if not (0 < spec.test < 1 and 0 <= spec.val < 1 - spec.test):
        raise ValueError(f"test and val must be shares below 1 together, test above 0; got {spec.test} and {spec.val}")
    try:
        with without_memory():
            create_head(spec.head, 2, 2, **spec.head_options)
    except TypeError as error:
        raise ValueError(f"head {spec.head!r} does not take {spec.head_options} ({error})") from error


def make_spec(file: Path | None, given: dict[str, Any], *, needs_data: bool = True) -> TrainSpec:
    """Take what a file says, then what is `given`, where None means nothing; the rest stays at its default.

    Head options are merged one by one. Paths become absolute: a run may be resumed, and its classifier evaluated, from
    another folder.
    """
    settings = _read(file) if file is not None else {}
    options = {**settings.get("head_options", {}), **(given.get("head_options") or {})}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings["head_options"] = options
    settings.setdefault("data", "")
    if needs_data and not settings["data"]:
        raise ValueError(f"no data; give --data one of {', '.join(DATA_SETS)}, or a folder of class folders")
    for name in ("data", "weights", "teacher"):
        path = Path(settings.get(name) or "").expanduser()
        if settings.get(name) not in (None, "", *DATA_SETS) and path.exists():
            settings[name] = str(path.resolve())
    return TrainSpec(**settings)


class _Loader(yaml.SafeLoader):
    """YAML 1.1, which takes 5e-4 for a text, with the numbers of YAML 1.2."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), None)


def load_yaml(text: str) -> Any:
    """Read YAML, where 5e-4 is a number, and without aliases, which may stand for more than memory holds."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
        raise yaml.YAMLError("it has an alias; write out what it stands for")
    return yaml.load(text, _Loader)


def to_yaml(spec: TrainSpec) -> str:
    """Every setting as a file that `make_spec` reads."""
    return yaml.safe_dump(spec.as_dict(), sort_keys=False, allow_unicode=True)


def run_name(spec: TrainSpec, heads: Sequence[str] = ()) -> str:
    """A name for the folder of a run, or of the runs of several heads."""
    backbone = spec.backbone.removeprefix("torchvision/").replace("/", "-").replace(":", "-")
    words = [Path(spec.data).resolve().stem, backbone, *dict.fromkeys(heads or [spec.head])]
    return "-".join([*words, *(["mixup"] if spec.mixup else []), f"seed{spec.seed}"])


def check_run_folder(out: Path, resume: bool) -> None:
    """See that a run can begin, or continue, in the folder `out` without harm to what is there."""
    checkpoint = out / CHECKPOINT_FILE
    begun = checkpoint.exists() or History(checkpoint, {}).previous.exists()
    done = (out / MODEL_FILE).exists() or (out / RESULT_FILE).exists()
    if (begun or done) and not resume:
        raise FileExistsError(f"{out} already holds a run; continue it with --resume, or choose another with --out")
    if done and not begun:
        raise FileExistsError(f"{out} holds a run without a checkpoint; choose another folder with --out")


def _read(file: Path) -> dict[str, Any]:
    plain_file(file, MAX_SETTINGS_BYTES)
    try:
        settings = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is not readable YAML ({' '.join(str(error).split())})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} must hold one setting per line, such as 'epochs: 10'")
    known: dict[str, Any] = {each.name: each.type for each in fields(TrainSpec)}
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"settings are {', '.join(known)}"
            raise ValueError(f"{file} has an unknown setting {name!r}; {hint}")
        if not fits(value, known[name]):
            wanted = " or ".join(KINDS[kind] for kind in kinds_of(known[name]))
            raise ValueError(f"{file}: {name} is {value!r}; give {wanted}")
    return settings
