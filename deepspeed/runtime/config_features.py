"""Whole features that DeepSpeed has and this package has not: accepted switched off, refused by path when on.

Each is a top-level key without a model in config_settings.py. A feature that gets implemented loses its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed.runtime.config_problems import Problems
from deepspeed.runtime.config_tree import Tree


class Switch(NamedTuple):
    """The key that switches a feature on: its path below the feature ("" for itself), and its value."""

    path: str
    value: object


def enabled_switch(value: Any) -> Switch | None:
    """Return what switches a feature on: its ``enabled``, or one in a section of it, or itself; or None."""
    if not isinstance(value, Mapping):
        return Switch("", value) if value else None
    if "enabled" in value:
        off = value["enabled"] in (False, None, 0, "false", "False")
        return None if off else Switch("enabled", value["enabled"])
    return _first_inside(value, enabled_switch)


def _presence(value: Any) -> Switch | None:
    return None if value in (None, False, {}, []) else Switch("", value)


def _parallel_size(value: Any) -> Switch | None:
    if not isinstance(value, Mapping):
        return None
    for name in ("autotp_size", "tp_size", "stages"):
        size = value.get(name)
        if isinstance(size, (int, float)) and size > 1:
            return Switch(name, size)
    return _first_inside(value, _parallel_size)


def _enabled_inside(value: Any) -> Switch | None:
    return _first_inside(value, enabled_switch) if isinstance(value, Mapping) else None


def _compile_switch(value: Any) -> Switch | None:
    names = ("deepcompile", "enabled") if isinstance(value, Mapping) else ()
    return next((Switch(name, value[name]) for name in names if value.get(name)), None)


def _first_inside(value: Mapping[str, Any], find: Callable[[Any], Switch | None]) -> Switch | None:
    for name, item in value.items():
        switch = find(item) if isinstance(item, Mapping) else None
        if switch is not None:
            return Switch(f"{name}.{switch.path}".rstrip("."), switch.value)
    return None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Feature(NamedTuple):
    """One top-level key: the keys that it may hold (empty: anything), what switches it on, what to do."""

    keys: frozenset[str]
    find_switch: Callable[[Any], Switch | None]
    advice: str


_TUNING = "Choose train_micro_batch_size_per_gpu and zero_optimization.reduce_bucket_size yourself."
_PRECISION = 'Use "bf16": {"enabled": true} or "fp16": {"enabled": true}.'
_DATA = "Prepare the data in the training script or its data loader."
_MODEL = "Change the model in the training script, before deepspeed.initialize."
_PROFILE = "Use torch.profiler around the training step."

FEATURES: dict[str, Feature] = {
    "amp": Feature(frozenset(), enabled_switch, _PRECISION),
    "msamp": Feature(_names("enabled opt_level use_te"), enabled_switch, _PRECISION),
    "torch_autocast": Feature(
        _names("enabled dtype lower_precision_safe_modules"), enabled_switch, _PRECISION
    ),
    "elasticity": Feature(
        _names(
            "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time "
            "prefer_larger_batch prefer_larger_batch_size version ignore_non_elastic_batch_info "
            "num_gpus_per_node model_parallel_size"
        ),
        enabled_switch,
        "Give the batch sizes directly.",
    ),
    "autotuning": Feature(
        _names(
            "enabled start_step end_step metric_path arg_mappings metric model_info results_dir "
            "exps_dir overwrite fast start_profile_step end_profile_step tuner_type "
            "tuner_early_stopping tuner_num_trials model_info_path mp_size max_train_batch_size "
            "min_train_batch_size max_train_micro_batch_size_per_gpu "
            "min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes"
        ),
        enabled_switch,
        _TUNING,
    ),
    "flops_profiler": Feature(
        _names("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
        enabled_switch,
        _PROFILE,
    ),
    "comms_logger": Feature(_names("enabled prof_all prof_ops verbose debug"), enabled_switch, _PROFILE),
    "comms_config": Feature(frozenset(), enabled_switch, _PROFILE),
    "monitor_config": Feature(
        frozenset(), _enabled_inside, "Put its sections at the top level: csv_monitor, tensorboard, wandb."
    ),
    "compression_training": Feature(
        _names(
            "layer_reduction weight_quantization activation_quantization sparse_pruning "
            "row_pruning head_pruning channel_pruning"
        ),
        enabled_switch,
        _MODEL,
    ),
    "quantize_training": Feature(frozenset(), enabled_switch, _MODEL),
    "weight_quantization": Feature(frozenset(), _presence, _MODEL),
    "progressive_layer_drop": Feature(_names("enabled theta gamma"), enabled_switch, _MODEL),
    "eigenvalue": Feature(
        _names("enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num"),
        enabled_switch,
        _MODEL,
    ),
    "sparse_attention": Feature(frozenset(), _presence, _MODEL),
    "sparse_gradients": Feature(frozenset(), _presence, "Build the embedding with sparse=False."),
    "data_efficiency": Feature(_names("enabled seed data_sampling data_routing"), enabled_switch, _DATA),
    "curriculum_learning": Feature(
        _names(
            "enabled curriculum_type min_difficulty max_difficulty difficulty_type schedule_type "
            "schedule_config curriculum_metrics data_cluster_path"
        ),
        enabled_switch,
        _DATA,
    ),
    "pipeline": Feature(
        _names(
            "stages partition seed_layers activation_checkpoint_interval pipe_partitioned "
            "grad_partitioned use_reentrant"
        ),
        _parallel_size,
        "Use data parallelism with zero_optimization.stage 2.",
    ),
    "tensor_parallel": Feature(
        _names(
            "dtype autotp_size tp_size tp_grain_size tp_overlap_comm vocab_parallel_lm_head "
            "vocab_parallel_ce_backend tp tensor_parallel injection_policy_tuple partition_config "
            "preset_model keep_module_on_host kernel_inject replace_with_kernel_inject"
        ),
        _parallel_size,
        "Use data parallelism with zero_optimization.stage 2, or autotp_size 1.",
    ),
    "sequence_parallel": Feature(frozenset(), enabled_switch, "Use shorter sequences, or more ranks."),
    "expert_parallel": Feature(
        frozenset(), enabled_switch, "Use data parallelism with zero_optimization.stage 2."
    ),
    "hybrid_engine": Feature(
        _names(
            "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
            "tp_gather_partition_size enable_cuda_graph"
        ),
        enabled_switch,
        "Generate with an inference engine beside the training engine.",
    ),
    "compile": Feature(
        _names(
            "deepcompile enabled disable backend kwargs autoep_non_moe free_activation "
            "free_activation_threshold offload_activation offload_activation_pin_memory "
            "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
            "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
            "keep_int_input_tensors keep_all_input_tensors passes"
        ),
        _compile_switch,
        "Call engine.compile(), which uses torch.compile.",
    ),
    "nebula": Feature(
        _names(
            "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention "
            "enable_nebula_load load_path"
        ),
        enabled_switch,
        "Save with engine.save_checkpoint.",
    ),
    "datastates_ckpt": Feature(_names("enabled config"), _presence, "Save with engine.save_checkpoint."),
    "graph_harvesting": Feature(frozenset(), _presence, "Call engine.compile(), which uses torch.compile."),
}


def take_features(tree: Tree, problems: Problems) -> None:
    """Remove unsupported features from the tree; report those that are on, and unknown keys in them."""
    for name in [name for name in FEATURES if name in tree]:
        feature, value = FEATURES[name], tree.pop(name)
        if isinstance(value, Mapping) and feature.keys:
            for key in [key for key in value if key not in feature.keys]:
                problems.unknown_key(f"{name}.{key}", sorted(feature.keys), {})
        switch = feature.find_switch(value)
        if switch is not None:
            path = f"{name}.{switch.path}".rstrip(".")
            advice = f"This feature is not available here. {feature.advice}"
            problems.refuse(path, "the feature to be off", switch.value, advice)
