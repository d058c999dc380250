"""Reads config files of other frameworks: YAML in hydra's layout, shell scripts with hydra's overrides, TOML.

Nothing in a file is executed. Of a shell script only plain assignments of variables and the arguments of the command
that starts the training are read; variables come from the script or else from the environment, as in a shell. Of
hydra's expressions, references to other fields are resolved. What remains keeps its `$`, which the translation reports.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dora_rl.apps.conversion.translation import flatten
from dora_rl.core.errors import ConfigError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{\s*(?P<select>oc\.select:\s*)?(?P<name>\.*[\w.]+)\s*(?:,\s*(?P<default>[^}]*?)\s*)?\}")
_STARTS = re.compile(r"verl[\w.]*\.main\w*|main_ppo|main_dapo|\w*_main(\.py)?$")
_MAX_HOPS = 8
"""References to references that are followed."""


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a YAML file, with references resolved."""
    yaml = _yaml()
    try:
        tree = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} is not a config file: it has no fields")
    fields = {str(name): numbers(value) for name, value in flatten(tree)}
    return {name: _resolved(name, value, fields) for name, value in fields.items()}


def read_shell(path: Path) -> dict[str, Any]:
    """The overrides of the command in a shell script that starts the training, by their names."""
    variables: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for line in read_text(path).replace("\\\n", " ").splitlines():
        words = _words(line)
        start = next((number for number, word in enumerate(words) if _STARTS.search(word)), None)
        assigned = [_ASSIGNMENT.fullmatch(word) for word in words if word != "export"]
        if start is not None:
            fields["main"] = words[start]
            for word in words[start + 1 :]:
                _add_override(fields, _expanded(word, variables))
        elif words and all(assigned):
            for one in assigned:
                assert one is not None
                variables[one[1]] = _expanded(one[2], variables)
    if not fields:
        raise ConfigError(
            f"{path} has no command that starts verl, such as `python3 -m verl.trainer.main_ppo key=value ...`"
        )
    return {name: _resolved(name, value, fields) for name, value in fields.items()}


def numbers(value: Any) -> Any:
    """The value with numbers such as `1e-6` as numbers, which YAML reads as texts."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        number = float(value)
        return int(number) if re.fullmatch(r"[+-]?\d+", value.strip()) else number
    return [numbers(one) for one in value] if isinstance(value, list) else value


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []  # a quote that ends on another line: not a list of overrides


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        known = variables.get(name, os.environ.get(name))
        return found[0] if known is None and found[2] is None else found[2] if known is None else known

    return _VARIABLE.sub(value, text)


def _add_override(fields: dict[str, Any], word: str) -> None:
    found = _OVERRIDE.fullmatch(word)
    if found is None:
        fields[word] = None
        return
    yaml = _yaml()
    try:
        value = yaml.safe_load(found[2]) if found[2] else None
    except yaml.YAMLError:
        value = found[2]
    if isinstance(value, Mapping) and value:
        fields.update(flatten(value, f"{found[1]}."))
    else:
        fields[found[1]] = None if value == "None" else numbers(value)


def _resolved(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """The value with references to other fields replaced by their values."""
    for _ in range(_MAX_HOPS):
        if not isinstance(value, str) or "${" not in value:
            return value
        alone = _REFERENCE.fullmatch(value.strip())
        if alone:
            after = _target(name, alone, fields)
        else:
            after = _REFERENCE.sub(lambda found: _embedded(_target(name, found, fields)), value)
        if after == value:
            return value
        value = after
    return value


def _target(name: str, found: re.Match[str], fields: Mapping[str, Any]) -> Any:
    wanted = found["name"]
    if wanted.startswith("."):
        above = name.split(".")[: -(len(wanted) - len(wanted.lstrip(".")))]
        wanted = ".".join([*above, wanted.lstrip(".")])
    if wanted in fields:
        return fields[wanted]
    default = found["default"]
    if default is None:
        return None if found["select"] else found[0]
    return numbers(_yaml().safe_load(default))


def _embedded(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading a verl config requires PyYAML: pip install pyyaml") from error
    return yaml
