"""Configurations for stage 2 with offload that clients document or ship, with the "auto" that they fill in.

Keys and values, found in their repositories: what a newcomer starts from.
"""

FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
ZERO2_OFFLOAD = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
_SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
_LOGGING = {"steps_per_print": 2000, "wall_clock_breakdown": False}


def _schedule(kind, *params):
    return {"type": kind, "params": dict.fromkeys(params, "auto")}


_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")

# transformers: docs/source/en/deepspeed.md and tests/deepspeed/ds_config_zero2.json
TRANSFORMERS = {
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": _ADAMW,
    "scheduler": _schedule("WarmupLR", *_WARMUP),
    "zero_optimization": ZERO2_OFFLOAD,
    **_SIZES,
    **_LOGGING,
}
# The same with the section that the documentation shows for stage 2, and without optimizer and schedule.
TRANSFORMERS_DOCUMENTED_ZERO = {
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        **ZERO2_OFFLOAD,
        "allgather_bucket_size": 5e8,
        "reduce_bucket_size": 5e8,
        "round_robin_gradients": True,
    },
    **_SIZES,
}
# accelerate: docs/source/usage_guides/deepspeed.md and tests/deepspeed/ds_config_zero2.json
ACCELERATE = {
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": _schedule("WarmupDecayLR", *_WARMUP, "total_num_steps"),
    "zero_optimization": {**ZERO2_OFFLOAD, "reduce_bucket_size": "auto"},
    **_SIZES,
    "gradient_accumulation_steps": 1,
    **_LOGGING,
}
# LLaMA-Factory: examples/deepspeed/ds_z2_offload_config.json
LLAMA_FACTORY = {
    **_SIZES,
    "zero_allow_untested_optimizer": True,
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        **ZERO2_OFFLOAD,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_bucket_size": 5e8,
        "round_robin_gradients": True,
    },
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
}
# ms-swift: swift/llm/ds_config/zero2_offload.json, older with optimizer and schedule, newer without
MS_SWIFT = {
    "fp16": FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": _ADAMW,
    "scheduler": _schedule("WarmupCosineLR", "total_num_steps", "warmup_num_steps"),
    "zero_optimization": ZERO2_OFFLOAD,
    **_SIZES,
    **_LOGGING,
}
MS_SWIFT_NEWER = {key: value for key, value in MS_SWIFT.items() if key not in ("optimizer", "scheduler")}

PRESETS = {
    "transformers": TRANSFORMERS,
    "transformers, documented section": TRANSFORMERS_DOCUMENTED_ZERO,
    "accelerate": ACCELERATE,
    "LLaMA-Factory": LLAMA_FACTORY,
    "ms-swift": MS_SWIFT,
    "ms-swift, newer": MS_SWIFT_NEWER,
}
