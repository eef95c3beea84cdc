"""`kernelhead compare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelhead.cli._console import app, check_folder, console, messages, print_plain, say
from kernelhead.cli._progress import steps_bar

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.comparison import Comparison


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="Features and labels: .npz, .npy, .csv, .tsv (or .gz) or .parquet.")],
    labels_file: Annotated[Path | None, typer.Argument(help="Labels, .npy, if the features are.")] = None,
    features: Annotated[
        str | None, typer.Option(help="Array of features in an .npz file; x, X or features unless given.")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label", "--labels", help="Array of labels, y or labels unless given; or column, label or else the last."
        ),
    ] = None,
    heads: Annotated[str | None, typer.Option(help="From kernel,layer,prototypes; all unless given.")] = None,
    baselines: Annotated[str | None, typer.Option(help="From logistic,svm,mlp,knn; all unless given.")] = None,
    folds: Annotated[int, typer.Option(min=2, help="Of the cross-validation.")] = 5,
    seed: Annotated[int, typer.Option(help="Of folds and classifiers.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for compare.json and kernel.png, the kernel that was learned.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a kernel head helps on feature vectors.

    Cross-validates kernel heads and scikit-learn's classifiers on the same folds.
    """
    if out is not None:
        check_folder(out)
    from kernelhead.data.features import load_features

    X, y, notes = load_features(file, labels_file, features=features, label=label)
    for note in notes:
        say(note)
    from kernelhead import compare as comparing

    latest: list[Comparison] = []

    def done(so_far: "Comparison") -> None:
        latest[:] = [so_far]
        if not messages.is_terminal:
            one = so_far.results[-1]
            mean = sum(one.accuracy) / len(one.accuracy)
            say(f"{one.label}: {mean:.2f} % in {sum(one.fit_seconds):.1f} s", style="")

    try:
        with steps_bar("what was measured until then is shown") as progress:
            found = comparing.compare(
                X,
                y,
                heads=_names(heads),
                baselines=_names(baselines),
                folds=folds,
                seed=seed,
                progress=progress,
                done=done,
            )
    except typer.Exit:
        for part in latest:
            _show(part, json_output)
        raise
    _show(found, json_output)
    if out is not None:
        from kernelhead.results import write_bytes

        write_bytes(out / "compare.json", (json.dumps(found.to_dict(), indent=1) + "\n").encode())
        try:
            comparing.plot_kernel(X, y, out / "kernel.png", seed)
        except ModuleNotFoundError as error:
            say(f"no picture of the kernel, since {error.name} is missing; pip install 'kernelhead[plot]' brings it")
        except ValueError as error:  # the table, which is there, says of what else failed
            say(f"no picture of the kernel: {error}")


def _show(found: "Comparison", json_output: bool) -> None:
    if json_output:
        print(json.dumps(found.to_dict(), indent=1))
        return
    from kernelhead.report.tables import show

    show(found.table(), console)
    print_plain(found.verdict())
