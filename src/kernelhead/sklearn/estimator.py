"""The kernel head as a scikit-learn classifier: feature vectors in, classes out."""

import copy
import warnings
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import sparse
from torch.nn import functional as F

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils._param_validation import Interval, StrOptions
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ModuleNotFoundError(
        "KernelHeadClassifier needs scikit-learn 1.6 or later; run pip install 'kernelhead[sklearn]'", name="sklearn"
    ) from error

from kernelhead.heads import LandmarkHead
from kernelhead.sklearn.descent import MAX_STATISTICS_SAMPLES, Trainer, random_landmarks, solved_head
from kernelhead.sklearn.samples import (
    Array,
    Points,
    Samples,
    Scaling,
    as_device,
    as_readable,
    scalings,
    shuffled_ranks,
    weigh,
)
from kernelhead.sklearn.search import LearnedKernel, learn_kernel
from kernelhead.sklearn.solver import solve

KERNEL_SAMPLES, MORE_KERNEL_SAMPLES = 500, 1000  # that the kernel is learned from; more where they are one in ten
SCALING_SAMPLES = 50_000
PER_CLASS = 5  # samples among those that the kernel is learned from: with more classes, it is learned from some
CALIBRATION_SHARE, MIN_CALIBRATION = 50, 100  # "adam" holds out 1 in 50 for its temperature, unless they are too few
BLOCK_VALUES = 2**25  # kernel values or features that a prediction holds at a time
PARTIAL_STEPS = 4  # of a batch in `partial_fit`, if it has 16 samples for each
DEFAULT_LANDMARKS = 1024  # of "adam"
COUNTS = ("degree", "epochs", "batch_size")
OF_ADAM = ("epochs", "batch_size", "learning_rate")
KINDS: dict[str, Any] = {"accept_sparse": "csr", "dtype": [np.float64, np.float32, np.float16]}


class KernelHeadClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier in a reproducing kernel Hilbert space that learns its own kernel.

    Logits are f(x) = sum_q c_q k(<w_q, u>) + b with the kernel k(t) = sum_m a_m t^m, a_m >= 0. The unit vector u is
    made of the clipped, centred and scaled features and a constant coordinate, so it keeps their length. Leave-one-out
    likelihood on some samples chooses the coefficients, the constant, and the scale of each feature.

    Args:
        solver: "cg" fits c by conjugate gradients, with the ridge and the loss that samples held out choose. "adam"
            moves the points w by gradient descent.
        degree: M, where the series of the kernel ends.
        landmarks: number of points. None takes all samples up to some ten thousand, and 4,096 and more beyond; for
            "adam" 1,024.
        epochs, batch_size: passes over the samples, and samples per step, of "adam".
        learning_rate: the highest, of the kernel's coefficients. It is twice that for landmarks, a tenth for mixing.
        class_weight: None, "balanced", or a weight for each class.
        random_state: an int makes every fit the same.
        device, verbose: "auto" (a CUDA device where there is one) or a device with float64; print the progress.

    Attributes:
        classes_: sorted labels (C,).
        head_: the `LandmarkHead` over scaled features with the constant appended, (N, D + 1) -> (N, C), float64.
        alpha_: the kernel's coefficients (M + 3,), ordered as in the head, with k(1) = 1.
        mean_, scale_, constant_: what is subtracted from features (D,), divides them (D,) and is appended to them.
        lowest_, highest_: limits (D,) that features are clipped to before.
        ridge_, loss_: the ridge, and the log-loss of the samples that were held out, or of leave-one-out.
        solver_, loss_curve_: "cg", or "adam" after `partial_fit` alone, too; the squared error of each epoch of "adam".

    Example:
        >>> KernelHeadClassifier().fit([[0.0], [1.0]], ["a", "b"]).predict([[0.2]])
        array(['a'], dtype='<U1')
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "solver": [StrOptions({"cg", "adam"})],
        **dict.fromkeys(COUNTS, (Interval(Integral, 1, None, closed="left"),)),
        "landmarks": [Interval(Integral, 1, None, closed="left"), None],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
    }

    def __init__(
        self,
        *,
        solver: str = "cg",
        degree: int = 7,
        landmarks: int | None = None,
        epochs: int = 6,
        batch_size: int = 256,
        learning_rate: float = 0.03,
        class_weight: dict[Any, float] | str | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.solver, self.degree, self.landmarks = solver, degree, landmarks
        self.epochs, self.batch_size, self.learning_rate = epochs, batch_size, learning_rate
        self.class_weight, self.random_state, self.device, self.verbose = class_weight, random_state, device, verbose

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn from features X (N, D), which may be sparse or on disk (`np.memmap`), and labels y (N,) of any kind.

        A sample of weight 2 counts as the same sample twice. A common factor of all weights does nothing.
        """
        self._validate_params()
        features, labels, weight = self._validate(X, y, sample_weight)
        self.classes_, target = np.unique(labels, return_inverse=True)
        rows, target, weight = weigh(features, target, weight, self.class_weight, self.classes_)
        if len(np.unique(target)) < 2:
            raise ValueError("KernelHeadClassifier needs samples of two classes or more, got 1 class")
        self._warn_of_ignored()
        self.solver_ = self.solver
        random = check_random_state(self.random_state)
        kernel = self._start(features, rows, target, weight, random)
        self._trainer: Trainer | None = None
        self._seen = np.bincount(target, weight, minlength=len(self.classes_))  # so far: `partial_fit` adds to it
        self._alone: list[Array] | None = None  # what `partial_fit` was given, while it is of one class
        self.loss_curve_: list[float] = []
        if self.solver == "adam":
            return self._descend(self._samples(features[rows], target, weight), kernel, random)
        points = self._points(features, rows)
        indices, weights = (torch.from_numpy(each).to(points.device) for each in (target, weight))
        given = (points, indices, weights, len(self.classes_), kernel, self.landmarks, random, self._say)
        chosen, mixing, bias, self.ridge_, loss = solve(*given)
        self.loss_ = kernel.loss if loss is None else loss
        points.dtype = torch.float64
        known = points.at(np.sort(random.permutation(len(points))[:MAX_STATISTICS_SAMPLES]))
        dense = [torch.from_numpy(each.toarray()) if points.sparse else each for each in (chosen, known)]
        unit, sample = (each.to(points.device, torch.float64) for each in dense)
        self.head_ = solved_head(F.normalize(unit), kernel.alpha, mixing, bias, sample)
        return self

    def _descend(self, samples: Samples, kernel: LearnedKernel, random: np.random.RandomState) -> Self:
        # Held-out samples choose the temperature where there are enough of them.
        held_out = len(samples) // CALIBRATION_SHARE
        order = torch.from_numpy(random.permutation(len(samples)))
        held = samples.at(order[:held_out]) if held_out >= MIN_CALIBRATION else None
        rest = samples if held is None else samples.at(order[held_out:])
        trainer = self._new_trainer(rest, random, kernel)
        self.loss_curve_ = trainer.fit(rest, self.epochs, self._tell)
        if held is not None:
            self.temperature_ = trainer.calibrate(held)
        self.head_ = trainer.head.double()
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Go through X (N, D) and y (N,) once, by gradient descent at half the learning rate, without forgetting.

        The first call names all `classes`, unless a fit came before. It fixes scaling and first landmarks, so it should
        have some hundred samples. While all are of one class, every call starts anew with the last 500 of them.
        After an exact fit only the mixing goes on.
        """
        self._validate_params()
        first = not hasattr(self, "head_")
        if first and classes is None:
            raise ValueError("the first call of partial_fit needs classes: all labels that will ever come")
        features, labels, weight = self._validate(X, y, sample_weight, reset=first)
        named = self.classes_ if classes is None else np.unique(classes)
        if first:
            self.classes_ = named
        elif not np.array_equal(named, self.classes_):
            raise ValueError(f"got classes {named} after {self.classes_} in the first call; keep them")
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(f"label {unknown[0]!r} is none of the classes {self.classes_}; name all in the first call")
        given: list[Array] = [features, np.searchsorted(self.classes_, labels), weight]
        if first:
            self.solver_, self.loss_curve_, self._alone = "adam", [], [each[:0] for each in given]
        if self._alone is not None:
            stack = sparse.vstack if sparse.issparse(features) else np.concatenate
            given = [
                (np.concatenate if i else stack)(each) for i, each in enumerate(zip(self._alone, given, strict=True))
            ]
        rows, target, weight = weigh(given[0], given[1], given[2], self.class_weight, self.classes_)
        features = given[0][rows]
        random = check_random_state(self.random_state)
        kernel, trainer = None, getattr(self, "_trainer", None)
        totals = np.bincount(target, weight, minlength=len(self.classes_))
        if self._alone is not None:
            kernel, trainer = self._start(features, np.arange(len(target)), target, weight, random), None
            self._seen = totals
            # One class tells neither the scaling nor the kernel: that waits for a second.
            single = np.count_nonzero(totals) < 2
            self._alone = [each[-KERNEL_SAMPLES:].copy() for each in given] if single else None
        samples = self._samples(features, target, weight)
        if trainer is None or trainer.head.weight.device != samples.points.device:
            trainer = self._new_trainer(samples, random, kernel)
        if kernel is None:
            trainer.follow_shares(self._seen, self._seen + totals)
            self._seen = self._seen + totals
        steps = max(1, min(PARTIAL_STEPS, len(samples) // 16))
        self.loss_curve_.append(trainer.epoch(samples, lambda share: 0.5, steps))
        self.head_, self._trainer = copy.deepcopy(trainer.head).double(), trainer
        self._tell(len(self.loss_curve_), self.loss_curve_[-1])
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Return logits (N, C); with two classes, the second's minus the first's (N,)."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return probabilities (N, C), one column per class of `classes_`."""
        return np.asarray(torch.softmax(torch.from_numpy(self._logits(X)), 1))

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable class (N,) of each row of X (N, D)."""
        best = self._logits(X).argmax(1)  # first: it checks that there was a fit
        return np.asarray(self.classes_[best])

    def network(self) -> "FeatureNetwork":
        """Return the fitted classifier as a network, features (N, D) -> logits (N, C), for `export_onnx`.

        Logits of two classes are two; their softmax is `predict_proba`.
        """
        check_is_fitted(self, "head_")
        scaling = [self.lowest_, self.highest_, self.mean_, self.scale_]
        return FeatureNetwork([torch.from_numpy(each) for each in scaling], self.constant_, self.head_)

    @property
    def alpha_(self) -> Array:
        alpha = self.head_.alpha.detach().cpu().double()
        return np.asarray(alpha / alpha.sum())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of Adam, and the device: a pickle can be read where there is no GPU."""
        state = dict(super().__getstate__())
        state.pop("_trainer", None)
        if "head_" in state:
            state["head_"] = copy.deepcopy(state["head_"]).cpu()
        return state

    def _validate(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool = True
    ) -> tuple[Array, Array, Array]:
        X, y, sample_weight = (as_readable(each) for each in (X, y, sample_weight))
        features, labels = validate_data(self, X, y, **KINDS, reset=reset)
        check_classification_targets(labels)
        weight = _check_sample_weight(sample_weight, features, dtype=np.float64, ensure_non_negative=True)
        return features, labels, weight

    def _warn_of_ignored(self) -> None:
        """Warn of options that the solver ignores: a search over their values would choose at random."""
        usual = KernelHeadClassifier().get_params()
        given = ", ".join(name for name in OF_ADAM if getattr(self, name) != usual[name])
        if given and self.solver == "cg":
            sentence = f"solver 'cg' ignores {given}; set solver='adam' to use what was given"
            warnings.warn(sentence, UserWarning, stacklevel=3)

    def _start(
        self, features: Any, rows: Array, target: Array, weight: Array, random: np.random.RandomState
    ) -> LearnedKernel:
        """Learn the kernel and the scaling, from a part of the samples."""
        part = random.permutation(len(rows))[:SCALING_SAMPLES] if len(rows) > SCALING_SAMPLES else np.arange(len(rows))
        candidates = scalings(features[rows[part]], weight[part])
        count, classes = min(max(KERNEL_SAMPLES, len(rows) // 10), MORE_KERNEL_SAMPLES), len(self.classes_)
        part = random.permutation(len(rows))
        if len(rows) > KERNEL_SAMPLES:
            # Some of each class; of a part of the classes where these are many.
            ranks = shuffled_ranks(target[part], random)
            later = (ranks >= PER_CLASS) | (random.permutation(classes)[target[part]] >= KERNEL_SAMPLES // PER_CLASS)
            part = part[np.argsort(later, kind="stable")][:count]
            part = part[random.permutation(len(part))]
        else:
            part = np.sort(part)
        device = as_device(self.device)
        labels, weights = (torch.from_numpy(each[part]).to(device) for each in (target, weight))
        scaled = [torch.from_numpy(scaling(features[rows[part]])).to(device) for scaling in candidates]
        kernel, best = learn_kernel(scaled, labels, weights, classes, self.degree, KERNEL_SAMPLES)
        chosen = candidates[best]
        self.lowest_, self.highest_, self.mean_ = chosen.lowest, chosen.highest, chosen.mean
        self.scale_ = chosen.scale / kernel.lengths.cpu().numpy()
        self.constant_, self.temperature_ = kernel.constant, kernel.temperature
        self.ridge_, self.loss_ = kernel.ridge, kernel.loss
        self._say(f"leave-one-out log-loss {kernel.loss:.4f} on {len(part)} samples, ridge {kernel.ridge:.3g}")
        return kernel

    def _new_trainer(self, samples: Samples, random: np.random.RandomState, kernel: LearnedKernel | None) -> Trainer:
        """Make a trainer of a new head with this kernel, or without one of the head that is there."""
        generator = torch.Generator(samples.points.device).manual_seed(int(random.randint(2**31 - 1)))
        if kernel is None:
            head = copy.deepcopy(self.head_).to(samples.points)
        else:
            count = self.landmarks or DEFAULT_LANDMARKS
            head = random_landmarks(samples, len(self.classes_), count, kernel, generator)
        solved = self.solver_ == "cg"
        return Trainer(head, self.temperature_, generator, self.learning_rate, self.batch_size, mixing_alone=solved)

    def _points(self, features: Any, rows: Array) -> Points:
        scaling = Scaling(self.lowest_, self.highest_, self.mean_, self.scale_)
        return Points(features, rows, scaling, self.constant_, as_device(self.device))

    def _samples(self, features: Any, target: Array, weight: Array) -> Samples:
        """Scale features (N, D) and append the constant coordinate, for descent."""
        scaling = Scaling(self.lowest_, self.highest_, self.mean_, self.scale_)
        points = F.pad(torch.from_numpy(scaling(features)).float(), (0, 1), value=self.constant_)
        points = points.to(as_device(self.device))
        return Samples(points, torch.from_numpy(target).to(points.device), torch.from_numpy(weight).to(points))

    def _tell(self, epoch: int, loss: float) -> None:
        self._say(f"epoch {epoch}  squared error {loss:.4f}")

    def _say(self, sentence: str) -> None:
        if self.verbose:
            print(sentence, flush=True)

    def _logits(self, X: ArrayLike) -> Array:
        check_is_fitted(self, "head_")
        features = validate_data(self, as_readable(X), **KINDS, reset=False)
        self.head_.to(as_device(self.device))  # a pickle left it on the CPU, or `device` is another now
        scaling = Scaling(self.lowest_, self.highest_, self.mean_, self.scale_)
        size = max(1, BLOCK_VALUES // max(self.head_.weight.shape))
        parts = []
        with torch.no_grad():
            # In float64, whatever it was fitted in: the logits of a row should not depend on the rows beside it.
            for start in range(0, features.shape[0], size):
                scaled = torch.from_numpy(scaling(features[start : start + size])).to(self.head_.weight)
                parts.append(self.head_(F.pad(scaled, (0, 1), value=self.constant_)).cpu().numpy())
        return np.concatenate(parts)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class FeatureNetwork(torch.nn.Module):
    """A fitted classifier with its scaling: features (N, D) of any precision -> logits (N, C)."""

    lowest: torch.Tensor
    highest: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, scaling: list[torch.Tensor], constant: float, head: LandmarkHead) -> None:
        super().__init__()
        for name, value in zip(("lowest", "highest", "mean", "scale"), scaling, strict=True):
            self.register_buffer(name, value.double())
        self.constant, self.head = constant, copy.deepcopy(head).cpu()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        clipped = torch.minimum(torch.maximum(features.double(), self.lowest), self.highest)
        points = F.pad((clipped - self.mean) / self.scale, (0, 1), value=self.constant)
        logits: torch.Tensor = self.head(points)
        return logits.to(features.dtype)
