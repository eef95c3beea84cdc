"""Pictures of classifiers on the sphere S^2: a PNG, and an HTML page with spheres that turn under the mouse."""

import base64
import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernelhead.results import write_bytes

Array = NDArray[np.float64]

REGIONS = ((0.66, 0.79, 0.92), (0.98, 0.82, 0.66))  # blue and orange, light for regions
POINTS = ((0.10, 0.33, 0.62), (0.80, 0.38, 0.02))  # and dark for the samples on them
VIEW = np.array([0.75, 0.55, 0.37])  # from where the sphere is seen: both class means in front


@dataclass(frozen=True)
class Panel:
    """One classifier: `probability` of orange at points (n, 3) of the sphere -> (n,)."""

    title: str
    probability: Callable[[Array], Array]


def view_rotation(view: Array = VIEW) -> Array:
    """Rotation (3, 3) whose rows are right, up and towards the eye, for an eye in direction `view` and z upwards."""
    towards = view / np.linalg.norm(view)
    right = np.cross([0.0, 0.0, 1.0], towards)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(towards, right), towards])


def _disc(panel: Panel, rotation: Array, size: int) -> Array:
    """The sphere as seen by a far eye: RGBA (size, size, 4), regions shaded, transparent outside."""
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


def write_png(path: Path, panels: Sequence[Panel], x: Array, y: NDArray[np.int64], title: str) -> None:
    """Panels side by side, each with the samples on the visible half. x (n, 3), y (n,) of 0 for blue, 1 for orange."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rotation = view_rotation()
    projected = x @ rotation.T
    figure = Figure(figsize=(4.2 * len(panels), 4.9), dpi=110, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    for index, panel in enumerate(panels):
        axes = figure.add_axes((index / len(panels) + 0.01, 0.03, 1 / len(panels) - 0.02, 0.82))
        axes.imshow(_disc(panel, rotation, 920), extent=(-1, 1, -1, 1), interpolation="bilinear")
        for label, color in enumerate(POINTS):
            shown = (y == label) & (projected[:, 2] > 0)
            axes.scatter(projected[shown, 0], projected[shown, 1], s=1.6, color=color, alpha=0.55, linewidths=0)
        axes.set_title(panel.title, fontsize=12)
        axes.set_aspect("equal")
        axes.axis("off")
    figure.suptitle(title, fontsize=13, y=0.985)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_figure(path)


def write_html(path: Path, panels: Sequence[Panel], x: Array, y: NDArray[np.int64], title: str, caption: str) -> None:
    """One file that needs no network: the spheres turn together under the mouse, a finger or the arrow keys."""
    heights, turns = 180, 360
    latitude = np.pi * ((np.arange(heights) + 0.5) / heights - 0.5)
    longitude = 2 * np.pi * (np.arange(turns) + 0.5) / turns - np.pi
    lon, lat = np.meshgrid(longitude, latitude)
    grid = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=2).reshape(-1, 3)

    def encode(array: NDArray[np.generic]) -> str:
        return base64.b64encode(array.tobytes()).decode()

    every = max(1, len(x) // 3000)
    data = {
        "panels": [
            {"title": panel.title, "map": encode(np.round(255 * panel.probability(grid)).astype(np.uint8))}
            for panel in panels
        ],
        "width": turns,
        "height": heights,
        "points": encode(np.round(32767 * x[::every]).astype("<i2")),
        "labels": encode(y[::every].astype(np.uint8)),
        "regions": [[round(255 * c) for c in color] for color in REGIONS],
        "colors": ["#" + "".join(f"{round(255 * c):02x}" for c in color) for color in POINTS],
        "view": view_rotation().tolist(),
    }
    page = resources.files("kernelhead.report").joinpath("sphere.html").read_text(encoding="utf-8")
    for key, value in {"TITLE": html.escape(title), "CAPTION": html.escape(caption), "DATA": json.dumps(data)}.items():
        page = page.replace(f"/*{key}*/", value)
    write_bytes(path, page.encode())
