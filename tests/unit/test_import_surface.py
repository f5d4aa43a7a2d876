"""What clients import resolves, has no side effects, and refuses clearly when it is used."""

import importlib
import subprocess
import sys
import textwrap

import pytest
import torch

import deepspeed

# Module -> names, from the clients' own sources.
SURFACE = {
    "deepspeed": "initialize init_distributed DeepSpeedEngine __version__ version zero comm checkpointing "
    "tp_model_init",
    "deepspeed.comm": "is_initialized init_distributed get_rank get_world_size barrier all_reduce broadcast",
    "deepspeed.zero": "Init GatheredParameters register_external_parameter",
    "deepspeed.checkpointing": "configure checkpoint is_configured reset",
    "deepspeed.accelerator": "get_accelerator",
    "deepspeed.utils": "logger set_z3_leaf_modules safe_get_full_grad is_initialized groups log_dist "
    "see_memory_usage",
    "deepspeed.utils.logging": "logger log_dist",
    "deepspeed.utils.groups": "_get_sequence_parallel_group _get_sequence_parallel_world_size "
    "_get_sequence_parallel_rank",
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion": "DeepSpeedCPULion",
    "deepspeed.ops.aio": "AsyncIOBuilder",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.runtime.lr_schedules": "VALID_LR_SCHEDULES WarmupLR",
    "deepspeed.runtime.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.utils": "move_to_device see_memory_usage",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.runtime.zero.partition_parameters": "ZeroParamStatus zero_wrapper_for_fp_tensor_constructor "
    "_orig_torch_arange get_accelerator",
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter "
    "TiledMLP",
    "deepspeed.module_inject": "tp_model_init",
    "deepspeed.module_inject.layers": "GatherReplacedLayerParams",
    "deepspeed.elasticity": "compute_elastic_config",
    "deepspeed.git_version_info": "version git_hash git_branch",
    "deepspeed.launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint get_model_state_file "
    "get_optim_files load_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict",
    "deepspeed.utils.timer": "SynchronizedWallClockTimer ThroughputTimer NoopTimer",
    "deepspeed.monitor.monitor": "MonitorMaster Monitor",
    "deepspeed.monitor.config": "get_monitor_config DeepSpeedMonitorConfig",
    "deepspeed.monitor.csv_monitor": "csvMonitor",
    "deepspeed.monitor.tensorboard": "TensorBoardMonitor",
    "deepspeed.monitor.wandb": "WandbMonitor",
    "deepspeed.moe.layer": "MoE",
    "deepspeed.pipe": "PipelineModule LayerSpec TiedLayerSpec",
}
# Attribute chains that must resolve after `import deepspeed` alone.
CHAINS = [
    "runtime.lr_schedules.VALID_LR_SCHEDULES",
    "comm.is_initialized",
    "zero.Init",
    "checkpointing.configure",
    "utils.logging.logger",
    "utils.set_z3_leaf_modules",
    "utils.safe_get_full_grad",
    "module_inject.layers.GatherReplacedLayerParams",
]


@pytest.mark.parametrize("module", SURFACE)
def test_clients_imports_resolve(module):
    imported = importlib.import_module(module)
    assert not [name for name in SURFACE[module].split() if not hasattr(imported, name)]


def in_fresh_python(body):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_top_level_import_alone_makes_attribute_chains_resolve():
    in_fresh_python(f"""
        import functools, deepspeed
        for chain in {CHAINS!r}:
            functools.reduce(getattr, chain.split("."), deepspeed)
    """)


def test_import_has_no_side_effects():
    out = in_fresh_python("""
        import os, sys, threading, torch
        threads, environment, running = torch.get_num_threads(), dict(os.environ), threading.active_count()
        rng = torch.get_rng_state()
        import deepspeed
        assert torch.get_num_threads() == threads
        assert dict(os.environ) == environment
        assert threading.active_count() == running
        assert torch.equal(torch.get_rng_state(), rng)
        assert not torch.distributed.is_initialized()
        assert not torch.cuda.is_initialized()
        assert not [name for name in sys.modules if name.startswith("cpu_adam")]
        assert "torch.utils.cpp_extension" not in sys.modules
    """)
    assert out == ""


def test_the_version_is_comparable_and_the_same_everywhere():
    from packaging.version import Version

    from deepspeed.git_version_info import version

    assert Version(deepspeed.__version__) >= Version("0.19.8")
    assert deepspeed.__version__ == deepspeed.version == version == "0.19.8+lean.0.1.0"


def test_names_of_stage_3_are_no_ops_where_clients_enter_them_below_it():
    model = torch.nn.Linear(2, 2)
    with deepspeed.zero.Init(enabled=False, remote_device=None, config_dict_or_path={"train_batch_size": 1}):
        pass
    with deepspeed.zero.GatheredParameters([model.weight], enabled=False):
        pass
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.weight.data.fill_(1)
    deepspeed.zero.register_external_parameter(model, model.weight)
    assert not [name for name in vars(model.weight) if name.startswith("ds_")]


def test_an_error_inside_a_no_op_context_gets_out():
    with pytest.raises(KeyError), deepspeed.zero.Init(enabled=False):
        raise KeyError("mine")


def _refused():
    from deepspeed.module_inject.layers import GatherReplacedLayerParams
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        TiledMLP,
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import zero_wrapper_for_fp_tensor_constructor
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    split = torch.nn.Linear(1, 1)
    split.mp_group = object()
    return {
        "deepspeed.zero.Init": lambda: deepspeed.zero.Init(),
        "zero_wrapper": lambda: zero_wrapper_for_fp_tensor_constructor(torch.zeros, torch.float16),
        "DeepSpeedZeroOptimizer_Stage3": lambda: DeepSpeedZeroOptimizer_Stage3(),
        "DeepSpeedZeRoOffload": lambda: DeepSpeedZeRoOffload(None),
        "MoE": lambda: MoE(4, None),
        "PipelineModule": lambda: PipelineModule([]),
        "TiledMLP": lambda: TiledMLP.apply(),
        "UlyssesSPAttentionHF": lambda: UlyssesSPAttentionHF.register_with_transformers("model"),
        "UlyssesSPDataLoaderAdapter": lambda: UlyssesSPDataLoaderAdapter(None),
        "GatherReplacedLayerParams": lambda: GatherReplacedLayerParams([split.weight], split),
        "tp_model_init": lambda: deepspeed.tp_model_init(split, 2, torch.float16),
        "compute_elastic_config": lambda: importlib.import_module(
            "deepspeed.elasticity"
        ).compute_elastic_config({}, "0"),
        "sequence": lambda: deepspeed.utils.groups._get_sequence_parallel_group(),
    }


@pytest.mark.parametrize("name", sorted(_refused()))
def test_what_is_not_here_refuses_at_use_and_says_what_to_do(name):
    with pytest.raises(NotImplementedError, match=rf"{name}.*: expected .*, got .*\. \S") as caught:
        _refused()[name]()
    assert "not here" in str(caught.value)


def test_a_tensor_parallel_size_of_1_is_the_model_itself():
    model = torch.nn.Linear(1, 1)
    assert deepspeed.tp_model_init(model=model, tp_size=1, dtype=torch.float16) is model


def test_groups_of_other_parallelisms_have_one_rank():
    groups = deepspeed.utils.groups
    assert groups._get_sequence_parallel_world_size() == groups._get_model_parallel_world_size() == 1
    assert groups._get_sequence_parallel_rank() == groups._get_model_parallel_rank() == 0


def test_leaf_modules_can_be_marked_at_any_stage():
    from deepspeed.utils import (
        get_z3_leaf_modules,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1))
    assert set_z3_leaf_modules(model, [torch.nn.Linear]) == [model[0], model[2]]
    assert set_z3_leaf_modules(model, ["ReLU", "torch.nn.modules.container.Sequential"]) == [model, model[1]]
    assert len(get_z3_leaf_modules(model)) == 4
    unset_z3_leaf_modules(model, ["Linear"])
    assert not z3_leaf_module(model[0])
    assert set_z3_leaf_modules(model, ["Conv2d"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="leaf_module_classes: expected classes of modules in the model"):
        set_z3_leaf_modules(model, ["Conv2d"])
