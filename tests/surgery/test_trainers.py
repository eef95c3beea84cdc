"""Kernelized networks under people's trainers, each run for real: train, save, go on, read again."""

import copy
import warnings

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

import kernelhead
from kernelhead import LandmarkHead, kernelize
from kernelhead.surgery import changes

C = 4
HEADS = {"kernel": {"head": "kernel"}, "landmarks": {"landmarks": 8}}
every_head = pytest.mark.parametrize("head", HEADS)


def network(head="landmarks"):
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return kernelize(nn.Sequential(*body, nn.Linear(8, 5)), C, **HEADS[head])


def images(samples=32, side=8, seed=0):
    """Images whose class is their brightest corner."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 3, side, side, generator=generator), torch.arange(samples) % C
    for row, label in enumerate(y.tolist()):
        x[row, :, 4 * (label // 2) :][:, :4, 4 * (label % 2) :][:, :, :4] += torch.tensor([1.0, 2, 3])[:, None, None]
    return x + y[:, None, None, None], y


def loss_of(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model.eval()(x).float(), y).item()


def comes_back(model, folder, x, make=network, **options):
    """Save a model and read it into a new one."""
    kernelhead.save(model, folder)
    with torch.no_grad():
        return torch.equal(kernelhead.load(folder, model=make(**options))(x), model.eval()(x))


@every_head
def test_a_plain_loop(head, tmp_path):
    model, (x, y) = network(head), images()
    before = loss_of(model, x, y)
    optimizer = torch.optim.AdamW(kernelhead.parameter_groups(model, 1e-4), lr=0.02)
    for _ in range(30):
        loss = F.cross_entropy(model.train()(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss_of(model, x, y) < before / 2
    assert comes_back(model, tmp_path, x, head=head)


@every_head
def test_accelerate(head, tmp_path):
    from accelerate import Accelerator

    accelerator, (x, y) = Accelerator(cpu=True), images()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model = network(head)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02), loader)
    before = loss_of(model, x, y)

    def epochs(count):
        for _ in range(count):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model.train()(inputs), labels))
                    optimizer.step()
                    optimizer.zero_grad()

    epochs(15)
    accelerator.save_state(tmp_path / "state")
    epochs(2)
    expected = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
    accelerator.load_state(tmp_path / "state")
    epochs(2)
    assert all(torch.equal(each, expected[name]) for name, each in accelerator.unwrap_model(model).state_dict().items())
    assert loss_of(model, x, y) < before / 2
    accelerator.save_model(model, tmp_path / "weights")
    other = network("kernel" if head == "landmarks" else "landmarks")
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(twin := network(head), tmp_path / "weights")
    assert loss_of(twin, x, y) == loss_of(model, x, y)
    with pytest.raises((ValueError, RuntimeError), match="cannot take these weights"):
        load_checkpoint_in_model(other, tmp_path / "weights", strict=True)
    assert comes_back(accelerator.unwrap_model(model), tmp_path / "folder", x, head=head)


@pytest.mark.slow
@every_head
def test_lightning(head, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network(head)
            self.losses = []

        def training_step(self, pair, index):
            loss = F.cross_entropy(self.network(pair[0]), pair[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.02)

    def fit(epochs, **options):
        module, quiet = Module(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of few workers and few steps
            trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, **quiet)
            trainer.fit(module, loader, **options)
            trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    x, y = images()
    whole = fit(20)
    assert whole.losses[-1] < whole.losses[0] / 2
    fit(12)
    resumed = fit(20, ckpt_path=tmp_path / "12.ckpt")
    assert len(resumed.losses) == 16
    state = resumed.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = Module.load_from_checkpoint(tmp_path / "20.ckpt")
    assert loss_of(twin.network, x, y) == loss_of(whole.network, x, y)
    assert comes_back(whole.network, tmp_path / "folder", x, head=head)


class Texts(torch.utils.data.Dataset):
    """The class of a text is its second word."""

    def __init__(self, samples):
        self.ids = torch.randint(4, 30, (samples, 6), generator=torch.Generator().manual_seed(0))
        self.ids[:, 1] = self.ids[:, 1] % 3 + 30

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index, 1] - 30}


def bert(head):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=40, **sizes, num_labels=7, pad_token_id=0)
    return kernelize(transformers.BertForSequenceClassification(config), 3, **HEADS[head])


@pytest.mark.slow
@every_head
def test_the_trainer_of_transformers(head, tmp_path):
    import transformers

    def trainer(model, folder, epochs):
        settings = transformers.TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=1e-2, report_to=[],
            use_cpu=True, logging_strategy="no", save_strategy="epoch", disable_tqdm=True, dataloader_pin_memory=False,
            lr_scheduler_type="constant",
        )  # fmt: skip
        return transformers.Trainer(model, settings, train_dataset=Texts(256), eval_dataset=Texts(64))

    whole = trainer(bert(head), tmp_path / "whole", 8)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    after = whole.evaluate()["eval_loss"]
    assert after < before / 2
    assert whole.predict(Texts(64)).predictions.shape == (64, 3)

    resumed = trainer(bert(head), tmp_path / "whole", 8)  # from the middle
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-32"))
    state = resumed.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.model.state_dict().items())

    whole.save_model(tmp_path / "saved")
    ids = Texts(8).ids
    for folder in (tmp_path / "saved", tmp_path / "whole" / "checkpoint-64"):
        with pytest.raises(OSError, match=r"kernelhead\.load reads this folder"):
            transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        loaded = kernelhead.load(folder)
        assert torch.equal(loaded(input_ids=ids).logits, whole.model.eval()(input_ids=ids).logits)
    assert trainer(loaded, tmp_path / "again", 1).evaluate()["eval_loss"] == after


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"])
@every_head
def test_conventions_of_timm(head, name, tmp_path):
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler

    side = 160 if name == "test_vit" else 64
    x, y = torch.randn(8, 3, side, side), torch.arange(8) % C
    model = kernelize(timm.create_model(name, num_classes=9), C, **HEADS[head])
    assert model.num_classes == C
    assert model.get_classifier() is model.get_submodule(changes(model).layers[0])
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scaler, average = NativeScaler(device="cpu"), ModelEmaV3(model, decay=0.5)
    before = F.cross_entropy(model.train()(x), y).item()
    for _ in range(6):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        average.update(model)
    assert loss.item() < before
    saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=tmp_path, recovery_dir=tmp_path)
    saver.save_checkpoint(0, metric=1.0)
    twin = kernelize(timm.create_model(name, num_classes=9), C, **HEADS[head])
    timm.models.load_checkpoint(twin, str(tmp_path / "last.pth.tar"), use_ema=False)
    with torch.no_grad():
        expected = model.eval()(x)
        assert torch.equal(twin.eval()(x), expected)
        features = model.forward_features(x)
        assert torch.equal(model.forward_head(features), expected)
        before_head = model.forward_head(features, pre_logits=True)
        assert torch.equal(model.get_classifier()(before_head), expected)
        kernelhead.save(model, tmp_path / "folder")
        assert torch.equal(kernelhead.load(tmp_path / "folder")(x), expected)
    model.reset_classifier(6, "avg")  # a layer of timm's, and its own pooling
    assert model(x).shape == (8, 6)
    assert type(model.get_classifier()) is nn.Linear
    with pytest.raises(ValueError, match="has none, call kernelize first"):
        kernelhead.save(model, tmp_path)


@pytest.mark.slow
@every_head
def test_peft_trains_the_head_beside_adapters(head, tmp_path):
    import peft

    ids, labels = Texts(16).ids, Texts(16).ids[:, 1] - 30
    plain = bert(head).eval()(input_ids=ids).logits
    settings = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"])
    model = peft.get_peft_model(bert(head), settings)
    assert torch.equal(model.eval()(input_ids=ids).logits, plain)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    for _ in range(60):
        loss = F.cross_entropy(model.train()(input_ids=ids).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "adapter")
    twin = peft.PeftModel.from_pretrained(bert(head), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert F.cross_entropy(expected, labels) < F.cross_entropy(plain, labels) / 2
        assert torch.equal(twin(input_ids=ids).logits, expected)
    other = bert("kernel" if head == "landmarks" else "landmarks")
    with pytest.raises((ValueError, KeyError)):  # the first is ours, where PEFT finds all tensors
        peft.PeftModel.from_pretrained(other, tmp_path / "adapter")


def test_a_copy_of_the_head_stays_with_its_network():
    """As PEFT makes one; its positions come from hooks on the rest of the network."""
    model = torchvision.models.resnet18(num_classes=5)
    model = copy.deepcopy(kernelize(model, C, landmarks=8)).eval()
    x = torch.randn(2, 3, 64, 64)
    expected, twin = model(x), copy.deepcopy(model)
    model.fc = copy.deepcopy(model.fc)
    assert torch.equal(model(x), expected)
    twin(torch.randn(3, 3, 96, 96))  # a copy of the whole network has its own
    assert twin.fc._forward_pre_hooks != model.fc._forward_pre_hooks
    own, others = (next(iter(each.fc._forward_pre_hooks.values())).__self__.fold for each in (model, twin))
    assert own is not others
    assert (own.sides, others.sides) == ((2, 2), (3, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("head", [*HEADS, "linear", "expansion", "attentive", "second_order"])
def test_dynamic_quantisation_of_torchao(head, tmp_path):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    options = HEADS.get(head, {"head": head})
    body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 7))
    model, x = kernelize(body, 7, **options), torch.randn(32, 64)
    model.train()(x)
    expected = model.eval()(x)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    assert type(model[0].weight).__name__ == "Int8Tensor"
    logits = model(x)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
    with pytest.raises(ValueError, match=r"0\.weight is a Int8Tensor, so save before quantising"):
        kernelhead.save(model, tmp_path)


@pytest.mark.slow
@every_head
@pytest.mark.parametrize("buffers", [False, True])
def test_moving_averages_of_weights(head, buffers, tmp_path):
    model, (x, y) = network(head), images()
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=buffers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    before = loss_of(model, x, y)
    for _ in range(40):
        loss = F.cross_entropy(model.train()(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    if not buffers:
        update_bn([(x,)], average)
    assert loss_of(average, x, y) < before / 2
    twin = AveragedModel(network(head), use_buffers=buffers)
    twin.load_state_dict(average.state_dict())
    assert loss_of(twin, x, y) == loss_of(average, x, y)
    assert comes_back(average.module, tmp_path, x, head=head)


@pytest.mark.slow
@every_head
def test_compiled_training(head, tmp_path):
    torch.compiler.reset()
    model, (x, y) = network(head), images()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.02)
    before = loss_of(model, x, y)
    model.train()
    for _ in range(30):
        loss = F.cross_entropy(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss_of(model, x, y) < before / 2
    twin = torch.compile(network(head))
    twin.load_state_dict(compiled.state_dict())
    torch.testing.assert_close(loss_of(twin, x, y), loss_of(compiled, x, y))
    assert comes_back(compiled._orig_mod, tmp_path, x, head=head)


@pytest.mark.slow
@every_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(head, dtype, tmp_path):
    model, (x, y) = network(head), images()
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    before, scales = loss_of(model, x, y), []
    for _ in range(40):
        with torch.autocast("cpu", dtype=dtype):
            logits = model.train()(x)
        scaler.scale(F.cross_entropy(logits.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert loss_of(model, x, y) < before / 2
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert scales[-1] >= (2.0**10 if dtype == torch.float16 else 1.0)  # few steps were skipped
    assert comes_back(model, tmp_path, x, head=head)


@every_head
def test_half_precision_throughout(head, tmp_path):
    model, (x, y) = network(head).bfloat16(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    before = loss_of(model, x.bfloat16(), y)
    for _ in range(30):
        loss = F.cross_entropy(model.train()(x.bfloat16()).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss_of(model, x.bfloat16(), y) < before
    assert comes_back(model, tmp_path, x.bfloat16(), head=head)
    if head == "landmarks":
        loaded = kernelhead.load(tmp_path, model=network(head))[5]
        assert isinstance(loaded, LandmarkHead)
        assert loaded.norm.running_var.dtype == torch.float32
