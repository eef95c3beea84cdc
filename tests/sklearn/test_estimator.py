import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, make_circles, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import kernelhead
from kernelhead import KernelHeadClassifier, LandmarkHead
from kernelhead.sklearn import estimator

EXAMPLE = Path(__file__).parents[2] / "examples" / "estimator_digits.py"
ADAM = {"solver": "adam", "landmarks": 32, "batch_size": 32, "random_state": 0}


@parametrize_with_checks([KernelHeadClassifier(), KernelHeadClassifier(solver="adam", landmarks=32)])
def test_scikit_learn_takes_it_for_one_of_its_own(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        KernelHeadClassifier(landmarks=8),
        KernelHeadClassifier(class_weight="balanced", degree=2),
    ]
)
def test_scikit_learn_takes_it_with_options_for_one_of_its_own(estimator, check):
    check(estimator)


def test_it_is_a_name_of_the_package():
    assert kernelhead.KernelHeadClassifier is estimator.KernelHeadClassifier


def test_the_kernel_follows_the_problem(rng):
    x, at = rng.normal(size=(500, 6)), rng.normal(size=(200, 6))
    design = np.hstack([at, np.ones((200, 1))])

    def linear_share(target):
        """Of the decision's variance, what a linear function of the features explains; and the kernel."""
        fitted = KernelHeadClassifier(degree=4, random_state=0).fit(x, target)
        decision = fitted.decision_function(at)
        rest = decision - design @ np.linalg.lstsq(design, decision)[0]
        return 1 - rest.var() / decision.var(), fitted.alpha_[3:]

    share, alpha = linear_share(x[:, 0] * x[:, 1] > 0)
    assert share < 0.1
    assert alpha[1] > 0.45  # mostly quadratic
    assert alpha.argmax() == 1
    assert linear_share(x[:, 0] + x[:, 1] > 0)[0] > 0.95


# How well it does.


@pytest.mark.slow
def test_digits_are_told_apart():
    x, y = load_digits(return_X_y=True)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    assert cross_val_score(KernelHeadClassifier(random_state=0), x, y, cv=folds).mean() >= 0.983


def test_features_are_scaled_apart_or_together_as_the_samples_would_have_it(rng):
    """Deviations that say what matters are kept; where they are units of measurement, they are not."""
    signal = rng.normal(size=(300, 3)) * 3
    x, y = np.hstack([signal, rng.normal(size=(300, 20)) * 0.3]), (signal > 0).sum(1)
    together = KernelHeadClassifier(random_state=0).fit(x, y)
    assert together.scale_[3:].max() < 2 * np.sqrt(x.var(0).mean())
    units = np.r_[[1e-3] * 3, [1.0] * 20]
    apart = KernelHeadClassifier(random_state=0).fit(x * units, y)
    assert apart.scale_[:3].max() < 0.01


def test_length_alone_tells_classes_apart():
    x, y = make_circles(400, noise=0.1, factor=0.4, random_state=0)
    assert KernelHeadClassifier().fit(x[:300], y[:300]).score(x[300:], y[300:]) > 0.97


@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 60}])
def test_features_of_any_scale_and_place(moons, options):
    x, y = moons
    moved = x * [1e-6, 1e6] + [1e3, -1e8]
    fitted = KernelHeadClassifier(**options).fit(x[:200], y[:200])
    moved_too = KernelHeadClassifier(**options).fit(moved[:200], y[:200])
    assert fitted.score(x[200:], y[200:]) > 0.9
    assert np.mean(fitted.predict(x[200:]) == moved_too.predict(moved[200:])) > 0.95


def test_probabilities_are_calibrated():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 5))
    y = rng.random(2000) < 1 / (1 + np.exp(-2 * x[:, 0]))
    fitted = KernelHeadClassifier(random_state=0).fit(x[:1000], y[:1000])
    truth = 1 / (1 + np.exp(-2 * x[1000:, 0]))
    assert log_loss(y[1000:], fitted.predict_proba(x[1000:])) < log_loss(y[1000:], truth) + 0.02


def test_descent_learns_and_calibrates(monkeypatch):
    monkeypatch.setattr(estimator, "CALIBRATION_SHARE", 5)
    x, y = make_moons(1500, noise=0.3, random_state=0)
    options = {**ADAM, "epochs": 40}
    fitted = KernelHeadClassifier(**options).fit(x[:1000], y[:1000])
    assert fitted.solver_ == "adam"
    assert fitted.head_.weight.shape == (32, 3)
    assert fitted.loss_curve_[-1] < fitted.loss_curve_[0]
    assert fitted.score(x[1000:], y[1000:]) > 0.88
    exact = KernelHeadClassifier(random_state=0).fit(x[:1000], y[:1000])
    worst = log_loss(y[1000:], exact.predict_proba(x[1000:])) + 0.05
    assert log_loss(y[1000:], fitted.predict_proba(x[1000:])) < worst


def test_a_part_of_the_samples_is_enough_for_the_kernel(monkeypatch, moons):
    monkeypatch.setattr(estimator, "KERNEL_SAMPLES", 100)
    fitted = KernelHeadClassifier(random_state=0).fit(*moons)
    assert fitted.head_.weight.shape == (300, 3)
    assert fitted.score(*moons) > 0.95


# Labels and weights.


@pytest.mark.parametrize(
    "names", [["low", "mid", "top"], [-7, 0, 3], [1.0, 2.0, 4.0], np.array(["a", "b", "c"], dtype=object)]
)
@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 60}])
def test_labels_of_any_kind(iris, names, options):
    x, y = iris
    named = np.asarray(names)[y]
    fitted = KernelHeadClassifier(**options).fit(x, named)
    np.testing.assert_array_equal(fitted.classes_, np.unique(named))
    assert fitted.predict(x).dtype == named.dtype
    assert fitted.score(x, named) > 0.9
    assert fitted.predict_proba(x).shape == (150, 3)
    np.testing.assert_allclose(fitted.predict_proba(x).sum(1), 1)


def test_two_classes_of_booleans_have_one_decision(moons):
    x, y = moons
    fitted = KernelHeadClassifier().fit(x, y == 1)
    decision = fitted.decision_function(x)
    assert decision.shape == (300,)
    np.testing.assert_array_equal(fitted.predict(x), decision > 0)
    np.testing.assert_allclose(fitted.predict_proba(x)[:, 1], 1 / (1 + np.exp(-decision)), rtol=1e-6)


def test_repeated_samples_are_weights(moons, rng):
    x, y = moons[0][:100], moons[1][:100]
    times = rng.integers(0, 3, 100)
    weighted = KernelHeadClassifier(random_state=0).fit(x, y, sample_weight=times)
    repeated = KernelHeadClassifier(random_state=0).fit(np.repeat(x, times, axis=0), np.repeat(y, times))
    np.testing.assert_allclose(weighted.predict_proba(x), repeated.predict_proba(x), rtol=1e-5)


@pytest.mark.parametrize("options", [{"random_state": 0}, {**ADAM, "epochs": 60}])
def test_weights_of_classes(rng, options):
    x = np.vstack([rng.normal(size=(200, 2)), rng.normal(size=(20, 2)) + 1.5])
    y = np.repeat([0, 1], [200, 20])
    plain = KernelHeadClassifier(**options).fit(x, y)
    balanced = KernelHeadClassifier(class_weight="balanced", **options).fit(x, y)
    named = KernelHeadClassifier(class_weight={0: 220 / 400, 1: 220 / 40}, **options).fit(x, y)
    assert (balanced.predict(x) == 1).sum() > 1.5 * (plain.predict(x) == 1).sum()
    np.testing.assert_allclose(balanced.predict_proba(x), named.predict_proba(x), rtol=1e-6)


@pytest.mark.parametrize("options", [{"random_state": 0}, ADAM])
def test_a_common_factor_of_weights_does_nothing(moons, rng, options):
    x, y = moons
    weight = rng.uniform(0.5, 2, 300)
    plain = KernelHeadClassifier(**options).fit(x, y, sample_weight=weight)
    small = KernelHeadClassifier(**options).fit(x, y, sample_weight=weight * 2.0**-30)
    np.testing.assert_allclose(small.predict_proba(x), plain.predict_proba(x), rtol=1e-6)


def test_weights_move_the_descent(moons):
    x, y = moons
    flipped = np.concatenate([y, 1 - y])
    weight = np.repeat([1.0, 0.01], len(y))
    fitted = KernelHeadClassifier(**ADAM, epochs=40).fit(np.vstack([x, x]), flipped, sample_weight=weight)
    assert fitted.score(x, y) > 0.9


# As scikit-learn uses it.


@pytest.mark.slow
def test_in_a_pipeline_a_search_and_processes(moons):
    x, y = moons
    pipeline = make_pipeline(MinMaxScaler(), KernelHeadClassifier(random_state=0))
    search = GridSearchCV(pipeline, {"kernelheadclassifier__degree": [1, 5]}, cv=3, n_jobs=2).fit(x, y)
    assert search.best_params_ == {"kernelheadclassifier__degree": 5}
    assert search.best_score_ > 0.9


@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 5}])
def test_a_random_state_makes_it_the_same_and_pickles_keep_it(moons, options):
    x, y = moons
    model = KernelHeadClassifier(**{"random_state": 0, **options})
    state = torch.get_rng_state()
    first, second = clone(model).fit(x, y), clone(model).fit(x, y)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers are touched
    np.testing.assert_array_equal(first.predict_proba(x), second.predict_proba(x))
    again = pickle.loads(pickle.dumps(first))
    np.testing.assert_array_equal(again.predict_proba(x), first.predict_proba(x))
    if options:
        other = clone(model).set_params(random_state=1).fit(x, y)
        assert not np.array_equal(other.predict_proba(x), first.predict_proba(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_solves_the_same_exactly_and_its_pickle_needs_none(moons):
    x, y = moons
    here = KernelHeadClassifier(random_state=0, device="cpu").fit(x, y)
    there = KernelHeadClassifier(random_state=0).fit(x, y)
    assert there.head_.weight.is_cuda
    np.testing.assert_allclose(there.predict_proba(x), here.predict_proba(x), atol=1e-4)
    again = pickle.loads(pickle.dumps(there)).set_params(device="cpu")
    assert not again.head_.weight.is_cuda
    np.testing.assert_allclose(again.predict_proba(x), there.predict_proba(x), atol=1e-9)
    np.testing.assert_array_equal(there.predict(x), again.predict(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_descends_as_well_and_goes_on_elsewhere(moons):
    x, y = moons
    scores = {}
    for device in ("cpu", "cuda"):
        model = KernelHeadClassifier(**ADAM, epochs=60, device=device).fit(x[:200], y[:200])
        scores[device] = model.partial_fit(x[:200], y[:200]).score(x[200:], y[200:])
        again = model.set_params(device="cpu").partial_fit(x[:200], y[:200])
        assert again.score(x[200:], y[200:]) > 0.9
    assert scores["cuda"] == pytest.approx(scores["cpu"], abs=0.05)


def test_it_says_how_it_goes(moons, capsys):
    fitted = KernelHeadClassifier(random_state=0, verbose=True).fit(*moons)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("leave-one-out log-loss")
    assert lines[1] == "300 points for 300 samples; 300 held out for the choices"
    chosen = next(line for line in lines if "of the logits" in line)
    assert float(chosen.split()[-1]) == pytest.approx(fitted.loss_, abs=1e-4)
    assert lines[-1].endswith("per sample left to gain")
    KernelHeadClassifier(**ADAM, epochs=3, verbose=True).fit(*moons)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "epoch 1",
        "epoch 2",
        "epoch 3",
    ]


def test_silent_unless_asked(moons, capsys):
    KernelHeadClassifier().fit(*moons)
    assert capsys.readouterr().out == ""


def test_it_learns_by_and_by(moons):
    x, y = moons
    model = KernelHeadClassifier(**ADAM)
    for _ in range(40):
        for start in range(0, 200, 50):
            model.partial_fit(x[start : start + 50], y[start : start + 50], classes=[0, 1])
    assert model.score(x[200:], y[200:]) > 0.9
    assert model.head_.weight.shape == (32, 3)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))
    assert again.partial_fit(x[:50], y[:50]).score(x[200:], y[200:]) > 0.9


@pytest.mark.parametrize(("load", "others"), [(load_breast_cancer, 0), (load_breast_cancer, 5), (load_iris, 0)])
def test_a_first_batch_of_mostly_one_class_is_recovered_from(load, others):
    x, y = load(return_X_y=True)
    first = np.r_[np.flatnonzero(y == 0)[:200], np.flatnonzero(y == 1)[:others]]
    model = KernelHeadClassifier(landmarks=64, random_state=0)
    model.partial_fit(x[first], y[first], classes=np.unique(y))
    assert (model.predict(x[first]) == 0).mean() > 0.95
    for _ in range(30):
        model.partial_fit(x, y)
    assert model.score(x, y) > 0.94


def test_what_the_first_batch_fixes_waits_for_a_second_class(moons, monkeypatch):
    monkeypatch.setattr(estimator, "KERNEL_SAMPLES", 60)
    x, y = moons
    none, one = x[y == 0], x[y == 1]
    model = KernelHeadClassifier(**ADAM).partial_fit(none[:50], [0] * 50, classes=[0, 1])
    model.partial_fit(none[50:100], [0] * 50)
    model = pickle.loads(pickle.dumps(model)).partial_fit(one[:30], [1] * 30)
    both = np.vstack([none[40:100], one[:30]])
    np.testing.assert_allclose(model.mean_, both.mean(0))
    settled = model.mean_
    np.testing.assert_array_equal(model.partial_fit(x, y).mean_, settled)


def test_a_first_batch_smaller_than_the_landmarks(moons):
    x, y = moons
    model = KernelHeadClassifier(**ADAM).partial_fit(x[:10], y[:10], classes=[0, 1])
    weight = model.head_.weight
    assert weight.shape == (32, 3)
    assert len(torch.unique(weight, dim=0)) == 32
    before = model.predict_proba(x)
    model.partial_fit(x[:1], y[:1])  # one sample has no deviation to be standardised by
    assert np.isfinite(model.predict_proba(x)).all()
    assert not np.array_equal(model.predict_proba(x), before)


def test_a_batch_of_one_sample(moons):
    x, y = moons[0][:7], moons[1][:7]
    fitted = KernelHeadClassifier(**{**ADAM, "batch_size": 2}, epochs=2).fit(x, y)  # batches of 3, 3 and 1
    assert np.isfinite(fitted.predict_proba(x)).all()


@pytest.mark.filterwarnings("ignore:solver 'cg'")  # an exact fit has no batches, but what goes on from it has
@pytest.mark.parametrize("options", [{"random_state": 0, "batch_size": 10}, {**ADAM, "epochs": 40}])
def test_partial_fit_goes_on_from_a_fit_and_a_fit_starts_anew(moons, options):
    x, y = moons
    model = KernelHeadClassifier(**options).fit(x[:100], y[:100])
    fresh = model.predict_proba(x)
    model.partial_fit(x[100:], y[100:])
    after = model.predict_proba(x)
    assert 0 < np.abs(after - fresh).mean() < 0.1
    for _ in range(50):  # the other way round
        model.partial_fit(x[:100], 1 - y[:100])
    assert model.loss_curve_[-1] < 0.8 * model.loss_curve_[-50]
    np.testing.assert_array_equal(model.fit(x[:100], y[:100]).predict_proba(x), fresh)


@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 5}])
def test_terms_that_the_kernel_lacks_are_exactly_zero(moons, options):
    fitted = KernelHeadClassifier(**options).fit(*moons)
    np.testing.assert_array_equal(fitted.alpha_[:3], 0)
    assert (fitted.alpha_[3:] > 0).all()
    assert fitted.alpha_.sum() == pytest.approx(1)
    assert [term.value for term in fitted.head_.describe().terms[:3]] == [0, 0, 0]
    assert "jumps" not in str(fitted.head_.describe())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_a_network_are_read_as_arrays(moons, dtype):
    features = torch.from_numpy(moons[0]).to(dtype).requires_grad_()
    labels, weight = torch.from_numpy(moons[1]), torch.linspace(1, 2, 300).to(dtype)
    rounded = features.detach().float().numpy()
    given = KernelHeadClassifier(random_state=0).fit(features, labels, weight)
    same = KernelHeadClassifier(random_state=0).fit(rounded, moons[1], weight.float().numpy())
    np.testing.assert_allclose(given.predict_proba(features), same.predict_proba(rounded), rtol=1e-9)


def test_the_head_is_a_layer_of_its_own(moons):
    x, y = moons
    fitted = KernelHeadClassifier().fit(x, y)
    assert isinstance(fitted.head_, LandmarkHead)
    assert fitted.head_.config["landmarks"] == 300
    assert fitted.head_.config["pool"] is None
    clipped = np.clip(x, fitted.lowest_, fitted.highest_)
    points = np.hstack([(clipped - fitted.mean_) / fitted.scale_, np.full((300, 1), fitted.constant_)])
    logits = fitted.head_(torch.from_numpy(points)).detach().numpy()
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], fitted.decision_function(x))


def test_predictions_in_blocks(monkeypatch, moons):
    x, y = moons
    fitted = KernelHeadClassifier().fit(x, y)
    whole = fitted.decision_function(x)
    monkeypatch.setattr(estimator, "BLOCK_VALUES", 7 * 300)
    np.testing.assert_allclose(fitted.decision_function(x), whole, rtol=1e-9)


# What is refused.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"solver": "magic"}, "'solver' parameter .* Got 'magic' instead"),
        ({"degree": 0}, "'degree' parameter .* must be an int in the range .* Got 0 instead"),
        ({"landmarks": 2.5}, "'landmarks' parameter .* Got 2.5 instead"),
        ({"learning_rate": -1}, "'learning_rate' parameter .* Got -1 instead"),
        ({"device": "gpu"}, "device 'gpu' is not available here, or has no float64; choose auto or cpu"),
        ({"device": "meta"}, "device 'meta' is not available here, or has no float64; choose auto or cpu"),
    ],
)
def test_parameters_out_of_range(moons, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        KernelHeadClassifier(**options).fit(*moons)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epochs": 9}, "'cg' ignores epochs; set solver='adam'"),
        (
            {"epochs": 9, "batch_size": 8, "learning_rate": 0.1},
            "'cg' ignores epochs, batch_size, learning_rate; set solver='adam'",
        ),
    ],
)
def test_options_given_in_vain_are_named(moons, options, sentence):
    whole = re.escape(f"solver {sentence} to use what was given") + "$"
    with pytest.warns(UserWarning, match=whole) as caught:
        KernelHeadClassifier(**options).fit(*moons)
    assert [each.filename for each in caught] == [__file__]


def test_defaults_and_options_in_use_give_no_warning(moons, recwarn):
    KernelHeadClassifier(landmarks=np.int64(1024), epochs=6).fit(*moons)
    KernelHeadClassifier(**ADAM, epochs=2, learning_rate=0.1).fit(*moons)
    KernelHeadClassifier(**ADAM, epochs=2).fit(*moons)
    KernelHeadClassifier(landmarks=8).fit(*moons)
    assert not recwarn.list


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_sentence_says_so(moons):
    fitted = KernelHeadClassifier().fit(*moons).set_params(device="cuda")  # as a pickle from elsewhere
    with pytest.raises(ValueError, match="device 'cuda' is not available here"):
        fitted.predict(moons[0])
    assert fitted.set_params(device="auto").score(*moons) > 0.9


@pytest.mark.parametrize("options", [{}, ADAM])
def test_two_samples_are_enough(options):
    np.testing.assert_array_equal(
        KernelHeadClassifier(**options).fit([[0.0], [1.0]], ["a", "b"]).predict([[0], [1]]), ["a", "b"]
    )


def test_one_class_is_refused_and_constant_features_are_not(moons):
    x, y = moons
    with pytest.raises(ValueError, match="two classes or more, got 1 class"):
        KernelHeadClassifier().fit(x, np.zeros(300))
    with pytest.raises(ValueError, match="two classes or more"):
        KernelHeadClassifier().fit(x, y, sample_weight=y)
    padded = np.hstack([x, np.full((300, 1), 1e9), np.zeros((300, 1))])
    assert KernelHeadClassifier().fit(padded, y).score(padded, y) > 0.95
    nothing = KernelHeadClassifier().fit(np.ones((10, 2)), [0] * 7 + [1] * 3)
    np.testing.assert_array_equal(nothing.predict(np.ones((2, 2))), 0)


def test_partial_fit_refuses(moons):
    x, y = moons
    with pytest.raises(ValueError, match="needs classes"):
        KernelHeadClassifier().partial_fit(x, y)
    model = KernelHeadClassifier(**ADAM).partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match="is none of the classes"):
        model.partial_fit(x, y + 1)
    with pytest.raises(ValueError, match="in the first call"):
        model.partial_fit(x, y, classes=[0, 1, 2])
    with pytest.raises(NotFittedError):
        KernelHeadClassifier().predict(x)


def test_without_scikit_learn_a_sentence_says_what_brings_it():
    program = "import sys; sys.modules['sklearn'] = None\nfrom kernelhead import KernelHeadClassifier"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'kernelhead[sklearn]'" in done.stderr


@pytest.mark.slow
def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert float(lines[0].removeprefix("KernelHeadClassifier: ").removesuffix(" %")) > 98.5
    assert lines[-1].startswith("degree 7: ")
