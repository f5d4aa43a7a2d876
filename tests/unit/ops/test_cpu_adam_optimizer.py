"""DeepSpeedCPUAdam as a torch optimizer: parity with torch, groups, state, resume, errors."""

import copy
import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adam.cpu_adam import AdamSlice
from tests.unit.ops.reference import FLOATS

HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def make_params(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer, steps, first=0):
    for step in range(first, first + steps):
        set_gradients([param for group in optimizer.param_groups for param in group["params"]], step)
        optimizer.step()


def ulps_apart(actual, expected, largest):
    """Returns the greatest distance in units of the last place, at the size of the largest operand.

    A subtraction that cancels leaves a result whose own last place is finer than its operands' roundings.
    """
    if not actual.numel():
        return 0.0
    spacing = torch.nextafter(largest, torch.full_like(largest, float("inf"))) - largest
    return ((actual - expected).abs() / spacing).max().item()


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_ten_steps_stay_within_two_ulp_a_step_of_torch(adamw_mode):
    shapes = [(3, 5), (1,), (1024,), (0,), (257, 129), (7, 1, 2)]
    ours, theirs = make_params(shapes), make_params(shapes)
    optimizer = DeepSpeedCPUAdam(ours, adamw_mode=adamw_mode, **HYPER)
    reference = (torch.optim.AdamW if adamw_mode else torch.optim.Adam)(theirs, **HYPER)
    largest = [[torch.zeros_like(p) for p in theirs] for _ in range(3)]
    for step in range(10):
        for params in (ours, theirs):
            set_gradients(params, step)
        for peak, p in zip(largest[0], theirs, strict=True):
            torch.maximum(peak, p.detach().abs(), out=peak)
        optimizer.step()
        reference.step()
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            pairs = [(a.detach(), b.detach())]
            pairs += [
                (optimizer.state[a][name], reference.state[b][name]) for name in ("exp_avg", "exp_avg_sq")
            ]
            for peaks, (actual, expected) in zip(largest, pairs, strict=True):
                torch.maximum(peaks[i], expected.abs(), out=peaks[i])
                assert ulps_apart(actual, expected, peaks[i]) <= 2 * (step + 1)


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 15, 16, 17, 1023, 1024, 1025])
def test_any_size_of_any_type_matches_an_fp32_step_rounded(numel, dtype, adamw_mode):
    """One step of the same fp32 arithmetic, rounded once: one spacing where a rounding flips."""
    (param,) = make_params([(numel,)], dtype)
    (wide,) = make_params([(numel,)], dtype)
    wide = torch.nn.Parameter(wide.detach().float())
    optimizer = DeepSpeedCPUAdam([param], adamw_mode=adamw_mode, **HYPER)
    reference = (torch.optim.AdamW if adamw_mode else torch.optim.Adam)([wide], **HYPER)
    set_gradients([param], 0)
    wide.grad = param.grad.float()
    optimizer.step()
    reference.step()
    assert torch.allclose(param.float(), wide, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("grad_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_may_have_another_type_than_the_parameter(dtype, grad_dtype):
    """Whole numbers below 256 are exact in all types: the step must not depend on the gradient's type."""
    values = torch.arange(-50.0, 50.0)
    results = []
    for gradient in (values, values.to(grad_dtype)):
        param = torch.nn.Parameter(torch.ones(100, dtype=dtype))
        optimizer = DeepSpeedCPUAdam([param])
        state_of = optimizer.state
        optimizer.init_state(param)
        state_of[param]["step"] = 1
        optimizer.step_slice(optimizer.param_groups[0], 1, slice_of(optimizer, param, 0, 100, gradient), 1.0)
        results.append((param.detach(), state_of[param]["exp_avg"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_16_bit_moments_follow_the_parameters_type_when_asked():
    (param,) = make_params([(100,)], torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([param], fp32_optimizer_states=False)
    train(optimizer, 2)
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[param]["exp_avg_sq"].dtype == torch.bfloat16


def slice_of(optimizer, param, start, end, grad, out=None):
    state = optimizer.state[param]
    moments = (state[name][start:end] for name in ("exp_avg", "exp_avg_sq"))
    return AdamSlice(param.data[start:end], grad, *moments, out[start:end] if out is not None else None)


def test_slices_of_a_flat_parameter_make_the_same_step():
    whole, sliced = make_params([(10_007,)]), make_params([(10_007,)])
    optimizer, other = DeepSpeedCPUAdam(whole, **HYPER), DeepSpeedCPUAdam(sliced, **HYPER)
    set_gradients(whole, 0)
    optimizer.step()
    set_gradients(sliced, 0)
    param, out = sliced[0], torch.empty(10_007, dtype=torch.bfloat16)
    made = []

    def allocate(name, numel, dtype):
        made.append((name, numel, dtype))
        return torch.full((numel,), float("nan"), dtype=dtype)

    other.init_state(param, allocate)
    other.state[param]["step"] = 1
    for start in range(0, 10_007, 1_009):
        end = min(start + 1_009, 10_007)
        part = slice_of(other, param, start, end, param.grad[start:end] * 8, out)
        other.step_slice(other.param_groups[0], 1, part, 1 / 8)
    assert torch.equal(param, whole[0])
    assert torch.equal(out, param.detach().bfloat16())
    assert made == [("exp_avg", 10_007, torch.float32), ("exp_avg_sq", 10_007, torch.float32)]
    assert other.state[param]["step"] == 1, "the caller counts the step, once for all slices"


@pytest.mark.parametrize("threads", [1, 3])
def test_queued_slices_make_the_same_step_in_any_thread(threads):
    whole, sliced = make_params([(300_007,)]), make_params([(300_007,)])
    optimizer, other = DeepSpeedCPUAdam(whole, **HYPER), DeepSpeedCPUAdam(sliced, **HYPER)
    param, out = sliced[0], torch.empty(300_007, dtype=torch.bfloat16)
    other.init_state(param)
    queue = other.make_queue(threads)
    bounds = [0, 0, 1, 17_000, 17_000, 120_003, 300_007]
    for step in range(1, 4):
        set_gradients(whole, step)
        set_gradients(sliced, step)
        optimizer.step()
        waits = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            part = slice_of(other, param, start, end, param.grad[start:end] * 8, out)
            waits.append(other.submit_slice(queue, other.param_groups[0], step, part, 1 / 8))
        for wait in reversed(waits):
            wait()
        assert torch.equal(param, whole[0])
        assert torch.equal(out, param.detach().bfloat16())


def test_a_queue_that_is_dropped_computes_what_it_was_given():
    param = make_params([(500_000,)])[0]
    expected = param.detach().clone()
    optimizer = DeepSpeedCPUAdam([param], **HYPER)
    optimizer.init_state(param)
    optimizer.state[param]["step"] = 1
    gradient = torch.ones(500_000)
    queue = optimizer.make_queue(2)
    part = slice_of(optimizer, param, 0, 500_000, gradient)
    optimizer.submit_slice(queue, optimizer.param_groups[0], 1, part, 1.0)
    del queue
    assert (param != expected).all()


def test_a_forked_child_neither_waits_for_a_queues_threads_nor_uses_them():
    """The child has none of them: joining them, or waiting for a step of theirs, would take for ever."""
    param = make_params([(100,)])[0]
    optimizer = DeepSpeedCPUAdam([param], **HYPER)
    optimizer.init_state(param)
    queue = optimizer.make_queue(2)
    part = slice_of(optimizer, param, 0, 100, torch.ones(100))
    child = os.fork()
    if child == 0:
        try:
            optimizer.submit_slice(queue, optimizer.param_groups[0], 1, part, 1.0)
        except RuntimeError as error:
            refused = "forked child" in str(error)
            del queue
            os._exit(0 if refused else 1)
        os._exit(2)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_every_group_and_parameter_has_its_own_step_count():
    """The second group joins two steps late: its bias correction must start at 1, as torch's does."""
    results = []
    for cls in (DeepSpeedCPUAdam, torch.optim.AdamW):
        params = make_params([(40,), (50,), (60,)])
        optimizer = cls([{"params": [params[0]]}, {"params": [params[1]], "lr": 1e-1}], **HYPER)
        train(optimizer, 2)
        optimizer.add_param_group({"params": [params[2]], "weight_decay": 0.0})
        train(optimizer, 3, first=2)
        results.append(params)
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)  # 5 steps of 2 ulp


def test_identical_parameters_stay_identical():
    first, second = make_params([(100,)])[0], make_params([(100,)])[0]
    optimizer = DeepSpeedCPUAdam([first, second], **HYPER)
    for step in range(10):
        set_gradients([first], step)
        set_gradients([second], step)
        optimizer.step()
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", FLOATS)
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(dtype, tmp_path):
    straight = make_params([(33, 3), (5,)], dtype)
    optimizer = DeepSpeedCPUAdam(straight, **HYPER)
    train(optimizer, 3)
    torch.save({"params": straight, "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(optimizer, 3, first=3)

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = [torch.nn.Parameter(param.detach()) for param in saved["params"]]
    other = DeepSpeedCPUAdam(resumed, **HYPER)
    other.load_state_dict(saved["optimizer"])
    train(other, 3, first=3)
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer.state[a].items():
            loaded = other.state[b][name]
            assert type(loaded) is type(value)
            assert torch.equal(torch.as_tensor(loaded), torch.as_tensor(value))
            assert name == "step" or loaded.dtype == value.dtype


def test_state_of_torch_adamw_can_be_loaded():
    theirs = make_params([(30,)])
    reference = torch.optim.AdamW(theirs, **HYPER)
    train(reference, 3)
    ours = [torch.nn.Parameter(param.detach().clone()) for param in theirs]
    optimizer = DeepSpeedCPUAdam(ours)
    optimizer.load_state_dict(reference.state_dict())
    train(reference, 1, first=3)
    train(optimizer, 1, first=3)
    assert optimizer.state[ours[0]]["step"] == 4
    assert torch.allclose(ours[0], theirs[0], rtol=3e-7, atol=1e-8)  # one step of 2 ulp


def test_copies_and_pickles_train_on_alike():
    (param,) = make_params([(20,)])
    optimizer = DeepSpeedCPUAdam([param], adamw_mode=False, **HYPER)
    train(optimizer, 1)
    twin = copy.deepcopy(optimizer)
    train(optimizer, 1, first=1)
    train(twin, 1, first=1)
    assert torch.equal(twin.param_groups[0]["params"][0], param)


def test_param_group_dicts_stay_the_callers_own_and_are_read_live():
    params = make_params([(4,), (4,)])
    groups = [{"params": [params[0]], "lr": 0.1}, {"params": [params[1]]}]
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-3, adamw_mode=True)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    groups[0]["lr"] = 0.0
    before = params[0].detach().clone()
    train(optimizer, 1)
    assert torch.equal(params[0], before)


def test_groups_of_a_torch_optimizer_are_accepted_with_their_extra_keys():
    source = torch.optim.AdamW(make_params([(4,)]), lr=0.1, betas=(0.5, 0.6), eps=1e-3)
    optimizer = DeepSpeedCPUAdam(source.param_groups, lr=0.1, weight_decay=0.01, adamw_mode=True)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    train(optimizer, 1)


@pytest.mark.parametrize("cls", [DeepSpeedCPUAdam, FusedAdam])
def test_both_spellings_of_the_mode_work_and_decay_defaults_to_zero(cls):
    for spelling in ("adamw_mode", "adam_w_mode"):
        for mode, reference_cls in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
            ours, theirs = make_params([(50,)]), make_params([(50,)])
            train(cls(ours, weight_decay=0.1, **{spelling: mode}), 5)
            train(reference_cls(theirs, weight_decay=0.1), 5)
            assert torch.allclose(ours[0], theirs[0], rtol=1.2e-6, atol=1e-7)  # 5 steps of 2 ulp
    assert cls(make_params([(2,)])).param_groups[0]["weight_decay"] == 0


@pytest.mark.parametrize(
    "param",
    [
        torch.nn.Parameter(torch.zeros(3, 5, device="meta")),
        torch.nn.Parameter(torch.zeros(3, 5).t()),
        torch.nn.Parameter(torch.zeros(8)[::2]),
    ],
)
def test_parameter_off_the_host_or_not_contiguous_is_an_error_and_changes_nothing(param):
    optimizer = DeepSpeedCPUAdam([param])
    param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match="^params: expected contiguous CPU tensors, got shape"):
        optimizer.step()
    assert param not in optimizer.state or not optimizer.state[param]


def test_unsupported_settings_are_refused_by_name():
    for key in ("amsgrad", "maximize"):
        with pytest.raises(NotImplementedError, match=f"^{key}: expected False, got True"):
            DeepSpeedCPUAdam([{"params": make_params([(2,)]), key: True}])
    for key, value in (("lr", -1.0), ("eps", -1e-8), ("weight_decay", -0.1), ("betas", (1.0, 0.9))):
        with pytest.raises(ValueError, match=f"^{key}: expected "):
            DeepSpeedCPUAdam(make_params([(2,)]), **{key: value})


def test_parameter_without_gradient_gets_no_state():
    params = make_params([(4,), (4,)])
    optimizer = DeepSpeedCPUAdam(params)
    params[0].grad = torch.ones(4)
    optimizer.step()
    assert set(optimizer.state) == {params[0]}


def test_closure_is_called_with_gradients_on_and_its_loss_returned():
    (param,) = make_params([(4,)])
    optimizer = DeepSpeedCPUAdam([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad


def test_making_and_dropping_optimizers_keeps_no_memory():
    """Each one holds 8 MB of moments: 20 of them kept would be 160 MB. The C heap grows to its size first."""

    def rss_kb():
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    (param,) = make_params([(1_000_000,)])
    before = 0
    for index in range(30):
        optimizer = DeepSpeedCPUAdam([param])
        param.grad = torch.ones_like(param)
        optimizer.step()
        del optimizer
        gc.collect()
        if index == 9:
            before = rss_kb()
    assert rss_kb() - before < 16_000


def test_stocks_entry_points_keep_a_mode_under_an_id(op):
    for mode, reference_cls in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        (theirs,) = make_params([(40,)])
        reference = reference_cls([theirs], **HYPER)
        ours = theirs.detach().clone()
        moments = torch.zeros(40), torch.zeros(40)
        lr, (beta1, beta2), eps, decay = HYPER["lr"], HYPER["betas"], HYPER["eps"], HYPER["weight_decay"]
        op.create_adam(71, lr, beta1, beta2, eps, decay, mode, False)
        for step in range(3):
            set_gradients([theirs], step)
            op.adam_update(71, step + 1, lr, beta1, beta2, eps, decay, True, ours, theirs.grad, *moments)
            reference.step()
        assert torch.allclose(ours, theirs, rtol=8e-7, atol=1e-7)  # 3 steps of 2 ulp
        op.destroy_adam(71)
    with pytest.raises(RuntimeError, match="^optimizer_id: expected an id given to create_adam, got 71"):
        op.adam_update(71, 1, 0.1, 0.9, 0.99, 1e-8, 0.0, True, ours, ours, *moments)
