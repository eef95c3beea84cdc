"""RKHS pooling on CUDA: what a head of landmarks costs in training, its errors, and whether its bits repeat.

    python benchmarks/pool.py [--json results/bench/pool.json]
    python benchmarks/pool.py --tiles                                  tiles and warps of the kernels

Maps of a CIFAR ResNet at batch 128 (128, 64, 8, 8), bfloat16 and channels last, 512 and 2048 landmarks, 100 classes,
under autocast to bfloat16: microseconds of forward and backward with cross-entropy, each within a CUDA graph. Ways:
- fused: the kernels of `kernelhead.ops.kernel_pool`;
- eager: the same by torch's operations over blocks of cosines;
- compiled: the head under torch.compile;
- expansion, the peer: 1x1 convolution, BatchNorm, ReLU, average and linear layer, of the width of the landmarks.
The plain layer on feature vectors of 64 numbers goes through the same kernels while there are few values; there the
peer is softmax, the linear layer.

Errors are those of value and gradients of `kernel_mean` against float64 on the same rounded inputs, relative in norm,
and bits are compared over 20 repetitions beside other work.
"""

import argparse
import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from conv3x3 import error, microseconds
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead import KernelClassifier, create_head
from kernelhead.ops import kernel_mean, kernel_pool
from kernelhead.results import environment

SHAPE, LANDMARKS, CLASSES = (128, 64, 8, 8), (512, 2048), 100
VECTORS = ((128, 10), (128, 100), (1024, 100), (256, 1000), (1024, 1000), (4096, 1000))  # samples, classes
CALLS = 8  # in a graph, each with maps of its own
TILES = {"pool": "POOL", "features": "FEATURES", "weight": "WEIGHT"}


@contextmanager
def eager() -> Iterator[None]:
    """Without the kernels of `kernel_pool`."""
    kept, kernel_mean._is_pooled = kernel_mean._is_pooled, lambda *_: False
    try:
        yield
    finally:
        kernel_mean._is_pooled = kept


def random_maps(device: str) -> Tensor:
    maps = torch.randn(SHAPE, device=device, dtype=torch.bfloat16)
    return maps.contiguous(memory_format=torch.channels_last).requires_grad_()


def heads(landmarks: int, device: str) -> dict[str, nn.Module]:
    kernel = KernelClassifier(SHAPE[1], CLASSES, landmarks=landmarks, coefficients="softplus", pool="rkhs").to(device)
    peer = create_head("expansion", SHAPE[1], CLASSES, width=landmarks).to(device)
    peer = peer.to(memory_format=torch.channels_last)
    return {"expansion": peer, "fused": kernel, "eager": kernel, "compiled": torch.compile(kernel, dynamic=False)}


def plain_heads(classes: int, device: str) -> dict[str, nn.Module]:
    kernel = KernelClassifier(SHAPE[1], classes).to(device)
    peer = create_head("softmax", SHAPE[1], classes).to(device)
    return {"softmax": peer, "fused": kernel, "eager": kernel}


def training_step(head: nn.Module, maps: list[Tensor], labels: Tensor) -> Callable[[int], object]:
    def step(i: int) -> object:
        with torch.autocast(labels.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(head(maps[i]), labels)
        return torch.autograd.grad(loss, [maps[i], *head.parameters()])

    return step


def times(heads: dict[str, nn.Module], maps: list[Tensor], classes: int) -> dict[str, float]:
    """Microseconds of a training step of each head; the first is the peer."""
    labels = torch.randint(classes, maps[0].shape[:1], device="cuda")
    peer, found = next(iter(heads)), {}
    for name, head in heads.items():
        try:
            with eager() if name == "eager" else nullcontext():
                found[name] = microseconds(training_step(head, maps, labels), calls=CALLS)
            print(f"  {name:<12}{found[name]:9.1f} us  {found[name] / found[peer]:6.2f} x {peer}", flush=True)
        except Exception:
            print(f"  {name} failed\n{traceback.format_exc(limit=-4)}", flush=True)
    return found


def compare_vectors(samples: int, classes: int) -> dict[str, object]:
    print(f"vectors ({samples}, {SHAPE[1]}), {classes} classes", flush=True)
    rows = [torch.randn(samples, SHAPE[1], device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]
    kernel_mean.FEW, kept = samples * classes, kernel_mean.FEW  # fused at every size: where is the crossover?
    found = times(plain_heads(classes, "cuda"), [row.requires_grad_() for row in rows], classes)
    kernel_mean.FEW = kept
    return {"samples": samples, "classes": classes, "us": found}


class Pooling:
    """The arguments of `kernel_mean` as the head has them, and all that it computes from them."""

    def __init__(self, landmarks: int, device: str) -> None:
        torch.manual_seed(0)
        features = random_maps(device).detach().flatten(2).mT
        weight = torch.randn(landmarks, SHAPE[1], device=device)
        alpha = torch.rand(10, device=device) + 0.5
        self.inputs = [x.requires_grad_() for x in (features, weight, alpha)]
        self.gradient = torch.randn(SHAPE[0], landmarks, device=device)

    def half(self) -> list[Tensor]:
        """Value and gradients, with products in bfloat16."""
        with torch.autocast(self.gradient.device.type, dtype=torch.bfloat16):
            value = kernel_mean.kernel_mean(*self.inputs)
        return [value.detach(), *torch.autograd.grad(value, self.inputs, self.gradient)]

    def exact(self) -> list[Tensor]:
        inputs = [x.detach().double().requires_grad_() for x in self.inputs]
        value = kernel_mean.kernel_mean(*inputs)
        return [value.detach(), *torch.autograd.grad(value, inputs, self.gradient.double())]

    def errors(self) -> dict[str, dict[str, float]]:
        """Of value and gradients, fused and eager."""
        exact, fused = self.exact(), self.half()
        with eager():
            plain = self.half()
        names = ("value", "features", "weight", "alpha")
        return {
            way: {name: error(x, y) for name, x, y in zip(names, found, exact, strict=True)}
            for way, found in (("fused", fused), ("eager", plain))
        }

    def repeats(self) -> bool:
        first, busy = self.half(), torch.cuda.Stream()
        other = torch.randn(2048, 2048, device="cuda")
        for _ in range(20):
            with torch.cuda.stream(busy):
                other @ other
            if not all(map(torch.equal, first, self.half())):
                return False
        return True

    def kernels(self) -> dict[str, Callable[[int], object]]:
        """Each launch by itself."""
        features, weight, alpha = (x.detach() for x in self.inputs)
        (unit, norm), (directions, lengths) = kernel_pool.normalised(features), kernel_pool.normalised(weight)
        _, powers = kernel_pool.pool(unit, directions, alpha, keep=True)
        g = self.gradient
        return {
            "normalised": lambda _: (kernel_pool.normalised(features), kernel_pool.normalised(weight)),
            "pool": lambda _: kernel_pool.pool(unit, directions, alpha, keep=True),
            "features": lambda _: kernel_pool.features_gradient(g, unit, norm, directions, alpha, features.dtype),
            "weight": lambda _: kernel_pool.weight_gradient(g, unit, directions, lengths, alpha, weight.dtype),
            "alpha": lambda _: kernel_pool.alpha_gradient(g, powers),
        }


def candidates(kind: str) -> Iterator[kernel_pool.Tiles]:
    programs = {"pool": (264, 528, 1056), "features": (0,), "weight": (132, 264, 528)}[kind]
    for places, weights, warps, count in itertools.product((32, 64), (32, 64, 128), (4, 8), programs):
        if 512 <= places * weights // warps <= 1024:  # 16 to 32 cosines a thread
            yield kernel_pool.Tiles(places, weights, warps, 2 if kind == "pool" else 3, count)


def search() -> list[dict[str, object]]:
    """Microseconds of each kernel, 512 and 2048 landmarks, the fastest at both first."""
    rows: list[dict[str, object]] = []
    poolings = [Pooling(landmarks, "cuda").kernels() for landmarks in LANDMARKS]
    for kind, name in TILES.items():
        kept, found = getattr(kernel_pool, name), []
        for tiles in dict.fromkeys([kept[128], *candidates(kind)]):
            setattr(kernel_pool, name, {128: tiles})
            try:
                found.append((tiles, [microseconds(calls[kind], calls=CALLS) for calls in poolings]))
            except Exception:
                print(f"{kind} {tiles} failed\n{traceback.format_exc(limit=-2)}", flush=True)
        setattr(kernel_pool, name, kept)
        found.sort(key=lambda pair: sum(pair[1]))
        for tiles, took in found[:6]:
            print(f"{kind:<10}{took[0]:8.2f} {took[1]:8.2f} us  {tiles}", flush=True)
        rows += [{"kernel": kind, "tiles": tiles._asdict(), "us": took} for tiles, took in found]
    return rows


def compare(landmarks: int) -> dict[str, object]:
    print(f"maps {SHAPE}, {landmarks} landmarks, {CLASSES} classes", flush=True)
    pooling = Pooling(landmarks, "cuda")
    errors, repeatable = pooling.errors(), pooling.repeats()
    for way, found in errors.items():
        print(f"  errors, {way}: " + ", ".join(f"{name} {value:.1e}" for name, value in found.items()))
    print("  bits repeat" if repeatable else "  NOT REPEATABLE", flush=True)
    own = {name: microseconds(call, calls=CALLS) for name, call in pooling.kernels().items()}
    print("  kernels: " + ", ".join(f"{name} {took:.1f}" for name, took in own.items()) + " us", flush=True)
    row: dict[str, object] = {"landmarks": landmarks, "errors": errors, "repeatable": repeatable, "kernels_us": own}
    return row | {"us": times(heads(landmarks, "cuda"), [random_maps("cuda") for _ in range(CALLS)], CLASSES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = search() if options.tiles else [compare(landmarks) for landmarks in LANDMARKS]
    vectors = [] if options.tiles else [compare_vectors(*sizes) for sizes in VECTORS]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"shape": SHAPE, "classes": CLASSES, "rows": rows, "vectors": vectors, **environment()}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
