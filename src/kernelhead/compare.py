"""Does a kernel head help on these features? Cross-validation of heads beside scikit-learn's classifiers."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, TransformerMixin

from kernelhead import metrics
from kernelhead.comparison import Comparison, Result
from kernelhead.estimator import KernelHeadClassifier
from kernelhead.layer_training import LayerClassifier
from kernelhead.weighting import shifts

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]  # what, done, total
MANY = 20_000  # samples above which an SVM takes minutes a fold, and is left out unless asked for
FEWEST = 5  # samples to train on: k nearest neighbours asks so many
WARM_UP = 8  # samples of each class


@dataclass(frozen=True)
class Method:
    """A classifier by name: `make(seed)` gives a fresh one."""

    label: str
    make: Callable[[int], Any]


class _InRange(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Powers of two taken out of extreme features (N, D), whose squares StandardScaler could not hold."""

    def fit(self, X: Array, y: Array | None = None) -> Self:
        self.shift_ = shifts(X)
        return self

    def transform(self, X: Array) -> Array:
        moved: Array = np.ldexp(X, -self.shift_)
        return moved


def _scaled(make: Callable[[int], Any]) -> Callable[[int], Any]:
    def pipeline(seed: int) -> Any:
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return make_pipeline(_InRange(), StandardScaler(), make(seed))

    return pipeline


def _logistic(seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=1000)


def _svm(seed: int) -> Any:
    from sklearn.svm import SVC

    return SVC()


def _perceptron(seed: int) -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier(random_state=seed)


def _neighbours(seed: int) -> Any:
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier()


HEADS = {
    "kernel": Method("KernelHeadClassifier", lambda seed: KernelHeadClassifier(random_state=seed)),
    "layer": Method("kernel layer", _scaled(lambda seed: LayerClassifier(random_state=seed))),
    "prototypes": Method(
        "kernel layer, 8 prototypes", _scaled(lambda seed: LayerClassifier(prototypes=8, random_state=seed))
    ),
}
BASELINES = {
    "logistic": Method("logistic regression", _scaled(_logistic)),
    "svm": Method("SVM (RBF)", _scaled(_svm)),
    "mlp": Method("MLP", _scaled(_perceptron)),
    "knn": Method("k nearest neighbours", _scaled(_neighbours)),
}


def check_features(X: ArrayLike, y: ArrayLike, folds: int) -> tuple[Array, Array, list[str]]:
    """Features (N, D) as floating-point numbers, labels (N,) or (N, 1) as (N,), and what is worth knowing of them."""
    features, labels = np.asarray(X), np.asarray(y)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if folds < 2:
        raise ValueError(f"cross-validation needs two folds or more, got {folds}")
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"features of shape (samples, features) are expected, got {features.shape}")
    if labels.shape != features.shape[:1]:
        raise ValueError(
            f"one label for each of {len(features)} samples is expected, got labels of shape {labels.shape}"
        )
    if not (np.issubdtype(features.dtype, np.number) or features.dtype == bool) or np.iscomplexobj(features):
        raise TypeError(f"features have to be real numbers, got {features.dtype}")
    if features.dtype not in (np.float32, np.float64):
        features = features.astype(np.float64)
    broken = np.argwhere(~np.isfinite(features))
    if len(broken):
        row, column = broken[0]
        raise ValueError(
            f"{len(broken)} values of features are not finite numbers, the first in row {row + 1}, column {column + 1}"
        )
    missing = np.flatnonzero([label is None or label != label for label in labels.tolist()])  # NaN is not itself
    if len(missing):
        raise ValueError(f"{len(missing)} labels are missing, the first in row {missing[0] + 1}")
    if np.issubdtype(labels.dtype, np.floating) and not (np.isfinite(labels).all() and (labels % 1 == 0).all()):
        raise ValueError("labels have to be classes, and some are fractions or not finite")
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"two classes or more are needed, and all {len(labels)} samples are of class {classes[0]}")
    if counts.min() < folds:
        few = classes[counts.argmin()]
        raise ValueError(
            f"class {few} has {counts.min()} samples, too few for {folds} folds: take fewer folds or leave it out"
        )
    smallest = len(labels) - -(-len(labels) // folds)
    if smallest < FEWEST:
        raise ValueError(
            f"{len(labels)} samples are too few: with {folds} folds {smallest} are left to train on, and {FEWEST} are "
            "the least"
        )
    constant = int((features.max(0) == features.min(0)).sum())
    if constant == features.shape[1]:
        raise ValueError("all features are constant: they say nothing about the classes")
    notes = [f"{constant} of {features.shape[1]} features are constant and say nothing."] if constant else []
    return features, labels, notes


def chosen_methods(heads: Sequence[str] | None, baselines: Sequence[str] | None, samples: int) -> dict[str, Method]:
    """Those named, in the order of HEADS and BASELINES; all of them unless named."""
    for names, known, kind in ((heads, HEADS, "head"), (baselines, BASELINES, "baseline")):
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise ValueError(f"unknown {kind} {unknown[0]!r}; choose from {', '.join(known)}")
    usual = [name for name in BASELINES if name != "svm" or samples <= MANY]
    names = [*(HEADS if heads is None else heads), *(usual if baselines is None else baselines)]
    if not names:
        raise ValueError("nothing to compare: name a head or a baseline")
    return {name: method for name, method in {**HEADS, **BASELINES}.items() if name in names}


def compare(
    X: ArrayLike,
    y: ArrayLike,
    *,
    heads: Sequence[str] | None = None,
    baselines: Sequence[str] | None = None,
    folds: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
    done: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Cross-validate heads and baselines on features X (N, D) and labels y (N,), all on the same folds.

    A classifier that fails has no result, but a note that says why; an error comes of it where all do.

    Args:
        X: real numbers, no NaN among them.
        y: of any kind, at least as many of each class as there are folds.
        heads: from `HEADS`; all unless given.
        baselines: from `BASELINES`; all unless given, above 20,000 samples without the SVM.
        folds: of a stratified cross-validation.
        seed: of the folds and of every classifier.
        progress: called with the name of a classifier, folds done, and folds.
        done: called after each classifier that has a result, with all that is known so far.
    """
    from sklearn.model_selection import StratifiedKFold

    features, labels, notes = check_features(X, y, folds)
    methods = chosen_methods(heads, baselines, len(labels))
    if baselines is None and "svm" not in methods:
        notes.append(f"The SVM was left out: with more than {MANY} samples it takes minutes a fold.")
    classes, target = np.unique(labels, return_inverse=True)
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    splits = list(splitter.split(features, target))
    found = Comparison(len(features), features.shape[1], len(classes), folds, seed, notes=notes)
    failure: Exception | None = None
    for name, method in methods.items():
        try:
            found.results.append(_cross_validate(name, method, features, target, splits, seed, progress))
        except Exception as error:  # whatever it is, what others did is not lost by it
            failure, said = error, str(error).strip().partition("\n")[0]
            notes.append(f"{method.label} failed: {said or type(error).__name__}")
            continue
        if done is not None:
            done(found)
    if not found.results:
        raise ValueError(notes[-1]) from failure
    return found


def _cross_validate(
    name: str,
    method: Method,
    features: Array,
    target: Array,
    splits: list[tuple[Array, Array]],
    seed: int,
    progress: Progress | None,
) -> Result:
    from sklearn.exceptions import ConvergenceWarning

    accuracy, nll, fit_seconds, predict_seconds = [], [], [], []
    pooled: list[tuple[torch.Tensor, torch.Tensor]] = []
    if progress is not None:
        progress(method.label, 0, len(splits))
    _warm_up(method, features, target, splits[0][0], seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        for number, (train, test) in enumerate(splits, 1):
            model, started = method.make(seed), time.perf_counter()
            model.fit(features[train], target[train])
            fitted = time.perf_counter()
            answer = _answer(model, features[test])
            predict_seconds.append(time.perf_counter() - fitted)
            fit_seconds.append(fitted - started)
            if not np.isfinite(answer).all():
                raise ValueError("its probabilities are not finite numbers")
            truth = torch.from_numpy(target[test])
            if answer.ndim == 2:
                logits = torch.from_numpy(answer).double().clamp(min=1e-12).log()
                accuracy.append(metrics.accuracy(logits, truth))
                nll.append(metrics.negative_log_likelihood(logits, truth))
                pooled.append((logits, truth))
            else:
                accuracy.append(100 * float(np.mean(answer == target[test])))
            if progress is not None:
                progress(method.label, number, len(splits))
    return Result(
        name,
        method.label,
        name in HEADS,
        accuracy,
        nll or None,
        metrics.expected_calibration_error(*map(torch.cat, zip(*pooled, strict=True))) if pooled else None,
        fit_seconds,
        predict_seconds,
        converged=not any(issubclass(each.category, ConvergenceWarning) for each in caught),
    )


def _warm_up(method: Method, features: Array, target: Array, train: Array, seed: int) -> None:
    """Fit and predict a few samples: what happens once a process, imports and the like, is no method's time."""
    rank = np.empty(len(train), dtype=np.int64)
    order = np.argsort(target[train], kind="stable")
    rank[order] = np.arange(len(train)) - np.searchsorted(target[train][order], target[train][order])
    few = train[rank < WARM_UP]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _answer(method.make(seed).fit(features[few], target[few]), features[few])


def _answer(model: Any, features: Array) -> Array:
    """Probabilities (N, C), or classes (N,) of a model that knows none."""
    answer: Array = (model.predict_proba if hasattr(model, "predict_proba") else model.predict)(features)
    return answer


def plot_kernel(X: ArrayLike, y: ArrayLike, path: Path, seed: int = 0) -> None:
    """Draw the kernel that KernelHeadClassifier learns from all samples: k(t), and the share of each power."""
    from matplotlib.figure import Figure

    features, labels, _ = check_features(X, y, folds=2)
    alpha = KernelHeadClassifier(random_state=seed).fit(features, labels).alpha_[3:]
    t = np.linspace(-1, 1, 201)
    powers = np.arange(1, len(alpha) + 1)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curve, shares = figure.subplots(1, 2)
    curve.plot(t, (alpha * t[:, None] ** powers).sum(1), label="learned")
    curve.plot(t, t, "--", color="grey", label="linear")
    curve.set(xlabel="t, the cosine of two samples", ylabel="k(t)", title="The learned kernel")
    curve.legend()
    shares.bar(powers, alpha)
    shares.set(xlabel="power of t", ylabel="coefficient", title="What it is made of", ylim=(0, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
