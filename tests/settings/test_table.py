"""Check that every setting takes effect.

Each key of each configuration has a row that names a function that reads it and a test. For each row, the function must
exist and read the key, and the test must exist in a file that mentions the key.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.settings.reads import PACKAGE, ROOTS, Key, certain_readers, keys, readers, root
from tests.settings.table import TABLES, Row

TESTS = Path(__file__).parents[1]
HOW = "tests/settings/table.py, which describes the format of a row"


@functools.cache
def all_keys() -> dict[tuple[str, str], Key]:
    """Return the keys of each root by dotted path; a class that occurs in two roots counts for the first."""
    seen: set[type] = set()
    return {(name, path): key for name in ROOTS for path, key in keys(root(name), seen=seen)}


def rows() -> list[tuple[str, str]]:
    return [(name, path) for name, table in TABLES.items() for path in table]


@functools.cache
def functions(file: Path) -> frozenset[str]:
    """Return the definitions in a module, as `function`, `Class` or `Class.function`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return frozenset(found)


def test_every_key_has_a_row() -> None:
    missing = [(name, path, key) for (name, path), key in all_keys().items() if path not in TABLES[name]]
    problems = [
        f"'{path}' of {name} has no row in {HOW}; it is read by: "
        f"{', '.join(sorted(certain_readers().get(key, ()))) or 'no function, so it has no effect'}"
        for name, path, key in missing
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("name", "path"), rows(), ids=[f"{name}-{path}" for name, path in rows()])
def test_the_row_is_correct(name: str, path: str) -> None:
    row: Row = TABLES[name][path]
    key = all_keys().get((name, path))
    assert key is not None, f"there is no key '{path}' in {name} any more: remove its row from tests/settings/table.py"
    module, _, function = row.consumer.partition(":")
    file = PACKAGE / f"{module.replace('.', '/')}.py"
    assert file.is_file(), f"'{path}': there is no module {module} in dora_rl"
    assert function in functions(file), f"'{path}': there is no {function} in {module}; correct the row of {HOW}"
    assert row.consumer in readers().get(key, ()), (
        f"'{path}': {row.consumer} does not read it; these do: {', '.join(sorted(certain_readers().get(key, ())))}"
    )
    if not row.proof:
        assert row.why, f"'{path}': name the test that shows its effect, or explain why none is needed"
        return
    where, _, test = row.proof.partition("::")
    proof = TESTS / where
    assert proof.is_file(), f"'{path}': there is no tests/{where}"
    assert test in functions(proof), f"'{path}': there is no {test} in tests/{where}"
    leaf = path.rpartition(".")[2]
    assert leaf in proof.read_text(), f"'{path}': tests/{where} never mentions '{leaf}', so it cannot show its effect"


def test_the_search_finds_exactly_the_keys_that_are_read() -> None:
    """A read through a property counts; a read of the same name from another class does not."""
    assert "trainer.objective:micro_loss" in readers()["AlgorithmConfig", "clip_low"]
    assert "runtime.supervisor.rollout_client:RolloutClient.__init__" in readers()["SamplingConfig", "top_p"]
    assert "runtime.supervisor.reward_client:RewardClient.__init__" in readers()["RewardConfig", "timeout_seconds"]
    assert (
        "runtime.supervisor.reward_client:RewardClient.__init__"
        not in certain_readers()["EnvironmentConfig", "timeout_seconds"]
    )
    assert ("SamplingConfig", "top_q") not in readers()
