"""What an engine tells about its run: times in the log, events in monitors, its configuration."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed.monitor import monitor as monitors
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer
from tests.small_engine import captured_log, ds_config, make_engine, run_micro_batch

pytestmark = pytest.mark.usefixtures("world_of_one")

PARTS = ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
GRAD = torch.linspace(-1, 1, 16)


@pytest.fixture(autouse=True)
def _work_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def names_of_times(line):
    return re.findall(r"\| (\w+): \d+\.\d\d", line)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_times_of_each_part_are_logged_for_micro_batches_and_steps(stage):
    engine = make_engine(
        ds_config(stage, stage > 0, wall_clock_breakdown=True, gradient_accumulation_steps=2)
    )
    with captured_log() as log:
        for _ in range(4):
            run_micro_batch(engine, GRAD)
    lines = [names_of_times(line) for line in log if line.startswith("[Rank 0] time (ms)")]
    micro = [f"{part}_microstep" for part in PARTS]
    assert lines == [micro, micro, PARTS] * 2
    assert engine.wall_clock_breakdown()
    assert all(not timer.started_ for timer in engine.timers.get_timers().values())


def test_a_backward_that_fails_leaves_no_timer_running():
    engine = make_engine(ds_config(wall_clock_breakdown=True))
    loss = engine(GRAD)
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    run_micro_batch(engine, GRAD)


def test_without_the_key_nothing_is_timed_and_nothing_waits(monkeypatch):
    engine = make_engine(ds_config())
    assert isinstance(engine.timers, NoopTimer)
    assert not engine.monitor.enabled
    accelerator = deepspeed.get_accelerator()
    monkeypatch.setattr(type(accelerator), "synchronize", lambda *args: pytest.fail("waits for the device"))
    with captured_log() as log:
        run_micro_batch(engine, GRAD)
    assert not [line for line in log if "time (ms)" in line]


def test_csv_files_hold_loss_rate_and_scale_over_samples():
    config = ds_config(
        dtype="fp16",
        train_micro_batch_size_per_gpu=3,
        gradient_accumulation_steps=2,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
        csv_monitor={"enabled": True, "output_path": "logs", "job_name": "job"},
        wall_clock_breakdown=True,
    )
    engine = make_engine(config)
    losses = []
    for _ in range(4):
        losses.append(run_micro_batch(engine, GRAD.abs().half()).item())
    rates = engine.get_lr()
    folder = Path("logs/job")
    times = ["forward", "backward", "backward_inner", "backward_allreduce", "step"]
    expected = ["loss_scale", "lr", "train_loss", *[f"elapsed_time_ms_{name}" for name in times]]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"Train_Samples_{n}.csv" for n in expected
    )
    head, *rows = (folder / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert head == "step,train_loss"
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    assert [row.split(",")[0] for row in rows] == ["6", "12"], "samples of all ranks"
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(means, rel=1e-6)
    assert (folder / "Train_Samples_lr.csv").read_text().splitlines()[-1] == f"12,{rates[0]!r}"
    assert (folder / "Train_Samples_loss_scale.csv").read_text() == "step,loss_scale\n6,8.0\n12,8.0\n"


def test_a_loss_that_the_client_divided_counts_whole():
    config = ds_config(gradient_accumulation_steps=2, csv_monitor={"enabled": True, "job_name": "job"})
    engine = make_engine(config)
    for _ in range(2):
        engine.backward(engine(GRAD.abs()) / 2, scale_wrt_gas=False)
        engine.step()
    last = Path("job/Train_Samples_train_loss.csv").read_text().splitlines()[-1]
    assert float(last.split(",")[1]) == pytest.approx(GRAD.abs().sum().item())


def test_a_script_writes_events_of_its_own_and_a_second_run_goes_on():
    config = get_monitor_config({"csv_monitor": {"enabled": True}, "train_batch_size": 1})
    for samples in (4, 8):
        MonitorMaster(config).write_events([("Eval/loss", torch.tensor(0.5), samples)])
    assert Path("DeepSpeedJobName/Eval_loss.csv").read_text() == "step,loss\n4,0.5\n8,0.5\n"


def test_only_rank_0_writes(monkeypatch):
    monkeypatch.setattr(monitors, "rank_for_logging", lambda: 1)
    master = MonitorMaster(get_monitor_config({"csv_monitor": {"enabled": True}}))
    master.write_events([("Eval/loss", 0.5, 4)])
    assert master.enabled
    assert not list(Path().iterdir())


def test_tensorboard_and_wandb_get_the_same_events(monkeypatch):
    """Through stand-ins of the packages, which record what they are called with."""
    calls = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *args: calls.append(("add_scalar", *args)), flush=lambda: calls.append(("flush",))
    )
    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = lambda log_dir: calls.append(("open", log_dir)) or writer
    wandb = types.ModuleType("wandb")
    wandb.run = None
    wandb.init = lambda **options: calls.append(("init", options))
    wandb.log = lambda values, step: calls.append(("log", values, step))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: name)
    config = {
        "tensorboard": {"enabled": True, "output_path": "tb", "job_name": "job"},
        "wandb": {"enabled": True, "project": "p", "team": "t", "group": "g"},
    }
    MonitorMaster(get_monitor_config(config)).write_events([("a/b", 1, 10), ("a/c", 2.5, 10)])
    assert calls == [
        ("open", "tb/job"),
        ("init", {"project": "p", "entity": "t", "group": "g"}),
        ("add_scalar", "a/b", 1.0, 10),
        ("add_scalar", "a/c", 2.5, 10),
        ("flush",),
        ("log", {"a/b": 1.0, "a/c": 2.5}, 10),
    ]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named_on_every_rank(package, monkeypatch):
    monkeypatch.setattr(monitors, "rank_for_logging", lambda: 1)
    monkeypatch.setattr(monitors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RuntimeError, match=rf"{package}\.enabled: expected the package .* pip install {package}"
    ):
        make_engine(ds_config(**{package: {"enabled": True}}))


def test_dump_state_shows_the_whole_configuration():
    with captured_log() as log:
        make_engine(ds_config(dump_state=True))
    (line,) = [line for line in log if line.startswith("configuration: ")]
    shown = json.loads(line.removeprefix("configuration: "))
    assert shown["zero_optimization"]["stage"] == 2
    assert shown["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert shown["gradient_clipping"] == 0.0


def test_timers_sum_up_and_say_how_they_are_misused():
    timers = SynchronizedWallClockTimer()
    timer = timers("forward")
    assert timers("forward") is timer
    for _ in range(2):
        timer.start()
        timer.stop()
    total = timer.elapsed(reset=False)
    assert timer.mean() == total / 2 > 0
    assert timers.get_mean(["forward", "never"]) == {"forward": total / 2}
    assert timer.elapsed() == 0.0
    with pytest.raises(RuntimeError, match="forward: expected a running timer"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="forward: expected a timer that is stopped"):
        timer.start()


def test_throughput_leaves_the_first_steps_out():
    lines = []
    timer = ThroughputTimer(
        types.SimpleNamespace(enabled=True, synchronized=True),
        8,
        1,
        steps_per_output=2,
        logging_fn=lines.append,
    )
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(4):
        for is_last in (False, True):
            timer.start()
            timer.stop(global_step=is_last)
    assert (timer.global_step_count, timer.micro_step_count) == (4, 8)
    assert timer.avg_samples_per_sec() == 8 * 3 / timer.total_elapsed_time
    assert [line.split(",")[0] for line in lines] == [
        "epoch=0/micro_step=4/global_step=2", "epoch=0/micro_step=8/global_step=4",
    ]  # fmt: skip
