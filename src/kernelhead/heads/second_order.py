"""SOP, the paper's third baseline: bilinear pooling (Lin et al., ICCV 2015)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.heads._choices import check_dropout
from kernelhead.heads._leaf import Leaf
from kernelhead.heads._places import as_places, as_vectors, check_sizes
from kernelhead.ops.modes import runs_kernels, transformed
from kernelhead.ops.precision import autocast_dtype, real_dtype, unit_norm, without_autocast

# x / sqrt(|x| + EPS) is the signed root without its infinite slope at 0, for moments whose diagonal has the mean 1. Of
# the half a million moments of a batch some are always next to 0: with 1e-10 one of them ruined a network every few
# thousand steps.
EPS = 1e-5


class SecondOrderHead(Leaf):
    """The mean of f f^T over places, signed square root, L2 normalisation, linear layer on its D x D entries.

    Without `places` it is a polynomial of degree 2 on feature vectors: each is a single place. `dropout` is the share
    of the entries that each sample is trained without.

    Map (N, D, H, W) or tokens (N, L, D), or without `places` (N, D) -> logits (N, C). The same for features of any
    scale. The linear layer is given vectors of length sqrt(D), as of D features of unit variance, and takes the
    learning rates of a softmax head: with unit length it learns D times as slowly. The pooling runs in float32 at
    least: products of half-precision features overflow. On CUDA those of at most 128 features go through
    `kernelhead.ops.second_order`, whose gradients cannot be differentiated again.
    """

    pools = True
    dropout = 0.0  # of a module that was pickled before there was any

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        places: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("SecondOrderHead", in_features=in_features, num_classes=num_classes)
        super().__init__()
        self.in_features = in_features
        self.num_classes = num_classes
        self.pools = places
        self.dropout = check_dropout(dropout)
        self.classifier = nn.Linear(in_features**2, num_classes, device=device, dtype=dtype)

    def forward(self, features: Tensor) -> Tensor:
        if self.pools:
            places = as_places(features, self.in_features, "SecondOrderHead")
        else:
            places = as_vectors(features, self.in_features, "SecondOrderHead").unsqueeze(1)
        embedded = self._embed(places)
        if self.dropout:
            embedded = F.dropout(embedded, self.dropout, self.training)
        logits: Tensor = self.classifier(embedded)
        return logits if self.pools else logits.view(*features.shape[:-1], self.num_classes)

    def _embed(self, places: Tensor) -> Tensor:
        """Places (N, L, D) -> (N, D * D), in the precision of the linear layer."""
        device = places.device
        dtype = autocast_dtype(self.classifier.weight.dtype, device.type)
        if runs_kernels(device) and not transformed():
            from kernelhead.ops import second_order as ops

            if ops.supported(places, dtype):
                return ops.second_order(places, dtype, EPS)
        with without_autocast(device.type):
            places = places.to(real_dtype(places.dtype))
            scaled = places / (unit_norm(places.flatten(1))[..., None] / math.sqrt(self.in_features))
            second_moments = (scaled.mT @ scaled).flatten(1)
            rooted = second_moments * torch.rsqrt(second_moments.abs() + EPS)
            return (rooted * (math.sqrt(self.in_features) / unit_norm(rooted))).to(dtype)

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout:g}" if self.dropout else ""
        return f"in_features={self.in_features}, num_classes={self.num_classes}{dropout}"
