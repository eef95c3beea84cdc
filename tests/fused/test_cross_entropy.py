"""The loss by every backend against plain float64. Triton's kernels on the GPU where there is one, else interpreted.

The interpreter has to be chosen before triton is imported, and other tests import it: this file runs itself as a
program, which prints what it found.
"""

import itertools
import json
import sys

import pytest
import torch
from torch.nn import functional as F

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
SHAPES = [(1, 7, 3), (37, 19, 401), (131, 24, 257)]  # N, D, C: one sample, primes, classes below a tile and above two
TOTALS = [0.0, 1.0, 50.0, 500.0]  # of the coefficients: the range of logits
PARTS = ("loss", "features", "weight", "alpha")


def make_case(shape, degree, prototypes, total, dtype, device="cpu", one_large=False):
    samples, width, classes = shape
    torch.manual_seed(samples + degree)
    features = torch.randn(samples, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(classes * prototypes, width, device=device).to(dtype).requires_grad_()
    alpha = torch.rand(degree + 3, device=device)
    if one_large:
        alpha[3:] *= 1e-3
        alpha[2 + degree] = 1
    alpha[:2] = 0
    alpha = (alpha / alpha.sum() * total).requires_grad_()
    # No sample has its own class on top: of one that is sure of it no gradient is left but rounding.
    target = torch.randint(classes, (samples,), device=device)
    top = exact_scores(features, weight, alpha, prototypes)[0].argmax(1)
    return features, weight, alpha, torch.where(target == top, (target + 1) % classes, target)


def exact_scores(features, weight, alpha, prototypes):
    """Scores of the classes, kernel values and cosines, in float64."""
    t = F.normalize(features.double()) @ F.normalize(weight.double()).t()
    alpha = alpha.double()
    k = sum(a * t**m for m, a in enumerate(alpha[2:]))
    is_end = (t.abs() > 1 - 1e-5).double()
    k = k + alpha[0] * is_end + alpha[1] * is_end * t.sign()
    return torch.logsumexp(k.view(len(features), -1, prototypes), 2), k, t


def exact(features, weight, alpha, target, prototypes=1, smoothing=0.0):
    """Loss of each sample and gradients of their mean, in float64."""
    features, weight, alpha = (x.detach().double().requires_grad_() for x in (features, weight, alpha))
    scores, k, t = exact_scores(features, weight, alpha, prototypes)
    losses = F.cross_entropy(scores, target, label_smoothing=smoothing, reduction="none")
    *gradients, of_k = torch.autograd.grad(losses.mean(), (features, weight, alpha, k))
    exactly = dict(zip(PARTS, (losses.detach(), *gradients), strict=True))
    # dL/dalpha is a sum of terms of both signs, which may cancel: its error is measured by the sum of their sizes.
    exactly["alpha"].size_ = torch.stack([(of_k * t**m).abs().sum() for m in range(len(alpha) - 2)]).norm()
    return exactly


def errors(found, wanted):
    """Relative errors; where nothing is to be found, absolute ones."""
    sizes = {part: getattr(x, "size_", None) or x.norm() or 1.0 for part, x in wanted.items()}
    return {part: ((found[part].double() - x).norm() / sizes[part]).item() for part, x in wanted.items()}


def compute(backend, mode, case, prototypes=1, smoothing=0.0, scale=1.0):
    from kernelhead import kernel_cross_entropy

    options = {"prototypes": prototypes, "label_smoothing": smoothing, "backend": backend, "mode": mode}
    losses = kernel_cross_entropy(*case, **options, reduction="none")
    return parts(losses.detach(), scaled_gradients(losses, case[:3], scale))


def scaled_gradients(losses, inputs, scale, **options):
    """Of the mean, computed of `scale` times the mean, as a loss scaler does lest float16 underflows."""
    found = torch.autograd.grad(losses.mean() * scale, inputs, **options)
    return [gradient.double() / scale for gradient in found]


def scale_for(wanted):
    largest = max(wanted[part].abs().max().item() for part in ("features", "weight"))
    return 1 / largest if largest > 0 else 1.0


def tolerance(dtype, total):
    """In float32 a logit of 500 is rounded by up to 1.5e-5, and so is its cosine times its slope, in several steps.

    How many come together depends on how a processor sums: one that was seen to need 3.1e-5 set the bound.
    """
    return max(TOLERANCE[dtype], total * 2.0**-23)


@pytest.mark.parametrize(("backend", "mode"), [("eager", "speed"), ("chunked", "speed"), ("chunked", "memory")])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])  # of the combinations, or all of them
def test_plain_torch(backend, mode, dtype, shape, step):
    more = ((0.0, False), (0.1, False), (0.0, True))
    combinations = list(itertools.product((1, 7, 20), (1, 4), TOTALS, more))
    for degree, prototypes, total, (smoothing, one_large) in combinations[::step]:
        case = make_case(shape, degree, prototypes, total, getattr(torch, dtype), one_large=one_large)
        wanted = exact(*case, prototypes, smoothing)
        most = tolerance(dtype, total)
        if backend == "eager" and dtype == "bfloat16":
            most = 0.3  # the plain head rounds its cosines to bfloat16, and k' multiplies that
        found = errors(compute(backend, mode, case, prototypes, smoothing, scale_for(wanted)), wanted)
        assert max(found.values()) < most, (degree, prototypes, total, smoothing, one_large, found)


@pytest.mark.parametrize("mode", ["speed", "memory"])
@pytest.mark.parametrize(("prototypes", "smoothing"), [(1, 0.0), (3, 0.0), (3, 0.2)])
def test_gradcheck(mode, prototypes, smoothing):
    from kernelhead import kernel_cross_entropy

    features, weight, alpha, target = make_case((5, 4, 3), 4, prototypes, 3.0, torch.float64)
    alpha = alpha.detach().double().requires_grad_()

    def loss(features, weight, alpha):
        options = {"prototypes": prototypes, "label_smoothing": smoothing, "reduction": "none"}
        return kernel_cross_entropy(features, weight, alpha, target, **options, backend="chunked", mode=mode)

    assert torch.autograd.gradcheck(loss, (features, weight, alpha))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_triton(found, dtype):
    check_all(found[dtype], dtype, at_least=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_triton_on_more_sizes(found_in_full, dtype):
    check_all(found_in_full[dtype], dtype, at_least=11)


def check_all(cases, dtype, at_least):
    assert len(cases) >= at_least
    for name, worst in cases.items():
        assert max(worst[part] for part in PARTS) < tolerance(dtype, worst["total"]), (name, worst)


def test_triton_end_points(found):
    assert max(found["end points"].values()) < 1e-5
    assert found["end points matter"] > 0.1


def test_triton_repeats_itself(found):
    assert found["same bits"]
    assert found["a second backward pass"] == 0


def test_triton_ignores_what_it_is_told_to(found):
    assert found["ignored loss"] == 0
    assert found["ignored gradient"] == 0
    assert max(found["others"].values()) < 1e-5


def test_triton_leaves_out_unwanted_gradients(found):
    assert found["without weight"] == [True, False, True]
    assert max(found["without weight, errors"].values()) < 1e-5


def triton_nll(case, settings):
    from kernelhead.fused.cross_entropy import autograd, blocks

    return autograd.KernelNLL.apply(*case, blocks.Settings(**settings, total=settings["classes"]))


def run_triton(case, *, scale=1.0, twice=False, **options):
    """Losses, gradients, and the same by a second backward pass if `twice`."""
    settings = {"prototypes": 1, "ignored": -100, "smoothing": 0.0, "dtype": case[0].dtype, "width": 128, "keep": True}
    settings |= {"fused": True, **options}
    settings["classes"] = len(case[1]) // settings["prototypes"]
    losses = triton_nll(case, settings)
    wanted = [x for x in case[:3] if x.requires_grad]
    gradients = scaled_gradients(losses, wanted, scale, retain_graph=twice)
    return losses.detach(), gradients, scaled_gradients(losses, wanted, scale) if twice else None


def parts(losses, gradients):
    return dict(zip(PARTS, (losses, *gradients), strict=True))


def main():
    from interpreter import choose_device

    from kernelhead.fused.cross_entropy import blocks

    device = choose_device()
    if device == "cpu":
        precision = blocks.precision
        blocks.precision = lambda dtype, _: precision(dtype, "cuda")

    report = {}
    for dtype in TOLERANCE:
        report[dtype] = {}
        combinations = itertools.product(SHAPES, (1, 7, 20), (1, 3, 4), (0.0, 0.1), TOTALS, (True, False))
        for shape, degree, prototypes, smoothing, total, keep in list(combinations)[
            :: 1 if device == "cuda" else 41 if "full" in sys.argv else 145
        ]:
            case = make_case(shape, degree, prototypes, total, getattr(torch, dtype), device)
            width = 32 if prototypes > 1 else 128
            wanted = exact(*case, prototypes, smoothing)
            options = {"prototypes": prototypes, "smoothing": smoothing, "keep": keep, "width": width}
            losses, gradients, _ = run_triton(case, **options, scale=scale_for(wanted))
            name = str((shape, degree, prototypes, smoothing, total, keep))
            report[dtype][name] = errors(parts(losses, gradients), wanted) | {"total": total}

    features, weight, alpha, target = make_case((40, 6, 150), 3, 1, 2.0, torch.float32, device)
    with torch.no_grad():
        features[:20] = weight[target[:20]]  # which puts them on top
        features[20:30] = -weight[target[20:30]]
        alpha[:2] = torch.tensor([0.3, 0.4])
    case = features, weight, alpha, target
    losses, gradients, again = run_triton(case, twice=True)
    wanted = exact(*case)
    report["end points"] = errors(parts(losses, gradients), wanted)
    report["end points matter"] = wanted["alpha"][:2].abs().min().item()
    report["a second backward pass"] = max((x - y).abs().max().item() for x, y in zip(gradients, again, strict=True))
    other, other_gradients, _ = run_triton(case)
    report["same bits"] = torch.equal(losses, other) and all(map(torch.equal, gradients, other_gradients))

    some = torch.arange(40, device=device) % 3 == 0
    losses, gradients, _ = run_triton((features, weight, alpha, torch.where(some, -100, target)))
    report["ignored loss"] = losses[some].abs().max().item()
    report["ignored gradient"] = gradients[0][some].abs().max().item()
    wanted = exact(*case[:3], torch.where(some, -100, target))
    report["others"] = errors(parts(losses, gradients), wanted)

    fixed = features, weight.detach(), alpha, target
    losses, gradients, _ = run_triton(fixed)
    wanted = exact(*case)
    report["without weight"] = [x.requires_grad for x in fixed[:3]]
    wanted.pop("weight")
    report["without weight, errors"] = errors(dict(zip(wanted, (losses, *gradients), strict=True)), wanted)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
