"""The site builds without a warning, needs no network, and has every page, setting, command and public name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from docs_build import links, notebook_pages, reference

import dora_rl
from dora_rl.apps.cli import COMMANDS
from dora_rl.apps.config_options import settings
from dora_rl.runtime.config import RunConfig
from dora_rl.sim.config import SimConfig
from tests.docs.pages import DOCS, ROOT

installed = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra 'docs' is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1000, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@installed
def test_the_site_builds_without_warnings_and_has_all_pages(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file(), page


@installed
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?(https?:[^\"'> ]+)", page.read_text()
        )
        assert loaded == [], page


@installed
def test_every_local_link_leads_somewhere(site: Path) -> None:
    """mkdocs checks the links of Markdown; this also checks those of the theme and of generated pages."""
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # which has paths of a server
        for link in re.findall(r"(?:href|src)=[\"']?([^\"'> ]+)", page.read_text()):
            target = unquote(link.partition("#")[0].partition("?")[0])
            if target and not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.relative_to(site)}: {link}"


@installed
def test_the_python_reference_has_every_public_name(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    missing = [name for name in dora_rl.__all__ if name != "__version__" and f'id="dora_rl.{name}"' not in page]
    assert missing == []
    assert 'id="dora_rl.Run.audit"' in page


def test_the_settings_page_has_every_setting_with_its_default_and_text() -> None:
    page = reference.settings_page()
    found = [one for one in settings(RunConfig) if one.kind != "section"]
    assert len(found) > 100
    for one in found:
        (row,) = [line for line in page.splitlines() if f'<a id="{one.key}"></a>' in line]
        assert one.about.replace("|", "\\|") in row
        assert one.default in ("not set", "required") or one.default in row
    for one in settings(SimConfig):
        if one.kind != "section" and not one.key.startswith("control."):
            assert f'<a id="sim:{one.key}"></a>' in page


def test_the_commands_page_has_every_command_and_option() -> None:
    page = reference.commands_page()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(COMMANDS)
    assert "| `--samples N` | Responses per prompt; default: as in the config. |" in page
    assert "| `--temperature NUMBER` |" in page
    assert "| `--dry-run` |" in page


def test_links_that_leave_the_docs_lead_to_copies() -> None:
    text = (
        "[a](../examples/smollm2.toml) [b](../benchmarks/results) `[c](../x.md)` [d](api.md#train) [e](https://x.org)"
    )
    assert links.rewritten(text, "docs/page.md") == (
        "[a](repository/examples/smollm2.toml) b (`benchmarks/results`) `[c](../x.md)` [d](api.md#train) "
        "[e](https://x.org)"
    )
    assert links.rewritten("[a](../../SECURITY.md)", "docs/guides/page.md") == "[a](../repository/SECURITY.md)"
    assert links.rewritten("[a](docs/api.md)", "CONTRIBUTING.md") == "[a](../api.md)"
    assert links.rewritten("[a](../notebooks/train.ipynb)", "docs/n.md") == "[a](repository/notebooks/train.md)"


def test_every_relative_link_works_in_the_repository_too() -> None:
    """As on GitHub: the target is a file or folder of the repository."""
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    for page in pages:
        for target in re.findall(
            r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`\n]*`|```.*?```", "", page.read_text(), flags=re.DOTALL)
        ):
            assert re.match(r"[a-z]+:", target) or (page.parent / target).exists(), f"{page.name}: {target}"


def test_a_notebook_is_a_page() -> None:
    page = notebook_pages.page(ROOT / "notebooks" / "train.ipynb")
    assert page.startswith("# Train a model\n\nDownload [train.ipynb](train.ipynb)")
    assert "```python\nstaleness = run.summary().staleness\n" in page
