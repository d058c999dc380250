"""The public API does not change unnoticed, and importing the package is cheap."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dora_rl
import dora_rl.trl

STORED = Path(__file__).with_name("public_api.txt")


def described() -> Iterator[str]:
    """One line for each public name, and for each public member of a class."""
    for name in dora_rl.__all__:
        yield from _lines(name, getattr(dora_rl, name))
    for name in dora_rl.trl.__all__:
        yield from _lines(f"trl.{name}", getattr(dora_rl.trl, name))


def _lines(name: str, found: object) -> Iterator[str]:
    if inspect.isclass(found) and issubclass(found, Exception):
        yield f"{name}({found.__mro__[1].__name__})"
    elif inspect.isclass(found):
        # The constructor of a protocol is not its own.
        yield name if getattr(found, "_is_protocol", False) else f"{name}{inspect.signature(found)}"
        yield from (f"{name}.{line}" for line in _members(found))
    elif inspect.ismodule(found):
        yield from (f"{name}.{one}{_fields(getattr(found, one))}" for one in found.__all__)
    elif callable(found):
        yield f"{name}{inspect.signature(found)}"
    else:
        yield name


def _fields(kind: object) -> str:
    """The fields of a record."""
    annotations = inspect.get_annotations(kind) if inspect.isclass(kind) else {}
    return f"({', '.join(f'{name}: {type_}' for name, type_ in annotations.items())})" if annotations else ""


def _members(kind: type) -> Iterator[str]:
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("dora_rl.")]
    members = {name: member for base in bases for name, member in vars(base).items()}
    for name, member in sorted(members.items()):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            assert member.fget is not None
            yield f"{name}: {inspect.signature(member.fget).return_annotation}"
        elif callable(member) or isinstance(member, classmethod):
            yield f"{name}{inspect.signature(getattr(kind, name))}"


def test_the_public_api_is_the_stored_one() -> None:
    """After a deliberate change: `python -m tests.api.test_public` writes the file again."""
    assert "\n".join(described()) + "\n" == STORED.read_text()


def test_every_public_name_is_documented() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "api.md").read_text() + (docs / "building-blocks.md").read_text()
    assert [name for name in dora_rl.__all__ if f"`{name}" not in text and f"dora_rl.{name}" not in text] == []
    for name in dora_rl.__all__:
        found = getattr(dora_rl, name)
        assert not callable(found) or found.__doc__, name


def test_the_package_lists_its_names_and_refuses_others() -> None:
    assert set(dora_rl.__all__) <= set(dir(dora_rl))
    assert set(dora_rl._HOMES) == set(dora_rl.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="module 'dora_rl' has no attribute 'trian'"):
        dora_rl.trian  # noqa: B018


def test_importing_the_package_imports_nothing_else_and_its_names_need_no_torch() -> None:
    program = """
import sys
import dora_rl
loaded = [name for name in sys.modules if name.startswith("dora_rl.")]
assert not loaded, loaded
assert not {"pydantic", "msgspec", "numpy", "rich"} & sys.modules.keys()
sys.modules["torch"] = sys.modules["transformers"] = None  # any import of them raises
for name in dora_rl.__all__:
    getattr(dora_rl, name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    STORED.write_text("\n".join(described()) + "\n")
