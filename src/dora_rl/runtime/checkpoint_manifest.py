"""The checkpoints of a run, file by file: what the ledger has recorded of them, and whether they still match.

The ledger has the digests of all files of every checkpoint, so that the policy which users take away can be verified.
Nothing here needs torch: files are hashed, not parsed.
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


def checkpoint_names(directory: Path) -> list[str]:
    """The names of complete checkpoints, oldest first."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted((name for name in names if _CHECKPOINT.fullmatch(name)), key=_order)


def manifest(path: Path) -> dict[str, FileDigest]:
    """The digests that a checkpoint's `state.json` has of its files, and that of `state.json`; empty if unreadable."""
    try:
        files = json.loads((path / "state.json").read_text())["files"]
        found = {str(name): FileDigest(size=one["size"], digest=one["digest"]) for name, one in files.items()}
        return {**found, "state.json": whole_digest(path / "state.json")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def newer(names: Iterable[str], known: Collection[str]) -> list[str]:
    """The names that are newer than all known ones."""
    return [name for name in names if all(_order(name) > _order(one) for one in known)]


def policy(saved: CheckpointSaved) -> dict[str, FileDigest]:
    """The part of a checkpoint that users take away."""
    return {name: digest for name, digest in saved.files.items() if name.startswith("policy/")}


def checkpoint_problems(
    records: Iterable[AnyRunRecord], directory: Path, newest: Version, *, running: bool
) -> Iterator[str]:
    """Where the checkpoints on disk, and the policies in them, differ from the ledger.

    A checkpoint that was written just before the supervisor was killed may not be in the ledger yet: it is newer than
    all that are, at most one version ahead of the log, and is checked against its own digests until the run is resumed.
    """
    written = [record for record in records if isinstance(record, CheckpointSaved)]
    saved = {record.name: record for record in written}
    kept = written[-1].kept if written else ()
    there = checkpoint_names(directory)
    late = [name for name in newer(there, saved) if _order(name)[0] <= newest + 1]
    for name in kept[len(late) :]:
        set_aside = (directory / f"damaged-{name}").exists()  # by the trainer, which has logged it
        if name not in there and not set_aside and not running:
            yield f"checkpoint {name} is missing"
    for name in there:
        if name not in saved and name not in late:
            yield f"checkpoint {name} is not in the ledger"
            continue
        expected = saved[name].files if name in saved else manifest(directory / name)
        try:
            found = tree_digests(directory / name)
        except OSError as error:
            if not running:  # a running trainer may just have deleted it
                yield f"checkpoint {name} can't be read: {error}"
            continue
        for file, problem in differences(expected, found).items():
            yield f"checkpoint {name}: {file} {problem}"
    yield from _best_problems(written, directory / "best")


def _best_problems(written: Iterable[CheckpointSaved], best: Path) -> Iterator[str]:
    """Where the best policy differs from that of the checkpoint that it was taken from."""
    if not best.exists():
        return
    version = best_version(best.parent)
    if version is None:
        yield "checkpoint best: version.json can't be read"
        return
    found = tree_digests(best / "policy", "policy/")
    problems = [differences(policy(one), found) for one in written if one.version == version]
    if all(problems):
        problem = "is not in the ledger" if not problems else next(f"{a} {b}" for a, b in problems[-1].items())
        yield f"checkpoint best, of version {version}: {problem}"


def best_version(directory: Path) -> Version | None:
    """The version whose policy is kept as the best; None if there is none."""
    try:
        return int(json.loads((directory / "best" / "version.json").read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _order(name: str) -> tuple[int, int]:
    found = _CHECKPOINT.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2])
