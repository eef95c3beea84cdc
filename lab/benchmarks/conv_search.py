"""The launch tables of the convolutions of CIFAR ResNets, chosen for throughput: 8 networks at once.

    python lab/benchmarks/conv_search.py [--seconds 90] [--branches 8] [--only KIND ..] [--json FILE]

Each candidate is timed as it is used: a CUDA graph with parallel branches, each with inputs and outputs of its own at
batch 128. Times are microseconds per call and branch, the median of the replays. Kernels are compiled on all cores
first. It prints the tables of `kernelhead_lab.networks.ops.conv3x3` and `conv_norm` with the best candidates, beside
the times of the present ones. A candidate that a rounding error does not explain is refused.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from conv3x3 import BATCH, SHAPES, Key, error, replayed
from torch import Tensor

from kernelhead.files import environment
from kernelhead.finetune.results import FORMAT
from kernelhead_lab.networks.ops import conv3x3, conv_norm

CALLS = 4  # of a branch
TABLES: dict[str, dict[Any, Any]] = {
    "forward": conv3x3.FORWARD,
    "dgrad": conv3x3.DGRAD,
    "dgrad_sums": conv3x3.DGRAD_SUMS,
    "wgrad": conv3x3.WGRAD,
    "normalize": conv_norm.NORMALIZE,
    "sums": conv_norm.SUMS,
    "backward": conv_norm.BACKWARD,
}
PASSES = ("normalize", "sums", "backward")  # their tables are by channels alone
Case = tuple[str, Any]


class Data:
    """What the calls of all branches read, for one shape of a convolution."""

    def __init__(self, key: Key, branches: int, calls: int) -> None:
        (channels, out, self.stride), self.size = key, SHAPES[key]
        copies = range(branches * calls)
        self.x = [self._new(channels, self.size) for _ in copies]
        self.dy = [self._new(out, self.size // self.stride) for _ in copies]
        self.layers = [self._layer(channels, out, self.stride) for _ in range(branches)]
        self.statistics = torch.rand(2, out, device="cuda")
        self.calls = calls

    @staticmethod
    def _new(channels: int, size: int) -> Tensor:
        values = torch.randn(BATCH, channels, size, size, device="cuda", dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def _layer(channels: int, out: int, stride: int) -> conv_norm.Layer:
        weight = torch.randn(out, channels, 3, 3, device="cuda") / math.sqrt(9 * channels)
        ones, zeros = torch.ones(out, device="cuda"), torch.zeros(out, device="cuda")
        state = zeros.clone(), ones.clone(), torch.zeros((), device="cuda", dtype=torch.int64)
        tickets = torch.zeros(1, device="cuda", dtype=torch.int32)
        weight = weight.contiguous(memory_format=torch.channels_last)
        return conv_norm.Layer(weight, ones, zeros, *state, tickets, momentum=0.1, eps=1e-5, stride=stride)

    def call(self, kind: str, i: int = 0) -> Tensor:
        """The i-th call, of the branch i // calls."""
        x, dy, layer = self.x[i], self.dy[i], self.layers[i // self.calls]
        if kind == "forward":
            return conv_norm.convolve(x, layer)[0]
        if kind == "dgrad":
            return conv3x3.dgrad(dy, layer.weight, self.stride, self.size, self.size, x.dtype)
        if kind == "dgrad_sums":  # and the pass that follows
            between = x, self.statistics, layer.scale, layer.bias
            return conv_norm.denormalize_between(dy, layer.weight, *between)[0]
        if kind == "wgrad":
            return conv3x3.wgrad(x, dy, layer.weight, self.stride)
        if kind == "normalize":
            return conv_norm.normalized(dy, self.statistics, layer.scale, layer.bias, rectified=True)
        return conv_norm.denormalize(dy, None, x, self.statistics, layer.scale, layer.bias, True)[0]


def shape_of(kind: str, key: Any) -> Key:
    return (key, key, 1) if kind in PASSES else key


def cases() -> list[Case]:
    return [(kind, key) for kind, table in TABLES.items() for key in table]


def candidates(kind: str, key: Any) -> Iterator[Any]:
    """Launches worth trying, the present one first."""
    yield TABLES[kind][key]
    if kind in PASSES:
        for elements, warps in ((2048, 4), (4096, 4), (2048, 8), (4096, 8), (8192, 8)):
            if kind == "sums":
                yield from (conv_norm.Sums(elements, parts, warps) for parts in (32, 64, 128, 256))
            else:
                pixels = BATCH * SHAPES[key, key, 1] ** 2
                yield from (conv_norm.Pass(elements, n, warps) for n in numbers(pixels, elements // key))
    elif kind == "wgrad":
        yield from wgrad_candidates(key)
    else:
        yield from map_candidates(kind, key)


def numbers(items: int, block: int) -> list[int]:
    """Of blocks for each program, as far as the size of the batch allows."""
    return sorted({conv3x3.blocks_each(items, block, most) for most in (1, 2, 4, 8)})


def wgrad_candidates(key: Key) -> Iterator[conv3x3.Parts]:
    channels, out, stride = key
    side = SHAPES[key]
    for group, rows, (block, warps) in itertools.product((1, 2), (1, 2, 4), ((64, 4), (64, 8), (128, 4))):
        if rows % stride or (group == 1 and out == 16):
            continue
        reach = stride * (group - 1) + 3
        strips = BATCH * side // stride // group // block * (side // rows)
        for columns, stages in itertools.product(sorted({1, reach} if channels == 64 else {reach}), (1, 2)):
            wide, gradients = _power(columns * channels), group * out
            held = stages * block * 2 * (wide * rows + gradients * (rows // stride + 3 - stride))  # bytes of strips
            if 3 * wide * gradients > 6144 * warps or held > 120_000:
                continue
            for parts in (16, 32, 64, 128, 256):
                if parts <= strips and parts * group * 9 * channels * out <= 1_500_000:  # the second sum stays small
                    yield conv3x3.Parts(group, columns, rows, block, parts, warps, stages)


def map_candidates(kind: str, key: Key) -> Iterator[conv3x3.Tiles]:
    channels, out, stride = key
    source, target = (channels, out) if kind == "forward" else (out, channels)
    side = SHAPES[key] // stride if kind == "forward" else SHAPES[key]
    for group, rows, (block, warps) in itertools.product((1, 2, 4), (1, 2, 4), ((64, 4), (128, 8))):
        reach = group // 2 + 1 if kind != "forward" and stride == 2 else stride * (group - 1) + 3
        if not 32 <= group * target <= 64 or (group == 4 and channels > 3):
            continue
        if kind != "forward" and (group % stride or rows % stride):
            continue
        for columns in sorted({1 if group == 1 or source == 64 else 2, triton.next_power_of_2(reach)}):
            steps, wide = triton.cdiv(reach, columns), _power(columns * source)
            if wide > 128 or (columns * source < 32 and columns < reach):
                continue
            for ahead, stages in sorted({(0, 1), (steps - 1, 1), (steps if rows == 4 else 2 * steps, 1), (0, 2)}):
                rows_read = 2 + (rows * stride if kind == "forward" else rows // stride)
                loaded = 1 + ahead if stages == 1 else stages * steps * rows_read
                held = 2 * wide * (3 * steps * group * target + block * loaded)  # bytes of the weight, and of pixels
                values = block * group * target * min(rows, 3) + block * wide * ahead // 2  # in registers
                if held > 125_000 or values > 160 * 32 * warps or (stages == 2 and (rows == 4 or block == 128)):
                    continue
                # For the statistics the compiler takes more registers than it needs: fewer let another program in.
                fewer = 128 if warps == 8 or group * target == 32 else 168
                limits = (None, fewer) if kind != "dgrad" and stages == 1 else (None,)
                strips = BATCH * side // group // block * (side // rows)
                for registers, blocks in itertools.product(limits, numbers(strips, 1)):
                    yield conv3x3.Tiles(group, columns, rows, ahead, block, blocks, warps, stages, registers)


def _power(needed: int) -> int:
    return max(16, triton.next_power_of_2(needed))


def kernel_of(how: Any) -> Any:
    """The same for launches of the same kernel: how many programs there are is no matter to it."""
    return how._replace(parts=0) if hasattr(how, "parts") else how._replace(blocks=0)


def compile_all(kind: str, key: Any, hows: list[Any]) -> None:
    """In a process of its own: leaves the compiled kernels in Triton's cache on the disk."""
    data = Data(shape_of(kind, key), 1, 1)
    for how in hows:
        TABLES[kind][key] = how
        data.call(kind)


def compiled(work: dict[Case, list[Any]], until: float) -> dict[Case, list[Any]]:
    """Those of the candidates whose kernels could be compiled in time."""
    jobs: list[tuple[Case, list[Any]]] = []
    for case, hows in work.items():
        kernels: dict[Any, list[Any]] = {}
        for how in hows:
            kernels.setdefault(kernel_of(how), []).append(how)
        jobs += [(case, same) for same in kernels.values()]
    random.Random(0).shuffle(jobs)
    print(f"{sum(map(len, work.values()))} launches of {len(jobs)} kernels", flush=True)
    made: dict[Case, list[Any]] = {case: [] for case in work}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, multiprocessing.cpu_count()), mp_context=context) as pool:
        futures = [pool.submit(compile_all, *case, hows) for case, hows in jobs]
        for (case, hows), future in zip(jobs, futures, strict=True):
            try:
                future.result(timeout=max(0.0, until - time.perf_counter()))
                made[case] += hows
            except TimeoutError:
                future.cancel()
            except Exception as failure:
                print(f"  {case} {hows[0]}: {type(failure).__name__} {str(failure)[:80]}", flush=True)
    return made


def throughput(call: Callable[[int], object], branches: int, replays: int) -> float:
    """Microseconds of a call, `branches` x CALLS of them in a graph."""
    main, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(branches)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(main):
        graph.capture_begin()
        try:
            for branch, stream in enumerate(streams):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    for i in range(branch * CALLS, (branch + 1) * CALLS):
                        call(i)
            for stream in streams:
                main.wait_stream(stream)
        finally:
            graph.capture_end()
    return replayed(graph, replays) / (branches * CALLS)


class Search:
    """Times by case and launch."""

    def __init__(self, branches: int) -> None:
        self.branches = branches
        self.data = {key: Data(key, branches, CALLS) for key in SHAPES}
        self.expected = {(kind, key): self.data[shape_of(kind, key)].call(kind).clone() for kind, key in cases()}
        self.times: dict[Case, dict[Any, float]] = {case: {} for case in cases()}

    def measure(self, case: Case, how: Any, replays: int) -> None:
        kind, key = case
        data, kept = self.data[shape_of(kind, key)], TABLES[kind][key]
        TABLES[kind][key] = how
        try:
            if not error(data.call(kind), self.expected[case].double()) < 1e-2:
                raise ValueError("wrong result")
            self.times[case][how] = throughput(lambda i: data.call(kind, i), self.branches, replays)
        except Exception as failure:
            print(f"  {case} {how}: {type(failure).__name__} {str(failure)[:80]}", flush=True)
        TABLES[kind][key] = kept

    def ranked(self, case: Case) -> list[Any]:
        return sorted(self.times[case], key=self.times[case].__getitem__)


def run(seconds: float, branches: int, only: list[str]) -> list[dict[str, Any]]:
    started = time.perf_counter()
    work = {case: list(dict.fromkeys(candidates(*case))) for case in cases() if case[0] in only}
    made = compiled(work, started + 0.55 * seconds)
    print(f"{sum(map(len, made.values()))} ready after {time.perf_counter() - started:.0f} s", flush=True)
    found = Search(branches)
    order = [(case, how) for case, hows in made.items() for how in hows]
    random.Random(0).shuffle(order)
    for count, (case, how) in enumerate(order):
        if time.perf_counter() - started > 0.95 * seconds:
            print(f"the time is up after {count} of {len(order)}", flush=True)
            break
        found.measure(case, how, replays=5)
        if count % 64 == 63:
            torch.cuda.empty_cache()  # what the graphs held
    for case in made:  # again, and longer: the best of many measured once are the luckiest
        for how in dict.fromkeys([*found.ranked(case)[:3], TABLES[case[0]][case[1]]]):
            found.measure(case, how, replays=20)
    print(f"took {time.perf_counter() - started:.0f} s", flush=True)
    return [row(found, case) for case in made if found.times[case]]


def row(found: Search, case: Case) -> dict[str, Any]:
    (kind, key), times, ranked = case, found.times[case], found.ranked(case)
    before = TABLES[kind][key]
    best = {"best": ranked[0], "us": times[ranked[0]], "before": before, "us_before": times.get(before)}
    next_best = [[how, times[how]] for how in ranked[1:5]]
    return {"kind": kind, "key": key, **best, "tried": len(ranked), "next_best": next_best}


def show(rows: list[dict[str, Any]]) -> None:
    for kind in TABLES:
        print(f"{kind.upper()} = {{")
        for row in (row for row in rows if row["kind"] == kind):
            launch = f"{type(row['best']).__name__}({', '.join(map(str, row['best']))})"
            was = row["us_before"] or math.nan
            print(f"    {row['key']}: {launch},  # {row['us']:.2f} us of {row['tried']}; was {was:.2f}")
            print("    #   " + "; ".join(f"{took:.2f} {tuple(how)}" for how, took in row["next_best"]))
        print("}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="KIND")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    with torch.no_grad():
        rows = run(options.seconds, options.branches, options.only)
    show(rows)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"format": FORMAT, "environment": environment(), "branches": options.branches, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
