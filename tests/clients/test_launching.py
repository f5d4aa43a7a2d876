"""Every launcher of the clients' tests starts two ranks of one world; a missing client is no silent pass."""

import pytest

from tests.clients.launching import LAUNCHERS, clients, run_job

pytestmark = clients("accelerate")


@pytest.mark.parametrize("launcher", [name for name, command in LAUNCHERS.items() if command])
def test_each_launcher_makes_one_world_of_two_ranks(launcher, tmp_path):
    flags = ["--multi_gpu"] if launcher == "accelerate" else []
    reports = run_job("hello_job.py", {"by": launcher}, tmp_path, launcher, flags).check()
    assert reports == [{"task": {"by": launcher}, "batch": 2, "rank": rank} for rank in (0, 1)]


def test_a_missing_client_skips_its_tests_but_not_under_make_test_clients(monkeypatch):
    monkeypatch.delenv("DS_REQUIRE_CLIENTS", raising=False)
    *_, skip = clients("no_such_client")
    assert skip.name == "skip" and "no_such_client not installed" in skip.kwargs["reason"]
    monkeypatch.setenv("DS_REQUIRE_CLIENTS", "1")
    with pytest.raises(RuntimeError, match="no_such_client: expected to be installed"):
        clients("no_such_client")
