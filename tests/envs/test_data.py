"""Rows of every source become the same problems; errors name the bad ones."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.config import build
from dora_rl.core.errors import DataError, UserError
from dora_rl.envs.config import DataConfig
from dora_rl.envs.data import ChatMessage, Problem, problem
from dora_rl.envs.row_readers import Row
from tests.envs.making import loaded, write_code, write_rows

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "info": {"n": n}} for n in range(20)]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs", "L"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
messages = st.lists(st.fixed_dictionaries({}, optional={"role": json_values, "content": json_values}), max_size=3)
rows_like = st.fixed_dictionaries(
    {}, optional={"prompt": json_values | messages | st.text(), "answer": json_values, "x": json_values}
)


def as_jsonl(folder: Path) -> str:
    return str(write_rows(folder / "rows.jsonl", ROWS).name)


def as_json(folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(ROWS))
    return "rows.json"


def as_lines_called_json(folder: Path) -> str:
    return str(write_rows(folder / "lines.json", ROWS).name)


def as_parquet(folder: Path) -> str:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return "rows.parquet"


def as_saved_dataset(folder: Path) -> str:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(folder / "saved")
    return "datasets:saved"


def as_function(folder: Path) -> str:
    write_code(folder, f"def rows():\n    yield from {ROWS!r}\n", "making_rows.py")
    return "making_rows.py:rows"


def as_module(folder: Path) -> str:
    name = f"rows_of_{folder.name}".replace("-", "_")
    write_code(folder, f"def rows():\n    return {ROWS!r}\n", f"{name}.py")
    return f"{name}:rows"


SOURCES = [as_jsonl, as_json, as_lines_called_json, as_parquet, as_saved_dataset, as_function, as_module]


@pytest.mark.parametrize("write", SOURCES)
def test_every_source_gives_the_same_problems(write: Any, tmp_path: Path) -> None:
    dataset = loaded(tmp_path, write(tmp_path))
    assert [each.prompt for each in dataset.train] == [row["prompt"] for row in ROWS]
    assert [each.answer for each in dataset.train] == [row["answer"] for row in ROWS]
    assert dataset.train[3].columns == {"answer": "4", "info": {"n": 3}}
    assert dataset.train == loaded(tmp_path, as_jsonl(tmp_path)).train  # keys too


def test_keys_do_not_depend_on_the_selection_of_rows(tmp_path: Path) -> None:
    source = as_jsonl(tmp_path)
    keys = [each.key for each in loaded(tmp_path, source).train]
    assert len(set(keys)) == len(ROWS)
    other = loaded(tmp_path, source, limit=12, held_out=4, shuffle=False, seed=9)
    assert [each.key for each in [*other.train, *other.held_out]] == keys[:12]
    write_rows(tmp_path / "rows.jsonl", [{**row, "answer": "0"} for row in ROWS])
    assert not {each.key for each in loaded(tmp_path, source).train} & set(keys)


def test_equal_rows_have_different_keys(tmp_path: Path) -> None:
    write_rows(tmp_path / "same.jsonl", [ROWS[0]] * 3)
    assert len({each.key for each in loaded(tmp_path, "same.jsonl").train}) == 3


def test_held_out_rows_are_the_last_and_never_trained(tmp_path: Path) -> None:
    for seed in range(5):
        dataset = loaded(tmp_path, as_jsonl(tmp_path), held_out=6, seed=seed)
        assert [each.prompt for each in dataset.held_out] == [row["prompt"] for row in ROWS[14:]]
        assert not {each.key for each in dataset.train} & {each.key for each in dataset.held_out}
    with pytest.raises(DataError, match="leaves none to train"):
        loaded(tmp_path, "rows.jsonl", held_out=20)


def test_each_epoch_visits_all_rows_once_in_a_different_order(tmp_path: Path) -> None:
    dataset = loaded(tmp_path, as_jsonl(tmp_path), seed=1)
    orders = [dataset.order(epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders == [loaded(tmp_path, "rows.jsonl", seed=1).order(epoch) for epoch in range(3)]
    assert orders[0] != loaded(tmp_path, "rows.jsonl", seed=2).order(0)
    assert loaded(tmp_path, "rows.jsonl", shuffle=False).order(7) == list(range(20))


def test_the_order_does_not_depend_on_the_machine(tmp_path: Path) -> None:
    write_rows(tmp_path / "few.jsonl", ROWS[:6])
    assert loaded(tmp_path, "few.jsonl", seed=3).order(1) == [4, 2, 3, 1, 0, 5]


def test_nothing_is_read_beyond_the_limit(tmp_path: Path) -> None:
    write_code(
        tmp_path, "import itertools\ndef rows(word):\n    return ({'prompt': word} for _ in itertools.count())\n"
    )
    dataset = loaded(tmp_path, "task.py:rows", limit=5, params={"word": "hi"})
    assert [each.prompt for each in dataset.train] == ["hi"] * 5


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"question": "2 + 2?", "meta": {"gold": 4}, "answer": "not this"}])
    only = loaded(tmp_path, "rows.jsonl", prompt="question", answer="meta.gold").train[0]
    assert (only.prompt, only.answer, only.columns["answer"]) == ("2 + 2?", "4", 4)


def test_rows_of_verl_are_read_unchanged(tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    write_rows(tmp_path / "rows.jsonl", [row])
    only = loaded(tmp_path, "rows.jsonl").train[0]
    assert only.answer == "4"
    assert only.prompt == (ChatMessage(role="user", content="2 + 2?"),)
    assert only.columns["extra_info"] == {"index": 0}


def test_a_system_message_makes_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi", "name": None}]
    own = [{"role": "system", "content": "Mine."}, *chat]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "hi"}, {"prompt": chat}, {"prompt": own}])
    user, brief, mine = (
        ChatMessage(role=role, content=text)
        for role, text in [("user", "hi"), ("system", "Be brief."), ("system", "Mine.")]
    )
    prompts = [each.prompt for each in loaded(tmp_path, "rows.jsonl", system="Be brief.").train]
    assert prompts == [(brief, user), (brief, user), (mine, user)]
    assert [each.prompt for each in loaded(tmp_path, "rows.jsonl").train] == ["hi", (user,), (mine, user)]
    assert loaded(tmp_path, "rows.jsonl", system="").train[0].prompt == (user,)


def test_values_of_other_libraries_become_plain() -> None:
    value = {
        "prompt": np.str_("hi"),
        "answer": np.int64(4),
        "array": np.arange(3),
        "day": dt.date(2026, 1, 2),
        "pair": (1, 2),
        "set": {"b", "a"},
        "missing": float("nan"),
    }
    made = problem(Row(value, "here"), 0, DataConfig(source="x:y"))
    assert made.answer == "4"
    assert made.columns == {
        "answer": 4, "array": [0, 1, 2], "day": "2026-01-02", "pair": [1, 2], "set": ["a", "b"], "missing": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: the row must be an object with columns"),
        ('{"question": "hi"}', "line 2: there is no column 'prompt': set data.prompt to one of question"),
        ('{"prompt": ""}', "line 2: 'prompt' is empty"),
        ('{"prompt": 3}', "line 2: 'prompt' must be a text or a list of messages"),
        ('{"prompt": []}', "line 2: 'prompt' must be a text or a list of messages"),
        ('{"prompt": ["hi"]}', "line 2: message 1 must be an object with role and content"),
        ('{"prompt": [{"role": "user"}]}', "line 2: message 1 must have role and content, both texts"),
        (
            '{"prompt": [{"role": "user", "content": "x", "tool_calls": []}]}',
            "line 2: message 1 has the key 'tool_calls'",
        ),
        ('{"prompt": "hi", "n": 99999999999999999999}', "line 2"),
        ("\x80", "line 2 is not JSON"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 is not JSON"),
        ('{"prompt": "hi", "x": ' + "[" * 3000 + "]" * 3000 + "}", "line 2"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError) as caught:
        loaded(tmp_path, "rows.jsonl")
    assert str(caught.value).startswith(str(tmp_path / "rows.jsonl"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.jsonl", "cannot read .*none.jsonl: No such file"),
        ("none.json", "cannot read .*none.json: No such file"),
        ("none.parquet", "cannot read .*none.parquet"),
        ("torn.parquet", "cannot read .*torn.parquet"),
        ("empty.jsonl", "has no rows"),
        ("rows.csv", "data source 'rows.csv' is unknown"),
        ("task.py:absent", "has no 'absent'"),
        ("absent.py:rows", "there is no file"),
        ("absent_module:rows", "cannot import 'absent_module'"),
        ("broken.py:rows", "cannot import .*broken.py: ZeroDivisionError"),
        ("task.py:raises", "row 2: RuntimeError: out of rows"),
        ("task.py:nothing", "returned no rows: TypeError"),
        ("task.py:constant", "can't be called"),
        ("reasoning_gym:absent", "reasoning-gym has no dataset 'absent'"),
        ("datasets:absent/here", "cannot load the dataset 'absent/here'"),
        ("datasets:saved:test", "has no split 'test': it has train"),
    ],
)
def test_a_source_that_cannot_be_read_is_the_users_mistake(source: str, message: str, tmp_path: Path) -> None:
    as_saved_dataset(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    write_code(tmp_path, "1 / 0\n", "broken.py")
    code = "constant = 3\ndef nothing(): pass\ndef raises():\n    yield {'prompt': 'a'}\n"
    write_code(tmp_path, code + "    raise RuntimeError('out of\\nrows')\n")
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path, source)
    assert "\n" not in str(caught.value)


def test_remote_code_of_a_dataset_is_never_run() -> None:
    with pytest.raises(UserError, match="trust_remote_code is not supported"):
        build(DataConfig, {"source": "datasets:x", "params": {"trust_remote_code": True}})


@given(value=rows_like | json_values, system=st.none() | st.text(max_size=3), answer=st.sampled_from(["answer", "x.a"]))
def test_any_row_is_a_problem_or_a_data_error(value: Any, system: str | None, answer: str) -> None:
    config = DataConfig(source="x:y", system=system, answer=answer)
    made = problem_or_sentence(lambda: problem(Row(value, "file, line 1"), 0, config))
    if isinstance(made, str):
        assert made.startswith("file, line 1")
        return
    assert made.prompt
    for kind in (msgspec.json, msgspec.msgpack):
        assert kind.decode(kind.encode(made), type=Problem) == made


@given(line=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_rows_or_a_data_error(line: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    made = problem_or_sentence(lambda: loaded(path.parent, path.name).train[0])
    assert made.startswith(f"{path}, line ") if isinstance(made, str) else made.prompt == "fine"


def problem_or_sentence(make: Callable[[], Problem]) -> Problem | str:
    try:
        return make()
    except DataError as error:
        return str(error)
