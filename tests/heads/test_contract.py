"""What every head promises. A new head, or a new option of one, is a new line of CASES."""

import copy
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernelhead import HEADS, KernelClassifier, create_head

D, C = 5, 3
VECTORS, MAPS, TOKENS = (D,), (D, 2, 3), (4, D)

CASES = {
    "softmax": ("softmax", {}, VECTORS),
    "linear": ("linear", {}, VECTORS),
    "second_order": ("second_order", {}, MAPS),
    "second_order-tokens": ("second_order", {}, TOKENS),
    "second_order-vectors": ("second_order", {"places": False}, VECTORS),
    "expansion": ("expansion", {"width": 6}, MAPS),
    "expansion-normalized": ("expansion", {"width": 6, "normalized": True, "standardized": True}, MAPS),
    "expansion-vectors": ("expansion", {"width": 6, "places": False}, VECTORS),
    "expansion-window": ("expansion", {"width": 6, "window": 2, "normalized": True}, MAPS),
    "expansion-tokens": ("expansion", {"width": 6}, TOKENS),
    "kernel": ("kernel", {}, VECTORS),
    "kernel-degree-1": ("kernel", {"degree": 1}, VECTORS),
    "kernel-temperature": ("kernel", {"temperature": 0.25}, VECTORS),
    "kernel-sigmoid": ("kernel", {"coefficients": "sigmoid"}, VECTORS),
    "kernel-softmax": ("kernel", {"coefficients": "softmax", "degree": 3}, VECTORS),
    "kernel-softplus": ("kernel", {"coefficients": "softplus"}, VECTORS),
    "kernel-none": ("kernel", {"coefficients": "none"}, VECTORS),
    "kernel-polynomial": ("kernel", {"kernel": "polynomial", "degree": 10}, VECTORS),
    "kernel-rbf": ("kernel", {"kernel": "rbf", "gamma": 0.5}, VECTORS),
    "kernel-prototypes-sum": ("kernel", {"prototypes": 2, "aggregate": "sum"}, VECTORS),
    "kernel-prototypes-logsumexp": ("kernel", {"prototypes": 2, "aggregate": "logsumexp"}, VECTORS),
    "kernel-landmarks": ("kernel", {"landmarks": 4}, VECTORS),
    "kernel-rkhs-maps": ("kernel", {"pool": "rkhs"}, MAPS),
    "kernel-rkhs-tokens": ("kernel", {"pool": "rkhs"}, TOKENS),
    "kernel-rkhs-rbf": ("kernel", {"pool": "rkhs", "kernel": "rbf"}, MAPS),
    "kernel-rkhs-prototypes": ("kernel", {"pool": "rkhs", "prototypes": 2}, MAPS),
    "kernel-rkhs-window": ("kernel", {"pool": "rkhs", "window": 2}, MAPS),
    "kernel-rkhs-window-landmarks": ("kernel", {"pool": "rkhs", "window": 2, "landmarks": 4}, MAPS),
    "kernel-landmarks-as-they-are": ("kernel", {"landmarks": 4, "standardize": False}, VECTORS),
    "kernel-rkhs-landmarks": ("kernel", {"pool": "rkhs", "landmarks": 4}, MAPS),
}
SLOW = ["kernel", "kernel-rkhs-landmarks", "second_order"]  # one a code path, where a case costs seconds

every_case = pytest.mark.parametrize("case", CASES)


def make(case, dtype=torch.float32, batch=4):
    """The case's head in training mode, with all its numbers away from their initial values, and a batch for it."""
    name, options, shape = CASES[case]
    head = create_head(name, D, C, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.rand_like(parameter))
    head.to(dtype)(torch.randn(6, *shape, dtype=dtype))  # moves running statistics, where there are some
    return head, torch.randn(batch, *shape, dtype=dtype)


def tensors(head):
    return [*head.parameters(), *head.buffers()]


def named(head):
    return [*head.named_parameters(), *head.named_buffers()]


def stored(case, key, tensor, dtype):
    """What a head of `dtype` keeps a tensor in: statistics of kernel values in float32 at least."""
    if not tensor.is_floating_point():
        return tensor.dtype
    statistics = case.startswith("kernel") and key.startswith("norm.")
    return torch.promote_types(dtype, torch.float32) if statistics else dtype


def gradients(head, logits, features=None):
    """Of a fixed function of the logits, with respect to every parameter and the features."""
    loss = (logits * torch.linspace(-1, 2, logits.numel()).view_as(logits)).sum()
    inputs = [*head.parameters(), *([] if features is None else [features])]
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def relative_error(value, expected):
    return ((value.double() - expected.double()).abs().max() / expected.abs().max()).item()


def test_every_head_has_a_case():
    assert {name for name, _, _ in CASES.values()} == set(HEADS)


@every_case
def test_shapes_and_sizes(case):
    head, x = make(case)
    assert head(x).shape == (4, C)
    assert head.in_features == D
    assert head.pools == (len(CASES[case][2]) > 1)
    if not head.pools:
        assert head(x.view(2, 2, D)).shape == (2, 2, C)
        assert head.eval()(x[0]).shape == (C,)


@every_case
def test_in_a_graph_of_torch_fx_it_is_one_node(case):
    head, x = make(case)
    network = torch.nn.Sequential(torch.nn.Tanh(), head).eval()
    graph = torch.fx.symbolic_trace(network)
    assert [(node.op, node.target) for node in graph.graph.nodes][1:3] == [("call_module", "0"), ("call_module", "1")]
    assert torch.equal(graph(x), network(x))
    assert torch.equal(graph(x[:2]), network(x[:2]))  # nothing of a batch's size was taken down
    head.register_forward_hook(lambda head, given, logits: 2 * logits)
    assert torch.equal(torch.fx.symbolic_trace(network)(x), network(x))  # hooks run once


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_dtype_as_for_layers(case, dtype):
    """What the head has on the CPU and in float32, at once in another place: the same tensors, none left behind."""
    name, options, shape = CASES[case]
    plain, made = create_head(name, D, C, **options), create_head(name, D, C, **options, dtype=dtype)
    kinds = {key: (tensor.shape, stored(case, key, tensor, dtype)) for key, tensor in named(plain)}
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in named(made)} == kinds
    assert made(torch.randn(4, *shape, dtype=dtype)).dtype == dtype
    nowhere = create_head(name, D, C, **options, device="meta", dtype=dtype)
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in named(nowhere)} == kinds
    assert all(tensor.is_meta for _, tensor in named(nowhere))


@every_case
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_module_of_any_dtype_gives_logits_of_that_dtype(case, dtype, close):
    head, x = make(case, dtype)
    twin = copy.deepcopy(head).double().eval()
    assert all(tensor.dtype == stored(case, key, tensor, dtype) for key, tensor in named(head))
    logits = head.eval()(x)
    assert logits.dtype == dtype
    assert relative_error(logits, twin(x.double())) < close


@every_case
def test_cpu_autocast(case):
    head, x = make(case)
    head.eval()
    expected = head(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(x)
    assert logits.dtype in (torch.float32, torch.bfloat16)
    assert relative_error(logits, expected) < 0.1
    for parameter, gradient in zip(head.parameters(), gradients(head, logits), strict=True):
        assert gradient.dtype == parameter.dtype
        assert gradient.isfinite().all()


@every_case
def test_gradcheck_and_gradgradcheck(case):
    head, x = make(case, torch.float64, batch=3)
    names, parameters = zip(*head.named_parameters(), strict=True)

    def function(x, *values):
        return torch.func.functional_call(head, dict(zip(names, values, strict=True)), (x,))

    inputs = (x.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@every_case
@pytest.mark.parametrize("training", [False, True])
def test_empty_batch(case, training):
    head, x = make(case, batch=0)
    logits = head.train(training)(x.requires_grad_())
    assert logits.shape == (0, C)
    assert not any(gradient.any() for gradient in gradients(head, logits, x))
    assert all(tensor.isfinite().all() for tensor in tensors(head))


@every_case
@pytest.mark.parametrize("training", [False, True])
def test_zero_features_give_finite_logits_and_gradients(case, training):
    head, x = make(case)
    x[1] = 0
    logits = head.train(training)(x.requires_grad_())
    assert logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(head, logits, x))


@every_case
def test_logits_do_not_depend_on_the_rest_of_the_batch_in_eval_mode(case):
    head, x = make(case)
    head.eval()
    torch.testing.assert_close(torch.cat([head(row) for row in x.split(1)]), head(x))


@every_case
@pytest.mark.parametrize("twin_of", ["state_dict", "deepcopy", "pickle"])
def test_twins_give_the_same_bits(case, twin_of):
    head, x = make(case)
    head.eval()
    if twin_of == "state_dict":
        twin = create_head(CASES[case][0], D, C, **CASES[case][1]).eval()
        assert not torch.equal(twin(x), head(x))
        twin.load_state_dict(head.state_dict())
    elif twin_of == "deepcopy":
        twin = copy.deepcopy(head)
    else:
        twin = pickle.loads(pickle.dumps(head))
    expected = head(x)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(-1).sub_(1)
    assert torch.equal(head(x), expected)


@every_case
def test_moves_between_devices(case):
    head, x = make(case)
    head.eval()
    moved = copy.deepcopy(head).to("meta")
    assert {tensor.device.type for tensor in tensors(moved)} == {"meta"}
    back = moved.to_empty(device="cpu")
    assert {tensor.device.type for tensor in tensors(back)} == {"cpu"}
    back.load_state_dict(head.state_dict())
    assert torch.equal(back(x), head(x))


@every_case
def test_meta_tensors_give_shapes(case):
    head, x = make(case)
    logits = head.to("meta")(x.to("meta"))
    assert (logits.device.type, logits.shape) == ("meta", (4, C))


def compare_with_compiled(case, backend):
    head, x = make(case)
    x.requires_grad_()
    compiled = torch.compile(copy.deepcopy(head), backend=backend, fullgraph=True)
    expected, logits = head(x), compiled(x)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    mine = gradients(compiled, logits, x)
    for gradient, its in zip(mine, gradients(head, expected, x), strict=True):
        torch.testing.assert_close(gradient, its, rtol=1e-3, atol=1e-4)


@every_case
def test_compiles_to_one_graph(case):
    torch.compiler.reset()
    compare_with_compiled(case, "aot_eager")


@pytest.mark.parametrize("case", SLOW)
def test_compiles_with_inductor(case):
    torch.compiler.reset()
    compare_with_compiled(case, "inductor")


@every_case
def test_exports_with_any_batch_size(case):
    head, x = make(case)
    head.eval()
    program = torch.export.export(head, (x,), dynamic_shapes={"features": {0: torch.export.Dim("batch")}})
    for batch in (1, 4, 9):
        features = torch.randn(batch, *x.shape[1:])
        torch.testing.assert_close(program.module()(features), head(features), rtol=1e-4, atol=1e-5)


@every_case
def test_trains_under_sgd(case):
    head, x = make(case, batch=12)
    target = torch.arange(12) % C
    optimizer = torch.optim.SGD(head.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(head(x), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@every_case
def test_repr_says_what_it_is(case):
    head, _ = make(case)
    text = repr(head)
    assert text.startswith(type(head).__name__)
    assert f"in_features={D}" in text
    assert re.search(rf"(num_classes|out_features)={C}\b", text)


# --- errors -----------------------------------------------------------------------------------------------------------


@every_case
def test_wrong_features_are_named(case):
    head, x = make(case)
    wrong = [x[..., :-1] if x.dim() < 4 else x[:, :-1], torch.randn(())]
    wrong += [x[0]] if head.pools and x.dim() == 3 else [x[:, :, 0, 0]] if head.pools else []
    for features in wrong:
        with pytest.raises(ValueError, match=rf"{type(head).__name__}|KernelClassifier") as error:
            head(features)
        assert re.search(rf"expects .*\b{D}\b.*, got {re.escape(str(tuple(features.shape)))}$", str(error.value))


@pytest.mark.parametrize(
    "case", [case for case, (name, own, _) in CASES.items() if name in ("kernel", "expansion") and "window" not in own]
)
def test_what_was_pickled_before_there_were_windows_still_runs(case):
    head, x = make(case)
    expected = head.eval()(x)
    del head.__dict__["window"], head.__dict__["dropout"], head.__dict__["scale"]
    torch.testing.assert_close(head(x), expected)
    if isinstance(head, KernelClassifier):
        frozen = head.freeze()
        del frozen.__dict__["window"]
        torch.testing.assert_close(frozen(x), expected, rtol=1e-4, atol=1e-5)
        assert head.describe().window == 1


DROPOUT = {
    "kernel": ({"landmarks": 40, "pool": "rkhs"}, "mixing"),
    "expansion": ({"width": 40}, "classifier.weight"),
    "second_order": ({}, "classifier.weight"),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_of_what_the_last_layer_is_given(name):
    """A last layer that changes nothing shows it: in training some are zero, and the rest larger for it."""
    options, last = DROPOUT[name]
    width = 40 if name != "second_order" else D * D
    plain, head = create_head(name, D, width, **options), create_head(name, D, width, **options, dropout=0.25)
    with torch.no_grad():
        plain.get_parameter(last).copy_(torch.eye(width))
        plain.get_parameter(last.replace("mixing", "bias").replace("weight", "bias")).zero_()
    head.load_state_dict(plain.state_dict())
    x = torch.randn(50, D, 2, 3)
    full, dropped, again = plain(x), head(x), head(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], full[kept] / 0.75, rtol=1e-4, atol=1e-5)
    share = (dropped == 0).double().mean().item() - (full == 0).double().mean().item()
    assert share == pytest.approx(0.25, abs=0.05)
    assert not torch.equal(kept, again != 0)
    plain.load_state_dict(head.state_dict())
    torch.testing.assert_close(head.eval()(x), plain.eval()(x))
    assert "dropout=0.25" in repr(head)
    assert "dropout" not in repr(plain)
    if name == "kernel":
        torch.testing.assert_close(head.freeze()(x), plain(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_a_share_that_leaves_something(name):
    for share in (-0.1, 1.0, float("nan"), True):
        with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {share}"):
            create_head(name, D, C, **DROPOUT[name][0], dropout=share)
    for other in ("a", None, [0.5]):
        with pytest.raises(ValueError, match=f"dropout must be a number, got {re.escape(repr(other))}"):
            create_head(name, D, C, **DROPOUT[name][0], dropout=other)
    assert type(create_head(name, D, C, **DROPOUT[name][0], dropout=torch.tensor(0.5)).dropout) is float


SCALED = {
    "kernel": {"landmarks": 40, "pool": "rkhs"},
    "expansion": {"width": 40, "standardized": True},
}


@pytest.mark.parametrize("name", SCALED)
def test_scale_is_of_the_standardised_values(name):
    """The mixing of a head with values of a quarter times four is that of one without; its gradient is a quarter."""
    last = {"kernel": "mixing", "expansion": "classifier.weight"}[name]
    plain, head = create_head(name, D, C, **SCALED[name]), create_head(name, D, C, **SCALED[name], scale=0.25)
    head.load_state_dict(plain.state_dict())
    with torch.no_grad():
        head.get_parameter(last).mul_(4)
    x, target = torch.randn(50, D, 2, 3), torch.randint(C, (50,))
    for one in (plain, head):
        F.cross_entropy(one(x), target).backward()
    assert plain.get_parameter(last).grad.abs().sum() > 0
    torch.testing.assert_close(head.get_parameter(last).grad, plain.get_parameter(last).grad / 4)
    torch.testing.assert_close(head.eval()(x), plain.eval()(x))
    assert "scale=0.25" in repr(head)
    assert "scale" not in repr(plain)
    if name == "kernel":
        torch.testing.assert_close(head.freeze()(x), head(x), rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            head.raw_alpha[5] = 1e-3
        deviation = (head.norm.running_var + head.norm.eps).sqrt()
        most = 1e-3 * (head.mixing * 0.25 / deviation).abs().sum(1).max().item()  # what this term is of a logit
        assert [head.freeze(tolerance=share * most).alpha[5].item() > 0 for share in (0.99, 1.01)] == [True, False]


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_is_a_positive_number(name):
    for scale in (0, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scale must be positive and finite, got {scale}$"):
            create_head(name, D, C, **SCALED[name], scale=scale)
    for other in ("a", None, [0.5]):
        with pytest.raises(ValueError, match=f"scale must be a number, got {re.escape(repr(other))}$"):
            create_head(name, D, C, **SCALED[name], scale=other)
    assert type(create_head(name, D, C, **SCALED[name], scale=torch.tensor(0.5)).scale) is float


def test_the_best_head_and_options_over_it():
    for head in (KernelClassifier.best(D, C), create_head("best", D, C)):
        assert type(head) is KernelClassifier
        assert (head.landmarks, head.coefficients, head.pool, head.dropout) == (2048, "softplus", "rkhs", 0)
        assert head.scale == 0.25
        assert head(torch.randn(4, D, 2, 2)).shape == (4, C)
    for head in (
        KernelClassifier.best(D, C, landmarks=7, pool=None),
        create_head("best", D, C, landmarks=7, pool=None),
    ):
        assert (head.landmarks, head.pool) == (7, None)
        assert head.scale == pytest.approx(math.sqrt(128 / 7), abs=5e-4)  # the length of 128 standardised values
    assert KernelClassifier.best(D, C, landmarks=np.int64(512)).scale == 0.5
    assert KernelClassifier.best(D, C, landmarks=512, scale=2, dropout=0.5).scale == 2
    with pytest.raises(ValueError, match="landmarks"):
        KernelClassifier.best(D, C, landmarks=0)
    with pytest.raises(ValueError, match="head 'kernel' has no option 'widht'"):
        create_head("best", D, C, widht=3)


def test_second_order_pooling_pickled_before_there_was_dropout_still_runs():
    head, x = make("second_order")
    expected = head.eval()(x)
    del head.__dict__["dropout"]
    torch.testing.assert_close(head(x), expected)


@every_case
def test_integer_features_are_refused(case):
    head, x = make(case)
    with pytest.raises(TypeError, match=r"expects floating-point features, got torch\.int64$"):
        head(x.long())


@pytest.mark.parametrize(
    "case", [case for case, (_, options, shape) in CASES.items() if shape == MAPS and "window" not in options]
)
def test_a_map_without_places_is_refused(case):
    head, _ = make(case)
    with pytest.raises(ValueError, match=r"averages over places and got none: \(2, 5, 0, 3\)$"):
        head(torch.empty(2, D, 0, 3))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("size", [0, -1, 2.5, True, None, "3"])
@pytest.mark.parametrize("argument", ["in_features", "num_classes"])
def test_sizes_must_be_positive_integers(name, argument, size):
    sizes = {"in_features": D, "num_classes": C} | {argument: size}
    with pytest.raises(ValueError, match=rf"needs {argument} to be a positive integer, got {re.escape(repr(size))}$"):
        create_head(name, **sizes)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("svm", {}, r"unknown head 'svm'; choose one of softmax, linear, second_order, expansion, kernel, best$"),
        ("kernel", {"widht": 3}, r"head 'kernel' has no option 'widht'; it takes degree, kernel, coefficients, .*$"),
        (
            "expansion",
            {"degree": 3},
            r"head 'expansion' has no option 'degree'; "
            r"it takes width, normalized, standardized, scale, places, window, dropout$",
        ),
        ("softmax", {"degree": 3}, r"head 'softmax' has no option 'degree'; it takes none$"),
        ("expansion", {"window": 2, "places": False}, r"it goes with places=True$"),
        ("expansion", {"scale": 0.5}, r"it goes with standardized=True$"),
        ("expansion", {"width": 0}, r"needs width to be a positive integer, got 0$"),
    ],
)
def test_create_head_names_what_it_does_not_know(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_head(name, D, C, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "laplace"}, r"unknown kernel 'laplace'; choose one of learned, linear, polynomial, rbf$"),
        ({"coefficients": "tanh"}, r"unknown coefficients 'tanh'; choose one of relu, .*, none$"),
        ({"aggregate": "max"}, r"unknown aggregate 'max'; choose one of logsumexp, sum$"),
        ({"pool": "mean"}, r"unknown pool 'mean'; choose 'rkhs', or None"),
        *(
            ({"temperature": t}, rf"temperature must be positive and finite, got {t}$")
            for t in (0, -0.1, float("nan"), float("inf"))
        ),
        *(
            ({"kernel": "rbf", "gamma": g}, rf"gamma must be positive and finite, got {g}$")
            for g in (0, -0.1, float("nan"), float("inf"))
        ),
        ({"degree": 0}, r"needs degree to be a positive integer, got 0$"),
        ({"degree": 2.0}, r"needs degree to be a positive integer, got 2\.0$"),
        ({"prototypes": 0}, r"needs prototypes to be a positive integer, got 0$"),
        ({"landmarks": 0}, r"needs landmarks to be a positive integer, got 0$"),
        ({"landmarks": 4, "eps": 0.0}, r"eps must be positive and finite, got 0\.0$"),
        ({"dropout": 0.5}, r"dropout is of the kernel values of landmarks, and there are none: it has to be 0$"),
        ({"scale": 0.5}, r"scale is of the standardised kernel values of landmarks, and there are none: it has to be"),
        ({"landmarks": 4, "standardize": False, "scale": 2}, r"with standardize=False it has to be 1$"),
        ({"standardize": False}, r"standardize is about the kernel values of landmarks, and there are none$"),
        ({"landmarks": 4, "prototypes": 2}, r"use either landmarks or prototypes, not both$"),
        *(
            ({"kernel": k, "coefficients": "softmax"}, rf"kernel='{k}' has one coefficient, and softmax of one number")
            for k in ("linear", "polynomial", "rbf")
        ),
    ],
)
def test_kernel_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message) as error:
        KernelClassifier(D, C, **options)
    assert "\n" not in str(error.value)
