"""The check that an output file can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.apps.output_file import check_writable
from dora_rl.core.errors import UserError


def test_the_check_changes_no_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "folder" / "new"
    old.write_text("kept")
    check_writable(old)
    check_writable(new, folders=True)
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.parametrize("name", [".", "old/new", "no/such/folder"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "old").write_text("a file, not a folder")
    with pytest.raises(UserError, match="cannot write"):
        check_writable(tmp_path / name)
