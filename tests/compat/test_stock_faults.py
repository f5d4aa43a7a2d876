"""What docs/upstream.md says of stock's gradients on the host, seen by running stock 0.19.8."""

import json
import os
import subprocess

import pytest

from tests.stock_python import COMPILER, LIMIT_S, OPS, STOCK

pytestmark = [
    pytest.mark.compat,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(STOCK is None, reason="set DS_STOCK_PYTHON to an interpreter with stock DeepSpeed"),
]

CODE = """
import json, sys, torch, deepspeed

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.both = True

    def forward(self, x):
        return self.always(x) + self.sometimes(x) if self.both else self.always(x)

def start(stage, offload, accumulation=1, **more):
    torch.manual_seed(0)
    net = Net()
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
              "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero, **more}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]

def loss(model, x):
    return model(x).float().pow(2).mean()

def moves(stage, offload):
    # How far a parameter goes that has a gradient in the first step alone.
    net, engine = start(stage, offload)
    found = []
    for step in range(3):
        net.both = step == 0
        before = net.sometimes.weight.detach().clone()
        engine.backward(loss(engine, torch.randn(2, 4)))
        engine.step()
        found.append((net.sometimes.weight - before).abs().max().item())
    return found

def apart(stage):
    # From torch, over three steps of two micro-batches.
    net, engine = start(stage, True, accumulation=2)
    twin = Net()
    twin.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(2, 4)
            engine.backward(loss(engine, x))
            engine.step()
            (loss(twin, x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(net.parameters(), twin.parameters()))

def widths():
    # Bytes an element of the gradient, and of what is copied to the host.
    net, engine = start(2, True, bf16={"enabled": True})
    found, copy = [], torch.Tensor.copy_
    def spy(target, source, *args, **kwargs):
        if sys._getframe(1).f_code.co_name == "async_inplace_copy_grad_to_fp32_buffer_from_gpu":
            found.append(source.element_size())
        return copy(target, source, *args, **kwargs)
    torch.Tensor.copy_ = spy
    engine.backward(loss(engine, torch.randn(2, 4).bfloat16()))
    torch.Tensor.copy_ = copy
    return [net.always.weight.element_size(), *sorted(set(found))]

print("FOUND" + json.dumps({
    "moves": {f"{stage} {offload}": moves(stage, offload) for stage in (1, 2) for offload in (True, False)},
    "apart": [apart(stage) for stage in (1, 2)],
    "widths": widths(),
}))
"""


@pytest.fixture(scope="module")
def found(stocks_ops, tmp_path_factory):
    own = {"PYTHONPATH": "", "TORCH_EXTENSIONS_DIR": str(OPS), "CXX": str(COMPILER)}
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [STOCK, "-c", CODE],
        env={**os.environ, **own, **one, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path_factory.mktemp("faults"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("FOUND")[2])


@pytest.mark.parametrize("stage", [1, 2])
def test_offload_steps_a_parameter_without_gradient_with_its_last_one(found, stage):
    first, second, third = found["moves"][f"{stage} True"]
    assert first > 0.01
    assert [second, third] == pytest.approx([first, first], rel=1e-5)
    assert found["moves"][f"{stage} False"] == [pytest.approx(first, rel=1e-5), 0, 0]


def test_accumulation_under_offload_is_torchs_in_stage_1_as_in_stage_2(found):
    assert found["apart"] == [0, 0]


def test_the_copy_to_the_host_is_twice_as_wide_as_the_gradient(found):
    assert found["widths"] == [2, 4]
