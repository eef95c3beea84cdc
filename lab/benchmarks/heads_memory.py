"""What each head keeps for its backward pass, and its parameters, on the feature maps of a CIFAR ResNet.

    python lab/benchmarks/heads_memory.py [--json lab/results/bench/heads_memory.json]

Counted by hooks on a CPU, so it needs no GPU and repeats itself on every machine. Heads have their defaults.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from kernelhead import HEADS, create_head
from kernelhead.files import environment
from kernelhead.timing import kept_bytes

BATCH, FEATURES, SIDE, CLASSES = 128, 64, 8, 100


def measure(name: str) -> dict[str, int]:
    """Return parameters and kept bytes of a head; heads that do not pool take the average over positions."""
    head = create_head(name, FEATURES, CLASSES)
    shape = (BATCH, FEATURES, SIDE, SIDE) if head.pools else (BATCH, FEATURES)
    features = torch.randn(shape, requires_grad=True)
    return {
        "parameters": sum(each.numel() for each in head.parameters()),
        "kept_bytes": kept_bytes(partial(head, features)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = {name: measure(name) for name in HEADS}
    for name, row in rows.items():
        print(f"{name:12} {row['parameters']:9,} parameters {row['kept_bytes'] / 1e6:8.2f} MB")
    if arguments.json:
        shape = [BATCH, FEATURES, SIDE, SIDE]
        content = {"format": 2, "shape": shape, "classes": CLASSES, "rows": rows, "environment": environment()}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
