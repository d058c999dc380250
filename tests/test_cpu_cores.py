"""The number of usable cores takes the CPU affinity and container quotas into account."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.core.cpu_cores import cpu_quota, usable_cores


def groups(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def test_the_lowest_quota_of_all_levels_counts(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    inner = mount / "pod" / "container"
    inner.mkdir(parents=True)
    cgroups = groups(tmp_path, "0::/pod/container\n")
    assert cpu_quota(cgroups, mount) is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(cgroups, mount) is None
    (mount / "pod" / "cpu.max").write_text("350000 100000\n")
    assert cpu_quota(cgroups, mount) == 3.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(cgroups, mount) == 0.5


def test_cgroup_v1_quotas_count(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    folder = mount / "cpu,cpuacct"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("250000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    # The path is the one outside the container.
    cgroups = groups(tmp_path, "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n0::/\n")
    assert cpu_quota(cgroups, mount) == 2.5
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(cgroups, mount) is None


def test_unreadable_quotas_are_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "nothing", tmp_path) is None
    (tmp_path / "cpu.max").write_text("what?\n")
    assert cpu_quota(groups(tmp_path, "0::/\n"), tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_cpu_affinity_counts() -> None:
    program = (
        "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from dora_rl.core.cpu_cores import usable_cores\nprint(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
