"""The other heads against NumPy in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from kernelhead import LinearHead, create_head

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


def test_linear_is_a_linear_layer_of_our_own():
    head, n = make("linear")
    assert isinstance(head, nn.Linear)
    assert type(head) is LinearHead
    x = torch.randn(2, 3, D, dtype=torch.float64)
    np.testing.assert_allclose(head(x).detach(), x.numpy() @ n["weight"].T + n["bias"], rtol=1e-12, atol=1e-14)


def test_second_order():
    head, n = make("second_order")
    maps, tokens = maps_and_tokens()
    expected = []
    for sample in tokens.numpy():
        moment = sum(np.outer(position, position) for position in sample) / len(sample)
        moment /= np.trace(moment) / D
        rooted = moment / np.sqrt(np.abs(moment) + 1e-5)
        embedding = np.sqrt(D) * rooted / np.linalg.norm(rooted)
        expected.append(n["classifier.weight"] @ embedding.ravel() + n["classifier.bias"])
    np.testing.assert_allclose(head(maps).detach(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(head(tokens).detach(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(head(1e-3 * tokens).detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), [("second_order", {}), ("expansion", {"width": 7}), ("attentive", {})])
def test_vectors_are_maps_of_one_position(name, options):
    head, _ = make(name, **options)
    of_vectors, _ = make(name, pool=None, **options)
    of_vectors.load_state_dict(dict([*head.named_parameters(), *head.named_buffers()]))  # without the configuration
    assert (head.pools, of_vectors.pools) == (True, False)
    x = torch.randn(2, N, D, dtype=torch.float64)
    expected = head(x.reshape(2 * N, D, 1, 1)).view(2, N, C)
    torch.testing.assert_close(of_vectors(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(head(x.reshape(2 * N, D)).view(2, N, C), expected, rtol=0, atol=1e-12)


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
@pytest.mark.parametrize("scale", [None, 0.3])
def test_expansion(training, scale):
    head, n = make("expansion", width=7, scale=scale)
    maps, tokens = maps_and_tokens()
    expanded = tokens.numpy() / np.linalg.norm(tokens, axis=2, keepdims=True) @ n["expand.weight"].T
    mean, variance = expanded.mean((0, 1)), expanded.var((0, 1))

    def pool(mean, variance):
        normal = (expanded - mean) / np.sqrt(variance + 1e-5) * n["norm.weight"] + n["norm.bias"]
        return np.maximum(normal, 0).mean(1)

    pooled = pool(mean, variance)
    middle, spread = pooled.mean(0), pooled.var(0)
    if not training:
        head(maps)
        head.eval()
        middle, spread = 0.1 * middle, 0.9 + 0.1 * pooled.var(0, ddof=1)
        pooled = pool(0.1 * mean, 0.9 + 0.1 * expanded.reshape(-1, 7).var(0, ddof=1))
    factor = (128 / 7) ** 0.5 if scale is None else scale
    standard = (pooled - middle) / np.sqrt(spread + 1e-5)
    expected = factor * standard @ n["classifier.weight"].T + n["classifier.bias"]
    np.testing.assert_allclose(head(maps).detach(), expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(head.train(training)(tokens).detach(), expected, rtol=1e-9, atol=1e-11)


def test_expansion_with_a_mask_in_training():
    """Both norms see real tokens alone, in texts of different lengths."""
    head, n = make("expansion", width=7)
    _, tokens = maps_and_tokens()
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 2, 5])[:, None]
    unit = tokens.numpy() / np.linalg.norm(tokens, axis=2, keepdims=True) @ n["expand.weight"].T
    rows = np.concatenate([sample[real] for sample, real in zip(unit, mask.numpy(), strict=True)])
    mean, variance = rows.mean(0), rows.var(0)
    pooled = np.stack([
        np.maximum((sample[real] - mean) / np.sqrt(variance + 1e-5) * n["norm.weight"] + n["norm.bias"], 0).mean(0)
        for sample, real in zip(unit, mask.numpy(), strict=True)
    ])  # fmt: skip
    standard = (128 / 7) ** 0.5 * (pooled - pooled.mean(0)) / np.sqrt(pooled.var(0) + 1e-5)
    expected = standard @ n["classifier.weight"].T + n["classifier.bias"]
    tokens[~mask] = torch.nan
    np.testing.assert_allclose(head(tokens, mask).detach(), expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(head.norm.running_mean, 0.1 * mean, rtol=1e-9)
    np.testing.assert_allclose(head.norm.running_var, 0.9 + 0.1 * rows.var(0, ddof=1), rtol=1e-9)
    np.testing.assert_allclose(head.standard.running_mean, 0.1 * pooled.mean(0), rtol=1e-9)


@pytest.mark.parametrize("queries", [3, 4])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attentive(queries, training, masked):
    head, n = make("attentive", queries=queries)
    maps, tokens = maps_and_tokens()
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 2, 5])[:, None] if masked else torch.ones(N, 6)
    x = tokens.numpy()
    centred = x - x.mean(2, keepdims=True)
    x = centred / np.sqrt((centred**2).mean(2, keepdims=True) + 1e-5) * n["input_norm.weight"] + n["input_norm.bias"]
    width = -(-D // queries)  # of a slice
    slices = []
    for m, query in enumerate(n["queries"]):
        score = np.exp(x @ query / np.sqrt(D)) * mask.numpy()
        p = score / score.sum(1, keepdims=True)
        values = x @ n["values.weight"][m * width : (m + 1) * width].T
        slices.append((p[:, :, None] * values).sum(1))
    pooled = np.concatenate(slices, 1)
    assert pooled.shape[1] == queries * width
    mean, variance = pooled.mean(0), pooled.var(0)
    if not training:
        head(tokens, mask)
        head.eval()
        mean, variance = 0.1 * mean, 0.9 + 0.1 * pooled.var(0, ddof=1)
    expected = (pooled - mean) / np.sqrt(variance + 1e-5) @ n["classifier.weight"].T + n["classifier.bias"]
    for logits in (head(tokens, mask), head(maps, mask.view(N, 3, 2))):
        np.testing.assert_allclose(logits.detach(), expected, rtol=1e-9, atol=1e-10)
    if not masked:
        np.testing.assert_allclose(head(tokens).detach(), expected, rtol=1e-9, atol=1e-10)


def test_attentive_keeps_its_statistics_in_float32():
    for head in (create_head("attentive", D, C, dtype=torch.bfloat16), create_head("attentive", D, C).bfloat16()):
        assert head.norm.running_mean.dtype == head.norm.running_var.dtype == torch.float32
        assert head(torch.randn(N, 6, D, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "options"), [("landmarks", {}), ("expansion", {})])
def test_the_control_has_the_shape_of_landmarks(name, options):
    count = sum(p.numel() for p in create_head(name, 64, 100, **options).parameters())
    assert count == 64 * 2048 + 2048 * 100 + 100 + (10 if name == "landmarks" else 2 * 2048)
