"""Lightning's Trainer under its own launcher: plain DDP and DeepSpeed settings, resumed, evaluated, exported.

Started once: Lightning runs the same script again for the second rank.
"""

import json
import logging
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from deepspeed.ops.adam import DeepSpeedCPUAdam
from tests.clients.jobs.common import digest, error_of, read_task, report
from tests.clients.jobs.lightning_on_cpu import MICRO_BATCH, allow_cpu, small_dataset, small_module

EPOCHS = 3
STEPS_PER_EPOCH = 3
ACCUMULATION = 2
RANKS = 2
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "DeepSpeedCPUAdam": DeepSpeedCPUAdam}


class Classifier(pl.LightningModule):
    """As a user writes it: layers made in `configure_model`, a schedule stepped after every step."""

    def __init__(self, setting):
        super().__init__()
        self.optimizer_class = OPTIMIZERS[setting["optimizer"]]
        self.schedule = setting.get("schedule")
        self.automatic_optimization = not setting.get("manual", False)
        self.net = None
        self.losses = []

    def configure_model(self):
        if self.net is None:
            self.net = small_module()

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch, index):
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = self.optimizer_class(self.parameters(), lr=2e-2, weight_decay=0.1)
        if self.schedule == "plateau":  # its patience is short, so that it acts within the run
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader():
    samples = MICRO_BATCH * ACCUMULATION * STEPS_PER_EPOCH * RANKS
    return torch.utils.data.DataLoader(small_dataset(samples), batch_size=MICRO_BATCH)


def make_trainer(setting, folder, callbacks=()):
    strategy = setting["strategy"]
    if "config" in setting:
        path = Path(
            f"deepspeed-{os.getpid()}.json"
        )  # a file of each rank's own, so that none reads half of one
        path.write_text(json.dumps(setting["config"]))
        strategy = DeepSpeedStrategy(config=path)
    elif "options" in setting:
        strategy = DeepSpeedStrategy(**setting["options"])
    return pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        precision=setting["precision"],
        max_epochs=EPOCHS,
        # In manual optimization Lightning leaves both to the module.
        accumulate_grad_batches=1 if setting.get("manual") else ACCUMULATION,
        gradient_clip_val=None if setting.get("manual") else setting["clip"],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )


def train(setting, folder, resume_from=None):
    saver = ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    monitor = LearningRateMonitor("step")
    module = Classifier(setting)
    trainer = make_trainer(setting, folder, [saver, monitor])
    trainer.fit(module, loader(), loader(), ckpt_path=resume_from)
    engine = trainer.model
    result = {
        "losses": module.losses,
        "rates": next(iter(monitor.lrs.values())),
        "steps": trainer.global_step,
        "weights": digest(module),
        "class": type(trainer.optimizers[0]).__name__,
    }
    if setting["strategy"] != "ddp":
        result["inner_class"] = type(trainer.optimizers[0].optimizer).__name__
        result["norm"] = engine.get_global_grad_norm()
        result["engine_steps"] = engine.global_steps
        report = [entry for entry in engine.memory_report() if entry["owner"].startswith("Host")]
        result["buffers"] = {entry["name"]: entry["nbytes"] for entry in report}
        result["numel"] = sum(param.numel() for param in module.parameters())
        result["validated"] = trainer.callback_metrics["loss"].item()
        # The same module again, in an engine that only evaluates, while the first still lives.
        result["validated_again"] = trainer.validate(module, loader(), verbose=False)[0]["loss"]
    return result


def what_checkpoints_give(setting, folder):
    """A run that goes on after the first epoch, an evaluation of the end, an export of the end."""
    first = folder / f"epoch=0-step={STEPS_PER_EPOCH}.ckpt"
    last = folder / f"epoch={EPOCHS - 1}-step={EPOCHS * STEPS_PER_EPOCH}.ckpt"
    evaluated = Classifier(setting)
    trainer = make_trainer(setting, folder / "evaluated")
    metrics = trainer.validate(evaluated, loader(), ckpt_path=last, verbose=False)
    exported = convert_zero_checkpoint_to_fp32_state_dict(last, folder / f"{trainer.global_rank}.pt")
    return {
        "resumed": train(setting, folder / "resumed", resume_from=first),
        "evaluated_loss": metrics[0]["loss"],
        "evaluated": digest(evaluated),
        "exported": digest({name: value.bfloat16() for name, value in exported["state_dict"].items()}),
        "exported_epoch": exported["epoch"],
    }


def check(setting):
    folder = Path.cwd() / setting["name"]
    result = train(setting, folder)
    if setting["strategy"] != "ddp" and setting["precision"] == "bf16-mixed":
        result["checkpoints"] = what_checkpoints_give(setting, folder)
    return result


def refusal(strategy):
    """What a user reads who asks for a strategy that is not here."""
    setting = {"strategy": strategy, "precision": "bf16-mixed", "clip": 1.0, "optimizer": "AdamW"}
    trainer = make_trainer(setting, Path.cwd())
    return error_of(lambda: trainer.fit(Classifier(setting), loader()))


logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
allow_cpu()
results = {}
for one in read_task():
    results[one["name"]] = check(one)
results["refused"] = {name: refusal(name) for name in ("deepspeed_stage_3", "deepspeed_stage_3_offload")}
report(results)
