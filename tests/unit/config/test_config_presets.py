"""Whole configurations in the shapes that transformers, accelerate, lightning, OpenRLHF and trl send."""

import pytest
import torch

from deepspeed.runtime.config import DeepSpeedConfig
from tests.unit.config.presets import FP16, ZERO2_OFFLOAD

FP16_BLOCK = {**FP16, "enabled": True}


def accelerate_plugin(stage):
    """What accelerate builds without a config file."""
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "nvme_path": None},
            "offload_param": {"device": "cpu", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_accelerate_without_a_config_file(stage):
    config = DeepSpeedConfig(accelerate_plugin(stage), world_size=2)
    assert config.dtype == torch.bfloat16
    assert config.zero_optimization.offloads_optimizer == (stage > 0)
    assert any(notice.startswith("zero_optimization.offload_param") for notice in config.notices)


def test_transformers_trainer_with_everything_filled_in():
    config = DeepSpeedConfig(
        {
            "fp16": {**FP16_BLOCK, "auto_cast": True},
            "bf16": {"enabled": False},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": 0,
                    "warmup_max_lr": 3e-5,
                    "warmup_num_steps": 1,
                    "total_num_steps": 10,
                },
            },
            "zero_optimization": ZERO2_OFFLOAD,
            "checkpoint": {"use_node_local_storage": True},
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "steps_per_print": 2000,
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "wall_clock_breakdown": False,
        },
        world_size=2,
    )
    assert config.dtype == torch.float16
    assert config.zero_optimization.pins_staging
    assert config.checkpoint.use_node_local_storage
    assert config.notices == ()


def test_lightning_sends_aio_and_activation_checkpointing_and_no_batch_size():
    config = DeepSpeedConfig(
        {
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "synchronize_checkpoint_boundary": False,
            },
            "aio": {
                "block_size": 1048576,
                "queue_depth": 8,
                "single_submit": False,
                "overlap_events": True,
                "thread_count": 1,
            },
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 2,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 200000000,
                "reduce_bucket_size": 200000000,
                "sub_group_size": 1000000000000,
                "offload_optimizer": {
                    "device": "cpu",
                    "nvme_path": "/local_nvme",
                    "buffer_count": 4,
                    "pin_memory": False,
                },
            },
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.0,
            "fp16": FP16_BLOCK,
        },
        world_size=3,
    )
    assert config.train_batch_size == 9
    assert (config.gradient_clipping, config.gradient_clipping_is_default) == (0.0, False)
    assert not config.zero_optimization.pins_staging


def test_lightning_evaluation_has_two_keys():
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}, world_size=2)
    assert config.train_batch_size == 2
    assert config.zero_optimization.stage == 0


def test_openrlhf_leaves_auto_in_sizes_and_nulls_in_types():
    config = DeepSpeedConfig(
        {
            "steps_per_print": 100,
            "zero_optimization": {
                "stage": 2,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "sub_group_size": "auto",
                "stage3_max_live_parameters": "auto",
                "stage3_max_reuse_distance": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "reduce_bucket_size": "auto",
                "zero_hpz_partition_size": 1,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
                "overlap_comm": False,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "data_types": {"grad_accum_dtype": None},
            "checkpoint": {"load_universal": False},
            "compile": {"deepcompile": False},
            "tensor_parallel": {"autotp_size": 1},
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 8,
        },
        world_size=4,
    )
    assert config.zero_optimization.reduce_bucket_numel == 500_000_000
    assert config.gradient_accumulation_steps == 1


def test_reference_models_come_at_stage_0_with_offload_still_in_the_config():
    config = DeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {**ZERO2_OFFLOAD, "stage": 0, "reduce_bucket_size": "auto"},
            "zero_optimization.reduce_bucket_size": 4096,
            "zero_optimization.stage3_param_persistence_threshold": 640,
            "zero_optimization.stage3_prefetch_bucket_size": 0,
        }
    )
    assert not config.zero_optimization.offloads_optimizer
    assert config.zero_optimization.reduce_bucket_numel == 4096


def test_shipped_offload_presets_with_keys_that_stock_ignores():
    config = DeepSpeedConfig(
        {
            "_comment": "for two cards",
            "train_batch_size": 4,
            "zero_allow_untested_optimizer": True,
            "fp16": {**FP16_BLOCK, "enabled": False},
            "bf16": {"enabled": True},
            "zero_optimization": {**ZERO2_OFFLOAD, "round_robin_gradients": True},
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "tag": "run", "csv_monitor": {"enabled": False}},
            "activation_checkpointing": {"number_checkpoints": False, "profile": False},
        }
    )
    assert config.dtype == torch.bfloat16
    assert config.notices == ()


def test_accelerate_template_options_of_adam_reach_the_optimizer():
    params = {"lr": 1e-4, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": True}
    config = DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": params}})
    assert config.optimizer.params == params
