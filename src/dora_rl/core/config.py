"""Typed configuration: one tree, read from TOML files and dotted overrides.

Each component defines its config class beside its code; this module reads the tree and reports mistakes. An unknown
key is an error that suggests the nearest known name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from dora_rl.core.errors import ConfigError

C = TypeVar("C", bound="Config")


@dataclass(frozen=True, slots=True)
class NameOf:
    """Marks a field that names an entry of a registry: `mode: Annotated[str, NameOf("mode", MODES)]`.

    An unknown name is an error that suggests the nearest one.
    """

    kind: str
    """What an entry of the registry is, for messages."""
    registry: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if name not in self.registry:
            nearest = difflib.get_close_matches(name, self.registry, n=1)
            hint = f"did you mean '{nearest[0]}'?" if nearest else f"known are: {', '.join(self.registry)}"
            raise ValueError(f"there is no {self.kind} '{name}'; {hint}")
        return name


class Config(BaseModel):
    """Base of all config classes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


def read_toml(path: Path) -> dict[str, Any]:
    """Read the config tree of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def override(tree: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Copy the tree and apply dotted assignments such as `control.max_staleness=3`."""
    result = _copy(tree)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"'{assignment}' is not an assignment: write key=value")
        node, leaf = _section(result, key.strip())
        node[leaf] = _value(text.strip())
    return result


def merge(tree: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tree and set values by their dotted names; a section is merged, so that its other keys are kept."""
    result = _copy(tree)
    for key, value in settings.items():
        given = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        node, leaf = _section(result, key)
        before = node.get(leaf)
        if isinstance(given, Mapping):
            node[leaf] = merge(before if isinstance(before, Mapping) else {}, given)
        else:
            node[leaf] = given
    return result


def _section(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section that a dotted name is in, which is made if it is missing, and the last part of the name."""
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"'{key}' can't be set: '{section}' is a value, not a section")
        node = child
    return node, leaf


def build(kind: type[C], tree: Mapping[str, Any], source: str = "config") -> C:
    """Validate a tree; the first mistake becomes one sentence that names the field."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_sentence(kind, error)}") from None


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _value(text: str) -> Any:
    """Parse a value as TOML; text that is not TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sentence(kind: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    # An unknown key often is a misspelt required one, so it is reported before a missing key.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(key) for key in first["loc"]]
    field = ".".join(path)
    if first["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(path[-1], _fields(kind, path[:-1]), n=1)
        hint = f", did you mean '{'.'.join([*path[:-1], nearest[0]])}'?" if nearest else ""
        return f"unknown key '{field}'{hint}"
    if first["type"] == "missing":
        return f"'{field}' is missing"
    message = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else first["msg"]
    if not field:
        return message
    given = first["input"]
    repeat_input = isinstance(given, str | int | float | bool) and repr(given) not in message
    but = f", not {given!r}" if repeat_input else ""
    return f"'{field}': {message[0].lower()}{message[1:]}{but}"


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    """The known keys of the section at `path`."""
    model: type[BaseModel] = kind
    for key in path:
        field = model.model_fields.get(key)
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return []
        model = field.annotation
    return list(model.model_fields)
