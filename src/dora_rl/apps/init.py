"""`dora-rl init`: writes a commented config file, generated from the config classes so that it is always up to date.

The short file has the settings that new users edit. The full file has every setting with its description and its
default as a comment; uncommented are settings without a default, examples, and settings whose default in a run differs
from that of their section's class.
"""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dora_rl.apps.config_options import default_of, optional, section_of, sentence, toml
from dora_rl.core.errors import UserError

if typing.TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

EXAMPLES: dict[str, Any] = {
    "model.path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "data.source": "problems.jsonl",
    "data.held_out": 64,
    "reward.functions": ["exact"],
    "control.groups_per_step": 8,
    "control.group_size": 8,
    "control.steps": 100,
    "control.max_response_tokens": 512,
    "evaluation.every": 10,
    "evaluation.data.source": "held_out.jsonl",
}
_WIDTH = 110
_SHORT_HEAD = """\
`dora-rl train FILE --dry-run` checks this file, `dora-rl train FILE` starts the run.
Paths are relative to this file. `dora-rl train --help` lists all settings, `dora-rl init --full` writes them all."""
_HEAD = """\
A run of dora-rl: `dora-rl train FILE` starts it, `dora-rl train FILE --dry-run` prints the resolved config.
A line `#key = value` is a default; remove the `#` to change it. Paths of data and rewards are relative to this file."""


def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("run.toml"),
    full: Annotated[bool, typer.Option("--full", help="Include every setting with its default.")] = False,
) -> None:
    """Write a config file: a short one to start with, or one with every setting."""
    from dora_rl.runtime.config import RunConfig

    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(document(RunConfig, EXAMPLES) if full else short(RunConfig, EXAMPLES))
    except FileExistsError:
        raise UserError(f"{file} already exists: name another file, or remove it") from None
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    console = Console(soft_wrap=True)
    console.print(f"wrote {file}: set model.path and data.source, then: dora-rl train {file}", highlight=False)


def short(kind: type[BaseModel], examples: dict[str, Any]) -> str:
    """A config file of the examples only, each with the first sentence of its description."""
    lines = [*_comment(_SHORT_HEAD.splitlines())]
    here = ""
    for path, value in examples.items():
        folder, _, name = path.rpartition(".")
        if "." in folder:
            continue  # in a section that is off by default
        field = kind.model_fields[folder]
        section = section_of(field)
        assert section is not None
        if folder != here:
            lines += ["", f"[{folder}]"]
            here = folder
        about, line = sentence(section.model_fields[name].description or ""), f"{name} = {toml(value)}"
        aside = f"{line:<25}  # {about}"
        lines += [aside] if len(aside) <= _WIDTH else [*_comment([about]), line]
    return "\n".join(lines) + "\n"


def document(kind: type[BaseModel], examples: dict[str, Any]) -> str:
    """A config file with every setting of a tree of config classes."""
    lines = [*_comment(_HEAD.splitlines()), ""]
    return "\n".join([*lines, *_section(kind, None, "", examples, "")]).rstrip() + "\n"


def _section(
    kind: type[BaseModel], value: BaseModel | None, path: str, examples: dict[str, Any], mute: str
) -> Iterator[str]:
    """The fields of a section, then its subsections; `mute` comments out what is off by default."""
    inner: list[tuple[str, FieldInfo]] = []
    for name, field in kind.model_fields.items():
        if section_of(field) is not None:
            inner.append((name, field))
        else:
            yield from _field(name, field, value, f"{path}{name}", examples, mute)
    yield ""
    for name, field in inner:
        model = section_of(field)
        assert model is not None
        default = default_of(field, value, name)
        off = mute or ("#" if default is None and optional(field) else "")
        about = [field.description or model.__doc__ or ""]
        yield from _comment(about)
        if off and not mute:
            yield from _comment(["It is off; remove the `#` here to enable it."])
        yield f"{off}[{path}{name}]"
        yield from _section(model, default, f"{path}{name}.", examples, off)


def _field(
    name: str, field: FieldInfo, value: BaseModel | None, path: str, examples: dict[str, Any], mute: str
) -> Iterator[str]:
    yield from _comment([field.description or ""])
    default = default_of(field, value, name)
    if path in examples:
        yield mute + f"{name} = {toml(examples[path])}"
    elif default is None:
        assert not field.is_required(), f"'{path}' has no default and no example"
        yield f"#{name} is not set"
    else:
        changed = value is not None and default != field.get_default(call_default_factory=True)
        yield ("" if changed and not mute else "#") + f"{name} = {toml(default)}"


def _comment(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from (f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH))
