"""deepspeed.checkpointing gives the gradients of an ordinary call."""

import json

import pytest
import torch

import deepspeed
from deepspeed.runtime.activation_checkpointing import checkpointing


@pytest.fixture(autouse=True)
def _as_at_import():
    token = checkpointing._SETTINGS.set(None)
    yield
    checkpointing._SETTINGS.reset(token)


def gradients(checkpointed):
    torch.manual_seed(0)
    block = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    x = torch.randn(3, 4, requires_grad=True)
    out = deepspeed.checkpointing.checkpoint(block, x) if checkpointed else block(x)
    out.sum().backward()
    return [x.grad, *(param.grad for param in block.parameters())]


@pytest.mark.parametrize("in_cpu", [None, True])
def test_gradients_are_those_of_an_ordinary_call_in_every_bit(in_cpu):
    deepspeed.checkpointing.configure(mpu_=None, checkpoint_in_cpu=in_cpu)
    for mine, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, plain)


def test_activations_are_computed_again():
    calls = []
    block = torch.nn.Linear(2, 2)
    block.register_forward_pre_hook(lambda *args: calls.append(1))
    deepspeed.checkpointing.checkpoint(block, torch.ones(1, 2)).sum().backward()
    assert len(calls) == 2


def test_configure_takes_what_clients_pass():
    assert not deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.configure(
        mpu_=None,
        partition_activations=False,
        contiguous_checkpointing=False,
        checkpoint_in_cpu=False,
        profile=None,
    )
    assert deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.reset()
    assert deepspeed.checkpointing.is_configured()


def test_configure_reads_a_configuration_unless_told_otherwise(tmp_path):
    config = {"activation_checkpointing": {"cpu_checkpointing": True}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for source in (config, str(path), path):
        checkpointing.configure(None)
        checkpointing.configure(None, deepspeed_config=source)
        assert checkpointing._SETTINGS.get().cpu
    checkpointing.configure(None, deepspeed_config=config, checkpoint_in_cpu=False)
    assert not checkpointing._SETTINGS.get().cpu


def test_model_parallelism_is_refused():
    class Split:
        def get_model_parallel_world_size(self):
            return 2

    with pytest.raises(NotImplementedError, match="checkpointing.configure: .*model parallelism"):
        checkpointing.configure(Split())
