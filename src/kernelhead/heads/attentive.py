"""The head of attentive probing: learned queries choose what is averaged."""

import math

import torch
from torch import Tensor, nn

from kernelhead.fused.precision import real_dtype
from kernelhead.heads._base import Head
from kernelhead.heads._inputs import check_sizes


class AttentiveHead(Head):
    """Logits A norm(v) + b, where slice m of v is sum_l p_ml (V x_l)_m with p_m = softmax_l(<q_m, x_l> / sqrt(D)).

    Learned queries q_m score the layer-normalised positions x_l. Query m averages its own slice of a value projection
    V x_l. The slices side by side are standardised over the batch (BatchNorm without affine part). Scores and
    values are of the same positions, as in efficient probing, so none outweighs the others by its length.

    Args:
        in_features: D.
        num_classes: C.
        queries: how many. The values have as many channels as D, rounded up to a multiple of it.
        pool, device, dtype: as of `LandmarkHead`.

    Shapes:
        features `(N, D, H, W)`, `(N, L, D)` or `(N, D)` -> logits `(N, C)`.

    Example:
        >>> AttentiveHead(64, 10)(torch.randn(8, 49, 64)).shape
        torch.Size([8, 10])
    """

    name = "attentive"
    scaled = ("classifier.weight", "classifier.bias")
    precise = ("norm.running_mean", "norm.running_var")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        queries: int = 16,
        pool: str | None = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._configure(in_features, num_classes, queries=queries, pool=pool)
        check_sizes("AttentiveHead", queries=queries)
        width = -(-in_features // queries) * queries
        self.input_norm = nn.LayerNorm(in_features, device=device, dtype=dtype)
        self.queries = nn.Parameter(torch.empty(queries, in_features, device=device, dtype=dtype))
        self.values = nn.Linear(in_features, width, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, affine=False, device=device, dtype=real_dtype(self.queries.dtype))
        self.classifier = nn.Linear(width, num_classes, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.queries, std=0.02)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        real = self._real(features, mask)
        positions = self.input_norm(self._positions(features, real))
        scores = positions @ self.queries.to(positions.dtype).mT / math.sqrt(self.in_features)
        if real is not None:
            scores = scores.masked_fill(~real[..., None], torch.finfo(scores.dtype).min)
        attention = scores.softmax(1, dtype=real_dtype(scores.dtype))
        values = self.values(positions).unflatten(2, (self.queries.shape[0], -1))
        pooled = torch.einsum("nlm,nlmd->nmd", attention.to(values.dtype), values).flatten(1)
        standardised = self.norm(pooled.to(self.norm.get_buffer("running_mean").dtype))
        logits: Tensor = self.classifier(standardised.to(self.classifier.weight.dtype))
        return self._as_given(logits, features)
