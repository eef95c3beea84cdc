"""The passes over a block of cosines in plain torch, on any device. See `blocks`.

| (2048, 256) features, 50,000 classes, CPU | s per step |   MB |  lab/results/bench/loss_cpu.json
| chunked                                   |        2.4 |   68 |
| eager                                     |        2.9 | 1646 |
"""

import torch
from torch import Tensor

from kernelhead import kernels
from kernelhead.fused.cross_entropy.blocks import Found, Precision, Settings, Sums
from kernelhead.fused.kernel_mean import alpha_gradient, touches_end_points
from kernelhead.fused.modes import at_hand
from kernelhead.fused.precision import divided, lengths, real_dtype

# exp(k - A) for |k| <= A can't overflow, and can't vanish while 2 A is below this: the logarithm of 1e-35.
RANGE = 80.0


def unit(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of x (R, D) at unit length, and their lengths (R, 1)."""
    norm = lengths(x)
    return divided(x, norm, dtype), norm.to(real_dtype(x.dtype))


def project(part: Tensor, x: Tensor, norm: Tensor, out: Tensor) -> None:
    """Write part (R, D) to out, less what points along x (R, D). norm (R, 1): lengths of x."""
    direction = divided(x, norm, part.dtype)
    out.copy_(part.addcmul_(direction, (part * direction).sum(1, keepdim=True), value=-1))


class Observe:
    """Sums over the cosines that the loss needs, gathered block by block.

    - `masses` (N, columns): log sum exp(k), with `pieces` columns per block.
    - `spread` (N, columns): the sum of all scores, with label smoothing.
    - `own` (N, P): the kernel values of a sample's own prototypes.
    """

    def __init__(self, alpha: Tensor, target: Tensor, settings: Settings, kind: Precision, pieces: int = 1) -> None:
        self.alpha, self.target, self.settings, self.kind = alpha.contiguous(), target.contiguous(), settings, kind
        samples, columns = target.shape[0], -(-settings.classes // settings.width) * pieces
        self.own = alpha.new_full((samples, settings.prototypes), torch.nan)
        self.masses = alpha.new_full((samples, columns), -torch.inf)
        self.spread = alpha.new_zeros(samples, columns if settings.smoothing else 0)

    def __call__(self, t: Tensor, first: int) -> None:
        """Look at the cosines t (N, c P) of the classes from `first` on."""
        t, prototypes, block = t.to(self.kind.real), self.settings.prototypes, first // self.settings.width
        k = kernels.series(t, self.alpha, ends=self.kind.ends and touches_end_points(t), out=torch.empty_like(t))
        grouped = torch.unflatten(k, 1, (-1, prototypes))
        inside, index = _own(self.target - first, grouped)
        torch.where(inside, grouped.gather(1, index)[:, 0], self.own, out=self.own)
        if self.settings.smoothing:
            self.spread[:, block] = (torch.logsumexp(grouped, 2) if prototypes > 1 else k).sum(1)
        bound = self.alpha.abs().sum().item() if at_hand(self.alpha) else RANGE
        if 2 * bound < RANGE:
            self.masses[:, block] = k.sub_(bound).exp_().sum(1).log_().add_(bound)
        else:
            self.masses[:, block] = torch.logsumexp(k, 1)

    def conclude(self) -> Sums:
        """What all blocks have together."""
        return Sums(torch.logsumexp(self.masses, 1), torch.logsumexp(self.own, 1), self.spread.sum(1))


class Slopes:
    """dL/dt / |w| of block after block of cosines, and `sums`, which are dL/dalpha (M + 3,).

    gradient (N,): of the loss of each sample.
    """

    def __init__(
        self, alpha: Tensor, target: Tensor, settings: Settings, kind: Precision, gradient: Tensor, found: Found
    ) -> None:
        self.alpha, self.target, self.settings, self.kind = alpha.contiguous(), target.contiguous(), settings, kind
        self.gradient = torch.where(target != settings.ignored, gradient, 0.0)
        self.z, self.likelihood = found.z, found.likelihood
        self.sums = torch.zeros_like(self.alpha)

    def __call__(self, t: Tensor, first: int, norm: Tensor, spend: bool) -> Tensor:
        """Slopes (N, c P) of the classes from `first` on; norm (c P, 1). `spend` means nothing here."""
        t, prototypes, smoothing = t.to(self.kind.real), self.settings.prototypes, self.settings.smoothing
        ends = self.kind.ends and touches_end_points(t)
        p = kernels.series(t, self.alpha, ends=ends, out=torch.empty_like(t))
        grouped = torch.unflatten(p, 1, (-1, prototypes))
        inside, index = _own(self.target - first, grouped)
        own = (grouped.gather(1, index)[:, 0] - self.likelihood[:, None]).exp_().mul_(smoothing - 1)
        shares = torch.softmax(grouped, 2) if smoothing and prototypes > 1 else None
        p.sub_(self.z[:, None]).exp_()
        if smoothing:
            everywhere = smoothing / self.settings.total
            grouped.sub_(everywhere if shares is None else shares.mul_(everywhere))
        grouped.scatter_add_(1, index, torch.where(inside, own, 0.0)[:, None])
        p.mul_(self.gradient[:, None])
        derivative = kernels.derivative_coefficients(self.alpha).unbind()
        self.sums += alpha_gradient(p, t, len(derivative), ends)
        self.sums[kernels.END_POINTS] = 0  # exactly: a_0 moves all scores alike
        slopes = kernels.horner(t, derivative, out=torch.empty_like(t))
        return slopes.mul_(p).div_(norm.view(-1)).to(self.kind.slopes)


def _own(target: Tensor, grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Which targets (N,) are classes of grouped (N, c, P), and their indices to gather; 0 for the others."""
    inside = (target >= 0) & (target < grouped.shape[1])
    return inside[:, None], (target * inside)[:, None, None].expand(-1, -1, grouped.shape[2])
