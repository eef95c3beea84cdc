"""Heads that pool on networks that read padded texts, and tokens of classification."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torchvision
import transformers
from torch import distributed, nn

from kernelhead import create_head, kernelize
from kernelhead.surgery import changes

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SMALL, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "pad_token_id": 0, "eos_token_id": 2}
NETWORKS = {
    "Bert": TEXT,
    "GPT2": GPT,
    "Roberta": {**TEXT, "max_position_embeddings": 80},
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40},
    "ModernBert": {**TEXT, "classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2},
    "Electra": {**TEXT, "embedding_size": 16},
    "Llama": TEXT,
    "OPT": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "vocab_size": 40,
            "word_embed_proj_dim": 16, "pad_token_id": 0},
}  # fmt: skip
POSITIONS = ("Bert", "GPT2", "Electra")  # which number tokens from the left unless they are given numbers
ROTARY = ("Llama", "ModernBert")  # whose angles are float32, and rounded where a text begins late
LENGTHS = (7, 3, 12)
quick_and_slow = [pytest.param(n, marks=() if n in ("Bert", "GPT2") else pytest.mark.slow) for n in NETWORKS]


def bare(name, task="Sequence"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(num_labels=5, **NETWORKS[name])
    return getattr(transformers, f"{name}For{task}Classification")(config)


def make(name, task="Sequence", **options):
    """A kernelized network of transformers in evaluation mode, with weights away from their small start."""
    network = kernelize(bare(name, task), 4, **options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network.eval()


def texts(length, left=False):
    """Texts of `LENGTHS`, padded to a length, and their mask."""
    ids, mask = torch.full((2, len(LENGTHS), length), 0)
    generator = torch.Generator().manual_seed(0)
    for row, real, words in zip(ids, mask, LENGTHS, strict=True):
        place = slice(length - words, length) if left else slice(words)
        row[place] = torch.randint(3, 40, (words,), generator=generator)
        real[place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def received(network, *args, **kwargs):
    """What the head is given, and the logits."""
    seen = []
    handle = network.get_submodule(changes(network).layers[0]).register_forward_pre_hook(
        lambda module, args: seen.append(args)
    )
    logits = network(*args, **kwargs).logits
    handle.remove()
    return seen[0], logits


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", quick_and_slow)
def test_padding_changes_no_logits(name, dtype, close):
    network = make(name, landmarks=8).to(dtype)
    alone = texts(max(LENGTHS))
    expected = torch.cat(
        [network(row[None, :words]).logits for row, words in zip(alone["input_ids"], LENGTHS, strict=True)]
    )
    assert (expected[0] - expected[1]).abs().max() > 0.01
    for left in (False, True) if name != "DistilBert" else (False,):  # which cannot be told where a text begins
        for length in (16, 32, 64):
            inputs = texts(length, left)
            if left and name in POSITIONS:
                inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
            logits = network(**inputs).logits
            allowed = 1e-4 if left and name in ROTARY else close
            torch.testing.assert_close(logits, expected, rtol=allowed, atol=allowed)
    assert (network(inputs["input_ids"]).logits - expected).abs().max() > 0.01  # without a mask all tokens count


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_the_head_receives_its_tokens_and_their_mask(name):
    network, inputs = make(name, head="attentive"), texts(16)
    (tokens, mask), logits = received(network, **inputs)
    assert torch.equal(mask, inputs["attention_mask"])
    head = network.get_submodule(changes(network).layers[0])
    twin = create_head(**head.config).eval()
    twin.load_state_dict(head.state_dict())
    for sample, words, expected in zip(tokens, LENGTHS, logits, strict=True):
        torch.testing.assert_close(twin(sample[None, :words])[0], expected)
    names = list(inputs) if name == "Bert" else ["input_ids"]
    rest = {key: value for key, value in inputs.items() if key not in names}
    assert torch.equal(network(*(inputs[key] for key in names), **rest).logits, logits)
    network.train()(**inputs, labels=torch.tensor([0, 3, 1])).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in head.parameters())


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
@pytest.mark.parametrize("twin_of", ["deepcopy", "pickle", "freeze", "state_dict"])
def test_copies_have_masks_of_their_own(name, twin_of):
    network, inputs = make(name, landmarks=6), texts(16)
    expected = network(**inputs).logits
    if twin_of == "state_dict":
        twin = make(name, landmarks=6)
        twin.load_state_dict(network.state_dict())
    else:
        twin = pickle.loads(pickle.dumps(network)) if twin_of == "pickle" else copy.deepcopy(network)
    if twin_of == "freeze":
        (layer,) = changes(twin).layers
        twin.set_submodule(layer, twin.get_submodule(layer).freeze())
    other = twin(inputs["input_ids"]).logits
    assert (other - expected).abs().max() > 1e-3
    torch.testing.assert_close(twin(**inputs).logits, expected)


def test_threads_have_masks_of_their_own():
    network = make("Bert", landmarks=6)
    inputs = [texts(16), texts(16, left=True)]
    expected = [network(**each).logits for each in inputs]
    both = threading.Barrier(2, timeout=30)

    def meet(module, args):
        """Neither comes to the classifier before both have been given their mask."""
        both.wait()

    network.dropout.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: network(**each).logits, inputs))
    assert all(map(torch.equal, found, expected))
    features = network.bert(**inputs[0]).pooler_output
    with ThreadPoolExecutor(1) as pool:  # as checkpointing does it on a GPU, in the thread of the backward pass
        assert pool.submit(network.classifier, features).result().shape == (3, 4)


@pytest.mark.parametrize("name", ["Bert", "DistilBert"])
def test_gradient_checkpointing(name):
    network = make(name, landmarks=6).train()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(network)
    twin.gradient_checkpointing_enable()
    for each in (network, twin):
        each(**texts(16), labels=torch.tensor([0, 3, 1])).loss.backward()
    for (key, mine), its in zip(twin.named_parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_compiles_to_one_graph(name):
    torch.compiler.reset()
    network = make(name, landmarks=6)
    compiled = torch.compile(copy.deepcopy(network), backend="aot_eager", fullgraph=True)
    for inputs in (texts(16), {"input_ids": texts(16)["input_ids"]}):
        torch.testing.assert_close(compiled(**inputs).logits, network(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_exports_with_texts_of_any_length():
    network, anything = make("Bert", landmarks=6), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    sizes = dict.fromkeys(("input_ids", "attention_mask"), anything)
    program = torch.export.export(network, (), texts(16), dynamic_shapes=sizes).module()
    for length in (13, 40):
        torch.testing.assert_close(program(**texts(length)).logits, network(**texts(16)).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_onnx_with_texts_of_any_length(tmp_path):
    import onnxruntime

    network, anything = make("Bert", landmarks=6), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    sizes = dict.fromkeys(("input_ids", "attention_mask"), anything)
    file = tmp_path / "a.onnx"
    torch.onnx.export(network, (), file, kwargs=texts(16), dynamo=True, verbose=False, dynamic_shapes=sizes)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    found, *_ = session.run(None, {key: value.numpy() for key, value in texts(40).items()})
    torch.testing.assert_close(torch.from_numpy(found), network(**texts(16)).logits.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    network = make("Bert", landmarks=6)
    expected = network(**texts(16)).logits
    distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        logits = nn.parallel.DistributedDataParallel(network)(**texts(16)).logits
    finally:
        distributed.destroy_process_group()
    assert torch.equal(logits, expected)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm, self.fc = nn.Embedding(40, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids, attention_mask=None):
        return self.fc(self.norm(self.words(ids)).mean(1))


def test_networks_of_your_own_with_an_attention_mask():
    torch.compiler.reset()
    network = kernelize(Own(), landmarks=6).eval()
    compiled = torch.compile(copy.deepcopy(network), backend="aot_eager", fullgraph=True)
    for length in (12, 30):
        ids, mask = texts(length).values()
        logits = network(ids, mask)
        torch.testing.assert_close(network(ids=ids, attention_mask=mask), logits)
        torch.testing.assert_close(compiled(ids, mask), logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(network(ids[1:2, :3]), logits[1:2])
    with pytest.raises(ValueError, match=r"expects a mask of shape \(3, 30\); got \(3, 30, 30\)"):
        network(ids, mask[:, None].expand(3, 30, 30))


# --- sounds -----------------------------------------------------------------------------------------------------------

SOUND = {"conv_dim": (16,) * 2, "conv_kernel": (10, 3), "conv_stride": (5, 2), "feat_extract_norm": "layer"}
SOUND |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16, **SMALL}


def test_features_of_sounds():
    """The network pools itself, by a mask that it makes shorter."""
    config = transformers.Wav2Vec2Config(**SOUND, apply_spec_augment=False)
    network = transformers.Wav2Vec2ForSequenceClassification(config).eval().double()
    sounds = torch.randn(2, 400, dtype=torch.float64)
    kernelize(network, 3, landmarks=6, inputs={"input_values": sounds})
    assert "it reads sounds" in changes(network).notes[0]
    expected = torch.cat([network(sounds[:1]).logits, network(sounds[1:, :300]).logits])
    for length in (400, 500):
        padded, mask = torch.zeros(2, length, dtype=torch.float64), torch.zeros(2, length, dtype=torch.int64)
        for row, real, sound, samples in zip(padded, mask, sounds, (400, 300), strict=True):
            row[:samples], real[:samples] = sound[:samples], 1
        logits = copy.deepcopy(network)(padded, attention_mask=mask).logits
        torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    network.train()(padded, attention_mask=mask, labels=torch.tensor([0, 2])).loss.backward()
    assert network.projector.weight.grad.any()


# --- what cannot be pooled --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_classifiers_of_single_tokens_are_not_pooled(name):
    network, inputs = make(name, "Token", landmarks=6), texts(16)
    assert network.get_submodule(changes(network).layers[0]).pool is None
    logits = network(**inputs).logits
    assert logits.shape == (3, 16, 4)
    assert not torch.allclose(logits[:, 0], logits[:, 1])
    with pytest.raises(ValueError, match=r"its logits would be \[2, 8, 4\], not \[2, 4\]"):
        make(name, "Token", pool="auto")


# --- tokens of classification -----------------------------------------------------------------------------------------

VIT = {**SMALL, "image_size": 32, "patch_size": 8}
IMAGES = {  # a network of 16 patches with a class token, and how many positions None, True and False give
    "torchvision": (lambda: torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 24, num_classes=5), (17, 17, 16)),
    "timm-token": (lambda: timm_vit("token"), (17, 17, 16)),
    "timm-avg": (lambda: timm_vit("avg"), (16, 17, 16)),
    "timm-registers": (lambda: timm_vit("token", reg_tokens=2), (19, 19, 16)),
    "transformers": (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)), (17, 17, 16)),
}


def timm_vit(pooling, **options):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, global_pool=pooling, **sizes, **options)


@pytest.mark.parametrize("name", IMAGES)
def test_class_tokens_of_images(name):
    factory, expected = IMAGES[name]
    seen, x = [], torch.randn(2, 3, 32, 32)
    for class_token in (None, True, False):
        network = kernelize(factory(), 4, landmarks=6, class_token=class_token).eval()
        head = network.get_submodule(changes(network).layers[0])
        head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        network(x)
    assert tuple(tokens.shape[1] for tokens in seen) == expected


@pytest.mark.parametrize("left", [False, True])
def test_the_class_token_of_texts_is_the_first_that_counts(left):
    network, inputs = make("Bert", landmarks=6, class_token=False), texts(16, left)
    (_, mask), logits = received(network, **inputs)
    assert mask.sum(1).tolist() == [words - 1 for words in LENGTHS]
    assert [row.nonzero()[0].item() for row in mask] == [17 - words if left else 1 for words in LENGTHS]
    (_, mask), alone = received(network, inputs["input_ids"][2:, :12])
    assert mask.tolist() == [[False] + [True] * 11]
    if not left:
        torch.testing.assert_close(alone, logits[2:], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="sample 0"):
            network(torch.tensor([[1]]))


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (lambda: torchvision.models.resnet18(), {"class_token": True}, "class_token=True needs a network with"),
        (lambda: timm.create_model("test_resnet"), {"class_token": False}, "class_token=False needs a network with"),
        (lambda: bare("GPT2"), {"class_token": False}, "class_token=False needs a network with"),
        (lambda: timm_vit("token"), {"class_token": False, "head": "kernel"}, "a head that pools; got head='kernel'"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), {"class_token": True}, "class_token=True needs the map"),
    ],
)
def test_class_tokens_that_are_not_there(network, options, message):
    with pytest.raises(ValueError, match=message):
        kernelize(network(), 4, **options)
