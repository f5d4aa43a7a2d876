"""What is predicted for a number of parameters, against what the machine loses: within 2 %."""

import pytest
import torch

from deepspeed.runtime.zero.forms import MasterForm, MomentForm, StateForms
from deepspeed.runtime.zero.needs import Facts, memory_needs
from deepspeed.runtime.zero.settings import Accumulation, ZeroSettings
from tests.memory.job import Job, run_job

BUCKET = 1 << 21  # two layers of the job


@pytest.mark.parametrize(
    "gas, forms",
    [(2, StateForms()), (1, StateForms(MasterForm.bf16_residual, MomentForm.int8))],
    ids=["16 bytes", "6 bytes"],
)
def test_prediction_and_measurement_agree_within_2_percent(gas, forms):
    zero = {"stage": 2, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    keys = {"master_weights": forms.master.value, "optimizer_states": forms.moments.value}
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False, **keys}
    job = Job(layers=64, gas=gas, steps=2, extra={"zero_optimization": zero})
    settings = ZeroSettings(
        stage=2,
        device=torch.device("cpu"),
        offload=True,
        reduce_bucket_numel=BUCKET,
        allgather_bucket_numel=BUCKET,
        accumulation=Accumulation(keeps_16bit=gas == 1),
        forms=forms,
    )
    needs = memory_needs(settings, Facts.of_numel(job.numel, 1, settings))
    (result,) = run_job(job)
    held = sum(entry.nbytes for entry in needs.held)
    assert sum(entry["nbytes"] for entry in result.ledger) == pytest.approx(held, rel=0.001)
    assert result["step2"].tree == pytest.approx(needs.nbytes(on_host=True), rel=0.02)
