"""Digests of files, which prove later that a file is unchanged.

`sampled_digest` hashes a small file in full. Of a larger one it hashes blocks spread evenly over the file, first and
last included, and the size is compared too, so that a data set of any size is checked quickly. `whole_digest` hashes
every byte, for files that must be proved exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from dora_rl.core.types import Record

_BLOCK = 1 << 16
_BLOCKS = 512
"""A sampled digest reads at most 32 MB."""


class FileDigest(Record, frozen=True, kw_only=True):
    """The size and digest of a file at one time."""

    size: int
    """Bytes."""
    digest: str
    """BLAKE2b, in hexadecimal."""


def whole_digest(path: Path) -> FileDigest:
    """The digest of every byte of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        return FileDigest(size=file.tell(), digest=digest)


def sampled_digest(path: Path) -> FileDigest:
    """The digest of a file that may be large: of all its bytes, or of blocks spread over it."""
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
    """Digests of all files below a folder, by prefix and path relative to the folder."""
    return {
        f"{prefix}{path.relative_to(folder).as_posix()}": whole_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def bytes_digest(data: bytes) -> str:
    """The digest of data that is not in a file."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def differences(expected: Mapping[str, FileDigest], found: Mapping[str, FileDigest]) -> dict[str, str]:
    """Files that differ from what is expected, and how each differs."""
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
