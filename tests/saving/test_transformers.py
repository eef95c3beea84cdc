"""Kernelized networks of transformers, saved by themselves and by `kernelhead.save`."""

import copy
import json
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kernelhead
from kernelhead import kernelize
from kernelhead.surgery import changes

C = 3
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SMALL, "vocab_size": 40, "pad_token_id": 0}
HEADS = {"landmarks": {"landmarks": 6}, "kernel": {"head": "kernel"}, "linear": {"head": "linear"}}
HEADS["second_order"] = {"head": "second_order"}


def bert(kind=transformers.BertForSequenceClassification, **options):
    torch.manual_seed(0)
    model = kernelize(kind(transformers.BertConfig(**TEXT, num_labels=7)), C, **(options or HEADS["landmarks"]))
    with torch.no_grad():
        model(**texts())  # statistics of the head
    return model.eval()


def texts(words=9):
    ids = torch.randint(1, 40, (4, words), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(words) < torch.tensor([words, 3, 5, 2])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def same(model, other):
    state, others = model.state_dict(), other.state_dict()
    assert list(state) == list(others)
    assert all(torch.equal(tensor, others[name]) for name, tensor in state.items())
    assert type(other) is type(model)
    assert str(changes(other)) == str(changes(model)).replace(" for 7 classes", f" for {C} classes")
    with torch.no_grad():
        return torch.equal(model(**texts()).logits, other(**texts()).logits)


@pytest.mark.parametrize("how", ["save", "save_pretrained"])
def test_both_ways_to_save_give_one_folder(tmp_path, how):
    model = bert()
    model.config.id2label = {0: "bad", 1: "fair", 2: "good"}
    kernelhead.save(model, tmp_path) if how == "save" else model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["kernelhead"]["heads"] == {"classifier": model.classifier.config}
    assert config["model_type"] == "bert"
    loaded = kernelhead.load(tmp_path)
    assert same(model, loaded)
    assert loaded.config.id2label == model.config.id2label
    assert not loaded.training
    loaded.save_pretrained(tmp_path / "again")
    assert same(model, kernelhead.load(tmp_path / "again"))


@pytest.mark.parametrize("head", HEADS)
def test_transformers_alone_does_not_read_it(tmp_path, head):
    """It would make a linear layer, and give it random numbers for what it does not find."""
    bert(**HEADS[head]).save_pretrained(tmp_path)
    makers = [transformers.BertForSequenceClassification, transformers.AutoModelForSequenceClassification]
    for maker in [*makers, transformers.BertModel, transformers.AutoModel]:
        for options in ({}, {"ignore_mismatched_sizes": True}):
            with pytest.raises(OSError, match=r"kernelhead\.load reads this folder"):
                maker.from_pretrained(tmp_path, **options)
    with pytest.raises(ValueError, match=r"Could not load model .*"):
        transformers.pipeline("text-classification", str(tmp_path))


@pytest.mark.parametrize("twin_of", ["deepcopy", "pickle"])
def test_copies_save_themselves(tmp_path, twin_of):
    model = bert()
    twin = copy.deepcopy(model) if twin_of == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        twin.classifier.mixing.add_(1)
    twin.save_pretrained(tmp_path)
    assert same(twin, kernelhead.load(tmp_path))


def test_a_head_that_changed_is_recorded_as_it_is(tmp_path):
    model = bert(head="kernel")
    before = model.classifier.temperature
    model.classifier.rescale(0.5)
    model.save_pretrained(tmp_path)
    assert kernelhead.load(tmp_path).classifier.config["temperature"] == 2 * before


@pytest.mark.slow
def test_a_new_process_gives_the_same_logits_to_the_bit(tmp_path):
    model, program = bert(), "import sys, torch, kernelhead; torch.set_num_threads(1); m = kernelhead.load(sys.argv[1])"
    program += "; x = torch.load(sys.argv[2]); torch.save(m(**x).logits.detach(), sys.argv[3])"
    model.save_pretrained(tmp_path / "model")
    torch.save(texts(), tmp_path / "texts")
    paths = [str(tmp_path / name) for name in ("model", "texts", "logits")]
    result = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert torch.equal(torch.load(tmp_path / "logits"), model(**texts()).logits)


@pytest.mark.slow
def test_large_networks_come_in_parts(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert same(model, kernelhead.load(tmp_path))


def test_attention_is_that_of_the_network(tmp_path):
    model = transformers.BertForSequenceClassification._from_config(
        transformers.BertConfig(**TEXT), attn_implementation="eager"
    )
    kernelize(model, C, landmarks=6).save_pretrained(tmp_path)
    assert kernelhead.load(tmp_path).config._attn_implementation == "eager"


class Mine(transformers.BertForSequenceClassification):
    """A class of somebody's own."""


def test_a_class_of_ones_own_is_given(tmp_path):
    model = bert(Mine)
    model.save_pretrained(tmp_path / "by itself")
    kernelhead.save(model, tmp_path / "by us")
    for folder in (tmp_path / "by itself", tmp_path / "by us"):
        with pytest.raises(ValueError, match=r"transformers has no network 'Mine'|Mine of somebody's own"):
            kernelhead.load(folder)
        plain = Mine(transformers.BertConfig(**TEXT, num_labels=C))
        loaded = kernelhead.load(folder, model=plain)
        assert torch.equal(loaded(**texts()).logits, model(**texts()).logits)


def test_files_that_do_not_fit_are_refused(tmp_path):
    bert().save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    whole = load_file(file)

    def refused(words, tensors=whole, **entries):
        save_file(tensors, file)
        text = json.dumps({**config, "kernelhead": {**config["kernelhead"], **entries}})
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words) as error:
            kernelhead.load(tmp_path)
        assert "\n" not in str(error.value)

    name = "bert.encoder.layer.0.output.dense.bias"
    refused("has missing keys: bert.encoder", {key: whole[key] for key in whole if key != name})
    refused("has unexpected keys: something", {**whole, "something": torch.zeros(2)})
    refused("ignore_mismatched_sizes", {**whole, name: torch.zeros(5)})
    for other in ("pipeline", "AutoModel", "os", "__version__"):
        refused("transformers has no network", network={"name": f"transformers/{other}"})
    heads = {"classifier": {**config["kernelhead"]["heads"]["classifier"], "coefficients": "relu"}}
    refused("coefficients is 'relu' here and 'softplus' there", heads=heads)
    refused("kernelize does something else to it now", changes={"layers": [], "relus_removed": [], "pooled": []})


def test_pickled_weights_are_not_read(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match="safetensors"):
        kernelhead.load(tmp_path)


NETWORKS = runpy.run_path(str(Path(__file__).parents[1] / "surgery" / "test_surgery_networks.py"))


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", NETWORKS["NETWORKS"])
def test_networks_come_back_to_the_bit(tmp_path, name, half):
    """Networks with options that their library does not record are given."""
    factory, _, _ = NETWORKS["NETWORKS"][name]
    model, inputs = NETWORKS["make"](name)
    kernelize(model, 4, landmarks=32)
    with torch.no_grad():
        NETWORKS["run"](model.train(), inputs)
    model.eval()
    if half:
        model.bfloat16()
        inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    kernelhead.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["kernelhead"]
    given = {} if config["network"]["name"] else {"model": factory()}
    loaded, state = kernelhead.load(tmp_path, **given), model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.state_dict().items())
    assert {key: tensor.dtype for key, tensor in loaded.state_dict().items()} == {k: t.dtype for k, t in state.items()}
    with torch.no_grad():
        assert torch.equal(NETWORKS["run"](loaded, inputs), NETWORKS["run"](model, inputs))
