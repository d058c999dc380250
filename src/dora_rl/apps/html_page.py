"""Self-contained HTML pages: a template with its styles, scripts and data put in; nothing comes from the network.

What a model said may stand in the data, so no `<` reaches the page from there: a script element can't be ended by it.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

_INCLUDE = re.compile(r"/\*include ([a-z.]+)\*/")
_DATA = "/*DATA*/null"


def write_page(path: Path, template: str, data: dict[str, Any]) -> None:
    """Write the page that a template makes of the data."""
    page = _INCLUDE.sub(lambda found: _part(found[1]), _part(template))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    path.write_text(page.replace(_DATA, text), encoding="utf-8")


def _part(name: str) -> str:
    return resources.files("dora_rl.apps").joinpath("pages", name).read_text(encoding="utf-8")
