"""Shared by all tests: fixed seeds, one thread, and Triton kernels that run in a process of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("kernelhead", deadline=None, derandomize=True, database=None)
settings.load_profile("kernelhead")
# A virtual machine may name instructions for matrices (AMX) that it has not: a product in bfloat16 ends the process
# then. This is read by the first product, here and in what tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell has it in what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the tensors are tiny: threads only wait for each other, and for other test processes


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals():
    """An interrupted command ignores further signals, as it is leaving; what a test starts would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def found(request):
    """What the test file prints as a program: on the GPU where there is one, else under Triton's interpreter."""
    return _run_as_program(request.path)


@pytest.fixture(scope="module")
def found_in_full(request):
    """The same on more sizes."""
    return _run_as_program(request.path, "full")


@pytest.fixture
def run_processes(tmp_path):
    """Run a test file as so many processes at once, each with its rank; the first that fails ends the others."""

    def run(path, count, *arguments):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        said = [(tmp_path / f"{rank}.txt").open("w+") for rank in range(count)]
        started = [
            subprocess.Popen([sys.executable, path, str(rank), *arguments], stdout=out, stderr=out, env=environment)
            for rank, out in enumerate(said)
        ]
        while any(each.poll() is None for each in started) and not any(each.returncode for each in started):
            time.sleep(0.05)
        failed = [rank for rank, each in enumerate(started) if each.poll()]
        for each in started:
            each.kill()
            each.wait()
        texts = [out.seek(0) or out.read() for out in said]
        for out in said:
            out.close()
        assert not failed, texts[failed[0]]

    return run


def _run_as_program(path, *arguments):
    """The interpreter has to be chosen before triton is imported, and other tests import it."""
    if sys.platform != "linux":
        pytest.skip("triton is made for Linux, where torch brings it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "tests/fused"), *sys.path])}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    result = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
