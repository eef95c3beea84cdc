"""Train a network with a kernel head on images: the whole run is the function `_train`."""

import copy
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from kernelhead.files import plain_file, write_bytes, writing
from kernelhead.finetune.checkpoint import History, digest
from kernelhead.finetune.data import Data, Key, batches
from kernelhead.finetune.distillation import load_teacher
from kernelhead.finetune.distributed import World, synchronize_batch_norm
from kernelhead.finetune.evaluation import logits_of, main_logits, precision
from kernelhead.finetune.interrupt import deferred_interrupts
from kernelhead.finetune.optimizer import create_optimizer, freeze_backbone, load_optimizer, move_average, tensors_of
from kernelhead.finetune.report import PREDICTIONS_FILE, write_predictions, write_report
from kernelhead.finetune.results import save_result
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of, is_finite, save_classifier
from kernelhead.finetune.schedule import epoch_order, mix, same_bits, warmup_cosine
from kernelhead.finetune.settings import CHECKPOINT_FILE, CONFIG_FILE, MODEL_FILE, RESULT_FILE, to_yaml
from kernelhead.finetune.spec import TrainResult, TrainSpec
from kernelhead.functional import distillation_loss, mixup_cross_entropy
from kernelhead.fused.precision import real_dtype
from kernelhead.metrics import accuracy, summary

REPORT_SECONDS = 0.5
CURVE = ("loss", "accuracy", "val_loss", "val_accuracy")
PARTS = ("train", "val", "test")
SAVING_SHARE = 20  # checkpoints take at most one part in so many of the time: large ones are slow


class DivergedError(RuntimeError):
    """A run whose loss, weights or logits are not finite any more."""


@dataclass(frozen=True)
class Moment:
    """Where a run is: `step` of `steps` are done. Loss and accuracy are means over the epoch so far."""

    step: int
    steps: int
    epoch: int
    epochs: int
    epoch_done: bool
    loss: float
    accuracy: float
    learning_rate: float
    images_per_second: float
    val_accuracy: float | None = None
    val_loss: float | None = None


def train(
    spec: TrainSpec, data: Data, out: Path, *, world: World | None = None, watch: Callable[[Moment], None] | None = None
) -> TrainResult:
    """Train what a resolved spec says on its data, or continue that, in the folder `out`.

    The folder then has config.yaml, metrics.jsonl, a checkpoint, result.json, predictions.csv, a report and the
    classifier, model.safetensors. A checkpoint is saved every `spec.checkpoint_seconds`, at the end, and before SIGINT
    or SIGTERM raise KeyboardInterrupt. On a CPU, a run that continues equals one without interruption to the bit.
    """
    world = world or World()
    with writing(out) if world.rank == 0 else nullcontext(), same_bits(spec.deterministic):
        return _train(spec, data, out, world, watch)


def _train(spec: TrainSpec, data: Data, out: Path, world: World, watch: Callable[[Moment], None] | None) -> TrainResult:
    device = data.device
    assert spec.batch_size
    assert spec.epochs
    assert spec.learning_rate
    per_epoch = len(data.train) // spec.batch_size
    if not per_epoch:
        few = f"{spec.data} has {len(data.train)} training images, fewer than a batch of {spec.batch_size}"
        raise ValueError(f"{few}; choose a smaller --batch-size")
    chooses = spec.keep == "best" or spec.patience > 0
    if chooses and not (len(data.val) and spec.evaluate_every):
        raise ValueError("--keep best and --patience need validation images, and looks at them; give --val 0.1")
    part, steps = world.part(spec.batch_size, spec.accumulate), spec.epochs * per_epoch
    warmup = min(spec.warmup_epochs, spec.epochs // 2) * per_epoch  # a short run warms up for half of it
    log = MetricsLog(out, tensorboard=spec.tensorboard and world.rank == 0)

    # The network, in the layout of memory that convolutions on a GPU prefer, and the one that counts in the end.
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format
    model = create_classifier(spec, len(data.classes)).to(device).to(memory_format=layout).train()
    if spec.freeze_backbone:
        freeze_backbone(model)
    final = copy.deepcopy(model) if spec.ema else model
    network: Any = model
    if world.size > 1:
        synchronize_batch_norm(model, device)
        network = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if spec.compile:
        network = torch.compile(network)
    dtype = precision(spec.amp, device)

    # The loss and the optimiser. Rates follow from the step alone, so there is no state of a schedule.
    class_weight = None
    if spec.class_weight == "balanced":
        counts = torch.bincount(data.train.labels, minlength=len(data.classes))
        class_weight = (len(data.train) / (len(counts) * counts)).to(device)
    plain_loss = partial(F.cross_entropy, weight=class_weight, label_smoothing=spec.label_smoothing)
    loss_of: Callable[..., Any] = mixup_cross_entropy if spec.mixup else plain_loss
    teacher = spec.teacher and load_teacher(spec.teacher, data.classes, data.input, device, spec.amp)
    if teacher:
        loss_of = partial(distillation_loss, temperature=spec.temperature)
    optimizer = create_optimizer(model, spec)
    rates = [group["lr"] for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    # What happened in every step, and the checkpoint that it may continue from.
    losses, accuracies = (torch.full((steps,), math.nan, device=device) for _ in range(2))
    tensors = {"losses": losses, "accuracies": accuracies}
    tensors |= {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"average.{name}": tensor for name, tensor in final.state_dict().items() if spec.ema}
    best = {name: tensor.clone() for name, tensor in final.state_dict().items()} if spec.keep == "best" else {}
    tensors |= {f"best.{name}": tensor for name, tensor in best.items()}
    decides = {name: value for name, value in spec.recipe().items() if name not in ("data", "weights")}
    decides |= {"evaluate_every": spec.evaluate_every} if chooses else {}
    names = " ".join(name for images in (data.train, data.val) for name, _, _ in images.named)
    identity = {**decides, "classes": data.classes, "images": digest({"labels": data.train.labels}, names)}
    history = History(out / CHECKPOINT_FILE, identity)
    state: dict[str, Any] = {"best_epoch": 0, "best_figures": [-1.0, 0.0], "stopped": False}
    step, kept = 0, history.load()
    if kept is not None:
        state = {name: kept[1][name] for name in state}
        step = kept[1]["step"]
        scaler.load_state_dict(kept[1]["scaler"])
        for name, tensor in tensors.items():
            tensor.copy_(kept[0][name])
        load_optimizer(optimizer, model, kept[0])
    if world.any(world.mean(torch.tensor(float(step), device=device)).item() != step, device):
        raise ValueError(f"the processes found different checkpoints in {out}; let them share that folder")
    if world.rank == 0:
        write_bytes(out / CONFIG_FILE, to_yaml(spec).encode())

    def save() -> None:
        if world.rank == 0:
            everything = tensors | tensors_of(model, optimizer)
            history.save(step, everything, {"scaler": scaler.state_dict(), **state})

    # The steps.
    began = saved = reported = time.monotonic()
    first, pause, keys = step, spec.checkpoint_seconds, batch_keys(len(data.train), spec, part, step)
    random_state = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with deferred_interrupts() as interrupted, random_state:
        for images, labels in batches(data.train, () if state["stopped"] else keys, data):
            factor = warmup_cosine(step, steps, warmup)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate
            torch.manual_seed(mix(spec.seed, step, world.rank))  # of dropout and mixup
            optimizer.zero_grad()
            losses[step], right = 0, torch.zeros((), device=device)
            pieces = zip(images.chunk(spec.accumulate), labels.chunk(spec.accumulate), strict=True)
            for number, (some, answers) in enumerate(pieces, 1):
                waits = world.size > 1 and number < spec.accumulate
                with network.no_sync() if waits else nullcontext():
                    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                        logits = main_logits(network(some.contiguous(memory_format=layout)))
                    target = teacher(some) if teacher else answers
                    loss = loss_of(logits.to(real_dtype(logits.dtype)), target) / spec.accumulate
                    scaler.scale(loss).backward()
                losses[step] += loss.detach()
                right += (logits.argmax(1) == answers).sum()
            if spec.clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
            scaler.step(optimizer)
            scaler.update()
            losses[step], accuracies[step] = world.mean(losses[step]), world.mean(right / len(labels))
            step += 1
            if spec.ema:
                move_average(final, model, spec.ema, step)

            epoch, done = (step - 1) // per_epoch + 1, step % per_epoch == 0
            if world.rank == 0 and (done or time.monotonic() - reported > REPORT_SECONDS):
                so_far = slice((epoch - 1) * per_epoch, step)
                mean_loss, mean_accuracy = (each[so_far].mean().item() for each in (losses, accuracies))
                seconds = time.monotonic() - began
                pace, rate = (step - first) * spec.batch_size / max(seconds, 1e-9), factor * rates[0]
                moment = Moment(step, steps, epoch, spec.epochs, done, mean_loss, mean_accuracy, rate, pace)
                if done:
                    asked = spec.evaluate_every and (epoch % spec.evaluate_every == 0 or step == steps)
                    if asked and len(data.val) and math.isfinite(moment.loss):
                        logits = logits_of(final, data, data.val, amp=spec.amp)
                        if logits.isfinite().all():
                            found = accuracy(logits, data.val.labels), F.cross_entropy(logits, data.val.labels).item()
                            moment = replace(moment, val_accuracy=found[0], val_loss=found[1])
                            if [found[0], -found[1]] > state["best_figures"]:
                                state |= {"best_epoch": epoch, "best_figures": [found[0], -found[1]]}
                                for name, tensor in best.items():
                                    tensor.copy_(final.state_dict()[name])
                    state["stopped"] = 0 < spec.patience <= epoch - state["best_epoch"]
                    log.write(moment, seconds)
                    began, first = time.monotonic(), step
                if watch is not None:
                    watch(moment)
                reported = time.monotonic()
            if done and (not losses[:step].isfinite().all() or world.any(state["stopped"], device)):
                break
            if world.any(interrupted(), device):
                save()
                raise KeyboardInterrupt
            if time.monotonic() - saved > pause:
                before = time.monotonic()
                save()
                saved = time.monotonic()
                pause = spec.checkpoint_seconds and max(spec.checkpoint_seconds, SAVING_SHARE * (saved - before))
        save()
    if world.any(interrupted(), device):  # too late for the last step to see
        raise KeyboardInterrupt

    # What came of it. The test images are looked at here, once.
    if best:
        final.load_state_dict(best)
    head = head_of(final)
    in_head, trainable = (
        sum(parameter.numel() for parameter in each.parameters() if parameter.requires_grad) for each in (head, final)
    )
    curve = [name for name in CURVE if any(record[name] is not None for record in log.records)]
    result = TrainResult(
        replace(spec, amp="none" if dtype is None else str(dtype).removeprefix("torch.")),
        images={part: len(getattr(data, part)) for part in PARTS} | {"left_out": len(data.left_out)},
        parameters={"backbone": trainable - in_head, "head": in_head},
        seconds=sum(record["seconds"] for record in log.records),
        curve={name: [record[name] for record in log.records] for name in curve},
        extra={"kept_epoch": state["best_epoch"]} if best else {},
    )
    if world.rank:
        return result
    finite, logits = losses[:step].isfinite(), logits_of(final, data, data.test, amp=spec.amp)
    if not (finite.all() and is_finite(final) and logits.isfinite().all()):
        at = step - 1 if finite.all() else int(finite.int().argmin())
        what = "all losses were finite, but the network was" if finite.all() else "the loss was"
        (out / MODEL_FILE).unlink(missing_ok=True)
        save_result(out / RESULT_FILE, replace(result, diverged_at=at))
        raise DivergedError(
            f"{what} not finite after step {at}; choose a smaller --learning-rate than {spec.learning_rate:g} "
            f"(recorded in {out / RESULT_FILE})"
        )
    alpha = getattr(head, "alpha", None)
    alpha = None if alpha is None else alpha.tolist()
    result = replace(result, alpha=alpha, **summary(logits, data.test.labels))  # type: ignore[arg-type]
    classifier = SavedClassifier(final.eval(), head, data.classes, spec, data.input, data.files)
    save_classifier(out / MODEL_FILE, classifier)
    if log.records:
        log.add({"test_accuracy": result.accuracy})
    save_result(out / RESULT_FILE, result)
    write_predictions(out / PREDICTIONS_FILE, classifier, data.test, logits)
    if spec.report:
        try:
            write_report(out, classifier, data.test, logits, log.records)
        except ModuleNotFoundError as error:
            warnings.warn(f"there is no report: {error}", stacklevel=2)
    return result


def batch_keys(images: int, spec: TrainSpec, part: slice, first: int) -> Iterator[list[Key]]:
    """Yield the keys of the images in this process's part of every batch, from step `first` on."""
    assert spec.batch_size
    batch_size = spec.batch_size
    per_epoch = images // batch_size
    for epoch in range(first // per_epoch, spec.epochs or 0):
        order = epoch_order(images, spec.seed, epoch).tolist()
        for number in range(max(0, first - epoch * per_epoch), per_epoch):
            yield [(spec.seed, epoch, index) for index in order[number * batch_size : (number + 1) * batch_size][part]]


class MetricsLog:
    """One JSON object per epoch in metrics.jsonl. Epochs that are trained again replace their lines."""

    def __init__(self, out: Path, *, tensorboard: bool = False) -> None:
        self.path, self.records = out / "metrics.jsonl", list[dict[str, Any]]()
        if self.path.exists():
            try:
                self.records = [json.loads(line) for line in plain_file(self.path).read_text().splitlines()]
                self.records.sort(key=lambda record: int(record["epoch"]))
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise ValueError(f"{self.path} is not lines of JSON ({error}); repair it, or move it away") from error
        self.writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                sentence = "--tensorboard needs tensorboard; install it with pip install tensorboard"
                raise ModuleNotFoundError(sentence, name=error.name) from error
            self.writer = SummaryWriter(str(out / "tensorboard"))

    def write(self, moment: Moment, seconds: float) -> None:
        """Append the figures of an epoch."""
        figures = {"loss": moment.loss, "accuracy": 100 * moment.accuracy, "learning_rate": moment.learning_rate}
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self.records = [record for record in self.records if record["epoch"] < moment.epoch]
        self.records.append({"epoch": moment.epoch, "step": moment.step})
        self.add({**finite, "val_accuracy": moment.val_accuracy, "val_loss": moment.val_loss, "seconds": seconds})

    def add(self, figures: dict[str, Any]) -> None:
        """Add figures to the last line."""
        self.records[-1] |= figures
        write_bytes(self.path, "".join(json.dumps(each) + "\n" for each in self.records).encode())
        for name, value in figures.items():
            if self.writer is not None and value is not None:
                self.writer.add_scalar(name, value, self.records[-1]["epoch"])
                self.writer.flush()
