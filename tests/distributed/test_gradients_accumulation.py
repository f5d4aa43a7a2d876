"""What several backward passes add up to: the sum, in fp32 where it was asked for, whoever calls backward."""

import itertools
import logging

import pytest
import torch

from tests.distributed.harness import run_distributed
from tests.distributed.training import (
    ExactModel,
    Setup,
    assert_same_bits,
    exact_grad,
    exact_rows,
    rank_and_world,
    start,
    state_of,
    total_numel,
    train_exact,
)

# Rounds as the host kernel does, step by step.
TORCH_ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 1.0}}
PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]
PLACES_AND_DTYPES = list(itertools.product(PLACES, ("fp32", "bf16", "fp16")))


class _Messages(logging.Handler):
    """Collects the messages of DeepSpeed's logger."""

    def __init__(self):
        super().__init__()
        self.messages = []
        logger = logging.getLogger("DeepSpeed")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record):
        self.messages.append(record.getMessage())

    def matching(self, text):
        return [message for message in self.messages if text in message]


def _loss(engine, step, part, parts):
    """A rank's part of a step's loss; all parts of all ranks together give `exact_grad` times `parts`."""
    rank, world = rank_and_world()
    rows = exact_rows(step, total_numel(engine.module)).chunk(world * parts)
    return engine(rows[rank * parts + part]) * (world * parts / 8)


def _flat_master(engine):
    state = state_of(engine)
    return torch.cat([state[f"{name}.master"].view(-1) for name, _ in engine.module.named_parameters()])


def _assert_updates_by(engine, grad, train, label):
    """A step of SGD with rate 1 subtracts the gradient from the masters; so does torch, to the bit."""
    before = _flat_master(engine)
    train()
    after = _flat_master(engine)
    assert torch.equal(after, before - grad), (
        f"{label}: off by {(after - (before - grad)).abs().max().item():g}"
    )


# -- GA = 1 in the configuration, several backward calls a step


def _four_backwards_one_step():
    numel = total_numel(ExactModel())
    for (stage, offload), dtype in PLACES_AND_DTYPES:
        engine = start(ExactModel(), Setup(stage, offload, dtype=dtype, optimizer=SGD, bucket_numel=7))
        for step in range(3):

            def train(step=step, engine=engine):
                for part in range(4):
                    engine.backward(_loss(engine, step, part, 4) / 4)
                engine.step()

            _assert_updates_by(engine, exact_grad(step, numel), train, (stage, offload, dtype))
        assert engine.global_steps == 3
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_four_backwards_and_one_step_sum_when_the_configuration_says_one(world):
    run_distributed(world, _four_backwards_one_step)


def _kept_gradient_widens_once():
    log = _Messages()
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine = start(ExactModel(), Setup(2, True, dtype="bf16", optimizer=adam))
    reference = start(ExactModel(), Setup(2, True, accumulation=4, dtype="bf16", optimizer=adam))

    def gradient_nbytes(engine):
        return [entry["nbytes"] for entry in engine.memory_report() if entry["name"].startswith("gradient")]

    owned = sum(master.numel() for master in engine.optimizer.single_partition_of_fp32_groups)
    train_exact(engine, 1)
    train_exact(reference, 1)
    assert gradient_nbytes(engine) == [2 * owned], "a 16-bit gradient that arrives once stays as it arrived"
    assert gradient_nbytes(reference) == [4 * owned]
    names = {entry["name"] for entry in engine.memory_report()}
    for step in (1, 2):
        for part in range(4):
            engine.backward(_loss(engine, step, part, 4) / 4)
        engine.step()
        assert gradient_nbytes(engine) == [4 * owned]
    train_exact(reference, 2, first=1)
    assert_same_bits(state_of(engine), state_of(reference))
    assert len(log.matching("widened")) == 1
    assert {entry["name"] for entry in engine.memory_report()} == names, "and no second accumulator appears"
    engine.destroy()
    reference.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_bf16_contribution_widens_the_host_gradient_once_with_a_log_line(world):
    run_distributed(world, _kept_gradient_widens_once)


# -- fp32 accumulation


class _Scale(torch.nn.Module):
    """The gradient is the input, whatever its values."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(33))

    def forward(self, row):
        return (self.weight * row.to(self.weight.dtype)).sum()


def _rows_of_1e_3(rank):
    generator = torch.Generator().manual_seed(rank)
    return (1e-3 * (1 + torch.rand((256, 33), generator=generator))).bfloat16()


def _accumulate_256(setup):
    rank, _ = rank_and_world()
    engine = start(_Scale(), setup)
    for row in _rows_of_1e_3(rank):
        engine.backward(engine(row) * 256)
        engine.step()
    (master,) = [state_of(engine)["weight.master"]]
    engine.destroy()
    return -master


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", [(1, False), (2, False), (1, True), (2, True)])
def test_256_micro_steps_of_small_bf16_gradients_sum_in_fp32(place, world):
    setup = Setup(*place, accumulation=256, dtype="bf16", optimizer=SGD)
    if place[0] == 1 and world > 1:
        # Stage 1 adds up in param.grad, once a step on the wire, unless told otherwise.
        setup = setup.but(extra={"data_types": {"grad_accum_dtype": "fp32"}})
    results = run_distributed(world, _accumulate_256, setup)
    rows = [_rows_of_1e_3(rank) for rank in range(world)]
    # With two ranks the mean of two bf16 gradients is rounded to bf16 once, before fp32 adds it.
    means = torch.stack(rows).float().mean(0).bfloat16()
    expected = means.double().sum(0)
    for result in results:
        # 256 fp32 additions of positive numbers.
        assert torch.allclose(result.double(), expected, rtol=256 * 2.0**-24, atol=0)
    in_bf16 = torch.zeros(33, dtype=torch.bfloat16)
    for row in rows[0]:
        in_bf16 += row
    assert not torch.allclose(in_bf16.double(), rows[0].double().sum(0), rtol=0.05), (
        "the input shows a bf16 sum"
    )


def _three_steps_with_fp32_accumulation():
    results = []
    for place, accumulation in itertools.product([(1, True), (1, False), (2, True)], (1, 4)):
        setup = Setup(*place, accumulation, dtype="bf16", extra={"data_types": {"grad_accum_dtype": "fp32"}})
        setup = setup if place[1] else setup.but(optimizer=TORCH_ADAMW)
        engine = start(ExactModel(), setup)
        train_exact(engine, 3)
        results.append(state_of(engine))
        engine.destroy()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_with_fp32_accumulation_at_stage_1_with_cpu_adam_is_a_supported_combination(world):
    for results in run_distributed(world, _three_steps_with_fp32_accumulation):
        for state in results[1:]:
            assert_same_bits(state, results[0])


# -- no_sync, boundaries, short batches


def _no_sync_then_sync():
    numel = total_numel(ExactModel())
    log = _Messages()
    for (stage, offload), dtype in PLACES_AND_DTYPES:
        engine = start(ExactModel(), Setup(stage, offload, dtype=dtype, optimizer=SGD))

        def train(engine=engine, step=0):
            with engine.no_sync():
                for part in range(3):
                    engine.backward(_loss(engine, step, part, 4) / 4)
            engine.backward(_loss(engine, step, 3, 4) / 4)
            engine.step()

        for step in range(2):
            _assert_updates_by(
                engine, exact_grad(step, numel), lambda step=step: train(step=step), (stage, offload, dtype)
            )
        engine.destroy()
    rank, _ = rank_and_world()
    stage_2_engines = sum(stage == 2 for (stage, _), _ in PLACES_AND_DTYPES)
    assert len(log.matching("no_sync")) == stage_2_engines, "one warning an engine, at stage 2 only"


@pytest.mark.parametrize("world", [1, 2])
def test_backwards_inside_and_outside_no_sync_sum_at_stages_0_1_and_2(world):
    run_distributed(world, _no_sync_then_sync)


def _boundary_is_sticky():
    numel = total_numel(ExactModel())
    for (stage, offload), dtype in PLACES_AND_DTYPES:
        engine = start(ExactModel(), Setup(stage, offload, accumulation=2, dtype=dtype, optimizer=SGD))
        assert not engine.is_gradient_accumulation_boundary()

        def train(step, engine=engine):
            engine.set_gradient_accumulation_boundary(is_boundary=False)
            for part in range(3):  # the count of 2 would have stepped in the middle
                engine.backward(_loss(engine, step, part, 4) / 2)
                engine.step()
                assert not engine.is_gradient_accumulation_boundary()
            engine.set_gradient_accumulation_boundary(is_boundary=True)
            engine.backward(_loss(engine, step, 3, 4) / 2)
            engine.step()
            assert engine.is_gradient_accumulation_boundary(), "until told otherwise"

        for step in range(2):
            _assert_updates_by(
                engine, exact_grad(step, numel), lambda step=step: train(step), (stage, offload, dtype)
            )
        assert (engine.global_steps, engine.micro_steps) == (2, 8)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_boundary_set_by_the_caller_overrides_the_count_until_set_again(world):
    run_distributed(world, _boundary_is_sticky)


def _ten_micro_batches_at_accumulation_4():
    numel = total_numel(ExactModel())
    for stage, offload in PLACES:
        engine = start(ExactModel(), Setup(stage, offload, accumulation=4, optimizer=SGD))
        masters = [_flat_master(engine)]
        for micro in range(10):
            last = micro == 9
            if last:
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(_loss(engine, micro, 0, 1))
            engine.step()
            masters.append(_flat_master(engine))
        assert engine.global_steps == 3
        quarter = [exact_grad(micro, numel) / 4 for micro in range(10)]
        # The engine divides by the configured 4 always, as DeepSpeed does: the short batch of 2 weighs half.
        for first, end in ((0, 4), (4, 8), (8, 10)):
            assert torch.equal(masters[end], masters[first] - sum(quarter[first:end])), (
                stage,
                offload,
                first,
            )
            assert torch.equal(masters[end - 1], masters[first]), "and nothing moves before the boundary"
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_short_last_batch_steps_when_the_caller_forces_the_boundary(world):
    run_distributed(world, _ten_micro_batches_at_accumulation_4)


# -- who calls backward


def _backward_by(engine, way, loss):
    accumulation = engine.gradient_accumulation_steps()
    if way == "plain":
        loss.backward()
    elif way == "scale":
        engine.scale(loss).backward()
    elif way == "unscaled by accumulation":
        engine.backward(loss / accumulation, scale_wrt_gas=False)
    else:
        engine.backward(loss)


def _train_by(way):
    numel = total_numel(ExactModel())
    for (stage, offload), dtype, accumulation in itertools.product(PLACES, ("fp32", "fp16"), (1, 4)):
        setup = Setup(stage, offload, accumulation, bucket_numel=7, dtype=dtype, optimizer=SGD)
        engine = start(ExactModel(), setup)

        def train(step, engine=engine, accumulation=accumulation):
            for part in range(accumulation):
                _backward_by(engine, way, _loss(engine, step, part, accumulation))
                engine.step()

        for step in range(2):
            _assert_updates_by(engine, exact_grad(step, numel), lambda step=step: train(step), (setup, way))
            norm = exact_grad(step, numel).double().square().sum().sqrt()
            assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-12), (setup, way)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", ["engine", "plain", "scale", "unscaled by accumulation"])
def test_every_way_to_call_backward_gives_the_same_update(way, world):
    run_distributed(world, _train_by, way)


class _LossAndLogits(torch.nn.Module):
    """Returns what transformers' models return: a loss, and the logits that it was computed from."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, row):
        logits = self.weight * row.to(self.weight.dtype)
        return {"loss": logits.sum(), "more": [logits, (logits * 2,)], "note": "kept"}


def _train_on_loss_and_logits():
    row = torch.arange(8.0)
    losses = {
        "loss": (lambda output: output["loss"], row),
        "logits": (lambda output: output["more"][0].sum(), row),
        "both": (lambda output: output["loss"] + output["more"][1][0].sum(), 3 * row),
    }
    for dtype, way, accumulation in itertools.product(("fp32", "fp16"), ("plain", "scale", "engine"), (1, 4)):
        for name, (loss_of, grad) in losses.items():
            engine = start(_LossAndLogits(), Setup(2, True, accumulation, dtype=dtype, optimizer=SGD))
            for _ in range(accumulation):
                output = engine(row)
                assert output["note"] == "kept"
                _backward_by(engine, way, loss_of(output))
                engine.step()
            master = state_of(engine)["weight.master"]
            assert torch.equal(master, 1 - grad), (dtype, way, accumulation, name)
            engine.destroy()


def test_a_plain_backward_is_scaled_once_whatever_outputs_the_loss_is_made_of():
    run_distributed(1, _train_on_loss_and_logits)


def _backward_beside_the_engine():
    for stage, offload in PLACES:
        engine = start(ExactModel(), Setup(stage, offload, dtype="fp16", optimizer=SGD))
        engine.module(exact_rows(0, total_numel(engine.module))).backward()
        with pytest.raises(
            RuntimeError, match=r"step: expected gradients of a loss times the loss scale \(8\)"
        ):
            engine.step()
        engine.zero_grad()
        train_exact(engine, 1)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_that_cannot_have_been_loss_scaled_is_refused_by_name(world):
    run_distributed(world, _backward_beside_the_engine)


def _mixed_callers():
    numel = total_numel(ExactModel())
    for (stage, offload), dtype in PLACES_AND_DTYPES:
        engine = start(ExactModel(), Setup(stage, offload, dtype=dtype, optimizer=SGD, bucket_numel=7))

        def train(engine=engine):
            for part, way in enumerate(("plain", "engine", "scale", "plain")):
                _backward_by(engine, way, _loss(engine, 0, part, 4) / 4)
            engine.step()

        _assert_updates_by(engine, exact_grad(0, numel), train, (stage, offload, dtype))
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_different_ways_to_call_backward_within_one_step_sum(world):
    run_distributed(world, _mixed_callers)
