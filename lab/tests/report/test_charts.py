"""Charts as figures of plotly: what they show, and what they leave off."""

import itertools

import numpy as np
import pytest

from kernelhead import kernels
from kernelhead_lab.report.charts import (
    COLORS,
    coefficients_chart,
    curves_chart,
    dot_chart,
    kernel_chart,
    line_chart,
)


def test_lines_show_their_points_with_gaps():
    chart = line_chart("T", "x", "y", {"a": ([1, 2, 3], [3.0, None, float("inf")]), "b": ([2], [5.0])})
    first, second = chart.data
    assert (list(first.x), list(first.y), first.name) == ([1, 2, 3], [3.0, None, None], "a")
    assert (list(second.x), list(second.y), second.name) == ([2], [5.0], "b")
    assert (chart.layout.title.text, chart.layout.xaxis.title.text, chart.layout.yaxis.title.text) == ("T", "x", "y")


def test_lines_of_one_order_look_alike_and_the_papers_line_has_the_colour_of_ours():
    order = ["SM", "LIN", "Ours"]
    whole = line_chart("T", "x", "y", {label: ([1], [1.0]) for label in order}, order=order)
    part = line_chart("T", "x", "y", {"Ours": ([1], [1.0]), "Ours (paper)": ([1], [2.0])}, order=order)
    ours, paper = part.data
    assert ours.line == whole.data[2].line
    assert (paper.line.color, paper.line.dash, ours.line.dash) == (ours.line.color, "dash", "solid")
    many = line_chart("T", "x", "y", {str(i): ([1], [1.0]) for i in range(20)})
    assert len({(line.line.color, line.line.dash) for line in many.data}) == 20


def test_a_diverged_run_does_not_flatten_the_others():
    lines = {"good": (range(9), [4.0 - i / 3 for i in range(9)]), "bad": (range(9), [4.0, 5.0, 1e30, *[None] * 6])}
    low, high = line_chart("T", "epoch", "loss", lines).layout.yaxis.range
    assert low < 4 / 3
    assert 4 < high < 100
    for values in ([1.0, 90.0, 2.0], [50.0, 51.0], [], [0.0, 0.0], [1e6, 2e6]):
        assert line_chart("T", "x", "y", {"a": (range(len(values)), values)}).layout.yaxis.range is None


def test_curves_count_epochs_from_one():
    chart = curves_chart("Loss", {"a": [3.0, None, 1.0], "b": []}, "loss")
    assert [list(line.x) for line in chart.data] == [[1, 2, 3], []]
    assert list(chart.data[0].y) == [3.0, None, 1.0]


def test_kernels_go_from_zero_to_one():
    alphas = {"ours": [7.0, 5.0, 0.5, 1.0, 0.0, 2.5], "rbf": kernels.rbf_coefficients(1.0).tolist()}
    ours, rbf = kernel_chart("k", alphas).data
    t = np.array(ours.x)
    assert (t[0], t[-1]) == (-1, 1)
    np.testing.assert_allclose(ours.y, (t + 2.5 * t**3) / 3.5, atol=1e-12)  # a_{-2}, a_{-1} and a_0 left out
    np.testing.assert_allclose(rbf.y, (np.exp(2 * t) - 1) / (np.exp(2) - 1), atol=1e-8)


@pytest.mark.parametrize(
    "alpha", [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0], [0, 0, 1.0, -3.0], [], [0, 0, 0, float("nan")], [0, 0, 0, float("inf")]]
)
def test_a_kernel_without_a_scale_is_an_empty_line(alpha):
    dead, alive = kernel_chart("k", {"dead": alpha, "alive": [0, 0, 0, 1.0]}).data
    assert set(dead.y) == {None}
    assert None not in alive.y


def test_coefficients_have_their_names():
    chart = coefficients_chart("a", {"ours": [1.0] * 10, "polynomial": [2.0] * 13})
    ours, polynomial = chart.data
    assert list(polynomial.x)[:3] == ["a₋₂", "a₋₁", "a₀"]
    assert list(polynomial.x)[-1] == "a₁₀"
    assert list(ours.x) == list(polynomial.x)[:10]
    assert list(ours.y) == [1.0] * 10
    assert not coefficients_chart("a", {}).data


def test_dots_stand_beside_their_rows():
    chart = dot_chart("T", "accuracy", ["one", "two"], {"a": [1.0, None], "b": [3.0, 4.0]})
    assert [(list(line.x), list(line.y)) for line in chart.data] == [
        ([1.0, None], ["one", "two"]),
        ([3.0, 4.0], ["one", "two"]),
    ]
    assert chart.layout.yaxis.autorange == "reversed"


# Machado, Oliveira and Fernandes (2009): what the three kinds of dichromats see, in linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x, y, z = np.cbrt(XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_stay_apart_for_colour_blind_readers(kind):
    seen = [lab(np.array(BLINDNESS[kind]) @ linear(color)) for color in COLORS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


def test_colours_stand_out_from_the_page():
    for color in COLORS:
        assert 1.05 / ((XYZ @ linear(color))[1] + 0.05) > 2.5
