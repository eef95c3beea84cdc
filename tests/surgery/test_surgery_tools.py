"""Kernelized networks under torch.compile, torch.export, torch.fx and DistributedDataParallel."""

import copy
import multiprocessing
import runpy
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F

from kernelhead import kernelize
from kernelhead.heads import Head

CASES = {"vectors": {"head": "kernel"}, "positions": {"landmarks": 6}}


def network(**options):
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return kernelize(nn.Sequential(*body, nn.Linear(8, 5)), 4, **options)


def batch(samples=8, side=8):
    generator = torch.Generator().manual_seed(side)
    return torch.randn(samples, 3, side, side, generator=generator), torch.arange(samples) % 4


@pytest.mark.parametrize("case", CASES)
def test_compiles_to_one_graph(case):
    torch.compiler.reset()
    model, twin = network(**CASES[case]).double(), network(**CASES[case]).double()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for side in (8, 11):  # of the images, so that the number of positions changes
        x, y = batch(side=side)
        logits, expected = compiled(x.double()), model(x.double())
        torch.testing.assert_close(logits, expected)
        F.cross_entropy(logits, y).backward()
        F.cross_entropy(expected, y).backward()
    for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # the number of positions
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_exports(case, strict):
    model = network(**CASES[case]).eval()
    rows, height, width = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "height", "width"))
    sizes = ({0: rows, 2: height + 3, 3: width + 3},)
    program = torch.export.export(model, (batch()[0],), dynamic_shapes=sizes, strict=strict).module()
    for samples, side in ((2, 8), (8, 8), (3, 12)):
        x, _ = batch(samples, side)
        torch.testing.assert_close(program(x), copy.deepcopy(model)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of checks that ask for shapes
@pytest.mark.parametrize("case", CASES)
def test_traces(case):
    model = network(**CASES[case]).eval()
    traced = torch.jit.trace(model, batch()[0])
    for samples, side in ((8, 8), (3, 12)):
        x, _ = batch(samples, side)
        torch.testing.assert_close(traced(x), copy.deepcopy(model)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_onnx_with_images_of_any_size(tmp_path):
    import onnxruntime

    model = network(landmarks=6).eval()
    sizes = (dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC),)
    torch.onnx.export(model, (batch()[0],), tmp_path / "a.onnx", dynamo=True, verbose=False, dynamic_shapes=sizes)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    for samples, side in ((2, 8), (3, 12)):
        x, _ = batch(samples, side)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_feature_extractors_of_torchvision(case):
    """They trace a network by torch.fx, and take a head as one node where they are told to."""
    import torchvision
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    model = kernelize(torchvision.models.resnet18(), 4, **CASES[case]).eval()
    extractor = create_feature_extractor(
        model, {"layer4": "map", "flatten": "features"}, tracer_kwargs={"leaf_modules": [Head]}
    )
    x, _ = batch(2, 64)
    found = extractor(x)
    assert found["map"].shape == (2, 512, 2, 2)
    expected = found["map"].mean((2, 3)) if case == "vectors" else found["map"].movedim(1, -1).reshape(-1, 512)
    torch.testing.assert_close(found["features"], expected)


def train_part(folder, rank):
    """One of two processes: a step on its half of the batch."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    for case, options in CASES.items():
        model = nn.parallel.DistributedDataParallel(network(**options))
        x, y = (part.chunk(2)[rank] for part in batch())
        for _ in range(2):  # a parameter without gradient would stop the second step
            model.zero_grad()
            F.cross_entropy(model.eval()(x), y).backward()
        torch.save([p.grad for p in model.parameters()], folder / f"{case}-{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_gives_the_gradients_of_the_whole_batch(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kernelhead.surgery", "torch.nn.parallel", "pytest"])
    arguments = [{"folder": tmp_path, "rank": rank} for rank in range(2)]
    processes = [
        context.Process(target=runpy.run_path, args=(__file__, {"arguments": each}, "__main__")) for each in arguments
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
        process.close()
    assert codes == [0, 0]
    for case, options in CASES.items():
        model = network(**options).eval()
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        gradients = [torch.load(tmp_path / f"{case}-{rank}.pt") for rank in range(2)]
        for whole, first, second in zip(model.parameters(), *gradients, strict=True):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, whole.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("kernelize_resnet", "landmarks"), ("kernelize_bert", "landmarks")])
def test_examples_run_as_they_are_and_learn(name, head, capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / f"{name}.py"))
    assert example["main"]() > 80
    assert f"head {head!r}" in capsys.readouterr().out


if __name__ == "__main__":
    train_part(**globals()["arguments"])
