"""Saving, loading and converting a checkpoint hold nothing in memory beside the training state.

Measured as growth of anonymous memory: pages of mapped files are the page cache's and go when memory is
short.
"""

import pytest

from tests.memory.checkpoint_job import HIDDEN, run_checkpoint_job

LAYERS = 48
NUMEL = LAYERS * HIDDEN**2  # 201 million
LIMIT_NBYTES = 0.3 * NUMEL


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of one rank, and what saving it took."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_checkpoint_job("save", folder, LAYERS)[0]


def test_saving_grows_by_at_most_three_tenths_of_a_byte_a_parameter(checkpoint):
    assert max(checkpoint[1].values()) <= LIMIT_NBYTES


def test_loading_grows_by_at_most_three_tenths_of_a_byte_a_parameter(checkpoint):
    phases = run_checkpoint_job("load", checkpoint[0], LAYERS)[0]
    assert phases["load"] <= LIMIT_NBYTES


def test_loading_on_two_ranks_what_one_saved_grows_no_more(checkpoint):
    """Each reads its own half out of the one file."""
    for phases in run_checkpoint_job("load", checkpoint[0], LAYERS, world=2):
        assert phases["load"] <= LIMIT_NBYTES


def test_conversion_holds_less_than_the_shard_that_it_writes(checkpoint):
    phases = run_checkpoint_job("convert", checkpoint[0], LAYERS)[0]
    assert len(phases) == 2 and max(phases.values()) <= 200e6
