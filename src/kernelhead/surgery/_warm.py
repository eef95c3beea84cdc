"""A head that starts from a trained linear layer.

Softmax does not change when one vector v is added to all class weights. If all |w_j + v| are equal, logits <w_j + v, f>
rank the classes as the cosines do, and so does every kernel that grows with the cosine. Equal lengths are a linear
condition on v, 2 <w_j - mean(w), v> = mean(|w|^2) - |w_j|^2 for all j. It has a solution if there are no more classes
than features.
"""

from typing import Any

import torch
from torch import Tensor

from kernelhead.heads import Head

WARM = ("linear", "cosine", "kernel")  # heads with one weight for each class
CUT = 0.01  # of singular values. A longer v makes lengths more equal, but crowds the class weights.


@torch.no_grad()
def start_from(head: Head, weight: Tensor, bias: Tensor | None) -> list[str]:
    """Let a head begin with this weight (C, D) and bias (C,) of a linear layer. Returns notes about it."""
    made: Any = head
    if head.name == "linear":
        made.weight.copy_(weight)
        made.bias.copy_(weight.new_zeros(len(weight)) if bias is None else bias)
        return ["starts as the trained layer"]
    if len(weight) == 1:
        raise ValueError(f"warm_start of head={head.name!r} needs two classes or more, which it ranks as the layer did")
    exact = weight.detach().double().cpu()
    rows = exact + common_shift(exact)
    lengths = rows.norm(dim=1)
    made.weight.copy_(rows)
    notes = ["starts from the trained layer, whose ranking it keeps, not its confidence"]
    if bias is not None and bias.any():
        notes.append("its bias is left out")
    unequal = (lengths.std(correction=0) / lengths.mean()).item()
    if unequal > 0.01:
        notes.append(f"lengths of its class weights differ by {unequal:.0%}, which the head cannot follow")
    return notes


def common_shift(weight: Tensor) -> Tensor:
    """Return the v (D,) that makes the rows of weight + v as equal in length as a short v can. weight (C, D)."""
    squares = weight.square().sum(1)
    shift: Tensor = torch.linalg.pinv(weight - weight.mean(0), rtol=CUT) @ ((squares.mean() - squares) / 2)
    return shift
