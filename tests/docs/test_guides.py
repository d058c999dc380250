"""Every code block of the guides works: files are written, scripts executed and commands run, in the order of the page.

Runs are shorter than on the page, and a tiny model stands for the one that the page names.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora_rl import Run
from dora_rl.apps.cli import COMMANDS, app, load
from dora_rl.apps.config_options import settings
from dora_rl.core.config import build, merge
from dora_rl.envs.sandbox.sandbox import GUARANTEES, Sandbox
from dora_rl.runtime.config import RunConfig
from tests.docs.pages import DOCS, MODEL, ROOT, Block, blocks, commands, make_chat_model

FOLDERS = ("concepts", "guides", "recipes")
CONTINUED = {"resume.md": "quickstart.md"}
"""Pages whose commands continue with what those of another page have made."""
PAGES = [
    DOCS / "first-task.md",
    *(page for folder in FOLDERS for page in sorted((DOCS / folder).glob("*.md")) if page.name not in CONTINUED),
]
SANDBOXED = ("code.md", "tools.md")
SHORT: dict[str, Any] = {
    "control.steps": 2,
    "control.groups_per_step": 2,
    "control.group_size": 2,
    "control.max_response_tokens": 12,
    "control.deadlines.heartbeat": 600.0,
    "evaluation.samples": 1,
    "rollout.engine.kernels": "torch",
    "rollout.instances": 1,
    "logging.tensorboard": "false",
    "threads": 1,
}
"""In place of the settings of a page."""
QUICKSTART = SHORT | {"control.max_response_tokens": 64, "evaluation.data.params.count": 8}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "model"
    make_chat_model(path)
    return path


@pytest.fixture
def folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a page."""
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    before, known = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before  # the folders of tasks
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def adapted(words: list[str]) -> list[str]:
    """The arguments of a command, with the settings of a short run."""
    if words[0] not in ("train", "quickstart"):
        return words
    if "--resume" in words:
        return [
            str(SHORT["control.steps"] + 1) if words[n - 1] == "--control.steps" else w for n, w in enumerate(words)
        ]
    short = QUICKSTART if words[0] == "quickstart" else SHORT
    return [*words, *(word for key, value in short.items() for word in (f"--{key}", str(value)))]


def run(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "python":
        execute(words)
        return
    assert program == "dora-rl", f"'{command}': only python and dora-rl are run here"
    result = CliRunner().invoke(app, adapted(words), env={"COLUMNS": "100"})
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"


def execute(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_works(page: Path, folder: Path) -> None:
    if page.name in SANDBOXED and Sandbox.guarantees() != GUARANTEES:
        pytest.skip("this system can't confine code")
    follow(page, folder)


def test_the_quickstart_works_and_is_extended(folder: Path) -> None:
    assert CONTINUED == {"resume.md": "quickstart.md"}
    follow(DOCS / "quickstart.md", folder)
    follow(DOCS / "guides" / "resume.md", folder)
    (run_folder,) = (folder / "runs").iterdir()
    assert len(Run.open(run_folder).metrics) == SHORT["control.steps"] + 1


def follow(page: Path, folder: Path) -> None:
    """Do what a page shows, from its first block to its last."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.code)
            if block.language == "python":
                execute([block.file])
        else:
            assert block.language == "console", f"{page.name}: a block with no title that is no console block"
            typed = commands(block)
            assert typed, f"{page.name}: a console block without a line that begins with '$ '"
            for command in typed:
                run(command)


# -- blocks of all pages ----------------------------------------------------------------------------------------

ALL = sorted(DOCS.rglob("*.md"))
REQUIRED: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"source": "rows.jsonl"},
    "reward": {"functions": ["exact"]},
    "control": {"groups_per_step": 8, "group_size": 8, "max_response_tokens": 64},
}
"""What a block that shows only some sections leaves out."""


def config_blocks() -> list[tuple[str, Block]]:
    """Blocks of settings; those of extending.md are of extensions, from-prime-rl.md has a config of prime-rl, which
    `tests/apps/test_convert.py` converts, and plans are in choose-k.md."""
    pages = [page for page in ALL if page.name not in ("extending.md", "from-prime-rl.md")]
    found = [(page.name, block) for page in pages for block in blocks(page) if block.language == "toml"]
    return [(name, block) for name, block in found if block.file != "cluster.toml"]


@pytest.mark.parametrize(("page", "block"), config_blocks())
def test_every_block_of_settings_is_a_valid_config(page: str, block: Block) -> None:
    tree = tomllib.loads(block.code)
    if "weights" in tree.get("reward", {}) and "functions" not in tree["reward"]:
        tree["reward"]["functions"] = ["exact"] * len(tree["reward"]["weights"])
    build(RunConfig, merge(REQUIRED, tree), page)


def named_commands() -> list[tuple[str, str]]:
    """Each `dora-rl COMMAND ...` in the code of a page."""
    found = []
    for page in [*ALL, ROOT / "README.md"]:
        text = re.sub(r" \\\n\s*", " ", page.read_text())  # a backslash continues a command
        fenced = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
        indented = re.findall(r"^    .*$", text, re.MULTILINE)
        lines = [line.strip().removeprefix("$ ") for part in (*fenced, *indented) for line in part.splitlines()]
        code = [*lines, *re.findall(r"`([^`\n]+)`", text)]
        found += [(page.name, line) for line in code if re.match(r"(\S*/)?dora-rl [a-z]", line)]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "line"), named_commands())
def test_every_command_on_a_page_exists_with_its_options(page: str, line: str) -> None:
    """Commands that are shown but not run, such as those for a cluster."""
    words = shlex.split(line, comments=True)
    name = words[1]
    assert name in COMMANDS
    options = {one for parameter in load(name).params for one in parameter.opts} | {"--help"}
    if COMMANDS[name].settings:
        options |= {f"--{setting.key}" for setting in settings(RunConfig)}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    tables = {"--ray.*"}
    assert given - options - tables == set()
