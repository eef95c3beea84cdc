"""Classification layers that learn their own kernel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernelhead._version import __version__

if TYPE_CHECKING:
    from kernelhead import coefficients, kernels
    from kernelhead.heads import HEADS, KernelClassifier, create_head
    from kernelhead.parameters import parameter_groups

__all__ = ["HEADS", "KernelClassifier", "__version__", "coefficients", "create_head", "kernels", "parameter_groups"]

_HOME = {
    "HEADS": "kernelhead.heads",
    "KernelClassifier": "kernelhead.heads",
    "create_head": "kernelhead.heads",
    "parameter_groups": "kernelhead.parameters",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: torch takes seconds, and `kernelhead --help` needs none."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in __all__:
        return import_module(f"kernelhead.{name}")
    raise AttributeError(f"module 'kernelhead' has no attribute {name!r}")
