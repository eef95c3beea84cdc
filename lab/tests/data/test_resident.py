import numpy as np
import pytest
import torch

from kernelhead_lab.data.resident import PAD, ResidentImages, channel_statistics


def images(n=6, size=32, seed=0):
    return np.random.default_rng(seed).integers(256, size=(n, size, size, 3), dtype=np.uint8)


def resident(x, **options):
    mean, std = channel_statistics(x)
    labels = np.arange(len(x)) % 3
    return ResidentImages(x, labels, mean=mean, std=std, device=torch.device("cpu"), **options)


def test_statistics():
    x = images()
    mean, std = channel_statistics(x)
    np.testing.assert_allclose(mean, x.reshape(-1, 3).mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, x.reshape(-1, 3).std(0), rtol=1e-12)


def test_plain_images_are_normalised():
    x = images()
    index = torch.tensor([4, 0, 4])
    batch, labels = resident(x).plain(index)
    by_hand = (x[[4, 0, 4]] - x.reshape(-1, 3).mean(0)) / x.reshape(-1, 3).std(0)
    np.testing.assert_allclose(batch, by_hand.transpose(0, 3, 1, 2), atol=1e-5)
    assert labels.tolist() == [1, 0, 1]


def crops(x, mean, std):
    """Every shift and flip of one image (H, W, 3), from an image with a border of the mean colour."""
    border = np.broadcast_to(np.round(mean), (32 + 2 * PAD, 32 + 2 * PAD, 3)).copy()
    border[PAD:-PAD, PAD:-PAD] = x
    for row in range(2 * PAD + 1):
        for column in range(2 * PAD + 1):
            crop = border[row : row + 32, column : column + 32]
            for flipped in (False, True):
                yield (row, column, flipped), ((crop[:, ::-1] if flipped else crop) - mean) / std


def test_augmented_images_are_shifts_and_flips_of_the_image_and_all_occur():
    x = images(2)
    mean, std = (s.numpy() for s in channel_statistics(x))
    data = resident(x)
    batch, labels = data.augmented(torch.ones(3000, dtype=torch.long), torch.rand(3000, 3))
    assert batch.shape == (3000, 3, 32, 32)
    assert set(labels.tolist()) == {1}
    known = {
        crop.transpose(2, 0, 1).astype(np.float32).round(3).tobytes(): which for which, crop in crops(x[1], mean, std)
    }
    seen = [known[image.numpy().round(3).tobytes()] for image in batch]
    counts = np.unique(seen, axis=0, return_counts=True)[1]
    assert len(counts) == 2 * (2 * PAD + 1) ** 2
    assert counts.max() < 5 * 3000 / len(counts)


def test_the_smallest_and_the_largest_noise_stay_inside():
    x = images(2)
    mean, std = (s.numpy() for s in channel_statistics(x))
    noise = torch.tensor([[0.0, 0.0, 0.0], [1 - 2**-24] * 3])
    batch, _ = resident(x).augmented(torch.tensor([0, 1]), noise)
    first, last = dict(crops(x[0], mean, std)), dict(crops(x[1], mean, std))
    np.testing.assert_allclose(batch[0].permute(1, 2, 0), first[0, 0, True], atol=1e-5)
    np.testing.assert_allclose(batch[1].permute(1, 2, 0), last[2 * PAD, 2 * PAD, False], atol=1e-5)


def test_batches_are_plain_or_augmented():
    data = resident(images())
    index, noise = torch.tensor([3, 1]), torch.rand(2, 3)
    plain, altered = data.batches([(index, None), (index, noise)])
    assert torch.equal(plain[0], data.plain(index)[0])
    assert torch.equal(altered[0], data.augmented(index, noise)[0])


def test_as_many_labels_as_images():
    mean, std = channel_statistics(images())
    with pytest.raises(ValueError, match="6 images need as many labels; got 5"):
        ResidentImages(images(), np.zeros(5), mean=mean, std=std, device=torch.device("cpu"))


def test_restricted_to_some_and_again():
    data = resident(images())
    part = data.restricted(torch.tensor([5, 0, 3, 2]))
    assert len(part) == 4
    assert part.labels.tolist() == [2, 0, 0, 2]
    index, noise = torch.tensor([2, 0]), torch.rand(2, 3)
    for ours, whole in zip(part.augmented(index, noise), data.augmented(torch.tensor([3, 5]), noise), strict=True):
        assert torch.equal(ours, whole)
    again = part.restricted(torch.tensor([1, 2]))
    for ours, whole in zip(again.plain(torch.arange(2)), data.plain(torch.tensor([0, 3])), strict=True):
        assert torch.equal(ours, whole)
    assert len(data) == 6
