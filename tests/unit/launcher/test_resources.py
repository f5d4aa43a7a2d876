"""Which devices a command line means."""

import pytest

from deepspeed.launcher.resources import choose_resources, parse_filter, parse_hostfile

POOL = {"a": [0, 1, 2, 3], "b": [0, 1]}


@pytest.mark.parametrize("path", [None, "", "None", "missing-hostfile"])
def test_no_hostfile_means_this_machine(path):
    assert parse_hostfile(path) is None


def test_a_hostfile_lists_slots_by_host(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# cluster\na slots=4\n\nb   slots=2  # small\n")
    assert parse_hostfile(str(path)) == {"a": 4, "b": 2}


@pytest.mark.parametrize("text", ["a 4", "a slots=x", "a slots=2\na slots=2"])
def test_a_wrong_line_is_shown_with_its_number(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    number = len(text.splitlines())
    with pytest.raises(ValueError, match=rf"--hostfile: expected lines 'host slots=N' .* in line {number}"):
        parse_hostfile(str(path))


def test_an_empty_hostfile_is_an_error(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match="--hostfile: expected at least one host"):
        parse_hostfile(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", {"a": None}), ("a:2,0", {"a": [0, 2]}), ("a@b:1", {"a": None, "b": [1]}), ("", {})],
)
def test_filters_name_hosts_and_slots(text, expected):
    assert parse_filter(text, "--include") == expected


@pytest.mark.parametrize("text", ["a:", "a:x", ":1", "a@a:1"])
def test_a_malformed_filter_is_an_error(text):
    with pytest.raises(ValueError, match=r"--include: expected HOST\[:SLOT,...\]"):
        parse_filter(text, "--include")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, POOL),
        ({"num_gpus": 2}, {"a": [0, 1], "b": [0, 1]}),
        ({"num_nodes": 1}, {"a": [0, 1, 2, 3]}),
        ({"include": "b"}, {"b": [0, 1]}),
        ({"include": "a:3,1@b:0"}, {"a": [1, 3], "b": [0]}),
        ({"exclude": "b"}, {"a": [0, 1, 2, 3]}),
        ({"exclude": "a:0,1@b:1"}, {"a": [2, 3], "b": [0]}),
    ],
)
def test_flags_choose_devices(flags, expected):
    assert choose_resources(POOL, **flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"include": "a", "exclude": "b"}, "--include: expected no --exclude beside it"),
        ({"include": "a", "num_gpus": 1}, "expected neither beside --include or --exclude"),
        ({"num_gpus": 3}, "--num_gpus: expected at most 2, the devices of b, got 3"),
        ({"num_gpus": 0}, "--num_gpus: expected at least 1, got 0"),
        ({"num_nodes": -3}, "--num_nodes: expected at least 1, got -3"),
        ({"include": "c"}, "--include: expected one of the hosts a, b, got 'c'"),
        ({"exclude": "a:9"}, r"--exclude: expected slots of a among \[0, 1, 2, 3\], got 9"),
        ({"exclude": "a@b"}, "--exclude: expected it to leave a device"),
    ],
)
def test_contradictions_name_the_flag(flags, message):
    with pytest.raises(ValueError, match=message):
        choose_resources(POOL, **flags)
