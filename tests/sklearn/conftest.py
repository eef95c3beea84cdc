import pytest
from sklearn.datasets import load_iris, make_circles, make_moons


@pytest.fixture(scope="session")
def moons():
    return make_moons(300, noise=0.2, random_state=0)


@pytest.fixture(scope="session")
def circles():
    return make_circles(120, noise=0.15, factor=0.5, random_state=0)


@pytest.fixture(scope="session")
def iris():
    return load_iris(return_X_y=True)
