"""Cropping in a Triton kernel, against torch's operations: the same bits. On the GPU where there is one, else
interpreted: as in `test_conv3x3`, this file runs itself as a program, which prints what it found.
"""

import json

import numpy as np
import pytest
import torch


def test_same_bits_as_by_torch(found):
    assert found["same"] == dict.fromkeys(["32", "17", "a part", "a strided part", "a part of a part", "sliced"], True)


def test_the_extremes_of_noise(found):
    assert found["extremes"]


def test_an_index_that_is_strided_or_empty(found):
    assert found["strided"]
    assert found["none"] == [[0, 3, 32, 32], [0]]


def test_layout(found):
    assert found["channels last"]


def test_images_beyond_32_bits_of_bytes(found):
    assert found["far"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_on_two_streams(found):
    assert found["captured"]


# --- the program ------------------------------------------------------------------------------------------------------


def main():
    from interpreter import captured, choose_device

    from kernelhead.data import resident
    from kernelhead.data.resident import ResidentImages, channel_statistics
    from kernelhead.ops import crop

    device = torch.device(choose_device())
    generator = np.random.default_rng(0)
    torch.manual_seed(0)

    def make(size):
        x = generator.integers(256, size=(20, size, size, 3), dtype=np.uint8)
        mean, std = channel_statistics(x)
        return ResidentImages(x, np.arange(20) % 7, mean=mean, std=std, device=device)

    def both(data, index, noise):
        """By the kernel, and by torch."""
        answers, kept = [], resident.runs_kernels
        for answer in ([True], [False]):
            resident.runs_kernels = lambda device, answer=answer: answer.pop()
            answers.append(data.augmented(index, noise))
            assert not answer  # it was asked
        resident.runs_kernels = kept
        return answers

    def same(data, count, noise=None):
        index = torch.randint(len(data), (count,), device=device)
        noise = torch.rand(count, 3, device=device) if noise is None else noise
        ours, theirs = both(data, index, noise)
        return all(map(torch.equal, ours, theirs))

    usual = make(32)
    part = usual.restricted(torch.tensor([3, 19, 0, 7, 7]))
    report = {
        "same": {
            "32": same(usual, 9),
            "17": same(make(17), 5),
            "a part": same(part, 6),
            "a strided part": same(usual.restricted(torch.arange(20)[::3]), 6),
            "a part of a part": same(part.restricted(torch.tensor([4, 1])), 3),
            "sliced": same(usual, 4, torch.rand(4, 7, device=device)[:, 2:5]),
        },
        "extremes": same(usual, 3, torch.tensor([[0.0] * 3, [1 - 2**-24] * 3, [0.5] * 3], device=device)),
    }
    index, noise = torch.arange(4, device=device), torch.rand(4, 3, device=device)
    strided, every = torch.arange(12, device=device)[::3], torch.tensor([0, 3, 6, 9], device=device)
    report["strided"] = all(map(torch.equal, both(usual, strided, noise)[0], both(usual, every, noise)[1]))
    report["none"] = [tuple(x.shape) for x in both(usual, index[:0], noise[:0])[0]]
    report["channels last"] = both(usual, index, noise)[0][0].is_contiguous(memory_format=torch.channels_last)
    # The one image is stored beyond 2^31 bytes, where only its rows are ever read.
    size, first = usual.padded[0].numel(), 2**31 // usual.padded[0].numel() + 1
    memory = torch.empty((first + 1) * size, dtype=torch.uint8, device=device)
    stored = memory.view(first + 1, *usual.padded.shape[1:])
    stored[first] = usual.padded[5]
    far = usual.labels, torch.tensor([first] * 20, device=device), index, noise, usual.mean, usual.std, 32
    near = usual.labels, torch.tensor([5] * 20, device=device), index, noise, usual.mean, usual.std, 32
    report["far"] = all(map(torch.equal, crop.cropped(stored, *far), crop.cropped(usual.padded, *near)))
    if device.type == "cuda":
        report["captured"] = captured(lambda own: usual.augmented(index, own), noise)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
