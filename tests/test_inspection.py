"""`head.describe()` and `kernelhead inspect`."""

import json
import re
import sys

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
    t = np.linspace(-1, 1, 201)
    np.testing.assert_allclose(found.t, t, atol=1e-12)
    np.testing.assert_allclose(found.k, 1 + 2 * t + 0.5 * t**3, atol=1e-12)


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
        head.weight.copy_(torch.eye(D)[torch.arange(12) % 6])  # equal points, but of other classes
        head.weight[7] = 5 * head.weight[6] + 0.01  # class 2, prototypes 0 and 1
    found = head.describe()
    points = found.points
    assert (points.kind, points.count) == ("prototypes", 12)
    assert points.collapsed == (6, 7)
    assert "Collapsed (another has a cosine above 0.99): 2: 6, 7." in str(found)


def test_the_closest_of_many_class_weights():
    head = KernelHead(8, 2100)  # more than are compared at once
    with torch.no_grad():
        head.weight[2050] = -head.weight[17]
        head.weight[2051] = 0.5 * head.weight[17]
    points = head.describe().points
    assert points.kind == "class weights"
    assert {17, 2051} <= set(points.collapsed)
    assert 2050 not in points.collapsed


def test_one_point_is_closest_to_none():
    assert KernelHead(D, 1).describe().points.collapsed == ()


@pytest.mark.parametrize("batched", [False, True])
def test_nearest_prototypes_are_counted(batched):
    head = PrototypeHead(D, 2, prototypes=3)
    with torch.no_grad():
        head.weight.copy_(torch.eye(D))
    x = 7 * torch.eye(D)[[0, 0, 0, 1, 4, 4]] + 0.1
    points = head.describe(x.split(4) if batched else x).points
    assert points.nearest == (3, 1, 0, 0, 2, 0)
    assert str(head.describe(x)).endswith("Nearest in the RKHS to 6 samples: 3 of 6 to none.")


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


# --- text and charts --------------------------------------------------------------------------------------------------


def test_a_straight_line_is_drawn_straight():
    drawn = text.draw([-1.0, 0.0, 1.0]).splitlines()
    assert len(drawn) == 1 + text.HEIGHT + 2
    assert drawn[1].startswith(" 1 │")
    assert drawn[text.HEIGHT].startswith("-1 │")
    dots = np.array([[character == "•" for character in f"{line[4:]:<{text.WIDTH}}"] for line in drawn[1:-2]])
    assert (dots.sum(0) == 1).all()
    expected = (1 - np.arange(text.WIDTH) / (text.WIDTH - 1)) * (text.HEIGHT - 1)
    assert np.abs(dots.argmax(0) - expected).max() < 0.51


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
    assert (found["kernel"], found["config"]) == ("learned", head.config)


def traces(path):
    """The data of every chart of a page."""
    text = path.read_text().split("</head>")[1]
    return [
        json.JSONDecoder().raw_decode(text[match.end() :].lstrip())[0]
        for match in re.finditer(r'Plotly\.newPlot\(\s*"[^"]+",', text)
    ]


def test_the_page_has_a_chart_for_points(tmp_path):
    description = LandmarkHead(D, C, landmarks=70).describe(torch.randn(9, D))
    write_plot(tmp_path / "wide.html", description)
    write_plot(tmp_path / "new" / "narrow.html", CosineHead(D, C).describe())
    (kernel,), (terms,), (points,) = traces(tmp_path / "wide.html")
    assert (kernel["type"], terms["type"], points["type"]) == ("scatter", "bar", "bar")
    assert terms["x"] == [term.name for term in description.terms]
    assert (len(points["x"]), sum(points["y"])) == (70, 9)
    assert len(traces(tmp_path / "new" / "narrow.html")) == 2
    with pytest.raises(ValueError, match=r"a.png does not end in .html; name it a.html"):
        write_plot(tmp_path / "a.png", KernelHead(D, C).describe())


def test_without_plotly_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match=r"^a report needs plotly.*; install it with pip install 'kernelhead"):
        write_plot(tmp_path / "a.html", KernelHead(D, C).describe())
    assert not (tmp_path / "a.html").exists()


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
            data="images",
            backbone="network_to_inspect:small",
            head=head,
            head_options=options,
            image_size=16,
            test_size=16,
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
    assert sum(found["points"]["nearest"]) == 8
    assert found["classes"] == ["cat", "dog", "ü"]


def test_inspect_prints_and_draws(save, tmp_path):
    result = invoke("inspect", save("cosine") / "model.safetensors", "--plot", tmp_path / "kernel.html")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "CosineHead(in_features=8, num_classes=3" in result.stdout
    assert f"Drawn to {tmp_path / 'kernel.html'}" in result.stderr.replace("\n", "")
    assert (tmp_path / "kernel.html").exists()


def test_wrong_arguments(save, tmp_path):
    folder = save("linear")
    assert "LinearHead has no kernel to describe" in str(invoke("inspect", folder).exception)
    assert "there is no trained classifier in" in str(invoke("inspect", tmp_path / "none").exception)
    (tmp_path / "broken.safetensors").write_bytes(b"no checkpoint")
    assert "is not a readable safetensors file" in str(invoke("inspect", tmp_path / "broken.safetensors").exception)
