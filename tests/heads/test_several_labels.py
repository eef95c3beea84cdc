"""Heads with a bias on several labels per sample, beside a linear layer with as many steps and the same rates."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernelhead import KernelHead, PrototypeHead, create_head

N, D, C = 512, 64, 15
STEPS, RATES = 150, (0.03, 0.1, 0.3)


def random_labels(features):
    return (torch.rand(N, C) < 1 / 15).float()


def labels_of_a_linear_teacher(features):
    """One label in fifteen: how often a normal number is above 1.5."""
    return (features @ F.normalize(torch.randn(D, C), dim=0) > 1.5).float()


def lowest_loss(make, features, labels):
    """The loss after the last step of Adam, at the best of the rates."""
    losses = []
    for rate in RATES:
        torch.manual_seed(1)
        head = make()
        optimizer = torch.optim.Adam(head.parameters(), lr=rate)
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(head(features), labels).backward()
            optimizer.step()
        losses.append(F.binary_cross_entropy_with_logits(head(features), labels).item())
    return min(losses)


@pytest.mark.parametrize("draw", [random_labels, labels_of_a_linear_teacher])
def test_several_labels_are_learned_as_by_a_linear_layer(draw):
    torch.manual_seed(0)
    features = torch.randn(N, D)
    labels = draw(features)
    assert labels.mean() == pytest.approx(1 / 15, rel=0.1)
    linear = lowest_loss(lambda: nn.Linear(D, C), features, labels)
    for kind in (KernelHead, PrototypeHead):
        assert lowest_loss(lambda kind=kind: kind(D, C, bias=True), features, labels) < 1.05 * linear
    assert lowest_loss(lambda: KernelHead(D, C), features, labels) > 2 * linear  # k(t) is hardly below k(0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kernel", {}),
        ("kernel", {"coefficients": "sigmoid"}),
        ("kernel", {"kernel": "polynomial"}),
        ("prototypes", {"prototypes": 3}),
        ("prototypes", {"prototypes": 3, "aggregate": "logsumexp", "temperature": 0.5}),
    ],
)
def test_logits_with_a_bias_start_at_zero_where_the_cosine_is(name, options):
    head = create_head(name, D, C, bias=True, **options)
    torch.testing.assert_close(head(torch.zeros(2, D)), torch.zeros(2, C), rtol=0, atol=1e-4)
