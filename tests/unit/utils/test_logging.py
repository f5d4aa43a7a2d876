"""The package's logger and logging from chosen ranks."""

import logging

import pytest

import deepspeed
from deepspeed.utils import log_dist, logger, set_log_level_from_string


def test_both_import_paths_are_one_logger():
    assert isinstance(logger, logging.Logger)
    assert deepspeed.utils.logging.logger is logger is deepspeed.logger


def test_records_go_to_standard_output_with_their_place(capsys):
    logger.warning("something happened")
    out = capsys.readouterr().out
    assert "[WARNING] [test_logging.py:" in out
    assert out.endswith("something happened\n")


def test_the_root_logger_stays_as_it_was(capsys):
    logger.warning("once")
    assert capsys.readouterr().out.count("once") == 1
    assert not any(
        type(handler).__module__.startswith("deepspeed") for handler in logging.getLogger().handlers
    )


@pytest.mark.parametrize(
    ("rank", "ranks", "logged"),
    [
        ("0", None, True),
        ("1", None, True),
        ("0", [0], True),
        ("1", [0], False),
        ("1", [-1], True),
        ("2", [1, 2], True),
    ],
)
def test_log_dist_logs_on_the_ranks_it_names(monkeypatch, caplog, rank, ranks, logged):
    monkeypatch.setenv("RANK", rank)
    log_dist("here", ranks=ranks, level=logging.WARNING)
    assert (f"[Rank {rank}] here" in caplog.text) is logged


def test_levels_by_name():
    other = logging.getLogger("test_levels_by_name")
    set_log_level_from_string("Error", other)
    assert other.level == logging.ERROR
    with pytest.raises(ValueError, match="log_level: expected one of debug, info"):
        set_log_level_from_string("loud", other)
