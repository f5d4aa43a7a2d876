"""What this package does not have is accepted while off, and refused by its full path when on."""

import pytest

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_features import FEATURES
from deepspeed.runtime.config_refusals import REFUSED_KEYS
from deepspeed.runtime.config_settings import Settings
from deepspeed.runtime.config_tree import paths_of

SWITCHED_ON = [
    ("amp.enabled", {"amp": {"enabled": True, "opt_level": "O1"}}),
    ("msamp.enabled", {"msamp": {"enabled": True, "opt_level": "O2"}}),
    ("torch_autocast.enabled", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    ("elasticity.enabled", {"elasticity": {"enabled": True, "max_train_batch_size": 8}}),
    ("autotuning.enabled", {"autotuning": {"enabled": True, "fast": False}}),
    ("flops_profiler.enabled", {"flops_profiler": {"enabled": True}}),
    ("comms_logger.enabled", {"comms_logger": {"enabled": True, "verbose": True}}),
    (
        "compression_training.weight_quantization.shared_parameters.enabled",
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    ),
    ("progressive_layer_drop.enabled", {"progressive_layer_drop": {"enabled": True, "theta": 0.5}}),
    ("eigenvalue.enabled", {"eigenvalue": {"enabled": True}}),
    ("sparse_attention", {"sparse_attention": {"mode": "fixed"}}),
    ("sparse_gradients", {"sparse_gradients": True}),
    ("data_efficiency.enabled", {"data_efficiency": {"enabled": True, "seed": 1}}),
    ("curriculum_learning.enabled", {"curriculum_learning": {"enabled": True}}),
    ("pipeline.stages", {"pipeline": {"stages": 2}}),
    ("tensor_parallel.autotp_size", {"tensor_parallel": {"autotp_size": 2}}),
    ("tensor_parallel.tp.tp_size", {"tensor_parallel": {"tp": {"tp_size": 4}}}),
    ("expert_parallel.enabled", {"expert_parallel": {"enabled": True}}),
    ("sequence_parallel.enabled", {"sequence_parallel": {"enabled": True, "size": 4}}),
    ("hybrid_engine.enabled", {"hybrid_engine": {"enabled": True}}),
    ("compile.deepcompile", {"compile": {"deepcompile": True}}),
    ("nebula.enabled", {"nebula": {"enabled": True}}),
    ("monitor_config.csv_monitor.enabled", {"monitor_config": {"csv_monitor": {"enabled": True}}}),
    ("zero_optimization.stage", {"zero_optimization": {"stage": 3}}),
    (
        "zero_optimization.offload_optimizer.device",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/ssd"}}},
    ),
    ("zero_optimization.offload_param.device", {"zero_optimization": {"offload_param": {"device": "NVMe"}}}),
    (
        "zero_optimization.offload_optimizer.ratio",
        {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}},
    ),
    (
        "zero_optimization.offload_optimizer.super_offload",
        {"zero_optimization": {"offload_optimizer": {"super_offload": True}}},
    ),
    ("zero_optimization.zenflow", {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}),
    ("zero_optimization.zero_hpz_partition_size", {"zero_optimization": {"zero_hpz_partition_size": 8}}),
    ("zero_optimization.zero_quantized_weights", {"zero_optimization": {"zero_quantized_weights": True}}),
    ("zero_optimization.zero_quantized_gradients", {"zero_optimization": {"zero_quantized_gradients": True}}),
    ("zero_optimization.mics_shard_size", {"zero_optimization": {"mics_shard_size": 4}}),
    ("zero_optimization.legacy_stage1", {"zero_optimization": {"stage": 1, "legacy_stage1": True}}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "sum"}),
    ("sequence_parallel_size", {"sequence_parallel_size": 2}),
    ("checkpoint.load_universal", {"checkpoint": {"load_universal": True}}),
    ("data_types.keep_in_fp32_modules", {"data_types": {"keep_in_fp32_modules": ["norm"]}}),
    ("comet.enabled", {"comet": {"enabled": True}}),
]

SWITCHED_OFF = [
    {name: {"enabled": False}}
    for name, feature in FEATURES.items()
    if not feature.keys or "enabled" in feature.keys
    if name
    not in (
        "sparse_attention",
        "sparse_gradients",
        "weight_quantization",
        "datastates_ckpt",
        "graph_harvesting",
    )
] + [
    {"sparse_gradients": False},
    {"sparse_attention": None},
    {"graph_harvesting": False},
    {"datastates_ckpt": None},
    {"weight_quantization": {}},
    {"amp": {"enabled": "false", "opt_level": "O1"}},
    {"pipeline": {"stages": "auto", "partition": "best"}},
    {"tensor_parallel": {"autotp_size": 1}},
    {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}},
    {"compile": {"deepcompile": False, "offload_activation": False}},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}},
    {"monitor_config": {"enabled": True, "tag": "run", "csv_monitor": {"enabled": False}}},
    {
        "zero_optimization": {
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "mics_shard_size": -1,
        }
    },
    {"zero_optimization": {"offload_optimizer": {"ratio": 1.0, "fast_init": False, "buffer_count": 4}}},
    {"zero_optimization": {"offload_param": {"device": "none", "nvme_path": None}, "zenflow": None}},
    {"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False}},
    {
        "wandb": {"enabled": False, "team": "x"},
        "comet": {"enabled": False},
        "csv_monitor": {"enabled": False},
    },
    {"timers": {"throughput": {"enabled": True, "synchronized": False}}},
]


@pytest.mark.parametrize(("path", "keys"), SWITCHED_ON, ids=[path for path, _ in SWITCHED_ON])
def test_switched_on_it_is_refused_by_its_full_path(path, keys):
    with pytest.raises(NotImplementedError) as error:
        DeepSpeedConfig({"train_batch_size": 4, **keys})
    text = str(error.value)
    assert text.startswith(f"{path}: expected ")
    assert text.count(". ") >= 1, "what was expected, then what to do"
    assert "\n" not in text


@pytest.mark.parametrize("keys", SWITCHED_OFF, ids=str)
def test_switched_off_it_is_accepted(keys):
    assert DeepSpeedConfig({"train_batch_size": 4, **keys}).train_batch_size == 4


def test_several_refusals_come_together():
    with pytest.raises(NotImplementedError) as error:
        DeepSpeedConfig({"train_batch_size": 4, "amp": {"enabled": True}, "zero_optimization": {"stage": 3}})
    assert "amp.enabled: " in str(error.value)
    assert "zero_optimization.stage: " in str(error.value)


def test_every_refused_key_exists_and_its_default_is_not_refused():
    known = {path for _, path in paths_of(Settings)}
    assert {refusal.path for refusal in REFUSED_KEYS} <= known
    assert not set(FEATURES) & set(Settings.model_fields)
