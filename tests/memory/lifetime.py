"""Long lives in a process of its own: many steps, many engines. Prints RSS growth in bytes, one JSON line.

Run by test_lifetime.py: `python -m tests.memory.lifetime <what>`.
"""

import gc
import json
import sys

import torch

import deepspeed
from tests.memory import training
from tests.memory.job import Job, Meter

JOB = Job(layers=4)  # 4 Mi parameters: an engine is 56 MiB
LARGE = Job(layers=24)  # so large that what the C heap keeps does not count
ROUNDS = 20


def _step(engine):
    engine.backward(training.loss_of(engine, torch.ones(4, JOB.hidden)))
    engine.step()


def steps():
    """Growth after each of 40 steps of one engine, with every fifth skipped."""
    engine = training.make_engine(JOB, training.make_model(JOB))
    meter = Meter()
    for index in range(2 * ROUNDS):
        inputs = torch.full((4, JOB.hidden), float("inf") if index % 5 == 4 else 1.0)
        engine.backward(training.loss_of(engine, inputs))
        engine.step()
        meter.mark(str(index))
    assert engine.skipped_steps == 8
    return meter


def engines(end, job=JOB):
    """Growth after each of 20 times (initialize, 2 steps, end) over one model."""
    model = training.make_model(job)
    meter = Meter()
    for index in range(ROUNDS):
        engine = training.make_engine(job, model)
        _step(engine)
        _step(engine)
        held = meter.held_nbytes()
        assert held > 13 * job.numel, "the measurement itself sees the engine"
        end(engine)
        del engine
        meter.mark(str(index))
    return meter


def _drop(engine):
    """Leave the engine to the garbage collector."""


def evaluations_between_steps():
    """Growth after each of 20 rounds of a step, an evaluation, and the optimizer's state out and in."""
    engine = training.make_engine(JOB, training.make_model(JOB))
    engine.optimizer.state_dict()  # at its first state_dict torch imports its compiler, 65 MiB
    meter = Meter()
    for index in range(ROUNDS):
        _step(engine)
        engine.eval()
        with torch.no_grad():
            training.loss_of(engine, torch.ones(4, JOB.hidden))
        engine.train()
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        meter.mark(str(index))
    return meter


CASES = {
    "steps": steps,
    "destroyed": lambda: engines(deepspeed.DeepSpeedEngine.destroy, LARGE),
    "dropped": lambda: engines(_drop),
    "evaluations": evaluations_between_steps,
}


def main(what):
    """Print the growth of each round."""
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    training.warm_up(JOB)
    gc.collect()
    meter = CASES[what]()
    print(json.dumps([phase.rss for phase in meter.phases.values()]))


if __name__ == "__main__":
    main(sys.argv[1])
