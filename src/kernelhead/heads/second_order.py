"""SOP, the paper's third baseline: bilinear pooling (Lin et al., ICCV 2015)."""

import torch
from torch import Tensor, nn

from kernelhead.heads._places import as_places, check_sizes
from kernelhead.ops.precision import real_dtype, unit_norm, without_autocast


class SecondOrderHead(nn.Module):
    """The mean of f f^T over places, signed square root, L2 normalisation, linear layer on its D x D entries.

    Map (N, D, H, W) or tokens (N, L, D) -> logits (N, C). The pooling runs in float32 at least: products of
    half-precision features overflow.
    """

    pools = True

    def __init__(self, in_features: int, num_classes: int) -> None:
        check_sizes("SecondOrderHead", in_features=in_features, num_classes=num_classes)
        super().__init__()
        self.in_features = in_features
        self.num_classes = num_classes
        self.classifier = nn.Linear(in_features**2, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        places = as_places(features, self.in_features, "SecondOrderHead")
        with without_autocast(features.device.type):
            places = places.to(real_dtype(places.dtype))
            second_moments = (places.mT @ places / places.shape[1]).flatten(1)
            # x / sqrt(|x| + eps) is the signed root without its infinite slope at 0.
            rooted = second_moments * torch.rsqrt(second_moments.abs() + 1e-10)
            embedding = rooted / unit_norm(rooted)
        logits: Tensor = self.classifier(embedding.to(self.classifier.weight.dtype))
        return logits

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_classes={self.num_classes}"
