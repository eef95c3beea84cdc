"""`import kernelhead` needs torch and numpy alone."""

import subprocess
import sys

import kernelhead
from kernelhead import _version

EXTRAS = [
    "typer",
    "rich",
    "yaml",
    "safetensors",
    "matplotlib",
    "plotly",
    "scipy",
    "sklearn",
    "torchvision",
    "timm",
    "ray",
    "onnx",
    "onnxruntime",
    "pandas",
]

PROGRAM = f"""
import sys
import torch, numpy, torch.func, torch.export, torch._dynamo

extras = {EXTRAS!r}
for name in [name for name in sys.modules if name.partition(".")[0] in extras]:
    del sys.modules[name]  # torch brought these by itself; kernelhead is not to lean on that
of_torch = {{name.partition(".")[0] for name in sys.modules}}


class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "kernelhead" and top not in of_torch and top not in sys.stdlib_module_names:
            raise ImportError(f"kernelhead imports {{name}}")


sys.meta_path.insert(0, Block())
for name in extras:
    try:
        __import__(name)
    except ImportError as error:
        assert str(error) == f"kernelhead imports {{name}}", error
    else:
        raise SystemExit(f"{{name}} is not blocked")
import kernelhead
print(kernelhead.__version__)
"""


def test_import_needs_nothing_beside_torch_and_numpy():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == kernelhead.__version__


def test_version_is_the_one_of_the_package():
    assert isinstance(kernelhead.__version__, str)
    assert kernelhead.__version__ == _version.__version__
