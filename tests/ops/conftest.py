"""What the tests of Triton kernels share."""

import json
import os
import subprocess
import sys

import pytest
import torch


@pytest.fixture(scope="module")
def found(request):
    """What the test file prints as a program: on the GPU where there is one, else under Triton's interpreter."""
    if sys.platform != "linux":
        pytest.skip("triton is made for Linux, where torch brings it")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, request.path], capture_output=True, text=True, env={**os.environ, **interpreted}
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
