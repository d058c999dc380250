"""`dora-rl convert`: translates a config of verl or prime-rl into a config file of dora-rl.

The config goes to standard output, each line with the field that it came from. After it, as comments, come the fields
that have no counterpart, each with the reason or the nearest setting; none is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from dora_rl.core.config import build, merge, read_toml
from dora_rl.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from dora_rl.apps.conversion.translation import Fields, Framework, Rest, Translation

_ASIDE = 34
"""Column at which a comment begins, if its line is short enough."""


def convert(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE ...", help="YAML or a launch script of verl, or TOML of prime-rl; later files win."
        ),
    ],
    source: Annotated[
        Literal["verl", "prime-rl"] | None, typer.Option("--from", help="The framework; default: by the file's name.")
    ] = None,
) -> None:
    """Translate a config of verl or prime-rl, and name every field that has no counterpart."""
    from dora_rl.apps.conversion.translation import translate

    framework, fields = read(files, source)
    found = translate(framework, fields)
    sys.stdout.write(document(found, framework, files))
    counts = f"{len(found.lines)} settings, {len(found.unmapped)} fields of {framework.name} without a counterpart"
    note = Console(stderr=True, soft_wrap=True)
    note.print(f"{counts}: see the comments at the end", highlight=False, markup=False)
    check(found)


def read(files: Sequence[Path], source: str | None) -> tuple[Framework, Fields]:
    """The framework and the fields of the files; a later file overrides an earlier one."""
    from dora_rl.apps.conversion.prime_rl import PRIME_RL, prefixed
    from dora_rl.apps.conversion.reading import read_shell, read_yaml
    from dora_rl.apps.conversion.translation import flatten
    from dora_rl.apps.conversion.verl import VERL

    kinds = {source or ("prime-rl" if path.suffix == ".toml" else "verl") for path in files}
    if len(kinds) > 1:
        raise UserError("the files are of different frameworks: convert them one by one")
    if kinds == {"prime-rl"}:
        tree: dict[str, Any] = {}
        for path in files:
            tree = merge(tree, prefixed(read_toml(path)))
        return PRIME_RL, dict(flatten(tree))
    fields: dict[str, Any] = {}
    for path in files:
        fields |= read_yaml(path) if path.suffix in (".yaml", ".yml") else read_shell(path)
    return VERL, fields


def document(found: Translation, framework: Framework, files: Sequence[Path]) -> str:
    """The config file as text."""
    names = ", ".join(path.name for path in files)
    lines = [
        f"# Converted from {names} ({framework.name}); after each setting is the field that it came from.",
        "# Paths are relative to this file. Check it with: dora-rl train FILE --dry-run",
    ]
    section = ""
    for key in _ordered(found):
        folder, _, name = key.rpartition(".")
        if folder != section:
            lines += ["", f"[{folder}]"]
            section = folder
        one = found.lines[key]
        text = f"{name} = {_toml(one.value)}"
        lines.append(f"{text:<{_ASIDE}} # {one.origin}")
    lines += _comments("To decide", [(remark, []) for remark in dict.fromkeys(found.remarks)])
    lines += _comments("Not mapped", _by_reason(found.unmapped))
    lines += _comments("Needs no setting", _by_reason(found.same))
    return "\n".join(lines) + "\n"


def check(found: Translation) -> None:
    """Refuse a result that is not a config yet, after it was printed: the user completes it."""
    from dora_rl.runtime.config import RunConfig

    tree = merge({}, {key: line.value for key, line in found.lines.items()})
    try:
        build(RunConfig, tree, "the config above")
    except ConfigError as error:
        raise UserError(f"{error}: complete it by hand") from error


def _ordered(found: Translation) -> list[str]:
    """The settings in the order of the config classes; keys without a section come first, as TOML requires."""
    from dora_rl.apps.config_options import settings
    from dora_rl.runtime.config import RunConfig

    known = {one.key: number for number, one in enumerate(settings(RunConfig))}

    def order(key: str) -> tuple[bool, int, str]:
        place = key
        while place not in known:
            place = place.rpartition(".")[0]
        return "." in key, known[place], key

    return sorted(found.lines, key=order)


def _by_reason(rest: Sequence[Rest]) -> list[tuple[str, list[str]]]:
    reasons: dict[str, list[str]] = {}
    for one in rest:
        reasons.setdefault(one.reason, []).append(f"{one.field} = {_shown(one.value)}")
    return list(reasons.items())


def _comments(title: str, reasons: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    if not reasons:
        return
    yield ""
    yield f"# {title}:"
    for reason, fields in reasons:
        if len(fields) == 1:
            yield f"# - {fields[0]}: {reason}"
        else:
            yield f"# - {reason}{':' if fields else ''}"
            yield from (f"#     {field}" for field in fields)


def _shown(value: Any) -> str:
    return " ".join(json.dumps(value, ensure_ascii=False, default=str).split())


def _toml(value: Any) -> str:
    from dora_rl.apps.config_options import toml

    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return toml(dict(value) if isinstance(value, Mapping) else value)
