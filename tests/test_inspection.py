"""`head.describe()` and `kernelhead inspect`."""

import builtins
import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from scipy.special import eval_gegenbauer
from typer.testing import CliRunner

from kernelhead import KernelClassifier, create_head
from kernelhead.backbones import Input
from kernelhead.cli import app
from kernelhead.inspection import describe, text
from kernelhead.inspection.definite import harmonic_coefficients
from kernelhead.inspection.weights import head_of_weights
from kernelhead.train.run import Run
from kernelhead.train.saved import SavedClassifier, save_classifier

D, C = 6, 4
ROOT = Path(__file__).parent.parent


def head_with(raw, **options):
    """A head with these raw coefficients, of the degree that they have."""
    head = KernelClassifier(D, C, degree=len(raw) - 3, **options)
    with torch.no_grad():
        head.raw_alpha.copy_(torch.tensor(raw))
    return head


# --- the kernel -------------------------------------------------------------------------------------------------------


def test_terms_and_their_costs():
    found = head_with([0.25, -1.0, 1.0, 2.0, 0.0, 0.5], temperature=0.5).describe()
    assert [term.name for term in found.terms] == ["a_-2", "a_-1", "a_0", "a_1", "a_2", "a_3"]
    assert [term.raw for term in found.terms] == [0.25, -1, 1, 2, 0, 0.5]
    assert [term.value for term in found.terms] == [0.25, 0, 1, 2, 0, 0.5]
    assert [term.cost for term in found.terms] == [0.5, 0, 2, 4, 0, 1]
    assert found.dead == ["a_-1", "a_2"]
    assert [found.cost_beyond(m) for m in (0, 1, 2, 3)] == [5, 1, 1, 0]
    assert found.largest_logit == pytest.approx(7.5)
    t = np.linspace(-1, 1, 201)
    np.testing.assert_allclose(found.t, t, atol=1e-12)
    np.testing.assert_allclose(found.k, 1 + 2 * t + 0.5 * t**3, atol=1e-12)
    assert found.mean_degree == pytest.approx((2 * 1 + 0.5 * 3) / 2.5)


@pytest.mark.parametrize(
    ("powers", "effective"),
    [([1, 0, 0], 1), ([1, 0.005, 0.004], 1), ([1, 0.02, 0.004], 2), ([0, 0, 3], 3), ([0, 0, 0], 0)],
)
def test_effective_degree(powers, effective):
    assert head_with([1.0, 1.0, 1.0, *map(float, powers)]).describe().effective_degree == effective


@pytest.mark.parametrize(
    "options", [{"prototypes": 3}, {"prototypes": 3, "aggregate": "sum"}, {"landmarks": 5}, {"temperature": 0.2}]
)
def test_no_logit_changes_by_more_than_the_cost(options):
    head = KernelClassifier(D, C, **options).double()
    head(torch.randn(50, D).double())
    head.eval()
    x = torch.cat([torch.randn(100, D).double(), head.weight.detach(), -head.weight.detach()])
    before = head(x)
    costs = [term.cost for term in head.describe().terms]
    for index, cost in enumerate(costs):
        cut = head.freeze()
        cut.alpha[index] = 0
        if cut.constant is not None and index == 2:
            cut.constant -= head.alpha[2].detach() / head.temperature
        change = (cut(x) - before).abs().max().item()
        assert change <= cost * (1 + 1e-9)
        if options in ({"temperature": 0.2}, {"prototypes": 3, "aggregate": "sum"}):
            assert change >= cost / 4  # the bound is not an empty one


def test_only_relu_coefficients_die():
    raw = [1.0, 1.0, 1.0, -0.5, -2.0]
    assert head_with(raw).describe().dead == ["a_1", "a_2"]
    for name in ("softplus", "sigmoid", "none"):
        assert head_with(raw, coefficients=name).describe().dead == []


def test_a_fixed_kernel_has_one_raw_parameter():
    head = create_head("linear", D, C)
    with torch.no_grad():
        head.raw_alpha.fill_(2.5)
    found = head.describe()
    assert [term.value for term in found.terms] == [0, 0, 0, 2.5]
    assert {term.raw for term in found.terms} == {2.5}
    assert "fixed but for its scale" in str(found)
    with torch.no_grad():
        head.raw_alpha.fill_(-2.5)
    assert head.describe().dead == ["a_1"]


def test_a_diverged_head_is_refused():
    with pytest.raises(ValueError, match=r"coefficients that are not finite: its training diverged$"):
        head_with([1.0, 1.0, 1.0, float("nan")]).describe()


# --- positive definite ------------------------------------------------------------------------------------------------


def test_non_negative_coefficients_are_positive_definite_everywhere():
    found = head_with([0.0, 0.5, 0.1, 1.0, 2.0]).describe().definiteness
    assert found.everywhere
    assert found.here
    assert found.negative == ()
    assert found.gram_points == 256
    assert found.smallest_eigenvalue > -1e-9


def test_a_negative_coefficient_is_named_and_refuted_by_eigenvalues():
    found = head_with([0.0, 0.0, 1.0, -1.0, 0.2], coefficients="none").describe()
    assert found.definiteness.negative == ("a_1",)
    assert not found.definiteness.everywhere
    assert not found.definiteness.here
    assert found.definiteness.smallest_eigenvalue < -1
    assert "Not positive definite on every sphere: a_1 is negative" in str(found)


@pytest.mark.parametrize(("quartic", "here"), [(-0.3, True), (-3.0, False)])
def test_a_negative_coefficient_may_do_no_harm_on_one_sphere(quartic, here):
    """The harmonic of degree 4 has a part of t^4 and one of t^6, which makes up for a small negative one."""
    powers = [1.0, 0.0, 1.0, 0.0, quartic, 0.0, 1.0]
    found = head_with([0.0, 0.0, *powers], coefficients="none").describe().definiteness
    assert not found.everywhere
    assert found.negative == ("a_4",)
    assert found.here is here
    assert (min(quadrature(powers, D)) > -1e-7) is here
    ends = head_with([0.0, -0.1, *powers[:3], 0.0, 0.0], coefficients="none").describe().definiteness
    assert not ends.here


def quadrature(powers, dimension):
    """Harmonic coefficients another way: integrals against Gegenbauer polynomials, on a fine grid of angles."""
    angle = (np.arange(200_000) + 0.5) * np.pi / 200_000
    t, density = np.cos(angle), np.sin(angle) ** (dimension - 2)
    values = np.polynomial.polynomial.polyval(t, powers)
    order = dimension / 2 - 1
    result = []
    for n in range(len(powers)):
        harmonic = eval_gegenbauer(n, order, t) / eval_gegenbauer(n, order, 1.0)
        result.append(float((values * harmonic * density).sum() / (harmonic**2 * density).sum()))
    return result


@pytest.mark.parametrize("dimension", [3, 6, 64])
def test_harmonic_coefficients_are_the_integrals(dimension, rng):
    powers = rng.normal(size=8)
    np.testing.assert_allclose(harmonic_coefficients(powers, dimension), quadrature(powers, dimension), atol=1e-7)


def test_harmonic_coefficients_on_circle_and_two_points():
    np.testing.assert_allclose(harmonic_coefficients([0, 0, 0, 1], 2), [0, 0.75, 0, 0.25], atol=1e-15)  # cos^3
    np.testing.assert_allclose(harmonic_coefficients([1, 2, 3, 4], 1), [4, 6, 0, 0], atol=1e-15)  # t^2 = 1


# --- points -----------------------------------------------------------------------------------------------------------


def test_collapsed_prototypes_are_named():
    head = KernelClassifier(D, C, prototypes=3)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D)[torch.arange(12) % 6])
        head.weight[7] = 5 * head.weight[6] + 0.01  # class 2, prototypes 0 and 1
    found = describe(head, classes=["a", "b", "c", "d"])
    points = found.points
    assert (points.kind, points.count, points.per_class, points.pairs) == ("prototypes", 12, 3, 12)
    (pair,) = points.collapsed
    assert (pair.first, pair.second) == (6, 7)
    first, second = head.weight.detach().double().numpy()[6:8]
    assert pair.cosine == pytest.approx(first @ second / np.linalg.norm(first) / np.linalg.norm(second), abs=1e-12)
    assert points.closest == pair
    assert "1 of 12 pairs: c: 0 and 1." in str(found)
    assert "class 2: 0 and 1" in str(head.describe())


def test_the_closest_of_many_class_weights():
    head = KernelClassifier(8, 2100)  # more than are compared at once
    with torch.no_grad():
        head.weight[2050] = -head.weight[17]
        head.weight[2051] = 0.5 * head.weight[17]
    points = head.describe().points
    assert (points.kind, points.pairs) == ("class weights", 2100 * 2099 // 2)
    assert (points.closest.first, points.closest.second) == (17, 2051)
    assert points.closest.cosine == pytest.approx(1)


def test_one_point_has_no_pair():
    assert KernelClassifier(D, 1).describe().points.closest is None


@pytest.mark.parametrize("batched", [False, True])
def test_nearest_prototypes_are_counted(batched):
    head = KernelClassifier(D, 2, prototypes=3)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D))
    x = 7 * torch.eye(D)[[0, 0, 0, 1, 4, 4]] + 0.1
    points = head.describe(x.split(4) if batched else x).points
    assert points.samples == 6
    assert points.nearest == (3, 1, 0, 0, 2, 0)
    assert points.unused == [2, 3, 5]
    said = str(head.describe(x))
    effective = (np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25))) + 1) / 2
    assert f"3 of 6 are the nearest of none. A class that has samples uses {effective:.1f} of its 3 in effect." in said


def test_nearest_of_maps_is_by_the_kernel_mean():
    head = KernelClassifier(D, D, pool="rkhs")
    with torch.no_grad():
        head.weight.copy_(torch.eye(D))
    maps = torch.eye(D)[[2, 2, 5]].t().reshape(1, D, 3, 1)
    assert head.describe(maps).points.nearest == (0, 0, 1, 0, 0, 0)
    assert "averages k over the places" in str(head.describe())
    with pytest.raises(ValueError, match=r"KernelClassifier expects a map"):
        head.describe(torch.randn(3, D))


def test_nearest_of_maps_with_windows():
    head = KernelClassifier(D, D, pool="rkhs", window=2)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D).repeat(1, 4))
    maps = torch.eye(D)[[2, 2, 2, 2, 5, 5]].t().reshape(1, D, 3, 2)
    assert head.describe(maps).points.nearest == (0, 0, 1, 0, 0, 0)
    assert "averages k over all windows of 2 x 2 places of a map" in str(head.describe())


def test_use_of_landmarks():
    head = KernelClassifier(D, 2, landmarks=4)
    with torch.no_grad():
        head.mixing.copy_(torch.tensor([[3.0, 0.0, 0.1, 1.0], [4.0, 0.0, 0.0, -1.0]]))
    found = head.describe()
    squares = np.array([25, 0, 0.01, 2])
    np.testing.assert_allclose(found.points.mixing, squares / squares.sum(), rtol=1e-6)
    assert found.points.kind == "landmarks"
    assert found.largest_logit is None
    assert "1 hold half of it, 2 hold 99 %.\n█▁▁·" in str(found)


def test_names_of_classes_must_fit():
    with pytest.raises(ValueError, match=r"^the head has 4 classes, got 1 names$"):
        describe(KernelClassifier(D, C), classes=["a"])


# --- text and pictures ------------------------------------------------------------------------------------------------


def test_a_straight_line_is_drawn_straight():
    drawn = text.draw([-1.0, 0.0, 1.0]).splitlines()
    assert len(drawn) == 1 + text.HEIGHT + 2
    assert drawn[1].startswith(" 1 │")
    assert drawn[text.HEIGHT].startswith("-1 │")
    dots = np.zeros((4 * text.HEIGHT, 2 * text.WIDTH), dtype=bool)
    places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]  # of the bits of a Braille character
    for row, line in enumerate(drawn[1 : text.HEIGHT + 1]):
        for column, character in enumerate(line[4:]):
            bits = 0 if character == " " else ord(character) - 0x2800
            for bit, (down, right) in enumerate(places):
                dots[4 * row + down, 2 * column + right] = bits >> bit & 1
    columns = np.arange(2 * text.WIDTH)
    assert dots.any(0).all()
    expected = (1 - columns / columns[-1]) * (4 * text.HEIGHT - 1)
    assert np.abs(dots.argmax(0) - expected).max() <= 1


def test_a_steep_curve_has_no_gaps_and_a_flat_one_is_drawn():
    steep = text.draw([0.0, 0.0, 100.0, 0.0, 0.0])
    assert all(line[4:].strip(" │") for line in steep.splitlines()[1 : text.HEIGHT + 1])
    assert text.draw([2.0, 2.0]).count("2") >= 2


def test_the_text_says_it_all():
    said = str(head_with([0.5, 0.25, 1.0, 2.0, -1.0]).describe())
    assert "At t = 1 the kernel jumps by 0.75, at t = -1 by 0.25" in said
    assert "Dead terms: a_2." in said
    assert "Positive definite on every sphere" in said
    assert max(len(line) for line in said.splitlines()) < 160


def test_as_dict_is_json():
    head = KernelClassifier(D, C, landmarks=3)
    found = json.loads(json.dumps(head.describe(torch.randn(5, D)).as_dict(), allow_nan=False))
    assert [term["name"] for term in found["terms"]][:3] == ["a_-2", "a_-1", "a_0"]
    assert sum(found["points"]["nearest"]) == 5
    assert found["definiteness"]["everywhere"] is True


# --- kernelhead inspect -----------------------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def save(path, head, **options):
    run = Run(backbone="cifar_resnet8", head=head, learning_rate=0.1, head_options=options)
    expected = Input(32, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    saved = SavedClassifier(run.create(3).eval(), run, ["cat", "dog", "ü"], expected, {})
    save_classifier(path / "model.safetensors", saved)
    return path


@pytest.fixture
def pictures(tmp_path, rng):
    for name in ("cat", "mouse"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(0, 255, size=(40, 36, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{index}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize("options", [{"prototypes": 2}, {"pool": "rkhs", "landmarks": 5}])
def test_inspect_counts_over_pictures(options, tmp_path, pictures):
    folder = save(tmp_path, "kernel", **options)
    result = invoke("inspect", folder, "--data", pictures, "--device", "cpu", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found["points"]["samples"] == 8
    assert sum(found["points"]["nearest"]) == 8
    assert found["classes"] == ["cat", "dog", "ü"]


@pytest.mark.parametrize("name", ["kernel.png", "kernel.svg"])
def test_inspect_prints_and_draws(name, tmp_path):
    result = invoke("inspect", save(tmp_path, "linear") / "model.safetensors", "--plot", tmp_path / "new" / name)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "LinearHead(in_features=64, num_classes=3" in result.stdout
    assert f"Drawn to {tmp_path / 'new' / name}" in result.stderr.replace("\n", "")
    if name.endswith("png"):
        with Image.open(tmp_path / "new" / name) as image:
            pixels = np.asarray(image.convert("RGB"))
        blue = (np.abs(pixels.astype(int) - [0x1A, 0x5A, 0xA0]).sum(2) < 30).sum()
        assert blue > 5000  # the curve, and the bar of a_1
    else:
        assert (tmp_path / "new" / name).read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("nearest", [False, True])
def test_the_plot_has_a_panel_for_points(nearest, tmp_path):
    from kernelhead.inspection.plot import write_plot

    wide, narrow = KernelClassifier(D, C, landmarks=70), KernelClassifier(D, C)
    write_plot(tmp_path / "wide.png", wide.describe(torch.randn(9, D) if nearest else None))
    write_plot(tmp_path / "narrow.png", narrow.describe())
    widths = []
    for name in ("wide", "narrow"):
        with Image.open(tmp_path / f"{name}.png") as image:
            widths.append(image.width)
    assert widths[0] > 1.3 * widths[1]


@pytest.mark.parametrize("head", ["softmax", "second_order", "expansion"])
def test_other_heads_have_no_kernel_to_show(head, tmp_path):
    result = invoke("inspect", save(tmp_path, head))
    assert result.exit_code == 1
    sentence = f"the head '{head}' has no kernel to show; the heads kernel and linear have one"
    assert str(result.exception) == sentence


def test_wrong_arguments(tmp_path, monkeypatch):
    folder = save(tmp_path, "kernel")
    assert "there is no trained classifier in" in str(invoke("inspect", tmp_path / "none").exception)
    (tmp_path / "broken.safetensors").write_bytes(b"no checkpoint")
    assert "is not a readable checkpoint" in str(invoke("inspect", tmp_path / "broken.safetensors").exception)
    assert "there is no data set, folder or file 'none'" in str(invoke("inspect", folder, "--data", "none").exception)
    assert str(invoke("inspect", folder, "--plot", "a.xyz").exception).endswith("a name such as a.png is")
    original = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    error = str(invoke("inspect", folder, "--plot", tmp_path / "a.png").exception)
    assert error == "a plot needs matplotlib; pip install 'kernelhead[plot]' brings it"
    assert not (tmp_path / "a.png").exists()


# --- weights that somebody saved --------------------------------------------------------------------------------------


def sigmoid(raw):
    return 1 / (1 + np.exp(-raw))


@pytest.mark.parametrize("kind", ["safetensors", "torch", "nested"])
@pytest.mark.parametrize("name", ["", "fc."])
def test_a_state_dict_is_described_as_told(kind, name, tmp_path, rng):
    head = KernelClassifier(D, C, degree=4, coefficients="sigmoid", prototypes=2)
    raw = rng.normal(size=7)
    with torch.no_grad():
        head.raw_alpha.copy_(torch.from_numpy(raw))
    state = {f"{name}{key}": tensor for key, tensor in head.state_dict().items()}
    if name:
        state["conv.weight"] = torch.ones(2, 3)
    path = tmp_path / "own"
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == "nested" else state, path)
    options = ["--head-option", "coefficients=sigmoid", "--head-option", "prototypes=2"]
    result = invoke("inspect", path, *options, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert [term["value"] for term in found["terms"]] == pytest.approx(sigmoid(raw), rel=1e-6)
    assert found["head"] == repr(head)
    assert found == json.loads(json.dumps(head.describe().as_dict()))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"landmarks": 7}, {}),
        ({"landmarks": 7, "standardize": False}, {}),
        ({"kernel": "rbf", "gamma": 2.0}, {"kernel": "rbf", "gamma": 2.0}),
        ({"coefficients": "softmax", "temperature": 0.5}, {"coefficients": "softmax", "temperature": 0.5}),
        ({"pool": "rkhs", "degree": 2}, {"pool": "rkhs"}),
        ({"pool": "rkhs", "window": 2, "landmarks": 7}, {"pool": "rkhs", "window": 2}),
    ],
)
def test_sizes_are_found_and_the_rest_is_told(made, told, tmp_path):
    head = KernelClassifier(D, C, **made)
    torch.save(head.state_dict(), tmp_path / "own.pt")
    assert repr(head_of_weights(tmp_path / "own.pt", {"coefficients": "relu", **told})) == repr(head)


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ({}, [], "own.pt was not written by kernelhead train, and does not say how its coefficients come from raw_"),
        ({}, ["prototypes=3", "coefficients=relu"], "own.pt holds another head than the options say"),
        ({}, ["prototypes=a", "coefficients=relu"], "needs prototypes to be a positive integer, got 'a'"),
        ({}, ["coefficients=tanh"], "unknown coefficients 'tanh'; choose one of relu"),
        ({}, ["colour=red", "coefficients=relu"], "head 'kernel' has no option 'colour'"),
        ({"kernel": "rbf"}, ["coefficients=relu"], "own.pt holds another head than the options say"),
        ({"kernel": "rbf"}, ["kernel=rbf", "gamma=2", "coefficients=relu"], "holds another"),
        ({}, ["window=4", "pool=rkhs", "coefficients=relu"], "the options say: 6 features are no window=4"),
    ],
)
def test_a_state_dict_that_is_not_as_told(made, options, message, tmp_path):
    torch.save(KernelClassifier(D, 4, **made).state_dict(), tmp_path / "own.pt")
    given = [word for option in options for word in ("--head-option", option)]
    error = invoke("inspect", tmp_path / "own.pt", *given).exception
    assert isinstance(error, ValueError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_files_without_a_head_to_show(tmp_path):
    def error(content, *options):
        torch.save(content, tmp_path / "own.pt")
        return str(invoke("inspect", tmp_path / "own.pt", *options).exception)

    state = KernelClassifier(D, C).state_dict()
    assert "holds no kernel head; describe() of a head" in error({"fc.weight": torch.ones(2, 3)})
    both = {f"{name}.{key}": tensor for name in ("a", "b") for key, tensor in state.items()}
    assert "holds 2 kernel heads (a, b), and one can be shown" in error(both)
    assert "holds a list and no state dict" in error([1, 2])
    assert "is no state dict that can be read safely" in error(KernelClassifier(D, C))  # a pickle of anything
    assert "has weights alone, so no images can go through" in error(state, "--data", "cifar10")
    state["weight"][0, 0] = math.nan
    assert "weights that are not finite" in error(state, "--head-option", "coefficients=relu")
    ours = invoke("inspect", save(tmp_path, "kernel"), "--head-option", "coefficients=relu")
    assert str(ours.exception).endswith("says itself how its head was made: leave out --head-option")
    missing = invoke("inspect", tmp_path / "none.pt", "--head-option", "coefficients=relu")
    assert str(missing.exception).startswith("there is no trained classifier in")


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "inspect_head.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "Prototypes: 10, 5 a class." in said
    accuracies = [float(line.split("accuracy ")[1].split(" %")[0]) for line in said.splitlines() if "accuracy" in line]
    assert len(accuracies) == 3
    assert min(accuracies) > 90
