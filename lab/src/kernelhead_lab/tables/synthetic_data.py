"""The paper's two-class data on the sphere S^2 (its Appendix A), and the exact Bayes classifier for it.

Ten cluster centers a class are drawn from N(mean of the class, 0.5 I), observations from N(a center, 0.02 I), and
projected onto the sphere. For u on the sphere and x ~ N(mu, s^2 I_3), the density of x / |x| at u is

    p(u) = integral_0^inf r^2 N(r u; mu, s^2 I) dr
         = exp(-|mu|^2 / 2 s^2) / (2 pi)^(3/2)  *  ((1 + z^2) m(z) + z),        z = <u, mu> / s,

where m(z) = Phi(z) / phi(z) is the Mills ratio of the standard normal distribution (and phi is cancelled inside).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

CENTERS = 10
CLASS_MEANS = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
CENTER_VARIANCE = 0.5
CLUSTER_VARIANCE = 0.02
_FAR = -20.0


@dataclass(frozen=True)
class Draw:
    """One draw of the centers and the observations around them.

    centers (2, 10, 3); x_train, x_test (2 n, 3) of unit length; y_train, y_test (2 n,), 0 for blue and 1 for orange.
    """

    seed: int
    centers: Array
    x_train: Array
    y_train: NDArray[np.int64]
    x_test: Array
    y_test: NDArray[np.int64]


def draw(seed: int, *, per_class: int = 5000) -> Draw:
    """Draw the data of Appendix A, `per_class` observations a class for training and as many for testing."""
    rng = np.random.default_rng(seed)
    means = np.array(CLASS_MEANS)
    centers = means[:, None, :] + math.sqrt(CENTER_VARIANCE) * rng.standard_normal((2, CENTERS, 3))

    def observe() -> tuple[Array, NDArray[np.int64]]:
        labels = np.repeat(np.arange(2), per_class)
        chosen = centers[labels, rng.integers(CENTERS, size=2 * per_class)]
        points = chosen + math.sqrt(CLUSTER_VARIANCE) * rng.standard_normal((2 * per_class, 3))
        order = rng.permutation(2 * per_class)
        return (points / np.linalg.norm(points, axis=1, keepdims=True))[order], labels[order]

    x_train, y_train = observe()
    x_test, y_test = observe()
    return Draw(seed, centers, x_train, y_train, x_test, y_test)


def projected_log_density(u: Array, mean: Array, variance: float) -> Array:
    """Log density on S^2 of x / |x| for x ~ N(mean, variance I_3). u (n, 3), mean (k, 3) -> (n, k)."""
    z = u @ mean.T / math.sqrt(variance)
    near, far = np.maximum(z, _FAR), np.minimum(z, _FAR)
    log_mills = torch.special.log_ndtr(torch.from_numpy(near)).numpy() + 0.5 * near**2 + 0.5 * math.log(2 * math.pi)
    log_near = log_mills + np.log1p(near**2 + near * np.exp(-log_mills))
    # Far behind the sphere the two terms cancel; there the asymptotic series of the Mills ratio gives their sum.
    x2 = far**-2
    log_far = math.log(2) - 3 * np.log(-far) + np.log1p(-6 * x2 + 45 * x2**2 - 420 * x2**3 + 4725 * x2**4)
    core = np.where(z > _FAR, log_near, log_far)
    result: Array = core - 0.5 * (mean**2).sum(1) / variance - 1.5 * math.log(2 * math.pi)
    return result


def class_log_densities(u: Array, centers: Array) -> Array:
    """Log density of each class at u. u (n, 3), centers (2, k, 3) -> (n, 2)."""
    return np.stack(
        [
            np.logaddexp.reduce(projected_log_density(u, of_class, CLUSTER_VARIANCE), axis=1) - math.log(len(of_class))
            for of_class in centers
        ],
        axis=1,
    )


def bayes_posterior(u: Array, centers: Array) -> Array:
    """Probability of each class at u, both equally likely beforehand. u (n, 3) -> (n, 2)."""
    logs = class_log_densities(u, centers)
    posterior: Array = np.exp(logs - np.logaddexp.reduce(logs, axis=1, keepdims=True))
    return posterior


def bayes_accuracy(centers: Array, *, latitudes: int = 200) -> float:
    """The Bayes classifier's expected accuracy, the integral of max(p_0, p_1) / 2 over the sphere.

    Gauss-Legendre nodes in height and equal steps in longitude: exact for smooth functions, and good to 2e-5 here,
    where the maximum has a kink.
    """
    heights, weights = np.polynomial.legendre.leggauss(latitudes)
    longitudes = 2 * np.pi * (np.arange(2 * latitudes) + 0.5) / (2 * latitudes)
    radius = np.sqrt(1 - heights**2)
    total = 0.0
    for height, r, weight in zip(heights, radius, weights, strict=True):
        circle = np.stack([r * np.cos(longitudes), r * np.sin(longitudes), np.full_like(longitudes, height)], axis=1)
        total += weight * np.exp(class_log_densities(circle, centers)).max(1).mean() * np.pi
    return float(total)
