"""Images on their way to a network: read again for every batch, and kept decoded on the device.

    python benchmarks/streamed.py [--data pets] [--batches 40] [--json results/bench/streamed.json]

Images per second of augmented batches of 64 at 224 pixels from the training images of a data set. Nothing is trained.
Reading again is the peer. Decoding takes some seconds at the start, which are told.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from kernelhead.files import environment
from kernelhead.finetune import data as pipeline
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.images import list_images
from kernelhead.finetune.spec import TrainSpec

BATCH, WARM_UP = 64, 8
INPUT = Input(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def images_per_second(data: pipeline.Data, batches: int) -> float:
    order = torch.randperm(len(data.train)).tolist()
    keys = [[(0, 0, index) for index in order[start : start + BATCH]] for start in range(0, len(order), BATCH)]
    counted, began = 0, 0.0
    for step, (batch, _) in enumerate(pipeline.batches(data.train, keys[: batches + WARM_UP], data)):
        batch.flatten()[0].item()  # waits until the batch is there
        if step == WARM_UP:
            began = time.perf_counter()
        counted += len(batch) if step > WARM_UP else 0
    return counted / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pets")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec, listing = TrainSpec(options.data, augment="imagenet"), list_images(options.data)
    rates, seconds = {}, {}
    for name, share in (("streamed", 0.0), ("kept", 1.0)):
        pipeline.MEMORY_SHARE = share
        began = time.perf_counter()
        data = pipeline.read_images(listing, spec, INPUT, device)
        seconds[name] = time.perf_counter() - began
        rates[name] = images_per_second(data, options.batches)
    row = {**rates, "ratio": rates["kept"] / rates["streamed"], "decoding_s": seconds["kept"]}
    print(json.dumps(row))
    if options.json:
        made = {"benchmark": "streamed", "data": options.data, "rows": {device.type: row}}
        options.json.write_text(json.dumps({**made, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
