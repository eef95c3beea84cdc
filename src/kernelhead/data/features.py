"""Feature vectors and labels from files: .npz, a pair of .npy, .csv, .tsv (both also with .gz), .parquet."""

import csv
import gzip
import io
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FEATURES, LABELS = ("x", "X", "features"), ("y", "labels")
TEXT = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
KINDS = ".npz, .npy, .csv, .tsv, .csv.gz, .tsv.gz or .parquet"
UNNAMED = re.compile(r"\s*|Unnamed: \d+(\.\d+)?|__index_level_\d+__")  # what pandas makes of an index without a name
MISSING = ("", "nan", "na", "n/a", "null", "<na>")  # what pandas and R write where there is nothing


def load_features(
    path: Path, labels_path: Path | None = None, *, features: str | None = None, label: str | None = None
) -> tuple[Array, Array, list[str]]:
    """Features (N, D), labels (N,), and what was done to a file that the user may not expect.

    Args:
        path: .npz with two arrays; .npy of features; a table, .csv, .tsv or .parquet, whose columns are features, but
            for the labels' and for an index without a name. A text table's first line has the names; if it has values
            instead, it is a sample, and columns are called 1, 2 and so on.
        labels_path: .npy of labels, with .npy features.
        features: the array of an .npz file; x, X or features unless given.
        label: the array of an .npz file, y or labels unless given; the column of a table, `label` or else the last.
    """
    for each in (path, labels_path):
        if each is not None and each.is_dir():
            raise IsADirectoryError(f"{each} is a folder; a file of features is expected, {KINDS}")
        if each is not None and not each.is_file():
            raise FileNotFoundError(f"there is no file {each}")
    kind = next((kind for kind in (*TEXT, ".npz", ".npy", ".parquet") if path.name.lower().endswith(kind)), None)
    if kind is None:
        raise ValueError(f"{path} is none of the known kinds of files, {KINDS}")
    if (kind == ".npy") != (labels_path is not None):
        raise ValueError(f"labels come in a file of their own with .npy features, and only with them, got {path}")
    if features is not None and kind != ".npz":
        raise ValueError(f"--features names an array of an .npz file, and {path} is none")
    if kind == ".npz":
        return *_from_npz(path, features, label), []
    if labels_path is not None:
        return _read_npy(path), _read_npy(labels_path), []
    names, columns, notes = _read_text(path) if kind in TEXT else _read_parquet(path)
    return _from_table(path, names, columns, label, notes)


def _from_npz(path: Path, features: str | None, label: str | None) -> tuple[Array, Array]:
    try:
        file = np.load(path, allow_pickle=False)
    except Exception as error:  # zipfile, zlib, numpy and struct each have errors of their own
        raise ValueError(f"{path} is not a readable .npz file{_reason(error)}") from error
    if isinstance(file, np.ndarray):
        raise ValueError(f"{path} is not an .npz file but a single array; is its name to end in .npy?")
    with file:
        return _pick(path, file, features, FEATURES, "features"), _pick(path, file, label, LABELS, "label")


def _pick(path: Path, file: Any, name: str | None, usual: tuple[str, ...], option: str) -> Array:
    candidates = usual if name is None else (name,)
    for candidate in candidates:
        if candidate in file:
            return _array_of(path, file, candidate)
    found = ", ".join(f"{key} {_array_of(path, file, key).shape}" for key in file) or "nothing"
    raise ValueError(f"{path} has no array {' or '.join(candidates)}; it has {found}: choose one by --{option} NAME")


def _array_of(path: Path, file: Any, key: str) -> Array:
    try:
        array: Array = file[key]
    except Exception as error:
        raise _unreadable(f"array {key} of {path}", "array", error) from error
    return array


def _read_npy(path: Path) -> Array:
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:
        raise _unreadable(str(path), ".npy file of a plain array", error) from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is not a .npy file but an archive of several arrays; is its name to end in .npz?")
    return array


def _unreadable(what: str, kind: str, error: Exception) -> ValueError:
    if "Object arrays" in str(error):
        return ValueError(f"{what} holds Python objects, which are not read from files: save text with .astype(str)")
    return ValueError(f"{what} is not a readable {kind}{_reason(error)}")


def _reason(error: Exception) -> str:
    """What the error says, but for NumPy's advice to unpickle whatever it does not know: junk is no pickle."""
    return "" if "pickle" in str(error) else f" ({error})"


def _read_text(path: Path) -> tuple[list[str], list[Any], list[str]]:
    """Names, columns and notes of a table as text, with commas, semicolons or tabs between its values."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix.lower() == ".gz" else content).decode("utf-8-sig")
        lines = list(io.StringIO(text, newline=""))
        delimiter = _delimiter(lines)
        rows = [row for row in csv.reader(lines, delimiter=delimiter, skipinitialspace=True) if row]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a readable CSV file ({error})") from error
    if len(rows) < 2:
        raise ValueError(f"{path} has no rows; a line of names and a line for each sample are expected")
    names, body, notes = rows[0], rows[1:], []
    for number, row in enumerate(body, 1):
        if len(row) != len(names):
            raise ValueError(f"{path}: row {number} has {len(row)} values, and the first line has {len(names)}")
    if _is_sample(names, body):
        names, body = [str(number) for number in range(1, len(names) + 1)], rows
        notes.append(
            f"{path} has no line of names: its first line counts as a sample, and its columns are called 1 to "
            f"{len(names)}."
        )
    return names, list(zip(*body, strict=True)), notes


def _delimiter(lines: list[str]) -> str:
    """The one that cuts the first lines into most values, the same number in each; a comma if none does."""
    widths = {",": 1}
    for delimiter in (",", ";", "\t"):
        try:
            rows = csv.reader(lines[:20], delimiter=delimiter, skipinitialspace=True)
            found = {len(row) for row in rows if row}
        except csv.Error:  # a long line in one piece
            continue
        if len(found) == 1 and max(found) > 1:
            widths[delimiter] = found.pop()
    return max(widths, key=lambda delimiter: (widths[delimiter], delimiter == ";"))  # in 1,5;2,5 commas are decimal


def _is_sample(first: list[str], body: list[list[str]]) -> bool:
    """Whether a first line has values: numbers, or words that come again below them. 0, 1, 2 .. are pandas' names."""
    if not any(_is_number(value) for value in first):
        return False
    if len(first) > 2 and any(first == [str(number + start) for number in range(len(first))] for start in (0, 1)):
        return False
    return all(
        _is_number(value) or (value.strip() and any(row[index] == value for row in body))
        for index, value in enumerate(first)
    )


def _read_parquet(path: Path) -> tuple[list[str], list[Any], list[str]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} needs pyarrow; 'pip install pyarrow' brings it", name="pyarrow") from error
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise ValueError(f"{path} is not a readable parquet file ({error})") from error
    columns = [
        column.to_pylist() if column.null_count else column.to_numpy()  # integers keep their kind beside a null
        for column in table.columns
    ]
    return list(table.column_names), columns, []


def _from_table(
    path: Path, names: list[str], columns: list[Any], label: str | None, notes: list[str]
) -> tuple[Array, Array, list[str]]:
    named = [index for index, name in enumerate(names) if not UNNAMED.fullmatch(name) or name == label]
    for index in sorted(set(range(len(names))) - set(named)):
        notes.append(f"Column {index + 1} of {path} has no name, as an index that pandas writes: it was left out.")
    names, columns = [names[index] for index in named], [columns[index] for index in named]
    if len(names) < 2:
        raise ValueError(f"{path} has one column alone; features and labels are expected")
    chosen = label or ("label" if "label" in names else names[-1])
    if chosen not in names:
        raise ValueError(f"{path} has no column {chosen!r}; it has {', '.join(names)}: choose one by --label COLUMN")
    place = names.index(chosen)
    rest = [(name, column) for index, (name, column) in enumerate(zip(names, columns, strict=True)) if index != place]
    features = np.empty((len(columns[place]), len(rest)))
    for index, (name, column) in enumerate(rest):
        try:
            features[:, index] = column
        except (TypeError, ValueError) as error:
            row, wrong = next(((row, each) for row, each in enumerate(column, 1) if not _is_number(each)), (1, ""))
            raise ValueError(
                f"{path}: column {name!r} is no number in every row, in row {row} it is {str(wrong)!r}; "
                "leave it out, or choose the labels by --label COLUMN"
            ) from error
    return features, _as_labels(path, chosen, columns[place]), notes


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _as_labels(path: Path, name: str, column: Any) -> Array:
    """Numbers where every label is a whole one, text otherwise."""
    missing = [row for row, value in enumerate(column, 1) if value is None or str(value).strip().lower() in MISSING]
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} labels are missing in column {name!r}, the first in row {missing[0]}; "
            "leave these rows out, or choose another column by --label COLUMN"
        )
    try:
        numbers = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        return np.asarray([str(value) for value in column])
    return numbers.astype(np.int64) if np.isfinite(numbers).all() and (numbers % 1 == 0).all() else numbers
