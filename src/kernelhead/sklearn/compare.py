"""Does a kernel head help on these features? Cross-validation of heads beside scikit-learn's classifiers."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_validate, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from kernelhead import metrics
from kernelhead.sklearn.comparison import Comparison, Result
from kernelhead.sklearn.estimator import KernelHeadClassifier
from kernelhead.sklearn.samples import Array, in_range, shuffled_ranks

Progress = Callable[[str, int, int], None]  # label of a classifier, folds done, all folds
Method = tuple[str, Callable[[int], Any]]  # label, and what makes a fresh classifier from a seed
MAX_SAMPLES = 20_000  # of more, a random part is compared: differences that it cannot show are small
WARM_UP_SAMPLES = 8  # per class

HEADS: dict[str, Method] = {
    "estimator": ("KernelHeadClassifier", lambda seed: KernelHeadClassifier(random_state=seed)),
}
BASELINES: dict[str, Method] = {
    "logistic": ("logistic regression", lambda seed: LogisticRegression(max_iter=1000)),
    "svm": ("SVM (RBF)", lambda seed: SVC()),
    "mlp": ("MLP", lambda seed: MLPClassifier(random_state=seed)),
    "knn": ("k nearest neighbours", lambda seed: KNeighborsClassifier()),
    "boosting": ("HistGradientBoosting", lambda seed: HistGradientBoostingClassifier(random_state=seed)),
    "lightgbm": ("LightGBM", lambda seed: import_module("lightgbm").LGBMClassifier(random_state=seed, verbose=-1)),
}


def compare(
    X: ArrayLike,
    y: ArrayLike,
    *,
    heads: Sequence[str] | None = None,
    baselines: Sequence[str] | None = None,
    folds: int = 5,
    seed: int = 0,
    progress: Progress = lambda label, done, total: None,
    done: Callable[[Comparison], None] = lambda so_far: None,
) -> Comparison:
    """Cross-validate heads and baselines on features X (N, D) and labels y (N,), all on the same folds.

    A classifier that fails has no result but a note that says why. If all fail, an error says why.

    `heads` and `baselines` are names from `HEADS` and `BASELINES`. None is all, without LightGBM where it is missing.
    Of more than 20,000 samples, so many are compared, chosen at random by class.
    `folds` are stratified, and `seed` is theirs and that of every classifier. `progress` is called with the label of a
    classifier, the folds done, and all folds; `done` after each classifier that has a result, with all results so far.
    """
    features, labels, notes = check_features(X, y, folds)
    usual = [name for name in BASELINES if name != "lightgbm" or find_spec("lightgbm")]
    for kind, names, known in (("head", heads, HEADS), ("baseline", baselines, BASELINES)):
        for name in names or ():
            if name not in known:
                raise ValueError(f"unknown {kind} {name!r}; choose from {', '.join(known)}")
    chosen = {*(HEADS if heads is None else heads), *(usual if baselines is None else baselines)}
    if not chosen:
        raise ValueError("nothing to compare; name a head or a baseline")
    if len(labels) > MAX_SAMPLES:
        notes.append(f"{MAX_SAMPLES} of {len(labels)} samples were compared, chosen at random by class.")
        options: dict[str, Any] = {"train_size": MAX_SAMPLES, "random_state": seed, "stratify": labels}
        features, _, labels, _ = train_test_split(features, labels, **options)
    classes, target = np.unique(labels, return_inverse=True)
    splits = list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(features, target))
    scalable = in_range(features)[0]  # StandardScaler squares the features
    found = Comparison(len(features), features.shape[1], len(classes), folds, seed, notes=notes)
    failure: Exception | None = None
    for name, (label, make) in {**HEADS, **BASELINES}.items():
        if name not in chosen:
            continue
        try:
            model, given = make(seed), features
            if name != "estimator":  # it scales features itself
                model, given = make_pipeline(StandardScaler(), model), scalable
            values = _cross_validate(model, given, target, splits, partial(progress, label))
        except Exception as error:  # whatever it is, the results of the others are kept
            failure, reason = error, str(error).strip().partition("\n")[0]
            notes.append(f"{label} failed: {reason or type(error).__name__}")
            continue
        found.results.append(Result(name, label, name in HEADS, **values))
        done(found)
    if not found.results:
        raise ValueError(notes[-1]) from failure
    return found


def check_features(X: ArrayLike, y: ArrayLike, folds: int) -> tuple[Array, Array, list[str]]:
    """Return features (N, D) in floating point, labels (N,), also given as (N, 1), and notes on the features."""
    if folds < 2:
        raise ValueError(f"cross-validation needs two folds or more, got {folds}")
    features, labels = check_array(X, dtype=[np.float64, np.float32], ensure_all_finite=False), column_or_1d(y)
    check_consistent_length(features, labels)
    found = {"labels are missing": pd.isna(labels), "samples are not finite": ~np.isfinite(features).all(1)}
    for what, wrong in found.items():
        if wrong.any():
            raise ValueError(f"{wrong.sum()} {what}, the first in row {wrong.argmax() + 1}; leave these rows out")
    check_classification_targets(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"all {len(labels)} samples are of class {classes[0]}; give samples of two classes or more")
    if counts.min() < folds:
        few = f"class {classes[counts.argmin()]} has {counts.min()} samples"
        raise ValueError(f"{few}, too few for {folds} folds; take fewer folds or leave it out")
    constant = int((features.max(0) == features.min(0)).sum())
    if constant == features.shape[1]:
        raise ValueError("all features are constant; they tell no classes apart")
    return features, labels, [f"{constant} of {features.shape[1]} features are constant."] if constant else []


def _cross_validate(
    model: Any, features: Array, target: Array, splits: list[tuple[Array, Array]], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return values per fold, and the calibration error over all folds, of a classifier."""
    answers: list[tuple[Tensor, Tensor]] = []  # and the labels
    method = "predict_proba" if hasattr(model, "predict_proba") else "predict"
    progress(0, len(splits))
    with warnings.catch_warnings():  # a few samples first: what happens once per process is no classifier's time
        warnings.simplefilter("ignore")
        few = splits[0][0][shuffled_ranks(target[splits[0][0]], 0) < WARM_UP_SAMPLES]
        getattr(clone(model).fit(features[few], target[few]), method)(features[few])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)

        def keep_answer(fitted: Any, part: Array, labels: Array) -> float:
            """Take the place of a score."""
            if any("interrupted by user" in str(each.message) for each in caught):
                raise KeyboardInterrupt  # MLPClassifier makes a warning of it
            answers.append((torch.from_numpy(getattr(fitted, method)(part)), torch.from_numpy(labels)))
            progress(len(answers), len(splits))
            return 0.0

        seconds = cross_validate(model, features, target, cv=splits, scoring=keep_answer, error_score="raise")
    if not all(answer.isfinite().all() for answer, _ in answers):
        raise ValueError("its probabilities are not finite numbers")
    nll = ece = None
    if method == "predict_proba":
        logs = [(answer.double().clamp(min=1e-12).log(), labels) for answer, labels in answers]
        nll = [metrics.negative_log_likelihood(*each) for each in logs]
        ece = metrics.expected_calibration_error(*(torch.cat(each) for each in zip(*logs, strict=True)))
        answers = [(answer.argmax(1), labels) for answer, labels in answers]
    return {
        "accuracy": [100 * (answer == labels).double().mean().item() for answer, labels in answers],
        "nll": nll,
        "ece": ece,
        "fit_seconds": seconds["fit_time"].tolist(),
        "predict_seconds": seconds["score_time"].tolist(),
        "converged": not any(issubclass(each.category, ConvergenceWarning) for each in caught),
    }
