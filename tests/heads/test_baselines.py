"""The other heads against NumPy in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from kernelhead import create_head
from kernelhead.heads import LinearHead, SoftmaxHead

D, C, N = 6, 4, 5


def make(name, **options):
    head = create_head(name, D, C, **options).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.rand_like(parameter) * 2 - 0.5)
    return head, {key: value.numpy().copy() for key, value in head.state_dict().items()}


def maps_and_tokens():
    maps = torch.randn(N, D, 3, 2, dtype=torch.float64)
    return maps, maps.permute(0, 2, 3, 1).reshape(N, 6, D)


def test_softmax_is_a_linear_layer():
    head, n = make("softmax")
    assert isinstance(head, SoftmaxHead)
    assert isinstance(head, nn.Linear)
    x = torch.randn(2, 3, D, dtype=torch.float64)
    np.testing.assert_allclose(head(x).detach(), x.numpy() @ n["weight"].T + n["bias"], rtol=1e-12, atol=1e-14)


def test_linear_is_a_scaled_cosine():
    head, n = make("linear")
    assert isinstance(head, LinearHead)
    x = torch.randn(N, D, dtype=torch.float64)
    with torch.no_grad():
        head.raw_alpha.fill_(2.5)
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(n["weight"], axis=1)
    np.testing.assert_allclose(head(x).detach(), 2.5 * (x.numpy() @ n["weight"].T) / norms, rtol=1e-12)
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == {"raw_alpha": (1,), "weight": (C, D)}


def test_second_order():
    head, n = make("second_order")
    maps, tokens = maps_and_tokens()
    expected = []
    for sample in tokens.numpy():
        moment = sum(np.outer(place, place) for place in sample) / len(sample)
        moment /= np.trace(moment) / D
        rooted = moment / np.sqrt(np.abs(moment) + 1e-5)
        embedding = np.sqrt(D) * rooted / np.linalg.norm(rooted)
        expected.append(n["classifier.weight"] @ embedding.ravel() + n["classifier.bias"])
    np.testing.assert_allclose(head(maps).detach(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(head(tokens).detach(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(head(1e-3 * tokens).detach(), expected, rtol=0, atol=1e-12)


def test_second_order_of_vectors_is_that_of_maps_of_one_place():
    head, _ = make("second_order")
    of_vectors, _ = make("second_order", places=False)
    of_vectors.load_state_dict(head.state_dict())
    x = torch.randn(2, N, D, dtype=torch.float64)
    expected = head(x.reshape(2 * N, D, 1, 1)).view(2, N, C)
    assert not of_vectors.pools
    torch.testing.assert_close(of_vectors(x), expected, rtol=0, atol=1e-12)


def test_second_order_has_no_steep_gradients_where_a_moment_vanishes():
    """Two features that never meet have the moment 0, where the signed root itself is infinitely steep."""
    head, _ = make("second_order")
    x = torch.zeros(2, D, dtype=torch.float64)
    x[0, 0] = x[1, 1] = 1
    tokens = x[None].requires_grad_()
    slope = torch.autograd.grad(head(tokens)[0, 0], tokens)[0]
    with torch.no_grad():
        shift = 1e-9 * slope / slope.norm()
        difference = (head(tokens + shift) - head(tokens - shift))[0, 0] / 2e-9
    assert slope.norm() == pytest.approx(difference.item(), rel=1e-3)
    assert slope.norm() < (D / 1e-5) ** 0.5 * head.classifier.weight[0].norm()


def test_second_order_survives_half_precision_features_whose_squares_overflow():
    head, n = make("second_order")
    x = torch.full((1, D, 2, 2), 3e4, dtype=torch.float16)
    expected = n["classifier.weight"].sum(1) / np.sqrt(D) + n["classifier.bias"]  # all entries are the same
    np.testing.assert_allclose(head(x)[0].detach(), expected, rtol=1e-6)


def test_second_order_has_the_papers_number_of_parameters():
    assert sum(p.numel() for p in create_head("second_order", 64, 100).parameters()) == 409_700


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("standardized", [False, True])
def test_expansion(training, normalized, standardized):
    head, n = make("expansion", width=7, normalized=normalized, standardized=standardized)
    maps, tokens = maps_and_tokens()
    lengths = np.linalg.norm(tokens, axis=2, keepdims=True) if normalized else 1.0
    expanded = tokens.numpy() / lengths @ n["expand.weight"][:, :, 0, 0].T
    mean, variance = expanded.mean((0, 1)), expanded.var((0, 1))

    def pool(mean, variance):
        normal = (expanded - mean) / np.sqrt(variance + 1e-5) * n["norm.weight"] + n["norm.bias"]
        return np.maximum(normal, 0).mean(1)

    pooled = pool(mean, variance)
    middle, spread = (pooled.mean(0), pooled.var(0)) if standardized else (0.0, 1 - 1e-5)
    if not training:
        head(maps)
        head.eval()
        if standardized:
            middle, spread = 0.1 * middle, 0.9 + 0.1 * pooled.var(0, ddof=1)
        pooled = pool(0.1 * mean, 0.9 + 0.1 * expanded.reshape(-1, 7).var(0, ddof=1))
    expected = (pooled - middle) / np.sqrt(spread + 1e-5) @ n["classifier.weight"].T + n["classifier.bias"]
    np.testing.assert_allclose(head(maps).detach(), expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(head(tokens).detach(), expected, rtol=1e-9, atol=1e-11)


def test_expansion_of_vectors_is_that_of_one_place():
    head, _ = make("expansion", width=7, normalized=True, standardized=True)
    twin, _ = make("expansion", width=7, normalized=True, standardized=True, places=False)
    twin.load_state_dict(head.state_dict())
    assert (head.pools, twin.pools) == (True, False)
    x = torch.randn(N, D, dtype=torch.float64)
    torch.testing.assert_close(twin(x), head(x[:, :, None, None]))


@pytest.mark.parametrize("normalized", [False, True])
def test_expansion_of_windows(normalized):
    """A convolution, and on windows of unit length a layer of them."""
    head, n = make("expansion", width=7, window=2, normalized=normalized)
    maps, _ = maps_and_tokens()
    kernel = torch.from_numpy(n["expand.weight"]).view(7, 2, 2, D).permute(0, 3, 1, 2)
    expanded = nn.functional.conv2d(maps, kernel)
    if normalized:
        squares = nn.functional.conv2d(maps.square().sum(1, keepdim=True), torch.ones(1, 1, 2, 2, dtype=torch.float64))
        expanded = expanded / squares.sqrt()
    affine = (torch.from_numpy(n[f"norm.{name}"]) for name in ("weight", "bias"))
    normal = nn.functional.batch_norm(expanded, None, None, *affine, training=True)
    expected = normal.relu().mean((2, 3)).numpy() @ n["classifier.weight"].T + n["classifier.bias"]
    np.testing.assert_allclose(head(maps).detach(), expected, rtol=1e-9, atol=1e-11)


def test_expansion_is_512_wide_unless_told():
    sizes = {name: tuple(p.shape) for name, p in create_head("expansion", D, C).named_parameters()}
    assert sizes["expand.weight"] == (512, D, 1, 1)
    assert sizes["classifier.weight"] == (C, 512)
