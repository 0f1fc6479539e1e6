"""Main memory of the node and of the job's cgroup: files as kernels and container runtimes show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.node.host_memory import HostMemory, memory_counters, memory_now_bytes

TASK = "/slurm/uid_0/job_7/step_0/task_0"
# Lines of /proc/self/mountinfo, the first as a Debian 12 host shows it. In pyxis' containers the folder above the
# task's, its step's, is mounted (seen with pyxis 0.24.0 and enroot 4.1.2).
HOST_V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
STEP_V1 = (
    "812 800 0:32 /slurm/uid_0/job_7/step_0 /sys/fs/cgroup/memory ro,relatime master:9 - cgroup cgroup rw,memory\n"
)
HOST_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
STEP_V2 = "812 800 0:26 /job_7/step_0 /sys/fs/cgroup ro,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A root file system; `files` are below /sys/fs/cgroup."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(groups)
    (root / "proc" / "self" / "mountinfo").write_text(
        "23 1 254:0 / / rw,relatime - ext4 /dev/vda rw\nnot a line of it\n" + mounts
    )
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_1(folder: str, limit: int | str, peak: int, kills: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.max_usage_in_bytes": f"{peak}\n",
        f"{folder}/memory.usage_in_bytes": f"{peak // 2}\n",
        f"{folder}/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    }


def version_2(folder: str, limit: int | str, peak: int, kills: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.peak": f"{peak}\n",
        f"{folder}/memory.current": f"{peak // 2}\n",
        f"{folder}/memory.events": f"low 0\noom 2\noom_kill {kills}\noom_group_kill 0\n",
    }


UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("groups", "mounts", "files"),
    [
        pytest.param(
            f"9:cpuset:/x\n4:memory:{TASK}\n0::/\n",
            HOST_V1,
            {
                **version_1(f"memory{TASK}", UNLIMITED, 4096, kills=1),
                **version_1(f"memory{TASK}/..", 8192, 70000, kills=1),
                **version_1("memory/slurm", 1, 80000, kills=9),  # not this job's
            },
            id="version 1 on the host",
        ),
        pytest.param(
            f"4:memory:{TASK}\n0::/\n",
            STEP_V1,
            {**version_1("memory/task_0", UNLIMITED, 4096, kills=1), **version_1("memory", 8192, 70000, kills=1)},
            id="version 1, a container that shows the step's folder",
        ),
        pytest.param(
            f"4:memory:{TASK}\n0::/\n",
            "",
            {**version_1("memory/task_0", 8192, 4096, kills=2)},
            id="version 1, a container that does not tell what it shows",
        ),
        pytest.param(
            "0::/system/job_7/step_0/user/task_0\n",
            HOST_V2,
            {
                **version_2("system/job_7/step_0/user/task_0", "max", 4096, kills=2),
                "system/job_7/step_0/memory.max": "8192\n",
                "system/memory.max": "1\n",  # not this job's
            },
            id="version 2 on the host",
        ),
        pytest.param(
            "0::/job_7/step_0/task_0\n",
            STEP_V2,
            {**version_2("task_0", "max", 4096, kills=1), **version_2(".", 8192, 70000, kills=1)},
            id="version 2, a container that shows the step's folder",
        ),
        *(
            pytest.param(groups, HOST_V2, version_2(".", 8192, 4096, kills=2), id=f"version 2, {where}")
            for groups, where in (("0::/\n", "a namespace of its own"), ("0::/job_7/step_0/task_0\n", "only the top"))
        ),
    ],
)
def test_the_tasks_own_peak_and_the_nearest_limit(
    tmp_path: Path, groups: str, mounts: str, files: dict[str, str]
) -> None:
    root = tree(tmp_path, groups, mounts, files)
    assert memory_counters(root) == {"oom_kills": 2, "limit_bytes": 8192, "peak_bytes": 4096}
    assert memory_now_bytes(root) == 2048


def test_no_limit_is_none(tmp_path: Path) -> None:
    root = tree(tmp_path, f"4:memory:{TASK}\n", HOST_V1, version_1(f"memory{TASK}", UNLIMITED, 4096))
    assert memory_counters(root)["limit_bytes"] is None


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert memory_counters(tmp_path) == {"oom_kills": None, "limit_bytes": None, "peak_bytes": None}
    assert memory_now_bytes(tmp_path) is None


def test_the_most_of_main_memory_is_kept(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    host = HostMemory(str(meminfo))
    host.sample()
    assert host.record()["used_peak_bytes"] is None  # no such file
    for available in (700, 200, 900):
        meminfo.write_text(f"MemTotal:        1000 kB\nMemFree:    5 kB\nMemAvailable:    {available} kB\n")
        host.sample()
    assert (host.record()["used_peak_bytes"], host.record()["total_bytes"]) == (800 * 1024, 1000 * 1024)


def test_a_cgroup_without_a_maximum_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux before 5.19 has them; the limit may go with the job's step."""
    counters = {"peak_bytes": None, "limit_bytes": 900}
    now = iter([100, 700, None, 300])
    monkeypatch.setattr("llmlaunch.node.host_memory.memory_counters", lambda: counters)
    monkeypatch.setattr("llmlaunch.node.host_memory.memory_now_bytes", lambda: next(now))
    memory = HostMemory()
    for _ in range(4):
        memory.sample_cgroup()
    assert (memory.record()["cgroup_peak_bytes"], memory.record()["cgroup_limit_bytes"]) == (700, 900)
    counters["peak_bytes"] = 800
    memory.sample_cgroup()
    assert memory.record()["cgroup_peak_bytes"] == 800
