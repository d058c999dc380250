"""The translation of a config file of another framework, field by field.

A table has a rule for each field, by its dotted name or a pattern. A rule looks at the value, and at other fields where
the meaning depends on them, and returns one of three outcomes:

- `Mapped`: settings of dora-rl, with an optional remark for the user to decide on;
- `Same`: dora-rl behaves like this without a setting, or the value switches nothing on;
- `Unmapped`: the value is lost, with the reason or the nearest setting.

Invariants: every field of the file has exactly one outcome, so none is ignored silently. A field that no rule knows is
`Unmapped`, with the nearest setting. Defaults of the framework that differ from ours are translated by the same rules
if the file does not set them, so that a short file keeps its meaning. A value of the file wins over a default.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora_rl.core.errors import ConfigError


@dataclass(frozen=True)
class Mapped:
    """The field is these settings, by their dotted names."""

    settings: Mapping[str, Any]
    remark: str = ""
    """What the user should know or decide."""


@dataclass(frozen=True)
class Same:
    """The field needs no setting."""

    reason: str


@dataclass(frozen=True)
class Unmapped:
    """The field has no counterpart."""

    reason: str


Outcome = Mapped | Same | Unmapped
Fields = Mapping[str, Any]
"""All fields of a file by their dotted names, with the framework's defaults for those that it does not set."""
Rule = Callable[[Any, Fields], Outcome]


class Framework(NamedTuple):
    """What is known of another framework."""

    name: str
    table: Mapping[str, Rule]
    """Rules by dotted name; patterns with `*` are tried after the names, in their order."""
    defaults: Mapping[str, Any]
    """Its defaults that matter if a file does not set them."""
    finish: Callable[[Fields, Collection[str]], Iterator[Mapped]]
    """Settings that no single field gives; takes the fields, and the names of the settings that are there already."""


class Line(NamedTuple):
    """One setting of the result."""

    value: Any
    origin: str


class Rest(NamedTuple):
    """A field that gave no setting."""

    field: str
    value: Any
    reason: str


@dataclass
class Translation:
    """The result."""

    lines: dict[str, Line] = field(default_factory=dict)
    """By the dotted name of the setting."""
    remarks: list[str] = field(default_factory=list)
    unmapped: list[Rest] = field(default_factory=list)
    same: list[Rest] = field(default_factory=list)


def translate(framework: Framework, given: Fields) -> Translation:
    """Translate all fields of a file."""
    found = Translation()
    fields = {**framework.defaults, **given}
    for name in (one for one in framework.defaults if one not in given):
        outcome = outcome_of(framework, name, fields)
        if isinstance(outcome, Mapped):
            _take(found, outcome, f"default of {name}")
        elif isinstance(outcome, Unmapped):
            found.unmapped.append(Rest(f"default of {name}", fields[name], outcome.reason))
    origins: dict[str, list[str]] = {}
    for name, value in given.items():
        outcome = outcome_of(framework, name, fields)
        if isinstance(outcome, Mapped):
            for key, setting in outcome.settings.items():
                before = origins.get(key, [])
                if before and found.lines[key].value != setting:
                    lost = f"'{name}' gives '{key}' another value, which is used"
                    found.unmapped += [Rest(one, given[one], lost) for one in before]
                    before = []
                origins[key] = [*before, name]
            _take(found, outcome, name)
        else:
            rest = found.same if isinstance(outcome, Same) else found.unmapped
            rest.append(Rest(name, value, outcome.reason))
    for key, names in origins.items():
        found.lines[key] = found.lines[key]._replace(origin=", ".join(names))
    for more in framework.finish(fields, found.lines.keys()):
        _take(found, more, "")
    return found


def outcome_of(framework: Framework, name: str, fields: Fields) -> Outcome:
    """The outcome of one field."""
    value = fields[name]
    if isinstance(value, str) and "$" in value:
        return Unmapped("the value contains a variable or an expression that the file does not define: write it out")
    rule = framework.table.get(name) or next(
        (rule for pattern, rule in framework.table.items() if "*" in pattern and fnmatch.fnmatchcase(name, pattern)),
        None,
    )
    if rule is None:
        return Unmapped(f"this converter does not know it{_nearest(name)}")
    try:
        return rule(value, fields)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError):
        return Unmapped("the value is not of the expected type")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a tree by their dotted names; tables in a list are numbered."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for number, one in enumerate(value):
                yield from flatten(one, f"{name}.{number}.") if one else [(f"{name}.{number}", {})]
        else:
            yield name, value


# -- rules ------------------------------------------------------------------------------------------------------


def to(*keys: str, via: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The value is these settings; an unset value needs none."""

    def rule(value: Any, _: Fields) -> Outcome:
        return Same("unset") if value is None else Mapped({key: via(value) for key in keys})

    return rule


def no(reason: str) -> Rule:
    """Nothing corresponds to the field."""
    return lambda _value, _fields: Unmapped(reason)


def same(reason: str) -> Rule:
    """The field needs no setting, whatever its value."""
    return lambda _value, _fields: Same(reason)


def only(neutral: Collection[Any], reason: str, otherwise: str = "") -> Rule:
    """These values switch nothing on, or are what dora-rl does (`otherwise` says what); others have no counterpart."""

    def rule(value: Any, _: Fields) -> Outcome:
        plain = None if value in ({}, []) else value
        return Same(otherwise or "it switches nothing on") if plain in neutral else Unmapped(reason)

    return rule


def when(field_name: str, rule: Rule, otherwise: str) -> Rule:
    """Apply the rule if another field is on."""
    return lambda value, fields: rule(value, fields) if fields.get(field_name) else Same(otherwise)


def choice(key: str, values: Mapping[Any, Any], reason: str) -> Rule:
    """The value is one of the values of a setting."""
    return lambda value, _: Mapped({key: values[value]}) if value in values else Unmapped(reason)


# -- inside -----------------------------------------------------------------------------------------------------


def _take(found: Translation, outcome: Mapped, origin: str) -> None:
    for key, value in outcome.settings.items():
        found.lines[key] = Line(value, origin or outcome.remark)
    if outcome.remark:
        found.remarks.append(f"{origin}: {outcome.remark}" if origin else outcome.remark)


def _nearest(name: str) -> str:
    from dora_rl.apps.config_options import settings
    from dora_rl.runtime.config import RunConfig

    keys = [one.key for one in settings(RunConfig) if one.kind != "section"]
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close = difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1)
    return f"; the nearest setting is '{leaves[close[0]]}'" if close else ""


HELD_OUT = 64
"""Rows that are kept for evaluation where the framework has other data for it."""


def held_out(there: Collection[str]) -> Iterator[Mapped]:
    """Rows for evaluation, if it is on and nothing says what is evaluated."""
    if "evaluation.every" in there and not {"evaluation.data.source", "data.held_out"} & set(there):
        yield Mapped({"data.held_out": HELD_OUT}, "rows for evaluation: name others in 'evaluation.data.source'")


def whole(value: float, by: float, what: str) -> int:
    """The quotient of two numbers, which must be whole."""
    if by <= 0 or value % by:
        raise ConfigError(f"{what}: {value:g} is not a multiple of {by:g}")
    return round(value / by)
