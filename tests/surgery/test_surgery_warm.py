"""kernelize(warm_start=True): a head that starts from the trained linear layer."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernelhead import KernelHead, PrototypeHead, create_head, kernelize
from kernelhead.surgery import changes
from kernelhead.surgery._warm import common_shift, start_from

FEATURES = 24


def draw(classes, samples, seed):
    """Clusters of unequal frequency, so that a bias has something to say."""
    centers = torch.randn(classes, 12, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.softmax(torch.linspace(0, 2, classes), 0)
    y = torch.multinomial(frequency, samples, replacement=True, generator=generator)
    return centers[y] + 1.1 * torch.randn(samples, 12, generator=generator), y


def train(classes, bias=True):
    torch.manual_seed(0)
    x, y = draw(classes, 4000, 1)
    layers = [nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, FEATURES), nn.ReLU(), nn.Dropout(0.1)]
    network = nn.Sequential(*layers, nn.Linear(FEATURES, classes, bias=bias))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for step in range(250):
        rows = torch.arange(step * 200, (step + 1) * 200) % 4000
        optimizer.zero_grad()
        F.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()
    return network.eval()


def warm(network, inputs=None, **options):
    return kernelize(copy.deepcopy(network), **{"head": "kernel", **options}, warm_start=True, inputs=inputs)


@pytest.fixture(scope="module", params=[8, 60], ids=["few classes", "more classes than features"])
def trained(request):
    return train(request.param)


def accuracy(network, classes):
    x, y = draw(classes, 4000, 2)
    with torch.no_grad():
        logits = network(x)
    return 100 * (logits.argmax(1) == y).double().mean().item(), F.cross_entropy(logits, y).item()


OPTIONS = {
    "relu": {},
    "sigmoid": {"coefficients": "sigmoid"},
    "softmax": {"coefficients": "softmax"},
    "softplus": {"coefficients": "softplus"},
    "none": {"coefficients": "none"},
    "temperature": {"temperature": 0.05},
    "degree-1": {"degree": 1},
    "logsumexp": {"head": "prototypes", "aggregate": "logsumexp"},
    "sum": {"head": "prototypes", "prototypes": 3},
    "rbf": {"kernel": "rbf"},
    "polynomial": {"kernel": "polynomial", "degree": 10},
    "bias": {"bias": True},
    "cosine": {"head": "cosine"},
    "linear": {"head": "linear"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_accuracy_stays_within_two_points(trained, case):
    classes = trained[-1].out_features
    before, _ = accuracy(trained, classes)
    assert before > 50  # the network has learned something
    x, _ = draw(classes, 500, 3)
    network = warm(trained, x, **OPTIONS[case])
    after, _ = accuracy(network, classes)
    assert abs(after - before) < 2


@pytest.fixture(scope="module")
def few():
    return train(8)


def test_accuracy_without_inputs(few):
    before, _ = accuracy(few, 8)
    network = warm(few)
    after, _ = accuracy(network, 8)
    assert abs(after - before) < 2
    assert changes(network).notes == (
        "starts from the trained layer",
        "its bias is left out: give a batch of inputs to keep it",
        "its confidence is a guess: give a batch of inputs to keep it",
        "the trained weights expect that ReLU",
    )
    assert changes(network).relus_kept == ("3",)


def test_inputs_keep_the_confidence(few):
    _, before = accuracy(few, 8)
    _, guessed = accuracy(warm(few), 8)
    _, kept = accuracy(warm(few, draw(8, 500, 3)[0]), 8)
    assert abs(kept - before) < 0.1
    assert abs(kept - before) < abs(guessed - before)


def test_without_a_bias_the_ranking_is_the_same():
    trained = train(8, bias=False)
    network = warm(trained)
    x, _ = draw(8, 4000, 4)
    with torch.no_grad():
        assert (network(x).argsort(1) == trained(x).argsort(1)).all(1).double().mean() > 0.999


def test_the_common_shift_is_the_shortest_that_makes_lengths_equal():
    weight = np.random.default_rng(0).normal(size=(6, 20)) * np.linspace(1, 2, 6)[:, None]
    shift = common_shift(torch.from_numpy(weight)).numpy()
    lengths = np.linalg.norm(weight + shift, axis=1)
    assert np.ptp(lengths) / lengths.mean() < 1e-3
    centred = weight - weight.mean(0)
    squares = (weight**2).sum(1)
    shortest = np.linalg.pinv(centred) @ ((squares.mean() - squares) / 2)
    np.testing.assert_allclose(shift, shortest, rtol=5e-3, atol=1e-4)
    assert not common_shift(torch.ones(3, 4, dtype=torch.float64)).any()


@pytest.mark.parametrize("coefficients", ["relu", "sigmoid", "softmax", "softplus", "none"])
def test_the_kernel_begins_nearly_linear_with_every_coefficient_alive(coefficients):
    torch.manual_seed(0)
    head = KernelHead(10, 4, coefficients=coefficients, temperature=1.0 if coefficients != "softmax" else 0.005)
    features = torch.randn(200, 10).abs()
    start_from(head, torch.randn(4, 10) / 10, None, features)
    alpha = head.alpha.detach()
    higher = torch.cat([alpha[:2], alpha[4:]])
    assert (higher > 0).all()
    assert (higher < 0.02 * alpha[3]).all()
    logits = head(features)
    F.cross_entropy(logits, torch.randint(4, (200,))).backward()
    assert head.raw_alpha.grad[3:].all()  # those of t, t^2, ..


def test_prototypes_begin_apart():
    torch.manual_seed(0)
    head = PrototypeHead(10, 4, prototypes=3)
    weight = torch.randn(4, 10)
    start_from(head, weight, None, None)
    groups = head.weight.detach().view(4, 3, 10)
    apart = (groups[:, 0] - groups[:, 1]).norm(dim=1) / groups[:, 0].norm(dim=1)
    assert (apart > 1e-3).all()
    assert (apart < 0.1).all()


def test_bounded_coefficients_say_that_confidence_is_lowered():
    head = KernelHead(10, 4, coefficients="sigmoid")
    notes = start_from(head, 50 * torch.randn(4, 10), None, torch.randn(100, 10))
    assert "its confidence is lowered: sigmoid coefficients are bounded" in notes
    assert head.alpha.max() <= 1


@pytest.fixture(scope="module")
def trained_logit():
    """A network with one logit, for one of eight classes."""
    torch.manual_seed(0)
    x, y = draw(8, 4000, 1)
    layers = [nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, FEATURES), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(FEATURES, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for step in range(250):
        rows = torch.arange(step * 200, (step + 1) * 200) % 4000
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(network(x[rows])[:, 0], (y[rows] == 6).float()).backward()
        optimizer.step()
    return network.eval()


ONE = ("relu", "sigmoid", "softplus", "none", "temperature", "degree-1", "sum", "bias", "cosine", "linear")


@pytest.mark.parametrize("case", ONE)
def test_one_logit_stays_nearly_what_it_was(trained_logit, case):
    x, y = draw(8, 4000, 2)
    network = warm(trained_logit, x[:500], **OPTIONS[case])
    with torch.no_grad():
        before, after = (each(x)[:, 0].double().numpy() for each in (trained_logit, network))
    assert 0.1 < (before > 0).mean() < 0.5
    assert np.corrcoef(before, after)[0, 1] > 0.85  # what is left is due to the lengths of the features
    assert ((before > 0) == (after > 0)).mean() > 0.99
    if case != "sigmoid":  # whose coefficients are bounded
        assert 0.5 < after.std() / before.std() < 2
    target = (y == 6).float()
    F.binary_cross_entropy_with_logits(network(x)[:, 0], target).backward()
    assert all(parameter.grad.abs().max() > 1e-6 for parameter in network.parameters())


@pytest.mark.parametrize("case", sorted(OPTIONS.keys() - set(ONE)))
def test_heads_that_would_move_one_logit_are_refused(trained_logit, case):
    network = copy.deepcopy(trained_logit)
    with pytest.raises(ValueError, match="warm_start of one class cannot keep the sign of its logit with"):
        kernelize(network, **{"head": "kernel", **OPTIONS[case]}, warm_start=True, inputs=draw(8, 100, 3)[0])
    assert isinstance(network[-1], nn.Linear)


def test_a_small_logit_of_long_features_keeps_its_sign():
    torch.manual_seed(0)
    features = 20 * torch.randn(300, 100).abs()
    weight = torch.randn(1, 100)
    weight -= (weight @ features.mean(0)) / features.mean(0).square().sum() * features.mean(0)
    bias = -(features @ weight.t()).quantile(0.5)[None] - 5
    head = KernelHead(100, 1)
    start_from(head, weight, bias, features)
    before, after = (features @ weight.t() + bias)[:, 0], head(features)[:, 0]
    assert ((before > 0) == (after > 0)).double().mean() > 0.98


def test_the_bias_of_one_logit_is_left_out_without_inputs():
    notes = start_from(KernelHead(10, 1), torch.randn(1, 10), torch.ones(1), None)
    assert "its bias is left out: give a batch of inputs to keep it" in notes


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("samples", [0, 60])
def test_tensors_are_made_beside_the_weights_whatever_the_default_device(case, samples):
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        options = dict(OPTIONS[case])
        head = create_head(options.pop("head", "kernel"), 10, 4, **options)
        weight, bias = torch.randn(4, 10), torch.randn(4)
        features = torch.randn(samples, 10).abs() if samples else None
        with torch.device(device):
            start_from(head, weight, bias, features)
        found.append(head.state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)


def test_a_convolution_that_classifies():
    torch.manual_seed(0)
    classifier = nn.Conv2d(8, 4, 1, bias=False)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), classifier, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(16, 3, 8, 8)
    twin = kernelize(copy.deepcopy(network), head="kernel", kernel="cosine", warm_start=True, inputs=x)
    positions, own = network[:3](x), twin[:3](x)
    assert (positions.argmax(1) == own.argmax(1)).double().mean() > 0.99
    assert changes(twin).relus_kept == ("1",)
