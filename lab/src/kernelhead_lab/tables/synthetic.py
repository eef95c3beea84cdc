"""Table 1 and Figure 1: two classes on the sphere S^2.

The paper shows one draw of the cluster centers; here each draw is a run, since accuracy differs more between draws than
between methods. Two protocols:

- `paper`: the paper's Appendix B and section 6. relu coefficients, weight decay 1e-4, one start; the learning rate is
  chosen from {0.05, 0.1, 0.3, 1.0}.
- `tuned`: softplus coefficients, with which a random start ends higher than with relu; learning rate and weight decay
  are chosen. The loss has bad local minima, so the best of four starts by training loss is kept.

Learning rate and weight decay are chosen for each draw on a fifth of its training data, held out. The final heads are
trained on all of it. Test data choose nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kernelhead import metrics
from kernelhead.finetune.checkpoint import load_checkpoint, save_checkpoint
from kernelhead.finetune.results import BrokenResultError, load_result, save_result
from kernelhead.finetune.spec import TrainResult
from kernelhead.heads import create_head
from kernelhead.tables import Table
from kernelhead_lab.engine.ensemble import ensemble_logits, train_ensemble
from kernelhead_lab.spec import LabSpec, head
from kernelhead_lab.tables.experiment import paper_numbers
from kernelhead_lab.tables.statistics import mean_and_deviation, paired_difference
from kernelhead_lab.tables.synthetic_data import Draw, bayes_accuracy, bayes_posterior, draw

NAME = "synthetic"
TITLE = "Two classes on the sphere (the paper's Table 1 and Figure 1)"
PROTOCOLS = ("paper", "tuned")
EXACT, BAYES = "exact", "bayes"  # protocol and method of the Bayes classifier, which is not trained
HELD_OUT = 5  # one in five training samples
STAGES = ("choosing", "training")
BATCH = 128
COEFFICIENTS = {"paper": "relu", "tuned": "softplus"}
UNTRAINED: dict[str, Any] = {"pretrained": False, "augment": "none", "amp": "none"}


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    label: str
    head: str
    options: dict[str, Any] = field(default_factory=dict)
    paper: float | None = None
    convex: bool = False
    """Whether every start ends at the same weights, so that one is enough."""

    def spec(self, protocol: str) -> LabSpec:
        """Return what is trained, before anything is chosen."""
        learned = {} if self.head == "linear" else {"coefficients": COEFFICIENTS[protocol]}
        return LabSpec(NAME, "identity", **head(self.head, **self.options, **learned), **UNTRAINED)

    def create(self, protocol: str, start: int) -> nn.Module:
        """Return a fresh head, the same for the same start."""
        spec = self.spec(protocol)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(start)
            return create_head(spec.head, 3, 2, **spec.head_options)


def _paper(row: str) -> float:
    number: float = paper_numbers()[NAME]["rows"][row][0]
    return number


METHODS = (
    Method("linear", "Softmax classifier", "linear", paper=_paper("softmax"), convex=True),
    Method("kernel", "Kernel", "kernel", paper=_paper("kernel")),
    Method("prototypes5", "Kernel, 5 prototypes per class", "prototypes", {"prototypes": 5, "aggregate": "logsumexp"}),
    Method("landmarks20", "Kernel, 20 landmarks", "landmarks", {"landmarks": 20, "scale": 1.0, "pool": None}),
)
BAYES_LABEL, BAYES_PAPER = "Bayes optimal classifier", _paper("bayes")


@dataclass(frozen=True)
class Settings:
    """Settings that the user may choose. Results of different epochs or sizes live in folders of their own."""

    epochs: int = 30
    draws: int = 10
    per_class: int = 5000

    @property
    def folder(self) -> Path:
        """Where results of these settings lie below the folder of all runs."""
        return Path(NAME) / f"{self.epochs}-epochs-{2 * self.per_class}-samples"


QUICK = Settings(epochs=4, draws=2, per_class=500)


class Candidate(NamedTuple):
    """Settings that are chosen on held-out data."""

    learning_rate: float
    weight_decay: float
    start: int


def candidates(method: Method, protocol: str) -> list[Candidate]:
    """Return what is tried on held-out data for a method under a protocol."""
    if protocol == "paper":
        return [Candidate(rate, 1e-4, 0) for rate in (0.05, 0.1, 0.3, 1.0)]
    starts = range(1 if method.convex else 2)
    return [Candidate(*choice) for choice in product((0.3, 1.0), (0.0, 1e-4), starts)]


def starts(method: Method, protocol: str) -> range:
    """Return the starts of the final training."""
    return range(1 if protocol == "paper" or method.convex else 4)


def result_path(place: Path, protocol: str, method: str, seed: int) -> Path:
    """Return the result file of a run; `place` is the folder of all results of one `Settings`."""
    return place / protocol / f"{method}-draw{seed:02d}.json"


def weights_path(place: Path, protocol: str, method: str, seed: int) -> Path:
    """Return the file of the trained head beside its result file."""
    return result_path(place, protocol, method, seed).with_suffix(".safetensors")


def find_results(place: Path, broken: list[str]) -> Iterator[TrainResult]:
    """Yield every result of one `Settings`, in the order of file names. Files that cannot be read go to `broken`."""
    for path in sorted(place.rglob("*.json")):
        try:
            yield load_result(path, LabSpec)
        except BrokenResultError as error:
            broken.append(str(error))


def _seconds(path: Path) -> float | None:
    """Return how long a finished run took; None without a readable result, so that it is run again."""
    try:
        return load_result(path, LabSpec).seconds if path.exists() else None
    except BrokenResultError:
        return None


Progress = Callable[[str, int, int], None]


def run(runs: Path, protocols: Sequence[str], settings: Settings, progress: Progress) -> None:
    """Run what is missing. `progress(what, epochs done, epochs in all)`."""
    place = runs / settings.folder
    draws = [draw(seed, per_class=settings.per_class) for seed in range(settings.draws)]
    for protocol, method in product(protocols, METHODS):
        missing = [data for data in draws if _seconds(result_path(place, protocol, method.name, data.seed)) is None]
        if missing:
            _run_method(place, protocol, method, missing, settings, progress)
    missing = [data for data in draws if _seconds(result_path(place, EXACT, BAYES, data.seed)) is None]
    for done, data in enumerate(missing, start=1):
        _run_bayes(place, data, settings)
        progress(BAYES_LABEL, done, len(missing))


def status(runs: Path, settings: Settings) -> tuple[int, int, str]:
    """Return runs done, runs in all, and in words how long the rest takes, judged by what was measured."""
    place = runs / settings.folder
    paths = [
        result_path(place, protocol, method.name, seed)
        for protocol, method, seed in product(PROTOCOLS, METHODS, range(settings.draws))
    ]
    finished = [seconds for path in paths if (seconds := _seconds(path)) is not None]
    left = len(paths) - len(finished)
    if not left:
        return len(finished), len(paths), "none"
    mean = np.mean(finished) if finished else 0.05 * settings.epochs * settings.per_class / 5000
    return len(finished), len(paths), f"{mean * left:.0f} s" + ("" if finished else ", on two cores")


def _run_bayes(place: Path, data: Draw, settings: Settings) -> None:
    started = time.perf_counter()
    logits = torch.from_numpy(np.log(np.maximum(bayes_posterior(data.x_test, data.centers), 1e-300)))
    measured: dict[str, Any] = metrics.summary(logits, torch.from_numpy(data.y_test))
    expected = 100 * bayes_accuracy(data.centers)
    result = TrainResult(
        spec=LabSpec(NAME, "identity", BAYES, **UNTRAINED, seed=data.seed),
        images={"train": 0, "test": len(data.y_test), "left_out": 0},
        parameters={"backbone": 0, "head": 0},
        seconds=time.perf_counter() - started,
        curve={"loss": [], "accuracy": []},
        **measured,
        extra={"protocol": EXACT, "per_class": settings.per_class, "expected_accuracy": expected},
    )
    save_result(result_path(place, EXACT, BAYES, data.seed), result)


def _run_method(
    place: Path, protocol: str, method: Method, draws: Sequence[Draw], settings: Settings, progress: Progress
) -> None:
    """Choose on held-out data and train, all draws at once."""
    started = time.perf_counter()
    x = torch.from_numpy(np.stack([data.x_train for data in draws])).float()
    y = torch.from_numpy(np.stack([data.y_train for data in draws]))
    partial = {stage: place / protocol / f".{method.name}-{stage}.safetensors" for stage in STAGES}
    plan = replace(method.spec(protocol), epochs=settings.epochs, batch_size=BATCH, head_rate=1.0)

    def train(stage: str, chosen: Sequence[tuple[int, Candidate]], x: Tensor, y: Tensor) -> list[nn.Module]:
        heads = [method.create(protocol, candidate.start) for _, candidate in chosen]
        of_draw = torch.tensor([index for index, _ in chosen])
        train_ensemble(
            heads,
            x[of_draw],
            y[of_draw],
            epochs=settings.epochs,
            batch_size=BATCH,
            momentum=plan.momentum,
            warmup_epochs=plan.warmup_epochs,
            learning_rate=torch.tensor([candidate.learning_rate for _, candidate in chosen]),
            weight_decay=torch.tensor([candidate.weight_decay for _, candidate in chosen]),
            checkpoint=partial[stage],
            progress=lambda done, total: progress(f"{method.label}, {protocol} protocol: {stage}", done, total),
        )
        return heads

    cut = x.shape[1] - x.shape[1] // HELD_OUT
    tried = candidates(method, protocol)
    search = [(index, candidate) for index in range(len(draws)) for candidate in tried]
    heads = train("choosing", search, x[:, :cut], y[:, :cut])
    held_out = np.array(
        [_score(head, x[index, cut:], y[index, cut:]) for (index, _), head in zip(search, heads, strict=True)]
    ).reshape(len(draws), len(tried), 2)
    # By accuracy; equal accuracies are told apart by their likelihood.
    best = [tried[np.lexsort((-of_draw[:, 1], of_draw[:, 0]))[-1]] for of_draw in held_out]

    final = [
        (index, best[index]._replace(start=start)) for index in range(len(draws)) for start in starts(method, protocol)
    ]
    heads = train("training", final, x, y)
    loss = {key: _score(head, x[key[0]], y[key[0]])[1] for key, head in zip(final, heads, strict=True)}
    seconds = (time.perf_counter() - started) / len(draws)
    for index, data in enumerate(draws):
        (_, chosen), head = min(
            ((key, head) for key, head in zip(final, heads, strict=True) if key[0] == index),
            key=lambda pair: loss[pair[0]],
        )
        logits = ensemble_logits([head], torch.from_numpy(data.x_test).float()[None])[0]
        measured: dict[str, Any] = metrics.summary(logits, torch.from_numpy(data.y_test))
        alpha = getattr(head, "alpha", None)
        rates = {"learning_rate": chosen.learning_rate, "weight_decay": chosen.weight_decay}
        result = TrainResult(
            spec=replace(plan, **rates, seed=data.seed),
            images={"train": len(data.y_train), "test": len(data.y_test), "left_out": 0},
            parameters={"backbone": 0, "head": sum(p.numel() for p in head.parameters())},
            seconds=seconds,
            curve={"loss": [], "accuracy": []},
            **measured,
            alpha=None if alpha is None else alpha.tolist(),
            extra={
                "protocol": protocol,
                "per_class": settings.per_class,
                "start": chosen.start,
                "choice": [
                    {**candidate._asdict(), "held_out_accuracy": accuracy, "held_out_nll": nll}
                    for candidate, (accuracy, nll) in zip(tried, held_out[index].tolist(), strict=True)
                ],
                "training_loss_by_start": [loss[key] for key in final if key[0] == index],
            },
        )
        save_checkpoint(weights_path(place, protocol, method.name, data.seed), head.state_dict(), chosen._asdict())
        save_result(result_path(place, protocol, method.name, data.seed), result)
    for path in partial.values():
        path.unlink(missing_ok=True)


def _score(head: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return accuracy and NLL; a head that diverged has the worst of both."""
    logits = ensemble_logits([head], x[None])[0]
    if not torch.isfinite(logits).all():
        return 0.0, float(np.finfo(np.float64).max)
    return metrics.accuracy(logits, y), metrics.negative_log_likelihood(logits, y)


def trained_head(place: Path, protocol: str, method: Method, seed: int) -> nn.Module:
    """Return the head that a finished run left behind, in evaluation mode."""
    tensors, state = load_checkpoint(weights_path(place, protocol, method.name, seed))
    head = method.create(protocol, state["start"])
    head.load_state_dict(tensors)
    return head.eval()


def table(results: Sequence[TrainResult]) -> Table:
    """Return the paper's Table 1 beside ours: mean and deviation over draws, differences paired by draw.

    `results`: those of one `Settings`, of any protocols and methods.
    """
    runs = by_method(results)

    def accuracy(protocol: str, method: str) -> dict[int, float]:
        found = runs.get((protocol, method), [])
        return {result.spec.seed: result.accuracy for result in found if result.accuracy is not None}

    bayes = accuracy(EXACT, BAYES)
    rows = []
    for method in METHODS:
        cells = [method.label, "" if method.paper is None else f"{method.paper:.2f}"]
        for protocol in PROTOCOLS:
            ours = accuracy(protocol, method.name)
            baseline = {} if method.name == "linear" else accuracy(protocol, "linear")
            cells += [mean_and_deviation(list(ours.values())), paired_difference(ours, baseline)]
        cells.append(paired_difference(accuracy("tuned", method.name), bayes, test=False))
        rows.append(cells)
    rows.append([BAYES_LABEL, f"{BAYES_PAPER:.2f}", *[mean_and_deviation(list(bayes.values())), ""] * 2, ""])
    columns = ["Accuracy (%)", "paper", "paper's protocol", "over softmax", "tuned", "over softmax", "over Bayes"]
    return Table(name=NAME, title=TITLE, columns=columns, rows=rows, notes=_notes(runs))


def by_method(results: Sequence[TrainResult]) -> dict[tuple[str, str], list[TrainResult]]:
    """Group results by protocol and the method whose head they have."""
    method_of = {BAYES: BAYES, **{method.head: method.name for method in METHODS}}
    runs: dict[tuple[str, str], list[TrainResult]] = {}
    for result in results:
        runs.setdefault((result.extra["protocol"], method_of[result.spec.head]), []).append(result)
    return runs


def _notes(runs: dict[tuple[str, str], list[TrainResult]]) -> list[str]:
    trained = {key: group for key, group in runs.items() if key[0] != EXACT}
    notes = ["Ours: mean ± standard deviation over draws of the cluster centers; the paper shows one draw."]
    if trained:
        n = sorted({len(group) for group in trained.values()})
        epochs = sorted({result.spec.epochs or 0 for group in trained.values() for result in group})
        notes.append(
            f"n = {' or '.join(map(str, n))} draws, {' or '.join(map(str, epochs))} epochs; "
            "p: sign-flip test of the differences, paired by draw."
        )
    for protocol, activation in COEFFICIENTS.items():
        vanished = {
            method.label: 100 * np.mean([np.array(result.alpha)[3:] < 1e-3 for result in group])
            for method in METHODS
            if method.head != "linear" and (group := runs.get((protocol, method.name)))
        }
        if vanished:
            shares = "; ".join(f"{label}: {share:.0f} %" for label, share in vanished.items())
            notes.append(f"Coefficients a_1 .. a_7 that vanished ({protocol} protocol, {activation}): {shares}.")
    if exact := runs.get((EXACT, BAYES)):
        expected = np.mean([result.extra["expected_accuracy"] for result in exact])
        notes.append(
            "Bayes is the exact posterior on the same test samples; "
            f"its expected accuracy, integrated over the sphere, is {expected:.2f}."
        )
    return notes
