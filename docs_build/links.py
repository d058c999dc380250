"""Links that leave `docs/`: a page on GitHub links to files of the repository, of which the site needs copies.

A file of the repository outside `docs/` gets the path `repository/FILE` in the site if a page links to it, directly or
through another such file; a notebook gets a page. Links to folders become plain text, since a site has no listings.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = "docs"
COPIES = "repository"
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def rewritten(markdown: str, source: str) -> str:
    """The page of a file of the repository, with links as the site needs them."""
    return _replace(markdown, lambda link: _rewrite(link, source))


def needed(pages: Iterable[str]) -> set[str]:
    """Files outside `docs/` that these files of the repository link to, directly or through each other."""
    found: set[str] = set()
    waiting = list(pages)
    while waiting:
        source = waiting.pop()
        for target in _targets(source):
            if target not in found and not target.startswith(f"{DOCS}/") and (ROOT / target).is_file():
                found.add(target)
                waiting += [target] if target.endswith(".md") else []
    return found


def place(file: str) -> str:
    """The path in the site of a file of the repository; that of a notebook is its page."""
    if file.endswith(".ipynb"):
        return f"{COPIES}/{file.removesuffix('.ipynb')}.md"
    return file.removeprefix(f"{DOCS}/") if file.startswith(f"{DOCS}/") else f"{COPIES}/{file}"


def origin(uri: str) -> str:
    """The file of the repository that has this path in the site."""
    return uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"{DOCS}/{uri}"


def _targets(source: str) -> list[str]:
    targets: list[str] = []

    def note(link: re.Match[str]) -> str:
        targets.append(_resolved(link, source))
        return link[0]

    _replace((ROOT / source).read_text(encoding="utf-8"), note)
    return targets


def _replace(markdown: str, change: Callable[[re.Match[str]], str]) -> str:
    """Apply `change` to every relative link that is not in code."""
    parts = _CODE.split(markdown)
    for number in range(0, len(parts), 2):
        parts[number] = _LINK.sub(lambda link: link[0] if _absolute(link) else change(link), parts[number])
    return "".join(parts)


def _absolute(link: re.Match[str]) -> bool:
    return re.match(r"[a-z]+:|/", link["target"]) is not None


def _resolved(link: re.Match[str], source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))


def _rewrite(link: re.Match[str], source: str) -> str:
    target = _resolved(link, source)
    if (ROOT / target).is_dir():
        return f"{link['text']} (`{target}`)"
    there = posixpath.relpath(place(target), posixpath.dirname(place(source)) or ".")
    return f"{link['image']}[{link['text']}]({there}{link['anchor'] or ''})"
