"""Large images on their way to a network: decoded anew for every batch, and decoded once and kept on the device.

    python benchmarks/streamed.py [--data pets] [--batches 40] [--json results/bench/streamed.json]

Images a second of augmented batches of 64 at 224 pixels, nothing trained, from the training images of a data set; what
is decoded anew is the peer. Kept images take memory and some seconds at the start, which are told.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from kernelhead.backbones import expected_input
from kernelhead.data.open import open_data
from kernelhead.data.streamed import StreamedImages
from kernelhead.results import environment, write_bytes
from kernelhead.train.schedule import epoch_noise, epoch_order

BATCH, WARM = 64, 8


def images_a_second(images: StreamedImages, batches: int) -> float:
    order, noise = epoch_order(len(images), 0, 0), epoch_noise(len(images), images.draws, 0, 0)
    places = [slice(step * BATCH, (step + 1) * BATCH) for step in range(min(batches + WARM, len(images) // BATCH))]
    counted = 0
    for step, (batch, _) in enumerate(images.batches((order[at], noise[at]) for at in places)):
        if step == WARM:
            wait(batch)
            begin = time.perf_counter()
        counted += BATCH if step > WARM else 0
    wait(batch)
    return counted / (time.perf_counter() - begin)


def wait(batch: torch.Tensor) -> None:
    """Until a batch is there."""
    batch.flatten()[0].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pets")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--gib", type=float, default=16.0, help="that decoded images may take")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = open_data(options.data, expected_input("resnet50"), device).train
    assert isinstance(images, StreamedImages), "the images of CIFAR are resident anyway"
    streamed = images_a_second(images, options.batches)
    begin = time.perf_counter()
    if not images.keep_decoded(round(options.gib * 2**30)):
        raise SystemExit(f"the images of {options.data} take more than {options.gib:g} GiB")
    seconds = time.perf_counter() - begin
    kept = images_a_second(images, options.batches)
    row = {"images": len(images), "streamed": streamed, "kept": kept, "ratio": kept / streamed, "decoding_s": seconds}
    print(json.dumps(row))
    if options.json:
        made = {"benchmark": "streamed", "data": options.data, "workers": images.workers, "rows": {device.type: row}}
        write_bytes(options.json, (json.dumps({**made, **environment()}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
