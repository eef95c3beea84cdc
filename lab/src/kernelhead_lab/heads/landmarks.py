"""Landmarks of windows, with dropout, or standardised otherwise."""

from typing import Any

import torch
from torch import Tensor

from kernelhead.heads import LandmarkHead
from kernelhead_lab.heads._dropout import check_dropout, dropped


class LandmarkVariant(LandmarkHead):
    """`LandmarkHead` with more options.

    Args:
        window: w. On a map, landmarks are compared with windows of w x w neighbouring positions: vectors of w w D
            features, row by row.
        standardize: False mixes the kernel values as they are.
        eps: what standardising adds to the variance.
        dropout: the share of the standardised values that each sample is trained without.

    The other options and the shapes are those of `LandmarkHead`, except weight (Q, w w D).
    """

    name = "landmarks_variant"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        window: int = 1,
        standardize: bool = True,
        eps: float = 1e-5,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        if window > 1 and options.get("pool", "auto") is None:
            raise ValueError(f"window needs pool='auto'; got window={window} with pool=None")
        super().__init__(in_features * window**2, num_classes, **options)  # the length of a landmark
        self.in_features = in_features
        self._options |= {"window": window, "standardize": standardize, "eps": eps, "dropout": dropout}
        self.window, self.standardize = window, standardize
        self.dropout = check_dropout("LandmarkVariant", dropout)
        self.norm.eps = eps if standardize else 0.0

    def points(self, features: Tensor) -> Tensor:
        if self.window == 1:
            return super().points(features)
        size, shape = self.window, tuple(features.shape)
        if len(shape) != 4 or shape[1] != self.in_features or min(shape[2:]) < size:
            raise ValueError(
                f"LandmarkVariant with window={size} expects a map (N, {self.in_features}, H, W) with H and W of at "
                f"least {size}, got {shape}"
            )
        rows, columns = shape[2] - size + 1, shape[3] - size + 1
        corners = [(row, column) for row in range(size) for column in range(size)]
        windows = torch.cat([features[:, :, i : i + rows, j : j + columns] for i, j in corners], 1)
        return windows.flatten(2).transpose(1, 2)

    def _standardised(self, values: Tensor) -> Tensor:
        if self.standardize:
            values = super()._standardised(values)
        else:  # the statistics stay at mean 0 and variance 1
            statistics = self.norm.running_mean
            assert statistics is not None
            values = self.scale * values.to(statistics.dtype)
        return dropped(values, self.dropout, self.training)
