"""As people use it: data frames, searches, calibration, routing, files, sparse and memory-mapped features, ONNX."""

import runpy
from pathlib import Path

import joblib
import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn import config_context
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401  # what makes the next import work
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import HalvingGridSearchCV, cross_validate
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kernelhead import KernelHeadClassifier
from kernelhead.export import export_onnx
from kernelhead.sklearn import basis, solver

TEXT = Path(__file__).parents[2] / "examples" / "text_in_ten_lines.py"


def test_the_network_runs_in_onnxruntime_with_its_scaling(moons, tmp_path):
    x, y = moons
    fitted = KernelHeadClassifier(random_state=0).fit(x * [1e3, 1e-3], y)
    export_onnx(fitted.network(), tmp_path / "moons.onnx", torch.zeros(1, 2), input_name="features")
    session = onnxruntime.InferenceSession(tmp_path / "moons.onnx", providers=["CPUExecutionProvider"])
    asked = np.vstack([x * [1e3, 1e-3], [[1e9, -1e9]]]).astype(np.float32)  # the last is clipped
    (logits,) = session.run(None, {"features": asked})
    shares = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(shares / shares.sum(1, keepdims=True), fitted.predict_proba(asked), atol=1e-4)


def test_data_frames_and_their_names(moons):
    frame = pd.DataFrame(moons[0], columns=["left", "right"])
    fitted = KernelHeadClassifier(random_state=0).fit(frame, pd.Series(moons[1]))
    np.testing.assert_array_equal(fitted.feature_names_in_, ["left", "right"])
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.predict(frame[["right", "left"]])
    importances = permutation_importance(fitted, frame, moons[1], n_repeats=2, random_state=0).importances_mean
    assert (importances > 0.05).all()


def test_polars_frames(moons):
    import polars

    frame = polars.DataFrame({"left": moons[0][:, 0], "right": moons[0][:, 1]})
    assert KernelHeadClassifier().fit(frame, moons[1]).score(frame, moons[1]) > 0.95


@pytest.mark.slow
def test_a_halving_search_and_calibration(moons):
    x, y = moons
    search = HalvingGridSearchCV(KernelHeadClassifier(random_state=0), {"degree": [1, 5]}, cv=2, random_state=0)
    assert search.fit(x, y).best_params_ == {"degree": 5}
    calibrated = CalibratedClassifierCV(KernelHeadClassifier(random_state=0), cv=2).fit(x, y)
    assert calibrated.score(x, y) > 0.95


def test_weights_are_routed(moons):
    x, y = moons
    weight = np.where(y == 1, 1.0, 1e-6)
    with config_context(enable_metadata_routing=True):
        model = (
            KernelHeadClassifier(random_state=0)
            .set_fit_request(sample_weight=True)
            .set_score_request(sample_weight=True)
        )
        found = cross_validate(model, x, y, cv=2, params={"sample_weight": weight}, return_estimator=True)
    assert all((each.predict(x) == 1).mean() > 0.8 for each in found["estimator"])


def test_joblib_files(moons, tmp_path):
    fitted = KernelHeadClassifier(random_state=0).fit(*moons)
    joblib.dump(fitted, tmp_path / "model")
    np.testing.assert_array_equal(
        joblib.load(tmp_path / "model").predict_proba(moons[0]), fitted.predict_proba(moons[0])
    )


def test_sparse_features_are_dense_ones_without_a_mean(rng, monkeypatch):
    words = rng.poisson(0.3, (400, 20)).astype(float)
    y = (words[:, :5].sum(1) > words[:, 5:10].sum(1)).astype(int)
    sparse = KernelHeadClassifier(random_state=0).fit(csr_matrix(words[:300]), y[:300])
    assert sparse.score(csr_matrix(words[300:]), y[300:]) > 0.9
    np.testing.assert_allclose(sparse.predict_proba(csr_matrix(words)), sparse.predict_proba(words))
    monkeypatch.setattr(basis, "MAX_WIDE", 60 * 21)
    fewer = KernelHeadClassifier(random_state=0).fit(csr_matrix(words[:300]), y[:300])
    assert fewer.head_.weight.shape == (60, 21)
    assert fewer.score(csr_matrix(words[300:]), y[300:]) > 0.85


def test_features_on_disk_and_in_half_precision(moons, tmp_path):
    x = moons[0].astype(np.float16)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    here, there = (KernelHeadClassifier(random_state=0).fit(each, moons[1]) for each in (x, mapped))
    np.testing.assert_array_equal(there.predict_proba(mapped), here.predict_proba(x))
    assert here.score(x, moons[1]) > 0.95


# Hard inputs.


@pytest.mark.slow
def test_outliers_cost_little():
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    train, test = order[:900], order[900:1500]
    dirty = x + np.where(rng.random(x.shape) < 0.005, 1e5 * rng.normal(size=x.shape), 0)
    clean = KernelHeadClassifier(random_state=0).fit(x[train], y[train]).score(x[test], y[test])
    found = KernelHeadClassifier(random_state=0).fit(dirty[train], y[train]).score(dirty[test], y[test])
    nearest = make_pipeline(StandardScaler(), KNeighborsClassifier()).fit(dirty[train], y[train])
    assert found > clean - 0.035  # 3.1 points in the mean of four fits; a test image is worth 0.17
    assert found > nearest.score(dirty[test], y[test])


def test_two_samples_single_ones_and_rare_ones(rng):
    assert KernelHeadClassifier().fit([[0.0], [1.0]], [0, 1]).predict([[0.1], [0.9]]).tolist() == [0, 1]
    x = rng.normal(size=(60, 3))
    labels = np.r_[np.zeros(30), np.ones(28), 2, 3].astype(int)
    x[:, 0] += 4 * labels
    assert KernelHeadClassifier(random_state=0).fit(x, labels).score(x, labels) > 0.9
    x = rng.normal(size=(1200, 2))
    rare = np.arange(1200) < 6
    x[rare] += 5
    probabilities = KernelHeadClassifier(random_state=0).fit(x, rare).predict_proba(x)[:, 1]
    assert probabilities[rare].min() > probabilities[~rare].mean()
    assert log_loss(rare, probabilities) < 0.01


@pytest.mark.slow
def test_a_thousand_classes(rng):
    centres = rng.normal(size=(1000, 16))
    y = np.repeat(np.arange(1000), 4)
    x = centres[y] + 0.3 * rng.normal(size=(4000, 16))
    fitted = KernelHeadClassifier(random_state=0).fit(x[::2], y[::2])
    logistic = LogisticRegression(max_iter=50).fit(x[::2], y[::2])
    assert fitted.score(x[1::2], y[1::2]) > logistic.score(x[1::2], y[1::2]) - 0.005  # both have 99.8 %


def test_a_fit_that_did_not_end_says_how_much_is_missing(moons, monkeypatch):
    monkeypatch.setattr(solver, "STEPS", 1)
    monkeypatch.setattr(solver, "PATH_STEPS", 1)
    monkeypatch.setattr(solver, "UNFINISHED", 1e-6)
    with pytest.warns(ConvergenceWarning, match=r"after 1 steps the fit could gain about [\d.e+-]+ more per sample"):
        KernelHeadClassifier(random_state=0).fit(*moons)


def test_partial_fit_is_not_behind_sgd():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:1400], order[1400:]
    ours, theirs = KernelHeadClassifier(random_state=0), SGDClassifier(random_state=0)
    for _ in range(3):
        for rows in np.split(train, 14):
            for model in (ours, theirs):
                model.partial_fit(x[rows], y[rows], classes=np.arange(10))
        assert ours.score(x[test], y[test]) > theirs.score(x[test], y[test])


@pytest.mark.slow
def test_text_in_ten_lines(capsys):
    runpy.run_path(str(TEXT), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if "log-loss" in line]
    ours, logistic = (float(line.split()[-1]) for line in lines)
    assert lines[0].startswith("KernelHeadClassifier: 100% right")
    assert ours < logistic
