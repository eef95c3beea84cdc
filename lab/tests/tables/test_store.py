"""What is still to be run is a function of files: here they are written by hand, and nothing is trained."""

import json
import math
import re
from dataclasses import replace
from itertools import product

import pytest

from kernelhead.finetune.results import BrokenResultError, save_result
from kernelhead.finetune.spec import TrainResult
from kernelhead_lab.spec import NETWORKS, LabSpec, Subset, head
from kernelhead_lab.tables import EXPERIMENTS
from kernelhead_lab.tables.experiment import Candidate, Cell, Protocol
from kernelhead_lab.tables.queue import chosen_cells
from kernelhead_lab.tables.store import Store, is_choice

PAPER = Protocol("paper", (0.1, 0.3), (1e-4,), 8)
TUNED = Protocol("tuned", (0.1, 0.3), (1e-4, 5e-4), 8)
SINGLE = Protocol("paper", (0.1,), (1e-4,), 8)


def spec(backbone="cifar_resnet8", **settings):
    return LabSpec("cifar10", f"{NETWORKS}{backbone}", **head("linear"), **settings)


PLAIN = Cell(spec())
STUDENT = Cell(spec("lenet5", teacher=PLAIN.spec), builds_on=PLAIN)
TENTH = Cell(spec(subset=Subset("random", 10)), chosen_as=PLAIN)
PART = Cell(spec(subset=Subset("margin", 30), seed_model=TENTH.spec), chosen_as=PLAIN, builds_on=TENTH)


@pytest.fixture(autouse=True)
def quick_files(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # there are thousands


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, 20)


def write(path, spec, accuracy=50.0, seconds=1.0):
    likelihood = {} if accuracy is None else {"nll": 1.0, "ece": 1.0}
    result = TrainResult(
        spec=spec,
        images={"train": 1, "test": 1, "left_out": 0},
        parameters={"backbone": 1, "head": 1},
        seconds=seconds,
        curve={"loss": [], "accuracy": []},
        accuracy=accuracy,
        **likelihood,
    )
    save_result(path, result)


def choose(store, cell, protocol, *accuracies):
    epochs = protocol.epochs_to_choose(store.epochs)
    for candidate, accuracy in zip(protocol.candidates(), accuracies, strict=True):
        path = store.choice_path(cell, protocol, candidate)
        write(path, protocol.applied(cell.spec, candidate, epochs, 0), accuracy)


def finish(store, cell, protocol, *seeds, accuracy=50.0, network=True, seconds=1.0):
    for seed in seeds:
        path = store.result_path(cell, protocol, seed)
        write(path, protocol.applied(cell.spec, store.choice(cell, protocol), store.epochs, seed), accuracy, seconds)
        if network and accuracy is not None:
            path.with_suffix(".safetensors").touch()


def told(jobs):
    """Runs by what tells them apart: network and images, choosing or not, seed, rate and decay."""
    return [
        (spec.key, is_choice(path), spec.seed, spec.learning_rate, spec.weight_decay) for path, spec in jobs.items()
    ]


def final(cell, seed, rate, decay=1e-4):
    return cell.spec.key, False, seed, rate, decay


def candidates(cell, protocol=PAPER):
    return [(cell.spec.key, True, 0, *candidate[:2]) for candidate in protocol.candidates()]


def test_paths_of_files(store, tmp_path):
    folder = tmp_path / "cifar10" / "20-epochs"
    linear = folder / "resnet8-linear"
    assert store.choice_path(PLAIN, TUNED, Candidate(0.1, 5e-4)) == linear / "choice-lr0.1-wd0.0005.json"
    assert store.result_path(PLAIN, TUNED, 3) is None
    choose(store, PLAIN, TUNED, 40.0, 41.0, 43.0, 42.0)
    assert store.result_path(PLAIN, TUNED, 3) == linear / "lr0.1-wd0.0005-seed3.json"
    student = folder / "lenet5-linear-taught-by-resnet8-linear-tuned"
    assert store.choice_path(STUDENT, TUNED, Candidate(0.3, 1e-4)) == student / "choice-lr0.3-wd0.0001.json"
    resolved = store.resolved(STUDENT, TUNED, Candidate(0.3, 1e-4), 5, 3)
    assert (resolved.epochs, resolved.teacher.epochs, resolved.teacher.seed) == (5, 20, 3)
    assert (resolved.teacher.learning_rate, resolved.teacher.weight_decay) == (0.1, 5e-4)
    assert store.model_path(resolved.teacher) == linear / "lr0.1-wd0.0005-seed3.safetensors"


def test_every_candidate_of_every_table_has_its_own_file(store):
    for experiment in EXPERIMENTS.values():
        for protocol in experiment.protocols.values():
            for cell in experiment.cells[:2]:
                paths = {store.choice_path(cell, protocol, each) for each in protocol.candidates()}
                assert len(paths) == len(protocol.candidates())


def test_choice_first_then_finals_with_what_was_chosen(store):
    assert told(store.missing(PLAIN, TUNED, [0, 1])) == candidates(PLAIN, TUNED)
    choose(store, PLAIN, TUNED, 40.0, 41.0, 43.0, 42.0)  # the order: rates, then decays
    jobs = store.missing(PLAIN, TUNED, [0, 1])
    assert told(jobs) == [final(PLAIN, seed, 0.1, 5e-4) for seed in (0, 1)]
    assert list(jobs) == [store.result_path(PLAIN, TUNED, seed) for seed in (0, 1)]
    assert {spec.epochs for spec in jobs.values()} == {20}
    finish(store, PLAIN, TUNED, 0, 1)
    assert store.missing(PLAIN, TUNED, [0, 1]) == {}


def test_only_the_candidates_that_lack_are_run(store):
    first = Candidate(0.1, 1e-4)
    write(store.choice_path(PLAIN, PAPER, first), PAPER.applied(PLAIN.spec, first, 20, 0))
    assert told(store.missing(PLAIN, PAPER, [0])) == candidates(PLAIN)[1:]
    assert store.choice(PLAIN, PAPER) is None


def test_a_single_candidate_needs_no_choice(store):
    assert told(store.missing(PLAIN, SINGLE, [0])) == [final(PLAIN, 0, 0.1, 1e-4)]
    assert store.count(product([PLAIN], [SINGLE]), [0]) == (0, 1)


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ((None, 1.0), 0.3),
        ((1.0, None), 0.1),
        ((0.0, None), 0.1),
        ((None, 0.0), 0.3),  # right of nothing, but it came to an end
        ((30.0, 30.0), 0.1),
        ((None, None), 0.1),
        ((29.9, 30.0), 0.3),
    ],
)
def test_who_wins(store, accuracies, best):
    choose(store, PLAIN, PAPER, *accuracies)
    assert store.choice(PLAIN, PAPER) == Candidate(best, 1e-4)


def test_protocols_share_what_is_the_same_run(store, tmp_path):
    choose(store, PLAIN, PAPER, 1.0, 99.0)
    finish(store, PLAIN, PAPER, 0)
    assert told(store.missing(PLAIN, TUNED, [0])) == candidates(PLAIN, TUNED)[2:]
    assert store.choice(PLAIN, TUNED) is None
    assert store.results(PLAIN, TUNED) == {}
    choose(store, PLAIN, TUNED, 1.0, 99.0, 2.0, 3.0)
    assert store.missing(PLAIN, TUNED, [0]) == {}
    assert store.results(PLAIN, TUNED).keys() == {0}
    assert store.count(product([PLAIN], [PAPER, TUNED]), [0]) == (5, 5)
    choose(store, PLAIN, TUNED, 1.0, 99.0, 2.0, 100.0)
    other = Store(tmp_path, 20)
    assert told(other.missing(PLAIN, TUNED, [0])) == [final(PLAIN, 0, 0.3, 5e-4)]
    assert other.results(PLAIN, PAPER).keys() == {0}
    assert other.count(product([PLAIN], [PAPER, TUNED]), [0]) == (5, 6)


def test_students_of_another_protocol_are_other_runs(store):
    """Their teachers may be."""
    choose(store, PLAIN, TUNED, 1.0, 99.0, 2.0, 3.0)
    finish(store, PLAIN, PAPER, 0)
    choose(store, STUDENT, PAPER, 1.0, 2.0)
    finish(store, STUDENT, PAPER, 0)
    assert store.missing(STUDENT, PAPER, [0]) == {}
    assert told(store.missing(STUDENT, TUNED, [0])) == candidates(STUDENT, TUNED)


def test_epochs_share_nothing(store, tmp_path):
    choose(store, PLAIN, PAPER, 1.0, 99.0)
    assert told(Store(tmp_path, 21).missing(PLAIN, PAPER, [0])) == candidates(PLAIN)


def test_a_rate_of_the_heads_own(store, tmp_path):
    """Those without one are the runs of a protocol that does not ask for it."""
    protocol = replace(PAPER, name="tuned", head_rates=(1.0, 10.0))
    choose(store, PLAIN, PAPER, 40.0, 50.0)
    jobs = store.missing(PLAIN, protocol, [0])
    rates = [(spec.learning_rate, spec.weight_decay, spec.head_rate) for spec in jobs.values()]
    assert rates == [(0.1, 1e-4, 10), (0.3, 1e-4, 10)]
    folder = tmp_path / "cifar10" / "20-epochs" / "resnet8-linear"
    assert next(iter(jobs)) == folder / "choice-lr0.1-wd0.0001-head10.json"
    choose(store, PLAIN, protocol, 40.0, 50.0, 60.0, 55.0)
    ((path, spec),) = store.missing(PLAIN, protocol, [1]).items()
    assert (spec.learning_rate, spec.head_rate, path) == (0.1, 10, folder / "lr0.1-wd0.0001-head10-seed1.json")
    finish(store, PLAIN, protocol, 1)
    assert set(store.results(PLAIN, protocol)) == {1}
    assert store.results(PLAIN, PAPER) == {}


def test_choices_by_shorter_runs(store, tmp_path):
    """They stand with those of their own length, which a table of that length shares."""
    short = replace(PAPER, choosing_epochs=5)
    jobs = store.missing(PLAIN, short, [0])
    assert told(jobs) == candidates(PLAIN)
    assert {spec.epochs for spec in jobs.values()} == {5}
    assert {path.parent for path in jobs} == {tmp_path / "cifar10" / "5-epochs" / "resnet8-linear"}
    choose(store, PLAIN, short, 40.0, 50.0)
    assert store.choice(PLAIN, PAPER) is None
    ((path, spec),) = store.missing(PLAIN, short, [0]).items()
    assert (is_choice(path), spec.epochs, spec.learning_rate) == (False, 20, 0.3)
    assert path == tmp_path / "cifar10" / "20-epochs" / "resnet8-linear" / "lr0.3-wd0.0001-seed0.json"
    assert Store(tmp_path, 5).choice(PLAIN, PAPER) == Candidate(0.3, 1e-4)
    assert {spec.epochs for spec in Store(tmp_path, 4).missing(PLAIN, short, [0]).values()} == {4}
    assert store.count(product([PLAIN], [short, PAPER]), [0]) == (2, 2 + 2 + 2)


def test_a_choice_is_handed_on(store):
    deeper = Cell(spec("cifar_resnet20"), chosen_as=PLAIN)
    part = Cell(spec("cifar_resnet20", subset=Subset("random", 10)), chosen_as=deeper)
    assert part.chooser == PLAIN
    assert told(store.missing(part, PAPER, [0])) == candidates(PLAIN)
    choose(store, PLAIN, PAPER, 1.0, 99.0)
    assert told(store.missing(part, PAPER, [0])) == [final(part, 0, 0.3, 1e-4)]


def test_what_is_built_on_a_network_needs_its_file(store):
    """Result files are kept longer than networks."""
    choose(store, PLAIN, PAPER, 2.0, 1.0)
    finish(store, PLAIN, PAPER, 0, network=False)
    assert store.missing(PLAIN, PAPER, [0]) == {}
    assert told(store.missing(STUDENT, PAPER, [0])) == [final(PLAIN, 0, 0.1, 1e-4)]
    finish(store, PLAIN, PAPER, 0)
    choose(store, STUDENT, PAPER, 1.0, 2.0)
    finish(store, STUDENT, PAPER, 0)
    store.result_path(PLAIN, PAPER, 0).with_suffix(".safetensors").unlink()
    assert store.missing(STUDENT, PAPER, [0]) == {}
    assert told(store.missing(STUDENT, PAPER, [0, 1])) == [final(PLAIN, 1, 0.1, 1e-4)]


def test_seeds_can_be_added_later(store):
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    finish(store, PLAIN, PAPER, 0, 2)
    assert told(store.missing(PLAIN, PAPER, range(4))) == [final(PLAIN, seed, 0.3) for seed in (1, 3)]
    assert set(store.results(PLAIN, PAPER)) == {0, 2}
    finish(store, PLAIN, PAPER, 10)
    assert set(Store(store.root, 20).results(PLAIN, PAPER)) == {0, 2, 10}


def test_a_finished_run_is_never_repeated_even_if_it_diverged(store):
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    finish(store, PLAIN, PAPER, 0, accuracy=None)
    assert store.missing(PLAIN, PAPER, [0]) == {}


def test_the_teacher_comes_before_its_students(store):
    assert told(store.missing(STUDENT, PAPER, [0, 1])) == candidates(PLAIN)
    choose(store, PLAIN, PAPER, 2.0, 1.0)
    assert told(store.missing(STUDENT, PAPER, [0, 1])) == [final(PLAIN, seed, 0.1) for seed in (0, 1)]
    finish(store, PLAIN, PAPER, 0, 1)
    assert told(store.missing(STUDENT, PAPER, [0, 1])) == candidates(STUDENT)
    choose(store, STUDENT, PAPER, 1.0, 2.0)
    assert told(store.missing(STUDENT, PAPER, [0, 1, 2])) == [final(PLAIN, 2, 0.1, 1e-4)]  # a seed was added
    assert told(store.missing(STUDENT, PAPER, [0, 1])) == [final(STUDENT, seed, 0.3) for seed in (0, 1)]
    finish(store, STUDENT, PAPER, 0)
    assert told(store.missing(STUDENT, PAPER, [0, 1])) == [final(STUDENT, 1, 0.3, 1e-4)]


def test_a_teacher_may_have_a_protocol_of_its_own(store):
    """What it was chosen by elsewhere is used, and students choose from rates of theirs."""
    students = Protocol("paper", (0.01, 0.02, 0.03), (1e-4,), 8, choosing_epochs=5, below=PAPER)
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    finish(store, PLAIN, PAPER, 0)
    jobs = store.missing(STUDENT, students, [0, 1])
    assert told(jobs) == [final(PLAIN, 1, 0.3, 1e-4)]
    (teacher,) = jobs.values()
    assert (teacher.epochs, teacher.batch_size) == (20, PAPER.batch_size)
    finish(store, PLAIN, PAPER, 1)
    assert told(store.missing(STUDENT, students, [0, 1])) == candidates(STUDENT, students)
    assert store.count(product([STUDENT], [students]), [0, 1]) == (2 + 2, 2 + 2 + 3 + 2)
    choose(store, STUDENT, students, 1.0, 3.0, 2.0)
    assert told(store.missing(STUDENT, students, [0, 1])) == [final(STUDENT, seed, 0.02) for seed in (0, 1)]


def test_the_choice_of_a_student_waits_for_the_teacher_of_seed_0(store):
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    finish(store, PLAIN, PAPER, 1)
    assert told(store.missing(STUDENT, PAPER, [1])) == [final(PLAIN, 0, 0.3, 1e-4)]
    finish(store, PLAIN, PAPER, 0)
    assert told(store.missing(STUDENT, PAPER, [1])) == candidates(STUDENT)


def test_the_seed_model_comes_before_subsets_and_rates_are_those_of_the_whole(store):
    assert told(store.missing(PART, PAPER, [0, 1])) == candidates(PLAIN)
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    assert told(store.missing(PART, PAPER, [0, 1])) == [final(TENTH, seed, 0.3) for seed in (0, 1)]
    finish(store, TENTH, PAPER, 0, 1)
    assert told(store.missing(PART, PAPER, [0, 1])) == [final(PART, seed, 0.3) for seed in (0, 1)]
    assert not list(store.root.rglob("resnet8-linear-*/choice-*"))


@pytest.mark.parametrize(("cell", "base"), [(STUDENT, PLAIN), (PART, TENTH)])
def test_nothing_is_built_on_a_network_that_diverged(store, cell, base):
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    finish(store, base, PAPER, 0)
    finish(store, base, PAPER, 1, accuracy=None)
    if cell is STUDENT:
        choose(store, STUDENT, PAPER, 1.0, 2.0)
    assert told(store.missing(cell, PAPER, [0, 1])) == [final(cell, 0, 0.3)]
    finish(store, cell, PAPER, 0)
    assert store.missing(cell, PAPER, [0, 1]) == {}


def test_no_choice_is_made_with_a_teacher_that_diverged(store):
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    finish(store, PLAIN, PAPER, 0, accuracy=None)
    finish(store, PLAIN, PAPER, 1)
    assert store.missing(STUDENT, PAPER, [0]) == {}
    assert store.missing(STUDENT, PAPER, [0, 1]) == {}


@pytest.mark.parametrize("content", ["{", "", "[]", '{"format": 1}', '{"format": 0, "accuracy": 1}'])
def test_a_damaged_file_is_named_and_run_again(store, content):
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    finish(store, PLAIN, PAPER, 0, 1)
    damaged = store.result_path(PLAIN, PAPER, 1)
    damaged.write_text(content)
    assert told(store.missing(PLAIN, PAPER, [0, 1])) == [final(PLAIN, 1, 0.3, 1e-4)]
    assert set(store.results(PLAIN, PAPER)) == {0}
    assert store.count(product([PLAIN], [PAPER]), [0, 1]) == (3, 4)
    (sentence,) = store.broken
    assert str(damaged) in sentence
    assert "delete it and run again" in sentence
    finish(store, PLAIN, PAPER, 1)
    assert store.missing(PLAIN, PAPER, [0, 1]) == {}
    assert set(store.results(PLAIN, PAPER)) == {0, 1}


def test_a_damaged_candidate_is_run_again_before_anything_is_chosen(store):
    choose(store, PLAIN, PAPER, 1.0, 2.0)
    store.choice_path(PLAIN, PAPER, Candidate(0.1, 1e-4)).write_bytes(b"\xff\xfe")
    assert told(store.missing(PLAIN, PAPER, [0])) == candidates(PLAIN)[:1]
    assert len(store.broken) == 1


def test_rates_first_then_the_other_decays_with_the_best_rate(store):
    protocol = Protocol("tuned", (0.1, 0.3), (5e-4, 1e-4), 8, rate_first=True)
    key = PLAIN.spec.key
    assert told(store.missing(PLAIN, protocol, [0])) == [(key, True, 0, rate, 5e-4) for rate in (0.1, 0.3)]
    for rate, accuracy in ((0.1, 40.0), (0.3, 41.0)):
        candidate = Candidate(rate, 5e-4)
        write(store.choice_path(PLAIN, protocol, candidate), protocol.applied(PLAIN.spec, candidate, 20, 0), accuracy)
    assert store.choice(PLAIN, protocol) is None
    assert told(store.missing(PLAIN, protocol, [0])) == [(key, True, 0, 0.3, 1e-4)]
    assert store.count(product([PLAIN], [protocol]), [0, 1]) == (2, 5)
    candidate = Candidate(0.3, 1e-4)
    path = store.choice_path(PLAIN, protocol, candidate)
    write(path, protocol.applied(PLAIN.spec, candidate, 20, 0), 40.5)
    assert store.choice(PLAIN, protocol) == Candidate(0.3, 5e-4)
    write(path, protocol.applied(PLAIN.spec, candidate, 20, 0), 41.5)
    store.forget(path)
    assert told(store.missing(PLAIN, protocol, [0])) == [final(PLAIN, 0, 0.3, 1e-4)]


def test_counts_have_choices_and_what_is_built_on_each_once(store):
    assert store.count(product([PLAIN], [PAPER]), range(3)) == (0, 5)
    assert store.count(product([PLAIN, PLAIN], [TUNED]), range(3)) == (0, 7)
    assert store.count(product([STUDENT], [PAPER]), range(3)) == (0, 10)
    assert store.count(product([STUDENT, PLAIN], [PAPER]), range(3)) == (0, 10)
    assert store.count(product([PART], [PAPER]), [0]) == (0, 2 + 1 + 1)
    assert store.count(product([PART, PLAIN], [PAPER]), [0]) == (0, 2 + 1 + 1 + 1)
    choose(store, PLAIN, PAPER, 1.0, None)
    finish(store, PLAIN, PAPER, 0, 7)
    assert store.count(product([STUDENT], [PAPER]), range(3)) == (3, 10)


@pytest.mark.parametrize(
    ("table", "paper", "tuned"),
    [
        ("cifar10", 30 + 5 * 4, 30 + 5 * 8),
        ("cifar100", 30 + 5 * 4, 30 + 5 * 8),
        ("transfer", 12 * 5, 12 * 9),
        ("distillation", 8 * 8 + 2 * 5, 8 * 15 + 2 * 9),
        ("active", 85 + 2 + 3 * 4, 85 + 2 + 3 * 8),
        ("kernels", 6 + 3 * 4, 6 + 3 * 8),
        ("rectification", 8 + 4 * 4, 8 + 4 * 8),
        ("activations", 8 + 4 * 4, 8 + 4 * 8),
        ("landmarks", 78 + 39 * 3, 78 + 39 * 6),
        ("saturation", 32 * 4, 32 * 7),
        ("beyond", 60 + 10 * 4, 60 + 10 * 8),
        ("mixup", 30 + 10 * 4, 30 + 10 * 8),
    ],
)
def test_counts_of_whole_tables(store, table, paper, tuned):
    experiment = EXPERIMENTS[table]
    assert store.count(product(experiment.cells, [experiment.protocols["paper"]]), [0]) == (0, paper)
    assert store.count(product(experiment.cells, [experiment.protocols["tuned"]]), [0]) == (0, tuned)


def test_every_table_can_be_finished_by_doing_what_is_missing(tmp_path):
    """Runs are only ever asked for when what they build on is there, and there are as many as were counted."""
    for experiment in EXPERIMENTS.values():
        store = Store(tmp_path / experiment.name, 20)
        protocol, cells = next(iter(experiment.protocols.values())), experiment.cells
        done, total = store.count(product(cells, [protocol]), range(2))
        total += len(cells) * protocol.rate_first  # the other decay, whose rate is not known yet
        written = 0
        while True:
            jobs = {}
            for cell in cells:
                jobs |= store.missing(cell, protocol, range(2))
            if not jobs:
                break
            for path, spec in jobs.items():
                assert not path.exists()
                for other in (spec.teacher, spec.seed_model):
                    assert other is None or store.model_path(other).exists()
                write(path, spec)
                path.with_suffix(".safetensors").touch()
                written += 1
        assert done + written == total
        assert store.count(product(cells, [protocol]), range(2)) == (total, total)


def test_time_left_is_told_from_finished_runs_of_the_same_network(store):
    assert store.seconds_left([PLAIN], SINGLE, [0]) is None
    for seconds, seed in ((10.0, 0), (20.0, 1), (90.0, 2)):
        finish(store, PLAIN, SINGLE, seed, seconds=seconds)
    fresh = Store(store.root, 20)
    assert fresh.seconds_left([PLAIN], PAPER, range(3)) == pytest.approx((2 + 3) * 20.0)
    assert fresh.seconds_left([PLAIN], TUNED, range(3)) == pytest.approx((4 + 3) * 20.0)
    other = Cell(replace(PLAIN.spec, data="cifar100"))
    assert fresh.seconds_left([PLAIN, other], PAPER, range(3)) is None
    assert Store(store.root, 40).seconds_left([PLAIN], PAPER, [0]) == pytest.approx((2 + 1) * 40.0)  # by the epoch
    choose(store, PLAIN, PAPER, 2.0, 1.0)
    assert Store(store.root, 20).seconds_left([PLAIN], PAPER, range(3)) == 0


def test_shorter_choices_take_less_time(store):
    finish(store, PLAIN, SINGLE, 0, seconds=20.0)
    fresh = Store(store.root, 20)
    assert fresh.seconds_left([PLAIN], replace(TUNED, choosing_epochs=5), [0]) == pytest.approx(4 * 5.0 + 20.0)


def test_time_left_has_that_of_teachers(store):
    finish(store, STUDENT, SINGLE, 0)
    assert Store(store.root, 20).seconds_left([STUDENT], PAPER, [0, 1]) is None
    finish(store, PLAIN, SINGLE, 0, seconds=100.0)
    left = Store(store.root, 20).seconds_left([STUDENT], PAPER, [0, 1])
    assert left == pytest.approx(4 * 1.0 + 4 * 100.0)
    assert math.isfinite(left)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"curve": None}, "has no usable curve; delete it and run again"),
        ({"nll": None}, "has an accuracy and no nll or ece; delete it and run again"),
        ({"extra": {}}, "does not say where it was run; delete it and run again"),
        ({"format": 1}, "has format 1, and 2 is read here; delete it and run again"),
    ],
)
def test_a_result_without_what_tables_need_is_named_and_run_again(store, change, sentence):
    finish(store, PLAIN, SINGLE, 0)
    path = store.result_path(PLAIN, SINGLE, 0)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert store.read(path) is None
    assert store.broken == [f"{path} {sentence}"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "cosine"}, "head='cosine', and its name says 'linear'"),
        ({"head_options": {"degree": 9}}, "head_options="),
        ({"rectified": True}, "rectified=True"),
        ({"learning_rate": 0.2}, "learning_rate=0.2"),
        ({"epochs": 21}, "epochs=21"),
    ],
)
def test_a_run_that_is_not_what_its_place_says_is_refused(store, change, words):
    """The folder of one head was that of another in format 1."""
    finish(store, PLAIN, SINGLE, 0)
    path = store.result_path(PLAIN, SINGLE, 0)
    write(path, replace(SINGLE.applied(PLAIN.spec, Candidate(0.1, 1e-4), 20, 0), **change))
    with pytest.raises(BrokenResultError, match=re.escape(words)):
        store.results(PLAIN, SINGLE)


def test_tables_whose_protocols_have_the_same_name_are_counted_together(tmp_path, write_runs):
    """What is not chosen yet by one of them is not taken for what the other will choose."""
    store = Store(tmp_path, 200)
    tables = [EXPERIMENTS["cifar100"], EXPERIMENTS["landmarks"]]
    apart = [list(product(chosen_cells(table, ()), [table.protocols["paper"]])) for table in tables]
    ours, theirs = ({(cell.spec.data, cell.spec.key) for cell, _ in wanted} for wanted in apart)
    assert ours & theirs  # the same networks, chosen otherwise
    single = [store.count(wanted, [0])[1] for wanted in apart]
    assert store.count([*apart[0], *apart[1]], [0]) == (0, sum(single))
    for wanted in apart:
        for cell, protocol in wanted:
            write_runs(store, cell, protocol, {0: 50.0})
    done, total = store.count([*apart[0], *apart[1]], [0])
    assert done == total <= sum(single)  # where both choose the same it is one run
