"""Held-out accuracy and NLL by activation of the coefficients: `python lab/tools/default_coefficients.py [RESULTS]`.

Of the runs that chose rates on held-out images, those that differ in nothing but the activation stand in one row. The
library's default coefficients follow from these rows. A mixture or sum of one prototype is the paper's layer.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

NAMES = ("relu", "softplus", "sigmoid", "softmax")


def main(folder: Path) -> None:
    """Print the rows with two activations or more."""
    rows: dict[tuple[str, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for path in sorted(folder.rglob("choice-*.json")):
        found = json.loads(path.read_text())
        spec, options = found["spec"], dict(found["spec"]["head_options"])
        name = options.pop("coefficients", None)
        if name not in NAMES or options.pop("kernel") != "learned" or found["nll"] is None:
            continue
        head = "kernel" if options.pop("prototypes", 1) == 1 else "prototypes"
        options.pop("aggregate", None)
        rest = {key: spec[key] for key in spec if key not in ("head", "head_options", "learning_rate", "weight_decay")}
        kind = head if spec["head"] in ("kernel", "prototypes") else spec["head"]
        rate = f"{spec['learning_rate']:g}, {spec['weight_decay']:g}"
        key = f"{spec['data']}, {spec['backbone'].rpartition(':')[2]}, {spec['epochs']} epochs, {kind}"
        rows[key, rate, json.dumps([rest, options], sort_keys=True)][name] = found["accuracy"], found["nll"]
    print("| runs | rate, decay | " + " | ".join(NAMES) + " |")
    for (key, rate, _), by_name in sorted(rows.items()):
        if len(by_name) > 1:
            cells = [f"{by_name[name][0]:.2f}, {by_name[name][1]:.3f}" if name in by_name else "" for name in NAMES]
            print(f"| {key} | {rate} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lab/results"))
