"""Result files: one small JSON per run, written whole or not at all."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from kernelhead.files import environment, plain_file, write_bytes
from kernelhead.finetune.spec import TrainResult, TrainSpec, fits

FORMAT = 2
MAX_RESULT_BYTES = 2**26


class BrokenResultError(ValueError):
    """A result file that cannot be read."""


def save_result(path: Path, result: TrainResult) -> None:
    """Write one run's result, with the environment it was made in unless `extra` has one."""
    fields = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    fields |= {"spec": result.spec.recipe(), "extra": {"environment": environment(), **result.extra}}
    write_bytes(path, (json.dumps({"format": FORMAT, **fields}, indent=1, allow_nan=False) + "\n").encode())


def load_result(path: Path, spec_type: type[TrainSpec] = TrainSpec) -> TrainResult:
    """Read one result file, whose spec is of `spec_type`. Its environment is in `extra`."""
    try:
        stored = json.loads(plain_file(path, MAX_RESULT_BYTES).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenResultError(f"{path} is not a readable result file ({error}); delete it and run again") from error
    found = stored.get("format") if isinstance(stored, dict) else None
    if found != FORMAT:
        raise BrokenResultError(f"{path} has format {found}, and {FORMAT} is read here; delete it and run again")
    kinds: dict[str, Any] = {each.name: each.type for each in dataclasses.fields(TrainResult)} | {"spec": dict}
    wrong = [name for name, kind in kinds.items() if not fits(stored.get(name), kind)]
    if wrong:
        raise BrokenResultError(f"{path} has no usable {', '.join(wrong)}; delete it and run again")
    try:
        spec = spec_type.from_dict(stored["spec"])
    except (TypeError, ValueError) as error:
        raise BrokenResultError(f"{path} has no usable spec ({error}); delete it and run again") from error
    return TrainResult(**{name: stored.get(name) for name in kinds} | {"spec": spec})
