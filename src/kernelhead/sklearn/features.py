"""Feature vectors and labels from files: .npz, a pair of .npy, .csv and .tsv (also with .gz), .parquet."""

import gzip
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kernelhead.files import plain_file
from kernelhead.sklearn.samples import Array

TEXT_KINDS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
KINDS = (*TEXT_KINDS, ".npz", ".npy", ".parquet")
USUAL = {"features": ("x", "X", "features"), "label": ("y", "labels")}  # names of arrays, by option
UNPACKED_BYTES, UNPACKED_RATIO = 2**24, 100  # that a file may unpack to: in all, or as a multiple of its size
UNNAMED = re.compile(r"\s*|Unnamed: \d+(\.\d+)?|__index_level_\d+__")  # pandas writes an index without a name so
MISSING = ["", "nan", "NaN", "na", "NA", "n/a", "N/A", "null", "NULL", "<NA>"]  # "None" may be a class


def load_features(
    path: Path, labels_path: Path | None = None, *, features: str | None = None, label: str | None = None
) -> tuple[Array, Array, list[str]]:
    """Return features (N, D), labels (N,), and notes on what the reader changed.

    All columns of a table are features, except the labels and an index without a name. A first line of values instead
    of names counts as a sample. `labels_path` goes with .npy features. `features` names an array of an .npz file: None
    is x, X or features. `label` names an array (None: y or labels) or a column (None: `label`, or else the last).
    """
    for each in filter(None, (path, labels_path)):
        plain_file(each)
    kind = next((kind for kind in KINDS if path.name.lower().endswith(kind)), None)
    if kind is None:
        raise ValueError(f"{path} is of no known kind; use one of {', '.join(KINDS)}")
    if (kind == ".npy") != (labels_path is not None):
        raise ValueError(f"a second file, of labels, goes with .npy features and only with them; got {path}")
    if features is not None and kind != ".npz":
        raise ValueError(f"--features names an array of an .npz file; leave it out for {path}")
    if kind == ".npz":
        return _from_npz(path, "features", features), _from_npz(path, "label", label), []
    if kind in TEXT_KINDS:
        return _from_table(path, *_read_text(path), label)
    if labels_path is not None:
        return _load(path), _load(labels_path), []
    with _reading(path):
        from pyarrow import parquet

        about = parquet.ParquetFile(path)
        _check_size(path, 8 * about.metadata.num_rows * about.metadata.num_columns)
        texts = [each.name for each in about.schema_arrow if "string" in str(each.type) or "binary" in str(each.type)]
        # As a dictionary, a text that comes again and again is kept once.
        table = parquet.read_table(path, read_dictionary=texts).to_pandas(ignore_metadata=True)
        repeated = table.select_dtypes("category")
        longest = max((len(str(text)) for name in repeated for text in table[name].cat.categories), default=0)
        _check_size(path, len(repeated) * len(table) * longest)
        table = table.astype(dict.fromkeys(repeated, object))
    return _from_table(path, table, [], label)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises while it reads into one sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} needs {error.name}; run pip install {error.name}") from error
    except Exception as error:  # zipfile, zlib, NumPy, pandas and PyArrow each have errors of their own
        plain = "pickle" not in str(error) and "Python objects" not in str(error)  # so NumPy calls objects, and junk
        reason = f"cannot be read ({error})" if plain else "holds no plain array; save text with .astype(str)"
        raise ValueError(f"{path} {reason}") from error


def _load(path: Path) -> Any:
    with _reading(path):
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))  # sizes are compared with the file's first


def _check_size(path: Path, size: int) -> None:
    """Refuse to unpack a file to so many bytes, if few files of features are packed so well."""
    most = max(UNPACKED_BYTES, UNPACKED_RATIO * path.stat().st_size)
    if size > most:
        raise ValueError(f"unpacked, it has more than {most / 1e6:,.0f} MB, {UNPACKED_RATIO} times its size; unpack it")


def _from_npz(path: Path, option: str, given: str | None) -> Any:
    names = USUAL[option] if given is None else (given,)
    with _reading(path), path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        for name in names:
            if name in file:
                _check_size(path, max(each.file_size for each in file.zip.infolist() if name in each.filename))
                return file[name]
        has = ", ".join(file) or "nothing"
    raise ValueError(f"{path} has no array {' or '.join(names)}; it has {has}: choose with --{option} NAME")


def _read_text(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return a table of strings with commas, semicolons or tabs between them, and notes on it."""
    with _reading(path):
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            most = max(UNPACKED_BYTES, UNPACKED_RATIO * len(content))
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(most + 1)
            _check_size(path, len(content))
        text = content.decode("utf-8-sig")
        # The one that cuts each of the first lines into most values: text may have commas in some.
        lines = [line for line in text.splitlines() if line.strip()][:20]
        delimiter = max(";\t,", key=lambda each: min((line.count(each) for line in lines), default=0))
        missing: dict[str, Any] = {"keep_default_na": False, "na_values": MISSING}
        cells = pd.read_csv(io.StringIO(text), sep=delimiter, header=None, dtype=str, skipinitialspace=True, **missing)
    if len(cells) < 2:
        raise ValueError(f"{path} has no rows; it needs a line of names and a line per sample")
    first, table = cells.iloc[0].fillna(""), cells[1:]
    # A first line is a sample if it has numbers, and else words that come again below. 0, 1, 2 .. are names by pandas.
    numbers = pd.to_numeric(first, errors="coerce")
    counts = len(first) > 2 and numbers[0] in (0, 1) and (numbers.diff()[1:] == 1).all()
    if counts or numbers.isna().all() or not (numbers.notna() | (table == first).any()).all():
        return table.set_axis(first, axis=1), []
    names = [str(number) for number in range(1, len(first) + 1)]
    return cells.set_axis(names, axis=1), [f"{path} has no line of names; its columns are called 1 to {len(first)}."]


def _from_table(path: Path, table: pd.DataFrame, notes: list[str], label: str | None) -> tuple[Array, Array, list[str]]:
    """Split a table into features and labels; labels are integers where all are whole numbers."""
    unnamed = [bool(UNNAMED.fullmatch(name)) and name != label for name in table.columns]
    for index in np.flatnonzero(unnamed):
        notes.append(f"Column {index + 1} of {path} has no name, as an index that pandas writes; it is left out.")
    table = table.loc[:, np.logical_not(unnamed)]
    names = list(table)
    if len(names) < 2:
        raise ValueError(f"{path} needs two columns or more, features and labels; it has {len(names)}")
    chosen = label or ("label" if "label" in names else names[-1])
    if chosen not in names:
        raise ValueError(f"{path} has no column {chosen!r}; it has {', '.join(names)}: choose with --label COLUMN")
    labels, table = table[chosen], table.drop(columns=chosen)
    try:
        features = table.astype(dict.fromkeys(table.columns, np.float64)).to_numpy()
    except (TypeError, ValueError) as error:  # it names the value and the column
        raise ValueError(f"{path}: {error}; leave it out, or choose the labels with --label COLUMN") from error
    numbers = pd.to_numeric(labels, errors="coerce")
    if numbers.notna().all():
        labels = numbers.astype(np.int64) if (numbers % 1 == 0).all() else numbers
    return features, labels.to_numpy(), notes
