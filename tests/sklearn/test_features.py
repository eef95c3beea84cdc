import gzip

import numpy as np
import pytest

from kernelhead.sklearn.compare import check_features
from kernelhead.sklearn.features import load_features


def test_every_kind_of_file_gives_the_same(tmp_path, rng):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x, y = rng.normal(size=(6, 2)), np.array([3, 1, 3, 1, 3, 1])
    np.savez(tmp_path / "a.npz", features=x, labels=y)
    np.savez(tmp_path / "b.npz", embedding=x, kind=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    rows = [f"{a!r},{label},{b!r}" for (a, b), label in zip(x.tolist(), y, strict=True)]
    (tmp_path / "c.csv").write_text("\n".join(["p,label,q", *rows]) + "\n")
    parquet.write_table(pyarrow.table({"p": x[:, 0], "q": x[:, 1], "kind": y}), tmp_path / "d.parquet")
    loaded = [
        load_features(tmp_path / "a.npz"),
        load_features(tmp_path / "b.npz", features="embedding", label="kind"),
        load_features(tmp_path / "x.npy", tmp_path / "y.npy"),
        load_features(tmp_path / "c.csv"),
        load_features(tmp_path / "d.parquet"),
    ]
    for features, labels, notes in loaded:
        assert notes == []
        np.testing.assert_array_equal(features, x)
        np.testing.assert_array_equal(labels, y)


def test_labels_of_a_table_may_be_words(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffa,b,name\n1,2,cat\n3,4,dog\n")
    features, labels, _ = load_features(tmp_path / "a.csv")
    assert features.tolist() == [[1, 2], [3, 4]]
    assert labels.tolist() == ["cat", "dog"]
    features, labels, _ = load_features(tmp_path / "a.csv", label="name")
    assert labels.tolist() == ["cat", "dog"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "a;b;name\n1;2;cat\n3;4;dog, small\n"),
        ("a.tsv", "a\tb\tname\n1\t2\tcat\n3\t4\tdog, small\n"),
        ("a.CSV", 'a, b, name\r\n1, 2, cat\r\n3, 4, "dog, small"\r\n'),
        ("a.csv.gz", 'a,b,name\n1,2,cat\n3,4,"dog, small"\n'),
    ],
)
def test_a_table_as_text_may_be_cut_in_any_way(tmp_path, name, text):
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    features, labels, notes = load_features(tmp_path / name)
    assert features.tolist() == [[1, 2], [3, 4]]
    assert labels.tolist() == ["cat", "dog, small"]
    assert notes == []


def test_a_long_line_is_cut_as_well(tmp_path):
    numbers = ",".join(["0.123456789"] * 20_000)  # longer than the longest value that csv takes
    (tmp_path / "a.csv").write_text(f"{','.join(f'f{i}' for i in range(20_000))},y\n{numbers},0\n{numbers},1\n")
    assert load_features(tmp_path / "a.csv")[0].shape == (2, 20_000)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_an_index_without_a_name_is_no_feature(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name},a,b,kind\n0,5,6,0\n1,7,8,1\n")
    features, labels, notes = load_features(tmp_path / "a.csv")
    assert features.tolist() == [[5, 6], [7, 8]]
    assert labels.tolist() == [0, 1]
    assert len(notes) == 1
    assert notes[0].startswith("Column 1 of ")
    assert notes[0].endswith("has no name, as an index that pandas writes; it is left out.")
    (tmp_path / "b.csv").write_text("a,b,kind,\n5,6,0,\n7,8,1,\n")  # each line ends in a comma
    assert load_features(tmp_path / "b.csv")[1].tolist() == [0, 1]


def test_an_index_in_a_parquet_file_is_no_feature(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"a": [5.0, 6.0], "kind": ["cat", "dog"], "__index_level_0__": [0, 1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    features, labels, notes = load_features(tmp_path / "a.parquet")
    assert features.tolist() == [[5], [6]]
    assert labels.tolist() == ["cat", "dog"]
    assert notes[0].startswith("Column 3 of ")
    parquet.write_table(pyarrow.table({"a": [5.0] * 4, "kind": [0, None, 1, None]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="2 labels are missing, the first in row 2"):
        check_features(*load_features(tmp_path / "b.parquet")[:2], folds=2)


@pytest.mark.parametrize("lines", [["5.1,3.5,0", "4.9,3.0,1"], ["5.1,3.5,cat", "4.9,3.0,dog", "4.7,3.2,cat"]])
def test_a_first_line_of_values_is_a_sample(tmp_path, lines):
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    features, labels, notes = load_features(tmp_path / "a.csv")
    assert features[0].tolist() == [5.1, 3.5]
    assert len(features) == len(labels) == len(lines)
    assert "has no line of names; its columns are called 1 to 3" in notes[0]


@pytest.mark.parametrize("names", ["0,1,2", "0,1,label", "1,2,3", "2020,2021,kind"])
def test_names_may_be_numbers(tmp_path, names):
    (tmp_path / "a.csv").write_text(f"{names}\n5.1,3.5,0\n4.9,3.0,1\n")
    features, labels, notes = load_features(tmp_path / "a.csv")
    assert features.tolist() == [[5.1, 3.5], [4.9, 3.0]]
    assert labels.tolist() == [0, 1]
    assert notes == []


@pytest.mark.parametrize(
    ("name", "content", "options", "sentence"),
    [
        ("a.npz", None, {}, "there is no file"),
        ("a.npz", b"PK nothing", {}, r"a\.npz holds no plain array"),
        ("a.npz", b"junk of some kind", {}, r"a\.npz holds no plain array"),
        ("a.npy", b"", {}, "a second file, of labels, goes with .npy features"),
        ("a.txt", b"1", {}, "of no known kind; use one of .csv, .tsv"),
        ("a.parquet", b"PAR1", {}, "a.parquet cannot be read"),
        ("a.csv", b"a,label\n", {}, "has no rows"),
        ("a.csv", b"a,label\n1,0\n1,2,3\n", {}, r"a\.csv cannot be read \(.*Expected 2 fields in line 3, saw 3"),
        ("a.csv", b"a,b,label\n1,one,0\n", {}, "could not convert string to float: 'one'.* column 'b'; leave it out"),
        ("a.csv.gz", b"a,kind\n1,0\n", {}, r"a\.csv\.gz cannot be read \("),
        ("a.csv", b"a,b\n1,0\n", {"label": "c"}, "has no column 'c'; it has a, b: choose with --label COLUMN"),
        ("a.csv", b"a\n1\n", {}, "needs two columns or more, features and labels; it has 1"),
        ("a.csv", b"\xff\xfea", {}, r"a\.csv cannot be read"),
        ("a.csv", b"a,b\n1,0\n", {"features": "a"}, "--features names an array of an .npz file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, options, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        load_features(tmp_path / name, **options)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a,kind\n1,cat\n2,\n3,nan\n", "2 labels are missing, the first in row 2"),
        (b"a,kind\n1,0\n2,NA\n3,1\n", "1 labels are missing, the first in row 2"),
        (b"a,b,label\n1,2,0\n1,,0\n", "1 samples are not finite, the first in row 2"),
    ],
)
def test_what_is_missing_in_a_table_is_refused(tmp_path, content, sentence):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        check_features(*load_features(tmp_path / "a.csv")[:2], folds=2)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="is a folder; give a plain file"):
        load_features(tmp_path)


def test_text_as_objects_is_to_be_saved_as_text(tmp_path):
    words = np.array(["cat", "dog"], dtype=object)
    np.savez(tmp_path / "a.npz", x=np.eye(2), y=words)
    np.save(tmp_path / "x.npy", np.eye(2))
    np.save(tmp_path / "y.npy", words)
    for files in (["a.npz"], ["x.npy", "y.npy"]):
        with pytest.raises(ValueError, match=r"holds no plain array; save text with \.astype\(str\)$"):
            load_features(*(tmp_path / file for file in files))
    np.savez(tmp_path / "b.npz", x=np.eye(2), y=words.astype(str), other=words)  # what is not needed is not read
    assert load_features(tmp_path / "b.npz")[1].tolist() == ["cat", "dog"]


def test_arrays_that_are_not_found_are_named(tmp_path, rng):
    np.savez(tmp_path / "a.npz", data=np.zeros((3, 2)), y=np.zeros(3))
    with pytest.raises(ValueError, match=r"no array x or X or features; it has data, y: choose with --features"):
        load_features(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="choose with --label NAME"):
        load_features(tmp_path / "b.npz")
    for path in ("x.npy", "y.npy"):
        (tmp_path / path).write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"x\.npy holds no plain array"):
        load_features(tmp_path / "x.npy", tmp_path / "y.npy")
