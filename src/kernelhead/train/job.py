"""A training from its configuration to the result file, and what a trained classifier says of images and pictures."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernelhead.backbones import count_parameters, expected_input
from kernelhead.data.cifar import CLASSES
from kernelhead.data.images import Images
from kernelhead.data.large import SETS, SHORT_SIDE
from kernelhead.data.open import Opened, open_data
from kernelhead.data.packed import PictureFiles, progress_of
from kernelhead.data.packed_folders import remember_folder
from kernelhead.data.streamed import StreamedImages
from kernelhead.heads import create_head
from kernelhead.metrics import accuracy, summary
from kernelhead.results import BrokenResultError, load_result, save_result
from kernelhead.train.checkpoint import History
from kernelhead.train.config import TrainConfig, check_same, save_config
from kernelhead.train.distributed import World
from kernelhead.train.log import MetricsLog
from kernelhead.train.loop import Moment, predict, train
from kernelhead.train.pictures import Steps, margin_of, need_pillow, open_other, some, streamed_batch, warn_of
from kernelhead.train.saved import MODEL_FILE, SavedClassifier, is_finite, load_classifier, save_classifier

CHECKPOINT_FILE = "checkpoint.safetensors"
CONFIG_FILE = "config.yaml"


class DivergedError(RuntimeError):
    """A training whose loss, weights or scores are not finite any more."""


@dataclass(frozen=True)
class Epoch:
    """What is known while an epoch goes on; `test_accuracy` where the test images were looked at after it."""

    moment: Moment
    epochs: int
    test_accuracy: float | None = None


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is the GPU of this process where there is one, the CPU otherwise."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; choose auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; choose auto, cpu or cuda")
    if device.type == "cuda":
        number, count = device.index if device.index is not None else local_rank, torch.cuda.device_count()
        if not count:
            raise ValueError("there is no CUDA device here; --device cpu does without one")
        if number >= count:
            raise ValueError(f"there is no CUDA device {number} here: they go from 0 to {count - 1}")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    return device


def check_place(out: Path, config: TrainConfig, resume: bool) -> None:
    """See that a training can begin, or go on, in the folder `out` without harm to what is there."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; --out names a folder")
    nearest = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{out} cannot be made or written to, because of {nearest}; --out names another place")
    begun = (out / CHECKPOINT_FILE).exists() or History(out / CHECKPOINT_FILE, {}).previous.exists()
    done = (out / MODEL_FILE).exists() or (out / "result.json").exists()
    if _says_diverged(out / "result.json"):
        raise FileExistsError(f"{out} holds a training that diverged, see its result.json; --out names another place")
    if (begun or done) and not resume:
        raise FileExistsError(f"{out} already holds a training; --resume goes on with it, --out names another place")
    if done and not begun:
        raise FileExistsError(f"{out} holds a training without a checkpoint to go on from; --out names another place")
    if begun and (out / CONFIG_FILE).exists():
        check_same(out / CONFIG_FILE, config)


def _says_diverged(result: Path) -> bool:
    try:
        return result.exists() and load_result(result)["diverged_at"] is not None
    except (BrokenResultError, KeyError):
        return False


def check_network(config: TrainConfig) -> None:
    """See that the network that a configuration names can be made, before time goes into its data."""
    if config.data not in (*CLASSES, *SETS) and not Path(config.data).exists():
        known = ", ".join([*CLASSES, *SETS])
        raise FileNotFoundError(f"there is no data set, folder or file {config.data!r}; the data sets are {known}")
    if not config.small:
        need_pillow()
    try:
        create_head(config.head, 2, 2, **config.head_options)  # before a backbone's weights are fetched
        config.run().create(2)
    except OSError as error:
        if not config.pretrained:
            raise
        raise OSError(f"{error} (--weights FILE, --no-pretrained)") from error
    except TypeError as error:
        raise ValueError(f"no head {config.head!r} can be made with {config.head_options} ({error})") from error
    if config.teacher is not None:
        load_classifier(Path(config.teacher))


def open_for(
    config: TrainConfig, device: torch.device, *, world: World | None = None, progress: Steps | None = None
) -> Opened:
    """The data that a configuration names. Pictures that are missing or cannot be read are warned of."""
    world = world or World()
    expected = expected_input(config.backbone)
    assert config.size is not None
    if not config.small:
        need_pillow()
    with world.in_turn():  # so that a folder is packed once
        opened = open_data(
            config.data,
            replace(expected, size=config.size),
            device,
            short_side=config.short_side,
            holdout=config.holdout,
            seed=config.seed,
            workers=config.workers,
            progress=progress,
        )
    if world.rank == 0:
        remember_folder(config.data, config.short_side, opened.train, opened.test)
        warn_of(opened.left_out)
    return opened


def train_classifier(
    config: TrainConfig,
    out: Path,
    opened: Opened,
    *,
    world: World | None = None,
    watch: Callable[[Epoch], None] | None = None,
) -> dict[str, Any]:
    """Train what `config` says on the data it names, or go on with it, in the folder `out`.

    There are then config.yaml, metrics.jsonl, a checkpoint, result.json and the classifier, model.safetensors. Gives
    the figures of the result file. `watch` is called as `train` calls its `progress`.
    """
    world = world or World()
    run, schedule = config.run(), config.schedule()
    if config.teacher is not None:
        _check_teacher(config.teacher, opened)
    if len(opened.train) < schedule.batch_size:
        raise ValueError(
            f"{config.data} has {len(opened.train)} training images, fewer than a batch of {schedule.batch_size}; "
            "choose a smaller one with --batch-size"
        )
    log = MetricsLog(out / "metrics.jsonl", out / "tensorboard" if config.tensorboard and world.rank == 0 else None)
    if world.rank == 0:
        save_config(out / CONFIG_FILE, config)
    began = time.monotonic()

    def progress(moment: Moment) -> None:
        nonlocal began
        if world.rank:
            return
        test_accuracy = None
        if moment.epoch_done:
            seconds = time.monotonic() - began
            asked = config.evaluate_every and moment.epoch % config.evaluate_every == 0
            trained = moment.results[0]
            if asked and moment.epoch < schedule.epochs and trained.diverged_at is None:
                logits = _logits(trained.model, opened.test)
                if logits.isfinite().all():
                    test_accuracy = accuracy(logits, opened.test.labels.cpu())
            log.write(_record(moment, seconds, test_accuracy))
            began = time.monotonic()
        if watch is not None:
            watch(Epoch(moment, schedule.epochs, test_accuracy))

    (trained,) = train(
        [run],
        opened.train,
        len(opened.classes),
        schedule,
        compiled=config.compile,
        checkpoint=out / CHECKPOINT_FILE,
        checkpoint_seconds=config.checkpoint_seconds,
        world=world,
        progress=progress,
    )
    result: dict[str, Any] = {
        "experiment": "train",
        "protocol": "train",
        "method": config.head,
        "seed": config.seed,
        "config": asdict(config),
        "images": {"train": len(opened.train), "test": len(opened.test), "left_out": len(opened.left_out)},
        "parameters": {part: count_parameters(getattr(trained.model, part)) for part in ("backbone", "head")},
        "seconds": log.seconds(),
        "diverged_at": trained.diverged_at,
        "accuracy": None,
    }
    if world.rank:
        return result
    if trained.diverged_at is not None:
        raise _diverged(f"the loss was not finite any more at step {trained.diverged_at}", out, result)
    # No loss has seen what the last step made of the network.
    logits = _logits(trained.model, opened.test)
    if not (is_finite(trained.model) and logits.isfinite().all()):
        result["diverged_at"] = len(trained.losses) - 1
        raise _diverged(
            f"the network was not finite any more after the last step, {result['diverged_at']}", out, result
        )
    result |= summary(logits, opened.test.labels.cpu()) | _alpha(trained.model.head)
    saved = SavedClassifier(trained.model, run, opened.classes, opened.input, asdict(config))
    save_classifier(out / MODEL_FILE, saved)
    if log.records and log.records[-1]["test_accuracy"] is None:
        log.add({"test_accuracy": result["accuracy"]})
    save_result(out / "result.json", result)
    return result


def evaluate_classifier(
    saved: SavedClassifier, data: str | None, device: torch.device, progress: Steps | None = None
) -> dict[str, Any]:
    """Accuracy, top-5 accuracy, NLL and ECE on the test images of a data set, of its own unless another is named.

    A folder without a part for testing counts as a whole. Its classes are recognised by their names.
    """
    images: Images
    if data is None:
        try:
            config = TrainConfig(**saved.settings)
        except TypeError as error:
            raise ValueError(f"its own data are not known ({error}); name some to evaluate it on") from error
        opened = open_for(config, device, progress=progress)
        images, classes = opened.test, opened.classes
    else:
        images, classes = open_other(saved, data, device, progress)
    unknown = [name for name in classes if name not in saved.classes]
    if unknown:
        raise ValueError(f"the classifier knows no class {unknown[0]!r}; its classes are {some(saved.classes)}")
    place = torch.tensor([saved.classes.index(name) for name in classes])
    logits = _finite_logits(saved, images, device, progress_of("evaluating", progress))
    return {"images": len(images), **summary(logits, place[images.labels.cpu()])}


def predict_pictures(
    saved: SavedClassifier, paths: Sequence[Path], device: torch.device, progress: Steps | None = None
) -> tuple[Tensor, dict[int, str]]:
    """Probabilities (n, C) of the classes for picture files, and for those that cannot be read a sentence each."""
    need_pillow()
    files = PictureFiles(paths, short_side=saved.settings.get("short_side", SHORT_SIDE))
    images = StreamedImages(
        files,
        size=saved.input.size,
        mean=[255 * value for value in saved.input.mean],
        std=[255 * value for value in saved.input.std],
        device=device,
        margin=margin_of(saved),
    )
    logits = _finite_logits(saved, images, device, progress_of("predicting", progress))
    return torch.softmax(logits.double(), 1), files.broken


def _logits(model: nn.Module, images: Images, progress: Callable[[int, int], None] | None = None) -> Tensor:
    batch_size = streamed_batch(images.size) if isinstance(images, StreamedImages) else None
    return predict(model, images, batch_size=batch_size, progress=progress)


def _finite_logits(
    saved: SavedClassifier, images: Images, device: torch.device, progress: Callable[[int, int], None] | None
) -> Tensor:
    logits = _logits(saved.model.to(device), images, progress)
    broken = int((~logits.isfinite()).any(1).sum())
    if broken:
        raise ValueError(
            f"the classifier's scores are not finite for {broken} of {len(logits)} images: its training diverged, and "
            "it is of no use"
        )
    return logits


def _diverged(what: str, out: Path, result: dict[str, Any]) -> DivergedError:
    """Keep the result of a training that diverged, and no classifier; the error to raise."""
    (out / MODEL_FILE).unlink(missing_ok=True)  # of an earlier version, which did not look
    save_result(out / "result.json", result)
    rate = result["config"]["learning_rate"]
    return DivergedError(f"{what}; a smaller learning rate than {rate:g} may help (recorded in {out / 'result.json'})")


def _check_teacher(path: str, opened: Opened) -> None:
    """A teacher sees the student's images, so it must expect the same, and know the same classes."""
    teacher = load_classifier(Path(path))
    if teacher.classes != opened.classes:
        known = some(teacher.classes)
        raise ValueError(f"the teacher {path} knows other classes than the data: {known}")
    if teacher.input != opened.input:
        raise ValueError(
            f"the teacher {path} expects other images: {teacher.input.size}x{teacher.input.size} with mean "
            f"{teacher.input.mean}, not {opened.input.size}x{opened.input.size} with {opened.input.mean}"
        )


def _record(moment: Moment, seconds: float, test_accuracy: float | None) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "epoch": moment.epoch,
        "step": moment.step,
        "loss": finite(moment.losses[0]),
        "accuracy": finite(100 * moment.accuracies[0]),
        "learning_rate": moment.learning_rates[0],
        "test_accuracy": test_accuracy,
        "seconds": seconds,
    }


def _alpha(head: nn.Module) -> dict[str, Any]:
    alpha = getattr(head, "alpha", None)
    return {} if alpha is None else {"alpha": alpha.detach().float().tolist()}
