"""Kill `kernelhead train` at random moments and resume it: `python lab/campaigns/kills.py OUT.json [TRIALS]`.

Each trial kills a run up to three times (SIGKILL), then lets it end. Its weights must equal those of a run without
interruption to the bit, and metrics.jsonl must have every epoch once. Exit status 1 otherwise.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits

from kernelhead.files import environment, write_bytes

EPOCHS, KILLS, PER_CLASS, CLASSES = 4, 3, 40, 4
SETTINGS = {
    "--backbone": "kernelhead_lab.networks:cifar_resnet8", "--epochs": EPOCHS, "--batch-size": 16, "--workers": 1,
    "--checkpoint-seconds": 0, "--device": "cpu",
}  # fmt: skip


def make_images(folder: Path) -> None:
    """Write digits of scikit-learn as images in class folders."""
    pixels, labels = load_digits(return_X_y=True)
    for label in range(CLASSES):
        (folder / str(label)).mkdir(parents=True)
        for index, image in enumerate(pixels[labels == label][:PER_CLASS]):
            grey = Image.fromarray((image.reshape(8, 8) * 255 / 16).astype(np.uint8))
            grey.resize((32, 32)).convert("RGB").save(folder / str(label) / f"{index}.png")


def start(data: Path, out: Path) -> "subprocess.Popen[bytes]":
    """Begin or continue a run."""
    settings = [str(word) for pair in SETTINGS.items() for word in pair]
    command = [sys.executable, "-m", "kernelhead", "train", "--data", str(data), *settings, "--out", str(out)]
    return subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(out: Path, trials: int) -> None:
    """Kill, resume, compare, and write the totals."""
    totals = {"trials": trials, "kills": 0, "weights differ": 0, "epochs not once each": 0, "temporary files left": 0}
    random.seed(0)
    with tempfile.TemporaryDirectory() as made:
        data, whole = Path(made, "images"), Path(made, "whole")
        make_images(data)
        began = time.monotonic()
        assert start(data, whole).wait() == 0
        seconds = time.monotonic() - began
        expected = safetensors.torch.load_file(whole / "model.safetensors")
        for trial in range(trials):
            run = Path(made, str(trial))
            for _ in range(KILLS):
                process = start(data, run)
                try:
                    process.wait(timeout=random.uniform(0.3, 1) * seconds)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    totals["kills"] += 1
            if not (run / "model.safetensors").exists() and start(data, run).wait():
                raise SystemExit(f"trial {trial} does not resume")
            found = safetensors.torch.load_file(run / "model.safetensors")
            totals["weights differ"] += any(not torch.equal(found[name], expected[name]) for name in expected)
            epochs = [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()]
            totals["epochs not once each"] += epochs != list(range(1, EPOCHS + 1))
            totals["temporary files left"] += sum(1 for each in run.rglob(".*") if each.is_file())
            print(json.dumps(totals), flush=True)
    write_bytes(out, (json.dumps({**totals, **environment()}, indent=1) + "\n").encode())
    sys.exit(bool(totals["weights differ"] or totals["epochs not once each"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50)
