"""Feature vectors and labels from files: .npz, a pair of .npy, .csv, .parquet."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FEATURES, LABELS = ("x", "X", "features"), ("y", "labels")
KINDS = ".npz, .npy, .csv or .parquet"


def load_features(
    path: Path, labels_path: Path | None = None, *, features: str | None = None, label: str | None = None
) -> tuple[Array, Array]:
    """Features (N, D) and labels (N,).

    Args:
        path: .npz with two arrays; .npy of features; .csv with a line of names, or .parquet: all columns but the
            labels' are features.
        labels_path: .npy of labels, with .npy features.
        features: the array of an .npz file; x, X or features unless given.
        label: the array of an .npz file, y or labels unless given; the column of a table, `label` or else the last.
    """
    for each in (path, labels_path):
        if each is not None and not each.is_file():
            raise FileNotFoundError(f"there is no file {each}")
    kind = path.suffix.lower()
    if kind not in (".npz", ".npy", ".csv", ".parquet"):
        raise ValueError(f"{path} is none of the known kinds of files, {KINDS}")
    if (kind == ".npy") != (labels_path is not None):
        raise ValueError(f"labels come in a file of their own with .npy features, and only with them, got {path}")
    if features is not None and kind != ".npz":
        raise ValueError(f"--features names an array of an .npz file, and {path} is none")
    if kind == ".npz":
        return _from_npz(path, features, label)
    if labels_path is not None:
        return _read_npy(path), _read_npy(labels_path)
    names, columns = _read_csv(path) if kind == ".csv" else _read_parquet(path)
    return _from_table(path, names, columns, label)


def _from_npz(path: Path, features: str | None, label: str | None) -> tuple[Array, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except Exception as error:  # zipfile, zlib, numpy and struct each have errors of their own
        raise ValueError(f"{path} is not a readable .npz file of plain arrays ({error})") from error
    return _pick(path, arrays, features, FEATURES, "features"), _pick(path, arrays, label, LABELS, "label")


def _pick(path: Path, arrays: dict[str, Array], name: str | None, usual: tuple[str, ...], option: str) -> Array:
    candidates = usual if name is None else (name,)
    for candidate in candidates:
        if candidate in arrays:
            return arrays[candidate]
    found = ", ".join(f"{key} {value.shape}" for key, value in arrays.items()) or "nothing"
    raise ValueError(f"{path} has no array {' or '.join(candidates)}; it has {found}: choose one by --{option} NAME")


def _read_npy(path: Path) -> Array:
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:
        raise ValueError(f"{path} is not a readable .npy file of a plain array ({error})") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is not a .npy file but an archive of several arrays; is its name to end in .npz?")
    return array


def _read_csv(path: Path) -> tuple[list[str], list[Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a readable CSV file ({error})") from error
    if len(rows) < 2:
        raise ValueError(f"{path} has no rows; a line of names and a line for each sample are expected")
    names, body = rows[0], rows[1:]
    for number, row in enumerate(body, 1):
        if len(row) != len(names):
            raise ValueError(f"{path}: sample {number} has {len(row)} values, and the first line names {len(names)}")
    return names, list(zip(*body, strict=True))


def _read_parquet(path: Path) -> tuple[list[str], list[Any]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} needs pyarrow; 'pip install pyarrow' brings it", name="pyarrow") from error
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        raise ValueError(f"{path} is not a readable parquet file ({error})") from error
    return list(table.column_names), [column.to_numpy() for column in table.columns]


def _from_table(path: Path, names: list[str], columns: list[Any], label: str | None) -> tuple[Array, Array]:
    chosen = label or ("label" if "label" in names else names[-1])
    if chosen not in names:
        raise ValueError(f"{path} has no column {chosen!r}; it has {', '.join(names)}: choose one by --label COLUMN")
    if len(names) < 2:
        raise ValueError(f"{path} has one column alone; features and labels are expected")
    place = names.index(chosen)
    rest = [(name, column) for index, (name, column) in enumerate(zip(names, columns, strict=True)) if index != place]
    features = np.empty((len(columns[place]), len(rest)))
    for index, (name, column) in enumerate(rest):
        try:
            features[:, index] = column
        except (TypeError, ValueError) as error:
            wrong = next((value for value in column if not _is_number(value)), "")
            raise ValueError(
                f"{path}: column {name!r} is no number in every row, for one {str(wrong)!r}; "
                "leave it out, or choose the labels by --label COLUMN"
            ) from error
    return features, _as_labels(columns[place])


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _as_labels(column: Any) -> Array:
    """Numbers where every label is a whole one, text otherwise."""
    try:
        numbers = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        return np.asarray([str(value) for value in column])
    return numbers.astype(np.int64) if np.isfinite(numbers).all() and (numbers % 1 == 0).all() else numbers
