"""What is measured of a trained network beyond its test accuracy."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernelhead_lab.data.streamed import StreamedImages
from kernelhead_lab.networks import build
from kernelhead_lab.spec import NETWORKS, LabSpec, head
from kernelhead_lab.tables.outcome import at_sizes


class Noise:
    """Images of one colour each, with noise."""

    short_side = 24

    def __init__(self, count):
        rng = np.random.default_rng(count)
        self.labels = np.arange(count) % 3
        self.images = rng.integers(
            80 * self.labels[:, None, None, None], 90 + 80 * self.labels[:, None, None, None], size=(count, 24, 30, 3)
        ).astype(np.uint8)

    def __len__(self):
        return len(self.labels)

    def image(self, index):
        return self.images[index]


@pytest.mark.parametrize("name", ["landmarks", "attentive", "linear"])
def test_a_head_is_measured_at_other_sizes_with_both_statistics(name):
    cpu = torch.device("cpu")
    training, testing = (StreamedImages(Noise(count), size=16, augment="imagenet", device=cpu) for count in (150, 30))
    options = {"landmarks": 8, "scale": 1.0} if name == "landmarks" else {}
    model = build(LabSpec("pets", f"{NETWORKS}cifar_resnet8", **head(name, **options)), 3).eval()
    before = copy.deepcopy(model.state_dict())
    found = at_sizes(model, training, testing, sizes=(20,))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert set(found) == ({"20"} if name == "linear" else {"20", "20, own statistics"})

    images, labels = testing.resized(20).plain(torch.arange(30))
    with torch.no_grad():
        assert found["20"]["nll"] == pytest.approx(F.cross_entropy(model(images), labels).item(), rel=1e-5)
        if name == "linear":
            return
        seen = []
        hook = model.head.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].double()))
        model(training.resized(20).plain(torch.arange(150))[0])
        hook.remove()
        model.head.norm.running_mean.copy_(seen[0].mean(0))
        model.head.norm.running_var.copy_(seen[0].var(0))
        expected = F.cross_entropy(model(images), labels).item()
    assert found["20, own statistics"]["nll"] == pytest.approx(expected, rel=1e-4)
    assert found["20, own statistics"]["nll"] != pytest.approx(found["20"]["nll"], rel=1e-2)
