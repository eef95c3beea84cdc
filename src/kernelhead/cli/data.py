"""`kernelhead data list | get | verify | pack | clean`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as RichTable
from rich.text import Text

from kernelhead.cli._console import app, console, print_plain, say
from kernelhead.cli._progress import steps_bar

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from kernelhead.data.packed import PackedImages
    from kernelhead.data.packed_folders import PackedFolder

data_app = typer.Typer(help="Data sets: where they are, and getting and checking them.", no_args_is_help=True)
app.add_typer(data_app, name="data")


DataName = Annotated[str, typer.Argument(metavar="NAME", help="cifar10, cifar100, pets or cars.")]
DataShortSide = Annotated[
    int | None, typer.Option("--short-side", min=1, help="Of pets and cars: short side to pack to. [default: 480]")
]


@data_app.command("list")
def data_list() -> None:
    """Show the data sets and whether they are here, and which folders of pictures were packed."""
    from kernelhead.data import cifar, large
    from kernelhead.data.packed_folders import packed_folders, packed_place

    listing = RichTable()
    for column in ("data set", "classes", "split", "images", "file", "here"):
        listing.add_column(column)

    def row(name: str, classes: int, split: str, images: str, path: Path) -> None:
        size = _readable(path.stat().st_size) if path.exists() else "no"
        listing.add_row(name, str(classes), split, images, path.name, size)

    for name, classes in cifar.CLASSES.items():
        row(name, classes, "train, test", "50000, 10000", cifar.cifar_path(name))
    for name, one in large.SETS.items():
        for split, images in one.images.items():
            for path in large.packed_files(name, split):
                row(name, one.num_classes, split, str(images), path)
    console.print(listing)
    print_plain(f"in {cifar.data_folder()}; KERNELHEAD_DATA names another folder")
    packed = packed_folders()
    if packed:
        _show_folders(packed)
        hint = "'kernelhead data clean' shows those that are of no use any more, and --yes removes them"
        print_plain(f"in {packed_place()}; {hint}")


@data_app.command("get")
def data_get(name: DataName, short_side: DataShortSide = None) -> None:
    """Download a data set from its official source, check it, and keep it in the fast local form."""
    from kernelhead.data import cifar, large

    if name in large.SETS:
        with steps_bar() as progress:
            splits = large.get(name, short_side or large.SHORT_SIDE, progress)
        for packed in splits.values():
            _show_packed(packed)
        return
    path = _cifar_path(name, short_side)
    print_plain(f"{path} is already here" if path.exists() else f"made {cifar.download_cifar(name)}")


@data_app.command("verify")
def data_verify(name: DataName, short_side: DataShortSide = None) -> None:
    """Check that a data set is complete and unharmed."""
    from kernelhead.data import cifar, large

    if name in large.SETS:
        with steps_bar() as progress:
            found = large.problems(name, short_side or large.SHORT_SIDE, decode=True, progress=progress)
        what = f"{name} in {cifar.data_folder()}"
    else:
        path = _cifar_path(name, short_side)
        found = cifar.problems(cifar.read_cifar(name, path))
        what = str(path)
    if found:
        raise ValueError(f"{what} is not the official {name}: {'; '.join(found)}")
    print_plain(f"{what} is complete and unharmed")


def _cifar_path(name: str, short_side: int | None) -> Path:
    from kernelhead.data import cifar, large

    names = [*cifar.CLASSES, *large.SETS]
    if name not in names:
        raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(names)}")
    if short_side is not None:
        raise ValueError(f"the images of {name} have one size: leave out --short-side")
    return cifar.cifar_path(name)


@data_app.command("pack")
def data_pack(
    folder: Annotated[Path, typer.Argument(help="A folder of class folders of images.")],
    out: Annotated[Path, typer.Option(help="The file to make.")],
    short_side: Annotated[int, typer.Option(min=1, help="Larger images are made smaller, to this short side.")] = 256,
) -> None:
    """Pack a folder of pictures into one file that is fast to read."""
    from kernelhead.data.packed import find_images, pack
    from kernelhead.train.pictures import need_pillow

    need_pillow()
    sources, classes = find_images(folder)
    with steps_bar() as progress:
        packed = pack(
            sources,
            classes,
            out,
            short_side=short_side,
            every_class=True,
            progress=lambda done, n: progress(f"packing {folder}", done, n),
        )
    _show_packed(packed)


@data_app.command("clean")
def data_clean(
    every: Annotated[
        bool, typer.Option("--all", help="All packed folders, also those that are in use or unknown.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without, they are only shown.")] = False,
) -> None:
    """Remove packed folders of pictures that have changed since or are gone.

    `kernelhead train` packs a folder once for each state of its files. No picture of yours is touched.
    """
    from kernelhead.data.packed_folders import packed_folders, packed_place

    chosen = [one for one in packed_folders() if every or one.useless]
    if not chosen:
        print_plain(f"nothing to remove in {packed_place()}")
        return
    _show_folders(chosen)
    if not yes:
        print_plain("nothing was removed; the same command with --yes removes these")
        return
    for one in chosen:
        one.remove()
    print_plain(f"removed {len(chosen)} from {packed_place()}, {_readable(sum(one.bytes for one in chosen))}")


def _show_folders(packed: list["PackedFolder"]) -> None:
    listing = RichTable()
    for column in ("packed file", "size", "folder", "state"):
        listing.add_column(column, overflow="fold", no_wrap=column in ("size", "state"))
    for one in packed:
        listing.add_row(Text(one.path.name), _readable(one.bytes), Text(str(one.folder or "?")), one.state)
    console.print(listing)


def _readable(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def _show_packed(packed: "PackedImages") -> None:
    for path in packed.left_out:
        say(f"left out, since it cannot be read: {path}")
    count = f"{len(packed)} images of {len(packed.classes)} classes, {len(packed.left_out)} left out"
    print_plain(f"{packed.path}: {count}")
