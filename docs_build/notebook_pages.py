"""Notebooks as pages: text as it is, code as blocks. Notebooks are stored without outputs, so there is no more."""

from __future__ import annotations

import json
from pathlib import Path


def page(notebook: Path) -> str:
    """The Markdown of a notebook, with a link to its file beside the page."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    parts = ["".join(cell["source"]) for cell in cells]
    blocks = [
        part if cell["cell_type"] == "markdown" else f"```python\n{part}\n```"
        for cell, part in zip(cells, parts, strict=True)
    ]
    title, first, rest = blocks[0].partition("\n")
    download = f"Download [{notebook.name}]({notebook.name}); it is in the folder `{notebook.parent.name}` of a clone."
    return "\n\n".join([title, download, first + rest, *blocks[1:]]) + "\n"
