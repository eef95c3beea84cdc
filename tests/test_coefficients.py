"""Raw parameters -> coefficients, against the formulas."""

import numpy as np
import pytest
import torch

from kernelhead import coefficients

FORMULAS = {
    "relu": lambda raw: np.maximum(raw, 0),
    "sigmoid": lambda raw: 1 / (1 + np.exp(-raw)),
    "softmax": lambda raw: np.exp(raw) / np.exp(raw).sum(),
    "softplus": lambda raw: np.log1p(np.exp(raw)),
    "none": lambda raw: raw,
}
TEMPERATURES = {"relu": 1, "sigmoid": 0.1, "softmax": 0.005, "softplus": 1, "none": 1}


def test_every_activation_is_covered():
    assert set(coefficients.ACTIVATIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_is_its_formula(rng, name):
    raw = rng.normal(0, 3, 50)
    alpha = coefficients.activation(name).apply(torch.from_numpy(raw)).numpy()
    np.testing.assert_allclose(alpha, FORMULAS[name](raw), rtol=1e-12)
    assert (alpha >= 0).all() == (name != "none")


@pytest.mark.parametrize("name", TEMPERATURES)
def test_temperature_is_the_papers(name):
    assert coefficients.activation(name).temperature == TEMPERATURES[name]


@pytest.mark.parametrize("name", FORMULAS)
def test_bounded_means_that_large_raw_values_give_small_coefficients(name):
    largest = coefficients.activation(name).apply(torch.full((10,), 1e4)).max().item()
    assert coefficients.activation(name).bounded == (largest <= 1)


def test_raw_values_start_at_one():
    assert coefficients.INITIAL_RAW == 1


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown coefficients 'tanh'; choose one of relu, sigmoid, softmax, .*none$"):
        coefficients.activation("tanh")
