import math

import numpy as np
import pytest
import torch

from kernelhead import metrics


def probabilities_as_logits(p):
    return torch.tensor(p, dtype=torch.float64).log()


def test_summary_by_hand():
    logits = probabilities_as_logits([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.55, 0.45]])
    target = torch.tensor([0, 1, 1, 0])
    found = metrics.summary(logits, target)
    assert found["accuracy"] == 75.0
    assert found["nll"] == pytest.approx(-np.mean(np.log([0.9, 0.4, 0.8, 0.55])))
    # Confidences 0.9, 0.6, 0.8, 0.55 fall into bins 13, 9, 12, 8 of 15: each alone, each gap a quarter.
    assert found["ece"] == pytest.approx(100 * (0.1 + 0.6 + 0.2 + 0.45) / 4)


def test_calibration_error_cancels_within_a_bin():
    logits = probabilities_as_logits([[0.75, 0.25]] * 4)
    assert metrics.expected_calibration_error(logits, torch.tensor([0, 0, 0, 1])) == pytest.approx(0, abs=1e-12)


def test_certain_predictions_fall_into_the_last_bin():
    logits = torch.tensor([[1000.0, 0.0], [0.0, 1000.0]])
    assert metrics.expected_calibration_error(logits, torch.tensor([0, 0])) == pytest.approx(50)


def test_logits_that_are_not_finite_have_an_accuracy_alone():
    logits = torch.tensor([[1.0, 0.0], [math.nan, 0.0]])
    assert metrics.summary(logits, torch.tensor([0, 1])) == {"accuracy": 50.0, "nll": None, "ece": None}
