"""`freeze` of kernel heads: the same logits from less work."""

import copy
import pickle
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from scipy.special import logsumexp

from kernelhead import CosineHead, KernelHead, LandmarkHead, PrototypeHead
from kernelhead.fused import kernel_mean
from kernelhead.heads import FrozenHead, frozen

D, C = 6, 4
VECTORS, MAPS, TOKENS = (D,), (D, 2, 3), (5, D)

CASES = {
    "kernel": (KernelHead, {"coefficients": "relu"}, VECTORS),
    "degree-1": (KernelHead, {"degree": 1}, VECTORS),
    "temperature": (KernelHead, {"temperature": 0.25, "bias": True}, VECTORS),
    "sigmoid": (KernelHead, {"coefficients": "sigmoid"}, VECTORS),
    "softmax": (KernelHead, {"coefficients": "softmax", "degree": 3}, VECTORS),
    "softplus": (KernelHead, {"coefficients": "softplus"}, VECTORS),
    "none": (KernelHead, {"coefficients": "none"}, VECTORS),
    "cosine": (CosineHead, {}, VECTORS),
    "polynomial": (KernelHead, {"kernel": "polynomial", "degree": 10}, VECTORS),
    "rbf": (KernelHead, {"kernel": "rbf", "gamma": 0.5}, VECTORS),
    "prototypes-sum": (PrototypeHead, {"prototypes": 3, "temperature": 1.0, "bias": True}, VECTORS),
    "prototypes-logsumexp": (PrototypeHead, {"prototypes": 3, "aggregate": "logsumexp"}, VECTORS),
    "prototypes-large": (
        PrototypeHead,
        {"prototypes": 3, "aggregate": "logsumexp", "coefficients": "softmax"},
        VECTORS,
    ),
    "landmarks-vectors": (LandmarkHead, {"landmarks": 5, "pool": None, "coefficients": "sigmoid"}, VECTORS),
    "landmarks-tokens": (LandmarkHead, {"landmarks": 5, "scale": 1.0}, TOKENS),
    "landmarks-maps": (LandmarkHead, {"landmarks": 5, "coefficients": "relu"}, MAPS),
}
every_case = pytest.mark.parametrize("case", CASES)
some_cases = pytest.mark.parametrize("case", ["kernel", "prototypes-logsumexp", "prototypes-large", "landmarks-maps"])


def make(case, dtype=torch.float32, batch=7):
    """A head in evaluation mode away from its start, one of its terms dead where it can be, and a batch."""
    kind, options, shape = CASES[case]
    head = kind(D, C, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
        if head.raw_alpha.numel() > 5:
            head.raw_alpha[-1] = -0.5 if head.coefficients == "relu" else 0.5
    head.to(dtype)
    for _ in range(20):
        head(torch.randn(16, *shape, dtype=dtype))
    return head.eval(), torch.randn(batch, *shape, dtype=dtype)


def expected_logits(head, x):
    """The formula once more, in NumPy and float64, from the head's raw numbers."""
    raw = head.raw_alpha.detach().double().numpy()
    activations = {
        "relu": lambda a: np.maximum(a, 0),
        "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
        "softmax": lambda a: np.exp(a) / np.exp(a).sum(),
        "softplus": lambda a: np.log1p(np.exp(a)),
        "none": lambda a: a,
    }
    alpha = activations[head.coefficients](raw)
    if head.kernel.profile is not None:
        alpha = alpha * head.kernel.profile.double().numpy()
    f = x.double().numpy()
    f = f.reshape(*f.shape[:2], -1).swapaxes(1, 2) if f.ndim == 4 else f if f.ndim == 3 else f[:, None, :]
    w = head.weight.detach().double().numpy()
    t = f / np.linalg.norm(f, axis=-1, keepdims=True) @ (w / np.linalg.norm(w, axis=-1, keepdims=True)).T
    k = sum(a * t**m for m, a in enumerate(alpha[2:]))
    k = k + alpha[1] * ((t > 1 - 1e-6).astype(float) - (t < -1 + 1e-6)) + alpha[0] * (np.abs(t) > 1 - 1e-6)
    values = k.mean(1) / head.temperature
    bias = 0 if head.bias is None else head.bias.detach().double().numpy()
    if head.mixing is not None:
        mean, variance = (x.double().numpy() for x in (head.norm.running_mean, head.norm.running_var))
        standardised = (values - mean) / np.sqrt(variance + head.norm.eps)
        return head.scale * standardised @ head.mixing.detach().double().numpy().T + bias
    grouped = values.reshape(len(values), C, head.prototypes)
    return (grouped.sum(2) if head.aggregate == "sum" else logsumexp(grouped, 2)) + bias


def error(logits, expected):
    expected = np.asarray(expected)
    return np.abs(logits.detach().double().numpy() - expected).max() / max(1, np.abs(expected).max())


@every_case
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_logits_are_the_formula(case, dtype, close):
    head, x = make(case, dtype)
    logits = head.freeze()(x)
    assert logits.dtype == dtype
    assert error(logits, expected_logits(head, x)) < close
    assert error(logits, head(x).detach()) < close


@every_case
def test_half_precision_and_autocast_are_as_good_as_the_head(case):
    head, x = make(case)
    expected = expected_logits(head, x)
    half = copy.deepcopy(head).bfloat16()
    logits = half.freeze()(x.bfloat16())
    assert logits.dtype == torch.bfloat16
    assert error(logits.float(), expected) < 1.5 * error(half(x.bfloat16()).float(), expected) + 0.01
    with torch.autocast("cpu", dtype=torch.bfloat16):
        its, logits = head(x), head.freeze()(x)
    assert logits.dtype == its.dtype
    assert error(logits.float(), expected) < 1.5 * error(its.float(), expected) + 0.01


@every_case
def test_equal_and_opposite_vectors(case):
    head, x = make(case)
    if head.pools:
        x = head.weight.detach()[: len(x), None].repeat(1, 4, 1)
        x[1] *= -3
    else:
        x[:3] = head.weight.detach()[:3] * torch.tensor([[2.0], [-1.0], [0.5]])
    assert error(head.freeze()(x), expected_logits(head, x)) < 1e-5


@every_case
def test_gradients_to_features_are_the_heads(case):
    head, x = make(case, torch.float64)
    frozen_head = head.freeze()
    gradients = []
    for module in (head, frozen_head):
        x = x.detach().requires_grad_()
        logits = module(x)
        gradients.append(torch.autograd.grad((logits * torch.linspace(-1, 2, logits.numel()).view_as(logits)).sum(), x))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-8)
    assert not list(frozen_head.parameters())


@some_cases
def test_shapes_empty_batches_and_zero_vectors(case):
    head, x = make(case)
    frozen_head = head.freeze()
    assert frozen_head(x[:0]).shape == (0, C)
    x[2] = 0
    assert frozen_head(x).isfinite().all()
    torch.testing.assert_close(frozen_head(x), head(x), rtol=1e-4, atol=1e-5)
    if not head.pools:
        assert frozen_head(x[:6].view(2, 3, D)).shape == (2, 3, C)
        torch.testing.assert_close(frozen_head(x[:6].view(2, 3, D))[1, 2], frozen_head(x[5]))


@some_cases
def test_blocks_make_no_difference(case, monkeypatch):
    head, x = make(case, batch=700)
    frozen_head = head.freeze()
    whole = frozen_head(x)
    monkeypatch.setattr(kernel_mean, "BLOCK", {"cpu": 64})
    with mock.patch.object(frozen.kernels, "horner", wraps=frozen.kernels.horner) as horner:
        torch.testing.assert_close(frozen_head(x), whole, rtol=1e-6, atol=1e-6)
    assert horner.call_count > 1


def test_large_logits_do_not_overflow():
    head = PrototypeHead(D, C, prototypes=2, aggregate="logsumexp", temperature=0.01)
    x = head.weight.detach()[:3]
    logits = head.freeze()(x)
    assert logits.max() > 700
    torch.testing.assert_close(logits, head(x).detach())


# --- what is left out -------------------------------------------------------------------------------------------------


def test_the_series_ends_at_its_last_term():
    head = KernelHead(D, C, coefficients="relu")
    with torch.no_grad():
        head.raw_alpha[:] = torch.tensor([-1.0, 0.0, 1.0, 2.0, -0.3, 0.5, -0.1, 0.0, -2.0, -3.0])
    frozen_head = head.freeze()
    assert (frozen_head.degree, frozen_head.end_points) == (3, False)
    assert frozen_head.alpha.tolist() == [0, 0, 1, 2, 0, 0.5, 0, 0, 0, 0]
    x = torch.cat([torch.randn(9, D), head.weight.detach()])
    assert error(frozen_head(x), expected_logits(head, x)) < 1e-6
    assert "degree=3, end_points=False" in repr(frozen_head)


def test_nothing_but_a_constant_is_left():
    head = KernelHead(D, C, coefficients="none")
    with torch.no_grad():
        head.raw_alpha.zero_()[2] = 3
    assert head.freeze().degree == 0
    assert torch.equal(head.freeze()(torch.randn(5, D)), torch.full((5, C), 3.0))


def test_freezing_leaves_the_head_as_it_is():
    head, _ = make("landmarks-maps")
    head.train()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    frozen_head = head.freeze()
    frozen_head.bias.add_(1)
    assert head.training
    assert not frozen_head.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


# --- as a module ------------------------------------------------------------------------------------------------------


@some_cases
@pytest.mark.parametrize("twin_of", ["state_dict", "safetensors", "deepcopy", "pickle", "meta"])
def test_twins_give_the_same_bits(case, twin_of):
    head, x = make(case)
    own = head.freeze()
    if twin_of in ("state_dict", "safetensors", "meta"):
        twin = CASES[case][0](D, C, **CASES[case][1]).freeze()
        assert not torch.equal(twin(x), own(x))
        state = own.state_dict()
        if twin_of == "safetensors":
            state = safetensors.torch.load(safetensors.torch.save(state))
        if twin_of == "meta":
            twin = twin.to("meta").to_empty(device="cpu")
        twin.load_state_dict(state)
    else:
        twin = copy.deepcopy(own) if twin_of == "deepcopy" else pickle.loads(pickle.dumps(own))
    assert (twin.degree, twin.end_points) == (own.degree, own.end_points)
    assert torch.equal(twin(x), own(x))


@some_cases
def test_meta_tensors_give_shapes(case):
    head, x = make(case)
    logits = head.to("meta").freeze()(x.to("meta"))
    assert (logits.device.type, logits.shape) == ("meta", (7, C))


@some_cases
def test_compiles_to_one_graph(case):
    torch.compiler.reset()
    head, x = make(case)
    compiled = torch.compile(head.freeze(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), head(x), rtol=1e-4, atol=1e-5)


@some_cases
def test_exports_with_any_batch_size(case):
    head, x = make(case)
    program = torch.export.export(head.freeze(), (x,), dynamic_shapes={"features": {0: torch.export.Dim("batch")}})
    for batch in (1, 9):
        features = torch.randn(batch, *x.shape[1:])
        features[0] = 0
        torch.testing.assert_close(program.module()(features), head(features), rtol=1e-4, atol=1e-5)


def test_transforms_of_torch_func():
    head, x = make("kernel", torch.float64)
    frozen_head = head.freeze()
    torch.testing.assert_close(torch.func.vmap(frozen_head)(x), head(x))
    torch.testing.assert_close(torch.func.jacrev(frozen_head)(x[0]), torch.func.jacfwd(frozen_head)(x[0]))


class Doubled(KernelHead):
    def _logits(self, values):
        return 2 * super()._logits(values)


def test_a_subclass_that_computes_otherwise_stays_as_it_is():
    head, x = Doubled(D, C), torch.randn(3, D)
    frozen_head = head.freeze()
    assert (type(frozen_head), frozen_head.training, head.training) == (Doubled, False, True)
    assert torch.equal(frozen_head(x), head(x))


def test_a_frozen_head_knows_what_it_was():
    head = LandmarkHead(D, C, landmarks=5)
    frozen_head = head.freeze()
    assert isinstance(frozen_head, FrozenHead)
    assert (frozen_head.config, frozen_head.pools) == (head.config, True)
    assert not frozen_head.has_fused_loss


def test_hooks_go_along():
    head, x = make("kernel")
    head.register_forward_pre_hook(lambda module, args: (-args[0],))
    head.register_forward_hook(lambda module, args, kwargs, output: output[:, :2], with_kwargs=True)
    frozen_head = head.freeze()
    assert frozen_head(x).shape == (7, 2)
    torch.testing.assert_close(frozen_head(x), head(x).detach())


@pytest.mark.parametrize("case", ["kernel", "landmarks-maps"])
def test_wrong_features_are_named(case):
    head, x = make(case)
    with pytest.raises(ValueError, match=r"^FrozenHead expects .*\b6\b"):
        head.freeze()(torch.randn(2, 5))
    with pytest.raises(TypeError, match=r"^FrozenHead expects floating-point features"):
        head.freeze()(x.long())
