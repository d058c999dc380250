"""Every example in docs/api.md works: it is executed as a file, in the order of the page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()


def blocks() -> dict[str, str]:
    """The code of each block, by the name of its file."""
    found = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == PAGE.count("```") // 2, "each block names its file in its first line"
    return dict(found)


def test_the_examples_work(job: Path, tmp_path: Path) -> None:
    # A folder with the name on the hub comes before the hub.
    shutil.copytree(job / "model", tmp_path / "Qwen" / "Qwen3-0.6B")
    for name, code in blocks().items():
        (tmp_path / name).write_text(code)
        if not name.endswith(".py"):
            continue
        done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        if name == "train.py":
            (run,) = (tmp_path / "runs").iterdir()
            run.rename(tmp_path / "runs" / "first")


def test_the_readme_links_to_the_page() -> None:
    assert "(docs/api.md)" in (ROOT / "README.md").read_text()
