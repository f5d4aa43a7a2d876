"""Master shards on host and device: the same verbs, the same values, and on the host not a byte too many."""

import logging
import math

import pytest
import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.zero.collectives import Comm
from deepspeed.runtime.zero.device_master import DeviceMaster
from deepspeed.runtime.zero.host_buffer import Ledger
from deepspeed.runtime.zero.host_master import HostMaster, HostSettings
from deepspeed.runtime.zero.layout import plan_buckets, plan_groups
from deepspeed.runtime.zero.publisher import ParamPublisher

NUMELS = [[5, 3, 7], [4]]
SETTINGS = {"lr": 2.0**-4, "betas": (0.5, 0.75), "weight_decay": 0.5}


def _params(dtype):
    generator = torch.Generator().manual_seed(0)
    numels = [numel for group in NUMELS for numel in group]
    return [torch.nn.Parameter((torch.rand(numel, generator=generator) + 1).to(dtype)) for numel in numels]


class Shard:
    """One rank's master of a small model, fed through the real bucket plan, without any other rank."""

    def __init__(
        self, kind, shard=0, shards=1, dtype=torch.float32, grad_dtype=torch.float32, optimizer=None
    ):
        params = _params(dtype)
        self.params = dict(enumerate(params))
        self.shard, self.shards = shard, shards
        numbered = [[(0, 5), (1, 3), (2, 7)], [(3, 4)]]
        self.layouts = plan_groups(numbered, shards)
        self.plans = plan_buckets(self.layouts, 9)
        cls = optimizer or (DeepSpeedCPUAdam if kind == "host" else torch.optim.AdamW)
        self.optimizer = cls([{"params": params[:3]}, {"params": params[3:]}], **SETTINGS)
        self.ledger = Ledger()
        if kind == "host":
            settings = HostSettings(grad_dtype, 1, 1, self.ledger)
            op = CPUAdamBuilder().load()
            self.master = HostMaster(self.layouts, shard, self.params, self.optimizer, settings, op, None)
        else:
            device = torch.device("cpu")
            self.master = DeviceMaster(self.layouts, shard, self.params, self.optimizer, device)

    def load(self, value, dtype=torch.float32):
        """Every gradient element becomes `value` times its place in the model; returns the sum of squares."""
        total = 0.0
        for plan in self.plans:
            flat = torch.empty(plan.numel, dtype=dtype)
            for item in plan.items:
                places = torch.arange(item.numel) + item.param_start + 10 * item.slot.index + 1
                flat[item.bucket_start : item.bucket_start + item.numel] = value * places
            low, high = plan.owner_bounds[self.shard], plan.owner_bounds[self.shard + 1]
            if high > low:
                owned = [item for item in plan.items if item.owner == self.shard]
                self.master.load_grads(owned, flat[low:high])
                total += flat[low:high].double().square().sum().item()
        return total

    def grads(self):
        return torch.cat([self.master.grads(index).float() for index in range(len(self.layouts))])

    def nbytes(self):
        return {entry.name: entry.nbytes for entry in self.ledger}

    def step(self, factor=1.0, chunk_numel=1000):
        publisher = ParamPublisher(self.layouts, self.params, Comm(None, 0, 1, True), chunk_numel)
        self.master.step(factor, publisher)


SHARDS = [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
KINDS = pytest.mark.parametrize("kind", ["host", "device"])


@KINDS
@pytest.mark.parametrize(("shard", "shards"), SHARDS)
def test_a_shard_holds_the_owned_elements_and_no_padding(kind, shard, shards):
    one = Shard(kind, shard, shards)
    for layout, master, slots in zip(one.layouts, one.master.masters, (range(3), [3]), strict=True):
        low, high = layout.shard_bounds(shard)
        full = torch.cat([one.params[index].detach().view(-1) for index in slots])
        assert torch.equal(master, full[low:high])
    assert [group["params"][0].numel() for group in one.optimizer.param_groups] == [
        layout.shard_numel(shard) for layout in one.layouts
    ]


@pytest.mark.parametrize(("shard", "shards"), SHARDS)
@pytest.mark.parametrize(
    ("grad_dtype", "nbytes_a_parameter"), [(torch.float32, 16), (torch.bfloat16, 14), (torch.float16, 14)]
)
def test_the_host_pays_16_bytes_an_owned_parameter_or_14(shard, shards, grad_dtype, nbytes_a_parameter):
    one = Shard("host", shard, shards, grad_dtype=grad_dtype)
    owned = sum(layout.shard_numel(shard) for layout in one.layouts)
    assert one.ledger.total_nbytes == nbytes_a_parameter * owned
    one.load(1.0, grad_dtype)
    if shards == 1:
        one.step()
    assert one.ledger.total_nbytes == nbytes_a_parameter * owned, "a step adds nothing"


@KINDS
@pytest.mark.parametrize(("shard", "shards"), SHARDS)
def test_the_first_contribution_of_a_step_is_stored_and_later_ones_are_added(kind, shard, shards):
    one = Shard(kind, shard, shards)
    first = one.load(1.0)
    expected = one.grads().clone()
    assert one.master.sum_of_squares() == pytest.approx(first, rel=1e-15)
    one.load(2.0)
    assert torch.equal(one.grads(), 3 * expected)
    # Squares of small integers, summed in double.
    assert one.master.sum_of_squares() == pytest.approx(9 * first, rel=1e-15)
    one.master.clear_grads()
    one.load(0.5)
    assert torch.equal(one.grads(), 0.5 * expected), "the next step starts from nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_gradient_is_kept_as_it_came_and_widened_once_when_another_comes(caplog, dtype):
    caplog.set_level(logging.INFO, "DeepSpeed")
    one = Shard("host", grad_dtype=dtype)
    one.load(1.0, dtype)
    assert one.nbytes()["gradient[0]"] == 2 * 15
    kept = one.grads().clone()
    one.load(2.0**-9, dtype)  # lost beside the first in 16 bits
    assert one.nbytes()["gradient[0]"] == 4 * 15
    assert torch.equal(one.grads(), kept + kept * 2.0**-9)
    assert one.master.sum_of_squares() == pytest.approx(one.grads().double().square().sum().item(), rel=1e-15)
    one.step()
    one.load(1.0, dtype)
    one.load(1.0, dtype)
    widened = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "widened" in text]
    assert sorted(text.split(":")[0] for text in widened) == ["gradient[0]", "gradient[1]"]


@KINDS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_element_that_is_not_finite_shows_in_the_sum_and_is_gone_in_the_next_step(kind, bad):
    one = Shard(kind)
    one.load(1.0)
    one.master.set_grads(0, 14, torch.tensor([bad]))
    assert not math.isfinite(one.master.sum_of_squares())
    one.master.clear_grads()
    expected = one.load(1.0)
    assert one.master.sum_of_squares() == pytest.approx(expected, rel=1e-15)


@KINDS
@pytest.mark.parametrize(("start", "end"), [(0, 15), (4, 6), (5, 8), (14, 15), (3, 3)])
def test_the_norm_follows_gradients_that_are_overwritten(kind, start, end):
    one = Shard(kind)
    one.load(1.0)
    one.master.set_grads(0, start, torch.full((end - start,), 100.0))
    assert torch.equal(one.master.grads(0)[start:end], torch.full((end - start,), 100.0))
    assert one.master.sum_of_squares() == pytest.approx(one.grads().double().square().sum().item(), rel=1e-15)


@KINDS
def test_scaling_in_place_scales_every_gradient_and_needs_no_other_buffer(kind):
    one = Shard(kind)
    one.load(1.0)
    before = one.grads().clone()
    places = [one.master.grads(index).data_ptr() for index in range(2)]
    one.master.scale_grads(0.25)
    assert torch.equal(one.grads(), before * 0.25)
    assert [one.master.grads(index).data_ptr() for index in range(2)] == places


@pytest.mark.parametrize("chunk_numel", [1, 2, 4, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_a_step_in_tiles_gives_the_bits_of_torchs_adamw_and_publishes_them(optimizer, dtype, chunk_numel):
    """`optimizer` None is the fused host kernel; else torch's own, on the flat host shard."""
    factor = 0.25  # exact: unscaling before or inside the kernel is the same
    one = Shard("host", dtype=dtype, optimizer=optimizer)
    plain = [torch.nn.Parameter(param.detach().float().clone()) for param in one.params.values()]
    reference = torch.optim.AdamW(plain, **SETTINGS)
    for step in (1.0, 2.0, -1.0):
        one.load(step)
        grads = one.grads()
        for param, grad in zip(plain, (grads * factor).split([5, 3, 7, 4]), strict=True):
            param.grad = grad
        one.step(factor, chunk_numel)
        reference.step()
    for index, param in enumerate(plain):
        assert torch.equal(one.params[index], param.to(dtype)), index
    assert torch.equal(torch.cat(one.master.masters), torch.cat([param.detach() for param in plain]))


@KINDS
def test_publishing_without_a_step_brings_the_masters_values_to_the_parameters(kind):
    one = Shard(kind, dtype=torch.bfloat16)
    one.master.masters[0].copy_(torch.arange(15) + 2.0**-12)
    one.master.publish(ParamPublisher(one.layouts, one.params, Comm(None, 0, 1, True), 4))
    assert one.params[2].tolist() == [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]


@KINDS
def test_close_gives_back_every_buffer_and_leaves_the_optimizer_no_state(kind):
    one = Shard(kind)
    one.load(1.0)
    one.step()
    one.master.close()
    assert list(one.ledger) == []
    assert len(one.optimizer.state) == 0
    assert all(group["params"][0].numel() == 0 for group in one.optimizer.param_groups)
