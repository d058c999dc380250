"""Keeps the policy of the version with the highest held-out accuracy, however many checkpoints are kept.

    checkpoints/best               a link to the folder of the best version so far
    checkpoints/best-00000012/     policy/ of version 12, as hard links to the files of its checkpoint; version.json

A checkpoint may be deleted before its version is evaluated, so the policy of each version that will be evaluated is
linked when its checkpoint is written, and unlinked when another version turns out to be better. No byte is copied.

Invariants:
- `best` is absent or links to a complete policy: the folder and the link appear under their names by a rename;
- the policy of a version that was evaluated stays exactly if no version evaluated so far has a higher accuracy, and no
  earlier one the same;
- a file system without hard links, or a checkpoint that is gone already, costs the best policy and not the run.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from dora_rl.core.types import Version

logger = logging.getLogger(__name__)

BEST = "best"
_STAGED = ".staged-best"


class BestPolicy:
    """The best policy of one run."""

    def __init__(self, checkpoints: Path, is_due: Callable[[Version], bool], scores: Mapping[Version, float]) -> None:
        """`is_due` says whether a version will be evaluated; `scores` are the accuracies of those that were."""
        self._checkpoints = checkpoints
        self._is_due = is_due
        self._scores = dict(scores)
        for left in checkpoints.glob(f"{_STAGED}*"):  # by a supervisor that was killed
            _remove(left)
        self._settle()

    def checkpoint_written(self, name: str) -> None:
        """A checkpoint is complete: keep its policy if its version may be the best."""
        version = int(name.removeprefix("version-").partition(".")[0])
        if self._is_due(version) and version not in self._scores and not self._folder(version).exists():
            self._link(self._checkpoints / name / "policy", version)

    def evaluated(self, version: Version, accuracy: float) -> None:
        """A version was evaluated."""
        self._scores[version] = accuracy
        self._settle()

    def _settle(self) -> None:
        """Let `best` link to the best version whose policy is there, and remove those that were worse.

        Versions are evaluated in their order, so one that was passed over won't be evaluated any more.
        """
        there = [int(path.name.removeprefix(f"{BEST}-")) for path in self._checkpoints.glob(f"{BEST}-*")]
        done = [version for version in there if version in self._scores]
        best = max(done, key=lambda version: (self._scores[version], -version), default=None)
        try:
            if best is not None:
                self._point_to(self._folder(best).name)
            for version in there:
                if version != best and version <= max(self._scores, default=-1):
                    _remove(self._folder(version))
        except OSError as error:
            logger.warning("the best policy can't be kept: %s", error)

    def _link(self, policy: Path, version: Version) -> None:
        staged = self._checkpoints / f"{_STAGED}-{version:08d}"
        try:
            shutil.copytree(policy, staged / "policy", copy_function=os.link)
            (staged / "version.json").write_text(json.dumps({"version": version}))
            staged.rename(self._folder(version))
        except (OSError, shutil.Error) as error:
            shutil.rmtree(staged, ignore_errors=True)
            logger.warning("the policy of version %d can't be kept for its evaluation: %s", version, error)

    def _point_to(self, name: str) -> None:
        link, staged = self._checkpoints / BEST, self._checkpoints / _STAGED
        if link.is_symlink() and str(link.readlink()) == name:
            return
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)  # the run directory was copied, and the link with it
        staged.unlink(missing_ok=True)
        staged.symlink_to(name)
        staged.rename(link)

    def _folder(self, version: Version) -> Path:
        return self._checkpoints / f"{BEST}-{version:08d}"


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
