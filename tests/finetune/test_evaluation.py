"""What a trained classifier says of images: figures, probabilities, features, and which to label next."""

import shutil
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from kernelhead.finetune.backbones import Input
from kernelhead.finetune.data import fingerprint
from kernelhead.finetune.evaluation import evaluate_classifier, feature_batches, precision
from kernelhead.finetune.export import export_classifier
from kernelhead.finetune.images import expand
from kernelhead.finetune.prediction import classify_files
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of
from kernelhead.finetune.select import select, select_images
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec
from kernelhead.heads import create_head

CPU = torch.device("cpu")


def classifier(backbone="tiny_networks:tiny", head="linear", size=16, augment="imagenet"):
    """One that was trained on nothing, with a mean and a deviation of its own."""
    options = {"landmarks": 6} if head == "landmarks" else {}
    spec = TrainSpec("nowhere", backbone, head, options, pretrained=False, augment=augment, image_size=size)
    model = create_classifier(resolved(spec), 3).eval()
    expected = Input(size, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))
    return SavedClassifier(model, head_of(model), ["ant", "bee", "cow"], resolved(spec), expected)


@pytest.fixture
def folder(colours, tmp_path):
    """Images in two of the classes, whose labels in the folder are not those of the classifier."""
    rng = np.random.default_rng(2)
    for name in ("cow", "ant"):
        (tmp_path / "other" / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(256, size=(15 + index, 18, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "other" / name / f"{index}.png")
    return tmp_path / "other"


def by_hand(path, saved, margin):
    """Resized with antialiasing by torch, cropped and normalised (3, size, size)."""
    pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)[None].double()
    size, (height, width) = saved.input.size, pixels.shape[2:]
    short = round(margin * size)
    rows, columns = (side * short // min(height, width) for side in (height, width))
    resized = F.interpolate(pixels, (rows, columns), mode="bilinear", antialias=True)
    top, left = round((rows - size) / 2), round((columns - size) / 2)
    mean, std = (torch.tensor(each).view(3, 1, 1).double() for each in (saved.input.mean, saved.input.std))
    return ((resized[0, :, top : top + size, left : left + size].round() / 255 - mean) / std).float()


def classified(saved, paths):
    """The files that can be read, the probabilities (n, C) of their classes, and a sentence per other."""
    seen = list(classify_files(saved, paths, CPU))
    readable = [path for each in seen for path in each.paths if path not in each.broken]
    broken = [sentence for each in seen for sentence in each.broken.values()]
    return readable, torch.cat([each.logits for each in seen]).double().softmax(1), broken


@pytest.mark.parametrize(
    ("backbone", "head", "size", "augment", "margin"),
    [
        ("tiny_networks:tiny", "linear", 16, "imagenet", 8 / 7),
        ("tiny_networks:tiny", "landmarks", 20, "light", 1.0),
        ("timm/test_resnet", "landmarks", 64, "imagenet", 8 / 7),
    ],
)
def test_evaluation_prediction_features_and_torch_agree(folder, backbone, head, size, augment, margin):
    saved = classifier(backbone, head, size, augment)
    paths = list(expand([folder]))
    labels = torch.tensor([saved.classes.index(path.parent.name) for path in paths])
    with torch.no_grad():
        logits = saved.model(torch.stack([by_hand(path, saved, margin) for path in paths]))
    readable, probabilities, broken = classified(saved, paths)
    assert (readable, broken) == (paths, [])
    torch.testing.assert_close(probabilities.float(), logits.softmax(1), atol=2e-2, rtol=0)  # a byte of rounding
    figures = evaluate_classifier(saved, str(folder), CPU)
    assert figures["images"] == 8
    chosen = probabilities[torch.arange(8), labels]
    assert figures["nll"] == pytest.approx(-chosen.log().mean().item(), rel=1e-4)
    assert figures["accuracy"] == pytest.approx(100 * (probabilities.argmax(1) == labels).float().mean().item())
    features = torch.cat(list(feature_batches(saved, str(folder), CPU)))
    assert features.shape[:2] == (8, saved.head.in_features)
    assert features.dim() == (4 if head == "landmarks" else 2)
    alone = create_head(**saved.head.config)  # the network's own has hooks
    alone.load_state_dict(saved.head.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(alone.eval()(features).softmax(1), probabilities.float(), atol=1e-5, rtol=1e-4)


def test_images_that_cannot_be_read_are_named(folder):
    saved = classifier()
    (folder / "ant" / "broken.png").write_text("no image")
    paths = [*expand([folder]), folder / "none.jpg"]
    readable, probabilities, broken = classified(saved, paths)
    assert set(paths) - set(readable) == {folder / "ant" / "broken.png", folder / "none.jpg"}
    assert len(broken) == 2
    assert all("is not a readable image" in sentence for sentence in broken)
    alone = classified(saved, readable[2:4])[1]
    torch.testing.assert_close(probabilities[2:4], alone)
    with pytest.warns(UserWarning, match=r"1 images cannot be read and are left out: .*broken.png"):
        assert evaluate_classifier(saved, str(folder), CPU)["images"] == 8
    assert classified(saved, [folder / "none.jpg"])[1].shape == (0, 3)
    with pytest.raises(ValueError, match=r"no image can be read \(.*none.jpg is not a readable image"):
        select_images(saved, [folder / "none.jpg"], 1, "margin", CPU)


def test_an_unknown_class_is_refused(folder):
    (folder / "ant").rename(folder / "wasp")
    with pytest.raises(ValueError, match="the classifier has no class 'wasp'; its classes are ant, bee, cow"):
        evaluate_classifier(classifier(), str(folder), CPU)


def test_own_data_that_have_gone_are_named():
    with pytest.raises(ValueError, match="there is no data set or folder 'nowhere'"):
        evaluate_classifier(classifier(), None, CPU)


def test_logits_that_are_not_finite_are_refused(folder, tmp_path):
    saved = classifier()
    next(module for module in saved.model.modules() if isinstance(module, nn.BatchNorm2d)).running_mean.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits of 8 of 8 images are not finite: the run diverged"):
        evaluate_classifier(saved, str(folder), CPU)
    with pytest.raises(ValueError, match="logits of 1 of 1 images are not finite: the run diverged"):
        classified(saved, list(expand([folder]))[:1])
    with pytest.raises(ValueError, match="logits of 2 of 2 images are not finite: the run diverged"):
        export_classifier(saved, tmp_path / "x.onnx")


def test_precision(monkeypatch):
    cuda = torch.device("cuda")
    assert precision("auto", CPU) is None
    assert precision("none", cuda) is None
    assert precision("float16", CPU) == torch.float16
    for supported, expected in ((True, torch.bfloat16), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported: supported)
        assert precision("auto", cuda) == expected


@pytest.mark.parametrize("head", ["linear", "landmarks"])
@pytest.mark.parametrize("strategy", ["margin", "k-center", "random", "badge"])
def test_images_to_label_next(folder, head, strategy):
    saved = classifier(head=head)
    shutil.copy(folder / "ant" / "0.png", folder / "cow" / "copy.png")
    (folder / "broken.png").write_text("no image")
    paths = list(expand([folder]))
    rows, broken = select_images(saved, paths, 4, strategy, CPU, seed=1)
    assert len(broken) == 1
    chosen = [path for path, *_ in rows]
    assert len(set(chosen)) == 4
    readable, probabilities, _ = classified(saved, paths)
    assert set(chosen) <= set(readable)
    if strategy == "margin":
        two = probabilities.topk(2).values
        least = [readable[index] for index in (two[:, 0] - two[:, 1]).argsort(stable=True)[:4]]
        assert set(chosen) == set(least)
    elif strategy in ("k-center", "badge"):  # not an image and its copy
        assert not {folder / "ant" / "0.png", folder / "cow" / "copy.png"} <= set(chosen)
    else:
        assert rows != select_images(saved, paths, 4, strategy, CPU, seed=2)[0]
    for path, name, high, lead in rows:
        best = probabilities[readable.index(path)].sort(descending=True)
        assert name == saved.classes[best.indices[0]]
        assert (high, lead) == pytest.approx(
            (best.values[0].item(), (best.values[0] - best.values[1]).item()), rel=1e-4
        )
    with pytest.raises(ValueError, match="budget is 10, and 9 samples are not labelled yet; choose at most 9"):
        select_images(saved, paths, 10, strategy, CPU)


def test_images_of_the_training_are_not_selected(folder):
    """They are known by their content, wherever they are; k-center keeps away from where they were."""
    plain = classifier()
    paths = list(expand([folder]))
    first = folder / "ant" / "0.png"
    named = [("ant/0.png", 0, fingerprint(first)), ("ant/none.png", 0, "0")]
    saved = replace(plain, spec=replace(plain.spec, data=str(folder)), files={"train": named})
    shutil.copy(first, folder / "cow" / "copy.png")
    others = [path for path in paths if path != first]
    for strategy in ("margin", "k-center", "random", "badge"):
        chosen, _ = select_images(saved, [*others, folder / "cow" / "copy.png"], 7, strategy, CPU)
        assert {path for path, *_ in chosen} == set(others)
    seen = list(classify_files(saved, paths, CPU))
    embeddings = torch.cat([each.features for each in seen])
    expected = select("k-center", 3, embeddings=embeddings, labelled=torch.tensor([paths.index(first)]))
    chosen, _ = select_images(saved, others, 3, "k-center", CPU)
    assert [path for path, *_ in chosen] == [paths[index] for index in expected]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["network", "head"])
def test_an_exported_classifier_computes_the_same(colours, tmp_path, part):
    saved = classifier(head="landmarks")
    exported = export_classifier(saved, tmp_path / "x.onnx", part=part)
    session = onnxruntime.InferenceSession(exported.path)
    given = session.get_modelmeta().custom_metadata_map
    assert given["classes"] == '["ant", "bee", "cow"]'
    assert ('"short_side": 18' in given["input"]) == (part == "network")
    images = torch.randn(5, 3, 16, 16)
    seen = []
    hook = saved.head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        expected = saved.model(images)
    hook.remove()
    example = images if part == "network" else seen[0]
    (logits,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="unknown format 'tf'; choose one of onnx, pt2"):
        export_classifier(saved, tmp_path / "x", format="tf")
    with pytest.raises(ValueError, match="unknown part 'body'; choose one of network, head"):
        export_classifier(saved, tmp_path / "x", part="body")
