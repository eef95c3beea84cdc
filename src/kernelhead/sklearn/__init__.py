"""Classifiers for feature vectors: a scikit-learn estimator, and its comparison with others."""

from kernelhead.sklearn.estimator import KernelHeadClassifier

__all__ = ["KernelHeadClassifier"]
