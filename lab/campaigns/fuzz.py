"""Give hostile files to the commands that read them: `python lab/campaigns/fuzz.py OUT.json [CASES] [MINUTES]`.

The files and what may be answered are those of `tests/safety/hostile.py`. Every case runs in a process of its own,
whose resident memory stays below 1 GB over the size of the file and which answers within 20 seconds. Exit status 1
where a case does not.
"""

import collections
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "safety"))

import hostile  # noqa: E402

from kernelhead.files import environment, write_bytes  # noqa: E402

MEMORY = 10**9  # bytes over the size of the file
ONNX_SHARE = 50  # one case in so many is an export, which takes seconds


def case(corpus: hostile.Corpus, kind: str, seed: int) -> tuple[str | None, int, bool]:
    """Return what is wrong with an answer, the resident memory of its process, and whether it was a refusal."""
    path = corpus.change(kind, seed)
    size = path.stat().st_size if path.is_file() else 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(10 * hostile.MAX_SECONDS)  # what waits for ever takes none of its seconds
        try:
            told: list[Any] = [corpus.answer(kind, path), corpus.refused is not None]
        except BaseException as error:
            told = [f"raises {error!r}"[:500], False]
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status, used = os.wait4(child, 0)
    memory = 1024 * used.ru_maxrss
    if status:
        return f"ended by {status}", memory, False
    wrong, refused = json.loads(said)
    if wrong is None and memory > MEMORY + size:
        wrong = f"takes {memory / 1e9:.2f} GB"
    return wrong, memory, refused


def main(out: Path, cases: int, minutes: float) -> None:
    """Go through the cases, and write the totals."""
    torch.set_num_threads(1)
    began, done, refused, most = time.monotonic(), collections.Counter[str](), collections.Counter[str](), 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        corpus = hostile.Corpus(Path(made))
        for kind in hostile.KINDS:  # what is imported once
            corpus.answer(kind, corpus.good_copy(kind))
        base = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(cases):
            kind = "onnx" if seed % ONNX_SHARE == 0 else hostile.QUICK[seed % len(hostile.QUICK)]
            problem, memory, was_refused = case(corpus, kind, seed)
            done[kind] += 1
            refused[kind] += was_refused
            most = max(most, memory)
            if problem is not None:
                wrong.append(f"{kind} {seed}: {problem}")
                print(wrong[-1], flush=True)
            if seed % 100 == 99 or seed + 1 == cases:
                totals = {"cases": sum(done.values()), "by format": done, "refused": refused, "wrong": wrong}
                totals |= {
                    "largest resident memory, GB": round(most / 1e9, 2),
                    "before a case, GB": round(base / 1e9, 2),
                }
                totals |= {"minutes": round((time.monotonic() - began) / 60, 1), **environment()}
                write_bytes(out, (json.dumps(totals, indent=1) + "\n").encode())
                if time.monotonic() - began > 60 * minutes:
                    break
    print(json.dumps(totals))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    given = [float(each) for each in sys.argv[2:4]] + [10_000, 240][len(sys.argv) - 2 :]
    main(Path(sys.argv[1]), int(given[0]), given[1])
