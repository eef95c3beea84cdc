"""`kernelhead compare`."""

import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from kernelhead.cli._console import about, app, check_folder, console, messages, print_plain, say
from kernelhead.cli._progress import steps_bar

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.sklearn.comparison import Comparison

USUAL_LABELS = "array y or labels; column label or the last"
USUAL_BASELINES = "logistic,svm,mlp,knn,boosting, and lightgbm where it is installed"


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="Features and labels: .npz, .csv or .tsv (or .gz), .parquet, or .npy.")],
    labels_file: Annotated[Path | None, typer.Argument(help="Labels as .npy, with .npy features.")] = None,
    features: Annotated[
        str | None, typer.Option(help="Array of features in an .npz file.", show_default="x, X or features")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Array or column of labels.", show_default=USUAL_LABELS)] = None,
    baselines: Annotated[
        str | None,
        typer.Option("--with", help="Classifiers to compare with, separated by commas.", show_default=USUAL_BASELINES),
    ] = None,
    folds: Annotated[int, typer.Option(min=2, help="Number of folds of the cross-validation.")] = 5,
    seed: Annotated[int, typer.Option(help="Random seed of folds and classifiers.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for compare.json and kernel.html, a chart of the learned kernel.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say whether a kernel head helps on feature vectors.

    Cross-validates `KernelHeadClassifier` and other classifiers on the same folds.
    """
    if out is not None:
        check_folder(out)
    from kernelhead.files import write_bytes
    from kernelhead.inspection.plot import write_plot
    from kernelhead.sklearn import KernelHeadClassifier
    from kernelhead.sklearn.compare import compare as cross_validate
    from kernelhead.sklearn.features import load_features
    from kernelhead.tables import show

    X, y, notes = load_features(file, labels_file, features=features, label=label)
    for note in notes:
        say(note)
    found: Comparison | None = None  # so far

    def done(so_far: "Comparison") -> None:
        nonlocal found
        found, one = so_far, so_far.results[-1]
        if not messages.is_terminal:
            say(f"{one.label}: {fmean(one.accuracy):.2f} % in {sum(one.fit_seconds):.1f} s", style="")

    names = None if baselines is None else baselines.replace(",", " ").split()
    try:
        with steps_bar("what was measured until then is shown") as progress, about(file):
            cross_validate(X, y, baselines=names, folds=folds, seed=seed, progress=progress, done=done)
    finally:
        if found is not None and json_output:
            print(json.dumps(found.to_dict(), indent=1))
        elif found is not None:
            show(found.table(), console)
            print_plain(found.verdict())
    if out is not None and found is not None:
        write_bytes(out / "compare.json", (json.dumps(found.to_dict(), indent=1) + "\n").encode())
        try:
            fitted = KernelHeadClassifier(random_state=seed).fit(X, y.ravel())
            write_plot(out / "kernel.html", fitted.head_.describe())
        except (ModuleNotFoundError, ValueError) as error:  # the table, which is there, says what else failed
            say(f"no plot of the kernel: {error}")
