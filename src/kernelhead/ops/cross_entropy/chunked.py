"""The passes over a block of cosines in plain torch, on any device. See `blocks`."""

import torch
from torch import Tensor

from kernelhead import kernels
from kernelhead.ops.cross_entropy.products import Precision, Products
from kernelhead.ops.precision import raw_unit_norm

# exp(k - A) for |k| <= A can't overflow, and can't vanish while 2 A is below this: the logarithm of 1e-35.
RANGE = 80.0


def unit(x: Tensor, dtype: torch.dtype, norm: Tensor | None = None) -> Tensor:
    """Rows of x (R, D) at unit length; their lengths go to norm (R, 1)."""
    length = raw_unit_norm(x)
    if norm is not None:
        norm.copy_(length)
    return (x / length).to(dtype)


def project(part: Tensor, x: Tensor, norm: Tensor, out: Tensor, *, divided: bool) -> None:
    """Take what points along x (R, D) out of part (R, D), divide by the length of x if it is not yet, into out."""
    direction = x.to(part.dtype) / norm.to(part.dtype)
    part.addcmul_(direction, (part * direction).sum(1, keepdim=True), value=-1)
    out.copy_(part if divided else part.div_(norm))


class Observe:
    """What the loss needs of the cosines, gathered block by block.

    `masses` (N, blocks): log sum exp(k) of each; `own` (N, P): the kernel values of a sample's own prototypes; if
    `ranked` `best` (N, blocks): the highest score of a class; if `spreads` `spread` (N, blocks): the sum of all scores.
    """

    def __init__(
        self,
        alpha: Tensor,
        kind: Precision,
        target: Tensor,
        prototypes: int,
        classes: int,
        width: int,
        spreads: bool,
        ranked: bool,
    ) -> None:
        self.alpha, self.kind, self.target, self.prototypes = alpha, kind, target, prototypes
        self.width, self.spreads, self.ranked = width, spreads, ranked
        samples, blocks = target.shape[0], -(-classes // width)
        self.bound = alpha.abs().sum()
        self.bounded = alpha.device.type == "cpu" and 2 * self.bound.item() < RANGE  # elsewhere asking would wait
        self.own = alpha.new_full((samples, prototypes), torch.nan)
        self.masses = alpha.new_empty(samples, blocks)
        self.best = alpha.new_empty(samples, blocks if ranked else 0)
        self.spread = alpha.new_empty(samples, blocks if spreads else 0)

    def __call__(self, t: Tensor, first: int) -> None:
        """Look at the cosines t (N, c P) of the classes from `first` on."""
        t = t.to(self.kind.real)
        k = _kernel(t, self.alpha, _touches_ends(t, self.kind))
        grouped = torch.unflatten(k, 1, (-1, self.prototypes))
        inside, place = _place(self.target - first, grouped.shape[1])
        found = grouped.gather(1, place[:, None, None].expand(-1, -1, self.prototypes))[:, 0]
        torch.where(inside[:, None], found, self.own, out=self.own)
        block = first // self.width
        if self.ranked or self.spreads:
            scores = torch.logsumexp(grouped, 2) if self.prototypes > 1 else k
            if self.ranked:
                self.best[:, block] = scores.amax(1)
            if self.spreads:
                self.spread[:, block] = scores.sum(1)
        if self.bounded:
            self.masses[:, block] = k.sub_(self.bound).exp_().sum(1).log_().add_(self.bound)
        else:
            self.masses[:, block] = torch.logsumexp(k, 1)

    def conclude(self, ignored: int, smoothing: float, classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss (N,), if ranked which samples have their own class on top (N,), z (N,), and log p of the label + z.

        A label is worth 1 - `smoothing` in its class and `smoothing` over all `classes`; the loss of samples with the
        label `ignored` is zero.
        """
        z, likelihood = torch.logsumexp(self.masses, 1), torch.logsumexp(self.own, 1)
        nll = z - (1 - smoothing) * likelihood
        if self.spreads:
            nll -= smoothing / classes * self.spread.sum(1)
        counts = self.target != ignored
        right = (likelihood >= self.best.amax(1)) & counts if self.ranked else z.new_empty(0, dtype=torch.bool)
        return torch.where(counts, nll, 0.0), right, z, likelihood


class Slopes:
    """dL/dt / |w| of block after block of cosines, and the sums that are dL/dalpha.

    gradient (N,): of the loss of each sample; z, likelihood (N,): as `Observe` concluded.
    """

    def __init__(
        self,
        alpha: Tensor,
        kind: Precision,
        target: Tensor,
        gradient: Tensor,
        z: Tensor,
        likelihood: Tensor,
        prototypes: int,
        classes: int,
        ignored: int,
        smoothing: float,
    ) -> None:
        self.alpha, self.kind, self.target, self.prototypes = alpha, kind, target, prototypes
        self.gradient = torch.where(target != ignored, gradient, 0.0)[:, None]
        self.z, self.likelihood = z[:, None], likelihood[:, None]
        self.everywhere, self.label = smoothing / classes, 1 - smoothing
        self.degree = alpha.shape[0] - kernels.END_POINTS - 1
        orders = torch.arange(1, self.degree + 1, dtype=alpha.dtype, device=alpha.device)
        self.derivative = (alpha[kernels.END_POINTS + 1 :] * orders).unbind()
        self.sums = torch.zeros_like(alpha)

    def __call__(self, t: Tensor, first: int, norm: Tensor, spend: bool, products: Products) -> Tensor:
        """Slopes (N, c P) of the classes from `first` on; norm (c P, 1). `spend` and `products` mean nothing here."""
        t = t.to(self.kind.real)
        ends = _touches_ends(t, self.kind)
        p = _kernel(t, self.alpha, ends)
        grouped = torch.unflatten(p, 1, (-1, self.prototypes))
        inside, place = _place(self.target - first, grouped.shape[1])
        places = place[:, None, None].expand(-1, -1, self.prototypes)
        own = (grouped.gather(1, places)[:, 0] - self.likelihood).exp_().mul_(-self.label)
        shares = torch.softmax(grouped, 2) if self.everywhere and self.prototypes > 1 else None
        p.sub_(self.z).exp_()
        if self.everywhere:
            grouped.sub_(self.everywhere if shares is None else shares.mul_(self.everywhere))
        grouped.scatter_add_(1, places, torch.where(inside[:, None], own, 0.0)[:, None])
        p.mul_(self.gradient)
        slopes = kernels.horner(t, self.derivative, in_place=True).mul_(p).div_(norm.view(-1))
        self.sums += _moments(p, t, self.degree, ends)
        return slopes.to(self.kind.slopes)

    def moments(self) -> Tensor:
        """dL/dalpha (M + 3,) of all blocks so far."""
        return self.sums


def _kernel(t: Tensor, alpha: Tensor, ends: bool) -> Tensor:
    """k(t) in a buffer of its own."""
    evaluate = kernels.series if ends else kernels.power_series
    return evaluate(t, alpha, in_place=True)


def _touches_ends(t: Tensor, kind: Precision) -> bool:
    """Whether end-point terms have to be looked at. On a CPU asking is cheap, and almost always answered by no."""
    if not kind.ends or t.device.type != "cpu" or t.numel() == 0:
        return kind.ends
    low, high = torch.aminmax(t)
    return not max(-low.item(), high.item()) < 1 - kernels.default_tolerance(t.dtype)  # a NaN is no answer


def _place(target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Which targets (N,) lie in 0 .. classes - 1, and where; those that don't, at 0."""
    inside = (target >= 0) & (target < classes)
    return inside, target * inside


def _moments(p: Tensor, t: Tensor, degree: int, ends: bool) -> Tensor:
    """Sums of p k_even, p k_odd and p t^m, m = 0 .. degree; p is used up. a_0 moves all scores alike: zero exactly."""
    nothing = p.new_zeros(())
    odd, even = nothing, nothing
    if ends:
        at_ends = kernels.end_points(t)
        odd, even = (p * at_ends).sum(), (p * at_ends * at_ends).sum()
    return torch.stack([even, odd, nothing, *(p.mul_(t).sum() for _ in range(degree))])
