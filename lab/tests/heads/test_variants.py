"""Variants of heads against their formulas in NumPy's float64."""

import numpy as np
import pytest
import torch
from torch import nn

from kernelhead import create_head
from kernelhead_lab.heads import VARIANTS, create_lab_head, lab_option_defaults

N, D, H, W, C, Q = 5, 6, 4, 3, 4, 8
SIZES = {
    "landmarks_variant": {"landmarks": Q},
    "expansion_variant": {"width": Q},
    "pooled_prototypes": {"prototypes": 2},
}


def make(name, **options):
    torch.manual_seed(1)
    head = create_lab_head(name, D, C, **{**SIZES.get(name, {}), **options}).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return head


def maps():
    return torch.randn(N, D, H, W, generator=torch.Generator().manual_seed(2)).double()


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def positions_of(x, window=1):
    """Positions, or windows row by row, of maps: (N, L, w w D)."""
    x = x.numpy().transpose(0, 2, 3, 1)
    rows, columns = x.shape[1] - window + 1, x.shape[2] - window + 1
    found = [x[:, i : i + window, j : j + window].reshape(len(x), -1) for i in range(rows) for j in range(columns)]
    return np.stack(found, 1)


def kernel_means(head, positions):
    """The mean over positions of k(t) (N, K), without end points: no cosine here is 1."""
    alpha = head.alpha.detach().numpy()[2:]
    t = np.einsum("nld,qd->nlq", unit(positions), unit(head.weight.detach().numpy()))
    return sum(a * t**m for m, a in enumerate(alpha)).mean(1) / head.temperature


def standardised(values, eps):
    return (values - values.mean(0)) / np.sqrt(values.var(0) + eps)


def array(tensor):
    return tensor.detach().numpy()


@pytest.mark.parametrize("name", VARIANTS)
def test_options_are_those_of_the_library_head_and_more(name):
    head = make(name)
    parent = type(head).__mro__[1].name
    ours, theirs = lab_option_defaults(name), lab_option_defaults(parent)
    assert theirs.items() <= ours.items()
    assert len(ours) > len(theirs)
    assert head.config.keys() >= ours.keys()
    again = create_lab_head(**{key: value for key, value in head.config.items() if key != "version"})
    assert again.config == head.config


@pytest.mark.parametrize("name", ["landmarks_variant", "expansion_variant", "second_order_variant"])
def test_the_defaults_are_the_library_head(name):
    head = make(name)
    plain = create_head(type(head).__mro__[1].name, D, C, **SIZES.get(name, {})).double()
    plain.load_state_dict(dict([*head.named_parameters(), *head.named_buffers()]))  # without the configuration
    torch.testing.assert_close(head(maps()), plain(maps()))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("standardize", "eps"), [(True, 1e-5), (True, 1e-12), (False, 1e-5)])
def test_landmarks(window, standardize, eps):
    head = make("landmarks_variant", window=window, standardize=standardize, eps=eps, scale=0.5)
    assert head.weight.shape == (Q, window**2 * D)
    values = kernel_means(head, positions_of(maps(), window))
    values = 0.5 * (standardised(values, eps) if standardize else values)
    expected = values @ array(head.mixing).T + array(head.bias)
    np.testing.assert_allclose(array(head(maps())), expected, rtol=1e-8)
    if not standardize:
        np.testing.assert_allclose(array(head.eval()(maps())), expected, rtol=1e-8)


def test_pooled_kernels():
    head = make("pooled_kernel")
    np.testing.assert_allclose(array(head(maps())), kernel_means(head, positions_of(maps())), rtol=1e-10)
    assert head.pools
    assert not head.has_fused_loss


@pytest.mark.parametrize("aggregate", ["sum", "logsumexp"])
def test_pooled_prototypes(aggregate):
    head = make("pooled_prototypes", aggregate=aggregate)
    values = kernel_means(head, positions_of(maps())).reshape(N, C, 2)
    expected = values.sum(2) if aggregate == "sum" else np.log(np.exp(values).sum(2))
    np.testing.assert_allclose(array(head(maps())), expected, rtol=1e-10)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("standardized", [True, False])
@pytest.mark.parametrize("pool", ["auto", None])
def test_expansions(normalized, standardized, pool):
    head = make("expansion_variant", normalized=normalized, standardized=standardized, pool=pool, scale=0.7)
    features = maps() if pool else maps()[:, :, 0, 0]
    positions = positions_of(features) if pool else features.numpy()[:, None]
    expanded = (unit(positions) if normalized else positions) @ array(head.expand.weight).T
    flat = standardised(expanded.reshape(-1, Q), 1e-5) * array(head.norm.weight) + array(head.norm.bias)
    pooled = np.maximum(flat, 0).reshape(expanded.shape).mean(1)
    pooled = 0.7 * (standardised(pooled, 1e-5) if standardized else pooled)
    expected = pooled @ array(head.classifier.weight).T + array(head.classifier.bias)
    np.testing.assert_allclose(array(head(features)), expected, rtol=1e-8)


@pytest.mark.parametrize("name", ["landmarks_variant", "expansion_variant", "second_order_variant"])
def test_dropout_is_of_what_is_mixed(name):
    """With an identity instead of the mixing, the logits are what is mixed: kept and doubled, or zero."""
    head, plain = make(name, dropout=0.5), make(name)
    if name == "landmarks_variant":
        for each in (head, plain):
            each.mixing, each.bias = nn.Parameter(torch.eye(Q).double()), nn.Parameter(torch.zeros(Q).double())
    else:
        width = head.classifier.in_features
        head.classifier = plain.classifier = nn.Linear(width, width, bias=False).double()
        nn.init.eye_(head.classifier.weight)
    dropped, whole = array(head(maps())), array(plain(maps()))
    kept = dropped != 0
    assert 0.2 < kept.mean() < 0.8
    np.testing.assert_allclose(dropped[kept], 2 * whole[kept], rtol=1e-10)
    plain.load_state_dict(dict([*head.named_parameters(), *head.named_buffers()]))  # without the configuration
    torch.testing.assert_close(head.eval()(maps()), plain.eval()(maps()))


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("landmarks_variant", {"window": 2, "pool": None}, "window needs pool='auto'; got window=2 with pool=None"),
        ("landmarks_variant", {"dropout": 1.0}, "needs dropout to be at least 0 and below 1; got 1.0"),
        ("pooled_kernel", {"pool": "rkhs"}, "knows no pool='rkhs'; choose"),
        ("pooled_kernel", {"places": True}, "head 'pooled_kernel' has no option 'places'; it takes degree"),
        ("no_such_head", {}, "unknown head 'no_such_head'; choose one of kernel"),
    ],
)
def test_errors(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_lab_head(name, D, C, **options)
    with pytest.raises(ValueError, match=r"window=2 expects a map \(N, 6, H, W\) .* got \(5, 6, 1, 1\)"):
        make("landmarks_variant", window=2)(maps()[:, :, :1, :1])
