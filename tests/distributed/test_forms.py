"""Smaller forms of master, moments and gradients under the whole engine, on several ranks."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.runtime.zero.forms import as_tensor
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.distributed.harness import run_distributed

RESIDUAL = {"master_weights": "bf16_residual"}
FORMS = [
    RESIDUAL,
    {"optimizer_states": "bf16"},
    {"optimizer_states": "int8"},
    {**RESIDUAL, "optimizer_states": "bf16"},
    {**RESIDUAL, "optimizer_states": "int8"},
]
STEPS = 50


class Net(torch.nn.Module):
    """Odd sizes, two groups, a frozen layer, a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(37, 101)
        self.frozen = torch.nn.Linear(101, 53).requires_grad_(False)
        self.last = torch.nn.Linear(53, 5)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x))))) * self.scale


def make_engine(offload=None, gas=1, **keys):
    model = Net()
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in trainable if "bias" not in name]},
        {"params": [param for name, param in trainable if "bias" in name], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 1500,
            "allgather_bucket_size": 1100,
            "offload_optimizer": {"device": "cpu", **(offload or {})},
        },
        **keys,
    }
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def train(engine, steps):
    for step in range(engine.global_steps, engine.global_steps + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            seed = 1000 * step + 10 * micro + dist.get_rank()
            x = torch.randn(2, 37, generator=torch.Generator().manual_seed(seed)).bfloat16()
            engine.backward(engine(x.to(engine.device)).float().pow(2).mean())
            engine.step()


def contents(engine):
    """Weights, masters and moments of this rank."""
    optimizer = engine.optimizer
    tensors = [param.detach().clone() for param in engine.module.parameters()]
    tensors += [master.clone() for master in optimizer.single_partition_of_fp32_groups]
    for group in optimizer.param_groups:
        state = optimizer.state[group["params"][0]]
        tensors += [as_tensor(state[name]).clone() for name in ("exp_avg", "exp_avg_sq")]
    return tensors


def same(first, second):
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def residual_is_lossless(gas):
    results = []
    for offload in ({}, RESIDUAL):
        engine = make_engine(offload, gas)
        train(engine, STEPS)
        results.append(contents(engine))
        engine.destroy()
    assert same(*results)
    return True


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_residual_masters_give_the_bits_of_fp32_masters(world, gas):
    run_distributed(world, residual_is_lossless, gas)


def _save_and_go_on(folder):
    for index, offload in enumerate(FORMS):
        engine = make_engine(offload)
        train(engine, 5)
        engine.save_checkpoint(f"{folder}/{index}")
        train(engine, 5)
        expected = contents(engine)
        engine.destroy()
        again = make_engine(offload)
        assert again.load_checkpoint(f"{folder}/{index}")[0] is not None
        train(again, 5)
        assert same(contents(again), expected), offload
        again.destroy()
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_every_form_resumes_bit_for_bit(world, tmp_path):
    run_distributed(world, _save_and_go_on, str(tmp_path))


def _cross(folder):
    """fp32 to residual and back lose nothing; a smaller form takes what it can hold."""
    for first, second in (({}, RESIDUAL), (RESIDUAL, {})):
        engine = make_engine(first)
        train(engine, 5)
        engine.save_checkpoint(folder, tag="cross")
        train(engine, 5)
        expected = contents(engine)
        engine.destroy()
        other = make_engine(second)
        other.load_checkpoint(folder, tag="cross")
        train(other, 5)
        assert same(contents(other), expected)
        other.destroy()
    narrow = make_engine({"optimizer_states": "int8"})
    narrow.load_checkpoint(folder, tag="cross")
    wide = make_engine()
    wide.load_checkpoint(folder, tag="cross")
    pairs = list(zip(contents(narrow), contents(wide), strict=True))
    for quantised, exact in pairs[-4:]:
        assert (quantised - exact).abs().max() <= 0.01 * exact.abs().max()
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_go_from_one_form_to_another(world, tmp_path):
    run_distributed(world, _cross, str(tmp_path))


def _resize_save(folder):
    engine = make_engine({**RESIDUAL, "optimizer_states": "int8"})
    train(engine, 3)
    engine.save_checkpoint(folder)
    return [safe_get_full_fp32_param(param) for param in engine.parameters() if param.requires_grad]


def _resize_load(folder):
    engine = make_engine({**RESIDUAL, "optimizer_states": "int8"})
    engine.load_checkpoint(folder)
    return [safe_get_full_fp32_param(param) for param in engine.parameters() if param.requires_grad]


def test_another_number_of_ranks_takes_the_same_masters(tmp_path):
    saved = run_distributed(2, _resize_save, str(tmp_path))
    for world in (1, 3):
        loaded = run_distributed(world, _resize_load, str(tmp_path))
        assert same(loaded[0], saved[0])


def _access():
    engine = make_engine({**RESIDUAL, "optimizer_states": "int8"})
    train(engine, 2)
    param = engine.module.first.weight
    value = torch.linspace(-1, 1, param.numel()).view_as(param) + 1e-4
    safe_set_full_fp32_param(param, value)
    assert torch.equal(safe_get_full_fp32_param(param), value)
    assert torch.equal(param.detach(), value.bfloat16())
    safe_set_full_optimizer_state(param, value, "exp_avg")
    moment = safe_get_full_optimizer_state(param, "exp_avg")
    assert (moment - value).abs().max() <= 0.02
    # A weight that is changed on the device counts, and loaded weights are the masters, exactly.
    with torch.no_grad():
        param.fill_(0.5)
    engine.optimizer.refresh_fp32_params()
    assert (safe_get_full_fp32_param(param) == 0.5).all()
    train(engine, 1)
    saved = engine.optimizer.state_dict()
    other = make_engine({**RESIDUAL, "optimizer_states": "int8"})
    other.module.load_state_dict(engine.module.state_dict())
    other.optimizer.load_state_dict(saved)
    assert same(contents(other), contents(engine))
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_state_is_read_and_written_as_if_it_were_fp32(world):
    run_distributed(world, _access)


def _accumulated(key, dtype):
    engine = make_engine(gas=4, data_types={"grad_accum_dtype": key})
    train(engine, 2)
    names = {entry["name"]: entry for entry in engine.memory_report()}
    numel = sum(master.numel() for master in engine.optimizer.single_partition_of_fp32_groups)
    held = sum(entry["nbytes"] for name, entry in names.items() if name.startswith("gradient"))
    assert held == numel * dtype.itemsize
    assert engine.optimizer.parts.master.grads(0).dtype == dtype
    return True


@pytest.mark.parametrize(
    ("key", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_gradients_are_added_in_the_type_asked_for(key, dtype):
    run_distributed(2, _accumulated, key, dtype)


def _stocks_keys():
    engine = make_engine(
        gas=2,
        bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    )
    train(engine, 2)
    numel = sum(master.numel() for master in engine.optimizer.single_partition_of_fp32_groups)
    held = {}
    for entry in engine.memory_report():
        name = entry["name"].split("[")[0]
        held[name] = held.get(name, 0) + entry["nbytes"]
    for name in ("residual", "gradient", "exp_avg", "exp_avg_sq"):
        assert held[name] == 2 * numel, name
    return True


def test_stocks_bf16_keys_take_the_same_bytes_without_the_loss():
    run_distributed(2, _stocks_keys)


def _refused():
    model = Net().bfloat16()
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    problems = []
    for offload, keys in (
        ({"optimizer_states": "int8"}, {}),
        ({"master_weights": "bf16_residual"}, {}),
        ({}, {"data_types": {"grad_accum_dtype": "bf16"}}),
    ):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **offload}},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            **keys,
        }
        with pytest.raises(ValueError) as caught:
            deepspeed.initialize(model=model, optimizer=client, config=config)
        problems.append(str(caught.value))
    return problems


def test_another_optimizer_than_our_adam_is_refused_by_key_on_every_rank():
    for problems in run_distributed(2, _refused):
        for problem, key in zip(
            problems, ("optimizer_states", "master_weights", "grad_accum_dtype"), strict=True
        ):
            assert key in problem and "SGD" in problem and "Adam" in problem


def test_the_op_in_plain_torch_knows_no_smaller_form(monkeypatch):
    monkeypatch.setenv("DS_CPU_ADAM", "torch")
    with pytest.raises(ValueError, match="optimizer_states: expected .fp32. with DS_CPU_ADAM=torch"):
        make_engine({"optimizer_states": "int8"})
