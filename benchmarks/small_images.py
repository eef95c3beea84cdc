"""A folder of 1,200 small images, 15 epochs from scratch: `kernelhead train` beside a plain script, over seeds.

    python benchmarks/small_images.py [--data cifar grey digits] [--heads linear landmarks] [--seeds 0 1 2]
        [--epochs 15] [--json lab/results/bench/small_images.json]

`cifar` is a subset of CIFAR-10, `grey` the same images without colour at 28 pixels, `digits` scikit-learn's at 28
pixels. All train the laboratory's ResNet-8. `kernelhead train` gets data, network, head, seed and epochs; every other
setting is its own. The plain script is of the usual kind: pad by 4, crop, flip, batches of 64, SGD with momentum, one
cycle. Its highest rate is the best of four on the test images of seed 0, which favours it. Rows of other data that the
JSON file already has are kept.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from kernelhead.files import environment, write_bytes
from kernelhead.finetune.cifar import load_cifar
from kernelhead.finetune.results import FORMAT

TRAIN, TEST = 1200, 2000
BACKBONE = "kernelhead_lab.networks:cifar_resnet8"
PAD, BATCH, RATES = 4, 64, (0.05, 0.1, 0.2, 0.4)
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def images_of(name: str) -> Arrays:
    """Images uint8 (n, S, S) or (n, S, S, 3) with labels, of both parts."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        grey = [Image.fromarray((255 / 16 * each.reshape(8, 8)).round().astype(np.uint8)) for each in x]
        pixels = np.stack([np.asarray(each.resize((28, 28), Image.Resampling.BICUBIC)) for each in grey])
        order = np.random.default_rng(0).permutation(len(y))
        return {"train": (pixels[order[:TRAIN]], y[order[:TRAIN]]), "test": (pixels[order[TRAIN:]], y[order[TRAIN:]])}
    cifar, parts = load_cifar("cifar10"), {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        x, y = getattr(cifar, f"x_{part}"), getattr(cifar, f"y_{part}")
        chosen = np.concatenate([np.flatnonzero(y == label)[: count // 10] for label in range(10)])
        x = x[chosen]
        if name == "grey":
            small = (Image.fromarray(each).convert("L").resize((28, 28), Image.Resampling.BICUBIC) for each in x)
            x = np.stack([np.asarray(each) for each in small])
        parts[part] = (x, y[chosen])
    return parts


def write_folder(parts: Arrays, folder: Path) -> None:
    for part, (pixels, labels) in parts.items():
        for index, (each, label) in enumerate(zip(pixels, labels, strict=True)):
            path = folder / part / f"class{label}" / f"{index:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(each).save(path)


def ours(folder: Path, head: str, seed: int, epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "run"
        command = [sys.executable, "-m", "kernelhead", "train", "--data", folder, "--backbone", BACKBONE]
        command += ["--head", head, "--seed", seed, "--epochs", epochs, "--no-report", "--out", out]
        subprocess.run([str(each) for each in command], check=True, capture_output=True, env=os.environ)
        result = json.loads((out / "result.json").read_text())
    return {"accuracy": result["accuracy"], "nll": result["nll"]}


def plain(parts: Arrays, seed: int, epochs: int, rate: float) -> dict[str, Any]:
    """The usual script: everything in memory, one line per step."""
    from kernelhead_lab.networks import cifar_resnet8

    def tensors(part: str) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, labels = parts[part]
        pixels = pixels if pixels.ndim == 4 else np.repeat(pixels[..., None], 3, 3)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        return (images - 0.47) / 0.25, torch.from_numpy(labels.astype(np.int64))

    torch.manual_seed(seed)
    (images, labels), (test, answers) = tensors("train"), tensors("test")
    network: nn.Module = cifar_resnet8()
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    steps = len(images) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps * epochs)
    size, padded = images.shape[-1], F.pad(images, (PAD,) * 4)
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for step in range(steps):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            corners = torch.randint(2 * PAD + 1, (BATCH, 2)).tolist()
            crops = [padded[i, :, y : y + size, x : x + size] for i, (y, x) in zip(chosen, corners, strict=True)]
            batch = torch.stack(crops)
            batch = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch.flip(3), batch)
            loss = F.cross_entropy(network(batch), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    network.eval()
    with torch.no_grad():
        logits = torch.cat([network(each) for each in test.split(500)])
    accuracy = 100 * (logits.argmax(1) == answers).double().mean().item()
    nll = F.cross_entropy(logits.double(), answers).item()
    return {"accuracy": accuracy, "nll": nll}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["cifar", "grey"])
    parser.add_argument("--heads", nargs="+", default=["linear", "landmarks"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name in options.data:
        with tempfile.TemporaryDirectory() as temporary:
            parts = images_of(name)
            write_folder(parts, Path(temporary))
            tried = {rate: plain(parts, 0, options.epochs, rate)["accuracy"] for rate in RATES}
            best = max(tried, key=tried.__getitem__)
            rows[name] = {"plain_rates": tried, "plain_rate": best, "plain": [], **{head: [] for head in options.heads}}
            for seed in options.seeds:
                rows[name]["plain"].append(plain(parts, seed, options.epochs, best))
                for head in options.heads:
                    rows[name][head].append(ours(Path(temporary), head, seed, options.epochs))
                for method in ("plain", *options.heads):
                    print(f"{name:7} seed {seed} {method:10} {rows[name][method][-1]['accuracy']:6.2f} %", flush=True)
        for method in ("plain", *options.heads):
            found = [each["accuracy"] for each in rows[name][method]]
            print(f"{name:7} mean   {method:10} {statistics.fmean(found):6.2f} %  {found}", flush=True)
    if options.json:
        if options.json.exists():
            rows = json.loads(options.json.read_text())["rows"] | rows
        settings = {"train": TRAIN, "epochs": options.epochs, "seeds": options.seeds, "backbone": BACKBONE}
        content = {"format": FORMAT, "benchmark": "small_images", **settings, "rows": rows, **environment()}
        write_bytes(options.json, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
