"""What a training is told: defaults, a file, flags."""

import inspect
from dataclasses import asdict, fields, replace

import pytest
import yaml

from kernelhead.backbones import expected_input
from kernelhead.cli import train as cli
from kernelhead.train.config import FREE, TrainConfig, check_same, make_config, save_config, says


def config(**given):
    return make_config(None, given)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(written, text):
    with pytest.raises(ValueError, match=r"\S") as caught:
        make_config(written(text), {})
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# --- defaults ---------------------------------------------------------------------------------------------------------

ON_CIFAR = {"backbone": "cifar_resnet20", "epochs": 200, "batch_size": 128, "weight_decay": 5e-4, "size": 32}
ON_PICTURES = {"backbone": "resnet50", "epochs": 30, "batch_size": 64, "weight_decay": 1e-4, "size": 224}


def rates(of_network, times_for_head):
    return {"learning_rate": of_network, "head_rate": times_for_head}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"data": "cifar10"}, {**ON_CIFAR, "learning_rate": 0.1, "head_rate": 1.0, "pretrained": False}),
        ({"data": "cifar100", "head": "softmax"}, {**ON_CIFAR, "learning_rate": 0.1, "pretrained": False}),
        ({"data": "cifar10", "backbone": "resnet18"}, {"size": 32, "pretrained": False, "learning_rate": 0.1}),
        ({"data": "pets"}, {**ON_PICTURES, **rates(0.01, 10.0), "pretrained": True}),
        ({"data": "pets", "head": "linear"}, rates(0.01, 10.0)),
        ({"data": "pets", "head": "kernel", "head_options": {"landmarks": 8}}, rates(0.01, 1.0)),
        ({"data": "pets", "head": "expansion"}, rates(0.01, 1.0)),
        ({"data": "pets", "head": "second_order"}, rates(0.003, 1.0)),
        ({"data": "pets", "head": "softmax"}, {**ON_PICTURES, **rates(0.003, 1.0), "pretrained": True}),
        ({"data": "cars", "pretrained": False}, {**ON_PICTURES, **rates(0.1, 1.0), "pretrained": False}),
        ({"data": "pets", "weights": "w"}, {**ON_PICTURES, **rates(0.01, 10.0), "pretrained": False}),
        ({"data": "pets", "learning_rate": 0.02}, rates(0.02, 10.0)),
        ({"data": "pets", "head_rate": 3.0}, rates(0.01, 3.0)),
        ({"data": "my", "backbone": "lenet5"}, {"size": 32, "pretrained": False, "learning_rate": 0.1, "epochs": 30}),
        ({"data": "my", "backbone": "timm/test_vit"}, {"size": 160, "pretrained": True}),
        ({"data": "my", "backbone": "timm/test_vit", "size": 96}, {"size": 96}),
    ],
)
def test_defaults_depend_on_data_and_backbone(given, expected):
    made = asdict(config(**given))
    assert {name: made[name] for name in expected} == expected
    assert {name: made[name] for name in given} == given


def test_large_networks_say_what_size_they_expect():
    assert config(data="my", backbone="timm/test_vit").size == expected_input("timm/test_vit").size == 160


def test_what_is_said_is_not_replaced():
    said = {"epochs": 7, "batch_size": 3, "learning_rate": 2.0, "weight_decay": 0.0}
    made = asdict(config(data="cifar10", **said))
    assert {name: made[name] for name in said} == said


def test_the_run_and_the_schedule_are_those_that_were_asked_for():
    made = config(
        data="cifar10",
        backbone="cifar_resnet8",
        kervolution="first",
        rectified=True,
        head_options={"degree": 4},
        seed=3,
        learning_rate=0.2,
        head_rate=5.0,
        epochs=9,
        momentum=0.8,
        warmup_epochs=2,
    )
    run, schedule = made.run(), made.schedule()
    assert run.backbone_options == {"rectified": True, "kervolution": "first"}
    assert (run.backbone, run.head, run.head_options) == ("cifar_resnet8", "kernel", {"degree": 4})
    assert (run.seed, run.learning_rate, run.weight_decay, run.head_rate) == (3, 0.2, 5e-4, 5.0)
    assert asdict(schedule) == {"epochs": 9, "batch_size": 128, "momentum": 0.8, "warmup_epochs": 2}
    assert config(data="cifar10").run().backbone_options == {}
    assert config(data="pets").run().backbone_options == {"pretrained": True}
    assert config(data="pets", weights="w").run().backbone_options == {"weights": "w"}


def test_the_name_says_data_backbone_head_and_seed(tmp_path):
    assert config(data="cifar10", seed=4).name == "cifar10-cifar_resnet20-kernel-seed4"
    (tmp_path / "my pets").mkdir()
    name = config(data=str(tmp_path / "my pets"), backbone="timm/test_vit", head="linear").name
    assert name == "my pets-timm-test_vit-linear-seed0"


def test_every_setting_has_a_flag():
    flags = set(inspect.signature(cli.train).parameters)
    settings = {each.name for each in fields(TrainConfig)}
    assert settings - flags == {"head_options"}
    assert flags - settings == {"head_option", "config", "show_config", "out", "resume"}


@pytest.mark.parametrize("images", [2, 5, 6, 11, 12, 30, 63, 64, 100, 191, 192, 193, 5000])
def test_a_batch_size_that_nobody_chose_leaves_a_few_batches(images):
    usual = config(data="my", backbone="lenet5")
    fitting = [size for size in (64, 32, 16, 8, 4, 2) if images // size >= 3] or [2]
    assert usual.fitted(images) == replace(usual, batch_size=max(fitting))
    assert usual.fitted(images, processes=8).batch_size == max(8, *fitting)


def test_what_was_said_and_what_was_not(written):
    file = written("data: cifar10\nbatch_size: 7\nepochs: null\n")
    assert says(file, {}, "batch_size")
    assert says(None, {"batch_size": 7}, "batch_size")
    assert not says(None, {"batch_size": None}, "batch_size")
    assert not says(file, {"epochs": None}, "epochs")


# --- a file, then flags -----------------------------------------------------------------------------------------------


def test_flags_outweigh_the_file_and_the_file_the_defaults(written):
    file = written("data: cifar10\nepochs: 7\nseed: 2\nhead_options: {degree: 3, temperature: 2}\n")
    made = make_config(file, {"epochs": 9, "head": None, "head_options": {"degree": 5}})
    assert (made.epochs, made.seed, made.batch_size) == (9, 2, 128)
    assert made.head_options == {"degree": 5, "temperature": 2}
    assert make_config(file, {"head_options": None}).head_options == {"degree": 3, "temperature": 2}
    assert make_config(file, {"tensorboard": False, "data": "cifar100"}).data == "cifar100"


def test_no_data_is_one_sentence(written):
    with pytest.raises(ValueError, match="no data: say --data with one of cifar10, cifar100, pets, cars, a folder"):
        config(epochs=3)
    assert "no data" in refused(written, "epochs: 3\n")


def test_numbers_in_yaml(written):
    text = "data: cifar10\nlearning_rate: 1\nweight_decay: 5e-4\nmomentum: '0.5'\nworkers: null\n"
    made = make_config(written(text + "head_options: {temperature: 1e-3, pool: gap, prototypes: 2}\n"), {})
    assert (made.learning_rate, made.weight_decay, made.momentum, made.workers) == (1.0, 0.0005, 0.5, None)
    assert isinstance(made.learning_rate, float)
    assert made.head_options == {"temperature": 0.001, "pool": "gap", "prototypes": 2}
    assert isinstance(made.head_options["prototypes"], int)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("epochs: many", "epochs is 'many', and has to be a whole number or nothing"),
        ("epochs: 1.5", "epochs is 1.5, and has to be a whole number"),
        ("epochs: true", "epochs is True, and has to be a whole number"),
        ("seed: null", "seed is None, and has to be a whole number"),
        ("rectified: 'yes'", "rectified is 'yes', and has to be true or false"),
        ("rectified: 1", "rectified is 1, and has to be true or false"),
        ("learning_rate: fast", "learning_rate is 'fast', and has to be a number or nothing"),
        ("learning_rate: true", "learning_rate is True, and has to be a number"),
        ("momentum: [1]", "momentum is [1], and has to be a number"),
        ("head: 5", "head is 5, and has to be a text"),
        ("head_options: degree=9", "head_options is 'degree=9', and has to be options with their values"),
        ("head_options:", "head_options is None, and has to be options with their values"),
    ],
)
def test_a_value_of_another_kind_is_refused(written, line, sentence):
    assert sentence in refused(written, f"data: cifar10\n{line}\n")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("epochs: 0", "epochs must be positive, got 0"),
        ("batch_size: -5", "batch_size must be positive, got -5"),
        ("learning_rate: -0.1", "learning_rate must be positive, got -0.1"),
        ("learning_rate: .nan", "learning_rate must be a finite number, got nan"),
        ("checkpoint_seconds: .inf", "checkpoint_seconds must be a finite number, got inf"),
        ("weight_decay: -1e-4", "weight_decay must not be negative, got -0.0001"),
        ("warmup_epochs: -1", "warmup_epochs must not be negative, got -1"),
        ("evaluate_every: -1", "evaluate_every must not be negative, got -1"),
        ("workers: -2", "workers must not be negative, got -2"),
        ("momentum: 1", "momentum must be at least 0 and below 1, got 1.0"),
        ("seed: -1", "seed must be at least 0 and below 2**32, got -1"),
        (
            "mixup: true\nteacher: t",
            "mixup mixes labels, and with a teacher its scores are learned instead: use one of them",
        ),
        ("size: 64", "the images of cifar10 are 32x32; size 64 is for large images"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(written, line, sentence):
    assert refused(written, f"data: cifar10\n{line}\n") == sentence


def test_the_largest_seed_and_no_weight_decay_are_fine():
    made = config(data="cifar10", seed=2**32 - 1, weight_decay=0.0, momentum=0.0, evaluate_every=0, warmup_epochs=0)
    assert made.seed == 2**32 - 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning-rate", "did you mean 'learning_rate'?"),
        ("learnin_rate", "did you mean 'learning_rate'?"),
        ("Epochs", "did you mean 'epochs'?"),
        ("lr", "it knows data, backbone, head"),
        ("5", "it knows data, backbone, head"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest_one(written, name, hint):
    sentence = refused(written, f"data: cifar10\n{name}: 3\n")
    assert f"has an unknown setting {yaml.safe_load(name)!r}; {hint}" in sentence
    assert "settings.yaml" in sentence


@pytest.mark.parametrize("text", ["- data\n- cifar10\n", "cifar10\n", ""])
def test_a_file_without_settings_is_refused(written, text):
    assert "must hold one setting a line, such as 'epochs: 10'" in refused(written, text)


def test_a_file_that_is_no_yaml_is_refused(written, tmp_path):
    assert "settings.yaml is not readable YAML (while parsing a flow node" in refused(written, "data: [\n")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "b.yaml", tmp_path):
        with pytest.raises(ValueError, match="is not readable YAML"):
            make_config(path, {})
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.yaml"):
        make_config(tmp_path / "none.yaml", {})


# --- to YAML and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"data": "cifar10"},
        {"data": "pets", "head": "softmax", "compile": True, "workers": 3},
        {"data": "grün, [x]: 'y' # z", "backbone": "lenet5", "learning_rate": 1e-5, "holdout": 0.25},
        {"data": "cifar100", "head_options": {"degree": 9, "temperature": 5e-4, "pool": "rkhs", "landmarks": None}},
    ],
)
def test_what_is_shown_can_be_given_back(tmp_path, given):
    made = config(**given)
    save_config(tmp_path / "made.yaml", made)
    assert make_config(tmp_path / "made.yaml", {}) == made
    assert (tmp_path / "made.yaml").read_text(encoding="utf-8") == made.to_yaml()
    assert list(yaml.safe_load(made.to_yaml())) == [each.name for each in fields(TrainConfig)]


def test_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "w.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    made = config(data="pictures", weights="w.safetensors", backbone="resnet18")
    assert (made.data, made.weights) == (str(tmp_path / "pictures"), str(tmp_path / "w.safetensors"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config(data="~/pictures").data == str(tmp_path / "pictures")
    (tmp_path / "cifar10").mkdir()
    assert config(data="cifar10").data == "cifar10"  # the data set goes before a folder of its name
    assert config(data="nowhere").data == "nowhere"


def test_a_preset_becomes_what_it_stands_for():
    options = {"landmarks": 64, "coefficients": "softplus", "pool": "rkhs", "scale": 1.414}
    asked = config(data="cifar10", head="best", head_options={"landmarks": 64})
    assert (asked.head, asked.head_options) == ("kernel", options)
    assert asked == config(data="cifar10", head="kernel", head_options=options)
    assert asked.run().create(10).head.scale == 1.414
    assert asked.name == "cifar10-cifar_resnet20-best-seed0"
    assert config(data="cifar10", head="kernel", mixup=True).name == "cifar10-cifar_resnet20-kernel-mixup-seed0"


# --- going on ---------------------------------------------------------------------------------------------------------


def test_settings_that_matter_must_stay(tmp_path):
    begun = config(data="cifar10", epochs=5)
    save_config(tmp_path / "config.yaml", begun)
    check_same(tmp_path / "config.yaml", begun)
    free = {"data": "cifar100", "device": "cpu", "compile": True, "workers": 9, "evaluate_every": 0}
    free |= {"checkpoint_seconds": 1.0, "tensorboard": True}
    assert set(free) == set(FREE)
    check_same(tmp_path / "config.yaml", replace(begun, **free))
    others = {"epochs": 6, "head": "linear", "head_options": {"degree": 2}, "size": 33, "seed": 1, "momentum": 0.1}
    others |= {"backbone": "lenet5", "rectified": True, "kervolution": "all", "pretrained": True, "weights": "w"}
    others |= {"batch_size": 1, "learning_rate": 9.0, "weight_decay": 9.0, "warmup_epochs": 0, "short_side": 1}
    others |= {"holdout": 0.5, "teacher": "t", "temperature": 2.0, "mixup": True, "head_rate": 2.0}
    assert set(others) | set(FREE) == {each.name for each in fields(TrainConfig)}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"begun with {name} .*, not .*name another place with --out"):
            check_same(tmp_path / "config.yaml", replace(begun, **{name: value}))
