"""KernelHeadClassifier on two devices: accuracy, agreement of predictions, seconds. Needs torch and scikit-learn.

    python benchmarks/estimator_devices.py [--devices cpu cuda] [--samples 20000]

The default, and gradient descent, whose random numbers differ between devices.
"""

import argparse
import pickle
import time

import numpy as np
import sklearn
import torch
from sklearn import datasets
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from kernelhead import KernelHeadClassifier


def compare(
    name: str,
    x: np.ndarray,
    x_test: np.ndarray,
    y: np.ndarray,
    y_test: np.ndarray,
    devices: list[str],
    **options: object,
) -> None:
    print(f"{name}: {x.shape[0]} x {x.shape[1]}, {len(np.unique(y))} classes, {x.dtype}")
    answers = []
    for device in devices:
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        KernelHeadClassifier(random_state=0, device=device, **options).fit(x[:600], y[:600])  # libraries are loaded
        started = time.perf_counter()
        fitted = KernelHeadClassifier(random_state=0, device=device, **options).fit(x, y)
        fit = time.perf_counter() - started
        started = time.perf_counter()
        probabilities = fitted.predict_proba(x_test)
        predict = time.perf_counter() - started
        assert isinstance(probabilities, np.ndarray)
        assert fitted.head_.weight.device.type == device.split(":")[0], fitted.head_.weight.device
        pickled = pickle.dumps(fitted)
        state = fitted.__getstate__()["head_"].state_dict()
        assert {value.device.type for value in state.values()} == {"cpu"}
        again = pickle.loads(pickled).set_params(device="cpu").predict_proba(x_test)
        best = fitted.classes_[probabilities.argmax(1)]
        answers.append((best, probabilities))
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else float("nan")
        print(
            f"  {device:6} {fitted.solver_}: accuracy {100 * np.mean(best == y_test):.2f} %  "
            f"log-loss {log_loss(y_test, probabilities, labels=fitted.classes_):.4f}  fit {fit:.2f} s  "
            f"predict {len(x_test)} in {predict:.3f} s  loo {fitted.loss_:.5f}  ridge {fitted.ridge_:.4g}  "
            f"constant {fitted.constant_:.4g}  pickle on the CPU off by {np.abs(again - probabilities).max():.1e}  "
            f"GPU memory {memory:.2f} GiB",
            flush=True,
        )
        fitted.partial_fit(x[:2000], y[:2000]).partial_fit(x[:2000], y[:2000])
        print(f"         after partial_fit, twice: {100 * fitted.score(x_test, y_test):.2f} %", flush=True)
        del fitted
    (first, p), (second, q) = answers
    print(f"  same predictions: {100 * np.mean(first == second):.2f} %; probabilities off by {np.abs(p - q).max():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", nargs=2, default=["cpu", "cuda"])
    parser.add_argument("--samples", type=int, default=20_000)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, scikit-learn {sklearn.__version__}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        fitted = KernelHeadClassifier().fit(*datasets.load_iris(return_X_y=True))
        assert fitted.head_.weight.device.type == "cuda", "auto should have taken the GPU"
    x, y = datasets.load_digits(return_X_y=True)
    parts = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    compare("digits", *parts, options.devices)
    compare("digits by descent", *parts, options.devices, solver="adam", epochs=30)
    x, y = datasets.make_classification(
        options.samples + 10_000, 512, n_informative=64, n_redundant=64, n_classes=100, n_clusters_per_class=2,
        class_sep=3.0, random_state=0,
    )  # fmt: skip
    x, n = x.astype(np.float32), options.samples
    compare("synthetic", x[:n], x[n:], y[:n], y[n:], options.devices)
    half = min(n, 10_000)
    compare("synthetic by descent", x[:half], x[n:], y[:half], y[n:], options.devices, solver="adam")


if __name__ == "__main__":
    main()
