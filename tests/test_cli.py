"""The command line commands as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

MODE_FIELDS = {
    "step_seconds",
    "tokens_per_second",
    "occupancy",
    "speedup_over_sync",
    "over_lower_bound",
    "staleness",
    "live_versions",
    "migrations",
    "idle",
}


def run(*arguments: str | Path, columns: int = 160) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dora_rl.apps.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={"COLUMNS": str(columns), "PATH": ""},
    )


def test_sim_prints_a_table_and_writes_json_and_html(tmp_path: Path) -> None:
    figures, page = tmp_path / "out.json", tmp_path / "out.html"
    done = run("sim", "laptop", "--set", "steps=3", "--set", "warmup_steps=2", "--json", figures, "--html", page)
    assert done.returncode == 0, done.stderr
    assert "one_step_off" in done.stdout
    modes = json.loads(figures.read_text())["modes"]
    assert list(modes) == ["sync", "one_step_off", "partial", "dora"]
    assert all(set(mode) >= MODE_FIELDS for mode in modes.values())
    assert modes["sync"]["speedup_over_sync"] == 1
    html = page.read_text()
    assert not re.search(r"(src|href)\s*=|url\(|https?://", html), "the page must not need the network"
    assert "stragglers" in html


def test_tables_are_not_truncated_at_80_columns(tmp_path: Path) -> None:
    """Neither headings nor the histogram of staleness are truncated."""
    sizes = ("--set", "steps=6", "--set", "warmup_steps=3")
    done = run("sim", "laptop", "--modes", "sync,dora:proportional+k8", *sizes, columns=80)
    assert done.returncode == 0, done.stderr
    assert "\u2026" not in done.stdout
    assert all(heading in done.stdout for heading in ("occupancy", "moved/step", "staleness", "trainer"))
    shares = [int(share) for share in re.findall(r"\b\d:(\d+)%", done.stdout)]
    assert sum(shares) >= 195  # two modes, each share rounded
    cluster, trace = tmp_path / "cluster.toml", tmp_path / "trace.jsonl"
    cluster.write_text(CLUSTER)
    trace.write_text('{"response_tokens": 100}\n')
    assert "\u2026" not in run("plan", cluster, trace, "--most", "2", columns=80).stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["sim", "laptop", "--set", "control.max_staleness=-1"], "control.max_staleness"),
        (["sim", "laptop", "--set", "control.group_size=100"], "control.group_size"),
        (["sim", "laptop", "--set", "control.max_stalenes=2"], "did you mean 'control.max_staleness'"),
        (["sim", "laptop", "--set", "nonsense"], "key=value"),
        (["sim", "laptop", "--set", "rollout.devices=9"], "'devices'"),
        (["sim", "laptop", "--set", "workload.mean_tokens=1e9"], "workload.mean_tokens"),
        (["sim", "laptop", "--set", "hardware.memory_bytes=1e6"], "rollout.devices"),
        (["sim", "laptop", "--modes", "dorra"], "dorra"),
        (["sim", "laptop", "--modes", "dora:k"], "dora:k"),
        (["sim", "lapptop"], "lapptop"),
        (["sim", "missing.toml"], "missing.toml"),
        (["sim", "laptop", "--json", "no/such/folder/x.json"], "no/such/folder"),
        (["sim", "laptop", "--set", "workload.trace=missing.jsonl"], "missing.jsonl"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[1:]),
)
def test_a_user_error_is_one_sentence_with_exit_code_2(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


CLUSTER = """
devices = 4
steps = 2
warmup_steps = 1
[control]
groups_per_step = 4
group_size = 4
max_response_tokens = 256
[hardware]
flops = 91e9
memory_bytes = 2e9
memory_bandwidth = 2e10
link_bandwidth = 8e9
host_bandwidth = 8e9
[model]
parameters = 3.2e6
bytes_per_parameter = 4.0
kv_bytes_per_token = 8192
[rollout]
devices = 1
max_requests = 64
step_overhead = 0.002
load_overhead = 0.01
[trainer]
utilisation = 0.5
"""


def test_plan_ranks_candidates_and_names_the_bottleneck(tmp_path: Path) -> None:
    cluster, trace = tmp_path / "cluster.toml", tmp_path / "trace.jsonl"
    cluster.write_text(CLUSTER)
    trace.write_text("\n".join(f'{{"response_tokens": {10 + 13 * i % 240}}}' for i in range(100)))
    done = run("plan", cluster, trace, "--json", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    assert "the bottleneck is" in done.stdout
    ranking = json.loads((tmp_path / "plan.json").read_text())
    assert ranking == sorted(ranking, key=lambda row: (row["step_seconds"], row["max_staleness"]))
    assert all(row["slots_per_instance"] in (1, 2) for row in ranking)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("", "is empty"),
        ('{"response_tokens": 5}\n{"response_tokens": "x"}\n', "line 2"),
        ('{"response_tokens": 5}\n\n{broken\n', "line 3"),
        ('{"response_tokens": 0}\n', "line 1"),
    ],
)
def test_an_error_in_a_trace_names_the_line(tmp_path: Path, lines: str, complaint: str) -> None:
    cluster, trace = tmp_path / "cluster.toml", tmp_path / "trace.jsonl"
    cluster.write_text(CLUSTER)
    trace.write_text(lines)
    done = run("plan", cluster, trace)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_error_in_a_cluster_file_names_the_field(tmp_path: Path) -> None:
    cluster, trace = tmp_path / "cluster.toml", tmp_path / "trace.jsonl"
    cluster.write_text(CLUSTER.replace("max_requests", "max_request"))
    trace.write_text('{"response_tokens": 5}\n')
    done = run("plan", cluster, trace)
    assert done.returncode == 2
    assert "did you mean 'rollout.max_requests'" in done.stderr


def test_a_missing_ray_gives_the_install_command_before_the_run_starts(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\npath = "m"\n[data]\nsource = "d"\n[reward]\nfunctions = ["exact"]\n'
        "[control]\ngroups_per_step = 1\ngroup_size = 2\nmax_response_tokens = 8\n"
    )
    out = tmp_path / "runs"
    arguments = ["dora-rl", "train", str(config), "--runtime", "ray", "--out", str(out)]
    program = (
        f"import sys; sys.modules['ray'] = None; from dora_rl.apps.cli import main; sys.argv = {arguments!r}; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr
    assert "pip install 'dora-rl[ray]'" in done.stderr
    assert not out.exists()
