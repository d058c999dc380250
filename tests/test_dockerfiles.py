"""The Dockerfiles copy files that exist and install extras that exist; nothing here needs a Docker engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def sent_to_the_engine(name: str) -> bool:
    """Whether `.dockerignore`, which excludes all but what it names, lets a file or folder through."""
    excepted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    return any(part in excepted for part in (name, name.partition("/")[0]))


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_that_is_copied_exists_and_the_link_in_the_package_keeps_its_target(path: Path) -> None:
    copied = [name for word, rest in instructions(path) if word == "COPY" for name in rest.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert sent_to_the_engine(name), name
    target = (ROOT / "src" / "dora_rl" / "quickstart").resolve().relative_to(ROOT)
    assert str(target) in copied, "src/dora_rl/quickstart is a link to it"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {needed["readme"], *needed["license-files"]} <= set(copied), "the build reads them"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_extra_that_is_installed_exists(path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [
        name
        for _, rest in instructions(path)
        for found in re.findall(r"/src\[([\w,]+)\]", rest)
        for name in found.split(",")
    ]
    assert named
    assert set(named) <= extras.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_does_not_run_as_root_and_says_that_it_was_never_built(path: Path) -> None:
    users = [rest for word, rest in instructions(path) if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert "never built" in path.read_text().partition("\n\n")[0]
