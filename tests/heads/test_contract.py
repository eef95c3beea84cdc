"""The contract of every head. A new head, or a new option of one, is a new line of CASES."""

import copy
import json
import pickle
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernelhead import HEADS, create_head
from kernelhead.heads import option_defaults

D, C = 5, 3
VECTORS, MAPS, TOKENS = (D,), (D, 2, 3), (4, D)

CASES = {
    "linear": ("linear", {}, VECTORS),
    "cosine": ("cosine", {}, VECTORS),
    "kernel": ("kernel", {}, VECTORS),
    "kernel-degree-1": ("kernel", {"degree": 1}, VECTORS),
    "kernel-temperature": ("kernel", {"temperature": 0.25}, VECTORS),
    "kernel-sigmoid": ("kernel", {"coefficients": "sigmoid"}, VECTORS),
    "kernel-softmax": ("kernel", {"coefficients": "softmax", "degree": 3}, VECTORS),
    "kernel-softplus": ("kernel", {"coefficients": "softplus", "bias": True}, VECTORS),
    "kernel-none": ("kernel", {"coefficients": "none"}, VECTORS),
    "kernel-polynomial": ("kernel", {"kernel": "polynomial", "degree": 10}, VECTORS),
    "kernel-rbf": ("kernel", {"kernel": "rbf", "gamma": 0.5}, VECTORS),
    "prototypes-sum": ("prototypes", {"prototypes": 2, "bias": True}, VECTORS),
    "prototypes-logsumexp": ("prototypes", {"prototypes": 2, "aggregate": "logsumexp"}, VECTORS),
    "landmarks-maps": ("landmarks", {"landmarks": 4}, MAPS),
    "landmarks-tokens": ("landmarks", {"landmarks": 4, "coefficients": "relu", "scale": 1.0}, TOKENS),
    "landmarks-pooled-vectors": ("landmarks", {"landmarks": 4, "kernel": "rbf"}, VECTORS),
    "landmarks-vectors": ("landmarks", {"landmarks": 4, "pool": None}, VECTORS),
    "second_order-maps": ("second_order", {}, MAPS),
    "second_order-tokens": ("second_order", {}, TOKENS),
    "second_order-vectors": ("second_order", {"pool": None}, VECTORS),
    "expansion-maps": ("expansion", {"width": 6}, MAPS),
    "expansion-tokens": ("expansion", {"width": 6, "scale": 1.0}, TOKENS),
    "expansion-vectors": ("expansion", {"width": 6, "pool": None}, VECTORS),
    "attentive-maps": ("attentive", {"queries": 2}, MAPS),
    "attentive-tokens": ("attentive", {"queries": 3}, TOKENS),
    "attentive-vectors": ("attentive", {"pool": None}, VECTORS),
}
# One per code path, where a case costs a second.
PATHS = ["linear", "kernel", "prototypes-logsumexp", "landmarks-maps", "second_order-maps", "expansion-tokens"]
PATHS += ["attentive-tokens"]

every_case = pytest.mark.parametrize("case", CASES)
every_path = pytest.mark.parametrize("case", PATHS)


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


def stored(head, key, tensor, dtype):
    """The dtype in which a head of `dtype` keeps a tensor."""
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.promote_types(dtype, torch.float32) if key in head.precise else dtype


def gradients(head, logits, features=None):
    """Of a fixed function of the logits, with respect to every parameter and the features."""
    loss = (logits * torch.linspace(-1, 2, logits.numel()).view_as(logits)).sum()
    inputs = [*head.parameters(), *([] if features is None else [features])]
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def relative_error(value, expected):
    return ((value.double() - expected.double()).abs().max() / expected.abs().max()).item()


def test_every_head_has_a_case():
    assert {name for name, _, _ in CASES.values()} == set(HEADS)
    assert {HEADS[name].name for name in HEADS} == set(HEADS)


@every_case
def test_shapes_and_sizes(case):
    head, x = make(case)
    assert head(x).shape == (4, C)
    assert (head.in_features, head.num_classes) == (D, C)
    if not head.pools:
        assert head(x.view(2, 2, D)).shape == (2, 2, C)
        assert head.eval()(x[0]).shape == (C,)


@every_case
def test_its_configuration_makes_it_again(case):
    head, x = make(case)
    name, options, _ = CASES[case]
    config = json.loads(json.dumps(head.config))
    sizes = {"version": 1, "name": name, "in_features": D, "num_classes": C}
    assert config == {**sizes, **option_defaults(name), **options}
    twin = create_head(**config)
    assert twin.config == head.config
    twin.load_state_dict(head.state_dict())
    assert torch.equal(twin.eval()(x), head.eval()(x))
    twin.config["in_features"] = 99
    assert twin.config["in_features"] == D


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_dtype_as_for_layers(case, dtype):
    """The head made at once in another dtype or on another device has the same tensors."""
    name, options, shape = CASES[case]
    plain, made = create_head(name, D, C, **options), create_head(name, D, C, **options, dtype=dtype)
    kinds = {key: (tensor.shape, stored(plain, key, tensor, dtype)) for key, tensor in named(plain)}
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
    assert all(tensor.dtype == stored(head, key, tensor, dtype) for key, tensor in named(head))
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
@pytest.mark.parametrize("twin_of", ["state_dict", "deepcopy", "pickle", "freeze"])
def test_twins_give_the_same_bits(case, twin_of):
    head, x = make(case)
    head.eval()
    if twin_of == "state_dict":
        twin = create_head(CASES[case][0], D, C, **CASES[case][1]).eval()
        assert not torch.equal(twin(x), head(x))
        twin.load_state_dict(head.state_dict())
    elif twin_of == "freeze":
        twin = head.train().freeze()
        assert head.training
        assert not twin.training
        torch.testing.assert_close(twin(x), head.eval()(x), rtol=1e-4, atol=1e-5)
        twin = twin.freeze()
    else:
        twin = copy.deepcopy(head) if twin_of == "deepcopy" else pickle.loads(pickle.dumps(head))
    expected = head(x)
    if twin_of != "freeze":
        assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for tensor in tensors(twin):
            tensor.mul_(-1).sub_(1)
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
    torch.compiler.reset()
    head, x = make(case)
    x.requires_grad_()
    compiled = torch.compile(copy.deepcopy(head), backend=backend, fullgraph=True)
    expected, logits = head(x), compiled(x)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    mine = gradients(compiled, logits, x)
    for gradient, its in zip(mine, gradients(head, expected, x), strict=True):
        torch.testing.assert_close(gradient, its, rtol=1e-3, atol=1e-4)


@every_path
def test_compiles_to_one_graph(case):
    compare_with_compiled(case, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in PATHS])
def test_compiles_to_one_graph_with_any_options(case):
    compare_with_compiled(case, "aot_eager")


@pytest.mark.slow
@every_path
def test_compiles_with_inductor(case):
    compare_with_compiled(case, "inductor")


@pytest.mark.parametrize("case", [*PATHS, *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in PATHS)])
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
def test_reset_parameters_writes_every_number(case):
    head, x = make(case)
    fresh = create_head(CASES[case][0], D, C, **CASES[case][1])
    with torch.no_grad():
        for tensor in tensors(head):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 9)
    for one in (head, fresh):
        torch.manual_seed(1)
        one.reset_parameters()
    state = fresh.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in head.state_dict().items())
    assert head(x).isfinite().all()


@every_case
def test_repr_says_what_it_is(case):
    head, _ = make(case)
    text = repr(head)
    assert re.match(rf"{type(head).__name__}\(\s*in_features={D}, num_classes={C}", text)
    for option, value in CASES[case][1].items():
        assert value is None or str(value) in text, option


# --- masks ------------------------------------------------------------------------------------------------------------

every_pooling_case = pytest.mark.parametrize("case", [case for case in CASES if case.endswith(("maps", "tokens"))])
every_pooling_path = pytest.mark.parametrize(
    "case", ["landmarks-tokens", "second_order-tokens", "expansion-tokens", "attentive-tokens"]
)


def with_padding(case, x, more=3, value=torch.nan):
    """Samples with some of their positions in random places among `more` others of this value, and the mask.

    The places that maps get are columns.
    """
    lines = x if x.dim() == 4 else x.mT[:, :, None]
    columns = lines.shape[3]
    mask = torch.stack([torch.randperm(columns + more) < columns for _ in x])
    padded = lines.new_full((*lines.shape[:3], columns + more), value)
    for sample, line, real in zip(padded, lines, mask, strict=True):
        sample[..., real] = line
    if x.dim() == 4:
        return padded, mask[:, None].expand(-1, x.shape[2], -1)
    return padded[:, :, 0].mT, mask


@every_pooling_case
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf])
def test_padding_changes_nothing(case, training, value):
    head, x = make(case, torch.float64, batch=6)
    twin = copy.deepcopy(head.train(training))
    padded, mask = with_padding(case, x, value=value)
    expected, logits = head(x.requires_grad_()), twin(padded.requires_grad_(), mask)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-12)
    for mine, its in zip(tensors(twin), tensors(head), strict=True):  # running statistics among them
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)
    (*mine, of_padded), (*its, of_x) = gradients(twin, logits, padded), gradients(head, expected, x)
    of_padded, of_x = (g if g.dim() == 3 else g.movedim(1, -1) for g in (of_padded, of_x))
    assert not of_padded[~mask].any()
    for one, other in zip([*mine, of_padded[mask]], [*its, of_x.reshape(-1, D)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@every_pooling_case
def test_samples_of_any_length(case):
    """In evaluation mode each gives the logits of its own positions."""
    head, x = make(case, torch.float64, batch=2)
    head.eval()
    mask = torch.ones(2, *(x.shape[2:] if x.dim() == 4 else x.shape[1:2]), dtype=torch.int64)
    mask[0].view(-1)[[0, 2]] = mask[1].view(-1)[1:] = 0
    positions = x.flatten(2).mT if x.dim() == 4 else x
    expected = torch.cat([head(row[real > 0][None]) for row, real in zip(positions, mask.flatten(1), strict=True)])
    for kind in (torch.int64, torch.bool, torch.uint8, torch.float16):
        torch.testing.assert_close(head(x, mask.to(kind)), expected, rtol=1e-11, atol=1e-12)
    labels = torch.tensor([2, 0])
    torch.testing.assert_close(head.loss(x, labels, mask=mask), F.cross_entropy(expected, labels))
    torch.testing.assert_close(head.freeze()(x, mask), expected)


@every_pooling_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_masks_in_half_precision(case, dtype, autocast):
    head, x = make(case, batch=12)
    twin = copy.deepcopy(head)
    padded, mask = with_padding(case, x)
    expected = twin(x)
    if not autocast:
        head, padded = head.to(dtype), padded.to(dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        logits = head(padded.requires_grad_(), mask)
    assert relative_error(logits, expected) < 0.2
    assert all(gradient.isfinite().all() for gradient in gradients(head, logits.float(), padded))


@every_pooling_path
def test_compiles_to_one_graph_with_a_mask(case):
    torch.compiler.reset()
    head, x = make(case, torch.float64)
    head.train("expansion" not in case)  # whose statistics in training are of as many rows as the mask says
    padded, mask = with_padding(case, x)
    compiled = torch.compile(copy.deepcopy(head), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(padded, mask), head(x))


@every_pooling_path
def test_exports_with_a_mask(case):
    head, x = make(case, torch.float64)
    head.eval()
    padded, mask = with_padding(case, x)
    dynamic = torch.export.Dim.DYNAMIC
    sizes = ({0: dynamic, 1: dynamic}, {0: dynamic, 1: dynamic})
    program = torch.export.export(head, (padded, mask), dynamic_shapes=sizes).module()
    for more in (3, 8):
        padded, mask = with_padding(case, x, more)
        torch.testing.assert_close(program(padded, mask), head(x))
    mask[1] = False
    assert program(padded, mask).isfinite().all()  # where nobody asks, as on a GPU


@every_pooling_case
def test_masks_that_fit_no_features_are_refused(case):
    head, x = make(case)
    sides = x.shape[2:] if x.dim() == 4 else x.shape[1:2]
    for wrong in [(4,), (3, *sides), (4, *sides, 1), (4, *sides[:-1], 9), (4, *sides[:-1], 1)]:
        with pytest.raises(ValueError, match=re.escape(f"mask of shape {(4, *sides)}; got {wrong}")):
            head(x, torch.ones(wrong))
    with pytest.raises(ValueError, match=re.escape(str((4, D)))):
        head(torch.randn(4, D), torch.ones(4))
    with pytest.raises(ValueError, match="pool=None"):
        create_head(**{**head.config, "pool": None})(torch.randn(4, 7, D), torch.ones(4, 7))
    empty = torch.ones(4, *sides)
    empty[2] = 0
    with pytest.raises(ValueError, match="sample 2"):
        head(x, empty)


@pytest.mark.parametrize("name", ["kernel", "cosine", "prototypes"])
def test_heads_that_do_not_pool_take_no_mask(name):
    head, x = create_head(name, D, C), torch.randn(4, 7, D)
    for given in (
        lambda: head(x, torch.ones(4, 7)),
        lambda: head.loss(x, torch.ones(4, 7).long(), mask=torch.ones(4, 7)),
    ):
        with pytest.raises(ValueError, match=r"\(4, 7, 5\) and pool=None"):
            given()


# --- losses -----------------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8])
def test_the_loss_is_the_cross_entropy_of_the_logits(case, kind):
    head, x = make(case, torch.float64, batch=6)
    head.eval()
    shape = (6,) if head.pools else (2, 3)
    x = x if head.pools else x.view(2, 3, D)
    labels = torch.randint(C, shape)
    exactly = -head(x).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    losses = head.loss(x, labels.to(kind), reduction="none")
    assert losses.shape == shape
    torch.testing.assert_close(losses, exactly)
    torch.testing.assert_close(head.loss(x, labels.to(kind)), exactly.mean())
    smooth = 0.9 * exactly.mean() - 0.1 * head(x).log_softmax(-1).mean()
    torch.testing.assert_close(head.loss(x, labels, label_smoothing=0.1), smooth)
    labels.view(-1)[1:3] = -100
    torch.testing.assert_close(head.loss(x, labels), exactly[labels >= 0].mean())


@every_case
def test_labels_that_fit_no_features_are_refused(case):
    head, x = make(case)
    wrong = [torch.zeros(7, dtype=torch.long), torch.zeros((4, C), dtype=torch.long), torch.zeros(4, dtype=torch.bool)]
    for labels in wrong:
        message = f"{type(head).__name__}.loss takes integer labels of shape (4,); got {tuple(labels.shape)} of "
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            head.loss(x, labels)
    with pytest.raises(ValueError, match=r"of torch\.float32: F\.cross_entropy takes probabilities"):
        head.loss(x, head(x).softmax(-1).detach())


# --- errors -----------------------------------------------------------------------------------------------------------


@every_case
def test_wrong_features_are_named(case):
    head, x = make(case)
    wrong = [x[..., :-1] if x.dim() < 4 else x[:, :-1], torch.randn(())]
    wrong += [x[:, :, 0, None, None, :]] if x.dim() == 4 else []
    for features in wrong:
        with pytest.raises(ValueError, match=rf"^{type(head).__name__} expects .*\b{D}\b") as error:
            head(features)
        assert str(error.value).endswith(f"; got {tuple(features.shape)}")
    with pytest.raises(TypeError, match=rf"^{type(head).__name__} expects floating-point features; got torch.int64$"):
        head(x.long())


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith(("maps", "tokens"))])
def test_no_positions_are_refused(case):
    head, _ = make(case)
    with pytest.raises(ValueError, match=r"expects one position or more; got \(3, 0, 5\)$"):
        head(torch.randn(3, 0, D))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "a", None])
@pytest.mark.parametrize("argument", ["in_features", "num_classes"])
def test_sizes_are_positive_integers(name, argument, size):
    sizes = {"in_features": D, "num_classes": C} | {argument: size}
    with pytest.raises(ValueError, match=rf"needs {argument} to be a positive integer; got {re.escape(repr(size))}$"):
        create_head(name, **sizes)


def test_numbers_of_numpy_and_torch_are_sizes_and_options_too():
    head = create_head("landmarks", np.int64(D), torch.tensor(C), landmarks=np.int64(7), scale=torch.tensor(0.5))
    assert json.loads(json.dumps(head.config))["landmarks"] == 7
    assert (head.in_features, head.num_classes, head.config["scale"], head.scale) == (D, C, 0.5, 0.5)


POSITIVE = [("temperature", 0), ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf"))]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("svm", {}, f"unknown head 'svm'; choose one of {', '.join(HEADS)}"),
        ("kernel", {"widht": 3}, "head 'kernel' has no option 'widht'; it takes degree, kernel, coefficients, "),
        ("expansion", {"degree": 3}, "head 'expansion' has no option 'degree'; it takes width, pool, scale"),
        ("linear", {"degree": 3}, "head 'linear' has no option 'degree'; it takes no options"),
        ("kernel", {"version": 2}, "the configuration has version 2; this kernelhead reads version 1"),
        ("kernel", {"kernel": "laplace"}, "KernelHead knows no kernel='laplace'; choose one of 'learned', 'cosine', "),
        ("kernel", {"coefficients": "tanh"}, "unknown coefficients 'tanh'; choose one of relu, "),
        (
            "prototypes",
            {"aggregate": "max"},
            "PrototypeHead knows no aggregate='max'; choose one of 'sum', 'logsumexp'",
        ),
        ("prototypes", {"prototypes": 0}, "PrototypeHead needs prototypes to be a positive integer; got 0"),
        ("kernel", {"degree": 0}, "KernelHead needs degree to be a positive integer; got 0"),
        ("kernel", {"degree": 2.0}, "KernelHead needs degree to be a positive integer; got 2.0"),
        ("landmarks", {"landmarks": 0}, "LandmarkHead needs landmarks to be a positive integer; got 0"),
        ("landmarks", {"scale": 0}, "LandmarkHead needs scale to be positive and finite; got 0"),
        ("landmarks", {"temperature": 0.5}, "head 'landmarks' has no option 'temperature'; it takes "),
        ("landmarks", {"pool": "mean"}, "LandmarkHead knows no pool='mean'; choose one of 'auto', None"),
        ("expansion", {"scale": "a"}, "ExpansionHead needs scale to be positive and finite; got 'a'"),
        ("attentive", {"queries": 0}, "AttentiveHead needs queries to be a positive integer; got 0"),
        *(("kernel", {key: value}, f"needs {key} to be positive and finite; got {value}") for key, value in POSITIVE),
        ("kernel", {"kernel": "rbf", "gamma": 0}, "KernelHead needs gamma to be positive and finite; got 0"),
        *(
            (
                "kernel",
                {"kernel": kernel, "coefficients": "softmax"},
                f"KernelHead with kernel='{kernel}' has one coeff",
            )
            for kernel in ("cosine", "polynomial", "rbf")
        ),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        create_head(name, D, C, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["linear", "second_order", "expansion", "attentive"])
def test_only_kernel_heads_are_described(name):
    with pytest.raises(ValueError, match="has no kernel to describe"):
        create_head(name, D, C).describe()
