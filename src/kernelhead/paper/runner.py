"""Run what is missing of tables: several trainings at once, recorded as soon as they are done."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelhead.active import select
from kernelhead.backbones import expected_input
from kernelhead.data import cifar
from kernelhead.data.folder import hold_out
from kernelhead.data.images import Images
from kernelhead.data.open import Opened, open_data
from kernelhead.paper.claims import Claims
from kernelhead.paper.groups import PARTIAL, digest_of, kind_of, name_of, next_group, read_note
from kernelhead.paper.labelling import FIRST, PERCENTS
from kernelhead.paper.outcome import file_of_weights, measure, save_network
from kernelhead.paper.quick import open_quick
from kernelhead.paper.recipe import Experiment, Protocol, Recipe, adapted
from kernelhead.paper.store import Job, Store, weights_of
from kernelhead.results import save_result, write_bytes
from kernelhead.train.checkpoint import BrokenCheckpointError, load_checkpoint, save_checkpoint
from kernelhead.train.interrupt import deferred_interrupts
from kernelhead.train.loop import Moment, Run, predict, train
from kernelhead.train.saved import SavedClassifier, load_classifier
from kernelhead.train.schedule import Schedule

WAIT_SECONDS = 2.0  # between two looks at what other processes have done
NOTE_SECONDS = 60.0  # between two notes of how long a group has been trained
HELD_OUT = 0.1  # of the training images: 5,000 of CIFAR's


@dataclass(frozen=True)
class Settings:
    """What the user may choose."""

    epochs: int
    seeds: int = 1
    protocols: tuple[str, ...] = ("paper",)
    only: tuple[str, ...] = ()
    at_once: int = 1
    compiled: bool = False
    quick: bool = False
    weights: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Progress:
    """Trainings done of those in all, and what goes on now; `waits` while it is done by other processes."""

    done: int
    total: int
    what: str
    moment: Moment | None = None
    waits: bool = False


def chosen_recipes(experiment: Experiment, only: Sequence[str]) -> list[Recipe]:
    """The recipes of the cells that are named, each once; all where nothing is named.

    A name is that of a row, of a column, or of one word of a column. Names of the same place (two rows, the first words
    of columns) add to each other, those of different places restrict each other.
    """
    names = [[cell.row, cell.column, *cell.column.split()] for cell in experiment.cells]
    known = {name for places in names for name in places}
    unknown = [word for word in only if word not in known]
    if unknown:
        listed = ", ".join(repr(name) if "," in name else name for name in sorted(known))
        raise ValueError(f"{experiment.name} has no row or column {unknown[0]!r}; it has {listed}")
    wanted = [set(only).intersection(place) for place in zip_longest(*names)]
    recipes = {
        (cell.recipe.data, cell.recipe.key): cell.recipe
        for cell, own in zip(experiment.cells, names, strict=True)
        if all(name in words for name, words in zip(own, wanted, strict=False) if words)
    }
    if not recipes:
        raise ValueError(f"{experiment.name} has no cell that is all of {', '.join(map(repr, only))}")
    return list(recipes.values())


def run(
    experiments: Sequence[Experiment], root: Path, settings: Settings, progress: Callable[[Progress], None]
) -> None:
    """Run what is missing of tables, their dependencies first. Can be stopped and called again at any point.

    Trainings of all tables on as many images are put together: those of a small one alone would leave a GPU idle. What
    another process trains in the same folder is left to it, and waited for.
    """
    store = Store(root, settings.epochs)
    wanted = [
        (recipe, adapted(experiment.protocols[name], settings.quick))
        for name in settings.protocols
        for experiment in experiments
        for recipe in chosen_recipes(experiment, settings.only)
    ]
    seeds = range(settings.seeds)
    _check_weights(store, wanted, settings)  # before data are opened, and again when others may have added some
    source = _Source(settings)
    data = list(dict.fromkeys(recipe.data for recipe, _ in wanted))
    kinds = list(dict.fromkeys(map(kind_of, data)))
    for name in data:
        source.open(name)  # what is not there should not be missed after hours
    claims, waited_for = Claims(root), 0
    while True:
        with ExitStack() as held:
            with claims.turn() as taken:  # what is missing is looked for after what is taken
                _check_weights(store, wanted, settings)
                found = (job for recipe, protocol in wanted for job in store.missing(recipe, protocol, seeds))
                missing = {job.path: job for job in found}
                free = {path: job for path, job in missing.items() if name_of(path, root) not in taken}
                jobs = next_group(free, root, kinds, settings.at_once)
                held.enter_context(claims.hold([name_of(job.path, root) for job in jobs]))
            if not missing:
                return
            tell = partial(_with_counts, progress, *store.count(wanted, seeds))
            if jobs:
                waited_for = 0
                try:
                    _train(jobs, store, source, settings, tell)
                except BrokenCheckpointError as error:  # a network that these build on
                    raise BrokenCheckpointError(f"{error}; delete it, and it is trained again") from error
                continue
        if len(missing) != waited_for:
            waited_for = len(missing)
            tell(Progress(0, 0, _waiting(waited_for), waits=True))
        time.sleep(WAIT_SECONDS)


def _waiting(number: int) -> str:
    return f"waiting for {number} training{'s' * (number != 1)} of other processes"


def _check_weights(store: Store, wanted: Sequence[tuple[Recipe, Protocol]], settings: Settings) -> None:
    """Runs of one table begin with the same weights: refuse to go on where there are some that began with others."""
    given = None if settings.weights is None or settings.quick else file_of_weights(settings.weights)
    for recipe, protocol in wanted:
        if not recipe.backbone_options.get("pretrained"):
            continue
        for epochs in (protocol.epochs_to_choose(store.epochs), store.epochs):
            for path in sorted(store.folder(recipe, protocol, epochs).glob("*.json")):
                result = store.read(path)
                found = given if result is None else weights_of(result)
                if (found and found["sha256"]) != (given and given["sha256"]):
                    began = "the library's weights" if found is None else f"{found['file']} ({found['sha256'][:12]})"
                    raise ValueError(f"{path} began with {began}: go on with them, or give another folder with --runs")


def _with_counts(progress: Callable[[Progress], None], done: int, total: int, now: Progress) -> None:
    progress(replace(now, done=done, total=total))


class _Source:
    """The data sets in use; those that are not trained on together are not kept in memory together."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.opened: dict[str, Opened] = {}

    def open(self, name: str) -> Opened:
        if name not in self.opened:
            device = torch.device(self.settings.device)
            self.opened = {other: kept for other, kept in self.opened.items() if kind_of(other) == kind_of(name)}
            self.opened[name] = open_quick(name, device) if self.settings.quick else _open(name, device)
        return self.opened[name]


def _open(name: str, device: torch.device) -> Opened:
    opened = open_data(name, expected_input("resnet50"), device)
    found = {"train": len(opened.train), "test": len(opened.test)}
    if name in cifar.CLASSES and found != cifar.IMAGES:  # its runs would pass for those of the whole data set
        raise ValueError(
            f"{name} has {found['train']} images to train on and {found['test']} to test on: not all of it"
        )
    opened.keep_decoded()
    return opened


def _train(
    jobs: Sequence[Job], store: Store, source: _Source, settings: Settings, progress: Callable[[Progress], None]
) -> None:
    recipe, protocol = jobs[0].recipe, jobs[0].protocol
    others = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
    data = " and ".join(dict.fromkeys(job.recipe.data for job in jobs))
    what = f"{data}: {'choosing' if jobs[0].choosing else 'training'} {recipe.key}{others}"
    progress(Progress(0, 0, what))
    opened = [source.open(job.recipe.data) for job in jobs]
    # One object for all that see the same, by which `train` knows it.
    seen = {_seen(job): job for job in jobs}
    shown = {key: _images(job, source.open(job.recipe.data), store) for key, job in seen.items()}
    images, test, selections = zip(*(shown[_seen(job)] for job in jobs), strict=True)
    schedule = Schedule(jobs[0].epochs, protocol.batch_size, warmup_epochs=protocol.warmup_epochs)
    paths = [name_of(job.path, store.root) for job in jobs]
    checkpoint = store.root / PARTIAL / f"{digest_of(paths)}.safetensors"
    note = checkpoint.with_suffix(".json")
    began = time.perf_counter() - read_note(note)["seconds"]

    noted = 0.0

    def write_note() -> None:
        nonlocal noted
        noted = time.perf_counter()
        write_bytes(note, json.dumps({"paths": paths, "seconds": noted - began}).encode())

    def tell(moment: Moment) -> None:
        if time.perf_counter() - noted > NOTE_SECONDS:  # as often as there is a checkpoint, unless they take long
            write_note()
        progress(Progress(0, 0, what, moment))

    write_note()
    try:
        trained = train(
            [_run(job, store, settings) for job in jobs],
            images,
            [len(own.classes) for own in opened],
            schedule,
            compiled=settings.compiled,
            checkpoint=checkpoint,
            progress=tell,
        )
    except KeyboardInterrupt:
        write_note()
        raise
    seconds = (time.perf_counter() - began) / len(jobs)
    # All are measured before the first is kept: a group that is stopped in between goes on from its checkpoint.
    results = [
        measure(job, found, own, training, testing, seconds, len(jobs)) | selection
        if job.choosing or store.read(job.path) is None
        else None  # its network was missing, and what was measured stays
        for job, found, own, training, testing, selection in zip(
            jobs, trained, opened, images, test, selections, strict=True
        )
    ]
    for job, found, result in zip(jobs, trained, results, strict=True):
        if result is None and found.diverged_at is not None:
            raise ValueError(f"{job.path} has no network beside it, and training it again diverged; delete it")
    with deferred_interrupts() as interruption:
        for job, found, own, result in zip(jobs, trained, opened, results, strict=True):
            if not job.choosing and (result is None or result["accuracy"] is not None):
                save_network(job, found, own)
            if result is not None:
                save_result(job.path, result)
                store.forget(job.path)
        for other in checkpoint.parent.glob("*.json"):  # its own, and groups that can never be whole again
            if other == note or not set(paths).isdisjoint(read_note(other)["paths"]):
                for leftover in other.parent.glob(f"{other.stem}*"):
                    leftover.unlink(missing_ok=True)  # another process may clear away the same
    if interruption.requested:
        raise KeyboardInterrupt


def _run(job: Job, store: Store, settings: Settings) -> Run:
    recipe = job.recipe
    options = dict(recipe.backbone_options)
    backbone = recipe.backbone
    if options.get("pretrained") and settings.quick:
        backbone, options = "resnet18", {}  # second-order pooling of 2048 features takes its time
    elif options.get("pretrained") and settings.weights is not None:
        options = {**options, "pretrained": False, "weights": settings.weights}
    teacher = None if recipe.teacher is None else store.model_path(recipe.teacher, job.protocol.base, job.seed)
    return Run(
        backbone,
        recipe.head,
        job.learning_rate,
        job.weight_decay,
        job.seed,
        dict(recipe.head_options),
        options,
        teacher=None if teacher is None else str(teacher),
        mixup=recipe.mixup,
        head_rate=job.head_rate,
    )


def _seen(job: Job) -> tuple[Any, ...]:
    """What tells the images of a job from those of another in its group."""
    if job.recipe.subset is None:
        return (job.recipe.data,)
    model = None if job.recipe.seed_model is None else job.recipe.seed_model.key
    return job.recipe.data, job.recipe.subset, model, job.seed, job.protocol.name


def _images(job: Job, opened: Opened, store: Store) -> tuple[Images, Images, dict[str, Any]]:
    """What a job trains on, what it is tested on, and what its result tells of how images were selected."""
    if job.choosing:
        kept, held = hold_out(opened.train.labels.cpu().numpy(), HELD_OUT, seed=0)
        return opened.train.restricted(kept), opened.train.restricted(held), {}
    if job.recipe.subset is not None:
        subset, selection = _subset(job, opened, store)
        return opened.train.restricted(subset), opened.test, selection
    return opened.train, opened.test, {}


def _subset(job: Job, opened: Opened, store: Store) -> tuple[Tensor, dict[str, Any]]:
    """Indices of a subset for active learning: the random tenth of the seed model, and what was chosen then.

    With them, where a network chose, `selection`: the strategy, how many images it put in order once for all budgets,
    and the seconds of that, without those in which the network looked at the images.
    """
    recipe = job.recipe
    assert recipe.subset is not None
    samples = len(opened.train)
    count = samples * recipe.subset.percent // 100
    random = select("random", samples * PERCENTS[-1] // 100, samples=samples, seed=job.seed)
    if recipe.subset.strategy == "random" or recipe.seed_model is None:
        return random[:count], {}
    model_path = store.model_path(recipe.seed_model, job.protocol.base, job.seed)
    place = model_path.with_name(f"{model_path.stem}-{recipe.subset.strategy}.safetensors")
    first = random[: samples * FIRST // 100]
    try:
        tensors, selection = load_checkpoint(place)
        chosen = tensors["chosen"]
    except BrokenCheckpointError:
        logits, embeddings = _embed(load_classifier(model_path), opened.train)
        began = time.perf_counter()
        chosen = select(
            recipe.subset.strategy,
            len(random) - len(first),
            probabilities=torch.softmax(logits, 1),
            embeddings=embeddings,
            labelled=first,
        )
        seconds = time.perf_counter() - began
        selection = {"strategy": recipe.subset.strategy, "images": len(chosen), "seconds": seconds}
        save_checkpoint(place, {"chosen": chosen}, selection)
    told = {"selection": selection} if "seconds" in selection else {}  # not in files from before it was measured
    return torch.cat([first, chosen])[:count], told


def _embed(saved: SavedClassifier, data: Images) -> tuple[Tensor, Tensor]:
    """Logits (n, C) and features (n, D) of all images, on the CPU and the device."""
    model = saved.model.to(data.labels.device)
    return predict(model, data), predict(model.backbone, data).to(data.labels.device)
