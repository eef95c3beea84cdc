"""Marks the tests of Triton kernels as slow."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Kernels run on GPUs alone; to interpret them takes long."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "found" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
