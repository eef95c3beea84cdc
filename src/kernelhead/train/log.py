"""Figures of a training as it goes on: JSON lines, and TensorBoard where it is wanted."""

import json
from pathlib import Path
from typing import Any

from kernelhead.results import write_bytes


class MetricsLog:
    """One JSON object an epoch in `path`. Epochs that are trained again after an interruption replace their lines."""

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path.exists():
            try:
                self.records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            except ValueError as error:
                raise ValueError(f"{path} is not lines of JSON ({error}); mend it, or move it away") from error
        self.writer: Any = None
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(
                    "--tensorboard needs tensorboard; 'pip install tensorboard' brings it", name=error.name
                ) from error
            self.writer = SummaryWriter(str(tensorboard))

    def seconds(self) -> float:
        """How long the epochs in the log took."""
        return float(sum(record["seconds"] for record in self.records))

    def start_from(self, epoch: int) -> None:
        """Forget the lines of `epoch` and later ones."""
        self.records = [record for record in self.records if record["epoch"] < epoch]

    def write(self, record: dict[str, Any]) -> None:
        self.start_from(record["epoch"])
        self.records.append({})
        self.add(record)

    def add(self, figures: dict[str, Any]) -> None:
        """Add figures to the last line."""
        self.records[-1] |= figures
        write_bytes(self.path, "".join(json.dumps(each) + "\n" for each in self.records).encode())
        if self.writer is not None:
            for name, value in figures.items():
                if name != "epoch" and value is not None:
                    self.writer.add_scalar(name, value, self.records[-1]["epoch"])
            self.writer.flush()
