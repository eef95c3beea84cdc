"""Cross-entropy of few logits in a Triton kernel, against NumPy's float64. On the GPU where there is one, else
interpreted: as in `test_conv3x3`, this file runs itself as a program, which prints what it found.
"""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

DTYPES = ["bfloat16", "float16", "float32"]
SHAPES = [(128, 100), (1, 1), (5, 10), (3, 1000), (131, 3)]  # around the rows of a program
# Of the gradient, absolute, times the number of samples: rounded once, and in the interpreter bfloat16 is cut.
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-6}


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_gradient_and_hits(found, dtype):
    assert len(found[dtype]) == len(SHAPES)
    for name, case in found[dtype].items():
        assert case["loss"] < 1e-5, name
        assert case["gradient"] < ROUNDING[dtype], name
        assert case["hits"], name
        assert case["dtypes"] == [True, True], name


def test_large_logits(found):
    assert found["large"] < 1e-6


def test_of_equals_the_first_is_on_top(found):
    assert found["ties"] == [True, False, False]


def test_ignored_samples(found):
    assert found["ignored"]["loss"] < 1e-6
    assert found["ignored"]["gradient"] < 1e-6
    assert found["all ignored"]


def test_labels_that_are_no_class_and_logits_that_are_no_number(found):
    assert found["not a number"] == {"label": True, "negative label": True, "logit": True, "infinite": True}


def test_strides(found):
    assert found["strides"] == [True, True]


def test_the_gradient_of_the_loss_is_taken_into_account(found):
    assert found["scaled"] < 1e-6
    assert found["scaled half"]


def test_what_is_supported(found):
    refused = dict.fromkeys(["many", "float64", "soft labels", "int32 labels", "no samples", "vector"], False)
    assert found["supported"] == {"usual": True} | refused


def test_which_way_a_head_takes(found):
    assert found["calls"] == {"softmax": 1, "kernel": 1, "many classes": 0, "func": 0}


def test_gradients_can_be_differentiated_again(found):
    assert max(found["second derivatives"].values()) < 1e-6
    assert len(found["second derivatives"]) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_on_two_streams(found):
    assert found["captured"]


# --- the program ------------------------------------------------------------------------------------------------------


def exact(logits, target):
    """Loss and gradient in float64, and hits."""
    x, y = logits.detach().cpu().double().numpy(), target.cpu().numpy()
    counts = y != -100
    rows, x, y = np.flatnonzero(counts), x[counts], y[counts]
    powers = np.exp(x - x.max(1, keepdims=True))
    p = powers / powers.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    gradient = np.zeros(logits.shape)
    p[np.arange(len(y)), y] -= 1
    gradient[rows] = p / len(y)
    return loss, gradient


def compare(logits, target):
    from kernelhead.ops.few_logits import loss_and_hits

    loss, hits = loss_and_hits(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected, expected_gradient = exact(logits, target)
    off = np.abs(gradient.double().cpu().numpy() - expected_gradient).max() * len(target)
    return {
        "loss": abs(loss.item() - expected) / max(1.0, expected),
        "gradient": float(off),
        "hits": torch.equal(hits, logits.argmax(1) == target),
        "dtypes": [loss.dtype == torch.float32 and hits.dtype == torch.bool, gradient.dtype == logits.dtype],
    }


def main():
    from interpreter import captured, choose_device

    from kernelhead.ops import few_logits as ops

    device = choose_device()
    torch.manual_seed(0)

    def make(samples, classes, dtype=torch.float32, scale=3.0):
        logits = (scale * torch.randn(samples, classes, device=device)).to(dtype).requires_grad_()
        return logits, torch.randint(classes, (samples,), device=device)

    report = {name: {str(s): compare(*make(*s, getattr(torch, name))) for s in SHAPES} for name in DTYPES}
    logits, target = make(6, 9)
    report["large"] = compare((1e4 + 30 * logits.detach()).requires_grad_(), target)["loss"]
    tied = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]], device=device)
    report["ties"] = ops.loss_and_hits(tied, torch.tensor([0, 1, 0], device=device))[1].tolist()

    some = target.clone()
    some[[1, 4]] = -100
    report["ignored"] = compare(logits, some)
    report["all ignored"] = ops.loss_and_hits(logits, torch.full_like(target, -100))[0].isnan().item()

    def is_nan(logits, target):
        return ops.loss_and_hits(logits, target)[0].isnan().item()

    def altered(tensor, value):
        tensor = tensor.detach().clone()
        tensor.view(-1)[3] = value
        return tensor

    report["not a number"] = {
        "label": is_nan(logits, altered(target, 9)),
        "negative label": is_nan(logits, altered(target, -1)),
        "logit": is_nan(altered(logits, torch.nan), target),
        "infinite": is_nan(altered(logits, torch.inf), target),
    }
    wide = torch.cat([logits, logits], 1).detach()
    whole = ops.loss_and_hits(logits, target)
    report["strides"] = [
        all(map(torch.equal, ops.loss_and_hits(view, target), whole))
        for view in (wide[:, :9], logits.detach().t().contiguous().t())
    ]
    loss, _ = ops.loss_and_hits(logits, target)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    report["scaled"] = float(np.abs(gradient.cpu().numpy() - 3 * exact(logits, target)[1]).max())
    half, (many, labels) = torch.float16, make(128, 100)
    many = many.detach().to(half).requires_grad_()
    (gradient,) = torch.autograd.grad(2**16 * ops.loss_and_hits(many, labels)[0], many)  # as a GradScaler does
    expected = 2**16 * exact(many, labels)[1]
    off = np.abs(gradient.double().cpu().numpy() - expected)
    report["scaled half"] = bool((off <= 2**-10 * np.abs(expected) + 2**-24).all())  # of small ones the last bit

    report["supported"] = {
        "usual": ops.supported(logits, target),
        "many": ops.supported(logits.new_empty(128, 1025), target.new_empty(128)),
        "float64": ops.supported(logits.double(), target),
        "soft labels": ops.supported(logits, logits.softmax(1)),
        "int32 labels": ops.supported(logits, target.int()),
        "no samples": ops.supported(logits[:0], target[:0]),
        "vector": ops.supported(logits[0], target[0]),
    }
    report["calls"] = which_way(ops, device)
    transposed = logits.detach().t().contiguous().requires_grad_()
    report["second derivatives"] = {
        "usual": second_derivatives(ops.loss_and_hits, logits, logits, target),
        "transposed": second_derivatives(ops.loss_and_hits, transposed, transposed.t(), target),
    }
    if device == "cuda":

        def compute(own):
            loss, hits = ops.loss_and_hits(own, target)
            return loss, hits, *torch.autograd.grad(loss, own)

        report["captured"] = captured(compute, logits)
    print(json.dumps(report))


def second_derivatives(loss_and_hits, leaf, logits, target):
    """How far those along a direction are from p (d - <p, d>) / N, the largest times N. Logits are made of a leaf."""
    along = torch.randn_like(leaf)
    (first,) = torch.autograd.grad(loss_and_hits(logits, target)[0], leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * along).sum(), leaf)
    p, d, second = logits.detach().double().softmax(1), along.double(), second.double()
    if leaf is not logits:
        d, second = d.t(), second.t()
    return (second - p * (d - (p * d).sum(1, keepdim=True)) / len(target)).abs().max().item() * len(target)


def which_way(ops, device):
    from kernelhead import create_head
    from kernelhead.heads import _loss, loss_and_hits

    _loss.runs_kernels = lambda device: True
    calls, kernel = [], ops.loss_and_hits

    def watched(*arguments):
        calls.append(arguments)
        return kernel(*arguments)

    def count(name, classes, function=loss_and_hits):
        torch.manual_seed(1)
        head = create_head(name, 4, classes).to(device)
        features, target = torch.randn(8, 4, device=device), torch.randint(classes, (8,), device=device)
        before = len(calls)
        loss, hits = function(head, features, target)
        logits = head(features)
        torch.testing.assert_close(loss, F.cross_entropy(logits, target))
        assert torch.equal(hits, logits.argmax(1) == target)
        return len(calls) - before

    def mapped(head, features, target):
        losses, hits = torch.func.vmap(lambda x, y: loss_and_hits(head, x[None], y[None]))(features, target)
        return losses.mean(), hits[:, 0]

    ops.loss_and_hits = watched
    found = {
        "softmax": count("softmax", 5),
        "kernel": count("kernel", 5),
        "many classes": count("softmax", 5000),
        "func": count("softmax", 5, mapped),
    }
    ops.loss_and_hits = kernel
    return found


if __name__ == "__main__":
    main()
