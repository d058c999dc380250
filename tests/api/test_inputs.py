"""Functions as objects: each process of a run finds the very same function, or it is stored by value."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.api.inputs import code_names, data_source, model_path
from dora_rl.core.errors import ConfigError, UserError
from dora_rl.envs.pickled_code import SUFFIX
from dora_rl.envs.task_files import code_files
from dora_rl.envs.user_code import named_object
from tests.api.rewards import Judge, odd_digits


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Writes a module to a folder that only this process can import from, as that of a script, and imports it."""
    folder = tmp_path / "beside"
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)

    def write(name: str, code: str) -> Any:
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_that_workers_can_import_goes_by_its_module(tmp_path: Path) -> None:
    assert code_names([odd_digits, json.dumps, "exact"], tmp_path, "f") == [
        "tests.api.rewards:odd_digits",
        "json:dumps",
        "exact",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_function_of_a_module_beside_the_script_goes_by_its_file(
    tmp_path: Path, importing: Callable[[str, str], Any]
) -> None:
    module = importing("beside_the_script", "def reward(completion): return 0.5")
    (name,) = code_names([module.reward], tmp_path, "f")
    assert name == f"{module.__file__}:reward"
    assert named_object(name, tmp_path)("") == 0.5


def test_a_function_of_a_package_that_workers_lack_goes_by_value(
    tmp_path: Path, importing: Callable[[str, str], Any]
) -> None:
    code = "BONUS = 0.25\ndef plus(value): return BONUS + value\ndef reward(completion): return plus(0.5)"
    module = importing("lacking.inner", code)
    (name,) = code_names([module.reward], tmp_path, "f")
    assert SUFFIX in name
    del sys.modules["lacking.inner"]
    Path(module.__file__).write_text("raise AssertionError('imported')")
    assert named_object(name, tmp_path)("") == 0.75
    assert [str(path) for path in code_files([name], tmp_path)] == [name.rpartition(":")[0]]


def test_what_is_not_found_under_its_own_name_goes_by_value(tmp_path: Path) -> None:
    @functools.wraps(odd_digits)
    def replaced(completions: list[str], **_: Any) -> list[float]:
        return [9.0 for _ in completions]

    given = [lambda completions: [1.0], replaced, functools.partial(odd_digits), Judge(2.0), Judge(3.0).__call__]
    names = code_names(given, tmp_path, "f")
    assert [name.rpartition(":")[2] for name in names] == ["lambda", "odd_digits", "partial", "Judge", "__call__"]
    assert [named_object(name, tmp_path)(completions=["1"])[0] for name in names] == [1.0, 9.0, 1 / 48, 2.0, 3.0]


def test_a_stored_function_of_another_python_or_format_is_refused(tmp_path: Path) -> None:
    import hashlib

    for content, sentence in ((b'{"python":"2.7","folders":[]}\n', "of Python 2.7"), (b"x\n", "start a new run")):
        file = tmp_path / f"{hashlib.sha256(content).hexdigest()}{SUFFIX}"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=sentence):
            named_object(f"{file}:f", tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        named_object(f"{tmp_path}/missing{SUFFIX}:f", tmp_path)


def test_rows_are_written_once_as_plain_values(tmp_path: Path) -> None:
    import datasets

    messages = [{"role": "user", "content": "1*2="}]
    rows = [{"prompt": messages, "n": 1, "t": (1, 2)}, {"prompt": messages, "n": 2, "t": (3,)}]
    made: Any = datasets.Dataset.from_list(rows)
    for given, settings, expected in ((iter(rows), {}, 2), (made, {}, 2), (rows, {"limit": 1}, 1)):
        source = data_source(given, tmp_path / "inputs" / "rows.jsonl", settings, "train_dataset")
        lines = [json.loads(line) for line in Path(source).read_text().splitlines()]
        assert lines == [{**row, "t": list(row["t"])} for row in rows[:expected]]  # type: ignore[call-overload]


def test_a_string_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "task.py"):
        Path(name).touch()
    assert data_source("rows.jsonl", tmp_path / "x", {}, "d") == str(tmp_path / "rows.jsonl")
    assert data_source("datasets:openai/gsm8k", tmp_path / "x", {}, "d") == "datasets:openai/gsm8k"
    assert code_names(["task.py:f", "format:^a:b"], tmp_path, "f") == [f"{tmp_path / 'task.py'}:f", "format:^a:b"]


def test_another_tokenizer_takes_the_place_of_that_of_a_folder(job: Path, tmp_path: Path) -> None:
    import transformers

    t: Any = transformers
    tokenizer = t.AutoTokenizer.from_pretrained(job / "model", pad_token="*")
    found = Path(model_path(job / "model", tokenizer, Path(), tmp_path / "model"))
    assert t.AutoTokenizer.from_pretrained(found).pad_token == "*"
    assert (found / "model.safetensors").samefile(job / "model" / "model.safetensors")
    with pytest.raises(UserError, match="'some/name' is neither: download it first"):
        model_path("some/name", tokenizer, Path(), tmp_path / "other")
    with pytest.raises(UserError, match="a model in memory has no tokenizer"):
        model_path(t.LlamaForCausalLM, None, Path(), tmp_path / "other")
