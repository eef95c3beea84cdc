"""Where runs of the paper's image experiments are kept, and what is still to be run. Plain files, one JSON a run.

    RUNS/<data>/<epochs>-epochs/<recipe>/choice-lr0.1-wd0.0001.json          held-out accuracy of a candidate
    RUNS/<data>/<epochs>-epochs/<recipe>/lr0.1-wd0.0001-seed0.json           a training on all images
    RUNS/<data>/<epochs>-epochs/<recipe>/lr0.1-wd0.0001-seed0.safetensors    its classifier

with a word more, such as lr0.01-wd0.0001-head10, where the head's learning rate is ten times the other.

A candidate stands with the epochs of its own training, which may be fewer (`Protocol.choosing_epochs`).
Tables and protocols share runs: a protocol only says what is chosen from. A recipe that builds on other networks, which
each protocol chooses by itself, has a folder for each, <recipe>-<protocol>. What is missing is a function of the files
alone, so a stopped command goes on wherever it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernelhead.paper.recipe import Candidate, Protocol, Recipe
from kernelhead.results import BrokenResultError, check_fields, load_result

NEEDED = ("experiment", "method", "seed", "config", "parameters", "accuracy", "seconds", "images", "curve", "hardware")
TESTED = ("nll", "ece")  # with an accuracy


@dataclass(frozen=True)
class Job:
    """One training: a candidate's, tested on held-out images, or a final one, tested on the test images."""

    recipe: Recipe
    protocol: Protocol
    epochs: int
    seed: int
    learning_rate: float
    weight_decay: float
    choosing: bool
    path: Path
    head_rate: float = 1.0


class Store:
    """The runs below a folder, each file read once."""

    def __init__(self, root: Path, epochs: int) -> None:
        self.root, self.epochs = root, epochs
        self.broken: list[str] = []
        self._read: dict[Path, dict[str, Any] | None] = {}
        self._seconds: dict[tuple[str, str], list[float]] | None = None

    def folder(self, recipe: Recipe, protocol: Protocol, epochs: int | None = None) -> Path:
        """Where the runs of a recipe are, of `epochs` if not those of the store."""
        name = f"{recipe.key}-{protocol.name}" if _builds_on(recipe) else recipe.key
        return self.root / recipe.data / f"{epochs or self.epochs}-epochs" / name

    def choice_path(self, recipe: Recipe, protocol: Protocol, candidate: Candidate) -> Path:
        folder = self.folder(recipe, protocol, protocol.epochs_to_choose(self.epochs))
        return folder / f"choice-{_setting(candidate)}.json"

    def result_path(self, recipe: Recipe, protocol: Protocol, seed: int) -> Path | None:
        """None while learning rate and weight decay are not chosen."""
        choice = self.choice(recipe, protocol)
        return None if choice is None else self._final_path(recipe, protocol, choice, seed)

    def _final_path(self, recipe: Recipe, protocol: Protocol, choice: Candidate, seed: int) -> Path:
        return self.folder(recipe, protocol) / f"{_setting(choice)}-seed{seed}.json"

    def model_path(self, recipe: Recipe, protocol: Protocol, seed: int) -> Path:
        path = self.result_path(recipe, protocol, seed)
        if path is None:
            raise FileNotFoundError(f"{recipe.key} has no network of seed {seed} yet")
        return path.with_suffix(".safetensors")

    def read(self, path: Path) -> dict[str, Any] | None:
        """A finished run's result; None where there is none, or none that can be read."""
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

    def results(self, recipe: Recipe, protocol: Protocol) -> dict[int, dict[str, Any]]:
        """Finished final runs by seed."""
        choice = self.choice(recipe, protocol)
        if choice is None:
            return {}
        found = {}
        for path in sorted(self.folder(recipe, protocol).glob(f"{_setting(choice)}-seed*.json")):
            result = self.read(path)
            if result is not None:
                found[int(result["seed"])] = result
        return found

    def choice(self, recipe: Recipe, protocol: Protocol) -> Candidate | None:
        """Learning rates and weight decay of the best held-out accuracy; None while a candidate is missing.

        A candidate that diverged loses to all others; of equals, the first of the protocol's order wins.
        """
        candidates = protocol.candidates()
        if len(candidates) == 1:
            return candidates[0]
        results = [self.read(self.choice_path(recipe.chooser, protocol, candidate)) for candidate in candidates]
        if any(result is None for result in results):
            return None
        accuracies = [
            -1.0 if result is None or result["accuracy"] is None else result["accuracy"] for result in results
        ]
        return candidates[accuracies.index(max(accuracies))]

    def missing(self, recipe: Recipe, protocol: Protocol, seeds: Sequence[int], *, networks: bool = False) -> list[Job]:
        """The trainings that can be done now towards the final runs of a recipe: those that it builds on first.

        With `networks`, a run without its classifier, as where only the result files were kept, is missing too.
        Nothing can be built on a network that diverged, so there are none for its seed.
        """
        choice = self.choice(recipe, protocol)
        if choice is None:
            return self._candidates(recipe.chooser, protocol, seeds)
        paths = {seed: self._final_path(recipe, protocol, choice, seed) for seed in seeds}
        wanted = [seed for seed, path in paths.items() if not self._done(path, networks)]
        for other in _builds_on(recipe):
            jobs = self.missing(other, protocol.base, wanted, networks=True)
            if jobs:
                return jobs
            wanted = [seed for seed in wanted if self._converged(other, protocol.base, seed)]
        return [
            Job(recipe, protocol, self.epochs, seed, *choice[:2], False, paths[seed], choice.head_rate)
            for seed in wanted
        ]

    def _done(self, path: Path, networks: bool) -> bool:
        result = self.read(path)
        if result is None:
            return False
        return not networks or result["accuracy"] is None or path.with_suffix(".safetensors").exists()

    def _converged(self, recipe: Recipe, protocol: Protocol, seed: int) -> bool:
        path = self.result_path(recipe, protocol, seed)
        result = None if path is None else self.read(path)
        return result is not None and result["accuracy"] is not None

    def _candidates(self, recipe: Recipe, protocol: Protocol, seeds: Sequence[int]) -> list[Job]:
        if recipe.teacher is not None:
            # Candidates need that of seed 0 alone. Those of final runs come with it: later they would be a small group.
            jobs = self.missing(recipe.teacher, protocol.base, sorted({0, *seeds}), networks=True)
            if jobs or not self._converged(recipe.teacher, protocol.base, 0):
                return jobs
        paths = {candidate: self.choice_path(recipe, protocol, candidate) for candidate in protocol.candidates()}
        epochs = protocol.epochs_to_choose(self.epochs)
        return [
            Job(recipe, protocol, epochs, 0, *candidate[:2], True, path, candidate.head_rate)
            for candidate, path in paths.items()
            if self.read(path) is None
        ]

    def count(self, wanted: Iterable[tuple[Recipe, Protocol]], seeds: Sequence[int]) -> tuple[int, int]:
        """Trainings done and trainings in all for recipes, with choices and what they build on, each counted once."""
        needed: dict[Path, _Training] = {}
        for recipe, protocol in wanted:
            needed |= self._needed([recipe], protocol, seeds)
        return sum(self.read(path) is not None for path in needed), len(needed)

    def _needed(self, recipes: Sequence[Recipe], protocol: Protocol, seeds: Sequence[int]) -> "dict[Path, _Training]":
        """The files of all trainings behind the final runs of recipes, and what each trains for how long.

        A final run that is not chosen yet stands under a name of its own that no file has.
        """
        needed: dict[Path, _Training] = {}
        for recipe in recipes:
            needed |= self._needed(_builds_on(recipe), protocol.base, seeds)
            chooser = recipe.chooser
            if len(protocol.candidates()) > 1:
                choosing = _Training(chooser, protocol.epochs_to_choose(self.epochs))
                needed |= {self.choice_path(chooser, protocol, each): choosing for each in protocol.candidates()}
            # Not chosen yet: told apart by what chooses, and from what. Protocols of one name differ between tables.
            choosing_folder = self.folder(chooser, protocol, protocol.epochs_to_choose(self.epochs))
            grid = "-".join(_setting(candidate) for candidate in protocol.candidates())
            for seed in seeds:
                unknown = choosing_folder / recipe.key / f"{protocol.name}-{grid}-seed{seed}"
                needed[self.result_path(recipe, protocol, seed) or unknown] = _Training(recipe, self.epochs)
        return needed

    def seconds_left(self, recipes: Sequence[Recipe], protocol: Protocol, seeds: Sequence[int]) -> float | None:
        """How long the missing trainings take, judged by finished ones of the same network; None if there are none."""
        left = 0.0
        for path, (recipe, epochs) in self._needed(recipes, protocol, seeds).items():
            if self.read(path) is not None:
                continue
            paces = self._paces().get((recipe.data, recipe.backbone))
            if not paces:
                return None
            left += epochs * float(np.median(paces))
        return left

    def _paces(self) -> dict[tuple[str, str], list[float]]:
        """Seconds an epoch of finished trainings, by data and backbone."""
        if self._seconds is None:
            self._seconds = {}
            for path in self.root.glob("*/*-epochs/*/*.json"):
                result, epochs = self.read(path), path.parts[-3].removesuffix("-epochs")
                if result is not None and epochs.isdigit():
                    key = result["experiment"], result["config"]["backbone"]
                    self._seconds.setdefault(key, []).append(result["seconds"] / int(epochs))
        return self._seconds


def weights_of(result: dict[str, Any]) -> dict[str, str] | None:
    """The file of weights that the network of a run began with, as the run names it; None without one."""
    found: dict[str, str] | None = result["config"].get("backbone_options", {}).get("weights")
    return found


class _Training(NamedTuple):
    """What is trained, for how long."""

    recipe: Recipe
    epochs: int


def _builds_on(recipe: Recipe) -> list[Recipe]:
    """Those whose networks of the same seed it needs."""
    return [other for other in (recipe.teacher, recipe.seed_model) if other is not None]


def _setting(candidate: Candidate) -> str:
    of_head = f"-head{candidate.head_rate:g}" if candidate.head_rate != 1 else ""
    return f"lr{candidate.learning_rate:g}-wd{candidate.weight_decay:g}{of_head}"


def _load(path: Path) -> dict[str, Any]:
    result = load_result(path, NEEDED)
    if result["accuracy"] is not None:
        check_fields(path, result, TESTED)
    return result
