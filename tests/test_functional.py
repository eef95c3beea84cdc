"""Losses as functions, against NumPy and torch's own cross-entropy."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernelhead import KernelHead, LandmarkHead, PrototypeHead
from kernelhead.functional import distillation_loss, kernel_cross_entropy, mixup_cross_entropy
from kernelhead.fused import cross_entropy


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


def mix(monkeypatch, logits, target, shares):
    """The loss where these shares are drawn."""
    shares = torch.as_tensor(shares, dtype=logits.dtype)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "rand", lambda *_, **__: shares)
        return mixup_cross_entropy(logits, target)


def test_mixup_by_hand(rng, monkeypatch):
    z, y, s = rng.normal(size=(7, 5)) * 4, rng.integers(5, size=7), rng.random(7)
    logits = torch.tensor(z, requires_grad=True)
    loss = mix(monkeypatch, logits, torch.tensor(y), s)
    loss.backward()
    targets = s[:, None] * np.eye(5)[y] + (1 - s[:, None]) * np.eye(5)[y[::-1]]
    p = softmax(s[:, None] * z + (1 - s[:, None]) * z[::-1])
    assert math.isclose(loss.item(), -(targets * np.log(p)).sum(1).mean(), rel_tol=1e-12)
    at_mixed = (p - targets) / 7
    np.testing.assert_allclose(logits.grad, s[:, None] * at_mixed + ((1 - s[:, None]) * at_mixed)[::-1], atol=1e-12)


def test_mixup_with_all_of_oneself_is_cross_entropy(monkeypatch):
    logits, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 0])
    expected = F.cross_entropy(logits, target)
    torch.testing.assert_close(mix(monkeypatch, logits, target, torch.ones(6)), expected)
    torch.testing.assert_close(mix(monkeypatch, logits, target, torch.zeros(6)), expected)
    half = mixup_cross_entropy(logits.bfloat16(), target)
    assert half.dtype == torch.float32
    torch.manual_seed(0)
    first = mixup_cross_entropy(logits, target)
    assert not torch.equal(mixup_cross_entropy(logits, target), first)
    torch.manual_seed(0)
    assert torch.equal(mixup_cross_entropy(logits, target), first)


def test_mixup_leaves_out_what_does_not_count(rng, monkeypatch):
    z, y, s = rng.normal(size=(6, 4)), np.array([-100, 1, -100, 3, 0, 2]), rng.random(6)
    loss = mix(monkeypatch, torch.tensor(z), torch.tensor(y, dtype=torch.int32), s)
    logs = np.log(softmax(s[:, None] * z + (1 - s[:, None]) * z[::-1]))
    terms = [(share[i], logs[i, labels[i]]) for labels, share in ((y, s), (y[::-1], 1 - s)) for i in range(6)
             if labels[i] != -100]  # fmt: skip
    assert math.isclose(loss.item(), -sum(a * b for a, b in terms) / sum(a for a, _ in terms), rel_tol=1e-12)
    plain = mix(monkeypatch, torch.tensor(z), torch.tensor(y), torch.ones(6))
    assert math.isclose(plain.item(), F.cross_entropy(torch.tensor(z), torch.tensor(y)).item(), rel_tol=1e-12)


def test_mixed_logits_are_those_of_the_positions_of_both_images():
    """In the RKHS, the mean of two mean embeddings is the embedding of all positions together."""
    head = LandmarkHead(6, 4, landmarks=9).double()
    images = torch.randn(8, 6, 3, 3, dtype=torch.float64)
    head(images)
    head.eval()
    both = torch.cat([images, images.flip(0)], 2)
    torch.testing.assert_close(head(both), (head(images) + head(images).flip(0)) / 2)


@pytest.mark.parametrize(
    ("logits", "target", "words"),
    [
        (
            (4, 3),
            torch.zeros(5).long(),
            r"needs logits \(N, C\) and integer labels \(N,\); got \(4, 3\) of torch.float32 and \(5,\) of torch.int64",
        ),
        ((4, 3), torch.zeros(4), "of torch.float32"),
        ((4, 3), torch.zeros(4).bool(), "of torch.bool"),
        ((4, 3), torch.full((4,), 3), r"labels need to lie in 0 \.\. 2; got 3 to 3"),
        ((4,), torch.zeros(4).long(), "needs logits"),
    ],
)
def test_mixup_of_what_does_not_fit(logits, target, words):
    with pytest.raises(ValueError, match=words):
        mixup_cross_entropy(torch.zeros(logits), target)


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
    with pytest.raises(
        ValueError,
        match=r"need logits of the same shape; got \(2, 3\) of torch.float32 and \(2, 4\) of torch.float32",
    ):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 4))


def test_bad_temperature():
    with pytest.raises(ValueError, match=r"temperature needs to be positive; got temperature=0\.0"):
        distillation_loss(torch.zeros(2, 3), torch.zeros(2, 3), temperature=0.0)


@pytest.fixture
def head_case():
    torch.manual_seed(0)
    head = PrototypeHead(6, 11, prototypes=2, aggregate="logsumexp", temperature=0.5).double()
    return head, torch.randn(9, 6, dtype=torch.float64), torch.randint(11, (9,))


@pytest.mark.parametrize("backend", ["auto", "eager", "chunked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.2},
        {"ignore_index": 3, "reduction": "sum"},
    ],
    ids=str,
)
def test_kernel_cross_entropy_is_that_of_the_logits(head_case, backend, options):
    head, features, target = head_case
    target[2] = target[5] = 3
    wanted = F.cross_entropy(head(features), target, **options)
    found = head.loss(features, target, backend=backend, **options)
    torch.testing.assert_close(found, wanted)
    parameters = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_all_ignored_is_nan_as_in_torch(head_case):
    head, features, target = head_case
    for backend in ("eager", "chunked"):
        assert head.loss(features, torch.full_like(target, -100), backend=backend).isnan()


@pytest.mark.parametrize(("backend", "mode"), [("chunked", "speed"), ("chunked", "memory"), ("eager", "speed")])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_samples_is_what_it_is_in_torch(head_case, backend, mode, reduction, smoothing):
    head, features, target = head_case
    features, target = features[:0].requires_grad_(), target[:0]
    options = {"reduction": reduction, "label_smoothing": smoothing}
    found = head.loss(features, target, backend=backend, mode=mode, **options)
    torch.testing.assert_close(found, F.cross_entropy(torch.zeros(0, 11).double(), target, **options), equal_nan=True)
    found.sum().backward()
    assert features.grad.shape == (0, 6)
    for parameter in head.parameters():
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()


def test_loss_keeps_the_shape_of_sequences(head_case):
    head, features, target = head_case
    losses = head.loss(features.view(3, 3, 6), target.view(3, 3), reduction="none", backend="chunked")
    torch.testing.assert_close(losses, F.cross_entropy(head(features), target, reduction="none").view(3, 3))


def test_gradients_that_nobody_wants_are_not_made(head_case):
    head, features, target = head_case
    head.weight.requires_grad_(False)
    features.requires_grad_()
    head.loss(features, target, backend="chunked").backward()
    assert head.weight.grad is None
    assert features.grad.abs().sum() > 0
    assert head.raw_alpha.grad.abs().sum() > 0


def test_zero_vectors_have_no_gradient(head_case):
    head, features, target = head_case
    features[4] = 0
    features.requires_grad_()
    loss = head.loss(features, target, backend="chunked")
    loss.backward()
    assert loss.isfinite()
    assert features.grad[4].abs().sum() == 0
    assert head.weight.grad.isfinite().all()


def test_autocast_takes_the_low_precision():
    torch.manual_seed(0)
    head = KernelHead(32, 50)
    features, target = torch.randn(40, 32), torch.randint(50, (40,))
    with torch.autocast("cpu", torch.bfloat16):
        found = head.loss(features, target, backend="chunked")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.cross_entropy(head(features), target), rtol=1e-3, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it itself
@pytest.mark.parametrize("mode", ["speed", "memory"])
def test_compiles_around_the_fused_loss(head_case, mode):
    head, features, target = head_case
    torch.compiler.reset()

    def loss(features, target):
        return head.loss(features, target, backend="chunked", mode=mode)

    compiled = torch.compile(loss, backend="aot_eager")
    found, wanted = (
        torch.autograd.grad(function(features, target), list(head.parameters())) for function in (compiled, loss)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_compiles_whole_with_symbolic_sizes(head_case, options):
    head, features, target = head_case
    torch.compiler.reset()
    compiled = torch.compile(lambda x, y: head.loss(x, y, **options), fullgraph=True, dynamic=True, backend="aot_eager")
    for samples in (9, 5):
        x, y = features[:samples], target[:samples]
        torch.testing.assert_close(compiled(x, y), head.loss(x, y, **options))


def test_gradients_of_every_sample(head_case):
    head, features, target = head_case
    target[4] = -100

    def loss(weight, x, y):
        settings = {"prototypes": 2, "temperature": 0.5, "reduction": "sum"}
        return kernel_cross_entropy(x[None], weight, head.alpha.detach(), y[None], **settings)

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(head.weight, features, target)
    losses = F.cross_entropy(head(features), target, reduction="none")
    for ours, one in zip(found, losses, strict=True):
        (theirs,) = torch.autograd.grad(one, head.weight, retain_graph=True)
        torch.testing.assert_close(ours, theirs)
    assert not found[4].any()


@pytest.mark.parametrize("mode", ["speed", "memory"])
def test_backward_twice(head_case, mode):
    head, features, target = head_case
    loss = head.loss(features, target, backend="chunked", mode=mode)
    first = torch.autograd.grad(loss, list(head.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, list(head.parameters()))))


def test_fused_losses_have_one_derivative(head_case):
    head, features, target = head_case
    squared = head.loss(features, target, backend="chunked") ** 2
    (gradient,) = torch.autograd.grad(squared, [head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_auto_takes_the_plain_head_below_the_crossover_and_where_it_must(monkeypatch):
    features, weight = torch.randn(4, 3), torch.randn(8, 3)
    assert cross_entropy.choose(features, weight) == "eager"
    monkeypatch.setitem(cross_entropy.CROSSOVER, "cpu", 32)
    assert cross_entropy.choose(features, weight) == "chunked"
    chosen = []
    torch.func.grad(lambda x: (chosen.append(cross_entropy.choose(x, weight)), x.sum())[1])(features)
    assert chosen == ["eager"]  # of which torch.func can have any derivative


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"features": torch.randn(4, 5)},
            r"features \(N, D\) and weight \(C P, D\); got \(4, 5\) of .* and \(8, 3\) of ",
        ),
        ({"features": torch.ones(4, 3, dtype=torch.long)}, "floating-point"),
        ({"prototypes": 3}, "rows per class; got 8 rows, prototypes=3"),
        ({"alpha": torch.ones(3)}, r"alpha needs the shape \(M \+ 3,\) with M of 1 or more; got \(3,\)"),
        ({"target": torch.zeros(5, dtype=torch.long)}, "4 integer labels"),
        ({"target": torch.zeros(4)}, "4 integer labels"),
        ({"target": torch.tensor([0, 8, 1, 2])}, r"labels need to lie in 0 \.\. 7; got 0 to 8"),
        ({"target": torch.tensor([0, -1, 1, 2])}, r"labels need to lie in 0 \.\. 7; got -1 to 2"),
        ({"temperature": 0.0}, r"temperature needs to be positive and finite; got temperature=0\.0"),
        ({"label_smoothing": 1.0}, r"label_smoothing needs to be at least 0 and below 1; got label_smoothing=1\.0"),
        ({"reduction": "median"}, "unknown reduction 'median'; choose one of mean, sum, none"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; choose one of auto, eager, chunked, triton"),
        ({"backend": "triton"}, "needs float32 or half precision on CUDA"),
        ({"mode": "fast"}, "unknown mode 'fast'; choose one of auto, speed, memory"),
    ],
)
def test_bad_input_is_one_sentence(changed, sentence):
    given = {"features": torch.randn(4, 3), "weight": torch.randn(8, 3), "alpha": torch.ones(5)}
    given |= {"target": torch.arange(4), "backend": "chunked", **changed}
    with pytest.raises((ValueError, TypeError), match=sentence):
        kernel_cross_entropy(**given)
