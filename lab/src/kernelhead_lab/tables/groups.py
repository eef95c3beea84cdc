"""Which runs are trained together, and what is noted of those that go on."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelhead.finetune import cifar
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables.store import Missing, is_choice

PARTIAL = ".partial"  # the folder of what is being trained


def kind_of(spec: LabSpec) -> str:
    """Return what specs share that can be trained together: both CIFARs have as many images."""
    return "cifar" if spec.data in cifar.CLASSES else f"{spec.data}, {spec.augment}"


def name_of(path: Path, root: Path) -> str:
    """Return a result's path within the folder of all."""
    return path.relative_to(root).as_posix()


def digest_of(names: Sequence[str]) -> str:
    """Return a name for the group of these results."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def next_group(jobs: Missing, root: Path, kinds: Sequence[str], at_once: int) -> Missing:
    """Return those of `jobs` to be trained now.

    A group that was stopped comes first. Then one kind of data after the other, in the order of `kinds`: other data are
    not kept in memory. Choices come first, of all methods together: then there are full groups of what they decide.
    """
    if not jobs:
        return {}
    ordered = sorted(jobs, key=lambda path: (kinds.index(kind_of(jobs[path])), not is_choice(path)))
    chosen = _stopped(root, jobs) or _first(_alike(ordered, jobs), jobs, at_once)
    return {path: jobs[path] for path in chosen}


def read_note(path: Path) -> dict[str, Any]:
    """Return the results that a group is to have, relative to the folder of all, and its seconds so far."""
    try:
        note: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {"paths": [], "seconds": 0.0}
    return note


def _stopped(root: Path, jobs: Missing) -> list[Path]:
    """Return a group that was stopped while it was trained, and can go on; none if there is no such group."""
    for note in sorted((root / PARTIAL).glob("*.json")):
        paths = [root / path for path in read_note(note)["paths"]]
        if paths and all(path in jobs for path in paths):
            return paths
    return []


def _alike(paths: list[Path], jobs: Missing) -> list[Path]:
    """Return those that can be trained together with the first: as long, on as many images, batches alike."""

    def shape(path: Path) -> tuple[Any, ...]:
        spec = jobs[path]
        images = kind_of(spec), is_choice(path), None if spec.subset is None else spec.subset.percent
        return *images, spec.epochs, spec.batch_size, spec.warmup_epochs

    return [path for path in paths if shape(path) == shape(paths[0])]


def _first(paths: list[Path], jobs: Missing, at_once: int) -> list[Path]:
    """Return those to be trained now, in groups of equal size: nine, at most eight at once, are five and then four.

    Networks like the first come first, and by themselves if there are enough to fill half a group. Beside a deeper
    network the shallow ones wait at every step, but a few alone leave a GPU idle.
    """
    backbone = jobs[paths[0]].backbone
    same = [path for path in paths if jobs[path].backbone == backbone]
    others = [path for path in paths if jobs[path].backbone != backbone]
    paths = same if 2 * len(same) >= at_once else same + others
    groups = -(-len(paths) // at_once)
    return paths[: -(-len(paths) // groups)]
