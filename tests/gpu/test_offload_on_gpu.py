"""Offload with a real device: streams, staging ring and threads change nothing about the numbers."""

import dataclasses
import time

import pytest
import torch

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import engine_setup
from deepspeed.runtime.zero import ring, staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, STEPS = 515, 4


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + 0.1 * self.linear(x)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block(WIDTH) for _ in range(6)])


def make_batch(step, micro):
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(16, WIDTH, generator=generator)


def make_config(dtype, gas, pin, bucket=20_000, clip=0.1):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        dtype: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": bucket,
            "offload_optimizer": {"device": "cpu", "pin_memory": pin},
        },
    }


def train(config, monkeypatch, tile_numel=10_000, steps=STEPS):
    settings = engine_setup.zero_settings
    monkeypatch.setattr(
        engine_setup,
        "zero_settings",
        lambda config, device: dataclasses.replace(
            settings(config, device), tile_numel=tile_numel, download_numel=tile_numel
        ),
    )
    engine, optimizer, _, _ = deepspeed.initialize(model=make_model(), config=config)
    dtype = next(engine.parameters()).dtype
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(make_batch(step, micro).to(engine.device, dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
    weights = torch.cat([param.detach().float().cpu().flatten() for param in engine.parameters()])
    masters = [master.clone() for master in optimizer.single_partition_of_fp32_groups]
    report = engine.memory_report()
    engine.destroy()
    return weights, masters, report


@pytest.mark.parametrize("gas", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_do_not_depend_on_pinning_tiles_or_buckets(dtype, gas, monkeypatch):
    reference = None
    for pin in (True, False):
        for tile_numel, bucket in ((1_000, 20_000), (1 << 20, 10_000_000), (77_777, 300_000)):
            with monkeypatch.context() as patch:
                weights, masters, _ = train(make_config(dtype, gas, pin, bucket), patch, tile_numel)
            if reference is None:
                reference = (weights, masters)
            assert torch.equal(weights, reference[0])
            assert torch.equal(masters[0], reference[1][0])
    assert torch.isfinite(reference[0]).all()


@pytest.mark.parametrize("gas", [1, 3])
def test_offload_matches_a_plain_loop_bitwise(gas, monkeypatch):
    """The same arithmetic without any of the machinery: fp32 accumulation on the host, one Adam call."""
    weights, masters, _ = train(make_config("bf16", gas, True, clip=0.0), monkeypatch)
    model = make_model().to("cuda", torch.bfloat16)
    flat = torch.cat([param.detach().float().cpu().flatten() for param in model.parameters()])
    master = torch.nn.Parameter(flat)
    adam = DeepSpeedCPUAdam([master], lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        total = torch.zeros_like(flat)
        for micro in range(gas):
            loss = model(make_batch(step, micro).to("cuda", torch.bfloat16)).float().pow(2).mean() / gas
            loss.backward()
            total += torch.cat([param.grad.float().cpu().flatten() for param in model.parameters()])
            model.zero_grad()
        master.grad = total
        adam.step()
        start = 0
        for param in model.parameters():
            param.data.copy_(master.data[start : start + param.numel()].view_as(param))
            start += param.numel()
    assert torch.equal(masters[0], master.data)
    assert torch.equal(
        weights, torch.cat([param.detach().float().cpu().flatten() for param in model.parameters()])
    )


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("gas", [1, 3])
def test_delays_in_copies_change_nothing(gas, pin, monkeypatch):
    with monkeypatch.context() as patch:
        expected = train(make_config("bf16", gas, pin), patch)[0]
    deliver, upload, launch = (
        ring.Downloader._deliver,
        staging.UploadPublisher.close_chunk,
        ring.Downloader._launch_copies,
    )

    def slow_deliver(self, *args):
        time.sleep(0.002)
        deliver(self, *args)

    def slow_upload(self, *args):
        time.sleep(0.001)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000)
        upload(self, *args)

    def slow_launch(self, *args):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000)
        launch(self, *args)

    monkeypatch.setattr(ring.Downloader, "_deliver", slow_deliver)
    monkeypatch.setattr(staging.UploadPublisher, "close_chunk", slow_upload)
    monkeypatch.setattr(ring.Downloader, "_launch_copies", slow_launch)
    assert torch.equal(train(make_config("bf16", gas, pin), monkeypatch)[0], expected)


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("gas", [1, 3])
def test_residual_masters_give_the_bits_of_fp32_masters(gas, pin, monkeypatch):
    results = []
    for form in ("fp32", "bf16_residual"):
        config = make_config("bf16", gas, pin)
        config["zero_optimization"]["offload_optimizer"]["master_weights"] = form
        for tile_numel in (2_560, 77_777):
            with monkeypatch.context() as patch:
                results.append(train(config, patch, tile_numel)[:2])
    for weights, masters in results:
        assert torch.equal(weights, results[0][0]) and torch.equal(masters[0], results[0][1][0])


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_smaller_moments_do_not_depend_on_tiles_or_pinning(moments, monkeypatch):
    results = []
    for pin, tile_numel in ((True, 2_560), (False, 77_777), (True, 1 << 20)):
        config = make_config("bf16", 1, pin)
        offload = config["zero_optimization"]["offload_optimizer"]
        offload.update(optimizer_states=moments, master_weights="bf16_residual")
        with monkeypatch.context() as patch:
            results.append(train(config, patch, tile_numel)[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.isfinite(results[0]).all()


def test_only_the_staging_ring_is_pinned_and_only_when_asked(monkeypatch):
    with monkeypatch.context() as patch:
        pinned = train(make_config("bf16", 1, True), patch, steps=1)[2]
    assert {entry["name"].split("[")[0] for entry in pinned if entry["pinned"]} == {"staging"}
    unpinned = train(make_config("bf16", 1, False), monkeypatch, steps=1)[2]
    assert not any(entry["pinned"] for entry in unpinned)


def test_failing_to_pin_warns_and_trains_on(monkeypatch, caplog):
    class Refusing:
        def cudaHostRegister(self, *args):
            return 2

    with monkeypatch.context() as patch:
        expected = train(make_config("bf16", 1, False), patch, steps=2)[0]
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    deepspeed.logger.propagate = True
    weights = train(make_config("bf16", 1, True), monkeypatch, steps=2)[0]
    assert "page-locking" in caplog.text
    assert torch.equal(weights, expected)


def test_device_memory_is_the_weights_and_the_buckets(monkeypatch):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = torch.nn.Sequential(*[Block(2048) for _ in range(24)]).bfloat16()
    numel = sum(param.numel() for param in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    engine, *_ = deepspeed.initialize(model=model, config=make_config("bf16", 1, True, bucket=10_000_000))
    for _ in range(2):
        engine.backward(
            engine(torch.ones(4, 2048, device="cuda", dtype=torch.bfloat16)).float().pow(2).mean()
        )
        engine.step()
    torch.cuda.synchronize()
    # cuBLAS keeps a workspace; 64 MB allows for it and for activations.
    assert torch.cuda.memory_allocated() - before < 2.0 * numel + 64e6
    # Two buckets of 10 M elements, the gradients of one, and what a backward pass has in hand.
    assert torch.cuda.max_memory_allocated() - before < 2.0 * numel + 4 * 2 * 10e6 + 64e6
    engine.destroy()


@pytest.mark.parametrize("offload", [True, False])
def test_a_reloaded_run_goes_on_with_the_same_bits(offload, tmp_path):
    config = make_config("bf16", 1, True)
    config["zero_optimization"]["offload_optimizer"]["device"] = "cpu" if offload else "none"

    def run(engine, first, last):
        for step in range(first, last):
            loss = engine(make_batch(step, 0).to(engine.device, torch.bfloat16)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
        return torch.cat([param.detach().flatten() for param in engine.parameters()])

    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    run(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path))
    expected = run(engine, 2, 4)
    engine.destroy()
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert path is not None
    assert torch.equal(run(engine, 2, 4), expected)
    engine.destroy()
