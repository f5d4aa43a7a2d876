"""What is counted before anything is allocated, against what engines then hold: each buffer, to the byte."""

from unittest import mock

import pytest
import torch

from deepspeed.runtime.zero import parts
from deepspeed.runtime.zero.needs import memory_needs
from tests.distributed.harness import run_distributed
from tests.distributed.test_forms import FORMS, make_engine

SETTINGS = [
    {},
    {"gas": 2},
    {"gas": 2, "data_types": {"grad_accum_dtype": "bf16"}},
    *({"offload": forms} for forms in FORMS),
    *({"zero_optimization": {"stage": stage, "reduce_bucket_size": 1500}} for stage in (0, 1, 2)),
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": False}},
    {"bf16": {"enabled": False}},
    {"communication_data_type": "fp32"},
    *(
        {"optimizer": {"type": name, "params": {"lr": 1e-2, **params}}}
        for name, params in (
            ("SGD", {}),
            ("SGD", {"momentum": 0.9}),
            ("Adagrad", {}),
            ("Lion", {}),
            ("RMSprop", {}),
            ("Adadelta", {}),
            ("Adamax", {}),
            ("NAdam", {}),
        )
    ),
]


def _held(entries):
    return sorted(
        (one["name"], one["nbytes"], one["owner"], one["pinned"], one["device"], one["reserved_nbytes"])
        for one in entries
    )


def _needs_are_what_is_held():
    for settings in SETTINGS:
        with mock.patch.object(parts, "check_memory") as check:
            engine = make_engine(**settings)
        for _ in range(2 * engine.gradient_accumulation_steps()):
            inputs = torch.ones(2, 37, dtype=engine.module.first.weight.dtype)
            engine.backward(engine(inputs).float().pow(2).mean())
            engine.step()
        needs = memory_needs(*check.call_args.args[:2])
        assert _held(vars(one) for one in needs.held) == _held(engine.memory_report()), settings
        engine.destroy()
    return True


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_buffer_is_known_before_it_exists(world):
    run_distributed(world, _needs_are_what_is_held)
