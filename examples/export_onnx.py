"""Write a network with a kernel head as ONNX, and run the file with onnxruntime alone.

    python examples/export_onnx.py [FOLDER]

Needs pip install 'kernelhead[export]'. A trained checkpoint is exported by `kernelhead export CHECKPOINT`.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

from kernelhead import PrototypeHead
from kernelhead.export import export_onnx, export_pt2

CLASSES = ["circle", "square", "triangle"]


def main(folder: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        PrototypeHead(16, len(CLASSES), prototypes=2),
    )
    example = torch.zeros(1, 1, 28, 28)
    metadata = {"classes": CLASSES, "mean": [0.5], "std": [0.25]}
    written = export_onnx(network, folder / "shapes.onnx", example, input_name="images", metadata=metadata)
    print(f"{written.path.name}: {written.bytes} bytes, differs from PyTorch by at most {written.difference:.1e}")

    # The rest needs neither torch nor kernelhead. The batch may be of any size.
    session = onnxruntime.InferenceSession(written.path)
    known = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    pixels = np.random.default_rng(0).random((5, 1, 28, 28), dtype=np.float32)
    (logits,) = session.run(["logits"], {"images": (pixels - known["mean"][0]) / known["std"][0]})
    print("predicted:", ", ".join(known["classes"][label] for label in logits.argmax(1)))

    # PyTorch's own format: a program that runs without the Python code of the network.
    written = export_pt2(network, folder / "shapes.pt2", example, metadata=metadata)
    program = torch.export.load(written.path).module()
    same = torch.allclose(program(torch.ones(4, 1, 28, 28)), network.eval()(torch.ones(4, 1, 28, 28)), atol=1e-5)
    print(f"{written.path.name}: {'the same logits' if same else 'other logits'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
