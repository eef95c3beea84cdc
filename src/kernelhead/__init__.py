"""Classification heads that learn their own kernel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernelhead._version import __version__

if TYPE_CHECKING:
    from kernelhead import export, kernels, surgery
    from kernelhead.functional import distillation_loss, kernel_cross_entropy, kernel_mean, mixup_cross_entropy
    from kernelhead.heads import (
        HEADS,
        AttentiveHead,
        CosineHead,
        ExpansionHead,
        KernelHead,
        LandmarkHead,
        LinearHead,
        PrototypeHead,
        SecondOrderHead,
        create_head,
    )
    from kernelhead.optim import parameter_groups
    from kernelhead.recalibration import recalibrate
    from kernelhead.saving import load, push_to_hub, save
    from kernelhead.sklearn import KernelHeadClassifier
    from kernelhead.surgery import kernelize

__all__ = [
    "HEADS",
    "AttentiveHead",
    "CosineHead",
    "ExpansionHead",
    "KernelHead",
    "KernelHeadClassifier",
    "LandmarkHead",
    "LinearHead",
    "PrototypeHead",
    "SecondOrderHead",
    "__version__",
    "create_head",
    "distillation_loss",
    "export",
    "kernel_cross_entropy",
    "kernel_mean",
    "kernelize",
    "kernels",
    "load",
    "mixup_cross_entropy",
    "parameter_groups",
    "push_to_hub",
    "recalibrate",
    "save",
    "surgery",
]

_HOME = {
    "functional": ("distillation_loss", "kernel_cross_entropy", "kernel_mean", "mixup_cross_entropy"),
    "optim": ("parameter_groups",),
    "recalibration": ("recalibrate",),
    "saving": ("load", "push_to_hub", "save"),
    "sklearn": ("KernelHeadClassifier",),
    "surgery": ("kernelize",),
}
_MODULES = ("export", "kernels", "surgery")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: torch takes seconds, and `kernelhead --help` needs none."""
    if name not in __all__:
        raise AttributeError(f"module 'kernelhead' has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"kernelhead.{name}")
    home = next((module for module, names in _HOME.items() if name in names), "heads")
    return getattr(import_module(f"kernelhead.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
