"""`kernelhead inspect`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kernelhead.cli._console import app, say
from kernelhead.cli._progress import steps_bar
from kernelhead.cli.train import head_options


@app.command()
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a training, its model.safetensors, or a state dict.")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Count also what images use: a data set, a folder, or a packed file.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it to this file too, such as kernel.png.", show_default=False)
    ] = None,
    head_option: Annotated[
        list[str] | None,
        typer.Option(
            help="Of a state dict, which does not say how its head was made: NAME=VALUE, such as coefficients=relu.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; for the images.")] = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a kernel head has learned.

    Its kernel, its coefficients and what each is worth, whether it is positive definite, how its weights are used.
    """
    from kernelhead.heads import KernelClassifier
    from kernelhead.inspection import describe
    from kernelhead.inspection.weights import head_of_weights
    from kernelhead.train.features import feature_batches
    from kernelhead.train.job import choose_device
    from kernelhead.train.saved import is_foreign, load_classifier

    if checkpoint.is_file() and is_foreign(checkpoint):
        if data is not None:
            raise ValueError(
                f"{checkpoint} has weights alone, so no images can go through its network: leave out --data"
            )
        description = describe(head_of_weights(checkpoint, head_options(head_option) or {}))
    else:
        saved = load_classifier(checkpoint)
        if head_option is not None:
            raise ValueError(f"{checkpoint} says itself how its head was made: leave out --head-option")
        head = saved.model.head
        if not isinstance(head, KernelClassifier):
            raise ValueError(f"the head {saved.run.head!r} has no kernel to show; the heads kernel and linear have one")
        with steps_bar("nothing was changed") as progress:
            features = None if data is None else feature_batches(saved, data, choose_device(device), progress)
            description = describe(head, features, classes=saved.classes)
    if json_output:
        print(json.dumps(description.as_dict(), indent=1))
    else:
        text = str(description)
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))  # dots are question marks where there are no dots
    if plot is not None:
        from kernelhead.inspection.plot import write_plot

        write_plot(plot, description)
        say(f"Drawn to {plot}", style="")
