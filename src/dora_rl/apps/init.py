"""`dora-rl init`: a commented config file, made of the config classes themselves, so that it can't go stale.

Every setting is there with its meaning and its default as a comment. What stands uncommented are settings without a
default, examples, and settings whose default in a run is not the one of their section.
"""

from __future__ import annotations

import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from pydantic import BaseModel
from rich.console import Console

from dora_rl.core.errors import UserError

if typing.TYPE_CHECKING:
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
_WIDTH = 100
_HEAD = """\
A run of dora-rl: `dora-rl train FILE` begins it, `dora-rl train FILE --dry-run` shows what is understood.
A line `#key = value` is a default; take the `#` away to change it. Paths of data and rewards start at this file."""


def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("run.toml"),
) -> None:
    """Write a commented config file with every setting and its default."""
    from dora_rl.apps.train import need_torch

    need_torch()
    from dora_rl.runtime.config import RunConfig

    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(document(RunConfig, EXAMPLES))
    except FileExistsError:
        raise UserError(f"{file} is there already: name another file, or remove it") from None
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    console = Console(soft_wrap=True)
    console.print(f"wrote {file}: set model.path and data.source, then: dora-rl train {file}", highlight=False)


def document(kind: type[BaseModel], examples: dict[str, Any]) -> str:
    """The config file of a tree of config classes."""
    lines = [*_comment(_HEAD.splitlines()), ""]
    return "\n".join([*lines, *_section(kind, None, "", examples, "")]).rstrip() + "\n"


def _section(
    kind: type[BaseModel], value: BaseModel | None, path: str, examples: dict[str, Any], mute: str
) -> Iterator[str]:
    """The fields of a section, then the sections in it; `mute` comments out what is off by default."""
    inner: list[tuple[str, FieldInfo]] = []
    for name, field in kind.model_fields.items():
        if _model(field) is not None:
            inner.append((name, field))
        else:
            yield from _field(name, field, value, f"{path}{name}", examples, mute)
    yield ""
    for name, field in inner:
        model = _model(field)
        assert model is not None
        default = _default(field, value, name)
        off = mute or ("#" if default is None and _optional(field) else "")
        about = [field.description or model.__doc__ or ""]
        yield from _comment(about)
        if off and not mute:
            yield from _comment(["It is off; take the `#` away here to have it."])
        yield f"{off}[{path}{name}]"
        yield from _section(model, default, f"{path}{name}.", examples, off)


def _field(
    name: str, field: FieldInfo, value: BaseModel | None, path: str, examples: dict[str, Any], mute: str
) -> Iterator[str]:
    yield from _comment([field.description or ""])
    default = _default(field, value, name)
    if path in examples:
        yield mute + _assignment(name, examples[path])
    elif default is None:
        assert not field.is_required(), f"'{path}' has no default and no example"
        yield f"#{name} is not set"
    else:
        said = value is not None and default != field.get_default(call_default_factory=True)
        yield ("" if said and not mute else "#") + _assignment(name, default)


def _default(field: FieldInfo, value: BaseModel | None, name: str) -> Any:
    if value is not None:
        return getattr(value, name)
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _assignment(name: str, value: Any) -> str:
    if isinstance(value, dict):
        assert not value, f"'{name}': a table as a default would need a section"
        return f"{name} = {{}}"
    if isinstance(value, list | tuple):
        return f"{name} = [{', '.join(_assignment('', item).removeprefix(' = ') for item in value)}]"
    return f"{name} = {tomli_w.dumps({'it': value}).strip().removeprefix('it = ')}"


def _comment(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from (f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH))


def _model(field: FieldInfo) -> type[BaseModel] | None:
    """The config class of a section."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, BaseModel):
            return kind
    return None


def _optional(field: FieldInfo) -> bool:
    return type(None) in typing.get_args(field.annotation)
