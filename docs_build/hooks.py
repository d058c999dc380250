"""Hooks of mkdocs: they add the generated pages and the files that pages link to, and adapt links."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs loads this file by its path

from docs_build import links, notebook_pages, reference

PAGES = ("CONTRIBUTING.md", "SECURITY.md")
"""Files outside `docs/` that are in the navigation."""


def on_files(files: Files, config: Any) -> Files:
    """Add what is not in `docs/`."""
    sources = [links.origin(file.src_uri) for file in files.documentation_pages()]
    for uri, markdown in reference.pages().items():
        files.append(File.generated(config, uri, content=markdown))
    for name in sorted({*links.needed([*sources, *PAGES]), *PAGES}):
        file = links.ROOT / name
        inclusion = InclusionLevel.INCLUDED if name in PAGES else InclusionLevel.NOT_IN_NAV
        if file.suffix == ".ipynb":
            files.append(File.generated(config, links.place(name), content=notebook_pages.page(file)))
        files.append(File.generated(config, f"{links.COPIES}/{name}", abs_src_path=str(file), inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository become links of the site; generated pages have those already."""
    file = links.ROOT / links.origin(page.file.src_uri)
    return links.rewritten(markdown, links.origin(page.file.src_uri)) if file.is_file() else markdown
