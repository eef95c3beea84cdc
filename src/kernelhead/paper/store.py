"""Where runs of the paper's image experiments are kept, and what is still to be run. Plain files, one JSON a run.

    RUNS/<data>/<epochs>-epochs/<protocol>/<recipe>/choice-lr0.1-wd0.0001.json     held-out accuracy of a candidate
    RUNS/<data>/<epochs>-epochs/<protocol>/<recipe>/seed0.json                     a training on all images
    RUNS/<data>/<epochs>-epochs/<protocol>/<recipe>/seed0.safetensors              its classifier

Tables share runs: a run belongs to its recipe, not to a table. What is missing is a function of the files alone, so a
stopped command goes on wherever it was.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernelhead.paper.recipe import Protocol, Recipe
from kernelhead.results import BrokenResultError, load_result


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


class Store:
    """The runs below a folder, each file read once."""

    def __init__(self, root: Path, epochs: int) -> None:
        self.root, self.epochs = root, epochs
        self.broken: list[str] = []
        self._read: dict[Path, dict[str, Any] | None] = {}
        self._seconds: dict[tuple[str, str], list[float]] | None = None

    def folder(self, recipe: Recipe, protocol: Protocol) -> Path:
        return self.root / recipe.data / f"{self.epochs}-epochs" / protocol.name / recipe.key

    def choice_path(self, recipe: Recipe, protocol: Protocol, rate: float, decay: float) -> Path:
        return self.folder(recipe, protocol) / f"choice-lr{rate:g}-wd{decay:g}.json"

    def result_path(self, recipe: Recipe, protocol: Protocol, seed: int) -> Path:
        return self.folder(recipe, protocol) / f"seed{seed}.json"

    def model_path(self, recipe: Recipe, protocol: Protocol, seed: int) -> Path:
        return self.folder(recipe, protocol) / f"seed{seed}.safetensors"

    def read(self, path: Path) -> dict[str, Any] | None:
        """A finished run's result; None where there is none, or none that can be read."""
        if self._read.get(path) is None:
            try:
                self._read[path] = load_result(path) if path.exists() else None
            except BrokenResultError as error:
                self._read[path] = None
                if str(error) not in self.broken:
                    self.broken.append(str(error))
        return self._read[path]

    def results(self, recipe: Recipe, protocol: Protocol) -> dict[int, dict[str, Any]]:
        """Finished final runs by seed."""
        found = {}
        for path in sorted(self.folder(recipe, protocol).glob("seed*.json")):
            result = self.read(path)
            if result is not None:
                found[int(result["seed"])] = result
        return found

    def choice(self, recipe: Recipe, protocol: Protocol) -> tuple[float, float] | None:
        """Learning rate and weight decay of the best held-out accuracy; None while a candidate is missing.

        A candidate that diverged loses to all others; of equals, the first of the protocol's order wins.
        """
        candidates = protocol.candidates()
        if len(candidates) == 1:
            return candidates[0]
        results = [self.read(self.choice_path(recipe, protocol, *candidate)) for candidate in candidates]
        if any(result is None for result in results):
            return None
        accuracies = [
            -1.0 if result is None or result["accuracy"] is None else result["accuracy"] for result in results
        ]
        return candidates[accuracies.index(max(accuracies))]

    def missing(self, recipe: Recipe, protocol: Protocol, seeds: Sequence[int]) -> list[Job]:
        """The trainings that can be done now towards the final runs of a recipe: those that it builds on first."""
        wanted = [seed for seed in seeds if self.read(self.result_path(recipe, protocol, seed)) is None]
        if not wanted:
            return []
        builds_on = [] if recipe.teacher is None else [(recipe.teacher, wanted)]
        if recipe.seed_model is not None:
            builds_on.append((recipe.seed_model, wanted))
        for other, its_seeds in builds_on:
            jobs = self.missing(other, protocol, its_seeds)
            if jobs:
                return jobs
        chooser = recipe.chosen_as or recipe
        choice = self.choice(chooser, protocol)
        if choice is None:
            return [*self._candidates(chooser, protocol)]
        return [
            Job(recipe, protocol, self.epochs, seed, *choice, False, self.result_path(recipe, protocol, seed))
            for seed in wanted
        ]

    def _candidates(self, recipe: Recipe, protocol: Protocol) -> Iterator[Job]:
        if recipe.teacher is not None:
            yield from self.missing(recipe.teacher, protocol, [0])
        for rate, decay in protocol.candidates():
            path = self.choice_path(recipe, protocol, rate, decay)
            if self.read(path) is None:
                yield Job(recipe, protocol, self.epochs, 0, rate, decay, True, path)

    def count(self, recipe: Recipe, protocol: Protocol, seeds: Sequence[int]) -> tuple[int, int]:
        """Trainings done and trainings in all for a recipe, its choice counted in."""
        paths = [self.result_path(recipe, protocol, seed) for seed in seeds]
        if recipe.chosen_as is None and len(protocol.candidates()) > 1:
            paths += [self.choice_path(recipe, protocol, *candidate) for candidate in protocol.candidates()]
        return sum(self.read(path) is not None for path in paths), len(paths)

    def seconds_left(self, recipes: Sequence[Recipe], protocol: Protocol, seeds: Sequence[int]) -> float | None:
        """How long the missing trainings take, judged by finished ones of the same network; None if there are none."""
        left = 0.0
        for recipe in recipes:
            done, total = self.count(recipe, protocol, seeds)
            if done == total:
                continue
            paces = self._paces().get((recipe.data, recipe.backbone))
            if not paces:
                return None
            left += (total - done) * float(np.median(paces))
        return left

    def _paces(self) -> dict[tuple[str, str], list[float]]:
        """Seconds of finished trainings, by data and backbone."""
        if self._seconds is None:
            self._seconds = {}
            for path in self.root.glob(f"*/{self.epochs}-epochs/*/*/*.json"):
                result = self.read(path)
                if result is not None:
                    key = result["experiment"], result["config"]["backbone"]
                    self._seconds.setdefault(key, []).append(result["seconds"])
        return self._seconds
