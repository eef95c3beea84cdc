"""Losses."""

import torch
from torch import Tensor
from torch.nn import functional as F


def distillation_loss(logits: Tensor, teacher_logits: Tensor, *, temperature: float = 20.0) -> Tensor:
    """Cross-entropy of a student with a teacher's softened scores, the paper's equation of section 4.

    T^2 * mean over samples of  -sum_j softmax(h / T)_j log softmax(s / T)_j

    for student logits s and teacher logits h, both (N, C). The factor T^2 (Hinton et al., 2015) keeps the gradient's
    size whatever T is, so that learning rates carry over; the paper does not say whether it has it. Without it the
    same training needs a learning rate T^2 as large, and weight decay as much smaller.
    """
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"the student's logits are {tuple(logits.shape)}, the teacher's {tuple(teacher_logits.shape)}: "
            "they need the same classes"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    target = torch.softmax(teacher_logits.float() / temperature, dim=1)
    return temperature**2 * F.cross_entropy(logits.float() / temperature, target)
