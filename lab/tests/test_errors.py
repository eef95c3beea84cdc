"""Loss and gradients beside NumPy in float64 over dtype, shape, coefficients, prototypes and scale of the features."""

import importlib.util
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).resolve().parents[1] / "campaigns" / "errors.py"
# Largest relative errors: about three times what the campaign found (lab/results/campaigns/errors.md).
BOUNDS = {"float64": 2e-12, "float32": 5e-4, "bfloat16": 0.2, "float16": 0.02}


@pytest.fixture(scope="module")
def campaign():
    spec = importlib.util.spec_from_file_location("errors_campaign", CAMPAIGN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(rows, cases, failures):
    assert cases
    assert failures == 0
    kinds = {name.split()[0] for name in rows}
    assert kinds == set(BOUNDS)
    wrong = {name: row for name, row in rows.items() if max(row.values()) > BOUNDS[name.split()[0]]}
    assert not wrong


def test_the_smallest_shapes(campaign):
    check(*campaign.largest_errors(campaign.SHAPES[:2]))


@pytest.mark.slow
def test_the_whole_grid(campaign):
    check(*campaign.largest_errors())


def test_the_committed_table_is_of_the_committed_figures(campaign):
    import json

    from kernelhead.files import hardware_name

    results = CAMPAIGN.parents[1] / "results" / "campaigns"
    told = json.loads((results / "errors.json").read_text())
    hardware = hardware_name(told["hardware"])
    made = campaign.table(told["largest relative error"], told["cases"], hardware)
    assert (results / "errors.md").read_text() == made
