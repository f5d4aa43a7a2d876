"""What bounds host memory, read from a folder that stands for the root of the machine."""

import resource

import pytest

from deepspeed.utils.host_limits import find_limits, lockable_nbytes

MOUNTS = {
    2: "31 24 0:27 {shown} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    1: "35 31 0:32 {shown} /sys/fs/cgroup rw,relatime - cgroup cgroup rw,memory\n",
}
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}


def machine(root, version, path, shown="/"):
    """A machine with one hierarchy of control groups, and this process in one of them."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:  64 kB\nHugePages_Total: 0\n")
    controllers = "cpuacct,memory" if version == 1 else ""
    (root / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n4:{controllers}:{path}\n")
    other = "21 1 0:20 / /sys rw - sysfs\n"
    (root / "proc/self/mountinfo").write_text(other + MOUNTS[version].format(shown=shown))


def group(root, version, path, limit, used):
    """A control group with 3 and 4 bytes of droppable page cache."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    names = NAMES[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 9\n{names[2]} 3\n{names[3]} 4\n")


def found(root):
    return {limit.name: limit.free_nbytes for limit in find_limits(root)}


@pytest.mark.parametrize("version", [1, 2])
def test_each_group_above_the_process_that_has_a_limit_counts(version, tmp_path):
    machine(tmp_path, version, "/pod/job/step")
    group(tmp_path, version, "pod", 1000, 900)
    group(tmp_path, version, "pod/job", "max" if version == 2 else (1 << 63) - 4096, 500)
    group(tmp_path, version, "pod/job/step", 400, 450)
    assert found(tmp_path) == {
        "machine: MemAvailable": 64 * 1024,
        "cgroup: /sys/fs/cgroup/pod": 1000 - 900 + 7,
        "cgroup: /sys/fs/cgroup/pod/job/step": 0,
    }
    scopes = [limit.scope for limit in find_limits(tmp_path)]
    assert len(set(scopes)) == len(scopes), "each is shared by others"


@pytest.mark.parametrize(("path", "shown"), [("/docker/4f", "/docker/4f"), ("/", "/"), ("/../x", "/")])
@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_mount_itself_is_the_group(version, path, shown, tmp_path):
    machine(tmp_path, version, path, shown)
    group(tmp_path, version, "", 1000, 100)
    assert found(tmp_path)["cgroup: /sys/fs/cgroup"] == 907


def test_a_machine_that_says_nothing_has_no_limits(tmp_path):
    assert find_limits(tmp_path) == []


def test_page_locking_is_bound_by_memlock_unless_the_process_may_exceed_it(tmp_path, monkeypatch):
    (tmp_path / "proc/self").mkdir(parents=True)
    status = tmp_path / "proc/self/status"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 16, 1 << 16))
    status.write_text("VmLck:\t      16 kB\nCapEff:\t000001ffffffbfff\n")
    assert lockable_nbytes(tmp_path) == (1 << 16) - (16 << 10)
    status.write_text("VmLck:\t      16 kB\nCapEff:\t0000000000004000\n")
    assert lockable_nbytes(tmp_path) is None
