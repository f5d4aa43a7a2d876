"""What clients document trains without an edit; what is wrong is named on every rank, and none hangs."""

import copy

import pytest

from tests.clients.launching import clients, run_job
from tests.clients.trainer_settings import arguments, auto_config
from tests.unit.config.presets import PRESETS

pytestmark = clients("accelerate", "transformers")

PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
AUTO = auto_config(2, offload=True)
CLIENTS = {"accelerate": PLAIN, "Trainer": AUTO}
OFFLOAD = "zero_optimization.offload_optimizer"
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
# Client, path, value, and what each rank must be told: key, value, remedy.
WRONG = [
    ("accelerate", "zero_optimization.stage", 3, "zero_optimization.stage: expected ", "got 3. Use stage 2"),
    ("Trainer", "zero_optimization.stage", 3, "zero_optimization.stage: expected ", "got 3. Use stage 2"),
    ("accelerate", OFFLOAD, {"device": "nvme", "nvme_path": "/x"}, f"{OFFLOAD}.device: ", "got 'nvme'. NVMe"),
    ("Trainer", OFFLOAD, {"device": "nvme", "nvme_path": "/x"}, f"{OFFLOAD}.device: ", "got 'nvme'. NVMe"),
    ("accelerate", f"{OFFLOAD}.ratio", 0.5, f"{OFFLOAD}.ratio: expected 1.0", "got 0.5. The whole"),
    # The clients themselves name an "auto" that they cannot fill.
    ("accelerate", "fp16", {"enabled": True, "loss_scale": "auto"}, "fp16.loss_scale", "without `auto`"),
    ("Trainer", "fp16.loss_scale", "auto", "fp16.loss_scale", "without `auto`"),
    (
        "accelerate",
        "scheduler",
        WARMUP,
        "scheduler.type: expected an optimizer",
        "got 'WarmupLR' without one.",
    ),
    ("accelerate", "train_batch_size", 7, "train_batch_size: expected ", "got 7. Change one of the three"),
    (
        "Trainer",
        "train_batch_size",
        7,
        "ds train_batch_size=7",
        "set these DeepSpeed config values to 'auto'",
    ),
    (
        "accelerate",
        "train_micro_batch_size_per_gpu",
        -1,
        "train_micro_batch_size_per_gpu: ",
        "got -1. Correct",
    ),
    ("accelerate", "zero_optimisation", {}, "zero_optimisation: ", "mean 'zero_optimization'?"),
    ("Trainer", "gradient_acumulation_steps", 2, "gradient_acumulation_steps: ", "'gradient_accumulation_"),
    ("accelerate", "gradient_clipping", "yes", "gradient_clipping: expected ", "got 'yes'. Use 0.0"),
    ("accelerate", "optimizer.params.lr", "1e-3", "optimizer.params.lr: expected ", "got '1e-3'. Correct"),
    ("accelerate", "optimizer.params.rate", 1, "optimizer.params.rate: expected ", "the value 1. Correct"),
    ("accelerate", "optimizer.type", "OneBitAdam", "optimizer.type: ", "got OneBitAdam: it compresses"),
    ("Trainer", "scheduler.type", "Cosine", "scheduler.type: expected one of ", "got 'Cosine'. Pass other"),
    ("accelerate", "tensor_parallel", {"autotp_size": 2}, "tensor_parallel.autotp_size: ", "got 2. This"),
    ("accelerate", "flops_profiler", {"enabled": True}, "flops_profiler.enabled: ", "got True. This feature"),
]


def changed(config, path, value):
    """A copy of a configuration with one value changed; a schedule comes without its optimizer."""
    config = node = copy.deepcopy(config)
    *sections, key = path.split(".")
    for section in sections:
        node = node[section]
    node[key] = value
    if key == "scheduler":
        del config["optimizer"]
    return config


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each rank was told, by the place in WRONG; at the end right settings, in the same processes."""
    task = {
        str(index): [client, changed(CLIENTS[client], path, value)]
        for index, (client, path, value, *_) in enumerate(WRONG)
    }
    task |= {client: [client, config] for client, config in CLIENTS.items()}
    return run_job("wrong_settings_job.py", task, tmp_path_factory.mktemp("wrong")).check()


@pytest.mark.parametrize("index", range(len(WRONG)), ids=[f"{case[0]} {case[1]}" for case in WRONG])
def test_every_rank_is_told_key_value_and_remedy(index, told):
    *_, key, value_and_remedy = WRONG[index]
    for report in told:
        text = report[str(index)]
        assert text is not None and key in text and value_and_remedy in text, text


def test_right_settings_work_after_all_the_wrong_ones(told):
    for report in told:
        assert {client: report[client] for client in CLIENTS} == dict.fromkeys(CLIENTS)


@pytest.fixture(scope="module")
def by_preset(tmp_path_factory):
    """Every preset as it stands under Trainer, in both precisions, for two steps."""
    runs = []
    for name, preset in PRESETS.items():
        fixed = preset["gradient_accumulation_steps"]
        accumulation = 2 if fixed == "auto" else fixed
        for precision in ({"bf16": True}, {"bf16": False, "fp16": True}):
            settings = arguments(**precision, max_steps=2, gradient_accumulation_steps=accumulation)
            runs.append({"name": f"{name} {[*precision][-1]}", "deepspeed": preset, "arguments": settings})
    return run_job("trainer_job.py", runs, tmp_path_factory.mktemp("presets")).check()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_documented_preset_trains_without_an_edit(name, precision, by_preset):
    for report in by_preset:
        run = report[f"{name} {precision}"]
        assert run["class"] == "DeepSpeedEngine" and len(run["loss"]) == 2
        assert {"master[0]", "gradient[0]"} <= {entry["name"] for entry in run["buffers"]}
        assert all(4 < loss < 6 for loss in run["loss"].values())
