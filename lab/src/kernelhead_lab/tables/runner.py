"""Run what is missing of tables: several runs at once, recorded as soon as they are done."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelhead.files import write_bytes
from kernelhead.finetune import cifar
from kernelhead.finetune.checkpoint import BrokenCheckpointError, load_checkpoint, save_checkpoint
from kernelhead.finetune.interrupt import deferred_interrupts
from kernelhead.finetune.results import save_result
from kernelhead.finetune.select import select
from kernelhead_lab.data.images import Images, hold_out
from kernelhead_lab.data.open import Opened, open_data
from kernelhead_lab.engine.loop import Moment, predict, train
from kernelhead_lab.networks import Classifier
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables.experiment import Experiment
from kernelhead_lab.tables.groups import PARTIAL, digest_of, kind_of, name_of, read_note
from kernelhead_lab.tables.labelling import FIRST, PERCENTS
from kernelhead_lab.tables.outcome import load_network, measure, save_network
from kernelhead_lab.tables.queue import Progress, Queue, Settings, description
from kernelhead_lab.tables.quick import open_quick, quick_spec
from kernelhead_lab.tables.store import Missing, Store, is_choice

WAIT_SECONDS = 2.0  # between two looks at what other processes have done
NOTE_SECONDS = 60.0  # between two notes of how long a group has been trained
HELD_OUT = 0.1  # of the training images: 5,000 of CIFAR's


def run(
    experiments: Sequence[Experiment], root: Path, settings: Settings, progress: Callable[[Progress], None]
) -> None:
    """Run what is missing of tables, their dependencies first. Can be stopped and called again at any point.

    Runs of all tables on as many images are put together: those of a small table alone would leave a GPU idle. Runs of
    other processes in the same folder are waited for.
    """
    queue, source, waited_for = Queue(experiments, root, settings), Source(settings), 0
    for cell, _ in queue.wanted:
        source.open(cell.spec)  # what is not there should not be missed after hours
    while True:
        with ExitStack() as held:
            missing, group = queue.take(held, settings.at_once)
            if not missing:
                return
            tell = partial(_with_counts, progress, *queue.count())
            if group:
                waited_for = 0
                train_group(group, queue.store, source, settings, tell)
                continue
        if len(missing) != waited_for:
            waited_for = len(missing)
            tell(Progress(0, 0, _waiting(waited_for), waits=True))
        time.sleep(WAIT_SECONDS)


def _waiting(number: int) -> str:
    return f"waiting for {number} run{'s' * (number != 1)} of other processes"


def _with_counts(progress: Callable[[Progress], None], done: int, total: int, now: Progress) -> None:
    progress(replace(now, done=done, total=total))


class Source:
    """The data sets in use; those that are not trained on together are not kept in memory together."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.kind: str | None = None
        self.opened: dict[str, Opened] = {}

    def open(self, spec: LabSpec) -> Opened:
        if self.kind != kind_of(spec):
            self.kind, self.opened = kind_of(spec), {}
        if spec.data not in self.opened:
            device = torch.device(self.settings.device)
            self.opened[spec.data] = open_quick(spec.data, device) if self.settings.quick else _open(spec, device)
        return self.opened[spec.data]


def _open(spec: LabSpec, device: torch.device) -> Opened:
    opened = open_data(spec.data, device, augment=spec.augment)
    found = {"train": len(opened.train), "test": len(opened.test)}
    if spec.data in cifar.CLASSES and found != cifar.IMAGES:  # its runs would pass for those of the whole data set
        raise ValueError(
            f"{spec.data} has {found['train']} images to train on and {found['test']} to test on, not all of them; "
            "delete its file and download it again"
        )
    opened.keep_decoded()
    return opened


def train_group(
    group: Missing, store: Store, source: Source, settings: Settings, progress: Callable[[Progress], None]
) -> None:
    """Train a group and keep its results and networks."""
    try:
        _train(group, store, source, settings, progress)
    except BrokenCheckpointError as error:  # a network that these build on
        raise BrokenCheckpointError(f"{error}; delete it, and it is trained again") from error


def _train(
    group: Missing, store: Store, source: Source, settings: Settings, progress: Callable[[Progress], None]
) -> None:
    paths, specs = list(group), list(group.values())
    choosing = is_choice(paths[0])
    what = description(group)
    progress(Progress(0, 0, what))
    opened = [source.open(spec) for spec in specs]
    images, test, extras = zip(*_shown(specs, choosing, source, store), strict=True)
    names = [name_of(path, store.root) for path in paths]
    checkpoint = store.root / PARTIAL / f"{digest_of(names)}.safetensors"
    note = checkpoint.with_suffix(".json")
    began = time.perf_counter() - read_note(note)["seconds"]
    noted = 0.0

    def write_note() -> None:
        nonlocal noted
        noted = time.perf_counter()
        write_bytes(note, json.dumps({"paths": names, "seconds": noted - began}).encode())

    def tell(moment: Moment) -> None:
        if time.perf_counter() - noted > NOTE_SECONDS:  # as often as there is a checkpoint, unless they take long
            write_note()
        progress(Progress(0, 0, what, moment))

    write_note()
    try:
        trained = train(
            [_on_machine(spec, settings) for spec in specs],
            images,
            [len(own.classes) for own in opened],
            teachers=_teachers(specs, store, settings.device),
            compiled=settings.compiled,
            checkpoint=checkpoint,
            progress=tell,
        )
    except KeyboardInterrupt:
        write_note()
        raise
    seconds = (time.perf_counter() - began) / len(specs)
    # All are measured before the first is kept: a group that is stopped in between goes on from its checkpoint.
    results = [
        measure(
            found,
            training,
            testing,
            left_out=len(own.left_out),
            seconds=seconds,
            at_once=len(specs),
            choosing=choosing,
            extra=extra,
        )
        if choosing or store.read(path) is None
        else None  # its network was missing, and what was measured stays
        for path, found, own, training, testing, extra in zip(paths, trained, opened, images, test, extras, strict=True)
    ]
    for path, found, result in zip(paths, trained, results, strict=True):
        if result is None and found.diverged_at is not None:
            raise ValueError(f"{path} has no network beside it, and training it again diverged; delete it")
    with deferred_interrupts() as interrupted:
        for path, found, result in zip(paths, trained, results, strict=True):
            if not choosing and (result is None or result.accuracy is not None):
                save_network(path, found)
            if result is not None:
                save_result(path, result)
                store.forget(path)
        for other in checkpoint.parent.glob("*.json"):  # its own, and groups that can never be whole again
            if other == note or not set(names).isdisjoint(read_note(other)["paths"]):
                for leftover in other.parent.glob(f"{other.stem}*"):
                    leftover.unlink(missing_ok=True)  # another process may clear away the same
    if interrupted():
        raise KeyboardInterrupt


def _on_machine(spec: LabSpec, settings: Settings) -> LabSpec:
    """Return what is trained here: with the weights that were given, and the precision of the device."""
    amp = "bfloat16" if torch.device(settings.device).type == "cuda" else "none"
    teacher, seed_model = (below and _on_machine(below, settings) for below in (spec.teacher, spec.seed_model))
    spec = replace(spec, amp=amp, teacher=teacher, seed_model=seed_model)
    if settings.quick:
        return quick_spec(spec)
    if spec.pretrained and settings.weights is not None:
        return replace(spec, pretrained=False, weights=settings.weights)
    return spec


def _teachers(specs: Sequence[LabSpec], store: Store, device: str) -> list[Classifier | None]:
    """Return the networks that teach, one object for all runs that have the same."""
    paths = [None if spec.teacher is None else store.model_path(spec.teacher) for spec in specs]
    loaded = {path: load_network(path, device) for path in set(paths) if path is not None}
    return [None if path is None else loaded[path] for path in paths]


def _shown(
    specs: Sequence[LabSpec], choosing: bool, source: Source, store: Store
) -> list[tuple[Images, Images, dict[str, Any]]]:
    """Return what each run is trained and tested on, and what its result tells of how images were selected.

    Runs that see the same are given the same object, by which `train` knows it.
    """
    shown: dict[tuple[Any, ...], tuple[Images, Images, dict[str, Any]]] = {}
    keys = []
    for spec in specs:
        model = None if spec.seed_model is None else store.model_path(spec.seed_model)
        keys.append((spec.data, *((spec.subset, model, spec.seed) if spec.subset is not None else ())))
        if keys[-1] not in shown:
            shown[keys[-1]] = _images(spec, choosing, source.open(spec), store)
    return [shown[key] for key in keys]


def _images(spec: LabSpec, choosing: bool, opened: Opened, store: Store) -> tuple[Images, Images, dict[str, Any]]:
    if choosing:
        kept, held = hold_out(opened.train.labels.cpu().numpy(), HELD_OUT, seed=0)
        return opened.train.restricted(kept), opened.train.restricted(held), {}
    if spec.subset is not None:
        subset, selection = _subset(spec, opened, store)
        return opened.train.restricted(subset), opened.test, selection
    return opened.train, opened.test, {}


def _subset(spec: LabSpec, opened: Opened, store: Store) -> tuple[Tensor, dict[str, Any]]:
    """Return indices of a subset for active learning: the random tenth of the seed model, and what was chosen then.

    Where a network chose, `selection` comes with them: the strategy, the number of images put in order once for all
    budgets, and the seconds that took. The seconds in which the network looked at the images are left out.
    """
    assert spec.subset is not None
    samples = len(opened.train)
    count = samples * spec.subset.percent // 100
    random = select("random", samples * PERCENTS[-1] // 100, samples=samples, seed=spec.seed)
    if spec.subset.strategy == "random" or spec.seed_model is None:
        return random[:count], {}
    model_path = store.model_path(spec.seed_model)
    order_path = model_path.with_name(f"{model_path.stem}-{spec.subset.strategy}.safetensors")
    first = random[: samples * FIRST // 100]
    try:
        tensors, selection = load_checkpoint(order_path)
        chosen = tensors["chosen"]
    except BrokenCheckpointError:
        logits, embeddings = _embed(load_network(model_path, opened.train.labels.device), opened.train)
        began = time.perf_counter()
        chosen = select(
            spec.subset.strategy,
            len(random) - len(first),
            probabilities=torch.softmax(logits, 1),
            embeddings=embeddings,
            labelled=first,
        )
        seconds = time.perf_counter() - began
        selection = {"strategy": spec.subset.strategy, "images": len(chosen), "seconds": seconds}
        save_checkpoint(order_path, {"chosen": chosen}, selection)
    return torch.cat([first, chosen])[:count], {"selection": selection}


def _embed(model: Classifier, data: Images) -> tuple[Tensor, Tensor]:
    """Return logits (n, C) and features (n, D) of all images, on the CPU and the device."""
    return predict(model, data), predict(model.backbone, data).to(data.labels.device)
