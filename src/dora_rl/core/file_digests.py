"""Digests of files: what proves later that a file is still what it was.

A file is hashed whole up to a size; of a larger one its size and blocks spread evenly over it, first and last
included, are taken, so that looking at a data set of any size takes a moment. What must be proved to the last byte is
hashed whole whatever its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from dora_rl.core.types import Record

_BLOCK = 1 << 16
_BLOCKS = 512
"""32 MB are hashed at most where a file is sampled."""


class FileDigest(Record, frozen=True, kw_only=True):
    """What a file was."""

    size: int
    """In bytes."""
    digest: str
    """BLAKE2b, in hexadecimal."""


def whole_digest(path: Path) -> FileDigest:
    """Of every byte of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        return FileDigest(size=file.tell(), digest=digest)


def sampled_digest(path: Path) -> FileDigest:
    """Of a file that may be large: the whole of it, or blocks spread over it."""
    size = path.stat().st_size
    if size <= _BLOCK * _BLOCKS:
        return whole_digest(path)
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return FileDigest(size=size, digest=digest.hexdigest())


def tree_digests(folder: Path, prefix: str = "") -> dict[str, FileDigest]:
    """Of all files below a folder, by their paths in it, behind a prefix."""
    return {
        f"{prefix}{path.relative_to(folder).as_posix()}": whole_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def text_digest(text: bytes) -> str:
    """Of something that is not a file."""
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def differences(expected: Mapping[str, FileDigest], found: Mapping[str, FileDigest]) -> dict[str, str]:
    """Files that are not what they were, and what is wrong with each."""
    problems = {}
    for name in sorted(expected.keys() | found.keys()):
        before, after = expected.get(name), found.get(name)
        if before == after:
            continue
        if after is None:
            problems[name] = "is missing"
        elif before is None:
            problems[name] = "was added"
        elif after.size < before.size:
            problems[name] = f"was cut short, from {before.size:,} bytes to {after.size:,}"
        else:
            problems[name] = "was changed"
    return problems
