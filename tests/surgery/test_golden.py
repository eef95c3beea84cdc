"""Logits of networks by name with a new head, against those recorded before `kernelize` was the only way to make them.

record_golden.py made golden.json, with code that averaged a network's feature map and put a head behind it, in float64
and with weights that depend on names alone. `kernelize` keeps what a network does between its feature map and its last
layer. The intended differences, each undone by a function of `UNDO` or by `rectified` here, are:

- VGG keeps the hidden layers of its classifier and its 7x7 average pooling before them.
- MobileNetV3 keeps the hidden layer of its classifier.
- ConvNeXt keeps the LayerNorm between pooling and classifier, and a head that pools receives its values per position.
- A ViT gives heads without pooling the class token that its own classifier reads, not the mean of all tokens.
- Networks of timm, and those of torchvision other than ResNets, lose the ReLU before the features as well, unless
  `rectified=True`.
"""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from kernelhead import kernelize
from kernelhead.finetune.backbones import create_network
from kernelhead.surgery import changes

RECORDER = runpy.run_path(str(Path(__file__).with_name("record_golden.py")))
HEADS, CLASSES, logits_of = RECORDER["HEADS"], RECORDER["CLASSES"], RECORDER["logits_of"]
GOLDEN = json.loads(RECORDER["GOLDEN"].read_text())


def without_hidden_layers(network):
    """Average the map and classify it at once."""
    features = [module for module in network.features.modules() if isinstance(module, nn.Conv2d)][-1].out_channels
    network.avgpool, network.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(features, CLASSES)


def without_last_norm(network):
    network.head.norm = nn.Identity()


def mean_of_tokens(network):
    network.global_pool, network.pool_include_prefix = "avg", True


UNDO = {
    "torchvision/vgg11": without_hidden_layers,
    "torchvision/mobilenet_v3_small": without_hidden_layers,
    "timm/convnext_atto": without_last_norm,
    "timm/test_vit": mean_of_tokens,
}
SLOW = ("torchvision/resnet50", "torchvision/densenet121", "torchvision/vgg11")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in GOLDEN])
def test_logits_are_those_recorded(name, head):
    network = create_network(name)
    UNDO.get(name, lambda network: None)(network)
    rectified = name not in ("torchvision/resnet18", "torchvision/resnet50", "torchvision/densenet121")
    kernelize(network.eval(), CLASSES, head=head, rectified=rectified, **HEADS[head])
    (layer,) = changes(network).layers
    assert (head == "landmarks") == bool(changes(network).pooled)

    def canonical(name):
        inner = name.removeprefix(f"{layer}.")
        return name if inner == name else f"head/{inner.removeprefix('kernel.')}"

    logits = logits_of(name, network, canonical)
    np.testing.assert_allclose(logits.numpy(), GOLDEN[name][head], rtol=1e-9, atol=1e-12)
