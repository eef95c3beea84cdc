"""Record golden.json with the code of commit 7f03e76, the last one before `kernelize` made the networks of `train`.

    git worktree add /tmp/before 7f03e76
    PYTHONPATH=/tmp/before/src python tests/surgery/record_golden.py

That code cuts a network off at its feature map by names of its modules, averages the map and puts a head behind it.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

SAMPLES, CLASSES = 2, 4
GOLDEN = Path(__file__).with_name("golden.json")
NETWORKS = [
    *(f"torchvision/{name}" for name in ("resnet18", "resnet50", "densenet121", "efficientnet_b0")),
    *("torchvision/mobilenet_v3_small", "torchvision/vgg11", "timm/resnet10t", "timm/test_vit", "timm/convnext_atto"),
]
HEADS = {"linear": {}, "kernel": {"degree": 4, "coefficients": "relu"}, "landmarks": {"landmarks": 128}}
FORMER_NAMES = {"linear": "softmax", "kernel": "kernel", "landmarks": "best"}


def values(name, shape):
    """Numbers from -1 to 1 that depend on a name alone, made of integers so that every machine makes the same."""
    index = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    mixed = (index + np.uint64(zlib.crc32(name.encode()))) * np.uint64(2654435761) % np.uint64(2**32)
    mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519) % np.uint64(2**32)
    mixed = mixed ^ (mixed >> np.uint64(13))
    return torch.from_numpy(mixed.astype(np.float64) / 2**31 - 1).reshape(shape)


def fill(model, canonical):
    """Give a model in float64 weights that depend on `canonical(name)` and the shape alone."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        made = values(canonical(name), tuple(tensor.shape))
        last = name.rpartition(".")[2]
        if last == "raw_alpha":
            made = 1 + 0.5 * made
        elif last == "running_var" or (last == "weight" and tensor.dim() == 1):
            made = 1 + 0.25 * made
        elif tensor.dim() > 1 and last != "pos_embed":
            made = made * np.sqrt(9 / np.prod(tensor.shape[1:]))
        else:
            made = 0.1 * made
        tensor.copy_(made)


def logits_of(name, network, canonical):
    """Fill a network and run it. Its layers have the weights of their canonical names, a head those of "head/..."."""
    side = 160 if "vit" in name else 64
    with torch.no_grad():
        fill(network.eval().double(), canonical)
        return network(values("images", (SAMPLES, 3, side, side)))


def record(name, head):
    from kernelhead.backbones import Classifier, create_backbone

    from kernelhead.heads import create_head

    backbone = create_backbone(name.removeprefix("torchvision/"))
    layer = create_head(FORMER_NAMES[head], backbone.num_features, CLASSES, **HEADS[head])

    def canonical(name):
        return name.replace("head.", "head/", 1) if name.startswith("head.") else name.removeprefix("backbone.network.")

    return logits_of(name, Classifier(backbone, layer), canonical).tolist()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: {head: record(name, head) for head in HEADS} for name in NETWORKS}))
