"""Where results of the experiments on images are kept, and what is still to be run. Plain files, one JSON per run.

    RUNS/<data>/<epochs>-epochs/<key>/choice-lr0.1-wd0.0001.json          held-out accuracy of a candidate
    RUNS/<data>/<epochs>-epochs/<key>/lr0.1-wd0.0001-seed0.json           a run on all images
    RUNS/<data>/<epochs>-epochs/<key>/lr0.1-wd0.0001-seed0.safetensors    its network

with a word more, such as lr0.01-wd0.0001-head10, where the head's learning rate is ten times the network's.

A candidate stands with the epochs of its own run, which may be fewer (`Protocol.choosing_epochs`). Tables and protocols
share runs: a protocol only says what is chosen from. A run that builds on another network, which each protocol chooses
by itself, has a folder per protocol, <key>-<protocol>. The
files alone tell what is missing, so a stopped command goes on wherever it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernelhead.finetune.results import BrokenResultError, load_result
from kernelhead.finetune.spec import TrainResult
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables.experiment import Candidate, Cell, Protocol

Missing = dict[Path, LabSpec]
"""Runs to be done, by the files of their results."""

CHOICE = "choice-"
# Settings that a file name stands for. The others depend on the machine, or on where weights lie.
SAID_BY_NAME = ("data", "head", "head_options", "rectified", "mixup", "backbone_options", "subset")
SETTINGS = ("epochs", "learning_rate", "weight_decay", "head_rate")


class Store:
    """The results below a folder, each file read once."""

    def __init__(self, root: Path, epochs: int) -> None:
        self.root, self.epochs = root, epochs
        self.broken: list[str] = []
        self._read: dict[Path, TrainResult | None] = {}
        self._seconds: dict[tuple[str, str], list[float]] | None = None

    def folder(self, spec: LabSpec, protocol: Protocol, epochs: int | None = None) -> Path:
        """Return where the results of a spec are, of `epochs` if not those of the store."""
        builds_on = spec.teacher is not None or spec.seed_model is not None
        name = f"{spec.key}-{protocol.name}" if builds_on else spec.key
        return self.root / spec.data / f"{epochs or self.epochs}-epochs" / name

    def choice_path(self, cell: Cell, protocol: Protocol, candidate: Candidate) -> Path:
        """Return the file of a candidate."""
        folder = self.folder(cell.spec, protocol, protocol.epochs_to_choose(self.epochs))
        return folder / f"{CHOICE}{_setting(candidate)}.json"

    def result_path(self, cell: Cell, protocol: Protocol, seed: int) -> Path | None:
        """Return the file of a run on all images; None while learning rate and weight decay are not chosen."""
        choice = self.choice(cell, protocol)
        return None if choice is None else self._final_path(cell, protocol, choice, seed)

    def _final_path(self, cell: Cell, protocol: Protocol, choice: Candidate, seed: int) -> Path:
        return self.folder(cell.spec, protocol) / f"{_setting(choice)}-seed{seed}.json"

    def model_path(self, spec: LabSpec) -> Path:
        """Return the file of a network that others build on; such networks build on none themselves."""
        assert spec.epochs is not None
        assert spec.teacher is None
        assert spec.seed_model is None
        folder = self.root / spec.data / f"{spec.epochs}-epochs" / spec.key
        return folder / f"{_setting(candidate_of(spec))}-seed{spec.seed}.safetensors"

    def read(self, path: Path) -> TrainResult | None:
        """Return a finished run's result; None without a readable one."""
        if self._read.get(path) is None:
            try:
                self._read[path] = _load(path) if path.exists() else None
            except BrokenResultError as error:
                self._read[path] = None
                if str(error) not in self.broken:
                    self.broken.append(str(error))
        return self._read[path]

    def forget(self, path: Path) -> None:
        """Read a file again that has been written."""
        self._read.pop(path, None)

    def results(self, cell: Cell, protocol: Protocol) -> dict[int, TrainResult]:
        """Return the finished runs on all images by seed."""
        choice = self.choice(cell, protocol)
        if choice is None:
            return {}
        found = {}
        for path in sorted(self.folder(cell.spec, protocol).glob(f"{_setting(choice)}-seed*.json")):
            result = self.read(path)
            if result is not None:
                self._check(path, result, protocol.applied(cell.spec, choice, self.epochs, result.spec.seed))
                found[result.spec.seed] = result
        return found

    def choice(self, cell: Cell, protocol: Protocol) -> Candidate | None:
        """Return the candidate of the best held-out accuracy; None while one is missing.

        A candidate that diverged loses to all others; of equals, the first of the protocol's order wins.
        """
        candidates = self.candidates(cell, protocol)
        if len(candidates) == 1:
            return candidates[0]
        return self._best(cell, protocol, candidates)

    def candidates(self, cell: Cell, protocol: Protocol) -> list[Candidate]:
        """Return what is tried for a cell; with `rate_first`, as far as it is known."""
        everything = protocol.candidates()
        if not protocol.rate_first:
            return everything
        first = [candidate for candidate in everything if candidate.weight_decay == protocol.weight_decays[0]]
        best = self._best(cell, protocol, first)
        if best is None:
            return first
        return first + [each for each in everything if each not in first and each[::2] == best[::2]]

    def _best(self, cell: Cell, protocol: Protocol, candidates: Sequence[Candidate]) -> Candidate | None:
        chooser, epochs = cell.chooser, protocol.epochs_to_choose(self.epochs)
        accuracies = []
        for candidate in candidates:
            path = self.choice_path(chooser, protocol, candidate)
            result = self.read(path)
            if result is None:
                return None
            self._check(path, result, protocol.applied(chooser.spec, candidate, epochs, 0))
            accuracies.append(-1.0 if result.accuracy is None else result.accuracy)
        return candidates[accuracies.index(max(accuracies))]

    def _check(self, path: Path, result: TrainResult, expected: LabSpec) -> None:
        """Refuse a file whose run is not what its name says: the same name may have meant another head."""
        for name in (*SAID_BY_NAME, *SETTINGS):
            found, wanted = getattr(result.spec, name), getattr(expected, name)
            if found != wanted:
                raise BrokenResultError(
                    f"{path} holds a run with {name}={found!r}, and its name says {wanted!r}; delete it and run again"
                )

    def resolved(self, cell: Cell, protocol: Protocol, candidate: Candidate, epochs: int, seed: int) -> LabSpec:
        """Return what is trained for a cell, with the network that it builds on; that has to be chosen."""
        spec = protocol.applied(cell.spec, candidate, epochs, seed)
        if cell.builds_on is None:
            return spec
        choice = self.choice(cell.builds_on, protocol.base)
        assert choice is not None
        below = protocol.base.applied(cell.builds_on.spec, choice, self.epochs, seed)
        return replace(spec, teacher=below) if spec.teacher is not None else replace(spec, seed_model=below)

    def missing(self, cell: Cell, protocol: Protocol, seeds: Sequence[int], *, networks: bool = False) -> Missing:
        """Return the runs that can be done now towards the final ones of a cell: those that it builds on first.

        With `networks`, a run without its network, as where only the result files were kept, is missing too. Nothing
        can be built on a network that diverged, so there is nothing for its seed.
        """
        choice = self.choice(cell, protocol)
        if choice is None:
            return self._candidates(cell.chooser, protocol, seeds)
        paths = {seed: self._final_path(cell, protocol, choice, seed) for seed in seeds}
        wanted = [seed for seed, path in paths.items() if not self._done(path, networks)]
        if cell.builds_on is not None:
            below = self.missing(cell.builds_on, protocol.base, wanted, networks=True)
            if below:
                return below
            wanted = [seed for seed in wanted if self._converged(cell.builds_on, protocol.base, seed)]
        return {paths[seed]: self.resolved(cell, protocol, choice, self.epochs, seed) for seed in wanted}

    def _done(self, path: Path, networks: bool) -> bool:
        result = self.read(path)
        if result is None:
            return False
        return not networks or result.accuracy is None or path.with_suffix(".safetensors").exists()

    def _converged(self, cell: Cell, protocol: Protocol, seed: int) -> bool:
        path = self.result_path(cell, protocol, seed)
        result = None if path is None else self.read(path)
        return result is not None and result.accuracy is not None

    def _candidates(self, cell: Cell, protocol: Protocol, seeds: Sequence[int]) -> Missing:
        if cell.builds_on is not None:
            # Candidates need the network of seed 0 alone. Those of final runs come with it: later they would be a
            # small group.
            below = self.missing(cell.builds_on, protocol.base, sorted({0, *seeds}), networks=True)
            if below or not self._converged(cell.builds_on, protocol.base, 0):
                return below
        epochs = protocol.epochs_to_choose(self.epochs)
        paths = {
            candidate: self.choice_path(cell, protocol, candidate) for candidate in self.candidates(cell, protocol)
        }
        return {
            path: self.resolved(cell, protocol, candidate, epochs, 0)
            for candidate, path in paths.items()
            if self.read(path) is None
        }

    def count(self, wanted: Iterable[tuple[Cell, Protocol]], seeds: Sequence[int]) -> tuple[int, int]:
        """Return how many runs are done and needed for cells, with choices and what they build on, each once."""
        needed: dict[Path, _Length] = {}
        for cell, protocol in wanted:
            needed |= self._needed(cell, protocol, seeds)
        return sum(self.read(path) is not None for path in needed), len(needed)

    def _needed(self, cell: Cell, protocol: Protocol, seeds: Sequence[int]) -> "dict[Path, _Length]":
        """Return the files of all runs behind the final runs of a cell, and how long each trains what.

        A final run that is not chosen yet stands under a name of its own that no file has.
        """
        needed = {} if cell.builds_on is None else self._needed(cell.builds_on, protocol.base, seeds)
        chooser, epochs = cell.chooser, protocol.epochs_to_choose(self.epochs)
        if len(protocol.candidates()) > 1:
            length = _Length(chooser.spec, epochs)
            needed |= {self.choice_path(chooser, protocol, each): length for each in self.candidates(chooser, protocol)}
        # Not chosen yet: told apart by what chooses, and from what. Protocols of one name differ between tables.
        choosing_folder = self.folder(chooser.spec, protocol, epochs)
        grid = "-".join(_setting(candidate) for candidate in protocol.candidates())
        for seed in seeds:
            unknown = choosing_folder / cell.spec.key / f"{protocol.name}-{grid}-seed{seed}"
            needed[self.result_path(cell, protocol, seed) or unknown] = _Length(cell.spec, self.epochs)
        return needed

    def seconds_left(self, cells: Sequence[Cell], protocol: Protocol, seeds: Sequence[int]) -> float | None:
        """Return how long missing runs take, judged by finished ones of the same network; None without any."""
        needed: dict[Path, _Length] = {}
        for cell in cells:
            needed |= self._needed(cell, protocol, seeds)
        left = 0.0
        for path, (spec, epochs) in needed.items():
            if self.read(path) is not None:
                continue
            paces = self._paces().get((spec.data, spec.backbone))
            if not paces:
                return None
            left += epochs * float(np.median(paces))
        return left

    def _paces(self) -> dict[tuple[str, str], list[float]]:
        """Return seconds per epoch of finished runs, by data and backbone."""
        if self._seconds is None:
            self._seconds = {}
            for path in self.root.glob("*/*-epochs/*/*.json"):
                result = self.read(path)
                if result is not None and result.spec.epochs:
                    key = result.spec.data, result.spec.backbone
                    self._seconds.setdefault(key, []).append(result.seconds / result.spec.epochs)
        return self._seconds


def weights_of(result: TrainResult) -> dict[str, str] | None:
    """Return the file of weights that a network began with, as `outcome.file_of_weights` names it; None without one."""
    found: dict[str, str] | None = result.extra.get("weights")
    return found


def hardware_of(result: TrainResult) -> dict[str, Any]:
    """Return the machine that a run was made on."""
    found: dict[str, Any] = result.extra["environment"]["hardware"]
    return found


def is_choice(path: Path) -> bool:
    """Whether a file is of a candidate, which is tested on held-out images."""
    return path.name.startswith(CHOICE)


class _Length(NamedTuple):
    """A run and its epochs."""

    spec: LabSpec
    epochs: int


def candidate_of(spec: LabSpec) -> Candidate:
    """Return the settings of a resolved spec that were chosen."""
    assert spec.learning_rate is not None
    assert spec.weight_decay is not None
    return Candidate(spec.learning_rate, spec.weight_decay, 1.0 if spec.head_rate is None else spec.head_rate)


def _setting(candidate: Candidate) -> str:
    of_head = f"-head{candidate.head_rate:g}" if candidate.head_rate != 1 else ""
    return f"lr{candidate.learning_rate:g}-wd{candidate.weight_decay:g}{of_head}"


def _load(path: Path) -> TrainResult:
    result = load_result(path, LabSpec)
    if result.accuracy is not None and (result.nll is None or result.ece is None):
        raise BrokenResultError(f"{path} has an accuracy and no nll or ece; delete it and run again")
    if "environment" not in result.extra:
        raise BrokenResultError(f"{path} does not say where it was run; delete it and run again")
    return result
