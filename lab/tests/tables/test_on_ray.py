"""Tables on a local Ray cluster of two machines, on the loopback interface; one of them is killed."""

import functools
import os
import sys
import threading
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kernelhead.finetune.results import load_result
from kernelhead_lab.cli import app
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables import EXPERIMENTS, on_ray, runner
from kernelhead_lab.tables.claims import CLAIMS, TURN
from kernelhead_lab.tables.groups import PARTIAL
from kernelhead_lab.tables.queue import Settings

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray and what it imports

TABLE = EXPERIMENTS["rectification"]
SETTINGS = Settings(epochs=4, only=("SM ResNet-20",), quick=True)


@pytest.fixture
def cluster(monkeypatch):
    """A cluster with two machines of one core each beside its head, which has none."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # so that it takes the loopback interface
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        made.machines = [made.add_node(num_cpus=1) for _ in range(2)]
        yield made
    finally:
        made.shutdown()


def numbers_below(folder):
    """Results without what depends on the clock and the machine."""
    paths = [path for path in folder.rglob("*.json") if path.parent.name != PARTIAL]
    results = {str(path.relative_to(folder)): load_result(path, LabSpec) for path in paths}
    return {path: replace(result, seconds=0.0, at_once=0, extra={}) for path, result in results.items()}


@pytest.mark.slow
def test_a_killed_machine_changes_nothing(cluster, tmp_path):
    runs, told, killed, over = tmp_path / "ray", [], threading.Event(), threading.Event()

    def kill_one():
        """When both machines train."""
        while len(list((runs / PARTIAL).glob("*.json"))) < 2:
            if over.wait(0.05):
                return
        cluster.remove_node(cluster.machines[0], allow_graceful=False)
        killed.set()

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        on_ray.run([TABLE], runs, SETTINGS, told.append, cluster.address, at_once=1)
    finally:
        over.set()
        killer.join()
    assert killed.is_set()

    runner.run([TABLE], tmp_path / "alone", SETTINGS, lambda now: None)
    found, expected = numbers_below(runs), numbers_below(tmp_path / "alone")
    assert len(expected) == 6  # two cells: two rates each, and then one training
    assert found == expected
    assert [path.name for path in (runs / CLAIMS).iterdir()] == [TURN]
    assert not list((runs / PARTIAL).iterdir())
    assert max(now.done for now in told) > 0
    assert {now.total for now in told} == {len(expected)}


def test_without_a_cluster_there_is_a_sentence(tmp_path, monkeypatch):
    from ray._private import services

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(set))  # another test may have a cluster
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    options = ["--quick", "--device", "cpu", "--runs", str(tmp_path), "--ray", "auto"]
    done = CliRunner().invoke(app, ["reproduce", "rectification", *options])
    said = str(done.exception)
    assert said.startswith("no Ray cluster at 'auto' lets this process in (Could not find any running Ray instance")
    assert said.endswith("begin one with 'ray start --head', or give another --ray")


@pytest.mark.parametrize("table", ["synthetic", "list"])
def test_other_tables_have_no_cluster(table):
    done = CliRunner().invoke(app, ["reproduce", table, "--ray", "auto"])
    assert "has no --ray; leave it out" in str(done.exception)


def test_without_ray_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="--ray needs Ray; install it with pip install"):
        on_ray.run([TABLE], tmp_path, SETTINGS, print, "auto", at_once=1)
