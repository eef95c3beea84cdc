"""Statistics and temperature of trained heads, estimated anew."""

import copy
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from numpy.polynomial import polynomial as P
from torch import nn
from torch.nn import functional as F

import kernelhead
from kernelhead import create_head, kernelize, recalibrate
from kernelhead.metrics import negative_log_likelihood

D, C = 6, 4
SIZES = {"landmarks": {"landmarks": 5}, "expansion": {"width": 5}, "attentive": {"queries": 2}}
CASES = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "kernel": ("kernel", {}),
    "kernel-bias": ("kernel", {"bias": True, "coefficients": "softplus", "temperature": 0.5}),
    "kernel-softmax": ("kernel", {"coefficients": "softmax"}),
    "kernel-sigmoid": ("kernel", {"coefficients": "sigmoid"}),
    "kernel-rbf": ("kernel", {"kernel": "rbf"}),
    "prototypes": ("prototypes", {"prototypes": 2}),
    "landmarks": ("landmarks", {}),
    "second_order": ("second_order", {}),
    "expansion": ("expansion", {}),
    "attentive": ("attentive", {}),
}
STANDARDISED = {"landmarks": "norm", "expansion": "standard", "attentive": "norm"}


def make(name, **options):
    head = create_head(name, D, C, **SIZES.get(name, {}), **options).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
    head(torch.randn(50, D).double())
    return head.eval()


def maps(samples, side, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, D, side, side, generator=generator).double() + 0.5


def batches(x, *sizes):
    return list(x.split(sizes))


# --- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_all_samples():
    """Kernel means in NumPy, of batches of different sizes."""
    head, x = make("landmarks"), maps(31, 5)
    assert recalibrate(head, batches(x, 7, 20, 4)) == 1.0
    f = x.flatten(2).mT.numpy()
    w = head.weight.detach().numpy()
    t = np.einsum("nld,qd->nlq", f / np.linalg.norm(f, axis=-1, keepdims=True), w / np.linalg.norm(w, axis=1)[:, None])
    values = P.polyval(t, np.log1p(np.exp(head.raw_alpha.detach().numpy()))[2:]).mean(1)
    np.testing.assert_allclose(head.norm.running_mean, values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(head.norm.running_var, values.var(0, ddof=1), rtol=1e-9)


@pytest.mark.parametrize("name", STANDARDISED)
def test_nothing_else_changes(name):
    head = make(name)
    network = nn.Sequential(nn.Conv2d(3, D, 1), nn.BatchNorm2d(D), nn.Dropout(), head).double()
    network.train()[3].eval()
    before, x = copy.deepcopy(network.state_dict()), torch.randn(40, 3, 5, 5).double()
    modes = [module.training for module in network.modules()]
    recalibrate(network, batches(x, 10, 30))
    assert [module.training for module in network.modules()] == modes
    changed = {key for key, tensor in network.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {f"3.{STANDARDISED[name]}.running_mean", f"3.{STANDARDISED[name]}.running_var"}
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    seen = []
    with head.get_submodule(STANDARDISED[name]).register_forward_hook(lambda module, given, out: seen.append(out)):
        network.eval()(x)
    deviations, means = torch.std_mean(seen[0], 0)
    torch.testing.assert_close(means, torch.zeros_like(means), rtol=0, atol=1e-9)
    torch.testing.assert_close(deviations, torch.ones_like(means), rtol=0, atol=0.05)


def test_larger_maps_have_other_statistics():
    """The mean of more positions varies less: by the number of positions, where they are independent."""
    head = make("landmarks")
    recalibrate(head, [maps(2000, 3)])
    small = head.norm.running_var.clone()
    recalibrate(head, [maps(2000, 6, seed=1)])
    torch.testing.assert_close(small / head.norm.running_var, torch.full_like(small, 4.0), rtol=0.2, atol=0)


def test_float32_statistics_of_a_head_in_half_precision():
    head, x = make("landmarks").bfloat16(), maps(30, 4).bfloat16()
    recalibrate(head, [x])
    assert head.norm.running_var.dtype == torch.float32
    assert head(x).isfinite().all()


# --- temperature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("truth", [0.25, 3.0])
def test_logits_are_divided_by_the_temperature_that_labels_were_drawn_at(case, truth):
    name, options = CASES[case]
    head, x = make(name, **options), torch.randn(4000, D).double()
    recalibrate(head, [x]) if name in STANDARDISED else None
    with torch.no_grad():
        head.rescale(3 * truth / head(x).std(1).mean().item())  # labels are neither certain nor noise
        logits = head(x)
    labels = torch.distributions.Categorical(logits=logits / truth).sample()
    found = recalibrate(head, [(x[:1000], labels[:1000]), (x[1000:], labels[1000:])])
    assert found == pytest.approx(truth, rel=0.1)
    with torch.no_grad():
        after = head(x)
    torch.testing.assert_close(after, logits / found, rtol=1e-6, atol=1e-9)
    assert negative_log_likelihood(after, labels) < negative_log_likelihood(logits, labels)
    # It is saved, frozen and made again with the head.
    twin = create_head(**head.config).double().eval()
    twin.load_state_dict(head.state_dict())
    with torch.no_grad():
        assert torch.equal(twin(x), after)
        torch.testing.assert_close(head.freeze()(x), after)


@pytest.mark.parametrize("batch", ["pair", "list", "named"])
def test_kinds_of_batches(batch):
    head, x, y = make("linear"), torch.randn(60, D).double(), torch.arange(60) % C

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, *, features):
            return {"features": features} if features is None else type("Output", (), {"logits": self.head(features)})

    model, given = {
        "pair": (head, (x, y)),
        "list": (head, [x, y]),
        "named": (Named(), {"features": x, "labels": y}),
    }[batch]
    expected = copy.deepcopy(head)
    temperature = recalibrate(model, [given])
    assert temperature != 1.0
    torch.testing.assert_close(head(x), expected(x) / temperature)


def test_a_loader_without_labels_gives_tensors_in_lists():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(maps(30, 4)), batch_size=10)
    head = make("landmarks")
    before = head.norm.running_mean.clone()
    assert recalibrate(head, loader) == 1.0
    assert recalibrate(head, (batch for batch in loader)) == 1.0  # one pass is enough
    assert not torch.equal(head.norm.running_mean, before)


@pytest.mark.slow
def test_a_network_of_transformers(tmp_path):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=40, **sizes, num_labels=C)
    model = kernelize(transformers.BertForSequenceClassification(config), landmarks=8)
    ids = torch.randint(40, (50, 9))
    batch = transformers.BatchEncoding(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % C}
    )
    before = model.eval()(**batch).loss
    assert recalibrate(model, [batch]) > 1  # the labels are noise
    assert model(**batch).loss < before
    kernelhead.save(model, tmp_path)
    assert torch.equal(kernelhead.load(tmp_path)(**batch).logits, model(**batch).logits)


# --- two resolutions of real images -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_digits_at_another_size_than_in_training(capsys):
    """The example, on handwritten digits."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "recalibrate_digits.py"))
    trained, larger, statistics, temperature = example["main"]()
    assert trained < 0.2 < larger
    assert statistics < larger / 2
    assert temperature < statistics
    assert capsys.readouterr().out.count("NLL") == 4


@pytest.mark.slow
def test_exported_files_have_it(tmp_path):
    x = torch.randn(40, 3, 64, 64)
    model = kernelize(torchvision.models.resnet18(), C, landmarks=6).eval()
    before = model(x[:3]).detach()
    recalibrate(model, [(x, torch.arange(40) % C)])
    kernelhead.export.export_pt2(model, tmp_path / "model.pt2", x[:2])
    logits = torch.export.load(tmp_path / "model.pt2").module()(x[:3])
    torch.testing.assert_close(logits, model(x[:3]), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(logits, before)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors():
    x, y = torch.randn(20, D).double(), torch.arange(20) % C
    with pytest.raises(ValueError, match="recalibrate needs a head of kernelhead; Linear has none"):
        recalibrate(nn.Linear(D, C), [x])
    with pytest.raises(ValueError, match=r"needs two samples or more; got 1$"):
        recalibrate(make("landmarks"), [x[:1]])
    for used_up in ([], iter([(x, y)])):
        with pytest.raises(ValueError, match="got no batches; give a list or a DataLoader, which can be gone through"):
            recalibrate(make("landmarks"), used_up)
    with pytest.raises(ValueError, match="needs labels: KernelHead has no statistics, only a temperature"):
        recalibrate(make("kernel"), [x])
    with pytest.raises(ValueError, match="a mixture, aggregate='logsumexp'"):
        recalibrate(make("prototypes", aggregate="logsumexp"), [(x, y)])
    with pytest.raises(ValueError, match="FrozenHead has no parameters that its logits are proportional to"):
        recalibrate(nn.Sequential(nn.Linear(D, D).double(), make("landmarks").freeze()), [(x, y)])


def test_failures_leave_the_network_as_it_was():
    head = make("landmarks").train()
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(ValueError, match="expects"):
        recalibrate(head, [torch.randn(20, D).double(), torch.randn(20, D + 1).double()])
    assert head.training
    assert head.norm.training
    assert not head.norm._forward_pre_hooks
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())
    assert F.cross_entropy(head(torch.randn(20, D).double()), torch.arange(20) % C).isfinite()
