"""`kernelhead export`."""

from pathlib import Path
from typing import Annotated

import typer

from kernelhead.cli._console import app, print_plain, say


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a training, or its model.safetensors.")
    ],
    format: Annotated[str, typer.Option(help="onnx, or pt2, PyTorch's own.")] = "onnx",
    part: Annotated[str, typer.Option(help="network, or head, which takes features.")] = "network",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; beside the checkpoint by default.", show_default=False)
    ] = None,
) -> None:
    """Write a trained classifier as a file that runs without kernelhead, and check it.

    It takes batches of any size. Its metadata say what its classes are and how a picture becomes its input.
    """
    from kernelhead.train.export import default_path, export_classifier
    from kernelhead.train.saved import load_classifier

    saved = load_classifier(checkpoint)
    path = out or default_path(checkpoint, format, part)
    if path.exists() and path.suffix == ".safetensors":
        raise FileExistsError(f"{path} is a checkpoint; give the {format} file another name")
    exported = export_classifier(saved, path, format=format, part=part)
    runner = "onnxruntime" if format == "onnx" else "PyTorch"
    print_plain(f"Written {exported.path}, {exported.bytes:,} bytes")
    if exported.difference is None:
        say("The file was not run to check it: that needs onnxruntime; pip install 'kernelhead[export]' brings it")
    else:
        print_plain(f"Run by {runner} on random input, its logits differ by at most {exported.difference:.1e}")
