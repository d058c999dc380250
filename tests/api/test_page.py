"""The examples in README.md, docs/api.md and docs/building-blocks.md work: each is executed as a file, in order."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl import train
from tests.api.conftest import small

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> dict[str, str]:
    """The code of each block, by the name of its file."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", text, re.DOTALL)
    assert len(found) == text.count("```") // 2, "each block names its file in its first line"
    return dict(found)


def execute(name: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, f"{name}: {done.stderr}"


def test_the_examples_of_the_api_work(job: Path, tmp_path: Path) -> None:
    # A folder with the name on the hub comes before the hub.
    shutil.copytree(job / "model", tmp_path / "Qwen" / "Qwen3-0.6B")
    for name, code in blocks("api.md").items():
        (tmp_path / name).write_text(code)
        if not name.endswith(".py"):
            continue
        execute(name, tmp_path)
        if name == "train.py":
            (run,) = (tmp_path / "runs").iterdir()
            run.rename(tmp_path / "runs" / "first")


def test_the_examples_of_the_readme_work(job: Path, tmp_path: Path) -> None:
    shutil.copytree(job / "model", tmp_path / "Qwen" / "Qwen3-0.6B")
    text = (ROOT / "README.md").read_text()
    found = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", text, re.DOTALL))
    assert found.keys() == {"sums.py", "sums.toml"}
    for name, code in found.items():
        (tmp_path / name).write_text(code)
    execute("sums.py", tmp_path)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(64)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "dora_rl.apps.cli", "train", "sums.toml", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr


def test_the_examples_of_the_building_blocks_work(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are executed in this process, which has torch already."""
    shutil.copytree(job / "model", tmp_path / "Qwen" / "Qwen3-0.6B")
    rows = [{"prompt": f"{number}*2=", "answer": str(2 * number)} for number in range(1, 20)]
    train(job / "model", "contains", rows, config=small(job, steps=2), out=tmp_path / "runs", name="first", quiet=True)
    monkeypatch.chdir(tmp_path)
    for name, code in blocks("building-blocks.md").items():
        (tmp_path / name).write_text(code)
        runpy.run_path(name, run_name="__main__")


def test_the_pages_are_linked() -> None:
    assert "(docs/api.md)" in (ROOT / "README.md").read_text()
    assert "(building-blocks.md)" in (ROOT / "docs" / "api.md").read_text()
