"""The kernel head as a scikit-learn classifier: feature vectors in, classes out."""

import copy
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ModuleNotFoundError(
        "KernelHeadClassifier needs scikit-learn 1.6 or later; pip install 'kernelhead[sklearn]' brings it",
        name="sklearn",
    ) from error

from kernelhead.estimator_options import as_device, check_options, readable, warn_of_ignored
from kernelhead.landmark_training import Samples, Trainer, calibrate, exact_head, follow_shares, random_landmarks, train
from kernelhead.ridge import LearnedKernel, learn_kernel
from kernelhead.weighting import scalings, weigh

# "auto" solves exactly up to so many: there it is the more accurate on most data (docs/features.md), but its time grows
# with their cube, its memory with their square.
EXACT_SAMPLES = 10_000
LEFT_OUT = 500  # samples that the kernel is learned from by leave-one-out
NOISE, DROPOUT = 0.2, 0.2  # of "adam": see `Trainer`
CALIBRATED, ENOUGH = 50, 100  # "adam" holds out a sample in 50 for its temperature, if that makes 100 of them
BLOCK = 2**25  # kernel values that a prediction holds at a time

Array = NDArray[Any]


class KernelHeadClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier in a reproducing kernel Hilbert space that learns its own kernel.

    Features are centred and scaled, a constant coordinate is appended, and the result is scaled to unit length, which
    maps the whole space onto a half sphere: no length is lost. There the kernel is k(t) = sum_m a_m t^m with a_m >= 0.
    Its coefficients, the length of the constant, the ridge and the softmax's temperature are those of the best
    leave-one-out likelihood, which also chooses whether each feature is scaled by its own deviation, or all by one
    factor.

    Args:
        solver: "exact" mixes the kernel's values at all training samples, by kernel ridge regression. "adam" mixes
            those at `landmarks` points, which it moves along with the kernel by gradient descent; it takes time and
            memory in proportion to the samples. "auto" is "exact" up to 10,000 samples, unless `early_stopping`.
        degree: where the kernel's series ends.
        landmarks: how many points "adam" has.
        epochs: how often "adam" goes through the samples.
        batch_size: samples a step.
        learning_rate: the highest, of the kernel's coefficients; landmarks move at twice that, the mixing at a tenth.
        early_stopping: "adam" holds out `validation_fraction` of the samples, keeps the state with the best log-loss on
            them, and ends after `patience` epochs without a better one.
        validation_fraction: see there.
        patience: see there.
        class_weight: None, "balanced", or a weight for each class.
        random_state: an int makes every fit the same.
        device: "auto" (a CUDA device where there is one), or a device of PyTorch that knows float64.
        verbose: print how it goes on.

    Attributes:
        classes_: (C,), sorted.
        head_: the `KernelClassifier` over scaled features with the constant appended, (N, D + 1) -> (N, C), float64.
        alpha_: the kernel's coefficients (degree + 3,), ordered a_{-2}, a_{-1}, a_0 .. a_M, with k(1) = 1.
        mean_, scale_: (D,), what is taken from features, and what they are divided by.
        constant_: the length of the constant coordinate.
        ridge_, loss_: found by leave-one-out on some samples, and the mean log-loss it had there.
        temperature_: what scores are divided by to be logits.
        solver_: "exact" or "adam".
        loss_curve_: squared error of each epoch of "adam".
    """

    def __init__(
        self,
        *,
        solver: str = "auto",
        degree: int = 7,
        landmarks: int = 1024,
        epochs: int = 6,
        batch_size: int = 256,
        learning_rate: float = 0.03,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 3,
        class_weight: dict[Any, float] | str | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.solver = solver
        self.degree = degree
        self.landmarks = landmarks
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.class_weight = class_weight
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn from features X (N, D) and labels y (N,) of any kind.

        A sample of weight 2 counts as the same sample twice; a common factor of all weights does nothing.
        """
        check_options(self.get_params(deep=False))
        features, labels, weight = self._validate(X, y, sample_weight)
        self.classes_, target = np.unique(labels, return_inverse=True)
        features, target, weight = weigh(features, target, weight, self.class_weight, self.classes_)
        if len(np.unique(target)) < 2:
            raise ValueError("KernelHeadClassifier needs samples of two classes or more, got 1 class")
        self.solver_ = self._choose_solver(len(features))
        defaults = KernelHeadClassifier().get_params(deep=False)
        warn_of_ignored(self.get_params(deep=False), defaults, self.solver_, EXACT_SAMPLES)
        random = check_random_state(self.random_state)
        kernel = self._start(features, target, weight, random)
        samples = self._samples(features, target, weight)
        self._trainer: Trainer | None = None
        self._seen = self._totals(target, weight)  # so far: `partial_fit` adds to it
        self._alone: list[Array] | None = None  # given to `partial_fit`, while it is of one class
        if self.solver_ == "exact":
            n = len(samples)
            asked = None if n <= LEFT_OUT else torch.from_numpy(random.permutation(n)[:LEFT_OUT])
            self.head_, self.temperature_ = exact_head(samples, len(self.classes_), kernel, asked)
            self.loss_curve_: list[float] = []
        else:
            self._descend(samples, kernel, random)
        return self

    def _descend(self, samples: Samples, kernel: LearnedKernel, random: np.random.RandomState) -> None:
        """Fit by gradient descent, and calibrate on samples held out, where there are enough of them."""
        n = len(samples)
        held_out = max(1, round(n * self.validation_fraction)) if self.early_stopping else n // CALIBRATED
        order = torch.from_numpy(random.permutation(n))
        held = samples.at(order[:held_out]) if self.early_stopping or held_out >= ENOUGH else None
        rest = samples if held is None else samples.at(order[held_out:])
        trainer = self._new_trainer(rest, random, kernel)
        self.loss_curve_ = train(
            trainer,
            rest,
            epochs=self.epochs,
            batch_size=self.batch_size,
            validation=held if self.early_stopping else None,
            patience=self.patience,
            watch=self._tell,
        )
        if held is not None and len(held) >= ENOUGH:
            self.temperature_ = calibrate(trainer.head, held, self.temperature_)
        self.head_ = trainer.head.double()

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Go through X (N, D) and y (N,) once, by gradient descent at half the learning rate, without forgetting.

        The first call names all `classes`, unless a fit came before; it fixes the scaling and where the
        landmarks start, and should therefore be given some hundred samples. As long as all that came are of one class,
        every call starts anew with the last 500 of them. After an exact fit only the mixing goes on.
        """
        check_options(self.get_params(deep=False))
        first = not hasattr(self, "head_")
        if first and classes is None:
            raise ValueError("the first call of partial_fit needs classes: all labels that will ever come")
        features, labels, weight = self._validate(X, y, sample_weight, reset=first)
        if classes is not None and (first or not np.array_equal(np.unique(classes), self.classes_)):
            if not first:
                raise ValueError(f"classes are {np.unique(classes)}, and were {self.classes_} in the first call")
            self.classes_ = np.unique(classes)
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(f"label {unknown[0]!r} is none of the classes {self.classes_}")
        given: list[Array] = [features, np.searchsorted(self.classes_, labels), weight]
        alone = getattr(self, "_alone", None)
        if alone is not None:
            given = [np.concatenate(each) for each in zip(alone, given, strict=True)]
        features, target, weight = given
        features, target, weight = weigh(features, target, weight, self.class_weight, self.classes_)
        random = check_random_state(self.random_state)
        kernel, trainer, totals = None, getattr(self, "_trainer", None), self._totals(target, weight)
        if first:
            self.solver_, self.loss_curve_ = "adam", []
        if first or alone is not None:
            kernel, trainer, self._seen = self._start(features, target, weight, random), None, totals
            # One class says nothing of how to scale, nor of the kernel: that waits for a second.
            single = torch.count_nonzero(totals) < 2
            self._alone = [each[-LEFT_OUT:].copy() for each in given] if single else None
        samples = self._samples(features, target, weight)
        if trainer is None or trainer.head.weight.device != samples.points.device:
            trainer = self._new_trainer(samples, random, kernel)
        if kernel is None:
            follow_shares(trainer.head, self._seen, self._seen + totals, self.temperature_)
            self._seen = self._seen + totals
        self.loss_curve_.append(trainer.epoch(samples, self.batch_size, lambda share: 0.5))
        self.head_, self._trainer = copy.deepcopy(trainer.head).double(), trainer
        self._tell(len(self.loss_curve_), self.loss_curve_[-1], None)
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """Logits (N, C); of two classes, the second's minus the first's (N,)."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities (N, C), a column for each of `classes_`."""
        probabilities: Array = torch.softmax(torch.from_numpy(self._logits(X)), 1).numpy()
        return probabilities

    def predict(self, X: ArrayLike) -> Array:
        """The most probable class of each row of X (N, D)."""
        best = self._logits(X).argmax(1)
        chosen: Array = self.classes_[best]
        return chosen

    @property
    def alpha_(self) -> Array:
        alpha = self.head_.alpha.detach().cpu().double()
        shares: Array = (alpha / alpha.sum()).numpy()
        return shares

    def _validate(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool = True
    ) -> tuple[Array, Array, Array]:
        X, y, sample_weight = (readable(each) for each in (X, y, sample_weight))
        features, labels = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=reset)
        check_classification_targets(labels)
        weight = _check_sample_weight(sample_weight, features, dtype=np.float64, ensure_non_negative=True)
        return features, labels, weight

    def _totals(self, target: Array, weight: Array) -> torch.Tensor:
        """Weight of each class (C,)."""
        return torch.from_numpy(np.bincount(target, weight, minlength=len(self.classes_)))

    def _choose_solver(self, n: int) -> str:
        if self.solver != "auto":
            return self.solver
        return "exact" if n <= EXACT_SAMPLES and not self.early_stopping else "adam"

    def _start(self, features: Array, target: Array, weight: Array, random: np.random.RandomState) -> LearnedKernel:
        """Learn the kernel from a part of the samples, and whether features are scaled apart or together."""
        self.mean_, scales = scalings(features, weight)
        most = LEFT_OUT if self.solver_ == "exact" else LEFT_OUT // 2  # "adam" goes on learning the kernel
        part = random.permutation(len(target))[:most] if len(target) > most else np.arange(len(target))
        labels, weights = (torch.from_numpy(each[part]).to(self._device()) for each in (target, weight))
        centred = features[part] - self.mean_
        scaled = [torch.from_numpy(centred / scale).to(self._device()) for scale in scales]
        kernel, best = learn_kernel(scaled, labels, weights, len(self.classes_), self.degree)
        self.scale_ = scales[best]
        self.constant_, self.ridge_ = kernel.constant, kernel.ridge
        self.temperature_, self.loss_ = kernel.temperature, kernel.loss
        if self.verbose:
            print(f"leave-one-out log-loss {self.loss_:.4f} on {len(part)} samples, ridge {self.ridge_:.3g}")
        return kernel

    def _chart(self, features: Array, dtype: Any) -> torch.Tensor:
        """Features (N, D), scaled, with the constant coordinate: (N, D + 1)."""
        points = np.empty((features.shape[0], features.shape[1] + 1), dtype)
        points[:, :-1] = (features - self.mean_) / self.scale_
        points[:, -1] = self.constant_
        return torch.from_numpy(points).to(self._device())

    def _samples(self, features: Array, target: Array, weight: Array) -> Samples:
        points = self._chart(features, np.float64 if self.solver_ == "exact" else np.float32)
        return Samples(points, torch.from_numpy(target).to(points.device), torch.from_numpy(weight).to(points))

    def _new_trainer(self, samples: Samples, random: np.random.RandomState, kernel: LearnedKernel | None) -> Trainer:
        """For a new head with this kernel, or, without one, for the head that is there."""
        generator = torch.Generator(samples.points.device).manual_seed(int(random.randint(2**31 - 1)))
        if kernel is None:
            head = copy.deepcopy(self.head_).to(samples.points)
        else:
            head = random_landmarks(samples, len(self.classes_), self.landmarks, kernel, NOISE, generator)
        exact = self.solver_ == "exact"
        return Trainer(
            head,
            self.temperature_,
            learning_rate=self.learning_rate,
            noise=0.0 if exact else NOISE,
            dropout=0.0 if exact else DROPOUT,
            generator=generator,
            mixing_alone=exact,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the state of Adam, and with the head on the CPU: a pickle can be read where there is no GPU."""
        state = dict(super().__getstate__())
        state.pop("_trainer", None)
        if "head_" in state:
            state["head_"] = copy.deepcopy(state["head_"]).cpu()
        return state

    def _tell(self, epoch: int, loss: float, held_out: float | None) -> None:
        if self.verbose:
            told = "" if held_out is None else f"  held-out log-loss {held_out:.4f}"
            print(f"epoch {epoch}  squared error {loss:.4f}{told}")

    def _logits(self, X: ArrayLike) -> Array:
        check_is_fitted(self, "head_")
        features = validate_data(self, readable(X), dtype=[np.float64, np.float32], reset=False)
        self.head_.to(self._device())  # a pickle left it on the CPU, or `device` is another now
        rows = max(1, BLOCK // self.head_.weight.shape[0])
        with torch.no_grad():
            # In float64, whatever it was fitted in: a row's logits should not depend on the rows beside it.
            parts = [
                self.head_(self._chart(features[start : start + rows], np.float64)).cpu().numpy()
                for start in range(0, len(features), rows)
            ]
        return np.concatenate(parts)

    def _device(self) -> torch.device:
        return as_device(self.device)
