"""Lets OpenRLHF be imported and run on CPUs.

It needs ray, vllm, flash-attn and others, none of which its DeepSpeed code calls: stand-ins take their place.
It asks torch.cuda for the current device, and makes its mesh of "cuda". The rest of it runs as it is.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed.device_mesh as device_mesh

ABSENT = {"ray", "vllm", "flash_attn", "torchdata", "pylatexenc", "PIL"}
OPTIONAL = "flash_attn.ops"  # OpenRLHF does without


class StandIns(MetaPathFinder, Loader):
    """Finds a mock for every module of the absent packages that is not installed after all."""

    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in ABSENT and not name.startswith(OPTIONAL)
        return ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec):
        return MagicMock(name=spec.name)

    def exec_module(self, module):
        module.StatefulDataLoader = torch.utils.data.DataLoader  # for torchdata


class Here(str):
    """The current device, for torch; its ordinal, for text such as f"cuda:{device}"."""

    def __format__(self, spec):
        return "0"


def allow_cpu():
    """To be called before OpenRLHF is imported."""
    sys.meta_path.append(StandIns())
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda: None
    torch.cuda.current_device = lambda: Here("cpu")
    torch.cuda.current_stream = lambda: None
    make_mesh = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda kind, *args, **kwargs: make_mesh("cpu", *args, **kwargs)


def arguments(setting, **more):
    """The command line's namespace, as far as these trainers read it."""
    names = SimpleNamespace
    advantage = names(
        is_correction_level="off",
        is_correction_mode="mask",
        is_correction_gating="ratio",
        is_correction_threshold=[0.5, 5.0],
    )
    return names(
        local_rank=-1,
        ds=names(
            zero_stage=setting["stage"],
            adam_offload=setting["offload"],
            param_dtype=setting["dtype"],
            overlap_comm=True,
            tensor_parallel_size=1,
            ring_attn_size=1,
            packing_samples=False,
        ),
        train=names(
            batch_size=8,
            micro_batch_size=2,
            max_epochs=2,
            max_tokens_per_gpu=24,
            dynamic_batch_enable=more.get("dynamic", False),
            colocate_all=False,
            async_enable=False,
            seed=3,
        ),
        rollout=names(batch_size=16, n_samples_per_prompt=1),
        model=names(aux_loss_coef=0.0),
        actor=names(
            eps_clip_low_high=[0.2, 0.2],
            dual_clip=None,
            loss_agg_mode="token-mean",
            policy_loss_type="ppo",
            aux_loss_coef=0.0,
            entropy_coef=0.01,
        ),
        algo=names(
            advantage=advantage,
            kl=names(use_loss=True, init_coef=0.1, estimator="k2", unbiased_gradient=False),
        ),
        logger=names(logging_steps=1, tensorboard_dir=None, wandb=names(key=None)),
        eval=names(steps=-1),
        ckpt=names(path=more.get("path"), save_steps=2, max_num=3, max_mem=1000),
        vllm=names(num_engines=1, tensor_parallel_size=1, sync_backend="gloo"),
    )


TRAINING = {
    "optim": "adam",
    "adam": {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.25,
    "min_lr_ratio": 0.1,
    "max_norm": 0.5,
    "scheduler_steps": 8,
}
