"""The README's tables say what the code does."""

import inspect
import json
import re

import pytest

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_features import FEATURES
from deepspeed.runtime.config_notices import WITHOUT_EFFECT
from deepspeed.runtime.config_refusals import REFUSED_KEYS
from deepspeed.runtime.config_settings import Settings
from deepspeed.runtime.config_tree import paths_of
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from tests.unit import config_table, source_tree
from tests.unit.test_signatures import resolved

README = (source_tree.ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
ENABLED = ".enabled"


def names_in(text):
    return re.findall(r"`([^`]+)`", text)


def keys_that(happens):
    """The keys in the row of the configuration table that begins with these words."""
    table = README.partition("<!-- keys")[2].partition("\n\n")[0]
    rows = re.findall(rf"^\| {re.escape(happens)}[^|]*\|([^|]*)\|$", table, re.MULTILINE)
    assert len(rows) == 1, f"expected one row {happens!r}"
    names = names_in(rows[0])
    assert len(set(names)) == len(names)
    return set(names)


def top_level_keys(model):
    return {path for _, path in paths_of(model) if "." not in path}


def test_every_key_that_the_configuration_knows_stands_in_one_row():
    switched_off = {refusal.path for refusal in REFUSED_KEYS}
    monitors = {path.removesuffix(ENABLED) for path in switched_off if path.endswith(ENABLED)}
    values = {path for path in switched_off if not path.endswith(ENABLED)}
    assert keys_that("refused when switched on") == set(FEATURES) | monitors
    assert keys_that("refused at some values") == values
    assert keys_that("change nothing, and the log says so") == set(WITHOUT_EFFECT)
    others = [keys_that("work "), keys_that("change nothing "), set(WITHOUT_EFFECT), monitors]
    only_refused = {path for path in values if "." not in path}
    assert sum(map(len, others)) + len(only_refused) == len(top_level_keys(Settings))
    assert set.union(*others) | only_refused == top_level_keys(Settings)


def test_every_key_stands_in_the_long_table_as_the_code_has_it():
    assert config_table.PAGE.read_text() == config_table.render(), "run python -m tests.unit.config_table"


def called(name):
    """What a name in the table of calls stands for."""
    return resolved(re.sub(r"^engine\.", "deepspeed.DeepSpeedEngine.", name))


def calls_that(happens):
    """The names in a row of the table of calls, which follows its comment."""
    table = README.partition("<!-- calls")[2].partition("\n\n")[0]
    (row,) = re.findall(rf"^\| {re.escape(happens)} \|([^|]*)\|$", table, re.MULTILINE)
    return names_in(row)


def test_the_calls_that_work_exist():
    for name in calls_that("work") + calls_that("do nothing, as below stage 3 in stock"):
        assert called(name) is not None


def test_the_calls_that_are_refused_say_what_to_do():
    for name in calls_that("refused"):
        found = called(name)
        own = [p for p in inspect.signature(found).parameters.values() if p.name != "args"]
        needed = [None for parameter in own if parameter.default is parameter.empty and parameter.kind < 2]
        with pytest.raises(NotImplementedError, match=rf"{name.rpartition('.')[2]}: expected .*\. \w"):
            found(*needed)


def test_the_keys_of_zero_optimization_that_work_exist():
    assert keys_that("work, in `zero_optimization`") <= top_level_keys(DeepSpeedZeroConfig)


def test_the_configuration_that_the_readme_shows_is_valid():
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    config = DeepSpeedConfig(json.loads(block))
    assert config.zero_optimization.offloads_optimizer


def test_the_default_of_clipping_is_what_the_readme_says():
    assert DeepSpeedConfig({"train_batch_size": 1}).gradient_clipping == 1.0


def test_every_environment_variable_of_our_own_is_explained():
    files = [*source_tree.package_files(), *source_tree.cpp_files(), source_tree.ROOT / "setup.py"]
    read = {name for path in files for name in re.findall(r"\"(DS_[A-Z_]+)\"", path.read_text())}
    # The switch of an op that is not here: it builds nothing.
    read -= {"DS_BUILD_AIO"}
    explained = {name for name in names_in(PROSE) if re.fullmatch(r"DS_[A-Z_]+", name)}
    assert explained == read


def test_every_link_to_a_file_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (source_tree.ROOT / target).exists(), target
