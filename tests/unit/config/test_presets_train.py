"""Every preset trains as it stands, once a client has filled in its "auto"; left in, each is named."""

import pytest
import torch

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.config import DeepSpeedConfigError
from tests.unit.config.presets import PRESETS

pytestmark = pytest.mark.usefixtures("world_of_one")

FILLED = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "reduce_bucket_size": 64,
    "lr": 1e-2,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "warmup_min_lr": 0,
    "warmup_max_lr": 1e-2,
    "warmup_num_steps": 1,
    "total_num_steps": 10,
}


def fill(node, dtype, key=""):
    """The configuration with each "auto" replaced as Trainer and accelerate do."""
    if isinstance(node, dict):
        enabled = {"enabled": key == dtype} if node.get("enabled") == "auto" else {}
        return {name: fill(value, dtype, name) for name, value in {**node, **enabled}.items()}
    return FILLED[key] if node == "auto" else node


def autos(node, path=""):
    """Full paths of the keys that are "auto"."""
    if isinstance(node, dict):
        return [found for key, value in node.items() for found in autos(value, f"{path}.{key}".strip("."))]
    return [path] if node == "auto" else []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains(name, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = fill(PRESETS[name], dtype)
    # Presets without an optimizer are for clients that bring one, of the class that accelerate brings.
    client = None if "optimizer" in config else DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=client)
    data = torch.ones(2, 8, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    losses = []
    for _ in range(10):  # the first few under fp16 find the loss scale
        loss = (engine(data) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    names = {entry["name"] for entry in engine.memory_report()}
    assert {"master[0]", "gradient[0]"} <= names, "it is offloaded"
    assert losses[-1] < losses[0]
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert all(changed)
    engine.destroy()


@pytest.mark.parametrize("name", PRESETS)
def test_what_no_client_has_filled_in_is_named_all_at_once(name):
    expected = {path for path in autos(PRESETS[name]) if not path.startswith("zero_optimization.")}
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=PRESETS[name])
    (line,) = [line for line in str(caught.value).splitlines() if "expected a value, got 'auto'" in line]
    assert expected == set(line.split(":")[0].replace(",", " ").split())
