"""The mathematics of kernels.py against NumPy in float64 and closed forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import polynomial as P

from kernelhead import kernels

GRID = np.linspace(-1, 1, 201)


def expected_series(t, alpha, tolerance):
    odd = np.where(t > 1 - tolerance, 1.0, np.where(t < tolerance - 1, -1.0, 0.0))
    return P.polyval(t, alpha[2:]) + alpha[1] * odd + alpha[0] * odd**2


def unit_rows(rng, rows, width):
    x = rng.standard_normal((rows, width))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


# --- the series -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [0, 1, 2, 7, 20])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_series_is_the_polynomial_plus_both_end_point_terms(rng, degree, dtype, close):
    alpha = rng.uniform(0, 1, degree + 3)
    value = kernels.series(torch.from_numpy(GRID).to(dtype), torch.from_numpy(alpha).to(dtype))
    assert value.dtype == dtype
    np.testing.assert_allclose(value, expected_series(GRID, alpha, 1e-6), rtol=close, atol=close)
    without = kernels.power_series(torch.from_numpy(GRID).to(dtype), torch.from_numpy(alpha).to(dtype))
    np.testing.assert_allclose(without, P.polyval(GRID, alpha[2:]), rtol=close, atol=close)


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3, 4)])
def test_series_keeps_the_shape_of_t(rng, shape):
    t, alpha = rng.uniform(-1, 1, shape), rng.uniform(0, 1, 6)
    value = kernels.series(torch.tensor(t), torch.from_numpy(alpha))
    assert value.shape == shape
    np.testing.assert_allclose(value, P.polyval(t, alpha[2:]), rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 64, 512, 4096])
def test_end_points_recognise_equal_and_opposite_vectors(dtype, width):
    x = torch.randn(100, width, dtype=dtype)
    scales = torch.rand(100, 1, dtype=dtype) * 10 + 0.01
    unit, same = (v / torch.linalg.vector_norm(v, dim=1, keepdim=True) for v in (x, scales * x))
    for t in ((unit @ same.T).diagonal(), (unit * same).sum(1)):
        assert (kernels.end_points(t) == 1).all()
        assert (kernels.end_points(-t) == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_end_points_are_no_wider_than_rounding(dtype):
    t = torch.tensor([1 - 100 * torch.finfo(dtype).eps, 0.999, 0.0, -0.999], dtype=dtype)
    assert (kernels.end_points(t) == 0).all()


def test_end_point_terms_give_no_gradient_to_t_and_a_full_one_to_alpha():
    t = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor([7.0, 5.0, 3.0, 2.0], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    (kernels.series(t, alpha) * weights).sum().backward()
    assert t.grad.tolist() == [2.0, 20.0, 200.0]
    assert alpha.grad.tolist() == [11.0, -9.0, 111.0, 1 - 10 + 50]


@pytest.mark.parametrize("degree", [0, 1, 2, 7, 20])
def test_derivative_is_that_of_the_polynomial(rng, degree):
    alpha = rng.uniform(0, 1, degree + 3)
    coefficients = kernels.derivative_coefficients(torch.from_numpy(alpha))
    derivative = kernels.horner(torch.from_numpy(GRID), coefficients)
    np.testing.assert_allclose(derivative, P.polyval(GRID, P.polyder(alpha[2:])), rtol=1e-12, atol=1e-12)


# --- fixed kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize(
    ("options", "formula", "close"),
    [
        (("cosine", 7, 1.0), lambda dots, squares: dots, 1e-14),
        *((("polynomial", d, 1.0), lambda dots, _, d=d: (1 + dots) ** d / 2**d, 1e-13) for d in (1, 2, 3, 10)),
        *((("rbf", 7, g), lambda _, squares, g=g: np.exp(-g * squares), 2e-9) for g in (0.05, 1, 5, 50, 400)),
    ],
)
def test_fixed_kernels_are_their_formulas_on_vectors(rng, width, options, formula, close):
    u, v = unit_rows(rng, 50, width), unit_rows(rng, 50, width)
    dots, squares = (u * v).sum(1), ((u - v) ** 2).sum(1)
    alpha = kernels.fixed_coefficients(*options)
    assert alpha.dtype == torch.float64
    assert (alpha >= 0).all()
    assert alpha[:2].tolist() == [0, 0]
    np.testing.assert_allclose(P.polyval(dots, alpha.numpy()[2:]), formula(dots, squares), rtol=0, atol=close)


def test_other_kernels_are_not_fixed():
    assert kernels.fixed_coefficients("learned", 7, 1.0) is None


# --- positive definiteness --------------------------------------------------------------------------------------------


def smallest_eigenvalue(points, alpha):
    gram = kernels.series(torch.from_numpy(points @ points.T), torch.from_numpy(alpha)).numpy()
    return np.linalg.eigvalsh((gram + gram.T) / 2)[0]


@settings(max_examples=80)
@given(
    width=st.sampled_from([1, 2, 3, 5, 20, 100]),
    alpha=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 10)), min_size=3, max_size=18),
    seed=st.integers(0, 2**31),
)
def test_non_negative_coefficients_are_positive_definite_on_every_sphere(width, alpha, seed):
    x = unit_rows(np.random.default_rng(seed), 40, width)
    points = np.concatenate([x, x[:10], -x[5:15], -x[:2]])
    assert smallest_eigenvalue(points, np.array(alpha)) >= -1e-9 * len(points)


@pytest.mark.parametrize("negative", range(10))
def test_one_negative_coefficient_breaks_positive_definiteness(negative):
    # On {u, -u}: k(1) = 2 - 1 and |k(-1)| = 2 + 1, so the eigenvalues are 4 and -2.
    alpha = np.zeros(10)
    alpha[3 if negative % 2 == 0 else 2] = 2  # a_1 beside an even term, a_0 beside an odd one
    alpha[negative] = -1
    points = np.array([[0.6, 0.8], [-0.6, -0.8]])
    assert smallest_eigenvalue(points, alpha) == pytest.approx(-2, abs=1e-12)


# --- end points -------------------------------------------------------------------------------------------------------


def test_high_powers_tend_to_the_end_point_kernels():
    odd = kernels.end_points(torch.from_numpy(GRID)).numpy()
    np.testing.assert_allclose(GRID**10_000, odd**2, atol=1e-12)
    np.testing.assert_allclose(GRID**10_001, odd, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_no_end_points(dtype):
    t, alpha = torch.tensor([0.96875, -1.0], dtype=dtype), torch.ones(5, dtype=dtype)
    plain = 1 + t.double() + t.double() ** 2
    torch.testing.assert_close(kernels.series(t, alpha).double(), plain, rtol=2e-2, atol=2e-2)


# --- raw parameters -> coefficients -----------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu": lambda raw: np.maximum(raw, 0),
    "sigmoid": lambda raw: 1 / (1 + np.exp(-raw)),
    "softmax": lambda raw: np.exp(raw) / np.exp(raw).sum(),
    "softplus": lambda raw: np.log1p(np.exp(raw)),
    "none": lambda raw: raw,
}
TEMPERATURES = {"relu": 1, "sigmoid": 0.1, "softmax": 0.005, "softplus": 1, "none": 1}


def test_every_activation_is_covered():
    assert set(kernels.ACTIVATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_its_formula(rng, name):
    raw = rng.normal(0, 3, 50)
    alpha = kernels.activation(name).apply(torch.from_numpy(raw)).numpy()
    np.testing.assert_allclose(alpha, ACTIVATIONS[name](raw), rtol=1e-12)
    assert (alpha >= 0).all() == (name != "none")


@pytest.mark.parametrize("name", TEMPERATURES)
def test_temperature_is_the_papers(name):
    assert kernels.activation(name).temperature == TEMPERATURES[name]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bounded_means_that_large_raw_values_give_small_coefficients(name):
    largest = kernels.activation(name).apply(torch.full((10,), 1e4)).max().item()
    assert kernels.activation(name).bounded == (largest <= 1)


def test_raw_values_start_at_one():
    assert kernels.INITIAL_RAW == 1


def test_an_unknown_activation_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown coefficients 'tanh'; choose one of relu, sigmoid, softmax, .*none$"):
        kernels.activation("tanh")
