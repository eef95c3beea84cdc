"""Hostile files of every format: each is refused in one sentence that names it, or gives a right result."""

import pytest
from hostile import QUICK, Corpus

CASES = 200


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    made = Corpus(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


def test_the_good_files_are_good(corpus):
    for kind in QUICK:
        path = corpus.good_copy(kind)
        assert corpus.answer(kind, path) is None
        assert corpus.refused is None


def test_hostile_files(corpus):
    found, refused = {}, 0
    for seed in range(CASES):
        kind = QUICK[seed % len(QUICK)]
        wrong = corpus.answer(kind, corpus.change(kind, seed))
        refused += corpus.refused is not None
        if wrong is not None:
            found[kind, seed] = wrong
    assert not found
    assert refused > CASES / 2


@pytest.mark.parametrize("kind", ["safetensors", "yaml", "json", "npz", "csv", "parquet", "png", "config"])
def test_pipes_devices_and_folders_are_refused_at_once(corpus, kind):
    for what in ("pipe", "device", "folder", "link to a pipe"):
        path = corpus.no_file(kind, what)
        assert corpus.answer(kind, path) is None
        assert corpus.refused is not None
        assert what == "folder" or "a pipe or a device" in corpus.refused


@pytest.mark.parametrize("kind", ["csv.gz", "npz", "parquet", "png", "webp", "safetensors"])
def test_small_files_that_want_to_be_large_are_refused_before_they_are_unpacked(corpus, kind):
    path = corpus.bomb(kind)
    assert corpus.answer(kind, path) is None
    assert corpus.refused is not None


@pytest.mark.slow
def test_hostile_states_are_not_exported(corpus):
    for seed in range(10):
        assert corpus.answer("onnx", corpus.change("onnx", seed)) is None
