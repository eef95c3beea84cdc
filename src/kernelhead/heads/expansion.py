"""The control for landmarks with RKHS pooling: the same shape and cost, no kernel."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.heads._choices import check_dropout, check_scale
from kernelhead.heads._leaf import Leaf
from kernelhead.heads._places import as_places, as_vectors, check_sizes
from kernelhead.ops.norm_relu_mean import norm_relu_mean, supported
from kernelhead.ops.precision import unit_norm


class ExpansionHead(Leaf):
    """1x1 convolution to `width` channels, BatchNorm, ReLU, mean over places, linear layer.

    With `normalized` the features of each place are scaled to unit length first, with `standardized` the means over
    places are standardised over the batch and multiplied by `scale`: both as a kernel head with landmarks does it. With
    a `window` of w the convolution is w x w, without padding, and what is scaled to unit length are windows: the
    weights of `expand` are those of w w D features, place by place. `dropout` is the share of the channels that each
    sample is trained without, as a kernel head has it of its landmarks. Without `places` it is a hidden layer on
    feature vectors.

    Map (N, D, H, W) or tokens (N, L, D), or without `places` (N, D) -> logits (N, C). In training under autocast on
    CUDA what follows the convolution goes through `kernelhead.ops.norm_relu_mean`.
    """

    pools = True
    window = 1  # of a module that was pickled before there were windows
    dropout = 0.0  # or dropout
    scale = 1.0  # or a scale

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        width: int = 512,
        normalized: bool = False,
        standardized: bool = False,
        scale: float = 1.0,
        places: bool = True,
        window: int = 1,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("ExpansionHead", in_features=in_features, num_classes=num_classes, width=width, window=window)
        if window > 1 and not places:
            raise ValueError("window is about neighbouring places: it goes with places=True")
        scale = check_scale(scale)
        if scale != 1 and not standardized:
            raise ValueError("scale is of standardised means over places: it goes with standardized=True")
        super().__init__()
        self.in_features = in_features
        self.num_classes = num_classes
        self.normalized = normalized
        self.pools = places
        self.window = window
        self.dropout = check_dropout(dropout)
        self.scale = scale
        wide = in_features * window**2
        self.expand = nn.Conv2d(wide, width, kernel_size=1, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(width, device=device, dtype=dtype)
        self.standard = (
            nn.BatchNorm1d(width, affine=False, device=device, dtype=dtype) if standardized else nn.Identity()
        )
        self.classifier = nn.Linear(width, num_classes, device=device, dtype=dtype)

    def forward(self, features: Tensor) -> Tensor:
        if self.pools:
            maps = as_places(features, self.in_features, "ExpansionHead", self.window).mT.unsqueeze(-1)
            if features.dim() == 4 and self.window == 1:  # without a copy, and laid out as it is
                maps = features
        else:
            maps = as_vectors(features, self.in_features, "ExpansionHead")[:, :, None, None]
        if self.normalized:
            vectors = maps.movedim(1, -1)
            maps = (vectors / unit_norm(vectors)).movedim(-1, 1).to(features.dtype)
        if supported(self.expand, self.norm, maps):
            expanded = F.linear(maps.flatten(2).mT, self.expand.weight.flatten(1))  # channels last, as the kernels read
            pooled = norm_relu_mean(expanded, self.norm)
        else:
            pooled = torch.relu(self.norm(self.expand(maps))).mean((2, 3))
        pooled = self.standard(pooled)
        if self.scale != 1:
            pooled = self.scale * pooled
        if self.dropout:
            pooled = F.dropout(pooled, self.dropout, self.training)
        logits: Tensor = self.classifier(pooled)
        return logits if self.pools else logits.view(*features.shape[:-1], self.num_classes)

    def extra_repr(self) -> str:
        normalized = ", normalized=True" if self.normalized else ""
        scale = f", scale={self.scale:g}" if self.scale != 1 else ""
        window = f", window={self.window}" if self.window > 1 else ""
        dropout = f", dropout={self.dropout:g}" if self.dropout else ""
        return f"in_features={self.in_features}, num_classes={self.num_classes}{normalized}{scale}{window}{dropout}"
