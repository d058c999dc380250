"""The settings of a run as command-line options: `--section.key VALUE`, before or after the config file.

Settings are removed from the arguments before the other options are parsed, since only the config classes define them.
A setting always takes a value, so the next argument is never mistaken for the config file. A name that is neither a
setting nor an option is refused with the nearest name.

Why not a library: pydantic-settings adds 66 ms to the import of pydantic (26 ms) and prints its whole usage for an
unknown key; tyro (40 ms) makes a subcommand of each optional section; neither writes a commented config file.
"""

from __future__ import annotations

import difflib
import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel
from typer.core import TyperCommand

from dora_rl.core.config import NameOf
from dora_rl.core.errors import UserError

if typing.TYPE_CHECKING:
    from pydantic.fields import FieldInfo

META = "dora_rl.settings"
"""Key of the settings in the `meta` of a command's context."""
_REQUIRED = "required"
_UNSET = "not set"
_BOOLEANS = ("true", "false")


class Setting(NamedTuple):
    """One key of the configuration, or a section."""

    key: str
    kind: str
    """Name of its type; `section` for a section."""
    default: str
    about: str
    """The first sentence of its description."""


def settings(kind: type[BaseModel]) -> list[Setting]:
    """All keys of a tree of config classes; each section lists its keys first, then its subsections."""
    return list(_walk(kind, None, ""))


def _walk(kind: type[BaseModel], value: BaseModel | None, path: str) -> Iterator[Setting]:
    inner: list[tuple[str, FieldInfo, type[BaseModel]]] = []
    for name, field in kind.model_fields.items():
        model = section_of(field)
        if model is not None:
            inner.append((name, field, model))
        else:
            default = default_of(field, value, name)
            shown = _REQUIRED if field.is_required() else _UNSET if default is None else toml(default)
            yield Setting(f"{path}{name}", values_of(field), shown, sentence(field.description or ""))
    for name, field, model in inner:
        default = default_of(field, value, name)
        off = _UNSET if default is None and optional(field) else ""
        yield Setting(f"{path}{name}", "section", off, sentence(field.description or model.__doc__ or ""))
        yield from _walk(model, default, f"{path}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The config class of a section; None for a key."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, BaseModel):
            return kind
    return None


def optional(field: FieldInfo) -> bool:
    """Whether it may be unset."""
    return type(None) in typing.get_args(field.annotation)


def default_of(field: FieldInfo, value: BaseModel | None, name: str) -> Any:
    """The default in a run, which may differ from that of the section's class; None if there is none."""
    if value is not None:
        return getattr(value, name)
    return None if field.is_required() else field.get_default(call_default_factory=True)


def toml(value: Any) -> str:
    """A value in TOML syntax."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return tomli_w.dumps({"it": value}).strip().removeprefix("it = ")


def values_of(field: FieldInfo) -> str:
    """What a key may be, in words: the names of its registry if it has one, else its type."""
    names = next((list(one.registry) for one in field.metadata if isinstance(one, NameOf)), None)
    return _kind(field.annotation) if names is None else "|".join(names)


def _kind(annotation: Any) -> str:
    """The name of a type for users."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return "|".join(_kind(one) for one in arguments if one is not type(None))
    plain = {str: "text", int: "integer", float: "number", bool: "true|false", list: "list", tuple: "list"}
    return plain.get(origin or annotation, "table")


def sentence(text: str) -> str:
    """The first sentence, on one line."""
    words = " ".join(text.split())
    first, stop, _ = words.partition(". ")
    return first + stop.strip()


def listing(kind: type[BaseModel]) -> str:
    """The help text of all settings, one line each, by section."""
    found = settings(kind)
    keys = [one for one in found if one.kind != "section"]
    top = [one for one in keys if "." not in one.key]
    lines = ["Settings: the keys of the config file; each is also an option of this command", "", *_lines(top)]
    for section in (one for one in found if one.kind == "section"):
        inside = [one for one in keys if one.key.rpartition(".")[0] == section.key]
        off = " Unset unless one of its keys is set." if section.default == _UNSET else ""
        lines += ["", f"[{section.key}] {section.about}{off}", *_lines(inside)]
    return "\n".join(lines) + "\n"


def _lines(keys: list[Setting]) -> Iterator[str]:
    names = [f"--{one.key} {one.kind}" for one in keys]
    for name, one in zip(names, keys, strict=True):
        default = one.default if one.default in (_REQUIRED, _UNSET) else f"default {one.default}"
        yield f"  {name:<{max(map(len, names))}}  {one.about} ({default})"


def split(arguments: Iterable[str], options: Mapping[str, bool], kind: type[BaseModel]) -> tuple[list[str], list[str]]:
    """The arguments without the settings, and the settings as `key=value`; `options`: whether each takes a value."""
    known = {one.key: one.kind for one in settings(kind)}
    rest: list[str] = []
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or word == "--":
            rest.append(word)
        elif name in options:
            rest.append(word)
            rest += [next(words, "")] if options[name] and not equals else []
        else:
            sort = _sort(name, known, options)
            found.append(f"{name[2:]}={_literal(value if equals else _following(name, sort, words), sort)}")
    return rest, found


def _sort(name: str, known: Mapping[str, str], options: Mapping[str, bool]) -> str:
    """The type of a setting; a table accepts any key."""
    key = name[2:]
    if key in known:
        return known[key]
    names = key.split(".")
    if any(known.get(".".join(names[:count])) == "table" for count in range(1, len(names))):
        return "table"
    raise UserError(f"there is no option or setting '{name}'{_nearest(key, known, options)}")


def _nearest(key: str, known: Mapping[str, str], options: Mapping[str, bool]) -> str:
    """A hint for a misspelt name or a missing section."""
    names = [*(one for one, kind in known.items() if kind != "section"), *(one[2:] for one in options)]
    leaves = {one.rpartition(".")[2]: one for one in reversed(names)}
    close = difflib.get_close_matches(key, names, n=1) if "." in key else []
    close = close or [leaves[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1)]
    return f", did you mean '--{close[0]}'?" if close else ": `dora-rl train --help` lists them"


def _following(name: str, sort: str, words: Iterator[str]) -> str:
    value = next(words, "")
    if not value or value.startswith("--"):
        raise UserError(f"'{name}' has no value: write {name} VALUE")
    if sort == "true|false" and value.lower() not in _BOOLEANS:
        raise UserError(f"'{name}' must be true or false, not '{value}': write {name} true")
    return value


def _literal(value: str, sort: str) -> str:
    """The value as TOML: a text stays a text even if it looks like a number; quotes are allowed as in a config file."""
    if sort == "true|false":
        return value.lower()
    return json.dumps(value, ensure_ascii=False) if sort == "text" and value[:1] not in ('"', "'") else value


class SettingsCommand(TyperCommand):
    """A command that takes the settings of a run as options and lists them in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        from dora_rl.runtime.config import RunConfig

        options = {
            name: not getattr(option, "is_flag", False)
            for option in self.get_params(ctx)
            for name in option.opts
            if name.startswith("--")
        }
        rest, found = split(args, options, RunConfig)
        ctx.meta[META] = found
        return super().parse_args(ctx, rest)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from dora_rl.runtime.config import RunConfig

        super().format_help(ctx, formatter)
        sys.stdout.write(listing(RunConfig))
