"""A configuration arrives as a mapping, a path, JSON text or base64, under one of three arguments."""

import argparse
import base64
import copy
import json
import pickle
from collections import UserDict

import pytest
import torch

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, choose_config

CONFIG = {"train_batch_size": 6, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    return file


def test_every_form_of_a_configuration_reads_the_same(path):
    text = json.dumps(CONFIG)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (CONFIG, path, str(path), text, encoded):
        config = DeepSpeedConfig(source)
        assert (config.train_batch_size, config.zero_optimization.reduce_bucket_numel) == (6, 200_000_000)
        assert config.raw == CONFIG


def test_raw_is_the_callers_own_mapping_and_stays_as_it_was():
    config = {
        "train_batch_size": 4,
        "bfloat16": {"enabled": True},
        "zero_optimization": {"cpu_offload": True, "stage": 1, "reduce_bucket_size": "auto"},
        "zero_optimization.reduce_bucket_size": 7,
    }
    before = copy.deepcopy(config)
    made = DeepSpeedConfig(config)
    assert made.raw is config
    assert config == before
    assert made.bf16.enabled
    assert made.zero_optimization.reduce_bucket_numel == 7


def test_any_mapping_is_accepted():
    assert DeepSpeedConfig(UserDict(CONFIG)).zero_optimization.stage == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "no/such/file.json",
            "expected an existing file, JSON text or base64 of it, got 'no/such/file.json'",
        ),
        ("{not json", "expected valid JSON in JSON text"),
        (base64.b64encode(b"[1]").decode(), "expected a JSON object in base64 text"),
        (17, "expected a mapping, a path or JSON text, got int"),
    ],
)
def test_an_unreadable_source_is_one_clear_error(source, words):
    with pytest.raises(DeepSpeedConfigError) as error:
        DeepSpeedConfig(source)
    assert words in str(error.value)


def test_a_repeated_key_is_an_error_not_the_last_value(tmp_path):
    file = tmp_path / "twice.json"
    file.write_text('{"train_batch_size": 4, "fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(
        DeepSpeedConfigError, match="enabled: expected one value in .*twice.json, got True and False"
    ):
        DeepSpeedConfig(file)


def test_config_is_chosen_from_any_of_the_three_arguments():
    assert choose_config(config=CONFIG) is CONFIG
    assert choose_config(config_params=CONFIG) is CONFIG
    assert choose_config(args=argparse.Namespace(deepspeed_config="a.json")) == "a.json"
    assert choose_config(args={"local_rank": 0}, config=CONFIG) is CONFIG
    assert choose_config(args=argparse.Namespace(device_rank=0), config=CONFIG) is CONFIG


def test_the_same_config_twice_is_accepted_and_two_different_ones_are_not():
    assert choose_config(args={"deepspeed_config": "a.json"}, config="a.json") == "a.json"
    with pytest.raises(
        DeepSpeedConfigError, match="config and args.deepspeed_config: expected one configuration"
    ):
        choose_config(args={"deepspeed_config": "b.json"}, config="a.json")


def test_no_config_at_all_says_where_to_pass_it():
    with pytest.raises(DeepSpeedConfigError, match="Pass config= to deepspeed.initialize"):
        choose_config(args=argparse.Namespace(deepspeed_config=None))


def test_a_config_is_frozen_and_can_be_copied_and_pickled():
    config = DeepSpeedConfig(CONFIG, world_size=2)
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 8
    with pytest.raises(ValueError, match="frozen"):
        config.zero_optimization.stage = 0
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert (twin.raw, twin.world_size, twin.dtype) == (CONFIG, 2, torch.float32)
