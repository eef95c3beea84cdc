"""Which pictures belong to which table."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kernelhead import metrics
from kernelhead.data.synthetic import bayes_posterior, draw
from kernelhead.paper import synthetic
from kernelhead.report.sphere import Array, Panel, write_html, write_png
from kernelhead.results import load_result


def synthetic_figures(place: Path, page: Path, png: Path) -> None:
    """Figure 1 for the first draw, as HTML and as PNG, from the heads that the runs in `place` left behind.

    Of a method trained under both protocols the tuned one is shown.
    """
    seed = 0
    protocol_of = {
        method.name: protocol
        for method in synthetic.METHODS
        for protocol in synthetic.PROTOCOLS
        if synthetic.weights_path(place, protocol, method.name, seed).exists()
    }
    if not protocol_of:
        raise FileNotFoundError(f"no trained heads of the first draw in {place}")
    bayes_result = load_result(synthetic.result_path(place, "exact", "bayes", seed))
    data = draw(seed, per_class=bayes_result["config"]["per_class"])
    x_test, y_test = torch.from_numpy(data.x_test).float(), torch.from_numpy(data.y_test)

    panels = []
    for method in synthetic.METHODS:
        if method.name in protocol_of:
            head = synthetic.trained_head(place, protocol_of[method.name], method, seed)
            accuracy = metrics.accuracy(head(x_test).detach(), y_test)
            panels.append(Panel(f"{method.label}: {accuracy:.1f}\u00a0%", _probability(head)))
    bayes = bayes_result["accuracy"]
    panels.append(Panel(f"Bayes optimal: {bayes:.1f}\u00a0%", lambda u: bayes_posterior(u, data.centers)[:, 1]))

    title = "What each classifier learned on the sphere"
    caption = (
        "Two classes, ten clusters each (the paper's Appendix A, one draw). Regions: the class a classifier predicts. "
        "Percentages: test accuracy. A softmax classifier can only cut the sphere by a plane; the learned kernel cuts "
        "it by the great circle between its class weights and curves beside it, prototypes or landmarks by nearly any "
        "curve."
    )
    write_html(page, panels, data.x_train, data.y_train, title, caption)
    write_png(png, panels, data.x_train, data.y_train, title)


def _probability(head: torch.nn.Module) -> Callable[[Array], Array]:
    def probability(u: Array) -> Array:
        with torch.no_grad():
            values: Array = torch.softmax(head(torch.from_numpy(u).float()).double(), 1)[:, 1].numpy()
        return np.nan_to_num(values)

    return probability
