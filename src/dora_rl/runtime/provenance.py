"""What a run was made from, written down and compared each time that it is resumed.

Invariants:
- the settings that a run began with are in its ledger; `config.json` is a copy. A copy that says otherwise is refused,
  but for the settings in `CHANGEABLE`, and each of those that is another one is written down first;
- user code and data may be mended while a run is interrupted: that is said and written down. The model that a run began
  with may not: adapters and the reference policy stand on it.

Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.file_digests import FileDigest, bytes_digest, differences, sampled_digest
from dora_rl.core.types import Nanoseconds
from dora_rl.envs.task_files import code_files, data_code, data_files
from dora_rl.ledger.run_records import (
    AnyRunRecord,
    CheckpointSaved,
    Configured,
    FilesSeen,
    RecordedAt,
    SettingChanged,
    utc,
)
from dora_rl.runtime.checkpoint_manifest import checkpoint_names, checkpoint_saved, manifest, newer

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.run_dir import RunDir

CHANGEABLE = ("rollout.instances", "rollout.engine.probe_tolerance", "runtime", "ray", "mismatch")
"""Settings, or sections of them, that `config.json` may have otherwise than the run began with."""
BOUND = "control.max_staleness"
"""Can be another one too, but only by an event that the orchestrator takes; `config.json` keeps the first."""
_MODEL = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".gguf"}
_NAMED = 4
"""Settings named in one sentence."""


class ProvenanceDifference(NamedTuple):
    """A setting that is not what it was."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"'{self.key}' is {json.dumps(self.after)} and was {json.dumps(self.before)}"


class Provenance:
    """Of one run that is about to begin or to go on."""

    def __init__(self, folder: RunDir, config: RunConfig, ledger: Ledger, notice: Callable[[str], None]) -> None:
        self._folder = folder
        self._config = config
        self._ledger = ledger
        self._notice = notice
        self._pending: list[AnyRunRecord] = []
        self._files: FilesSeen | None = None

    def check(self) -> None:
        """Compare with what the ledger has, before anything is done; what is new is written by `record`."""
        records = [one.record for one in self._ledger.records()]
        config, base = json.loads(self._config.model_dump_json()), str(self._folder.base())
        begun = next((record for record in records if isinstance(record, Configured)), None)
        if begun is None:
            if self._ledger.seq:
                raise IntegrityError(f"{self._folder.ledger} does not say what the run began with; put back a copy")
            self._pending.append(configured(base, config))
        else:
            if base != begun.base:
                raise UserError(
                    f"{self._folder.config} has the base folder '{base}', and the run began with '{begun.base}': put "
                    "it back, or begin a new run"
                )
            self._compare(self._resolved(settings_now(records)), config)
        self._files = _seen(self._config, Path(base))
        self._compare_files(next((record for record in reversed(records) if isinstance(record, FilesSeen)), None))
        self._pending += self._unrecorded(records)

    def record(self, at: Nanoseconds) -> None:
        """Write down what is new: the run goes on with it."""
        for record in self._pending:
            if isinstance(record, SettingChanged):
                self._notice(f"{record.key}: {json.dumps(record.before)} -> {json.dumps(record.after)}")
            self._ledger.record(record, at)
        self._pending.clear()

    def look_again(self, at: Nanoseconds) -> None:
        """At the end: a process that was started again in between has read what the files were then."""
        if self._files is None:
            return
        try:
            seen = _seen(self._config, self._folder.base())
        except (OSError, UserError):
            return  # the run's folder or its files are going away: the next start compares
        changed = [*_changed(self._files, seen, "code"), *_changed(self._files, seen, "data")]
        if changed:
            self._notice(f"warning: while the run went on, {'; '.join(changed)}")
            self._ledger.record(seen, at)

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        found = list(differing(before, after))
        refused = [str(one) for one in found if not changeable(one.key)]
        if refused:
            rest = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            raise UserError(
                f"{self._folder.config} was changed: {', '.join(refused[:_NAMED])}{rest}; a run is resumed with the "
                "settings that it began with: put them back, or begin a new run"
            )
        self._pending += [setting_changed(*one) for one in found]

    def _resolved(self, settings: dict[str, Any]) -> dict[str, Any]:
        """With the keys that a newer dora-rl has, at their defaults."""
        from dora_rl.core.config import build

        resolved: dict[str, Any] = json.loads(
            build(type(self._config), settings, str(self._folder.ledger)).model_dump_json()
        )
        return resolved

    def _compare_files(self, before: FilesSeen | None) -> None:
        assert self._files is not None
        if before is None:
            self._pending.append(self._files)
            return
        model = [one for one in _changed(before, self._files, "model") if "was added" not in one]
        if model:
            raise UserError(f"the model that the run began with is another one: {model[0]}; put it back")
        changed = [*_changed(before, self._files, "code"), *_changed(before, self._files, "data")]
        if changed:
            self._notice(
                f"warning: since the run was last begun, {'; '.join(changed)}; it goes on with them as they are"
            )
            self._pending.append(self._files)

    def _unrecorded(self, records: list[AnyRunRecord]) -> Iterator[CheckpointSaved]:
        """Checkpoints that were written just before the former supervisor ended."""
        known = {record.name for record in records if isinstance(record, CheckpointSaved)}
        names = checkpoint_names(self._folder.checkpoints)
        for name in newer(names, known):
            files = manifest(self._folder.checkpoints / name)
            if files:
                yield checkpoint_saved(name, files, names)


# -- records ----------------------------------------------------------------------------------------------------


def configured(base: str, config: dict[str, Any]) -> Configured:
    return Configured(utc=utc(), base=base, config=config, digest=config_digest(base, config))


def setting_changed(key: str, before: Any, after: Any) -> SettingChanged:
    return SettingChanged(utc=utc(), key=key, before=before, after=after)


def config_digest(base: str, config: dict[str, Any]) -> str:
    """Of a resolved configuration."""
    return bytes_digest(json.dumps({"base": base, "config": config}, sort_keys=True).encode())


# -- settings ---------------------------------------------------------------------------------------------------


def settings_now(records: Iterable[AnyRunRecord]) -> dict[str, Any]:
    """The settings that a run began with and what was changed since; the bound is as it was at first."""
    settings: dict[str, Any] = {}
    for record in records:
        if isinstance(record, Configured):
            settings = json.loads(json.dumps(record.config))
        elif isinstance(record, SettingChanged) and record.key != BOUND:
            *sections, leaf = record.key.split(".")
            node = settings
            for section in sections:
                node = node.setdefault(section, {})
            node[leaf] = record.after
    return settings


def differing(before: Mapping[str, Any], after: Mapping[str, Any], section: str = "") -> Iterator[ProvenanceDifference]:
    """Settings that differ, by their dotted names; one that is not there counts as unset."""
    for key in sorted(before.keys() | after.keys()):
        name, ours, theirs = f"{section}{key}", before.get(key), after.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from differing(ours, theirs, f"{name}.")
        elif ours != theirs:
            yield ProvenanceDifference(name, ours, theirs)


def changeable(key: str) -> bool:
    """A run may be resumed with another value."""
    return any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE)


def config_problems(records: Iterable[AnyRunRecord], base: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Where `config.json` is not what the ledger has. A key that the ledger does not know is of a newer dora-rl."""
    kept = list(records)
    begun = next((record for record in kept if isinstance(record, Configured)), None)
    if begun is None:
        return
    if begun.digest != config_digest(begun.base, begun.config):
        yield "the configuration in the ledger is not the one that its digest was taken of"
    if base != begun.base:
        yield f"config.json was changed: its base folder is '{base}', and the run began with '{begun.base}'"
    before = settings_now(kept)
    for one in differing(before, config):
        if not changeable(one.key) and _known(before, one.key):
            yield f"config.json was changed: {one}"


def _known(settings: Mapping[str, Any], key: str) -> bool:
    node: Any = settings
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


# -- files ------------------------------------------------------------------------------------------------------


def _seen(config: RunConfig, base: Path) -> FilesSeen:
    environment = [] if config.environment.kind is None else [config.environment.kind]
    sources = [config.data] if config.evaluation.data is None else [config.data, config.evaluation.data]
    names = [*config.reward.functions, *environment, *(name for source in sources for name in data_code(source))]
    data = [path for source in sources for path in data_files(source, base)]
    return FilesSeen(
        utc=utc(),
        code=_digests(code_files(names, base), base),
        data=_digests(data, base),
        model=_digests(_model_files(Path(config.model.path).expanduser()), base),
    )


def _model_files(path: Path) -> list[Path]:
    if path.is_dir():
        return [one for one in sorted(path.iterdir()) if one.is_file() and one.suffix in _MODEL]
    return [path] if path.is_file() else []


def _digests(paths: Iterable[Path], base: Path) -> dict[str, FileDigest]:
    base = base.resolve()
    found = {}
    for path in paths:
        full = path.resolve()
        name = full.relative_to(base).as_posix() if full.is_relative_to(base) else str(full)
        found[name] = sampled_digest(full)
    return found


def _changed(before: FilesSeen, after: FilesSeen, kind: str) -> Iterator[str]:
    for name, problem in differences(getattr(before, kind), getattr(after, kind)).items():
        yield f"{name} ({kind}) {problem}"


def files_changed(records: Iterable[RecordedAt]) -> Iterator[str]:
    """What became of the files that a run reads, as far as it was noticed."""
    before: FilesSeen | None = None
    for one in records:
        if isinstance(one.record, FilesSeen):
            if before is not None:
                for kind in ("code", "data", "model"):
                    yield from (f"{change}, noticed {one.record.utc}" for change in _changed(before, one.record, kind))
            before = one.record
