"""The returned optimizer as clients use it: wrapped, walked, stepped without the engine."""

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from tests.small_engine import CASES, ds_config, full_weights, make_engine, run_micro_batch

pytestmark = pytest.mark.usefixtures("world_of_one")

NUMEL = 12
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


class Wrapper:
    """As Fabric wraps: the class of what is wrapped is a base, the object answers what is missing."""

    def __init__(self, wrapped):
        self.wrapped = wrapped
        self.__class__ = type("Fabric" + type(wrapped).__name__, (type(self), type(wrapped)), {})

    @property
    def optimizer(self):
        return self.wrapped

    def state_dict(self):
        return self.wrapped.state_dict()

    def step(self, closure=None):
        return self.wrapped.step(closure)

    def __getattr__(self, name):
        return getattr(self.__dict__["wrapped"], name)


@EVERY_CASE
def test_a_wrapper_that_takes_its_class_works_and_shadows_nothing(case):
    engine = make_engine(case.config(), NUMEL)
    optimizer = engine.optimizer
    wrapper = Wrapper(optimizer)
    assert isinstance(wrapper, DeepSpeedOptimizer) and isinstance(wrapper, type(optimizer))
    for grad in (torch.ones(NUMEL), torch.full((NUMEL,), float("inf"))):
        wrapper.zero_grad()
        engine.backward(engine(grad))
        wrapper.step()
    assert wrapper.overflow is optimizer.overflow is True
    assert wrapper.skipped_steps == optimizer.skipped_steps == 1
    assert wrapper.param_groups is optimizer.param_groups
    assert wrapper.defaults is optimizer.defaults
    assert wrapper.state is optimizer.state
    wrapper.param_groups = [dict(group, lr=0.25) for group in wrapper.param_groups]
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.25
    wrapper.load_state_dict(wrapper.state_dict())
    assert set(wrapper.__dict__) == {"wrapped"}, "no attribute landed on the wrapper"


@EVERY_CASE
def test_stepping_the_optimizer_without_the_engine_trains_alike(case):
    """Fabric bypasses the engine's step."""
    engine, reference = make_engine(case.config(), NUMEL), make_engine(case.config(), NUMEL)
    for index in range(3):
        grad = torch.linspace(-1, 1, NUMEL) * (index + 1)
        engine.backward(engine(grad))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        run_micro_batch(reference, grad)
    assert full_weights(engine) == full_weights(reference)


@EVERY_CASE
def test_overflow_is_there_when_clients_wrap_the_optimizer(case):
    optimizer = make_engine(case.config(), NUMEL).optimizer
    assert hasattr(optimizer, "overflow") and optimizer.overflow is False


@EVERY_CASE
def test_state_may_be_walked_moved_and_put_back_as_lightning_does_at_teardown(case):
    engine, reference = make_engine(case.config(), NUMEL), make_engine(case.config(), NUMEL)
    for index in range(2):
        for one in (engine, reference):
            run_micro_batch(one, torch.linspace(-1, 1, NUMEL) * (index + 1))
        for param, entries in engine.optimizer.state.items():
            moved = {
                key: value.to("cpu") if isinstance(value, torch.Tensor) else value
                for key, value in entries.items()
            }
            engine.optimizer.state[param] = moved
        assert len(engine.optimizer.state) == 1
    assert full_weights(engine) == full_weights(reference)


def test_what_torch_optimizers_offer_is_there_and_live():
    engine = make_engine(ds_config(), NUMEL)
    optimizer = engine.optimizer
    assert optimizer.defaults["lr"] == 0.1 and set(optimizer.defaults) >= {"betas", "eps", "weight_decay"}
    assert not hasattr(optimizer, "consolidate_state_dict")
    assert not hasattr(optimizer.optimizer, "train") and not hasattr(optimizer, "eval")
    optimizer.param_groups[0]["lr"] = 0.0
    before = full_weights(engine)
    run_micro_batch(engine, torch.ones(NUMEL))
    assert full_weights(engine) == before


@EVERY_CASE
def test_zero_grad_between_forward_and_the_first_backward_changes_nothing(case):
    engine, reference = make_engine(case.config(), NUMEL), make_engine(case.config(), NUMEL)
    for index in range(3):
        grad = torch.linspace(-1, 1, NUMEL) * (index + 1)
        loss = engine(grad)
        engine.optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        run_micro_batch(reference, grad)
    assert full_weights(engine) == full_weights(reference)


@EVERY_CASE
def test_state_dict_of_the_same_shard_restores_exactly(case):
    engine, other = make_engine(case.config(), NUMEL), make_engine(case.config(), NUMEL)
    for index in range(2):
        run_micro_batch(engine, torch.linspace(-1, 1, NUMEL) * (index + 1))
    # A copy, as saving and loading makes one: state_dict itself copies nothing.
    other.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    for one in (engine, other):
        run_micro_batch(one, torch.linspace(-2, 1, NUMEL))
    assert full_weights(engine) == full_weights(other)
    assert torch.equal(engine.module.parts[0], other.module.parts[0])


@EVERY_CASE
def test_a_loaded_state_lands_in_the_buffers_that_are_there(case):
    """Host buffers are counted and kept out of forked children; a state beside them would be neither."""
    engine, other = make_engine(case.config(), NUMEL), make_engine(case.config(), NUMEL)
    for one in (engine, other):
        run_micro_batch(one, torch.ones(NUMEL))
    if case.offload:
        before = _addresses(other.optimizer)
        other.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        assert _addresses(other.optimizer) == before
    assert engine.optimizer.state_dict()["single_partition_of_fp32_groups"][0].data_ptr() == (
        engine.optimizer.single_partition_of_fp32_groups[0].data_ptr()
    ), "no copy in saving either"


@EVERY_CASE
def test_group_dictionaries_are_still_the_users_own_after_loading(case):
    """Schedules of clients write the rate into the dictionaries that they know."""
    engine = make_engine(case.config(), NUMEL)
    groups = list(engine.optimizer.param_groups)
    saved = copy.deepcopy(engine.optimizer.state_dict())
    saved["base_optimizer_state"]["param_groups"][0]["lr"] = 0.5
    engine.optimizer.load_state_dict(saved)
    assert engine.optimizer.param_groups[0] is groups[0] and groups[0]["lr"] == 0.5
    groups[0]["lr"] = 0.0
    before = full_weights(engine)
    run_micro_batch(engine, torch.ones(NUMEL))
    assert full_weights(engine) == before


def _addresses(optimizer):
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    return [tensor.data_ptr() for tensor in tensors + optimizer.single_partition_of_fp32_groups]


@EVERY_CASE
def test_torch_schedules_do_not_complain_about_the_order_of_steps(case, recwarn):
    engine = make_engine(
        case.config(), NUMEL, lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1)
    )
    run_micro_batch(engine, torch.ones(NUMEL))
    assert engine.get_lr()[0] == pytest.approx(0.01)
    assert not [str(warning.message) for warning in recwarn if "lr_scheduler.step()" in str(warning.message)]


STATES = [
    OffloadStateTypeEnum.optim_states,
    OffloadStateTypeEnum.contiguous_grad_buffer,
    OffloadStateTypeEnum.hp_params,
    OffloadStateTypeEnum.lp_grads,
]


@EVERY_CASE
def test_states_moved_to_the_host_and_back_train_on_as_if_never_moved(case):
    """OpenRLHF's sleep. With offload the states are on the host and the calls change nothing."""
    engine, reference = make_engine(case.config(), NUMEL), make_engine(case.config(), NUMEL)
    for index in range(3):
        for one in (engine, reference):
            run_micro_batch(one, torch.linspace(-1, 1, NUMEL) * (index + 1))
        loss = engine(torch.ones(NUMEL))
        engine.optimizer.offload_states(include=STATES, device=OffloadDeviceEnum.cpu, non_blocking=True)
        if not case.offload:
            with pytest.raises(
                RuntimeError, match=r"^backward: expected .* Call engine.reload_states\(\) first."
            ):
                engine.backward(loss)
            with pytest.raises(
                RuntimeError, match=r"^step: expected .* Call engine.reload_states\(\) first."
            ):
                engine.optimizer.step()
        engine.empty_partition_cache()
        engine.reload_states(non_blocking=True)
    engine.offload_states()
    engine.reload_states()
    assert full_weights(engine) == full_weights(reference)


def test_states_that_cannot_be_moved_are_refused():
    engine = make_engine(ds_config(), NUMEL)
    with pytest.raises(
        NotImplementedError, match=r"^include: expected states of the optimizer, got lp_params"
    ):
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
    with pytest.raises(ValueError, match=r'^device: expected "cpu", got "nvme"'):
        engine.offload_states(device=OffloadDeviceEnum.nvme)


@EVERY_CASE
def test_nothing_holds_the_masters_once_the_engine_is_destroyed(case):
    engine = make_engine(case.config(), NUMEL)
    optimizer = engine.optimizer
    run_micro_batch(engine, torch.ones(NUMEL))
    masters = StorageWeakRef(optimizer.single_partition_of_fp32_groups[0].untyped_storage())
    assert not masters.expired()
    engine.destroy()
    assert masters.expired(), "although a client still holds the optimizer"
