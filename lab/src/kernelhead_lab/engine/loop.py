"""The training loop: one run, or several at once.

On a CPU the runs take their steps in turn. On CUDA the steps of all runs are captured as parallel branches of one
graph, and training replays it: a small network alone leaves a modern GPU idle.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernelhead.finetune.checkpoint import History, digest
from kernelhead.finetune.interrupt import deferred_interrupts
from kernelhead_lab.data.images import Images
from kernelhead_lab.engine.feed import Feed
from kernelhead_lab.engine.graph import Graph
from kernelhead_lab.engine.member import Member
from kernelhead_lab.networks import Classifier
from kernelhead_lab.spec import LabSpec

__all__ = ["Moment", "Trained", "predict", "train"]

REPORT_SECONDS = 0.5
SAVING_SHARE = 20  # checkpoints take at most one part in so many of the time: those of several large networks are slow
BATCH_PIXELS = 2**22
SHARED = ("epochs", "batch_size", "momentum", "warmup_epochs")  # settings in which all runs of a call agree


@dataclass
class Trained:
    """The network of a run after training, and the loss and the share of correct answers at every step.

    losses, accuracies (steps,): of the training batches, NaN where a step was not reached. `diverged_at`: the first
    step, counted from 0, whose loss was not finite; the last step where only its update was not. The network of such a
    run is of no use.
    """

    spec: LabSpec
    model: Classifier
    losses: Tensor
    accuracies: Tensor
    diverged_at: int | None = None


@dataclass(frozen=True)
class Moment:
    """Where training is: `step` of `steps` are done. Figures are those of each run, over the epoch so far."""

    step: int
    steps: int
    epoch: int
    epoch_done: bool
    losses: list[float]
    accuracies: list[float]
    learning_rates: list[float]
    results: list[Trained]


def train(
    specs: Sequence[LabSpec],
    data: Images | Sequence[Images],
    num_classes: int | Sequence[int],
    *,
    teachers: Sequence[Classifier | None] | None = None,
    compiled: bool = False,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    progress: Callable[[Moment], None] | None = None,
) -> list[Trained]:
    """Train several runs at once on the device where `data` lives.

    Runs of the same images, seed and teacher see the same: their batches, and the teacher's scores, are made once. A
    run whose loss is not finite stops at the end of that epoch; the others go on.

    With `checkpoint`, everything is saved there every `checkpoint_seconds`, at the end, and before leaving on SIGINT
    or SIGTERM, which then raise KeyboardInterrupt. A later call with the same arguments goes on from there, on a CPU
    to the bit. The checkpoint before is kept beside it, and used if the newest is damaged. Saving takes at most a
    twentieth of the time, unless `checkpoint_seconds` is 0: then every step is saved.

    Args:
        specs: what is trained. They agree in epochs, batch_size, momentum and warmup_epochs.
        data: the images of all runs, or one set per run, of equal size.
        num_classes: that of all runs, or one per run.
        teachers: one trained network or None per run; its softened scores are learned instead of the labels.
        compiled: use torch.compile.
        checkpoint: the file of the checkpoint.
        checkpoint_seconds: the time between two of them.
        progress: called after each epoch, and within one where steps are slow.
    """
    images, classes, taught_by = _per_run(specs, data, num_classes, teachers)
    device = images[0].labels.device
    epochs, batch_size = specs[0].epochs, specs[0].batch_size
    if not epochs or not batch_size:
        raise ValueError(f"a spec that is trained needs epochs and batch_size; got {epochs} and {batch_size}")
    feeds: dict[tuple[int, int, int, int], Feed] = {}
    members = []
    for spec, own, count, teacher in zip(specs, images, classes, taught_by, strict=True):
        seen = id(own), count, spec.seed, id(teacher)
        if seen not in feeds:
            feeds[seen] = Feed(own, seed=spec.seed, batch_size=batch_size, teacher=teacher, compiled=compiled)
        members.append(Member(spec, feeds[seen], count, compiled=compiled))
    per_epoch = members[0].feed.steps
    results = [Trained(m.spec, m.model, m.losses, m.accuracies) for m in members]
    history = None if checkpoint is None else History(checkpoint, _identity(specs, images, classes, taught_by))
    first = 0 if history is None else _resume(history, members, results)

    def note_divergence(step: int) -> bool:
        """Record where the loss of a run was not finite before `step`, and say whether that is news."""
        found = False
        for result in results:
            broken = (~torch.isfinite(result.losses[:step])).nonzero()
            if result.diverged_at is None and len(broken):
                result.diverged_at, found = int(broken[0]), True
        return found

    def save(step: int) -> None:
        if history is not None:
            tensors = {f"{i}.{name}": x for i, member in enumerate(members) for name, x in member.tensors().items()}
            history.save(step, tensors, {"diverged": [result.diverged_at for result in results]})

    def report(step: int, epoch: int) -> bool:
        """Tell of the epoch so far, and say whether a run has diverged in it. Waits for the device once."""
        now = slice(epoch * per_epoch, step)
        parts = [(m.losses[now].mean(), m.accuracies[now].mean(), m.rates[step - 1]) for m in members]
        losses, accuracies, rates = torch.stack([torch.stack(part) for part in parts]).t().tolist()
        diverged = not all(map(math.isfinite, losses)) and note_divergence(step)
        if progress is not None:
            done = step == (epoch + 1) * per_epoch
            progress(Moment(step, epochs * per_epoch, epoch + 1, done, losses, accuracies, rates, results))
        return diverged

    if first % per_epoch == 0:  # saved at the end of an epoch, maybe before this was asked
        note_divergence(first)
    graph: Graph | None = None
    step, saved, reported, pause = first, time.monotonic(), time.monotonic(), checkpoint_seconds
    with deferred_interrupts() as interrupted, torch.random.fork_rng(devices=[]), ExitStack() as ending:
        for feed in feeds.values():
            ending.callback(feed.close)
        for epoch in range(first // per_epoch, epochs):
            alive = [m for m, result in zip(members, results, strict=True) if result.diverged_at is None]
            if not alive:
                break
            used = list(dict.fromkeys(member.feed for member in alive))
            for feed in used:
                feed.start_epoch(epoch, step - epoch * per_epoch)
            while step < (epoch + 1) * per_epoch:
                if interrupted():
                    save(step)
                    raise KeyboardInterrupt
                for feed in used:
                    feed.fetch()
                if device.type == "cuda":
                    graph = graph or Graph(alive, step)
                    graph.replay()
                else:
                    for feed in used:
                        feed.step()
                    for member in alive:
                        member.seed_step(step)
                        member.step()
                step += 1
                # A graph's steps are only queued here: to read a figure would wait for all of them.
                if graph is None and time.monotonic() - reported > REPORT_SECONDS and step % per_epoch:
                    report(step, epoch)
                    reported = time.monotonic()
                if history is not None and time.monotonic() - saved > pause:
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)  # steps that are only queued are no part of saving
                    saving = time.monotonic()
                    save(step)
                    saved = time.monotonic()
                    pause = checkpoint_seconds and max(checkpoint_seconds, SAVING_SHARE * (saved - saving))
            for feed in used:
                feed.prepare_epoch(epoch + 1)
            if report(step, epoch):
                graph = None  # captured anew, without this run
        for result in results:
            if result.diverged_at is None and not _is_finite(result.model):
                result.diverged_at = len(result.losses) - 1
        save(step)
    if interrupted():  # too late for the last step to see
        raise KeyboardInterrupt
    return results


def predict(
    model: nn.Module,
    data: Images,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Return logits (n, C) of a network in evaluation mode, float32, on the CPU.

    Batches are of four million pixels unless `batch_size` says otherwise.
    """
    batch_size = batch_size or max(1, BATCH_PIXELS // data.size**2)
    device = data.labels.device
    was_training = model.training
    model.eval()
    logits: list[Tensor] = []
    wanted = torch.split(torch.arange(len(data)), batch_size)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        for images, _ in data.batches((index, None) for index in wanted):
            logits.append(model(images).float().cpu())
            if progress is not None:
                progress(len(logits), len(wanted))
    model.train(was_training)
    return torch.cat(logits)


def _per_run(
    specs: Sequence[LabSpec],
    data: Images | Sequence[Images],
    num_classes: int | Sequence[int],
    teachers: Sequence[Classifier | None] | None,
) -> tuple[list[Images], list[int], list[Classifier | None]]:
    """Return images, classes and teachers, one per run, after a check that they belong together."""
    for name in SHARED:
        given = list(dict.fromkeys(getattr(spec, name) for spec in specs))
        if len(given) != 1:
            raise ValueError(f"runs trained at once need the same {name}; got {', '.join(map(str, given))}")
    images = list(data) if isinstance(data, Sequence) else [data] * len(specs)
    classes = list(num_classes) if isinstance(num_classes, Sequence) else [num_classes] * len(specs)
    taught_by: list[Classifier | None] = [None] * len(specs) if teachers is None else list(teachers)
    for what, count in (
        ("image sets", len(images)),
        ("numbers of classes", len(classes)),
        ("teachers", len(taught_by)),
    ):
        if count != len(specs):
            raise ValueError(f"{len(specs)} runs need {len(specs)} {what}; got {count}")
    if len({len(own) for own in images}) != 1:
        raise ValueError(f"runs trained at once need as many images each; got {[len(own) for own in images]}")
    # Most often there is one data set for all runs.
    labels = {(id(own.labels), count): own.labels for own, count in zip(images, classes, strict=True)}
    for (_, count), found in labels.items():
        low, high = (int(extreme) for extreme in found.aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"labels of {count} classes have to be 0 to {count - 1}; got some from {low} to {high}")
    for count, teacher in zip(classes, taught_by, strict=True):
        if teacher is not None and teacher.head.num_classes != count:
            raise ValueError(f"the teacher knows {teacher.head.num_classes} classes, the data have {count}")
    return images, classes, taught_by


def _identity(
    specs: Sequence[LabSpec], images: Sequence[Images], classes: Sequence[int], teachers: Sequence[Classifier | None]
) -> dict[str, Any]:
    """Return what must be the same for a run to go on from a checkpoint; files count by their content."""
    recipes = [spec.recipe() for spec in specs]
    for recipe in recipes:
        if recipe["weights"]:
            recipe["weights"] = hashlib.sha256(Path(recipe["weights"]).read_bytes()).hexdigest()
    labels = {id(own): digest({"labels": own.labels.cpu()}) for own in images}  # most often one for all runs
    known = {id(teacher): teacher and digest(_on_host(teacher)) for teacher in teachers}
    return {
        "runs": recipes,
        "classes": list(classes),
        "images": len(images[0]),
        "size": images[0].size,
        "labels": [labels[id(own)] for own in images],
        "teachers": [known[id(teacher)] for teacher in teachers],
    }


def _on_host(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def _resume(history: History, members: Sequence[Member], results: Sequence[Trained]) -> int:
    """Bring the newest readable checkpoint into the members, and return the step at which to go on."""
    found = history.load()
    if found is None:
        return 0
    tensors, state = found
    for i, (member, result) in enumerate(zip(members, results, strict=True)):
        own = member.tensors()
        lacking = [name for name in own if f"{i}.{name}" not in tensors]
        if lacking:
            raise ValueError(f"{history.path} has no {lacking[0]}: another version wrote it; delete it")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[f"{i}.{name}"])
        result.diverged_at = state["diverged"][i]
    step: int = state["step"]
    return step


def _is_finite(model: nn.Module) -> bool:
    return all(bool(x.isfinite().all()) for x in model.state_dict().values() if x.is_floating_point())
