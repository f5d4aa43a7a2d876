"""ds_report says what a maintainer asks first."""

import re

import torch

import deepspeed
from deepspeed.env_report import main


def test_report_names_versions_compiler_level_and_ops(op, capsys):
    main([])
    report = capsys.readouterr().out
    for name, value in (
        ("deepspeed version", deepspeed.__version__),
        ("torch version", torch.__version__),
        ("vector level", op.simd_level()),
    ):
        assert re.search(rf"^{name} \.+ {re.escape(value)}$", report, re.MULTILINE), name
    assert re.search(r"^C\+\+ compiler \.+ /\S+", report, re.MULTILINE)
    assert re.search(r"^cpu_adam \.+ (built at install|builds at first use)$", report, re.MULTILINE)
    assert re.search(r"^async_io \.+ not available$", report, re.MULTILINE)


def test_report_without_a_compiler_says_why_and_does_not_fail(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    main([])
    report = capsys.readouterr().out
    assert re.search(r"^cpu_adam \.+ not available$", report, re.MULTILINE)
    assert "CXX: expected a C++17 compiler, got no-such-compiler" in report


def test_report_builds_nothing_when_told_so(monkeypatch, capsys):
    monkeypatch.setattr("deepspeed.env_report._op_lines", None)
    main(["--hide_operator_status"])
    assert "torch version" in capsys.readouterr().out
