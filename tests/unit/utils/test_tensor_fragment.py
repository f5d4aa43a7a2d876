"""safe_get_* and safe_set_* reach the optimizer through the parameter."""

import weakref

import pytest
import torch

from deepspeed import utils


class Accessor:
    """Records what it is asked, and answers."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return torch.full((2,), 7.0)

        return call


@pytest.fixture
def accessor():
    return Accessor()


@pytest.fixture
def param(accessor):
    made = torch.nn.Parameter(torch.zeros(2))
    made._ds_accessor = weakref.ref(accessor)
    return made


VALUE = torch.ones(2)


def test_getters_ask_the_optimizer(param, accessor):
    for result in (
        utils.safe_get_full_fp32_param(param),
        utils.safe_get_full_grad(param),
        utils.safe_get_full_optimizer_state(param, "exp_avg"),
    ):
        assert result.tolist() == [7.0, 7.0]
    assert [call[0] for call in accessor.calls] == [
        "get_full_fp32_param",
        "get_full_grad",
        "get_full_optimizer_state",
    ]
    assert accessor.calls[2][1:] == (param, "exp_avg")


def test_setters_hand_the_value_over(param, accessor):
    utils.safe_set_full_fp32_param(param, VALUE)
    utils.safe_set_full_grad(param, VALUE)
    utils.safe_set_full_optimizer_state(param, VALUE, "exp_avg_sq")
    assert [call[0] for call in accessor.calls] == [
        "set_full_fp32_param",
        "set_full_grad",
        "set_full_optimizer_state",
    ]
    assert all(call[2] is VALUE for call in accessor.calls)
    assert accessor.calls[2][3] == "exp_avg_sq"


def test_without_an_engine_getters_give_what_the_parameter_has():
    plain = torch.nn.Parameter(torch.zeros(2))
    assert utils.safe_get_full_fp32_param(plain) is None
    assert utils.safe_get_full_optimizer_state(plain, "exp_avg") is None
    assert utils.safe_get_full_grad(plain) is None
    plain.grad = VALUE.clone()
    assert utils.safe_get_full_grad(plain) is plain.grad


def test_once_the_optimizer_is_gone_a_parameter_is_an_ordinary_one():
    param = torch.nn.Parameter(torch.zeros(2))
    param._ds_accessor = weakref.ref(Accessor())
    assert utils.safe_get_full_fp32_param(param) is None
    with pytest.raises(RuntimeError, match="param: expected a parameter of a live DeepSpeed engine"):
        utils.safe_set_full_fp32_param(param, VALUE)


def test_a_value_of_another_shape_is_refused(param):
    with pytest.raises(ValueError, match=r"value: expected shape \(2,\), got \(3,\)"):
        utils.safe_set_full_grad(param, torch.ones(3))


def test_local_access_belongs_to_stage_3(param):
    assert utils.safe_get_local_fp32_param(param) is None
    assert utils.safe_get_local_grad(param) is None
    assert utils.safe_get_local_optimizer_state(param, "exp_avg") is None
    for refused in (
        lambda: utils.safe_set_local_fp32_param(param, VALUE),
        lambda: utils.safe_set_local_grad(param, VALUE),
        lambda: utils.safe_set_local_optimizer_state(param, VALUE, "exp_avg"),
    ):
        with pytest.raises(NotImplementedError, match="safe_set_local_.*Use safe_set_full_"):
            refused()
