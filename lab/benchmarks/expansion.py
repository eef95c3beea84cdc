"""The control for landmarks on CUDA: what its hand-written kernels save in training.

    python lab/benchmarks/expansion.py [--json lab/results/bench/expansion.json]
    python lab/benchmarks/expansion.py --tiles                          tiles and warps of the kernels

Microseconds of forward and backward at batch 128 under autocast to bfloat16, within a CUDA graph: alone, and as one of
8 parallel branches, each with a module of its own; plain, and under torch.compile. The head sees maps (128, 64, 8, 8),
bfloat16 and channels last; its peers are the same by torch's operations, and the linear head on the mean.
"""

import argparse
import copy
import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo
from conv3x3 import error, microseconds, replayed
from torch import Tensor, nn

from kernelhead.files import environment
from kernelhead.finetune.results import FORMAT
from kernelhead_lab.heads import create_lab_head, norm_relu_mean, norm_relu_mean_kernels

DEVICE, BATCH, CLASSES = "cuda", 128, 100
CALLS, BRANCHES = 8, 8  # in a row within a graph, or within each of its branches
KERNELS, TORCH = "kernels", "torch"

Tensors = tuple[Tensor, ...]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = create_lab_head("linear", 64, CLASSES)

    def forward(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.head(maps.mean((2, 3)))
        return logits


def random_maps() -> Tensor:
    maps = torch.randn(BATCH, 64, 8, 8, device=DEVICE, dtype=torch.bfloat16)
    return maps.contiguous(memory_format=torch.channels_last).requires_grad_()


Subject = tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]


def expansion(width: int) -> Subject:
    return lambda: create_lab_head("expansion_variant", 64, CLASSES, width=width), random_maps, (KERNELS, TORCH)


SUBJECTS: dict[str, Subject] = {
    "expansion 512": expansion(512),
    "expansion 2048": expansion(2048),
    "linear": (Linear, random_maps, (TORCH,)),
}


@contextmanager
def choose(way: str) -> Iterator[None]:
    """Take the hand-written kernels, or torch's operations. What is compiled has to be called first in here."""
    kept = norm_relu_mean.runs_kernels
    if way != KERNELS:
        norm_relu_mean.runs_kernels = lambda _: False
    try:
        yield
    finally:
        norm_relu_mean.runs_kernels = kept


class Step:
    """Forward and backward of a module under autocast, for inputs and gradients that stay where they are."""

    def __init__(self, subject: Subject, *, compiled: bool = False) -> None:
        make, inputs, _ = subject
        torch.manual_seed(0)
        self.module = make().to(DEVICE).to(memory_format=torch.channels_last)
        self.inputs = [inputs() for _ in range(CALLS)]
        self.function = torch.compile(self.module, fullgraph=True, dynamic=False) if compiled else self.module
        with torch.no_grad(), self.autocast():
            value = self.module(self.inputs[0])
        self.gradient = torch.randn_like(value)

    def autocast(self) -> torch.autocast:
        return torch.autocast(DEVICE, dtype=torch.bfloat16)

    def __call__(self, i: int = 0) -> Tensors:
        """Value and gradients."""
        x = self.inputs[i]
        with self.autocast():
            value = self.function(x)
        wanted = [*self.module.parameters(), *([x] if x.requires_grad else [])]
        return value.detach(), *torch.autograd.grad(value, wanted, self.gradient)

    def exact(self) -> Tensors:
        """Likewise, in float64."""
        module, x = copy.deepcopy(self.module).double(), self.inputs[0].detach().double()
        x.requires_grad_(self.inputs[0].requires_grad)
        value = module(x)
        wanted = [*module.parameters(), *([x] if x.requires_grad else [])]
        return value.detach(), *torch.autograd.grad(value, wanted, self.gradient.double())

    def errors(self) -> dict[str, float]:
        names = ["value", *(name for name, _ in self.module.named_parameters()), "maps"]
        return {name: error(x, y) for name, x, y in zip(names, self(), self.exact(), strict=False)}

    def repeats(self) -> bool:
        first, busy = self(), torch.cuda.Stream()
        other = torch.randn(2048, 2048, device=DEVICE)
        for _ in range(20):
            with torch.cuda.stream(busy):
                other @ other
            if not all(map(torch.equal, first, self())):
                return False
        return True


def together(steps: list[Step], replays: int = 20) -> float:
    """Microseconds of a call, where each step makes CALLS of them in a branch of a CUDA graph."""
    streams = [torch.cuda.Stream() for _ in steps]

    def fork_and_join(calls: int) -> None:
        main = torch.cuda.current_stream()
        for step, stream in zip(steps, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for i in range(calls):
                    step(i)
        for stream in streams:
            main.wait_stream(stream)

    for _ in range(3):
        fork_and_join(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fork_and_join(CALLS)
    return replayed(graph, replays) / (CALLS * len(steps))


def compare(name: str, subject: Subject) -> Iterator[dict[str, object]]:
    """Yield a row for each way."""
    for way in subject[2]:
        row: dict[str, object] = {"module": name, "way": way}
        try:
            torch._dynamo.reset()  # a way is not to run what another compiled
            with choose(way), torch._dynamo.config.patch(recompile_limit=4 * BRANCHES):
                step = Step(subject)
                row |= {"errors": step.errors(), "repeatable": step.repeats()}
                for compiled in (False, True):
                    steps = [Step(subject, compiled=compiled) for _ in range(BRANCHES)]
                    took = {"alone": microseconds(steps[0], calls=CALLS), "together": together(steps)}
                    row |= {f"{'compiled' if compiled else 'plain'}_us": took}
            print(describe(row), flush=True)
            yield row
        except Exception:
            print(f"{name}, {way} failed\n{traceback.format_exc(limit=-4)}", flush=True)


def describe(row: dict[str, object]) -> str:
    text = f"{row['module']:<28}{row['way']:<16}"
    for kind in ("plain_us", "compiled_us"):
        took = row.get(kind)
        if isinstance(took, dict):
            text += f"{kind[:-3]} {took['alone']:8.1f} us alone {took['together']:8.1f} of {BRANCHES}   "
    errors = row.get("errors")
    if isinstance(errors, dict):
        text += "errors " + ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
        text += "" if row["repeatable"] else "  NOT REPEATABLE"
    return text


def launches() -> dict[str, tuple[object, str, list[object], Callable[[int], object]]]:
    """By kernel: where its table is, candidates for it, and the call to time."""
    kernels = norm_relu_mean_kernels
    rectangles: list[object] = [
        kernels.Tiles(rows, channels, count)
        for rows, channels, count in itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (2, 4, 8))
        if 8 <= rows * channels // (32 * count) <= 64  # so many values a thread
    ]
    narrow: list[object] = [
        kernels.Tiles(rows, channels, count)
        for rows, channels, count in itertools.product((32, 64, 128), (8, 16, 32), (2, 4, 8))
    ]
    norm = nn.BatchNorm1d(2048).to(DEVICE)
    parameters = norm.weight.detach(), norm.bias.detach()
    state = norm.running_mean, norm.running_var, norm.num_batches_tracked
    ys = [torch.randn(BATCH, 64, 2048, device=DEVICE, dtype=torch.bfloat16) for _ in range(CALLS)]
    statistics = [kernels.batch_statistics(y, *state, 0.1, 1e-5) for y in ys]
    passed = [kernels.pool(*pair, *parameters, keep=True)[1] for pair in zip(ys, statistics, strict=True)]
    g = torch.randn(BATCH, 2048, device=DEVICE)
    sums = kernels.parameter_gradients(g, passed[0])
    return {
        "expansion statistics": (
            kernels, "STATISTICS", rectangles, lambda i: kernels.batch_statistics(ys[i], *state, 0.1, 1e-5)
        ),
        "expansion pool": (
            kernels, "POOL", rectangles, lambda i: kernels.pool(ys[i], statistics[i], *parameters, keep=True)
        ),
        "expansion sums": (kernels, "SUMS", narrow, lambda i: kernels.parameter_gradients(g, passed[i])),
        "expansion gradient": (
            kernels, "GRADIENT", rectangles,
            lambda i: kernels.input_gradient(g, ys[i], statistics[i], *parameters, sums),
        ),
    }  # fmt: skip


def search() -> list[dict[str, object]]:
    """Return the microseconds of each kernel and launch, the fastest first."""
    rows: list[dict[str, object]] = []
    for name, (module, table, candidates, call) in launches().items():
        kept, found = getattr(module, table), []
        for how in [kept, *candidates]:
            setattr(module, table, how)
            try:
                found.append((microseconds(call, calls=CALLS), how))
            except Exception:
                print(f"{name} {how} failed\n{traceback.format_exc(limit=-2)}", flush=True)
        setattr(module, table, kept)
        for took, how in sorted(found, key=lambda pair: pair[0])[:6]:
            print(f"{name:<24}{took:8.2f} us  {how}{'  (now)' if how == kept else ''}", flush=True)
        rows += [{"kernel": name, "how": str(how), "us": took} for took, how in found]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="try other tiles and warps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, object]] = []
    if options.tiles:
        rows = search()
    else:
        for name, subject in SUBJECTS.items():
            rows += compare(name, subject)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"format": FORMAT, "batch": BATCH, "branches": BRANCHES, "rows": rows, **environment()}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
