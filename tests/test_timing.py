"""What is timed, how often and in which order, by a clock that the steps themselves move on; and `kernelhead bench`."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kernelhead import timing
from kernelhead.cli import app
from kernelhead.cli._console import sentence_of
from kernelhead.timing import BASELINE, kept_bytes, make_heads, measure, medians


class Clock:
    def __init__(self):
        self.now, self.calls = 0.0, []

    def step(self, name, *seconds):
        """One that takes these times in turn, the last for good."""
        left = list(seconds)

        def step():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return step


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.now)
    return made


def test_steps_take_turns_and_the_first_rounds_do_not_count(clock):
    steps = {"a": clock.step("a", 9.0, 9.0, 9.0, 1.0), "b": clock.step("b", 7.0, 7.0, 7.0, 0.5, 8.0, 2.0)}
    assert medians(steps, 0.1) == {"a": 1000.0, "b": 2000.0}  # of 0.5, 8, 2, 2, 2
    assert clock.calls == ["a", "b"] * (3 + 5)  # five rounds at least


def test_as_many_rounds_as_there_is_time_for(clock):
    medians({"a": clock.step("a", 0.5)}, 10.0)
    assert len(clock.calls) == 3 + 20
    clock.calls.clear()
    medians({"a": clock.step("a", 0.5)}, 10.0, most=7)
    assert len(clock.calls) == 3 + 7


def test_what_autograd_keeps():
    x = torch.randn(6, 8, requires_grad=True)
    assert kept_bytes(x.exp) == 6 * 8 * 4  # its result
    assert kept_bytes(lambda: x + 1) == 0
    layer = nn.Linear(8, 3)
    assert kept_bytes(partial(layer, x)) == (6 * 8 + 3 * 8) * 4  # input and weight
    assert kept_bytes(lambda: layer(x) + layer(x)) == (6 * 8 + 3 * 8) * 4  # each once


def test_heads_of_vectors():
    heads = make_heads(16, 10, None, 7, 3)
    shapes = {name: head(torch.randn(5, 16)).shape for name, head in heads.items()}
    assert list(shapes) == [BASELINE, "kernel", "prototypes", "landmarks"]
    assert set(shapes.values()) == {(5, 10)}
    assert [head.weight.shape[0] for head in list(heads.values())[1:]] == [10, 30, 7]


def test_heads_of_positions(monkeypatch):
    features = torch.randn(5, 16, 4, 1)
    heads = make_heads(16, 10, 4, 7, 4)
    assert list(heads) == [BASELINE, "expansion", "attentive", "second_order", "landmarks"]
    assert all(heads[name](features).shape == (5, 10) for name in heads if heads[name].pools)
    assert [name for name in heads if not heads[name].pools] == [BASELINE]
    monkeypatch.setattr(timing, "MAX_WEIGHTS", 16 * 16 * 10 - 1)
    assert set(heads) - set(make_heads(16, 10, 4, 7, 4)) == {"second_order"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [None, 4])
def test_costs(positions, dtype):
    heads = make_heads(16, 10, positions, 7, 4)
    costs = measure(heads, torch.randn(5, 16, *((positions, 1) if positions else ())), dtype, 0.01)
    assert [cost["head"] for cost in costs] == list(heads)
    assert costs[0]["parameters"] == 16 * 10 + 10
    assert all(min(cost["training_ms"], cost["inference_ms"], cost["kept_bytes"]) > 0 for cost in costs)


def test_the_command():
    sizes = ["--features", "16", "--classes", "10", "--batch", "4", "--seconds", "0.1", "--device", "cpu"]
    shown = CliRunner().invoke(app, ["bench", *sizes])
    assert shown.exit_code == 0, shown.output
    assert "4 x 16 features, 10 classes, float32" in " ".join(shown.stdout.split())
    (line,) = [line for line in shown.stdout.splitlines() if BASELINE in line and "170" in line]
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[:2] == [BASELINE, "170"]
    assert cells[3] == cells[5] == "1.00"  # its ratios to itself
    done = CliRunner().invoke(app, ["bench", *sizes, "--positions", "9", "--dtype", "bfloat16", "--json"])
    found = json.loads(done.stdout)
    assert (found["positions"], found["dtype"], found["device"]) == (9, "bfloat16", "cpu")
    assert [cost["head"] for cost in found["heads"]] == list(make_heads(16, 10, 9, 7, 4))


def test_more_memory_than_there_is():
    sizes = ["--features", str(2**24), "--classes", str(2**24), "--device", "cpu"]
    failed = CliRunner().invoke(app, ["bench", *sizes])
    assert sentence_of(failed.exception).startswith("there is no memory left for a tensor of 1,125,899.9 GB in")


def test_a_dtype_that_nobody_knows():
    failed = CliRunner().invoke(app, ["bench", "--dtype", "half"])
    assert str(failed.exception) == "unknown dtype 'half'; choose one of float32, bfloat16, float16"
