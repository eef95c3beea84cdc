"""The configuration that heads carry in their state."""

import copy
import json
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from kernelhead import HEADS, create_head

D, C = 5, 3
SIZES = {"landmarks": {"landmarks": 4}, "expansion": {"width": 6}, "attentive": {"queries": 2}}
# Options that change what the same weights mean, and some that change shapes.
OTHERS = {
    "kernel": [{"coefficients": "softplus"}, {"temperature": 0.5}, {"degree": 8}, {"bias": True}, {"gamma": 2.0}],
    "prototypes": [{"aggregate": "logsumexp"}, {"prototypes": 2}, {"coefficients": "sigmoid"}],
    "landmarks": [{"coefficients": "relu"}, {"pool": None}, {"scale": 2.0}, {"landmarks": 6}, {"kernel": "rbf"}],
    "second_order": [{"pool": None}],
    "expansion": [{"scale": 2.0}, {"pool": None}, {"width": 7}],
    "attentive": [{"queries": 5}, {"pool": None}],
}


def make(name, **options):
    return create_head(name, D, C, **{**SIZES.get(name, {}), **options})


@pytest.mark.parametrize("name", HEADS)
def test_a_state_holds_the_configuration_as_json(name, tmp_path):
    head = make(name)
    safetensors.torch.save_file(head.state_dict(), tmp_path / "head.safetensors")
    raw = safetensors.torch.load_file(tmp_path / "head.safetensors")["_extra_state"]
    assert raw.dtype == torch.uint8
    config = json.loads(raw.numpy().tobytes())
    assert config == head.config
    assert config["version"] == 1
    assert create_head(**config).config == head.config


@pytest.mark.parametrize(("name", "options"), [(name, each) for name in OTHERS for each in OTHERS[name]])
@pytest.mark.parametrize("arguments", [{}, {"strict": False}, {"assign": True}])
def test_weights_of_another_configuration_are_refused_in_one_sentence(name, options, arguments):
    head, other = make(name), make(name, **options)
    network, before = nn.Sequential(nn.Identity(), head), copy.deepcopy(head.state_dict())
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=option) as error:
        network.load_state_dict(nn.Sequential(nn.Identity(), other).state_dict(), **arguments)
    message = f"{type(head).__name__} at '1' cannot take these weights: {option} is {head.config[option]!r} here and "
    assert str(error.value) == f"{message}{value!r} there; make the head with their options"
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())  # nothing was written


def test_all_differences_are_named():
    with pytest.raises(ValueError, match="name is 'cosine' here and 'kernel' there, degree is None here and 7 there"):
        make("cosine").load_state_dict(make("kernel").state_dict())
    with pytest.raises(ValueError, match="num_classes is 3 here and 4 there"):
        make("linear").load_state_dict(create_head("linear", D, 4).state_dict())
    with pytest.raises(ValueError, match="KernelHead cannot take these weights: frozen is None here and True there"):
        make("kernel").load_state_dict(make("kernel").freeze().state_dict(), strict=False)


@pytest.mark.parametrize("name", HEADS)
def test_weights_without_a_configuration_are_taken(name):
    """As an optimiser, a moving average or another library keeps them."""
    head, twin = make(name), make(name)
    twin.load_state_dict(dict([*head.named_parameters(), *head.named_buffers()]))
    assert all(torch.equal(tensor, twin.state_dict()[key]) for key, tensor in head.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: ") as error:
        twin.load_state_dict({})
    assert "_extra_state" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"3", b"[" * 50_000])
def test_a_broken_configuration_is_refused(content):
    head = make("kernel")
    state = head.state_dict() | {"_extra_state": torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)}
    with pytest.raises(ValueError, match="KernelHead cannot read the configuration of these weights"):
        head.load_state_dict(state)


def test_a_newer_version_is_named():
    head = make("kernel")
    newer = json.dumps({**head.config, "version": 2}).encode()
    state = head.state_dict() | {"_extra_state": torch.tensor(list(newer), dtype=torch.uint8)}
    with pytest.raises(ValueError, match="version is 1 here and 2 there"):
        head.load_state_dict(state)


def test_options_of_numpy_and_torch_come_back_equal():
    head = make("landmarks", scale=np.float32(0.5), gamma=torch.tensor(2.0))
    make("landmarks", scale=0.5, gamma=2).load_state_dict(head.state_dict())


# --- what others do with a state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_state_that_was_converted_as_a_whole_still_says_what_it_is(dtype):
    head = make("landmarks").to(dtype)
    state = {key: tensor.to(dtype) for key, tensor in head.state_dict().items()}
    make("landmarks").load_state_dict(state)
    with pytest.raises(ValueError, match=r"scale is 2\.0 here and None there"):
        make("landmarks", scale=2.0).load_state_dict(state)


def test_devices_copies_and_pickles_keep_it():
    head = make("landmarks", scale=0.5)
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), copy.deepcopy(head).to("meta")):
        assert torch.equal(twin.state_dict()["_extra_state"], head.state_dict()["_extra_state"])
    back = twin.to_empty(device="cpu")
    back.load_state_dict(head.state_dict())
    nowhere = {key: tensor.to("meta") for key, tensor in head.state_dict().items()}
    make("landmarks").to("meta").load_state_dict(nowhere, assign=True)  # nothing to read there
    with torch.device("meta"):
        assert not head.state_dict()["_extra_state"].is_meta


def test_moving_averages_keep_it():
    network = nn.Sequential(nn.Linear(D, D), make("landmarks"))
    average = AveragedModel(network, use_buffers=True)
    for _ in range(3):
        network(torch.randn(8, D))
        average.update_parameters(network)
    twin = AveragedModel(nn.Sequential(nn.Linear(D, D), make("landmarks")), use_buffers=True)
    twin.load_state_dict(average.state_dict())
    with pytest.raises(ValueError, match=r"LandmarkHead at 'module\.1' cannot take these weights: scale is 2\.0 here"):
        AveragedModel(nn.Sequential(nn.Linear(D, D), make("landmarks", scale=2.0))).load_state_dict(
            average.state_dict()
        )


@pytest.mark.parametrize("version", ["ModelEmaV2", "ModelEmaV3"])
def test_moving_averages_of_timm_keep_it(version):
    """They average whatever a state holds."""
    from timm import utils

    network = nn.Sequential(nn.Linear(D, D), make("landmarks"))
    average = getattr(utils, version)(network, decay=0.9)
    for _ in range(3):
        average.update(network)
    network.load_state_dict(average.module.state_dict())


def test_functional_calls_take_a_whole_state():
    head, x = make("kernel"), torch.randn(4, D)
    torch.testing.assert_close(torch.func.functional_call(head, head.state_dict(), (x,)), head(x))
    assert "_extra_state" not in vars(head)
    parameters, buffers = torch.func.stack_module_state([make("landmarks").eval() for _ in range(2)])
    assert not [name for name in (*parameters, *buffers) if "extra" in name]


def test_exported_and_compiled_heads():
    head, x = make("kernel").eval(), torch.randn(4, D)
    assert not [key for key in torch.export.export(head, (x,)).state_dict if "extra" in key]
    compiled = torch.compile(head, backend="eager")
    compiled.load_state_dict(compiled.state_dict())
    with pytest.raises(ValueError, match="degree is 7 here and 3 there"):
        compiled._orig_mod.load_state_dict(make("kernel", degree=3).state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning:torch.*")
def test_sharded_and_distributed_networks(one_process, tmp_path):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def network(**options):
        return nn.Sequential(nn.Linear(D, D), make("landmarks", **options))

    replicated = nn.parallel.DistributedDataParallel(network())
    replicated.load_state_dict(replicated.state_dict())
    sharded = network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    sharded.load_state_dict(sharded.state_dict())
    checkpoint.save({"model": get_model_state_dict(sharded)}, checkpoint_id=tmp_path / "parts")
    checkpoint.load({"model": (parts := get_model_state_dict(sharded))}, checkpoint_id=tmp_path / "parts")
    set_model_state_dict(sharded, parts)
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    network().load_state_dict(whole)
    with pytest.raises(ValueError, match=r"scale is 2\.0 here and None there"):
        network(scale=2.0).load_state_dict(whole)
    everything = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, whole, options=everything)
