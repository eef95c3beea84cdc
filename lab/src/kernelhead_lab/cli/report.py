"""`kernelhead-lab report`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kernelhead.cli._console import check_folder, console, messages, print_plain, say
from kernelhead_lab.cli._app import app

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    import plotly.graph_objects as go

    from kernelhead.tables import Table

QUICK = "quick"
TITLE = "Kernelized classification: the paper's tables, and ours"

RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of the result files.")]


@app.command()
def report(
    runs: RunsOption = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="Folder for tables and charts.", show_default="RUNS/report")] = None,
    fill: Annotated[
        list[Path] | None,
        typer.Option(help="Markdown file whose tables, between <!-- NAME --> and <!-- /NAME -->, are made again."),
    ] = None,
) -> None:
    """Make tables, charts and report.html again from the result files. Never trains."""
    if out is not None:
        check_folder(out)
    written = write_report(runs, out or runs / "report")
    if fill:
        from kernelhead.files import write_bytes
        from kernelhead_lab.report.fill import fill_tables

        for document in fill:
            try:
                text = document.read_bytes().decode()  # line ends as they are
                write_bytes(document, fill_tables(text, written).encode())
            except (OSError, ValueError) as error:
                raise ValueError(f"{document} was not filled: {error}") from error
            print_plain(f"Filled: {document}")


def write_report(runs: Path, out: Path, shown: tuple[str, ...] = ()) -> dict[str, "Table"]:
    """Write everything; print all tables, or those of the experiments called `shown`.

    Returns the tables by the names of their files.
    """
    from kernelhead.tables import show
    from kernelhead_lab.report.collect import collect
    from kernelhead_lab.report.page import Section, write_page

    report = collect(runs, shown)
    for sentence in report.warnings:
        say(sentence)
    if not report.made:
        quick = f" ({runs / QUICK} has those of quick runs)" if (runs / QUICK).is_dir() else ""
        raise FileNotFoundError(f"no results in {runs}{quick}; 'kernelhead-lab reproduce list' shows what can be run")
    titles = [each.section.table.title for each in report.made]
    sections = []
    for each in report.made:
        files = [file for name, table in each.tables.items() for file in _write(out / name, table)]
        charts = list(each.section.charts)
        if each.heads is not None:
            charts += _spheres(each.heads, out / f"{each.name}.png", files)
        if not shown or each.experiment in shown:
            show(each.section.table, console)
            print_plain(f"Written: {', '.join(map(str, files))}")
        title = each.section.table.title
        told_apart = f"{title}, {each.length}" if titles.count(title) > 1 else title
        sections.append(Section(replace(each.section.table, title=told_apart), charts))
        sections += [
            Section(table) for name, table in each.more.items() if name.endswith(("-tests", "-details", "-choices"))
        ]
    for sentence in report.hidden:
        print_plain(sentence)
    write_page(out / "report.html", TITLE, sections)
    print_plain(f"Written: {out / 'report.html'}")
    return report.tables


def _write(stem: Path, table: "Table") -> list[Path]:
    """Write a table as Markdown and as CSV."""
    from kernelhead.files import write_bytes
    from kernelhead_lab.report.text import to_csv, to_markdown

    files = {stem.with_name(f"{stem.name}.md"): to_markdown(table), stem.with_name(f"{stem.name}.csv"): to_csv(table)}
    for path, text in files.items():
        write_bytes(path, text.encode())
    return list(files)


def _spheres(heads: Path, png: Path, files: list[Path]) -> list["go.Figure"]:
    """Draw the classifiers on the sphere; without their trained heads, say why there is nothing."""
    from kernelhead.finetune.checkpoint import BrokenCheckpointError
    from kernelhead.finetune.results import BrokenResultError
    from kernelhead_lab.report.sphere import panels_of, sphere_figure, write_png

    try:
        with messages.status(f"drawing figures of {escape(heads.name)}"):
            panels, data = panels_of(heads)
            write_png(png, panels, data)
            files.append(png)
            return [sphere_figure(panels, data)]
    except (OSError, BrokenResultError, BrokenCheckpointError) as error:
        say(f"no figures: {error}")
        return []
