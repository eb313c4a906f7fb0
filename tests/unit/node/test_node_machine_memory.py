"""How much memory there is, read from folders that look like a machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecotone.node.machine import available_memory, cgroup_headroom

GIB = 2**30


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def group_v2(root: Path, path: str, limit: object, usage: int, inactive: int = 0) -> None:
    write(root, f"sys/fs/cgroup/{path}/memory.max", limit)
    write(root, f"sys/fs/cgroup/{path}/memory.current", usage)
    write(root, f"sys/fs/cgroup/{path}/memory.stat", f"anon 5\ninactive_file {inactive}")


def test_this_machine_has_some() -> None:
    assert (available_memory() or 0) > 0


def test_available_memory_is_the_kernels_estimate(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:   64 kB\nBuffers: 1 kB")
    assert available_memory(tmp_path) == 64 * 1024


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 100 kB"])
def test_a_kernel_that_does_not_say(tmp_path: Path, meminfo: str | None) -> None:
    if meminfo is not None:
        write(tmp_path, "proc/meminfo", meminfo)
    assert available_memory(tmp_path) is None
    assert cgroup_headroom(tmp_path) is None


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/job")
    group_v2(tmp_path, "pod/job", "max", 1 * GIB)
    group_v2(tmp_path, "pod", 4 * GIB, 3 * GIB, inactive=GIB // 2)
    assert cgroup_headroom(tmp_path) == GIB + GIB // 2
    group_v2(tmp_path, "pod/job", 2 * GIB, 1 * GIB)
    assert cgroup_headroom(tmp_path) == GIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod")
    group_v2(tmp_path, "pod", GIB, 2 * GIB)
    assert cgroup_headroom(tmp_path) == 0


def test_inside_a_container_the_path_may_not_exist(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/../../kubepods/pod1")
    group_v2(tmp_path, ".", 3 * GIB, 1 * GIB)
    assert cgroup_headroom(tmp_path) == 2 * GIB


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "7:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/")
    folder = "sys/fs/cgroup/memory/docker/abc"
    write(tmp_path, f"{folder}/memory.limit_in_bytes", 8 * GIB)
    write(tmp_path, f"{folder}/memory.usage_in_bytes", 6 * GIB)
    write(tmp_path, f"{folder}/memory.stat", f"cache 7\ntotal_inactive_file {GIB}")
    assert cgroup_headroom(tmp_path) == 3 * GIB
