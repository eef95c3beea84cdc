"""Classifiers on the sphere S^2, the paper's Figure 1: a PNG, and spheres that turn under the mouse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import torch
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from kernelhead import metrics
from kernelhead.files import replacing
from kernelhead.finetune.results import load_result
from kernelhead.page import CLEAR
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables import synthetic
from kernelhead_lab.tables.synthetic_data import Draw, bayes_posterior, draw

Array = NDArray[np.float64]

REGIONS = ((0.66, 0.79, 0.92), (0.98, 0.82, 0.66))  # blue and orange, light for regions
POINTS = ((0.10, 0.33, 0.62), (0.80, 0.38, 0.02))  # and dark for the samples on them
VIEW = np.array([0.75, 0.55, 0.37])  # from where the sphere is seen: both class means in front
TITLE = "Classifiers on the sphere"
MOST_POINTS = 3000


@dataclass(frozen=True)
class Panel:
    """One classifier: `probability` of orange at points (n, 3) of the sphere -> (n,)."""

    title: str
    probability: Callable[[Array], Array]


def panels_of(place: Path) -> tuple[list[Panel], Draw]:
    """Return the classifiers of the first draw, from the heads that the runs in `place` left behind.

    A method trained under both protocols shows its tuned head.
    """
    seed = 0
    protocol_of = {
        method.name: protocol
        for method in synthetic.METHODS
        for protocol in synthetic.PROTOCOLS
        if synthetic.weights_path(place, protocol, method.name, seed).exists()
    }
    if not protocol_of:
        raise FileNotFoundError(f"there are no trained heads of the first draw in {place}")
    bayes_result = load_result(synthetic.result_path(place, synthetic.EXACT, synthetic.BAYES, seed), LabSpec)
    data = draw(seed, per_class=bayes_result.extra["per_class"])
    x_test, y_test = torch.from_numpy(data.x_test).float(), torch.from_numpy(data.y_test)
    panels = []
    for method in synthetic.METHODS:
        if method.name in protocol_of:
            head = synthetic.trained_head(place, protocol_of[method.name], method, seed)
            accuracy = metrics.accuracy(head(x_test).detach(), y_test)
            panels.append(Panel(f"{method.label}: {accuracy:.1f}\u00a0%", _probability(head)))
    bayes = Panel(
        f"Bayes optimal: {bayes_result.accuracy:.1f}\u00a0%", lambda u: bayes_posterior(u, data.centers)[:, 1]
    )
    return [*panels, bayes], data


def _probability(head: torch.nn.Module) -> Callable[[Array], Array]:
    def probability(u: Array) -> Array:
        with torch.no_grad():
            values: Array = torch.softmax(head(torch.from_numpy(u).float()).double(), 1)[:, 1].numpy()
        return np.nan_to_num(values)

    return probability


def view_rotation(view: Array = VIEW) -> Array:
    """Return the rotation (3, 3) whose rows are right, up and towards the eye, for an eye in direction `view`."""
    towards = view / np.linalg.norm(view)
    right = np.cross([0.0, 0.0, 1.0], towards)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(towards, right), towards])


def _disc(panel: Panel, rotation: Array, size: int) -> Array:
    """Return the sphere as a far eye sees it: RGBA (size, size, 4), regions shaded, transparent outside."""
    axis = (np.arange(size) + 0.5) / size * 2 - 1
    right, up = np.meshgrid(axis, -axis)
    inside = right**2 + up**2 <= 1
    depth = np.sqrt(np.maximum(0, 1 - right**2 - up**2))
    seen = np.stack([right[inside], up[inside], depth[inside]], axis=1)
    orange = panel.probability(seen @ rotation) > 0.5
    shade = 0.80 + 0.20 * (seen @ np.array([-0.35, 0.5, 0.79])).clip(0)
    image = np.zeros((size, size, 4))
    image[inside, :3] = np.where(orange[:, None], REGIONS[1], REGIONS[0]) * shade[:, None]
    image[inside, 3] = 1
    # Two by two supersampling: smooth edges of the regions and of the disc.
    result: Array = image.reshape(size // 2, 2, size // 2, 2, 4).mean((1, 3))
    return result


def write_png(path: Path, panels: Sequence[Panel], data: Draw) -> None:
    """Write panels side by side, each with the training samples on the visible half."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rotation = view_rotation()
    projected = data.x_train @ rotation.T
    figure = Figure(figsize=(4.2 * len(panels), 4.9), dpi=110, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    for index, panel in enumerate(panels):
        axes = figure.add_axes((index / len(panels) + 0.01, 0.03, 1 / len(panels) - 0.02, 0.82))
        axes.imshow(_disc(panel, rotation, 920), extent=(-1, 1, -1, 1), interpolation="bilinear")
        for label, color in enumerate(POINTS):
            shown = (data.y_train == label) & (projected[:, 2] > 0)
            axes.scatter(projected[shown, 0], projected[shown, 1], s=1.6, color=color, alpha=0.55, linewidths=0)
        axes.set_title(panel.title, fontsize=12)
        axes.set_aspect("equal")
        axes.axis("off")
    figure.suptitle(TITLE, fontsize=13, y=0.985)
    with replacing(path) as file:
        canvas.print_figure(file, format="png")


def sphere_figure(panels: Sequence[Panel], data: Draw) -> go.Figure:
    """Return a sphere per classifier, coloured by the class that it predicts, with the training samples."""
    latitude, longitude = np.linspace(-np.pi / 2, np.pi / 2, 91), np.linspace(-np.pi, np.pi, 181)
    lon, lat = np.meshgrid(longitude, latitude)
    grid = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)])
    x, y, z = grid.astype(np.float32)
    every = max(1, len(data.x_train) // MOST_POINTS)
    points, labels = data.x_train[::every] * 1.005, data.y_train[::every]
    scenes = [[{"type": "scene"}] * len(panels)]
    figure = make_subplots(1, len(panels), specs=scenes, subplot_titles=[panel.title for panel in panels])
    for column, panel in enumerate(panels, start=1):
        orange = (panel.probability(grid.reshape(3, -1).T) > 0.5).reshape(lon.shape).astype(np.uint8)
        scale = [[0.0, _css(REGIONS[0])], [1.0, _css(REGIONS[1])]]
        surface = go.Surface(x=x, y=y, z=z, surfacecolor=orange, colorscale=scale, cmin=0, cmax=1, showscale=False)
        surface.update(hoverinfo="skip", lighting={"ambient": 0.9, "diffuse": 0.15, "specular": 0})
        figure.add_trace(surface, 1, column)
        for label, color in enumerate(POINTS):
            own = points[labels == label].astype(np.float32).T
            marker = {"size": 1.5, "color": _css(color)}
            figure.add_trace(
                go.Scatter3d(x=own[0], y=own[1], z=own[2], mode="markers", marker=marker, hoverinfo="skip"), 1, column
            )
    hidden = {axis: {"visible": False} for axis in ("xaxis", "yaxis", "zaxis")}
    eye = dict(zip("xyz", (1.15 * VIEW / np.linalg.norm(VIEW)).tolist(), strict=True))
    figure.update_scenes(
        **hidden,
        camera={"eye": eye, "projection": {"type": "orthographic"}},
        aspectmode="manual",
        bgcolor=CLEAR["paper_bgcolor"],
        aspectratio=dict.fromkeys("xyz", 1.2),
    )
    figure.update_annotations(font_size=12)
    figure.update_layout(title=TITLE, showlegend=False, height=360, margin={"l": 0, "r": 0, "t": 80, "b": 0}, **CLEAR)
    return figure


def _css(color: tuple[float, float, float]) -> str:
    return f"rgb({', '.join(str(round(255 * channel)) for channel in color)})"
