"""kernelize on networks of one's own."""

import copy
import logging
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kernelhead
from kernelhead import HEADS, LandmarkHead, kernelize
from kernelhead.surgery import changes


class Block(nn.Module):
    """A residual block that runs one ReLU module twice, as in torchvision."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.relu(self.conv2(self.relu(self.bn1(self.conv1(x)))) + x)


class Net(nn.Module):
    """A small convolutional network whose pooling is a function."""

    def __init__(self, classes=5, classifier=None):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.block = Block(8)
        self.drop = nn.Dropout(0.5)
        self.classifier = classifier or nn.Linear(8, classes)

    def forward(self, x):
        return self.classifier(self.drop(self.block(self.stem(x)).mean((2, 3))))


class Convolutional(nn.Module):
    """A 1x1 convolution classifies every position, and the logits are the mean."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.classifier = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        return self.classifier(self.body(x)).mean((2, 3))


def mlp(*end):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), *(end or [nn.Linear(8, 5)]))


IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
VECTORS, POSITIONS = {"head": "kernel"}, {"landmarks": 4}  # options of heads that take features, and what they are of


def test_is_public():
    assert kernelhead.kernelize is kernelize
    assert kernelhead.surgery.changes is changes


def test_the_last_layer_of_a_sequential_is_replaced():
    model = mlp()
    body = [parameter.data_ptr() for parameter in model[:4].parameters()]
    assert kernelize(model) is model
    assert isinstance(model[4], LandmarkHead)
    assert (model[4].in_features, model[4].num_classes) == (8, 5)
    assert isinstance(model[3], nn.Identity)
    assert isinstance(model[1], nn.ReLU)
    assert [parameter.data_ptr() for parameter in model[:3].parameters()] == body
    assert model(torch.randn(3, 6)).shape == (3, 5)


def test_the_record_and_the_log_say_what_was_done(caplog):
    with caplog.at_level(logging.INFO, logger="kernelhead"):
        record = changes(kernelize(mlp(), 7, head="prototypes", prototypes=2))
    assert record.layers == ("4",)
    assert (record.head, record.num_classes) == ("prototypes", 7)
    assert record.relus_removed == ("3",)
    assert record.relus_kept == record.pooled == record.notes == ()
    assert str(record) == "'4': head 'prototypes' for 7 classes; the ReLU before the features is removed: '3'"
    assert caplog.messages == [f"Sequential: {record}"]
    with pytest.raises(ValueError, match="Sequential was not made by kernelize"):
        changes(mlp())


def test_the_relu_stays_where_it_is_wanted():
    model, original = kernelize(mlp(), head="linear", rectified=True), mlp()
    original.load_state_dict(model.state_dict(), strict=False)  # which knows no configuration of a head
    x = torch.randn(3, 6)
    torch.testing.assert_close(model[:4](x), original[:4](x))
    assert changes(model).relus_kept == ("3",)


def test_only_the_last_use_of_a_shared_relu_is_removed():
    torch.manual_seed(0)
    model = Net().eval()
    stem = model.stem(IMAGES)
    inner = F.relu(model.block.bn1(model.block.conv1(stem)))
    expected = model.block.conv2(inner) + stem
    names = list(model.state_dict())
    kernelize(model)
    assert changes(model).relus_removed == ("block.relu",)
    torch.testing.assert_close(model.block.relu(-torch.ones(1)), -torch.ones(1))
    seen = []
    model.classifier.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(IMAGES)
    torch.testing.assert_close(seen[0], expected)
    assert [name for name in model.state_dict() if not name.startswith("classifier")] == names[:-2]


@pytest.mark.parametrize("head", HEADS)
def test_every_head_goes_on(head):
    model = kernelize(Net(), 6, head=head)
    logits = model(IMAGES)
    assert logits.shape == (4, 6)
    logits.sum().backward()
    assert type(model.classifier) is HEADS[head]


def test_a_head_that_pools_takes_positions_if_there_are_any():
    model = kernelize(Net(), 6, landmarks=20)
    assert (model.classifier.pool, model.classifier.landmarks) == ("auto", 20)
    assert changes(model).pooled == ("after 'block'",)
    assert "positions come from after 'block'" in str(changes(model))
    assert model(IMAGES).shape == (4, 6)


@pytest.mark.parametrize("head", ["landmarks", "second_order", "expansion", "attentive"])
def test_a_head_that_pools_takes_features_if_nothing_is_pooled(head):
    model = kernelize(mlp(), head=head)
    assert model[4].pool is None
    assert changes(model).pooled == ()
    assert changes(model).notes == ("pool=None, on its features as they are: its features were never a map or tokens",)
    assert model(torch.randn(4, 6)).shape == (4, 5)
    with pytest.raises(ValueError, match=r"pool='auto' needs .* were never a map or tokens; leave pool out"):
        kernelize(mlp(), head=head, pool="auto")
    assert changes(kernelize(Net(), head=head, pool=None)).pooled == ()  # as the user says


def test_logits_are_the_kernel_of_the_features():
    model = kernelize(Net().eval(), head="kernel", degree=2, coefficients="relu")
    with torch.no_grad():
        features = model.block(model.stem(IMAGES)).mean((2, 3)).double().numpy()
        weight = model.classifier.weight.double().numpy()
        logits = model(IMAGES)
    unit, directions = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (features, weight))
    t = unit @ directions.T
    np.testing.assert_allclose(logits.numpy(), 1 + t + t**2, rtol=1e-5)  # all coefficients begin at one


def test_pooled_logits_are_made_of_the_mean_kernel_over_positions():
    model = Net().eval()
    with torch.no_grad():
        stem = model.stem(IMAGES)
        inner = F.relu(model.block.bn1(model.block.conv1(stem)))
        features = (model.block.conv2(inner) + stem).double().numpy().reshape(4, 8, -1)
        kernelize(model, degree=2, landmarks=128, coefficients="relu")
        weight, mixing = (each.double().numpy() for each in (model.classifier.weight, model.classifier.mixing))
        logits = model(IMAGES)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    t = np.einsum("ndl,qd->nlq", unit, weight / np.linalg.norm(weight, axis=1, keepdims=True))
    values = (1 + t + t**2).mean(1) / np.sqrt(1 + 1e-5)  # the statistics begin at mean 0 and variance 1
    np.testing.assert_allclose(logits.numpy(), values @ mixing.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [9, 16, 21])
def test_positions_may_change_their_number(side):
    model = kernelize(Net(), landmarks=3)
    assert model(torch.randn(2, 3, side, side)).shape == (2, 5)
    assert model(torch.randn(3, 3, side + 4, side)).shape == (3, 5)
    assert model.eval()(torch.randn(0, 3, side, side)).shape == (0, 5)


def test_threads_may_run_one_network_on_images_of_other_sizes():
    layers = [nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    model = kernelize(nn.Sequential(*layers), **POSITIONS).eval()
    images = [torch.randn(samples, 3, side, side) for samples, side in ((4, 10), (9, 8))]
    expected = [model(each) for each in images]
    both = threading.Barrier(2, timeout=30)

    def meet(module, args):
        """Neither comes to the classifier before both have pooled."""
        both.wait()

    model[2].register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(model, images))
    assert all(map(torch.equal, found, expected))


def test_a_classifier_may_be_run_again_in_another_thread():
    """As checkpointing does it on a GPU, in the thread of the backward pass."""
    layers = [nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    model = kernelize(nn.Sequential(*layers), **POSITIONS).eval()
    pooled = model[:3](torch.randn(4, 3, 10, 10))
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model[3], pooled).result(), model[3](pooled))


@pytest.mark.parametrize("options", [VECTORS, POSITIONS, {"head": "linear"}])
def test_convolutions_that_classify(options):
    model = kernelize(Convolutional().eval(), 3, **options)
    logits = model(IMAGES)
    assert logits.shape == (4, 3)
    maps = model.body(IMAGES)
    alone = kernelhead.create_head(**model.classifier.config).eval()
    alone.load_state_dict(model.classifier.state_dict())
    expected = alone(maps) if options is POSITIONS else alone(maps.movedim(1, -1)).mean((1, 2))
    torch.testing.assert_close(logits, expected)


class WithFeatures(Net):
    """Gives its features beside the logits."""

    def forward(self, x):
        features = self.block(self.stem(x)).mean((2, 3))
        return self.classifier(features), features


def test_features_that_a_network_gives_too_stay_those_of_images():
    model = kernelize(WithFeatures(), head="kernel")
    assert [output.shape for output in model(IMAGES)] == [(4, 5), (4, 8)]
    with pytest.raises(ValueError, match="it returns more than logits from behind the pooling"):
        kernelize(WithFeatures(), pool="auto")
    default = kernelize(WithFeatures())
    assert default.classifier.pool is None
    assert [output.shape for output in default(IMAGES)] == [(4, 5), (4, 8)]


def test_a_relu_on_the_logits_is_removed():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert changes(kernelize(model)).relus_removed == ("2",)
    assert model(IMAGES).shape == (4, 5)


def test_features_that_are_a_flattened_map_are_not_pooled():
    flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 5))
    with pytest.raises(ValueError, match="it flattens its map 4x30x30 into one vector and pools nothing"):
        kernelize(flat, pool="auto")
    assert kernelize(flat, **POSITIONS)[2].pool is None


class Regrouping(nn.Module):
    """It remembers the batch from before its features, and puts them together again before it pools."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, stride=8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        return self.classifier(self.body(x).reshape(len(x), 8, -1).mean(2))


def test_a_way_around_the_pooling_that_does_not_work_is_not_taken():
    model = Regrouping()
    with pytest.raises(ValueError, match="it does not run with a head that takes its positions"):
        kernelize(model, pool="auto")
    assert model(IMAGES).shape == (4, 5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [VECTORS, POSITIONS])
def test_mode_precision_device_and_frozen_weights_stay(training, dtype, options):
    model = Net().to(dtype).train(training)
    model.stem.requires_grad_(False)
    model.block.bn1.eval()
    kernelize(model, **options)
    assert all(p.dtype == dtype for p in model.parameters())
    assert (model.training, model.classifier.training, model.block.bn1.training) == (training, training, False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"stem.weight", "stem.bias"}
    assert model(IMAGES.to(dtype)).dtype == dtype
    meta = kernelize(Net().to("meta"), **options)
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert meta(IMAGES.to("meta")).shape == (4, 5)


def test_channels_last():
    model = kernelize(Net(), **POSITIONS).to(memory_format=torch.channels_last)
    x = IMAGES.to(memory_format=torch.channels_last)
    model(x).sum().backward()
    assert model.stem.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model.eval()(x), copy.deepcopy(model).to(memory_format=torch.contiguous_format)(IMAGES))


@pytest.mark.parametrize("options", [VECTORS, {"head": "kernel", "warm_start": True}, {}])
def test_looking_changes_neither_statistics_nor_random_numbers_nor_gradients(options):
    model = Net()
    model(IMAGES).sum().backward()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradient = model.stem.weight.grad.clone()
    random.seed(1)
    torch.manual_seed(1)
    HEADS[options.get("head", "landmarks")](8, 5)  # the new head takes its random numbers as ever
    expected = torch.rand(1)
    torch.manual_seed(1)
    kernelize(model, **options)
    assert torch.equal(torch.rand(1), expected)
    assert random.random() == random.Random(1).random()
    for name, buffer in model.named_buffers():
        if name in buffers:
            assert torch.equal(buffer, buffers[name])
    assert torch.equal(model.stem.weight.grad, gradient)


@pytest.mark.parametrize("options", [VECTORS, POSITIONS])
@pytest.mark.parametrize("twin_of", ["deepcopy", "pickle"])
def test_copies_are_independent(options, twin_of):
    model = kernelize(Net().eval(), **options)
    twin = copy.deepcopy(model) if twin_of == "deepcopy" else pickle.loads(pickle.dumps(model))
    expected = model(IMAGES)
    twin(IMAGES[:, :, :9, :9])
    assert torch.equal(model(IMAGES), expected)
    assert torch.equal(twin(IMAGES), expected)
    assert changes(twin) == changes(model)


def test_a_layer_with_two_names_and_tied_weights():
    model = Net()
    model.alias = model.classifier
    model.tied = nn.Linear(8, 5)
    model.tied.weight = model.classifier.weight
    weight = model.tied.weight
    kernelize(model)
    assert model.alias is model.classifier
    assert isinstance(model.alias, LandmarkHead)
    assert model.tied.weight is weight


@pytest.mark.parametrize("options", [VECTORS, POSITIONS])
def test_networks_without_a_classifier(options):
    model = Net(classifier=nn.Identity())
    with pytest.raises(ValueError, match="Net has no classifier yet, so it needs num_classes"):
        kernelize(model, **options)
    kernelize(model, 3, **options)
    assert model(IMAGES).shape == (4, 3)
    with pytest.raises(ValueError, match=r"the trained layer has none, not 3"):
        kernelize(Net(classifier=nn.Identity()), 3, head="kernel", warm_start=True)


class TwoInputs(nn.Module):
    """Nothing can be guessed about what it takes."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 8), nn.Linear(4, 8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, left, *, right):
        if left.sum() > 1e6:  # looks at numbers, which tensors without data don't have
            raise ValueError("too large")
        return self.classifier(torch.relu(self.left(left) + self.right(right)))


def test_networks_that_only_run_on_real_inputs():
    inputs = {"left": torch.randn(2, 3), "right": torch.randn(2, 4)}
    model = kernelize(TwoInputs(), inputs=inputs, **VECTORS)
    assert changes(model).relus_kept == ("TwoInputs",)  # a function call
    assert model(**inputs).shape == (2, 5)
    named = kernelize(TwoInputs(), 3, layer="right", inputs=inputs)
    assert isinstance(named.right, LandmarkHead)
    with pytest.raises(ValueError, match="TwoInputs does not run on these inputs"):
        kernelize(TwoInputs(), inputs=torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"TwoInputs runs on no input that can be guessed .* give inputs="):
        kernelize(TwoInputs())


def test_layers_by_name():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5), nn.BatchNorm1d(5))
    with pytest.raises(ValueError, match=r"looked for .* 'native_batch_norm' in '3' .* name it with layer='...'"):
        kernelize(model)
    assert changes(kernelize(model, layer="2")).layers == ("2",)
    assert model(torch.randn(4, 6)).shape == (4, 5)
    with pytest.raises(ValueError, match=r"layer 'fc' of Net is missing; .*last linear layers are 'classifier'"):
        kernelize(Net(), layer="fc")
    with pytest.raises(ValueError, match=r"layer 'stem' of Net is a Conv2d; name an nn\.Linear"):
        kernelize(Net(), layer="stem")
    model = Net()
    model.spare = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"Net does not use the layer 'spare' when it runs"):
        kernelize(model, 5, layer="spare")


def test_networks_that_are_wrapped_or_done_are_refused():
    with pytest.raises(ValueError, match="before it is compiled or wrapped into DataParallel"):
        kernelize(nn.DataParallel(Net()))
    with pytest.raises(ValueError, match="before it is compiled or wrapped into OptimizedModule"):
        kernelize(torch.compile(Net()))
    compiled = Net()
    compiled.compile()
    with pytest.raises(ValueError, match="before it is compiled"):
        kernelize(compiled)
    with pytest.raises(ValueError, match="Net has the head LandmarkHead at 'classifier' already"):
        kernelize(kernelize(Net()))
    with pytest.raises(ValueError, match="the network is one Linear layer"):
        kernelize(nn.Linear(3, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "fancy"}, "unknown head 'fancy'; choose one of kernel"),
        ({"num_classes": 0}, "num_classes to be a positive integer; got 0"),
        ({"landmark": 3}, "head 'landmarks' has no option 'landmark'"),
        ({"warm_start": True, "head": "kernel", "num_classes": 3}, "warm_start keeps the classes: .* has 5, not 3"),
        ({"warm_start": True}, "linear, cosine, kernel; got head='landmarks'"),
        ({"warm_start": True, "head": "expansion"}, "warm_start needs a head with one weight per class"),
    ],
)
def test_wrong_options_are_refused_and_change_nothing(options, message):
    model = Net()
    modules = list(model.modules())
    with pytest.raises(ValueError, match=message):
        kernelize(model, **options)
    assert list(model.modules()) == modules


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match=r"kernelize takes an nn\.Module, got str"):
        kernelize("resnet18")
