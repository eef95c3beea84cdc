"""Kernel heads as modules: conversions to half precision, shards, pruning."""

import copy

import numpy as np
import pytest
import torch
from numpy.polynomial import polynomial as P
from torch import nn
from torch.nn.utils import prune

from kernelhead import KernelHead, LandmarkHead

D, C = 16, 3
STATISTICS = ("norm.running_mean", "norm.running_var")
CONVERSIONS = {
    "to": lambda head, dtype: head.to(dtype),
    "method": lambda head, dtype: head.bfloat16() if dtype == torch.bfloat16 else head.half(),
    "within a network": lambda head, dtype: nn.Sequential(nn.Linear(D, D), head).to(dtype)[1],
    "from the beginning": lambda head, dtype: LandmarkHead(D, C, landmarks=8, coefficients="relu", dtype=dtype),
}
half_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def make():
    torch.manual_seed(0)
    head = LandmarkHead(D, C, landmarks=8, coefficients="relu")
    with torch.no_grad():
        head.raw_alpha.uniform_(0.5, 1.5)
        head.raw_alpha[2] = 30.3  # a_0, which standardising takes out: far above what values vary by
    return head


def tokens(seed=0):
    """(64, 200, D): kernel values whose means over positions vary far less than they measure."""
    return torch.randn(64, 200, D, generator=torch.Generator().manual_seed(seed)) + 1


def standardised_logits(head, x):
    """The logits in evaluation, in NumPy, by statistics of x itself."""
    n = {name: value.detach().double().numpy() for name, value in head.state_dict().items()}
    f, w = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (x.double().numpy(), n["weight"]))
    values = P.polyval(f @ w.T, np.maximum(n["kernel.raw_alpha"], 0)[2:]).mean(1)
    standard = (values - values.mean(0)) / np.sqrt(values.var(0, ddof=1) + 1e-5)
    return 4 * standard @ n["mixing"].T + n["bias"]  # 4 = sqrt(128 / 8)


# --- half precision ---------------------------------------------------------------------------------------------------


@half_precision
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_statistics_of_landmarks_stay_float32(conversion, dtype):
    head = CONVERSIONS[conversion](make(), dtype)
    assert {name for name, x in head.state_dict().items() if x.dtype == torch.float32} == set(STATISTICS)
    assert {x.dtype for x in head.parameters()} == {dtype}
    x = tokens().to(dtype)
    head.norm.momentum = 1.0  # the statistics are the last batch's
    head.train()(x)
    expected = standardised_logits(head, x)
    for twin in (head, copy.deepcopy(head), head.freeze()):
        logits = twin.eval()(x)
        assert logits.dtype == dtype
        assert np.abs(logits.detach().double().numpy() - expected).max() < 0.05 * np.abs(expected).max()


def test_statistics_follow_to_other_devices_and_to_double():
    head = make()
    head(torch.randn(9, D))
    kept = {name: head.get_buffer(name).clone() for name in STATISTICS}
    head.to(torch.bfloat16)
    assert all(torch.equal(head.get_buffer(name), x) for name, x in kept.items())  # not rounded on the way
    double = copy.deepcopy(head).double()
    assert all(torch.equal(double.get_buffer(name), x.double()) for name, x in kept.items())
    assert {x.dtype for x in double.half().buffers() if x.is_floating_point()} == {torch.float32}
    nowhere = copy.deepcopy(head).to("meta", torch.float16)
    assert {nowhere.get_buffer(name).dtype for name in STATISTICS} == {torch.float32}
    assert all(x.is_meta for x in nowhere.buffers())
    back = nowhere.to_empty(device="cpu")
    back.load_state_dict(head.state_dict())
    assert all(torch.equal(back.get_buffer(name), x) for name, x in kept.items())


@pytest.mark.parametrize("assign", [False, True])
def test_states_in_half_precision_load(assign):
    """As of a file whose numbers were all rounded."""
    head, x = make().bfloat16().eval(), torch.randn(5, D).bfloat16()
    state = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in head.state_dict().items()
    }
    other = LandmarkHead(D, C, landmarks=8, coefficients="relu").bfloat16().eval()
    other.load_state_dict(state, assign=assign)
    torch.testing.assert_close(other(x), head(x), rtol=0.02, atol=0.02)


@half_precision
def test_a_frozen_head_can_be_made_half(dtype):
    head, x = make(), tokens()
    head.norm.momentum = 1.0
    head.train()(x)
    frozen, exact = head.freeze().to(dtype), head.freeze()
    assert torch.equal(frozen.alpha, exact.alpha)  # a rounded a_m would move what the mean was taken from
    assert torch.equal(frozen.mean, exact.mean)
    logits = frozen(x.to(dtype))
    assert logits.dtype == dtype
    expected = standardised_logits(head, x)
    assert np.abs(logits.double().numpy() - expected).max() < 0.05 * np.abs(expected).max()


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (KernelHead, {"coefficients": "softmax"}),
        (KernelHead, {"kernel": "rbf", "bias": True}),
        (LandmarkHead, {"landmarks": 4}),
    ],
)
def test_sharded_parameters_start_anew(one_process, kind, options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    head = kind(D, C, **options, device="meta")
    fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
    head.to_empty(device="cpu")
    head.reset_parameters()
    assert head.raw_alpha.full_tensor().tolist() == [1.0] * len(kind(D, C, **options).raw_alpha)
    assert head.eval()(torch.randn(2, D)).isfinite().all()


# --- one sample, and pruning ------------------------------------------------------------------------------------------


def test_one_sample_trains_by_statistics_that_are_kept():
    head, x = make(), torch.randn(9, D)
    head(x)
    expected = head.eval()(x[:1]).detach()
    head.train().norm.eval()
    torch.testing.assert_close(head(x[:1]).detach(), expected)


def test_pruned_heads_freeze():
    head, x = make(), torch.randn(9, D)
    head(x)
    prune.l1_unstructured(head, "mixing", 0.5)
    prune.random_unstructured(head, "weight", 0.3)
    head.register_forward_hook(lambda module, given, logits: 2 * logits)
    expected = head.eval()(x).detach()
    frozen = head.freeze()
    assert (frozen.mixing == 0).sum() == C * 8 // 2
    torch.testing.assert_close(frozen(x), expected)
    assert (len(frozen._forward_pre_hooks), len(frozen._forward_hooks)) == (0, 1)


@pytest.mark.parametrize("normalised", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_heads_with_normalised_weights_freeze(normalised):
    head, x = normalised(KernelHead(D, C)), torch.randn(9, D)
    head(x)  # estimates the largest singular value
    head.eval()
    torch.testing.assert_close(head.freeze()(x), head(x).detach())
