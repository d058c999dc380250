"""Pages that are generated from the code when the site is built: settings, commands, Python API."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types as bounds

import dora_rl
from dora_rl.apps.cli import COMMANDS, load
from dora_rl.apps.config_options import default_of, optional, section_of, toml, values_of
from dora_rl.runtime.config import RunConfig
from dora_rl.sim.config import SimConfig

if typing.TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_SIGNS = ((bounds.Ge, "ge", "≥"), (bounds.Gt, "gt", ">"), (bounds.Le, "le", "≤"), (bounds.Lt, "lt", "<"))

_SETTINGS = """\
A config file has these sections and keys. Each key is also an option of `dora-rl train`, such as
`--control.max_staleness 4`, and a keyword of [`DoraConfig`](python.md). `dora-rl init --full` writes them all to a
file."""
_SIMULATIONS = """\
`dora-rl sim` and `dora-rl plan` read these from a TOML file, or with `--set KEY=VALUE`. `control` is the
[section of a run](#control)."""


def pages() -> dict[str, str]:
    """The Markdown of each generated page, by its path in the site."""
    return {
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
    }


# -- settings ---------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """All settings of a run and of a simulation."""
    lines = [
        "# Settings",
        "",
        _SETTINGS,
        "",
        *_section(RunConfig, None, ""),
        "## Simulations { #simulations }",
        "",
        _SIMULATIONS,
        "",
        *_section(SimConfig, None, "sim:", level=3, known=(RunConfig.model_fields["control"].annotation,)),
    ]
    return "\n".join(lines) + "\n"


def _section(
    kind: type[BaseModel], value: BaseModel | None, path: str, *, level: int = 2, known: tuple[Any, ...] = ()
) -> Iterator[str]:
    """The keys of a section as a table, then its subsections; classes in `known` are described elsewhere."""
    inner: list[tuple[str, FieldInfo, type[BaseModel]]] = []
    rows = []
    for name, field in kind.model_fields.items():
        section = section_of(field)
        if section is None:
            rows.append(_row(f"{path}{name}", name, field, default_of(field, value, name)))
        elif section not in known:
            inner.append((name, field, section))
    if rows:
        yield from ["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""]
    for name, field, section in inner:
        default = default_of(field, value, name)
        full = f"{path}{name}"
        shown = full.removeprefix("sim:")
        yield f"{'#' * level} {shown} {{ #{full} }}"
        yield ""
        yield _text(section.__doc__ or field.description or "")
        yield ""
        if default is None and optional(field):
            yield "The section is unset unless one of its keys is set."
            yield ""
        yield from _section(section, default, f"{full}.", level=level, known=known)


def _row(anchor: str, name: str, field: FieldInfo, default: Any) -> str:
    if field.is_required():
        shown = "required"
    else:
        shown = "" if default is None else _code(toml(default))
    return f'| <a id="{anchor}"></a>`{name}` | {_values(field)} | {shown} | {_cell(field.description or "")} |'


def _values(field: FieldInfo) -> str:
    """The type, with the bounds that a number has."""
    kind = " or ".join(one if one in _WORDS else f"`{one}`" for one in values_of(field).split("|"))
    limits = [
        f"{sign} {getattr(one, name):g}" for one in field.metadata for cls, name, sign in _SIGNS if type(one) is cls
    ]
    return " ".join([kind, ", ".join(limits)]).strip()


_WORDS = ("text", "integer", "number", "list", "table")


# -- commands ---------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """All commands with their arguments and options."""
    lines = ["# Commands", "", "`dora-rl COMMAND --help` prints the same.", ""]
    for name, command in COMMANDS.items():
        lines += [f"## {name}", "", *_command(name, settings=command.settings)]
    return "\n".join(lines) + "\n"


def _command(name: str, *, settings: bool) -> Iterator[str]:
    command = load(name)
    kinds = _kinds(COMMANDS[name].target)
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join(["dora-rl", name, *map(_placeholder, arguments), "[OPTIONS]"])
    yield from ["```text", usage, "```", "", _text(command.help or ""), ""]
    if settings:
        yield from ["Every [setting](settings.md) is an option too: `--SECTION.KEY VALUE`.", ""]
    rows = [
        *((_metavar(one), one) for one in arguments),
        *((_option(one, kinds.get(one.name, "VALUE")), one) for one in options if one.name != "help"),
    ]
    if rows:
        yield from ["| argument or option | meaning | default |", "|---|---|---|"]
        yield from (f"| `{shown}` | {_cell(one.help or '')} | {_default(one)} |" for shown, one in rows)
        yield ""


def _kinds(target: str) -> dict[str, str]:
    """What the value of each parameter of a command is."""
    module, _, function = target.partition(":")
    hints = typing.get_type_hints(getattr(importlib.import_module(f"dora_rl.apps.{module}"), function))
    words = {Path: "PATH", int: "N", float: "NUMBER", str: "TEXT"}
    found = {}
    for name, hint in hints.items():
        inside = [
            hint,
            *typing.get_args(hint),
            *(one for part in typing.get_args(hint) for one in typing.get_args(part)),
        ]
        found[name] = next((words[one] for one in inside if one in words), "VALUE")
    return found


def _placeholder(argument: Any) -> str:
    return _metavar(argument) if argument.required else f"[{_metavar(argument)}]"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _option(option: Any, kind: str) -> str:
    name = max(option.opts, key=len)
    return name if option.is_flag else f"{name} {option.metavar or kind}"


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return "required"
    return "" if default in (None, False, (), []) or callable(default) else _code(str(default))


# -- Python -----------------------------------------------------------------------------------------------------


def python_page() -> str:
    """The public names, each filled in by mkdocstrings from its signature and docstrings."""
    names = [name for name in dora_rl.__all__ if not name.startswith("__")]
    first = ("train", "DoraConfig", "Run", "AuditResult", "Callback", "STOP", "StopTraining")
    errors = [name for name in names if _is_error(name) and name not in first]
    other = [name for name in names if name not in first and name not in errors]
    lines = ["# Python API", "", "[Python API](../api.md) explains these with examples.", ""]
    for name in [*first, *other]:
        lines += [f"::: dora_rl.{name}", ""]
    lines += ["## Errors", ""]
    for name in errors:
        lines += [f"::: dora_rl.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def _is_error(name: str) -> bool:
    found = getattr(dora_rl, name)
    return inspect.isclass(found) and issubclass(found, Exception)


# -- Markdown ---------------------------------------------------------------------------------------------------


def _text(words: str) -> str:
    return inspect.cleandoc(words)


def _cell(words: str) -> str:
    """A text on one line, in a cell of a table."""
    return " ".join(words.split()).replace("|", "\\|")


def _code(value: str) -> str:
    return f"`{value}`" if value and "|" not in value else value.replace("|", "\\|")
