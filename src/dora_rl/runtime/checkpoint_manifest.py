"""The checkpoints of a run, file by file: what the ledger has of them, and whether they are still that.

Every checkpoint is in the ledger with the digests of all its files, so that the policy which users take away can be
proved. Nothing here needs torch: files are hashed, not parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from dora_rl.core.file_digests import FileDigest, differences, tree_digests, whole_digest
from dora_rl.core.types import Version
from dora_rl.ledger.run_records import AnyRunRecord, CheckpointSaved, utc

_CHECKPOINT = re.compile(r"version-(\d{8})\.(\d+)")


def checkpoint_saved(name: str, files: Mapping[str, FileDigest], kept: Iterable[str]) -> CheckpointSaved:
    """The run record of a checkpoint that was written."""
    return CheckpointSaved(utc=utc(), name=name, version=_order(name)[0], files=dict(files), kept=tuple(kept))


def checkpoint_names(folder: Path) -> list[str]:
    """Whole checkpoints, oldest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((name for name in names if _CHECKPOINT.fullmatch(name)), key=_order)


def manifest(path: Path) -> dict[str, FileDigest]:
    """What a checkpoint says of its own files, and `state.json`, which says it; empty if it can't be read."""
    try:
        files = json.loads((path / "state.json").read_text())["files"]
        found = {str(name): FileDigest(size=one["size"], digest=one["digest"]) for name, one in files.items()}
        return {**found, "state.json": whole_digest(path / "state.json")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def newer(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Those that are newer than all that are known."""
    return [name for name in names if all(_order(name) > _order(one) for one in known)]


def policy(saved: CheckpointSaved) -> dict[str, FileDigest]:
    """The part of a checkpoint that users take away."""
    return {name: digest for name, digest in saved.files.items() if name.startswith("policy/")}


def checkpoint_problems(
    records: Iterable[AnyRunRecord], folder: Path, newest: Version, *, going_on: bool
) -> Iterator[str]:
    """Where the checkpoints on disk, with the policies in them, are not what the ledger has.

    One that was written just before the supervisor was killed may not be in the ledger yet: it is newer than all that
    are, no more than one version ahead of the log, and vouches for itself until the run is resumed.
    """
    written = [record for record in records if isinstance(record, CheckpointSaved)]
    saved = {record.name: record for record in written}
    kept = written[-1].kept if written else ()
    there = checkpoint_names(folder)
    late = [name for name in newer(there, saved) if _order(name)[0] <= newest + 1]
    for name in kept[len(late) :]:
        set_aside = (folder / f"damaged-{name}").exists()  # by the trainer, which has said so
        if name not in there and not set_aside and not going_on:
            yield f"checkpoint {name} is missing"
    for name in there:
        if name not in saved and name not in late:
            yield f"checkpoint {name} is not in the ledger"
            continue
        expected = saved[name].files if name in saved else manifest(folder / name)
        try:
            found = tree_digests(folder / name)
        except OSError as error:
            if not going_on:  # otherwise its time may just have come
                yield f"checkpoint {name} can't be read: {error}"
            continue
        for file, problem in differences(expected, found).items():
            yield f"checkpoint {name}: {file} {problem}"


def _order(name: str) -> tuple[int, int]:
    found = _CHECKPOINT.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2])
