"""The configuration of a run in a Python program.

`DoraConfig` holds settings of `runtime.config.RunConfig`, the only config tree: it adds no setting and no default. It
is validated when it is made, with the same sentences as a config file; what the arguments of `train` supply (the
model, the data, the reward functions) may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dora_rl.core.config import build, merge, read_toml
from dora_rl.core.errors import ConfigError
from dora_rl.runtime.config import RunConfig

_SUPPLIED = {"model": {"path": "the-model"}, "data": {"source": "the-data.jsonl"}}
"""Stands for what `train` supplies, while a config is validated without it."""


class DoraConfig:
    """The settings of a run: `DoraConfig(control={"groups_per_step": 8, ...}, seed=1)`.

    The keywords are the sections and keys of a config file (`dora-rl init --full` prints them all). A section is a
    mapping; a dotted name sets one key: `DoraConfig(**{"control.max_staleness": 4})`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = merge({}, settings)
        self._base: Path | None = None
        self._source = "config"
        self._check()

    @classmethod
    def from_toml(cls, path: str | Path, **settings: Any) -> DoraConfig:
        """The config file at `path`, with these settings in place of its own; paths in it are relative to its folder.

        `settings` are those of the constructor: sections, which keep the other keys of the file, or dotted names.
        """
        file = Path(path)
        return cls._make(merge(read_toml(file), settings), file.resolve().parent, str(path))

    def replace(self, **settings: Any) -> DoraConfig:
        """A copy with other values: sections, which keep their other keys, or dotted names."""
        return self._make(merge(self._settings, settings), self._base, self._source)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were given, as a tree; defaults are not in it."""
        return merge({}, self._settings)

    @property
    def base(self) -> Path:
        """The folder that relative paths start from: that of the config file, or the working directory."""
        return self._base or Path.cwd()

    def resolve(self, supplied: Mapping[str, Any]) -> RunConfig:
        """The complete configuration of a run, with what the arguments of `train` supply."""
        tree = merge(self._settings, supplied)
        if "path" not in _section(tree, "model"):
            raise ConfigError("there is no model: pass `model`, or set 'model.path' in the config")
        if "source" not in _section(tree, "data"):
            raise ConfigError("there is no data: pass `train_dataset`, or set 'data.source' in the config")
        if not _section(tree, "reward").get("functions") and _section(tree, "environment").get("kind") is None:
            raise ConfigError("nothing says what a response is worth: pass `reward_funcs` or `environment`")
        return build(RunConfig, tree, self._source)

    @classmethod
    def _make(cls, settings: dict[str, Any], base: Path | None, source: str) -> DoraConfig:
        made = cls.__new__(cls)
        made._settings, made._base, made._source = settings, base, source
        made._check()
        return made

    def _check(self) -> None:
        """Validate all settings, as if `train` had supplied the rest."""
        tree = merge(_SUPPLIED, self._settings)
        reward = tree.setdefault("reward", {})
        if isinstance(reward, dict) and not reward.get("functions"):
            weights = reward.get("weights")
            reward["functions"] = ["exact"] * (len(weights) if isinstance(weights, list | tuple) else 1)
        build(RunConfig, tree, self._source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DoraConfig):
            return NotImplemented
        return (self._settings, self._base) == (other._settings, other._base)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DoraConfig({', '.join(f'{key}={value!r}' for key, value in self._settings.items())})"


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name, {})
    return found if isinstance(found, Mapping) else {}
