"""Self-contained HTML pages: a template with its styles, scripts and data inserted; nothing is loaded from the network.

The data may contain text that a model generated, so every `<` in it is escaped: it can't end a script element.
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
    """Write a template with the data inserted."""
    page = _INCLUDE.sub(lambda found: _file(found[1]), _file(template))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    path.write_text(page.replace(_DATA, text), encoding="utf-8")


def _file(name: str) -> str:
    return resources.files("dora_rl.apps").joinpath("pages", name).read_text(encoding="utf-8")
