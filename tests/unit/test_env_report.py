"""ds_report tells what a bug report needs."""

import platform

import torch

import deepspeed
from deepspeed import env_report


def test_the_report_names_versions_and_compiler(capsys):
    env_report.main(["--hide_operator_status"])
    rows = dict(line.split(" ..", 1) for line in capsys.readouterr().out.splitlines() if " .." in line)
    assert rows["deepspeed version"].endswith(" " + deepspeed.__version__)
    assert rows["torch version"].endswith(" " + torch.__version__)
    assert platform.python_version() in rows["Python version"]
    assert "++" in rows["C++ compiler"]


def test_ops_and_the_reason_why_one_is_missing(capsys):
    env_report.main([])
    out = capsys.readouterr().out
    rows = {line.split(" ")[0]: line for line in out.splitlines()}
    assert rows["cpu_adam"].endswith(("builds at first use", "built at install"))
    assert rows["async_io"].endswith("not available")
    assert "    async_io: expected no use of NVMe offload" in out
    assert out.split("vector level ")[1].splitlines()[0].split()[-1] in ("scalar", "avx2", "avx512", "neon")
    env_report.main(["--hide_errors_and_warnings"])
    assert "expected no use of NVMe offload" not in capsys.readouterr().out


def test_without_a_compiler_the_report_still_comes(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(env_report.CPUAdamBuilder, "is_prebuilt", lambda self: False)
    env_report.main([])
    out = capsys.readouterr().out
    assert "CXX: expected a C++17 compiler, got no-such-compiler" in out
    assert "torch version" in out


def test_op_status_can_be_left_out(capsys):
    env_report.main(["--hide_operator_status"])
    assert "op report" not in capsys.readouterr().out
