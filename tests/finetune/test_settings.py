"""What a run is told: defaults, a file, flags."""

import inspect
from dataclasses import fields, replace

import pytest
import yaml

from kernelhead.cli import train as cli
from kernelhead.finetune.settings import check, make_spec, resolved, run_name, to_yaml
from kernelhead.finetune.spec import TrainSpec

PRETRAINED = {"epochs": 30, "batch_size": 64, "weight_decay": 1e-4, "pretrained": True}
FROM_SCRATCH = {"epochs": 200, "batch_size": 128, "weight_decay": 5e-4, "learning_rate": 0.1, "head_rate": 1.0}


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(written, text):
    with pytest.raises(ValueError, match=r"\S") as caught:
        check(make_spec(written(text), {}))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# --- defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {**PRETRAINED, "learning_rate": 0.01, "head_rate": 1.0, "augment": "imagenet"}),
        ({"head": "expansion"}, {"learning_rate": 0.01, "head_rate": 1.0}),
        ({"head": "kernel"}, {"learning_rate": 0.01, "head_rate": 10.0}),
        ({"head": "prototypes"}, {"learning_rate": 0.01, "head_rate": 10.0}),
        ({"head": "cosine"}, {"learning_rate": 0.01, "head_rate": 10.0}),
        ({"head": "linear"}, {**PRETRAINED, "learning_rate": 0.003, "head_rate": 1.0}),
        ({"optimizer": "adamw"}, {"learning_rate": 1e-4, "head_rate": 10.0, "weight_decay": 0.05}),
        ({"optimizer": "adamw", "pretrained": False}, {"learning_rate": 1e-3, "head_rate": 1.0, "weight_decay": 0.05}),
        ({"head": "second_order"}, {"learning_rate": 0.003, "head_rate": 1.0}),
        ({"pretrained": False}, {**FROM_SCRATCH, "pretrained": False}),
        ({"weights": "w"}, {**PRETRAINED, "pretrained": False, "learning_rate": 0.01}),
        ({"learning_rate": 0.02, "head_rate": 3.0}, {"learning_rate": 0.02, "head_rate": 3.0}),
        ({"image_size": 64}, {"augment": "light", "image_size": 64}),
        ({"image_size": 65}, {"augment": "imagenet"}),
        ({"augment": "none"}, {"augment": "none"}),
        ({"backbone": "my.module:net"}, {**FROM_SCRATCH, "pretrained": False}),
        ({"pretrained": False, "epochs": 30}, {**FROM_SCRATCH, "epochs": 30, "head_rate": 0.1}),
        ({"pretrained": False, "epochs": 31}, {**FROM_SCRATCH, "epochs": 31}),
        ({"pretrained": False, "epochs": 15, "head": "linear"}, {**FROM_SCRATCH, "epochs": 15}),
        ({"pretrained": False, "epochs": 15, "head_rate": 1.0}, {**FROM_SCRATCH, "epochs": 15}),
    ],
)
def test_defaults_depend_on_start_and_head(given, expected):
    made = resolved(TrainSpec("pets", **{"image_size": 224, **given}), images=5000).as_dict()
    assert {name: made[name] for name in expected} == expected
    assert {name: made[name] for name in given} == given


def test_the_network_says_how_large_its_images_are(colours):
    assert resolved(TrainSpec("cifar10", "tiny_networks:tiny")).image_size == 16
    assert resolved(TrainSpec("cifar10", "timm/test_vit")).image_size == 160
    assert resolved(TrainSpec("cifar10", "torchvision/squeezenet1_0")).image_size == 224


@pytest.mark.parametrize("images", [2, 5, 6, 11, 12, 30, 63, 64, 100, 191, 192, 193, 5000])
def test_a_batch_size_that_nobody_chose_leaves_a_few_batches(images):
    spec = TrainSpec("my", image_size=224)
    fitting = [size for size in (64, 32, 16, 8, 4, 2) if images // size >= 3] or [2]
    assert resolved(spec).batch_size is None
    assert resolved(spec, images=images).batch_size == max(fitting)
    assert resolved(spec, images=images, processes=8).batch_size == max(8, *fitting)
    assert resolved(replace(spec, batch_size=77), images=images).batch_size == 77


SIZES = {50000: 128, 3840: 128, 3839: 64, 1920: 64, 1919: 32, 960: 32, 96: 32, 95: 16}


@pytest.mark.parametrize(("images", "batch_size"), SIZES.items())
def test_from_scratch_a_few_images_make_many_steps(images, batch_size):
    assert resolved(TrainSpec("my", image_size=32, pretrained=False), images=images).batch_size == batch_size


def test_the_name_says_data_backbone_head_and_seed(tmp_path):
    assert run_name(TrainSpec("cifar10", seed=4)) == "cifar10-resnet50-landmarks-seed4"
    (tmp_path / "my pets").mkdir()
    spec = TrainSpec(str(tmp_path / "my pets"), "timm/test_vit", "linear", mixup=True)
    assert run_name(spec) == "my pets-timm-test_vit-linear-mixup-seed0"
    assert run_name(TrainSpec("pets", "my.nets:small")) == "pets-my.nets-small-landmarks-seed0"


def test_every_setting_has_a_flag():
    flags = set(inspect.signature(cli.train).parameters)
    settings = {each.name for each in fields(TrainSpec)}
    assert settings - flags == {"head_options"}
    assert flags - settings == {"head_option", "config", "show_config", "out", "resume"}


# --- a file, then flags -----------------------------------------------------------------------------------------------


def test_flags_outweigh_the_file_and_the_file_the_defaults(written):
    file = written("data: cifar10\nepochs: 7\nseed: 2\nhead_options: {degree: 3, gamma: 2}\n")
    made = make_spec(file, {"epochs": 9, "head": None, "head_options": {"degree": 5}})
    assert (made.epochs, made.seed, made.batch_size) == (9, 2, None)
    assert made.head_options == {"degree": 5, "gamma": 2}
    assert make_spec(file, {"head_options": None}).head_options == {"degree": 3, "gamma": 2}
    assert make_spec(file, {"tensorboard": False, "data": "cifar100"}).data == "cifar100"


def test_no_data_is_one_sentence(written):
    with pytest.raises(ValueError, match="no data; give --data one of cifar10, cifar100, pets, cars, or a folder"):
        make_spec(None, {"epochs": 3})
    assert "no data" in refused(written, "epochs: 3\n")


def test_numbers_in_yaml(written):
    text = "data: cifar10\nlearning_rate: 1\nweight_decay: 5e-4\nmomentum: .5\nworkers: null\n"
    made = make_spec(written(text + "head_options: {temperature: 1e-3, pool: auto, landmarks: 2}\n"), {})
    assert (made.learning_rate, made.weight_decay, made.momentum, made.workers) == (1.0, 0.0005, 0.5, None)
    assert made.head_options == {"temperature": 0.001, "pool": "auto", "landmarks": 2}
    assert isinstance(made.head_options["landmarks"], int)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("epochs: many", "epochs is 'many'; give a whole number or null"),
        ("epochs: 1.5", "epochs is 1.5; give a whole number or null"),
        ("epochs: true", "epochs is True; give a whole number"),
        ("seed: null", "seed is None; give a whole number"),
        ("rectified: 'yes'", "rectified is 'yes'; give true or false"),
        ("rectified: 1", "rectified is 1; give true or false"),
        ("learning_rate: fast", "learning_rate is 'fast'; give a number or null"),
        ("learning_rate: true", "learning_rate is True; give a number"),
        ("momentum: [1]", "momentum is [1]; give a number"),
        ("head: 5", "head is 5; give a text"),
        ("head_options: degree=9", "head_options is 'degree=9'; give options with their values"),
        ("head_options:", "head_options is None; give options with their values"),
        ("epochs: 0", "epochs must be positive, got 0"),
        ("batch_size: -5", "batch_size must be positive, got -5"),
        ("image_size: 0", "image_size must be positive, got 0"),
        ("learning_rate: -0.1", "learning_rate must be positive, got -0.1"),
        ("learning_rate: .nan", "learning_rate must be a finite number, got nan"),
        ("checkpoint_seconds: .inf", "checkpoint_seconds must be a finite number, got inf"),
        ("weight_decay: -1e-4", "weight_decay must not be negative, got -0.0001"),
        ("warmup_epochs: -1", "warmup_epochs must not be negative, got -1"),
        ("evaluate_every: -1", "evaluate_every must not be negative, got -1"),
        ("workers: -2", "workers must not be negative, got -2"),
        ("momentum: 1", "momentum must be at least 0 and below 1, got 1"),
        ("seed: -1", "seed must be at least 0 and below 2**32, got -1"),
        ("test: 1", "test and val must be shares below 1 together, test above 0; got 1 and 0.0"),
        ("val: 0.8", "test and val must be shares below 1 together, test above 0; got 0.2 and 0.8"),
        ("ema: 1", "ema must be at least 0 and below 1, got 1"),
        ("layer_decay: 1.5", "layer_decay must be at most 1, got 1.5"),
        ("accumulate: 0", "accumulate must be positive, got 0"),
        ("resize: stretch", "unknown resize 'stretch'; choose one of crop, squash, pad"),
        (
            "mixup: true\nlabel_smoothing: 0.1",
            "mixup has a loss of its own; leave out class_weight, label_smoothing, or mixup",
        ),
        ("pretrained: false\nfreeze_backbone: true", "freeze_backbone needs a trained network; give weights"),
        ("augment: heavy", "unknown augment 'heavy'; choose one of auto, none, light, imagenet, randaugment"),
        ("amp: half", "unknown amp 'half'; choose one of auto, none, bfloat16, float16"),
        ("head: relu", "unknown head 'relu'; choose one of kernel, prototypes"),
        ("head: softmax", "unknown head 'softmax'"),
        ("head_options: {degre: 3}", "head 'landmarks' has no option 'degre'; it takes degree"),
        ("learning-rate: 3", "has an unknown setting 'learning-rate'; did you mean 'learning_rate'?"),
        ("Epochs: 3", "has an unknown setting 'Epochs'; did you mean 'epochs'?"),
        ("lr: 3", "has an unknown setting 'lr'; settings are data, backbone, head"),
        ("5: 3", "has an unknown setting 5; settings are data"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(written, line, sentence):
    assert sentence in refused(written, f"data: cifar10\n{line}\n")


def test_the_largest_seed_and_no_weight_decay_are_fine():
    check(TrainSpec("pets", seed=2**32 - 1, weight_decay=0.0, momentum=0.0, evaluate_every=0, warmup_epochs=0))


@pytest.mark.parametrize("text", ["- data\n- cifar10\n", "cifar10\n", ""])
def test_a_file_without_settings_is_refused(written, text):
    assert "must hold one setting per line, such as 'epochs: 10'" in refused(written, text)


def test_a_file_that_is_no_yaml_is_refused(written, tmp_path):
    assert "settings.yaml is not readable YAML (while parsing a flow node" in refused(written, "data: [\n")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    for path, sentence in ((tmp_path / "b.yaml", "is not readable YAML"), (tmp_path, "is a folder; give a plain file")):
        with pytest.raises(ValueError, match=sentence):
            make_spec(path, {})
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.yaml"):
        make_spec(tmp_path / "none.yaml", {})


@pytest.mark.parametrize(
    "given",
    [
        {"data": "pets", "head": "linear", "compile": True, "workers": 3},
        {"data": "grün, [x]: 'y' # z", "learning_rate": 1e-5, "test": 0.25, "val": 0.1},
        {"data": "cifar100", "head_options": {"degree": 9, "gamma": 5e-4, "pool": "auto", "scale": None}},
    ],
)
def test_what_is_shown_can_be_given_back(written, given):
    made = resolved(TrainSpec(**given, image_size=32))
    assert make_spec(written(to_yaml(made)), {}) == made
    assert list(yaml.safe_load(to_yaml(made))) == [each.name for each in fields(TrainSpec)]


def test_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    (tmp_path / "w.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    made = make_spec(None, {"data": "images", "weights": "w.safetensors"})
    assert (made.data, made.weights) == (str(tmp_path / "images"), str(tmp_path / "w.safetensors"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_spec(None, {"data": "~/images"}).data == str(tmp_path / "images")
    (tmp_path / "cifar10").mkdir()
    assert make_spec(None, {"data": "cifar10"}).data == "cifar10"  # the data set goes before a folder of its name
    assert make_spec(None, {"data": "nowhere"}).data == "nowhere"
