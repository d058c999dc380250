"""The commands of the README on a short real run: promises kept, nothing prefilled again, a report written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "control.steps": 14,
    "control.groups_per_step": 4,
    "control.group_size": 4,
    "control.deadlines.heartbeat": 600.0,
    "trainer.optimiser.learning_rate": 1e-6,
    "evaluation.every": 14,
    "evaluation.data.params.count": 16,
    "logging.tensorboard": "false",
}


def command(*arguments: str, folder: Path = ROOT) -> str:
    program = [sys.executable, "-m", "dora_rl.apps.cli", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=1000, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shorter quickstart run, started in a folder that has no other file."""
    folder = tmp_path_factory.mktemp("quickstart")
    options = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
    command("quickstart", "--name", "quick", *options, folder=folder)
    return folder / "runs" / "quick"


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_nothing_is_prefilled_again(run: Path) -> None:
    """`runtime/test_live.py` forces versions to make room by moves; here it depends on timing."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) >= 14
    assert sum(line.get("rollout/reprefilled_tokens", 0) for line in steps) == 0


def test_the_audit_passes_and_the_report_exists(run: Path) -> None:
    assert "kept" in command("audit", str(run))
    assert "</html>" in (run / "report.html").read_text()


def test_every_group_is_trained_within_the_bound(run: Path) -> None:
    version = {}
    trained: Counter[int] = Counter()
    for line in events(run):
        for one in line["commands"]:
            if one["command"] == "StartGroup":
                version[one["group"]] = one["version"]
            if one["command"] == "Apply":
                trained.update(one["groups"])
                assert all(0 <= one["step"] - version[group] <= 3 for group in one["groups"])
    assert set(trained.values()) == {1}
    assert sum(trained.values()) == 14 * 4


def test_the_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets
    known = set(re.findall(r"│ ([a-z]+) ", command("--help")))
    named = set(re.findall(r"^dora-rl ([a-z]+)", text, re.MULTILINE))
    assert named
    assert named <= known
