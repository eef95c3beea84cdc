"""kernelize(warm_start=True): a head that starts from the trained linear layer."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernelhead import KernelHead, create_head, kernelize
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


def warm(network, **options):
    return kernelize(copy.deepcopy(network), **{"head": "kernel", **options}, warm_start=True)


@pytest.fixture(scope="module")
def few():
    return train(8)


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
    "rbf": {"kernel": "rbf"},
    "polynomial": {"kernel": "polynomial", "degree": 10},
    "bias": {"bias": True},
    "cosine": {"head": "cosine"},
    "linear": {"head": "linear"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_accuracy_stays_within_two_points(few, case):
    before, _ = accuracy(few, 8)
    assert before > 50  # the network has learned something
    after, _ = accuracy(warm(few, **OPTIONS[case]), 8)
    assert abs(after - before) < 2


def test_the_record_says_what_is_kept(few):
    network = warm(few)
    assert changes(network).notes == (
        "starts from the trained layer, whose ranking it keeps, not its confidence",
        "its bias is left out",
        "the trained weights expect that ReLU",
    )
    assert changes(network).relus_kept == ("3",)


def test_more_classes_than_features():
    """Lengths cannot be made equal, and the record says so."""
    trained = train(60)
    network = warm(trained)
    before, after = (accuracy(each, 60)[0] for each in (trained, network))
    assert after > 0.8 * before
    assert any("lengths of its class weights differ by" in note for note in changes(network).notes)


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


def test_one_logit_is_not_ranked():
    with pytest.raises(ValueError, match="warm_start of head='kernel' needs two classes or more"):
        start_from(KernelHead(10, 1), torch.randn(1, 10), None)
    head = create_head("linear", 10, 1)
    weight, bias = torch.randn(1, 10), torch.randn(1)
    start_from(head, weight, bias)
    x = torch.randn(5, 10)
    assert torch.equal(head(x), F.linear(x, weight, bias))


@pytest.mark.parametrize("case", OPTIONS)
def test_tensors_are_made_beside_the_weights_whatever_the_default_device(case):
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        options = dict(OPTIONS[case])
        head = create_head(options.pop("head", "kernel"), 10, 4, **options)
        weight, bias = torch.randn(4, 10), torch.randn(4)
        with torch.device(device):
            start_from(head, weight, bias)
        found.append(head.state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)


def test_a_convolution_that_classifies():
    torch.manual_seed(0)
    classifier = nn.Conv2d(8, 4, 1, bias=False)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), classifier, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(16, 3, 8, 8)
    twin = kernelize(copy.deepcopy(network), head="kernel", kernel="cosine", warm_start=True)
    positions, own = network[:3](x), twin[:3](x)
    assert (positions.argmax(1) == own.argmax(1)).double().mean() > 0.99
    assert changes(twin).relus_kept == ("1",)
