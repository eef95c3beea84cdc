"""`head.describe()` and `kernelhead inspect`."""

import builtins
import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from kernelhead import CosineHead, KernelHead, LandmarkHead, PrototypeHead
from kernelhead.cli import app
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of, save_classifier
from kernelhead.finetune.spec import TrainSpec
from kernelhead.inspection import text
from kernelhead.inspection.plot import write_plot

D, C = 6, 4


def head_with(raw, **options):
    """A head with these raw coefficients, of the degree that they have."""
    head = KernelHead(D, C, degree=len(raw) - 3, **{"coefficients": "relu", **options})
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


@pytest.mark.parametrize(
    ("powers", "effective"),
    [([1, 0, 0], 1), ([1, 0.005, 0.004], 1), ([1, 0.02, 0.004], 2), ([0, 0, 3], 3), ([0, 0, 0], 0)],
)
def test_effective_degree(powers, effective):
    assert head_with([1.0, 1.0, 1.0, *map(float, powers)]).describe().effective_degree == effective


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PrototypeHead, {"prototypes": 3, "aggregate": "logsumexp"}),
        (PrototypeHead, {"prototypes": 3}),
        (LandmarkHead, {"landmarks": 5}),
        (KernelHead, {"temperature": 0.2}),
    ],
)
def test_no_logit_changes_by_more_than_the_cost(kind, options):
    head = kind(D, C, **options).double()
    head(torch.randn(50, D).double())
    head.eval()
    x = torch.cat([torch.randn(100, D).double(), head.weight.detach(), -head.weight.detach()])
    before = head(x)
    costs = [term.cost for term in head.describe().terms]
    for index, cost in enumerate(costs):
        cut = head.freeze()
        cut.alpha[index] = 0
        change = (cut(x) - before).abs().max().item()
        assert change <= cost * (1 + 1e-9)
        if options in ({"temperature": 0.2}, {"prototypes": 3}):
            assert change >= cost / 4  # the bound is not an empty one


def test_only_relu_coefficients_die():
    raw = [1.0, 1.0, 1.0, -0.5, -2.0]
    assert head_with(raw).describe().dead == ["a_1", "a_2"]
    for name in ("softplus", "sigmoid", "none"):
        assert head_with(raw, coefficients=name).describe().dead == []


def test_a_fixed_kernel_has_one_raw_parameter():
    head = CosineHead(D, C)
    with torch.no_grad():
        head.raw_alpha.fill_(2.5)
    found = head.describe()
    assert [term.value for term in found.terms] == [0, 0, 0, 2.5]
    assert {term.raw for term in found.terms} == {2.5}
    assert "The kernel is fixed except for its scale" in str(found)
    with torch.no_grad():
        head.raw_alpha.fill_(-2.5)
    assert head.describe().dead == ["a_1"]


def test_a_diverged_head_is_refused():
    with pytest.raises(ValueError, match=r"numbers that are not finite, as its run diverged; train it anew$"):
        head_with([1.0, 1.0, 1.0, float("nan")]).describe()


# --- positive definite ------------------------------------------------------------------------------------------------


def test_non_negative_coefficients_are_positive_definite_everywhere():
    found = head_with([0.0, 0.5, 0.1, 1.0, 2.0]).describe()
    assert found.negative == []
    assert "Positive definite on every sphere: no coefficient is negative" in str(found)


def test_a_negative_coefficient_is_named():
    found = head_with([0.0, 0.0, 1.0, -1.0, 0.2], coefficients="none").describe()
    assert found.negative == ["a_1"]
    assert "Not positive definite on every sphere: a_1 negative" in str(found)


# --- points -----------------------------------------------------------------------------------------------------------


def test_collapsed_prototypes_are_named():
    head = PrototypeHead(D, C, prototypes=3)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D)[torch.arange(12) % 6])
        head.weight[7] = 5 * head.weight[6] + 0.01  # class 2, prototypes 0 and 1
    found = head.describe(classes=["a", "b", "c", "d"])
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
    head = KernelHead(8, 2100)  # more than are compared at once
    with torch.no_grad():
        head.weight[2050] = -head.weight[17]
        head.weight[2051] = 0.5 * head.weight[17]
    points = head.describe().points
    assert (points.kind, points.pairs) == ("class weights", 2100 * 2099 // 2)
    assert (points.closest.first, points.closest.second) == (17, 2051)
    assert points.closest.cosine == pytest.approx(1)


def test_one_point_has_no_pair():
    assert KernelHead(D, 1).describe().points.closest is None


@pytest.mark.parametrize("batched", [False, True])
def test_nearest_prototypes_are_counted(batched):
    head = PrototypeHead(D, 2, prototypes=3)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D))
    x = 7 * torch.eye(D)[[0, 0, 0, 1, 4, 4]] + 0.1
    points = head.describe(x.split(4) if batched else x).points
    assert points.samples == 6
    assert points.nearest == (3, 1, 0, 0, 2, 0)
    assert points.unused == [2, 3, 5]
    said = str(head.describe(x))
    assert "Nearest in the RKHS to 6 samples: 3 of 6 to none." in said
    assert said.endswith("\n█▆▃···")


def test_nearest_of_maps_is_by_the_kernel_mean():
    head = LandmarkHead(D, C, landmarks=D)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D))
    maps = torch.eye(D)[[2, 2, 5]].t().reshape(1, D, 3, 1)
    assert head.describe(maps).points.nearest == (0, 0, 1, 0, 0, 0)
    assert "averages k over positions" in str(head.describe())
    assert head.describe(torch.eye(D)[[1]]).points.nearest == (0, 1, 0, 0, 0, 0)
    with pytest.raises(ValueError, match=r"LandmarkHead expects a map"):
        head.describe(torch.randn(3, D + 1, 2, 2))


def test_use_of_landmarks():
    head = LandmarkHead(D, 2, landmarks=4)
    with torch.no_grad():
        head.mixing.copy_(torch.tensor([[3.0, 0.0, 0.1, 1.0], [4.0, 0.0, 0.0, -1.0]]))
    found = head.describe()
    squares = np.array([25, 0, 0.01, 2])
    np.testing.assert_allclose(found.points.mixing, squares / squares.sum(), rtol=1e-6)
    assert found.points.kind == "landmarks"
    assert found.largest_logit is None
    assert "Shares of landmarks in mixing, largest first.\n█▁▁·" in str(found)


def test_names_of_classes_must_fit():
    with pytest.raises(ValueError, match=r"^classes needs 4 names, one per class of the head; got 1$"):
        KernelHead(D, C).describe(classes=["a"])


# --- text and charts --------------------------------------------------------------------------------------------------


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
    head = LandmarkHead(D, C, landmarks=3)
    found = json.loads(json.dumps(head.describe(torch.randn(5, D)).as_dict(), allow_nan=False))
    assert [term["name"] for term in found["terms"]][:3] == ["a_-2", "a_-1", "a_0"]
    assert sum(found["points"]["nearest"]) == 5
    assert (found["dead"], found["negative"]) == ([], [])
    assert {"first", "second", "cosine"} == set(found["points"]["closest"])
    assert (found["kernel"], found["config"]) == ("learned", head.config)


def blue_pixels(file):
    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return pixels.shape[1], (np.abs(pixels - [0x1A, 0x5A, 0xA0]).sum(2) < 30).sum()


def test_the_chart_has_a_panel_for_points(tmp_path):
    write_plot(tmp_path / "wide.png", LandmarkHead(D, C, landmarks=70).describe())
    write_plot(tmp_path / "new" / "narrow.png", CosineHead(D, C).describe())
    (wide, _), (narrow, blue) = (blue_pixels(tmp_path / name) for name in ("wide.png", "new/narrow.png"))
    assert wide > 1.3 * narrow
    assert blue > 5000  # the curve, and the bar of a_1
    write_plot(tmp_path / "k.svg", KernelHead(D, C).describe(torch.randn(9, D)))
    assert (tmp_path / "k.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(ValueError, match="xyz"):
        write_plot(tmp_path / "a.xyz", KernelHead(D, C).describe())


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ModuleNotFoundError, match=r"^a chart needs matplotlib; .* 'kernelhead\[plot\]'$"):
        write_plot(tmp_path / "a.png", KernelHead(D, C).describe())
    assert not (tmp_path / "a.png").exists()


# --- kernelhead inspect -----------------------------------------------------------------------------------------------

NETWORK = """
from torch import nn

def small():
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 5))
"""


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def save(tmp_path, monkeypatch):
    """A function that saves a classifier of three classes with this head, and returns its folder."""
    (tmp_path / "network_to_inspect.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)

    def made(head, **options):
        spec = TrainSpec(
            data="images", backbone="network_to_inspect:small", head=head, head_options=options, image_size=16
        )
        model = create_classifier(spec, 3).eval()
        expected = Input(16, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
        saved = SavedClassifier(model, head_of(model), ["cat", "dog", "ü"], spec, expected)
        save_classifier(tmp_path / "run" / "model.safetensors", saved)
        return tmp_path / "run"

    return made


@pytest.mark.parametrize(("head", "options"), [("prototypes", {"prototypes": 2}), ("landmarks", {"landmarks": 5})])
def test_inspect_counts_over_images(head, options, save, tmp_path, rng):
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(0, 255, size=(20, 18, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.png")
    result = invoke("inspect", save(head, **options), "--data", tmp_path / "images", "--device", "cpu", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found["points"]["samples"] == 8
    assert sum(found["points"]["nearest"]) == 8
    assert found["classes"] == ["cat", "dog", "ü"]


def test_inspect_prints_and_draws(save, tmp_path):
    result = invoke("inspect", save("cosine") / "model.safetensors", "--plot", tmp_path / "kernel.png")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "CosineHead(in_features=8, num_classes=3" in result.stdout
    assert f"Drawn to {tmp_path / 'kernel.png'}" in result.stderr.replace("\n", "")
    assert (tmp_path / "kernel.png").exists()


def test_wrong_arguments(save, tmp_path):
    folder = save("linear")
    assert "LinearHead has no kernel to describe" in str(invoke("inspect", folder).exception)
    assert "there is no trained classifier in" in str(invoke("inspect", tmp_path / "none").exception)
    (tmp_path / "broken.safetensors").write_bytes(b"no checkpoint")
    assert "is not a readable safetensors file" in str(invoke("inspect", tmp_path / "broken.safetensors").exception)
