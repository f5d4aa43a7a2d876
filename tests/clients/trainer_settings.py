"""The DeepSpeed JSON and the TrainingArguments of the Trainer's tests."""

AUTO = "auto"
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
LINEAR = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": AUTO,
        "warmup_max_lr": AUTO,
        "warmup_num_steps": AUTO,
        "total_num_steps": AUTO,
        "warmup_type": "linear",
    },
}


def auto_config(stage, offload, optimizer=True, scheduler=True):
    """A configuration that leaves to Trainer whatever it can fill in."""
    zero = {
        "stage": stage,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": AUTO,
        "contiguous_gradients": True,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "fp16": {"enabled": AUTO, "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": AUTO},
        **({"optimizer": ADAMW} if optimizer else {}),
        **({"scheduler": LINEAR} if scheduler else {}),
        "zero_optimization": zero,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def arguments(bf16=True, **changes):
    """TrainingArguments of every run; clipping bites, since the gradients' norm is above 0.5."""
    return {
        "bf16": bf16,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "warmup_steps": 2,
        "lr_scheduler_type": "linear",
        "max_steps": 8,
        "save_strategy": "no",
        **changes,
    }
