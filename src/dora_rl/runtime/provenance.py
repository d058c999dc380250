"""What a run was made from: recorded in the ledger, and compared each time that the run is resumed.

Invariants:
- the settings that a run was started with are in its ledger; `config.json` is a copy. A copy that differs is refused,
  except in the settings of `CHANGEABLE`; a change of one of those is recorded before it takes effect;
- user code and data may be changed while a run is interrupted: the user is notified and the change is recorded. The
  model may not be changed: adapters and the reference policy depend on it.

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

STEPS = "control.steps"
"""Can grow, by an event of the orchestrator; the event log begins with the first value."""
CHANGEABLE = (
    "rollout.instances",
    "rollout.engine.probe_tolerance",
    STEPS,
    "runtime",
    "ray",
    "mismatch",
    "logging.level",
)
"""Settings, or sections of settings, in which `config.json` may differ from what the run was started with."""
BOUND = "control.max_staleness"
"""Can change too, but only by an event of the orchestrator; `config.json` keeps the first value."""
_MODEL = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".gguf"}
_MAX_NAMED = 4
"""Settings that an error message names."""


class ProvenanceDifference(NamedTuple):
    """A setting that has changed."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"'{self.key}' is {json.dumps(self.after)} and was {json.dumps(self.before)}"


class Provenance:
    """The provenance of a run that is about to be started or resumed."""

    def __init__(self, run_dir: RunDir, config: RunConfig, ledger: Ledger, notify: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._config = config
        self._ledger = ledger
        self._notify = notify
        self._pending: list[AnyRunRecord] = []
        self._files: FilesSeen | None = None
        self.first_steps = config.control.steps
        """The number of steps that the run was started with."""

    def check(self) -> None:
        """Compare with the ledger before anything is done; `record` writes what is new."""
        records = [one.record for one in self._ledger.records()]
        config, base = json.loads(self._config.model_dump_json()), str(self._run_dir.base())
        begun = next((record for record in records if isinstance(record, Configured)), None)
        if begun is None:
            if self._ledger.seq:
                raise IntegrityError(f"{self._run_dir.ledger} has no record of the run's settings; put back a copy")
            self._pending.append(configured(base, config))
        else:
            self.first_steps = begun.config["control"]["steps"]
            if base != begun.base:
                raise UserError(
                    f"{self._run_dir.config} has the base directory '{base}', but the run was started with "
                    f"'{begun.base}': put it back, or start a new run"
                )
            self._compare(self._resolved(settings_now(records)), config)
        self._files = _seen(self._config, Path(base))
        self._compare_files(next((record for record in reversed(records) if isinstance(record, FilesSeen)), None))
        self._pending += self._unrecorded(records)

    def record(self, at: Nanoseconds) -> None:
        """Record what is new: the run continues with it."""
        for record in self._pending:
            if isinstance(record, SettingChanged):
                self._notify(f"{record.key}: {json.dumps(record.before)} -> {json.dumps(record.after)}")
            self._ledger.record(record, at)
        self._pending.clear()

    def look_again(self, at: Nanoseconds) -> None:
        """Compare the files at the end of the run: a worker that was restarted has read them as they were then."""
        if self._files is None:
            return
        try:
            seen = _seen(self._config, self._run_dir.base())
        except (OSError, UserError):
            return  # the run directory or its files are being deleted: the next start compares
        changed = [*_changed(self._files, seen, "code"), *_changed(self._files, seen, "data")]
        if changed:
            self._notify(f"warning: during the run, {'; '.join(changed)}")
            self._ledger.record(seen, at)

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        found = list(differing(before, after))
        refused = [str(one) for one in found if not changeable(one.key)]
        if refused:
            rest = f" and {len(refused) - _MAX_NAMED} more" if len(refused) > _MAX_NAMED else ""
            raise UserError(
                f"{self._run_dir.config} was changed: {', '.join(refused[:_MAX_NAMED])}{rest}; a run is resumed with "
                "the settings that it was started with: put them back, or start a new run"
            )
        self._pending += [setting_changed(*one) for one in found]

    def _resolved(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings, with the defaults of keys that a newer dora-rl has added."""
        from dora_rl.core.config import build

        resolved: dict[str, Any] = json.loads(
            build(type(self._config), settings, str(self._run_dir.ledger)).model_dump_json()
        )
        return resolved

    def _compare_files(self, before: FilesSeen | None) -> None:
        assert self._files is not None
        if before is None:
            self._pending.append(self._files)
            return
        model = [one for one in _changed(before, self._files, "model") if "was added" not in one]
        if model:
            raise UserError(f"the model of the run has changed: {model[0]}; put it back")
        changed = [*_changed(before, self._files, "code"), *_changed(before, self._files, "data")]
        if changed:
            self._notify(
                f"warning: since the run was last started, {'; '.join(changed)}; "
                "it continues with the files as they are"
            )
            self._pending.append(self._files)

    def _unrecorded(self, records: list[AnyRunRecord]) -> Iterator[CheckpointSaved]:
        """Checkpoints that were written just before the last supervisor ended."""
        known = {record.name for record in records if isinstance(record, CheckpointSaved)}
        names = checkpoint_names(self._run_dir.checkpoints)
        for name in newer(names, known):
            files = manifest(self._run_dir.checkpoints / name)
            if files:
                yield checkpoint_saved(name, files, names)


# -- records ----------------------------------------------------------------------------------------------------


def configured(base: str, config: dict[str, Any]) -> Configured:
    return Configured(utc=utc(), base=base, config=config, digest=config_digest(base, config))


def setting_changed(key: str, before: Any, after: Any) -> SettingChanged:
    return SettingChanged(utc=utc(), key=key, before=before, after=after)


def config_digest(base: str, config: dict[str, Any]) -> str:
    """The digest of a resolved configuration."""
    return bytes_digest(json.dumps({"base": base, "config": config}, sort_keys=True).encode())


# -- settings ---------------------------------------------------------------------------------------------------


def settings_now(records: Iterable[AnyRunRecord]) -> dict[str, Any]:
    """The settings that a run was started with, with the changes since; the staleness bound keeps its first value."""
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
    """Settings that differ, by their dotted names; a missing one counts as unset."""
    for key in sorted(before.keys() | after.keys()):
        name, ours, theirs = f"{section}{key}", before.get(key), after.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from differing(ours, theirs, f"{name}.")
        elif ours != theirs:
            yield ProvenanceDifference(name, ours, theirs)


def changeable(key: str) -> bool:
    """Whether a run may be resumed with another value of this setting."""
    return any(key == one or key.startswith(f"{one}.") for one in CHANGEABLE)


def config_problems(records: Iterable[AnyRunRecord], base: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Where `config.json` differs from the ledger. A key that the ledger does not have was added by a newer dora-rl."""
    kept = list(records)
    begun = next((record for record in kept if isinstance(record, Configured)), None)
    if begun is None:
        return
    if begun.digest != config_digest(begun.base, begun.config):
        yield "the configuration in the ledger does not match its digest"
    if base != begun.base:
        yield f"config.json was changed: its base directory is '{base}', but the run was started with '{begun.base}'"
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
    """The changes of the files that a run reads, as far as they were noticed."""
    before: FilesSeen | None = None
    for one in records:
        if isinstance(one.record, FilesSeen):
            if before is not None:
                for kind in ("code", "data", "model"):
                    yield from (f"{change}, noticed {one.record.utc}" for change in _changed(before, one.record, kind))
            before = one.record
