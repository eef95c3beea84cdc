"""`kernelhead bench`."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kernelhead.cli._console import app, console, messages

if TYPE_CHECKING:
    from kernelhead.timing import Cost, Problem

DTYPES = ("float32", "bfloat16", "float16")
MOST = 2**24  # of anything


@app.command()
def bench(
    features: Annotated[int, typer.Option(min=1, max=MOST, help="Length of a feature vector.")] = 512,
    classes: Annotated[int, typer.Option(min=1, max=MOST, help="Number of classes.")] = 1000,
    batch: Annotated[int, typer.Option(min=2, max=MOST, help="Samples of a step.")] = 256,
    places: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Places of a feature map, for heads that pool them.", show_default=False),
    ] = None,
    landmarks: Annotated[int, typer.Option(min=1, max=MOST, help="Landmarks, and channels of the expansion.")] = 512,
    prototypes: Annotated[int, typer.Option(min=1, max=MOST, help="Prototypes a class.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, or by autocast bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="How long to measure.")] = 10.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what heads cost on this machine, beside a linear layer.

    Forward, loss and backward of a training step, inference, and what is kept for the backward pass; all in turn.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    import torch

    from kernelhead.results import environment, hardware_name
    from kernelhead.timing import Problem, measure
    from kernelhead.train.job import choose_device

    where = choose_device(device)
    problem = Problem(features, classes, batch, places, landmarks, prototypes)
    try:
        with messages.status("measuring"):
            costs = measure(problem, where, getattr(torch, dtype), seconds)
    except RuntimeError as error:  # a CPU's allocator has no error of its own
        if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
            raise
        raise MemoryError("heads of this size need more memory than there is here: make something smaller") from error
    if json_output:
        found = {**asdict(problem), "dtype": dtype, "device": where.type, "heads": [asdict(cost) for cost in costs]}
        print(json.dumps({**found, **environment()}, indent=1))
        return
    hardware = environment()["hardware"]
    used = hardware if where.type == "cuda" else {**hardware, "gpu": None}
    _show(problem, costs, f"{dtype}, {hardware_name(used)}, torch {torch.__version__}")


def _show(problem: "Problem", costs: "list[Cost]", where: str) -> None:
    from kernelhead.paper.table import Table
    from kernelhead.report.tables import show
    from kernelhead.timing import MOST_WEIGHTS

    peer = costs[0]
    columns = ["", "parameters", "training, ms", "ratio", "inference, ms", "ratio", "kept, MB"]
    rows = [
        [
            cost.head,
            f"{cost.parameters:,}",
            f"{cost.training_ms:.3f}",
            f"{cost.training_ms / peer.training_ms:.2f}",
            f"{cost.inference_ms:.3f}",
            f"{cost.inference_ms / peer.inference_ms:.2f}",
            f"{cost.kept_bytes / 1e6:.2f}",
        ]
        for cost in costs
    ]
    sizes = [problem.batch, *([] if problem.places is None else [problem.places]), problem.features]
    notes = [
        f"{' x '.join(map(str, sizes))} features, {problem.classes} classes, {where}. Medians; ratios are to the "
        f"{peer.head}{'' if problem.places is None else ' on the mean over places'}. Training is forward, loss and "
        "backward, kept is what autograd keeps in between; at inference kernel heads are frozen."
    ]
    if problem.places is not None and not problem.has_second_order:
        notes.append(f"Second-order pooling was left out: it would have more than {MOST_WEIGHTS:,} weights.")
    show(Table("bench", "What heads cost here", columns, rows, notes), console)
