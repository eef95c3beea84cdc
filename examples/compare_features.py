"""Compare a kernel head with baselines on features, where a plane tells the classes apart and where none does.

    python examples/compare_features.py

From the command line: kernelhead compare FEATURES.npz
"""

import numpy as np

from kernelhead.sklearn.compare import compare


def main() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 8))
    plane = x @ rng.normal(size=8) > 0
    product = x[:, 0] * x[:, 1] > 0
    for name, labels in (("a plane", plane), ("a product", product)):
        found = compare(x, labels, heads=["estimator"], baselines=["logistic", "knn"])
        print(f"Classes told apart by {name}:\n{found}\n")


if __name__ == "__main__":
    main()
