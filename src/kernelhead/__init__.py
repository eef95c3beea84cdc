"""Classification layers that learn their own kernel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernelhead._version import __version__

if TYPE_CHECKING:
    from kernelhead import coefficients, compare, export, kernels, surgery
    from kernelhead.estimator import KernelHeadClassifier
    from kernelhead.heads import HEADS, KernelClassifier, create_head
    from kernelhead.losses import kernel_cross_entropy, mixup_cross_entropy
    from kernelhead.parameters import parameter_groups
    from kernelhead.surgery import kernelize

__all__ = [
    "HEADS",
    "KernelClassifier",
    "KernelHeadClassifier",
    "__version__",
    "coefficients",
    "compare",
    "create_head",
    "export",
    "kernel_cross_entropy",
    "kernelize",
    "kernels",
    "mixup_cross_entropy",
    "parameter_groups",
    "surgery",
]

_HOME = {
    "HEADS": "kernelhead.heads",
    "KernelClassifier": "kernelhead.heads",
    "KernelHeadClassifier": "kernelhead.estimator",
    "create_head": "kernelhead.heads",
    "kernel_cross_entropy": "kernelhead.losses",
    "kernelize": "kernelhead.surgery",
    "mixup_cross_entropy": "kernelhead.losses",
    "parameter_groups": "kernelhead.parameters",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: torch takes seconds, and `kernelhead --help` needs none."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in __all__:
        return import_module(f"kernelhead.{name}")
    raise AttributeError(f"module 'kernelhead' has no attribute {name!r}")
