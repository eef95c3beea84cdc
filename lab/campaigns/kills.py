"""Kill commands at random moments and start them again: `python lab/campaigns/kills.py OUT.json [KILLS] [MINUTES]`.

The harness is `tests/safety/kills.py`, which says what has to hold. Kills are shared out over its kinds, in rounds, and
pairs of trainings are started into one folder. The totals so far are written again and again. Exit status 1 where
anything was wrong.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "safety"))

from hostile import NETWORK  # noqa: E402
from kills import KINDS, Harness  # noqa: E402

from kernelhead.files import environment, write_bytes  # noqa: E402

ROUND = {"train": 20, "predict": 20, "data": 40, "compare": 20, "save": 40, "export": 10, "reproduce": 6}  # kills
PAIRS = 50


def pair(folder: Path, images: Path, number: int) -> str | None:
    """Start two trainings into one folder, 0.1 s apart, and return what is wrong."""
    command = [
        sys.executable, "-m", "kernelhead", "train", "--data", str(images), "--backbone", "hostile_networks:small",
        "--head-option", "landmarks=6", "--epochs", "2", "--batch-size", "8", "--no-report", "--device", "cpu",
        "--out", str(folder / str(number)),
    ]  # fmt: skip
    both = []
    for wait in (0.1, 0.0):
        both.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder))
        time.sleep(wait)
    said = [each.communicate()[1] for each in both]
    codes = [each.returncode for each in both]
    loser = said[codes.index(1)] if sorted(codes) == [0, 1] else None
    if loser is None or loser.count("\n") != 1 or not ("writes into" in loser or "already holds a run" in loser):
        return f"they leave with {codes} and say {said}"
    lines = (folder / str(number) / "metrics.jsonl").read_text().splitlines()
    return None if [json.loads(line)["epoch"] for line in lines] == [1, 2] else "an epoch is missing"


def main(out: Path, wanted: int, minutes: float) -> None:
    """Go through the rounds, and write the totals after each kind."""
    began, kills, pairs = time.monotonic(), dict.fromkeys(KINDS, 0), 0
    trials, wrong = dict.fromkeys(KINDS, 0), list[str]()
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "hostile_networks.py").write_text(NETWORK)
        Harness(folder / "harness")  # for its images
        for number, kind in ((number, kind) for number in itertools.count() for kind in KINDS):
            if sum(kills.values()) >= wanted or time.monotonic() - began > 60 * minutes:
                break
            command = [sys.executable, str(ROOT / "tests/safety/kills.py"), kind, str(ROUND[kind]), str(number)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables)
            found: dict[str, Any] = json.loads(done.stdout)[kind] if not done.returncode else {}
            kills[kind] += found.get("kills", 0)
            trials[kind] += found.get("trials", 0)
            wrong += [f"{kind} {number}: {each}" for each in found.get("wrong", ["the harness failed"])]
            if pairs < PAIRS:
                problem = pair(folder, folder / "harness" / "images", pairs)
                pairs += 1
                wrong += [] if problem is None else [f"pair {pairs}: {problem}"]
            totals = {"kills": sum(kills.values()), "by command": kills, "trials": trials, "pairs of trainings": pairs}
            totals |= {"wrong": wrong, "minutes": round((time.monotonic() - began) / 60, 1), **environment()}
            write_bytes(out, (json.dumps(totals, indent=1) + "\n").encode())
            print(json.dumps(totals), flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    given = [float(each) for each in sys.argv[2:4]] + [1000, 240][len(sys.argv) - 2 :]
    main(Path(sys.argv[1]), int(given[0]), given[1])
