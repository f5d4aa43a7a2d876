"""What DeepSpeed can do and this package cannot: accepted while switched off, refused by full path when on.

Two tables: whole features (``FEATURES``, top-level keys without a model here) and single keys of known sections
(``REFUSED_KEYS``). A feature that gets implemented loses its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed.runtime.config_base import Section
from deepspeed.runtime.config_problems import Problems
from deepspeed.runtime.config_tree import Tree
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum


def switched_on(value: Any) -> bool:
    """Tell whether a feature's value switches it on: its ``enabled``, else any section in it, else its truth."""
    if not isinstance(value, Mapping):
        return bool(value)
    if "enabled" in value:
        return value["enabled"] not in (False, None, 0, "false", "False")
    return any(switched_on(item) for item in value.values() if isinstance(item, Mapping))


def _not_empty(value: Any) -> bool:
    return value not in (None, False, {}, [])


def _is_parallel(value: Any) -> bool:
    sizes = ("autotp_size", "tp_size", "stages")
    if not isinstance(value, Mapping):
        return False
    return any(isinstance(value.get(size), (int, float)) and value[size] > 1 for size in sizes) or any(
        _is_parallel(item) for item in value.values()
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Feature(NamedTuple):
    """One unsupported top-level key: the keys that it may hold (empty: anything), when it is on, what to do."""

    keys: frozenset[str]
    is_on: Callable[[Any], bool]
    advice: str


_TUNING = "Choose the sizes yourself: train_micro_batch_size_per_gpu and zero_optimization.reduce_bucket_size."
_PRECISION = 'Use "bf16": {"enabled": true} or "fp16": {"enabled": true}.'
_DATA = "Prepare the data in the training script or its data loader."
_MODEL = "Change the model in the training script, before deepspeed.initialize."
_PROFILE = "Use torch.profiler around the training step."

FEATURES: dict[str, Feature] = {
    "amp": Feature(frozenset(), switched_on, _PRECISION),
    "msamp": Feature(_names("enabled opt_level use_te"), switched_on, _PRECISION),
    "torch_autocast": Feature(_names("enabled dtype lower_precision_safe_modules"), switched_on, _PRECISION),
    "elasticity": Feature(
        _names(
            "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch "
            "prefer_larger_batch_size version ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size"
        ),
        switched_on,
        "Give the batch sizes directly.",
    ),
    "autotuning": Feature(
        _names(
            "enabled start_step end_step metric_path arg_mappings metric model_info results_dir exps_dir overwrite fast "
            "start_profile_step end_profile_step tuner_type tuner_early_stopping tuner_num_trials model_info_path mp_size "
            "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
            "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes"
        ),
        switched_on,
        _TUNING,
    ),
    "flops_profiler": Feature(
        _names("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
        switched_on,
        _PROFILE,
    ),
    "comms_logger": Feature(_names("enabled prof_all prof_ops verbose debug"), switched_on, _PROFILE),
    "compression_training": Feature(
        _names(
            "layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
            "channel_pruning"
        ),
        switched_on,
        _MODEL,
    ),
    "quantize_training": Feature(frozenset(), switched_on, _MODEL),
    "weight_quantization": Feature(frozenset(), _not_empty, _MODEL),
    "progressive_layer_drop": Feature(_names("enabled theta gamma"), switched_on, _MODEL),
    "eigenvalue": Feature(
        _names("enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num"), switched_on, _MODEL
    ),
    "sparse_attention": Feature(frozenset(), _not_empty, _MODEL),
    "sparse_gradients": Feature(frozenset(), _not_empty, "Build the embedding with sparse=False."),
    "data_efficiency": Feature(_names("enabled seed data_sampling data_routing"), switched_on, _DATA),
    "curriculum_learning": Feature(
        _names(
            "enabled curriculum_type min_difficulty max_difficulty difficulty_type schedule_type schedule_config "
            "curriculum_metrics data_cluster_path"
        ),
        switched_on,
        _DATA,
    ),
    "pipeline": Feature(
        _names("stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant"),
        _is_parallel,
        "Use data parallelism with zero_optimization.stage 2.",
    ),
    "tensor_parallel": Feature(
        _names(
            "dtype autotp_size tp_size tp_grain_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tp "
            "tensor_parallel injection_policy_tuple partition_config preset_model keep_module_on_host kernel_inject "
            "replace_with_kernel_inject"
        ),
        _is_parallel,
        "Use data parallelism with zero_optimization.stage 2, or autotp_size 1.",
    ),
    "expert_parallel": Feature(frozenset(), switched_on, "Use data parallelism with zero_optimization.stage 2."),
    "hybrid_engine": Feature(
        _names(
            "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
            "enable_cuda_graph"
        ),
        switched_on,
        "Generate with an inference engine beside the training engine.",
    ),
    "compile": Feature(
        _names(
            "deepcompile enabled backend kwargs autoep_non_moe free_activation free_activation_threshold offload_activation "
            "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
            "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors passes"
        ),
        lambda value: isinstance(value, Mapping) and bool(value.get("deepcompile") or value.get("enabled")),
        "Call engine.compile(), which uses torch.compile.",
    ),
    "nebula": Feature(
        _names(
            "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention "
            "enable_nebula_load load_path"
        ),
        switched_on,
        "Save with engine.save_checkpoint.",
    ),
    "datastates_ckpt": Feature(_names("enabled config"), _not_empty, "Save with engine.save_checkpoint."),
    "graph_harvesting": Feature(frozenset(), _not_empty, "Call engine.compile(), which uses torch.compile."),
}


class Refusal(NamedTuple):
    """One key of a known section: the values that are refused, what is expected instead, what to do."""

    path: str
    is_refused: Callable[[Any], bool]
    constraint: str
    advice: str


_STAGE_2 = 'Use stage 2 with "offload_optimizer": {"device": "cpu"}, which holds optimizer and gradients on the host.'
_ZERO_PP = "ZeRO++ belongs to stage 3; leave the key out."
_MONITOR = "Log from the training script: engine.get_global_grad_norm() and the loss are at hand after each step."
_NO_NVME = 'NVMe offload is not available here; use "cpu".'


def _is_nvme(value: Any) -> bool:
    return value is OffloadDeviceEnum.nvme


def _given(value: Any) -> bool:
    return value is not None


REFUSED_KEYS: tuple[Refusal, ...] = (
    Refusal("zero_optimization.stage", lambda stage: stage is ZeroStageEnum.weights, "0, 1 or 2", _STAGE_2),
    Refusal("zero_optimization.offload_optimizer.device", _is_nvme, '"none" or "cpu"', _NO_NVME),
    Refusal("zero_optimization.offload_param.device", _is_nvme, '"none"', "NVMe offload is not available here."),
    Refusal(
        "zero_optimization.offload_optimizer.ratio",
        lambda ratio: ratio != 1.0,
        "1.0",
        "The whole optimizer is offloaded below stage 3; leave the key out.",
    ),
    Refusal("zero_optimization.offload_optimizer.super_offload", bool, "false", "Leave the key out."),
    Refusal("zero_optimization.zenflow", _given, "no such section", "Leave it out; the offloaded step is fused already."),
    Refusal("zero_optimization.zero_hpz_partition_size", lambda size: size > 1, "1", _ZERO_PP),
    Refusal("zero_optimization.zero_quantized_weights", bool, "false", _ZERO_PP),
    Refusal("zero_optimization.zero_quantized_nontrainable_weights", bool, "false", _ZERO_PP),
    Refusal("zero_optimization.zero_quantized_gradients", bool, "false", _ZERO_PP),
    Refusal("zero_optimization.mics_shard_size", lambda size: size > 0, "-1", "MiCS belongs to stage 3; leave the key out."),
    Refusal("zero_optimization.mics_hierarchical_params_gather", bool, "false", "MiCS belongs to stage 3."),
    Refusal("zero_optimization.zeropp_loco_param", _given, "no such section", _ZERO_PP),
    Refusal("zero_optimization.elastic_checkpoint", bool, "false", "Any number of ranks can load a checkpoint without it."),
    Refusal("zero_optimization.legacy_stage1", bool, "false", "Leave the key out; stage 1 has one implementation."),
    Refusal("bf16.bf16_master_weights_and_grads", bool, "false", "Leave the key out; masters are fp32."),
    Refusal("bf16.bf16_optimizer_states", bool, "false", "Leave the key out; moments are fp32."),
    Refusal("fp16.fp16_master_weights_and_grads", bool, "false", "Leave the key out; masters are fp32."),
    Refusal("data_types.param_dtype", _given, "null", _PRECISION),
    Refusal("data_types.buffer_dtype", _given, "null", "Cast buffers in the training script."),
    Refusal("data_types.keep_in_fp32_modules", lambda names: names not in ("auto", []), '"auto"', _MODEL),
    Refusal("gradient_allreduce_op", lambda op: op == "sum", '"mean"', "Multiply the loss by the world size for a sum."),
    Refusal("managed_gradient_accumulation", lambda on: not on, "true", "Call engine.set_gradient_accumulation_boundary."),
    Refusal("use_data_before_expert_parallelism", bool, "false", "Expert parallelism is not available here."),
    Refusal("sequence_parallel_size", lambda size: size > 1, "1", "Sequence parallelism is not available here."),
    Refusal("checkpoint.load_universal", bool, "false", "Load the ordinary checkpoint; any number of ranks can."),
    Refusal("checkpoint.writer", _given, "null", "Leave the key out; checkpoints are written with torch.save."),
    Refusal("tensorboard.enabled", bool, "false", _MONITOR),
    Refusal("csv_monitor.enabled", bool, "false", _MONITOR),
    Refusal("wandb.enabled", bool, "false", _MONITOR),
    Refusal("comet.enabled", bool, "false", _MONITOR),
)


def take_features(tree: Tree, problems: Problems) -> None:
    """Remove unsupported features from the tree; report those that are on, and unknown keys in them."""
    for name in [name for name in FEATURES if name in tree]:
        feature, value = FEATURES[name], tree.pop(name)
        if isinstance(value, Mapping) and feature.keys:
            for key in [key for key in value if key not in feature.keys]:
                problems.unknown_key(f"{name}.{key}", sorted(feature.keys), {})
        if feature.is_on(value):
            path = f"{name}.enabled" if isinstance(value, Mapping) and "enabled" in value else name
            got = value["enabled"] if path != name else value
            problems.refuse(path, "this feature to be off", got, f"It is not available here. {feature.advice}")


def refuse_keys(values: Mapping[str, Any], problems: Problems) -> None:
    """Report refused values in validated sections.

    Args:
        values: Top-level key to validated section or plain value; keys that failed validation are absent.
        problems: Collects the refusals.
    """
    for refusal in REFUSED_KEYS:
        value: Any = values
        for name in refusal.path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
            if value is None:
                break
        if value is not None and refusal.is_refused(value):
            shown = value.value if isinstance(value, (OffloadDeviceEnum, ZeroStageEnum)) else value
            shown = shown.model_dump() if isinstance(shown, Section) else shown
            problems.refuse(refusal.path, refusal.constraint, shown, refusal.advice)
