"""Which trainings are done together, and what is noted of those that go on."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelhead.data import cifar
from kernelhead.paper.store import Job

PARTIAL = ".partial"  # the folder of what is being trained


def kind_of(data: str) -> str:
    """What data sets share whose networks can be trained together: both CIFARs have as many images."""
    return "cifar" if data in cifar.CLASSES else data


def name_of(path: Path, root: Path) -> str:
    """A result's place in the folder of all."""
    return path.relative_to(root).as_posix()


def digest_of(names: Sequence[str]) -> str:
    """A name for the group of these results."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def next_group(jobs: dict[Path, Job], root: Path, kinds: Sequence[str], at_once: int) -> list[Job]:
    """Those of `jobs`, by the place of their results, to be trained now; none where there are none.

    A group that was stopped comes first. Then one kind of data after the other, in the order of `kinds`: other data are
    not kept in memory. Choices come first, of all methods together: then there are full groups of what they decide.
    """
    if not jobs:
        return []
    ordered = sorted(jobs.values(), key=lambda job: (kinds.index(kind_of(job.recipe.data)), not job.choosing))
    return _stopped(root, jobs) or _first(_alike(ordered), at_once)


def read_note(path: Path) -> dict[str, Any]:
    """Which results a group of trainings is to have, relative to the folder of all, and its seconds so far."""
    try:
        note: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {"paths": [], "seconds": 0.0}
    return note


def _stopped(root: Path, jobs: dict[Path, Job]) -> list[Job]:
    """Those of a group that was stopped while it was trained, and can go on; none if there is no such group."""
    for note in sorted((root / PARTIAL).glob("*.json")):
        paths = [root / path for path in read_note(note)["paths"]]
        if paths and all(path in jobs for path in paths):
            return [jobs[path] for path in paths]
    return []


def _alike(jobs: list[Job]) -> list[Job]:
    """Those that can be trained together with the first: as long, on as many images, batches alike."""

    def shape(job: Job) -> tuple[Any, ...]:
        protocol, percent = job.protocol, None if job.recipe.subset is None else job.recipe.subset.percent
        images = kind_of(job.recipe.data), job.choosing, percent
        return *images, job.epochs, protocol.batch_size, protocol.warmup_epochs

    return [job for job in jobs if shape(job) == shape(jobs[0])]


def _first(jobs: list[Job], at_once: int) -> list[Job]:
    """Those to be trained now: as many at a time as needed, of equal number: of 9, at most 8 at once, 5 and then 4.

    Networks like the first come first, and by themselves if there are enough to fill half of the places: beside a
    deeper one the shallow ones wait at every step, but a few alone leave a GPU idle.
    """
    same = [job for job in jobs if job.recipe.backbone == jobs[0].recipe.backbone]
    others = [job for job in jobs if job.recipe.backbone != jobs[0].recipe.backbone]
    jobs = same if 2 * len(same) >= at_once else same + others
    times = -(-len(jobs) // at_once)
    return jobs[: -(-len(jobs) // times)]
