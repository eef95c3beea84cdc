import pytest
import torch

from kernelhead.train.checkpoint import BrokenCheckpointError, load_checkpoint, save_checkpoint


def example():
    return {
        "weight": torch.randn(3, 4).t(),
        "half": torch.randn(5).to(torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 2),
    }


def test_round_trip_to_the_bit(tmp_path):
    tensors = example()
    save_checkpoint(tmp_path / "a.safetensors", tensors, {"epoch": 3, "nested": {"x": [1.5]}})
    loaded, state = load_checkpoint(tmp_path / "a.safetensors")
    assert state == {"epoch": 3, "nested": {"x": [1.5]}}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_cut_short_is_refused(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenCheckpointError, match=r"a\.safetensors"):
        load_checkpoint(path)


def test_one_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {"epoch": 3})
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpointError, match="checksum"):
        load_checkpoint(path)


def test_a_changed_state_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, example(), {"epoch": 3})
    path.write_bytes(path.read_bytes().replace(b'\\"epoch\\": 3', b'\\"epoch\\": 4'))
    with pytest.raises(BrokenCheckpointError, match="checksum"):
        load_checkpoint(path)


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(BrokenCheckpointError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "none.safetensors")
