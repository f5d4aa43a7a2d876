"""Every launcher of the clients' tests starts two ranks of one world, and a failing job shows why."""

import pytest

from tests.clients.launching import LAUNCHERS, clients, run_job

pytestmark = clients("accelerate")


@pytest.mark.parametrize("launcher", [name for name, command in LAUNCHERS.items() if command])
def test_each_launcher_makes_one_world_of_two_ranks(launcher, tmp_path):
    flags = ["--multi_gpu"] if launcher == "accelerate" else []
    reports = run_job("hello_job.py", {"by": launcher}, tmp_path, launcher, flags).check()
    assert reports == [{"task": {"by": launcher}, "batch": 2, "rank": rank} for rank in (0, 1)]
