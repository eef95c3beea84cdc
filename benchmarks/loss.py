"""The fused loss against its peers: time and memory of a forward and backward pass, from features to gradients.

    python benchmarks/loss.py [--json results/bench/loss.json]         on CUDA: the sizes of the documentation
    python benchmarks/loss.py --cpu [--json results/bench/loss_cpu.json]
    python benchmarks/loss.py --check                                  errors against float64, on this device
    python benchmarks/loss.py --crossover                              from how many logits on it pays
    python benchmarks/loss.py --tiles                                  rows and warps of the passes' kernels

Peers, all in one run and interleaved, so that a slow moment of the machine hits them alike:
- linear, compiled: F.cross_entropy(F.linear(x, w).float(), y) under torch.compile, the yardstick;
- linear: the same, eager;
- naive, compiled: the kernel head as powers in autograd, under torch.compile;
- plain head: the head's logits and F.cross_entropy, the backend "eager";
- cut-cross-entropy and liger: a linear head, fused, where these packages are installed.

Ours are the backend "triton" in its two modes, and "auto".

The floor is the time of the three matrix products that no version can do without, at the rate of a large product
measured in the same run. Memory is the peak above the inputs, gradients included, in GB (1e9 bytes).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import kernel_cross_entropy
from kernelhead.files import environment

SIZES = [(8192, 2304, 131072), (4096, 512, 100000), (1024, 64, 100), (4096, 256, 1000000)]  # N, D, C
CPU_SIZE = (2048, 256, 50000)
LARGEST_LOGITS = 2**32  # bytes of bfloat16 logits beyond which peers that keep several such tensors are left out
FOREIGN = ("cut-cross-entropy", "liger")  # peers of other packages, which may have reasons of their own to fail
DEGREE = 7

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> Inputs:
    samples, width, classes = size
    torch.manual_seed(0)
    features = torch.randn(samples, width, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(classes, width, device=device, dtype=dtype).mul_(width**-0.5).requires_grad_()
    alpha = torch.ones(DEGREE + 3, device=device, requires_grad=True)
    return features, weight, alpha, torch.randint(classes, (samples,), device=device)


def linear(x: Tensor, w: Tensor, alpha: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def naive(x: Tensor, w: Tensor, alpha: Tensor, y: Tensor) -> Tensor:
    t = (F.normalize(x) @ F.normalize(w).t()).float()
    value = alpha[-1] * t + alpha[-2]
    for coefficient in alpha[2:-2].flip(0):
        value = value * t + coefficient
    return F.cross_entropy(value, y)


def ours(backend: str, mode: str = "auto") -> Callable[..., Tensor]:
    def loss(x: Tensor, w: Tensor, alpha: Tensor, y: Tensor) -> Tensor:
        return kernel_cross_entropy(x, w, alpha, y, backend=backend, mode=mode)

    return loss


def peers(size: tuple[int, int, int]) -> dict[str, Callable[..., Tensor]]:
    found = {"linear, compiled": torch.compile(linear, dynamic=False)}
    if size[0] * size[2] * 2 <= LARGEST_LOGITS:
        found |= {"linear": linear, "naive, compiled": torch.compile(naive, dynamic=False), "plain head": ours("eager")}
    try:
        from cut_cross_entropy import linear_cross_entropy

        found[FOREIGN[0]] = lambda x, w, alpha, y: linear_cross_entropy(x, w, y)
    except ImportError:
        pass
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        found[FOREIGN[1]] = lambda x, w, alpha, y: fused(w, x, y)
    except ImportError:
        pass
    return found | {"speed": ours("triton", "speed"), "memory": ours("triton", "memory"), "auto": ours("auto")}


def step(loss: Callable[..., Tensor], inputs: Inputs) -> Callable[[], None]:
    def run() -> None:
        for tensor in inputs[:3]:
            tensor.grad = None
        loss(*inputs).backward()

    return run


def milliseconds(steps: dict[str, Callable[[], None]], repeats: int, queued: int = 3) -> dict[str, float]:
    """Median time of a step of each, one peer after the other in turn, after a warm-up.

    `queued` steps follow each other without waiting, as in training: the device need not wait for the host unless the
    host is slower. With 1, the queue is empty before each step.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repeats + 2):
        for name, run in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if queued > 1:
                run()
            start.record()
            for _ in range(queued):
                run()
            end.record()
            end.synchronize()
            if round_ >= 2:
                times[name].append(start.elapsed_time(end) / queued)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(run: Callable[[], None], inputs: Inputs) -> int:
    """Most memory that a step holds above its inputs."""
    for tensor in inputs[:3]:
        tensor.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def product_rate() -> float:
    """Operations a second of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (milliseconds({"product": lambda: a @ b}, 20)["product"] * 1e-3)


def measure(repeats: int) -> list[dict[str, object]]:
    rate = product_rate()
    print(f"a large bfloat16 product: {rate / 1e12:.0f} TFLOP/s")
    rows = []
    for size in SIZES:
        inputs = make_inputs(size, torch.bfloat16, "cuda")
        floor = 1e3 * 3 * 2 * size[0] * size[1] * size[2] / rate
        steps = {name: step(loss, inputs) for name, loss in peers(size).items()}
        memory = {}
        for name in list(steps):
            try:
                steps[name]()  # compiles
                memory[name] = peak_bytes(steps[name], inputs)
            except torch.OutOfMemoryError:
                print(f"  {name} runs out of memory")
                del steps[name]
            except Exception as error:
                if name not in FOREIGN:
                    raise
                print(f"  {name} does not run here: {error}")
                del steps[name]
        rounds = repeats if size[2] > 1000 else 5 * repeats
        times, alone = milliseconds(steps, rounds), milliseconds(steps, rounds, queued=1)
        print(f"\nN, D, C = {size}: the floor is {floor:.2f} ms")
        for name in steps:
            ratio = times[name] / times["linear, compiled"]
            print(f"  {name:<20}{times[name]:9.3f} ms {ratio:6.2f} x {memory[name] / 1e9:8.3f} GB", end="")
            print(f", alone {alone[name]:9.3f} ms {alone[name] / alone['linear, compiled']:6.2f} x", flush=True)
        row = {"size": size, "floor_ms": floor, "milliseconds": times, "milliseconds_alone": alone}
        rows.append(row | {"peak_bytes": memory})
        del inputs, steps
    return rows


def reference(inputs: Inputs, prototypes: int, smoothing: float) -> tuple[list[Tensor], list[float]]:
    """Loss of each sample and gradients of their mean in float64, by plain operations; and their sizes.

    dL/dalpha is a sum of terms of both signs, which may cancel: its size is the sum of theirs.
    """
    x, w, alpha = (tensor.detach().double().requires_grad_() for tensor in inputs[:3])
    t = F.normalize(x) @ F.normalize(w).t()
    k = sum(coefficient * t**m for m, coefficient in enumerate(alpha[2:]))
    scores = torch.logsumexp(k.view(len(x), -1, prototypes), 2)
    # No sample has its own class on top: of one that is sure of it no gradient is left but rounding.
    inputs[3].add_(scores.argmax(1) == inputs[3]).remainder_(scores.shape[1])
    losses = F.cross_entropy(scores, inputs[3], label_smoothing=smoothing, reduction="none")
    *gradients, of_k = torch.autograd.grad(losses.mean(), (x, w, alpha, k))
    found = [losses.detach(), *gradients]
    sizes = [tensor.norm().item() for tensor in found]
    sizes[3] = sum((of_k * t.detach() ** m).abs().sum().item() ** 2 for m in range(len(alpha) - 2)) ** 0.5
    return found, sizes


def check(device: str) -> list[dict[str, object]]:
    """The largest relative error of loss and gradients over shapes, degrees, prototypes and coefficients."""
    shapes = [(1, 7, 3), (257, 131, 1009), (129, 64, 65537)]
    kinds = [("eager", "speed"), ("chunked", "memory")]
    kinds += [("triton", "speed"), ("triton", "memory")] if device == "cuda" else []
    rows = []
    for dtype, (backend, mode) in itertools.product((torch.float16, torch.bfloat16, torch.float32), kinds):
        worst = dict.fromkeys(("loss", "features", "weight", "alpha"), 0.0)
        repeatable = True
        cases = itertools.product(shapes, (1, 7, 20), (1, 4), (0.0, 0.1), (1.0, 50.0, 500.0))
        for (samples, width, classes), degree, prototypes, smoothing, total in cases:
            torch.manual_seed(samples)
            features = torch.randn(samples, width, device=device).to(dtype).requires_grad_()
            weight = torch.randn(classes * prototypes, width, device=device).to(dtype).requires_grad_()
            alpha = torch.rand(degree + 3, device=device)
            alpha[:2] = 0
            alpha = (alpha / alpha.sum() * total).requires_grad_()
            inputs = features, weight, alpha, torch.randint(classes, (samples,), device=device)
            exact, sizes = reference(inputs, prototypes, smoothing)
            scale = 1 / max(gradient.abs().max().item() for gradient in exact[1:3])  # lest float16 underflows
            options = {"prototypes": prototypes, "label_smoothing": smoothing, "backend": backend, "mode": mode}
            found = []
            for _ in range(2):
                losses = kernel_cross_entropy(*inputs, **options, reduction="none")
                gradients = torch.autograd.grad(scale * losses.mean(), inputs[:3])
                found.append([losses.detach(), *(gradient.double() / scale for gradient in gradients)])
            repeatable &= all(map(torch.equal, *found))
            for name, ours_, right, size in zip(worst, found[0], exact, sizes, strict=True):
                error = (ours_.double() - right).norm().item() / size
                worst[name] = max(worst[name], error if error == error else float("inf"))
        rows.append({"backend": backend, "mode": mode, "dtype": str(dtype)[6:], "repeatable": repeatable, **worst})
        print({key: f"{v:.1e}" if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
    return rows


def crossover(device: str) -> list[dict[str, object]]:
    """The fused backend over the plain head, by samples and classes."""
    rows = []
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    backend = "triton" if device == "cuda" else "chunked"
    clock = milliseconds if device == "cuda" else cpu_milliseconds
    samples = (128, 1024, 8192) if device == "cuda" else (128, 1024)
    classes = (100, 1000, 3000, 10000, 30000, 100000) if device == "cuda" else (100, 300, 1000, 3000, 10000)
    for n, width, c in itertools.product(samples, (64, 512), classes):
        if n * c > 2**30:
            continue
        inputs = make_inputs((n, width, c), dtype, device)
        times = clock({name: step(ours(name), inputs) for name in ("eager", backend)}, 10)
        ratio = times[backend] / times["eager"]
        memory = {}
        if device == "cuda":
            memory = {name: peak_bytes(step(ours(name), inputs), inputs) for name in times}
        print(f"N {n:6} D {width:4} C {c:7}: {n * c / 2**20:8.2f} Mi logits, {ratio:6.2f} x", flush=True)
        rows.append({"size": (n, width, c), "milliseconds": times, "peak_bytes": memory})
    return rows


def tile_sizes() -> list[dict[str, object]]:
    """The two passes by rows of a tile and warps."""
    from kernelhead.fused.cross_entropy import triton as passes

    rows = []
    for size, launch in itertools.product(SIZES[:2], ((8, 4), (16, 4), (32, 4), (16, 8), (32, 8), (64, 8), (64, 16))):
        inputs = make_inputs(size, torch.bfloat16, "cuda")
        passes.TILE = launch
        run = step(ours("triton", "speed"), inputs)
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                run()
            torch.cuda.synchronize()
        found = {event.key: event.self_device_time_total / 5e3 for event in profile.key_averages()}
        times = {name: found[name] for name in ("observe_kernel", "slopes_kernel")}
        print(size, launch, times, flush=True)
        rows.append({"size": size, "rows": launch[0], "warps": launch[1], "milliseconds": times})
    return rows


def cpu_milliseconds(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repeats + 1):
        for name, run in steps.items():
            started = time.perf_counter()
            run()
            if round_:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def cpu_peak(backend: str) -> int:
    """Bytes above the inputs at the peak of a step, in a process of its own."""
    command = [sys.executable, __file__, "--peak", backend]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(backend: str) -> None:
    inputs = make_inputs(CPU_SIZE, torch.float32, "cpu")
    small = make_inputs((64, 8, 100), torch.float32, "cpu")
    step(ours(backend), small)()  # what torch loads on first use is no matter of the loss
    before = memory_of_process("VmRSS")
    step(ours(backend), inputs)()
    print(memory_of_process("VmHWM") - before)


def memory_of_process(what: str) -> int:
    """Bytes that this process has now (VmRSS) or has had at most (VmHWM), on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def measure_cpu(repeats: int) -> list[dict[str, object]]:
    inputs = make_inputs(CPU_SIZE, torch.float32, "cpu")
    losses = {"linear": linear, "eager": ours("eager"), "chunked": ours("chunked")}
    times = cpu_milliseconds({name: step(loss, inputs) for name, loss in losses.items()}, repeats)
    memory = {name: cpu_peak(name) for name in ("eager", "chunked")}
    print(f"N, D, C = {CPU_SIZE}, float32, {torch.get_num_threads()} threads")
    for name in losses:
        ratio = times[name] / times["eager"]
        peak = f"{memory[name] / 1e9:8.3f} GB {memory[name] / memory['eager']:6.3f} x" if name in memory else ""
        print(f"  {name:<10}{times[name]:9.0f} ms {ratio:6.2f} x {peak}")
    return [{"size": CPU_SIZE, "milliseconds": times, "peak_bytes": memory}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--cpu", "--check", "--crossover", "--tiles"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    if options.peak:
        print_peak(options.peak)
        return
    if options.check:
        rows = check(device)
    elif options.crossover:
        rows = crossover(device)
    elif options.tiles:
        rows = tile_sizes()
    elif device == "cpu":
        rows = measure_cpu(options.repeats)
    else:
        rows = measure(options.repeats)
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
