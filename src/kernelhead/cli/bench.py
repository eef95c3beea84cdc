"""`kernelhead bench`."""

from functools import partial
from typing import Annotated

import typer

from kernelhead.cli._console import app, console, messages

DTYPES = ("float32", "bfloat16", "float16")
MAX_SIZE = 2**24
Size = partial(typer.Option, min=1, max=MAX_SIZE)


@app.command()
def bench(
    features: Annotated[int, Size(help="Length of a feature vector.")] = 512,
    classes: Annotated[int, Size(help="Number of classes.")] = 1000,
    batch: Annotated[int, Size(min=2, help="Samples per step.")] = 256,
    positions: Annotated[
        int | None, Size(help="Positions of a feature map, for pooling heads.", show_default="vectors")
    ] = None,
    landmarks: Annotated[int, Size(help="Landmarks; channels of the expansion.")] = 2048,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 or float16 by autocast.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds to measure for.")] = 10.0,
) -> None:
    """Measure the cost of heads on this machine, beside a linear layer.

    All heads take turns. A training step is forward, loss and backward; memory is what autograd keeps in between.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    import torch

    from kernelhead.finetune.distributed import choose_device
    from kernelhead.tables import Table, show
    from kernelhead.timing import make_heads, measure

    where = choose_device(device)
    with messages.status("measuring"):
        heads = make_heads(features, classes, positions is not None, landmarks)
        drawn = torch.randn(batch, features, *((positions, 1) if positions else ()), device=where)
        costs = measure(heads, drawn, getattr(torch, dtype), seconds)
    rows = []
    for cost in costs:
        times = [(cost[key], cost[key] / costs[0][key]) for key in ("training_ms", "inference_ms")]
        cells = [text for value, ratio in times for text in (f"{value:.3f}", f"{ratio:.2f}")]
        rows.append([cost["head"], f"{cost['parameters']:,}", *cells, f"{cost['kept_bytes'] / 1e6:.2f}"])
    hardware = torch.cuda.get_device_name() if where.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    shape = " x ".join(str(size) for size in (batch, positions, features) if size is not None)
    peer = "linear on the mean over positions" if positions else "linear"
    notes = [
        f"{shape} features, {classes} classes, {dtype}, {hardware}, torch {torch.__version__}. Medians; "
        f"ratios are to {peer}. Kept: for the backward pass. At inference heads are frozen."
    ]
    columns = ["head", "parameters", "training, ms", "ratio", "inference, ms", "ratio", "kept, MB"]
    show(Table("bench", "Cost of heads", columns, rows, notes), console)
