"""The losses that heads offer: the same with and without a fused one, and what they refuse."""

import re

import pytest
import torch
from torch.nn import functional as F

from kernelhead import KernelClassifier
from kernelhead.ops import cross_entropy

D, C = 6, 4
CASES = {
    "plain": {},
    "prototypes": {"prototypes": 2},
    "sum": {"prototypes": 2, "aggregate": "sum"},
    "landmarks": {"landmarks": 5},
    "pooling": {"pool": "rkhs"},
}


@pytest.fixture(params=CASES)
def case(request):
    """A head in evaluation mode, features, and the shape of their labels."""
    torch.manual_seed(0)
    head = KernelClassifier(D, C, **CASES[request.param]).double().eval()
    shape = (6,) if head.pools else (2, 3)
    return head, torch.randn(*shape, *((7,) if head.pools else ()), D, dtype=torch.float64), shape


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_labels_of_every_shape_and_kind(case, kind):
    head, features, shape = case
    labels = torch.randint(C, shape)
    exactly = -head(features).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    losses = head.loss(features, labels.to(kind), reduction="none")
    assert losses.shape == shape
    torch.testing.assert_close(losses, exactly)
    torch.testing.assert_close(head.loss(features, labels.to(kind)), exactly.mean())
    if kind.is_signed:
        labels.view(-1)[1:3] = -100
        counted = exactly[labels >= 0]
        torch.testing.assert_close(head.loss(features, labels.to(kind)), counted.mean())


def test_one_feature_vector_and_its_label():
    head, x = KernelClassifier(D, C, landmarks=5).eval(), torch.randn(D)
    losses = head.loss(x, torch.tensor(2), reduction="none")
    torch.testing.assert_close(losses, -head(x).log_softmax(0)[2])


def test_labels_of_another_shape_are_refused(case):
    head, features, shape = case
    flat, other = torch.zeros(7, dtype=torch.long), torch.zeros((*shape, 1), dtype=torch.long)
    for labels in (flat, other, torch.zeros(shape, dtype=torch.bool), torch.zeros(*shape, C, dtype=torch.long)):
        found = f"got {tuple(labels.shape)} of {labels.dtype}"
        message = f"KernelClassifier expects integer labels of shape {shape}, {found}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            head.loss(features, labels)


def test_probabilities_and_weights_of_classes_are_refused(case):
    head, features, shape = case
    with pytest.raises(ValueError, match=r"a loss for labels, not for probabilities of classes \(got torch.float64\)"):
        head.loss(features, head(features).softmax(-1))
    with pytest.raises(ValueError, match="a loss without weights of classes"):
        head.loss(features, torch.zeros(shape, dtype=torch.long), weight=torch.ones(C))


@pytest.mark.parametrize("crossover", [0, 10**9])
@pytest.mark.parametrize("options", [{}, {"prototypes": 2}], ids=str)
def test_loss_and_hits_leave_ignored_labels_out(monkeypatch, options, crossover):
    monkeypatch.setitem(cross_entropy.CROSSOVER, "cpu", crossover)
    torch.manual_seed(0)
    head, features = KernelClassifier(D, C, **options).double(), torch.randn(20, D, dtype=torch.float64)
    target = torch.randint(C, (20,))
    target[5:12] = -100
    loss, hits = head.loss_and_hits(features, target)
    counted = target >= 0
    logits = head(features)
    torch.testing.assert_close(loss, F.cross_entropy(logits[counted], target[counted]))
    assert hits.tolist() == (logits.argmax(1) == target).tolist()
