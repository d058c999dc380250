"""Files that a command writes at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.apps.output_file import make_sure_of
from dora_rl.core.errors import UserError


def test_it_leaves_everything_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "folder" / "new"
    old.write_text("kept")
    make_sure_of(old)
    make_sure_of(new, folders=True)
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.parametrize("name", [".", "old/new", "no/such/folder"])
def test_what_is_no_file_or_in_no_folder_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "old").write_text("a file, not a folder")
    with pytest.raises(UserError, match="cannot write"):
        make_sure_of(tmp_path / name)
