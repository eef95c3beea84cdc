"""The training loop: one run, or several at once.

On a CPU the runs take their steps in turn. On CUDA the steps of all runs are captured as parallel branches of one
graph, and training is replaying it: a small network alone leaves a modern GPU idle. Several processes (see
`distributed`) share every batch of a run.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kernelhead.data.images import Images
from kernelhead.train.checkpoint import History, identify
from kernelhead.train.distributed import World
from kernelhead.train.feed import Feed
from kernelhead.train.graph import Graph
from kernelhead.train.interrupt import deferred_interrupts
from kernelhead.train.member import Member
from kernelhead.train.run import Run, Trained
from kernelhead.train.schedule import Schedule

__all__ = ["Moment", "Run", "Trained", "predict", "train"]

REPORT_SECONDS = 0.5
SAVING_SHARE = 20  # checkpoints take at most one part in so many of the time: those of several large networks are slow
BATCH_PIXELS = 2**22


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
    runs: Sequence[Run],
    data: Images | Sequence[Images],
    num_classes: int | Sequence[int],
    schedule: Schedule,
    *,
    compiled: bool = False,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    world: World | None = None,
    progress: Callable[[Moment], None] | None = None,
) -> list[Trained]:
    """Train several runs at once on the device where `data` lives: the same for all, or as many images for each.

    `num_classes` is likewise that of all, or one for each.
    Runs of the same images, seed and teacher, or of none, see the same: their batches, and its scores, are made once.
    A run whose loss is not finite stops at the end of that epoch, with the step recorded; the others go on.

    With `checkpoint`, everything is saved there every `checkpoint_seconds`, at the end, and before leaving on SIGINT
    or SIGTERM (which then raise KeyboardInterrupt); a later call with the same arguments goes on from there, on a CPU
    to the bit. The one before is kept beside it, and used if the newest is damaged. Where saving takes more than a
    twentieth of `checkpoint_seconds`, it is done less often; where they are 0, after each step.

    `compiled` uses torch.compile. `progress` is called after each epoch, and within one where steps are slow.
    """
    world = world or World()
    of_run = list(data) if isinstance(data, Sequence) else [data] * len(runs)
    if len({len(images) for images in of_run}) != 1:
        raise ValueError(f"runs trained at once need as many images each, got {[len(images) for images in of_run]}")
    classes = list(num_classes) if isinstance(num_classes, Sequence) else [num_classes] * len(runs)
    if len(classes) != len(runs):
        raise ValueError(f"there are {len(runs)} runs, and numbers of classes for {len(classes)}")
    # Most often there is one data set for all runs.
    labels = {(id(images.labels), count): images.labels for images, count in zip(of_run, classes, strict=True)}
    for (_, count), found in labels.items():
        low, high = (int(extreme) for extreme in found.aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"labels have to be 0 to {count - 1}, and there are some from {low} to {high}")
    device = of_run[0].labels.device
    per_epoch = schedule.steps(len(of_run[0]))
    feeds: dict[tuple[int, int, int, str | None], Feed] = {}
    members = []
    for run, images, count in zip(runs, of_run, classes, strict=True):
        seen = id(images), count, run.seed, run.teacher
        if seen not in feeds:
            feeds[seen] = Feed(run, images, count, schedule, compiled=compiled, world=world)
        members.append(Member(run, feeds[seen], count, schedule, compiled=compiled, world=world))
    results = [Trained(m.run, m.model, m.losses, m.accuracies) for m in members]
    history = History(checkpoint, identify(runs, of_run, classes, schedule))
    first = history.load(members, results)
    if world.any(world.mean(torch.tensor(float(first), device=device)).item() != first, device):
        raise ValueError("the processes found different checkpoints: they have to share the folder where it is")

    def note_divergence(step: int) -> bool:
        """Record where the loss of a run was not finite before `step`, and say whether that is news."""
        found = False
        for result in results:
            broken = (~torch.isfinite(result.losses[:step])).nonzero()
            if result.diverged_at is None and len(broken):
                result.diverged_at, found = int(broken[0]), True
        return found

    def save(step: int) -> None:
        if world.rank == 0:
            history.save(step, members, results)

    def report(step: int, epoch: int) -> bool:
        """Tell of the epoch so far, and say whether a run has diverged in it. Waits for the device once."""
        now = slice(epoch * per_epoch, step)
        parts = [(m.losses[now].mean(), m.accuracies[now].mean(), m.rates[step - 1]) for m in members]
        losses, accuracies, rates = torch.stack([torch.stack(part) for part in parts]).t().tolist()
        diverged = not all(map(math.isfinite, losses)) and note_divergence(step)
        if progress is not None:
            done = step == (epoch + 1) * per_epoch
            steps = schedule.epochs * per_epoch
            progress(Moment(step, steps, epoch + 1, done, losses, accuracies, rates, results))
        return diverged

    if first % per_epoch == 0:  # saved at the end of an epoch, maybe before this was asked
        note_divergence(first)
    graph: Graph | None = None
    step, saved, reported, pause = first, time.monotonic(), time.monotonic(), checkpoint_seconds
    with deferred_interrupts() as interruption, torch.random.fork_rng(devices=[]), ExitStack() as ending:
        for feed in feeds.values():
            ending.callback(feed.close)
        for epoch in range(first // per_epoch, schedule.epochs):
            alive = [m for m, result in zip(members, results, strict=True) if result.diverged_at is None]
            if not alive:
                break
            used = list(dict.fromkeys(member.feed for member in alive))
            for feed in used:
                feed.start_epoch(epoch, step - epoch * per_epoch)
            while step < (epoch + 1) * per_epoch:
                if world.any(interruption.requested, device):
                    save(step)
                    raise KeyboardInterrupt
                for feed in used:
                    feed.fetch()
                if device.type == "cuda" and world.size == 1:
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
                if checkpoint is not None and time.monotonic() - saved > pause:
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
        save(step)
    if world.any(interruption.requested, device):  # too late for the last step to see
        raise KeyboardInterrupt
    return results


def predict(
    model: nn.Module,
    data: Images,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Logits (n, C) of a network in evaluation mode, float32, on the CPU.

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
