"""A new head on networks of torchvision, timm and transformers."""

import pytest
import timm
import torch
import torchvision.models as tv
import transformers
from torch.nn import functional as F
from torchvision.models.convnext import CNBlockConfig

from kernelhead import KernelHead, LandmarkHead, create_head, kernelize
from kernelhead.surgery import changes

CLASSES, NEW_CLASSES, BATCH = 5, 4, 4


def images(side, channels=3):
    return torch.randn(BATCH, channels, side, side)


def _torchvision(name, side=64, **options):
    return f"torchvision/{name}", (
        lambda: tv.get_model(name, weights=None, num_classes=CLASSES, **options),
        images,
        side,
    )


def _torchvision_class(name, make, side=32):
    return f"torchvision/{name}", (make, images, side)


def _timm(name, side=64, **options):
    return f"timm/{name}", (lambda: timm.create_model(name, num_classes=CLASSES, **options), images, side)


def _transformers(name, task, side=None, **options):
    def make():
        config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **options)
        return getattr(transformers, f"{name}For{task}Classification")(config)

    def pixels(side):
        return {"pixel_values": images(side)}

    def text(side):
        ids = torch.randint(3, 40, (BATCH, 7))
        ids[:, -1] = 2  # the end of the text
        return {"input_ids": ids, "attention_mask": torch.ones(BATCH, 7, dtype=torch.int64)}

    return f"transformers/{name}", (make, text if side is None else pixels, side)


def _clip_like():
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"image_size": 32, "patch_size": 8}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text |= {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {"vision_config": vision, "text_config": text}


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SMALL, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
WINDOWS = {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "image_size": 32}
TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
TINY_SWIN = {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}

NETWORKS = dict(
    [
        _torchvision("resnet18", 32),
        _torchvision("regnet_y_400mf", 32),
        _torchvision("mobilenet_v2", 32),
        _torchvision("mobilenet_v3_small", 32),
        _torchvision("shufflenet_v2_x0_5", 32),
        _torchvision("squeezenet1_1", 32),
        _torchvision("googlenet", 64, init_weights=False),
        _torchvision_class(
            "resnet-bottleneck", lambda: tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=16)
        ),
        _torchvision_class("densenet", lambda: tv.DenseNet(8, (2, 2), 8, num_classes=CLASSES)),
        _torchvision_class(
            "convnext",
            lambda: tv.ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=CLASSES),
        ),
        _torchvision_class("swin", lambda: tv.SwinTransformer([4, 4], 8, [1, 1], [1, 2], [4, 4], num_classes=CLASSES)),
        _torchvision_class("vit", lambda: tv.VisionTransformer(32, 8, 1, 2, 16, 24, num_classes=CLASSES)),
        _torchvision_class(
            "maxvit",
            lambda: tv.MaxVit((64, 64), 8, 2, [8, 16], [1, 1], 8, stochastic_depth_prob=0.0, num_classes=CLASSES),
            64,
        ),
        _timm("test_byobnet"),
        _timm("test_convnext"),
        _timm("test_convnext2"),
        _timm("test_efficientnet"),
        _timm("test_efficientnet_gn"),
        _timm("test_resnet"),
        _timm("test_vit", 160),
        _timm("test_vit3", 160),
        _timm("resnet10t", 32),
        _timm("resnetv2_18", 32),
        _timm("regnetx_002", 32),
        _timm("lcnet_035", 32),
        _timm("dla46x_c", 32),
        _timm("starnet_s050", 32),
        _timm("ese_vovnet19b_slim_dw", 32),
        _timm("densenet121", 32, growth_rate=8, block_config=(2, 2)),
        _timm("legacy_seresnet18", 32, layers=(1, 1, 1, 1)),
        _timm("res2net50_26w_4s", 32, layers=(1, 1, 1, 1)),
        _timm("deit_tiny_patch16_224", 32, **TINY_VIT),
        _timm("deit_tiny_distilled_patch16_224", 32, **TINY_VIT),
        _timm("beit_base_patch16_224", 32, **TINY_VIT),
        _timm("eva02_tiny_patch14_224", 32, **TINY_VIT),
        _timm("cait_xxs24_224", 32, **TINY_VIT, depth_token_only=1),
        _timm("swin_tiny_patch4_window7_224", 32, **TINY_SWIN),
        _timm("swinv2_tiny_window8_256", 32, **TINY_SWIN),
        _timm("crossvit_tiny_240", 240, embed_dim=(8, 16), num_heads=(1, 2), depth=((1, 1, 0),)),
        _timm("poolformer_s12", 32, layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16)),
        _timm("levit_128s", 224, embed_dim=(16, 24, 32), key_dim=8, num_heads=(1, 2, 2), depth=(1, 1, 1)),
        _timm("edgenext_xx_small", 64, dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), heads=(1, 1, 1, 1)),
        _timm("inception_next_atto", 64, dims=(8, 16, 16, 24), depths=(1, 1, 1, 1)),
        _transformers("Bert", "Sequence", **TEXT),
        _transformers("Roberta", "Sequence", **TEXT),
        _transformers("Electra", "Sequence", **TEXT, embedding_size=16),
        _transformers("Albert", "Sequence", **TEXT, embedding_size=8),
        _transformers("Llama", "Sequence", **TEXT),
        _transformers("DistilBert", "Sequence", dim=16, n_layers=1, n_heads=2, hidden_dim=24, vocab_size=40),
        _transformers("GPT2", "Sequence", n_embd=16, n_layer=1, n_head=2, vocab_size=40, pad_token_id=0,
                      bos_token_id=1, eos_token_id=2),
        _transformers("Bart", "Sequence", d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                      decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=40,
                      pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2),
        _transformers("ViT", "Image", 32, **PATCHES),
        _transformers("DeiT", "Image", 32, **PATCHES),
        _transformers("Beit", "Image", 32, **PATCHES),
        _transformers("Dinov2", "Image", 32, **PATCHES),
        _transformers("ResNet", "Image", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        _transformers("RegNet", "Image", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
        _transformers("ConvNext", "Image", 64, **STAGES),
        _transformers("Swin", "Image", 32, **WINDOWS),
        _transformers("Swinv2", "Image", 32, **WINDOWS),
        _transformers("MobileNetV2", "Image", 32, depth_multiplier=0.35),
        _transformers("Segformer", "Image", 64, **STAGES, num_attention_heads=[1, 1, 2, 2]),
        _transformers("PoolFormer", "Image", 64, **STAGES),
        _transformers("Bit", "Image", 32, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_groups=4),
        _transformers("Siglip", "Image", 32, **_clip_like()),
        _transformers("CLIP", "Image", 32, **_clip_like()),
    ]
)  # fmt: skip


def make(name):
    """The network of this name, with the same weights each time, and a batch of arguments for it."""
    factory, batch, side = NETWORKS[name]
    torch.manual_seed(0)
    network = factory()
    inputs = batch(side)
    return network, inputs if isinstance(inputs, dict) else {"x": inputs}


def run(network, inputs):
    """The logits; in training mode those of the classifier itself, where there are others beside."""
    output = network(inputs["x"]) if "x" in inputs else network(**inputs)
    logits = getattr(output, "logits", output)
    return logits[0] if isinstance(logits, tuple) else logits


def heads(network):
    return [network.get_submodule(name) for name in changes(network).layers]


QUICK = ("torchvision/resnet18", "torchvision/vit", "timm/test_convnext", "timm/test_vit", "transformers/Bert",
         "transformers/ViT")  # fmt: skip


def networks(names):
    """One of each kind is quick; the others run with the slow tests."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def train_and_reload(name, **options):
    """One step of a kernelized network, and its weights in a second one made in the same way."""
    network, inputs = make(name)
    before = {key: tensor.data_ptr() for key, tensor in network.state_dict().items()}
    assert kernelize(network, NEW_CLASSES, **options) is network
    replaced = changes(network).layers
    kept = {key: pointer for key, pointer in before.items() if not key.startswith(tuple(f"{n}." for n in replaced))}
    assert len(kept) < len(before)
    state = network.state_dict()
    assert all(state[key].data_ptr() == pointer for key, pointer in kept.items())

    logits = run(network.train(), inputs)
    assert logits.shape == (BATCH, NEW_CLASSES)
    F.cross_entropy(logits, torch.arange(BATCH) % NEW_CLASSES).backward()
    for head in heads(network):
        assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
        assert head.weight.grad.any()
    first = next(parameter for parameter in network.parameters() if parameter.grad is not None)
    assert first.grad.any()  # it reaches the beginning of the network
    torch.optim.SGD(network.parameters(), lr=0.01).step()

    twin, _ = make(name)
    kernelize(twin, NEW_CLASSES, **options).load_state_dict(network.state_dict())
    with torch.no_grad():
        expected = run(network.eval(), inputs)
        torch.testing.assert_close(run(twin.eval(), inputs), expected, rtol=0, atol=0)
    return network


@pytest.mark.parametrize("name", networks(NETWORKS))
def test_a_head_of_features_trains_and_reloads(name):
    network = train_and_reload(name, head="kernel")
    assert all(isinstance(head, KernelHead) for head in heads(network))


# The features of the network's own classifier are this one, or this mean, of the positions that the head receives.
FIRST, MEAN, OTHER = "the first", "their mean", "something else"
POOLED = {
    "torchvision/resnet18": MEAN,
    "torchvision/shufflenet_v2_x0_5": MEAN,
    "torchvision/mobilenet_v2": MEAN,
    "torchvision/mobilenet_v3_small": OTHER,
    "torchvision/squeezenet1_1": OTHER,
    "torchvision/densenet": MEAN,
    "torchvision/convnext": OTHER,
    "torchvision/swin": MEAN,
    "torchvision/vit": FIRST,
    "torchvision/maxvit": OTHER,
    "timm/test_resnet": MEAN,
    "timm/resnetv2_18": MEAN,
    "timm/test_vit": FIRST,
    "timm/test_convnext": OTHER,
    "timm/swin_tiny_patch4_window7_224": MEAN,
    "timm/eva02_tiny_patch14_224": OTHER,
    "timm/inception_next_atto": OTHER,
    "transformers/ViT": FIRST,
    "transformers/ResNet": MEAN,
    "transformers/ConvNext": OTHER,
    "transformers/Swin": MEAN,
    "transformers/Beit": OTHER,
    "transformers/CLIP": MEAN,
}


def watch(network, name):
    """A list that collects what the layer of this name receives."""
    seen = []
    network.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    return seen


def tokens(positions):
    """Turn a map (N, D, H, W) or tokens (N, L, D), as a pooling head receives them, into tokens."""
    return positions.flatten(2).mT if positions.dim() == 4 else positions


@pytest.mark.parametrize("name", networks(POOLED))
def test_pooling_heads_receive_the_positions_that_the_features_are_made_of(name):
    network, inputs = make(name)
    other, _ = make(name)
    layer = changes(kernelize(other, pool="auto", rectified=True, landmarks=6)).layers[0]
    features, positions = watch(network, layer), watch(other, layer)
    with torch.no_grad():
        run(network.eval(), inputs)
        assert run(other.eval(), inputs).shape == (BATCH, CLASSES)
    (features,), (positions,) = features, map(tokens, positions)
    assert positions.dim() == 3
    assert positions.shape[0] == BATCH
    assert positions.shape[2] == features.shape[1]
    if POOLED[name] is FIRST:
        torch.testing.assert_close(positions[:, 0], features)
    elif POOLED[name] is MEAN:
        torch.testing.assert_close(positions.mean(1), features.flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", networks(name for name in POOLED if NETWORKS[name][2] == 32))
def test_pooling_in_the_rkhs_trains_and_reloads(name):
    network = train_and_reload(name, landmarks=6)
    assert changes(network).pooled
    for head in heads(network):
        assert head.mixing.shape == (NEW_CLASSES, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side"), [("torchvision/resnet18", 3), ("torchvision/swin", 12), ("timm/test_resnet", 3)]
)
def test_heads_receive_the_networks_map(name, side):
    """A map stays one, with its height and width."""
    network, _ = make(name)
    layer = changes(kernelize(network, NEW_CLASSES, landmarks=6)).layers[0]
    received = watch(network, layer)
    logits = run(network.eval(), {"x": images(96)})
    assert received[0].shape[2:] == (side, side)
    head = network.get_submodule(layer)
    twin = create_head(**head.config).eval()
    twin.load_state_dict(head.state_dict())
    torch.testing.assert_close(logits, twin(received[0]))


@pytest.mark.parametrize("head", ["second_order", "expansion", "attentive"])
@pytest.mark.parametrize(
    "name",
    networks(
        [
            "torchvision/resnet18",
            "torchvision/vit",
            "torchvision/swin",
            "timm/test_resnet",
            "timm/test_vit",
            "transformers/ViT",
            "transformers/Bert",
        ]
    ),
)
def test_other_heads_that_pool(name, head):
    network, inputs = make(name)
    kernelize(network, NEW_CLASSES, head=head, pool="auto")
    logits = run(network, inputs)
    assert logits.shape == (BATCH, NEW_CLASSES)
    logits.sum().backward()
    assert heads(network)[0].classifier.weight.grad.any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("transformers/Bart", "made of positions by 'index', which is no pooling"),
        ("transformers/Dinov2", "pooled in several ways: 'mean', 'select'"),
    ],
)
def test_the_reason_is_said_if_positions_cannot_be_had(name, reason):
    network, _ = make(name)
    state = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match=reason):
        kernelize(network, pool="auto")
    after = network.state_dict()
    assert after.keys() == state.keys()  # nothing was changed
    assert all(torch.equal(after[key], tensor) for key, tensor in state.items())
    (note, *_) = changes(kernelize(network)).notes
    assert note.startswith("pool=None, on its features as they are: ")
    assert reason in note
    assert isinstance(heads(network)[0], LandmarkHead)


@pytest.mark.parametrize("name", networks([name for name in NETWORKS if name.startswith("transformers/")][::4]))
def test_transformers_know_their_classes(name):
    network, inputs = make(name)
    kernelize(network, 7, head="kernel")
    assert network.config.num_labels == network.num_labels == 7
    assert network.config.id2label == {i: f"LABEL_{i}" for i in range(7)}
    assert network.config.label2id == {f"LABEL_{i}": i for i in range(7)}
    labels = torch.tensor([6, 0, 3, 6])
    output = network.eval()(**inputs, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))


def test_names_of_labels_stay_where_their_number_stays():
    network, _ = make("transformers/ViT")
    network.config.id2label = dict(enumerate("abcde"))
    network.config.label2id = {label: i for i, label in enumerate("abcde")}
    kernelize(network)
    assert network.config.id2label == dict(enumerate("abcde"))
    assert network.num_labels == 5


@pytest.mark.parametrize(
    "name", networks(f"timm/{n}" for n in ("test_resnet", "test_convnext", "test_vit", "resnetv2_18"))
)
def test_timm_networks_keep_their_methods(name):
    original, inputs = make(name)
    network, _ = make(name)
    original.eval()
    kernelize(network.eval(), 7, head="kernel", rectified=True)
    x = inputs["x"]
    assert isinstance(network.get_classifier(), KernelHead)
    assert network.num_classes == 7
    features = network.forward_features(x)
    torch.testing.assert_close(features, original.forward_features(x))
    pooled = network.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, original.forward_head(features, pre_logits=True))
    assert network(x).shape == (BATCH, 7)
    network.reset_classifier(3)
    assert network(x).shape == (BATCH, 3)
    assert not any(isinstance(module, KernelHead) for module in network.modules())
    network.reset_classifier(0)
    kernelize(network, 6, head="kernel")  # a network without a classifier
    assert isinstance(network.get_classifier(), KernelHead)
    assert network(x).shape == (BATCH, 6)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_timm_networks_return_their_positions_by_their_own_methods(name):
    original, inputs = make(f"timm/{name}")
    network, _ = make(f"timm/{name}")
    kernelize(network.eval(), 7, rectified=True)
    features = network.forward_features(inputs["x"])
    torch.testing.assert_close(features, original.eval().forward_features(inputs["x"]))
    torch.testing.assert_close(network.forward_head(features, pre_logits=True), features)
    assert network.forward_head(features).shape == (BATCH, 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [("test_resnet", {}), ("resnetv2_18", {}), ("swin_tiny_patch4_window7_224", TINY_SWIN), ("test_vit", {})],
)
def test_timm_networks_made_without_pooling(name, options):
    network = timm.create_model(name, num_classes=0, global_pool="", **options)
    kernelize(network, 7, pool="auto")
    x = images(NETWORKS[f"timm/{name}"][2])
    assert network(x).shape == (BATCH, 7)
    assert network.get_classifier().in_features == network.num_features


def test_both_heads_of_a_distilled_network_are_replaced():
    network, inputs = make("timm/deit_tiny_distilled_patch16_224")
    kernelize(network, 7, head="kernel")
    assert changes(network).layers == ("head", "head_dist")
    network.set_distilled_training(True)
    assert [logits.shape for logits in network(inputs["x"])] == [(BATCH, 7)] * 2


RECTIFIED = [
    "torchvision/resnet18", "torchvision/resnet-bottleneck", "torchvision/densenet",
    "torchvision/mobilenet_v2", "timm/test_resnet", "timm/resnetv2_18",
    "timm/legacy_seresnet18", "timm/res2net50_26w_4s", "timm/densenet121", "transformers/ResNet", "transformers/RegNet",
    "transformers/Bit",
]  # fmt: skip


@pytest.mark.parametrize("name", networks(RECTIFIED))
def test_the_relu_before_the_features_is_removed_and_no_other(name):
    """What the features are now, pooled, must be what the ReLU used to receive."""
    original, inputs = make(name)
    network, _ = make(name)
    kernelize(network, head="kernel", rectified=True)
    assert changes(network).relus_kept
    features, same = watch(original, changes(network).layers[0]), watch(network, changes(network).layers[0])
    unrectified, _ = make(name)
    kernelize(unrectified, pool="auto", landmarks=6)
    assert changes(unrectified).relus_removed
    assert not changes(unrectified).relus_kept
    positions = watch(unrectified, changes(unrectified).layers[0])
    with torch.no_grad():
        for each in (original, network, unrectified):
            run(each.eval(), inputs)
    torch.testing.assert_close(same[0].flatten(), features[0].flatten())
    assert positions[0].min() < 0
    rectified = tokens(positions[0]).clamp_min(0)
    if "mobilenet" in name:
        rectified = rectified.clamp_max(6)
    torch.testing.assert_close(rectified.mean(1), features[0].flatten(1), rtol=1e-4, atol=1e-5)


def test_a_relu_that_is_no_module_stays_and_the_record_says_so():
    network, _ = make("transformers/DistilBert")
    assert changes(kernelize(network)).relus_kept == ("DistilBertForSequenceClassification",)
