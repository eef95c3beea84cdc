"""Classification layers that learn their own kernel."""

from kernelhead import coefficients, kernels
from kernelhead._version import __version__
from kernelhead.heads import HEADS, KernelClassifier, create_head
from kernelhead.parameters import parameter_groups

__all__ = ["HEADS", "KernelClassifier", "__version__", "coefficients", "create_head", "kernels", "parameter_groups"]
