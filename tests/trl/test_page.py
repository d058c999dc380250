"""docs/from-trl.md has the table as it is in the code, and its examples work.

After a deliberate change of the table: `python -m tests.trl.test_page` writes it again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from dora_rl import Run
from dora_rl.trl.fields import counts, markdown

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "from-trl.md"
HEADING = "## All fields\n\n"


def with_table(page: str) -> str:
    return page.partition(HEADING)[0] + HEADING + counts() + "\n\n" + markdown() + "\n"


def test_the_table_is_that_of_the_code() -> None:
    assert FILE.read_text() == with_table(FILE.read_text())


def test_the_examples_work(job: Path, tmp_path: Path) -> None:
    page = FILE.read_text()
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```") // 2, "each block names its file in its first line"
    shutil.copytree(job / "model", tmp_path / "Qwen" / "Qwen3-0.6B")  # comes before the hub
    for name, code in blocks:
        (tmp_path / name).write_text(code)
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=1000, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"
        if name == "grpo.py":
            (run,) = (path.parent for path in (tmp_path / "Qwen3-GRPO").glob("*/config.json"))
            records = Run.open(run).metrics
            assert [record["step"] for record in records] == [0, 1]
            assert done.stdout.splitlines()[-1] == str(records[-1]["reward/mean"])
            saved = load_file(tmp_path / "Qwen3-GRPO" / "model.safetensors")
            before = load_file(job / "model" / "model.safetensors")
            assert any(not torch.equal(saved[key], before[key]) for key in before), "the saved policy is not trained"


def test_other_pages_link_to_it() -> None:
    assert "(docs/from-trl.md)" in (ROOT / "README.md").read_text()
    assert "(from-trl.md)" in (ROOT / "docs" / "api.md").read_text()


if __name__ == "__main__":
    FILE.write_text(with_table(FILE.read_text()))
