import math

import numpy as np
import pytest
import torch

from kernelhead.losses import distillation_loss


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 4.0, 20.0])
def test_value_and_gradient_by_hand(rng, temperature):
    s, h = rng.normal(size=(7, 5)) * 8, rng.normal(size=(7, 5)) * 8
    student = torch.tensor(s, requires_grad=True)
    loss = distillation_loss(student, torch.tensor(h), temperature=temperature)
    loss.backward()
    p, q = softmax(s / temperature), softmax(h / temperature)
    assert math.isclose(loss.item(), temperature**2 * -(q * np.log(p)).sum(1).mean(), rel_tol=1e-5)
    np.testing.assert_allclose(student.grad, temperature * (p - q) / 7, atol=1e-5)


def test_a_perfect_student_has_the_teachers_entropy_and_no_gradient(rng):
    h = rng.normal(size=(4, 6)) * 30
    student = torch.tensor(h + 3, requires_grad=True)  # a constant shifts nothing
    loss = distillation_loss(student, torch.tensor(h))
    loss.backward()
    q = softmax(h / 20)
    assert math.isclose(loss.item(), 400 * -(q * np.log(q)).sum(1).mean(), rel_tol=1e-5)
    np.testing.assert_allclose(student.grad, 0, atol=1e-5)


def test_the_teacher_learns_nothing():
    teacher = torch.randn(3, 4, requires_grad=True)
    distillation_loss(torch.randn(3, 4, requires_grad=True), teacher.detach()).backward()
    assert teacher.grad is None


def test_other_classes_are_refused():
    with pytest.raises(ValueError, match=r"student's logits are \(2, 3\), the teacher's \(2, 4\)"):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 4))


def test_bad_temperature():
    with pytest.raises(ValueError, match="temperature must be positive"):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 3), temperature=0.0)
