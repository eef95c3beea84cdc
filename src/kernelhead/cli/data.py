"""`kernelhead data list | get | verify`."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table as RichTable

from kernelhead.cli._console import app, console, print_plain
from kernelhead.cli._progress import steps_bar

data_app = typer.Typer(help="List, download and check data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DataSet = StrEnum("DataSet", ["cifar10", "cifar100", "pets", "cars"])
DataName = Annotated[DataSet, typer.Argument(help="The data set.")]


@data_app.command("list")
def data_list() -> None:
    """Show the data sets and whether they are here."""
    from kernelhead.finetune.cifar import data_folder
    from kernelhead.finetune.images import DATA_SETS, data_path

    listing = RichTable("data set", "classes", "train", "test", "file or folder", "here")
    for name, counts in DATA_SETS.items():
        path = data_path(name)
        listing.add_row(name, *map(str, counts), path.name, "yes" if path.exists() else "no")
    console.print(listing)
    print_plain(f"in {data_folder()}; KERNELHEAD_DATA names another folder")


@data_app.command("get")
def data_get(name: DataName) -> None:
    """Download a data set from its official source, unless it is here."""
    from kernelhead.finetune.images import list_images

    found = list_images(name)
    print_plain(f"{name} has {len(found.train)} training images and {len(found.test)} test images")


@data_app.command("verify")
def data_verify(name: DataName) -> None:
    """Check that a data set is complete and that its images can be read."""
    from kernelhead.finetune.cifar import data_folder
    from kernelhead.finetune.data import problems

    with steps_bar() as progress:
        found = problems(name, progress)
    if found:
        raise ValueError(f"{name} in {data_folder()} is not the official one: {'; '.join(found)}")
    print_plain(f"{name} in {data_folder()} is complete")
