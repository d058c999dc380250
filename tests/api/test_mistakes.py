"""A mistake in a call of `train` gives one sentence, and leaves neither a process nor a file."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import dora_rl
from dora_rl import DoraConfig, UserError, train
from tests.api.conftest import children, small
from tests.api.rewards import odd_digits

ROWS = [{"prompt": "1*2=", "number": 1}]

LOCK = threading.Lock()


def crashes(completions: list[str], **_: Any) -> list[float]:
    raise ValueError("never again")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": None}, "there is no model: pass `model`, or set 'model.path' in the config"),
        ({"model": 3}, "`model` must be a path, a hub name or a model of transformers, not int"),
        ({"model": "no/such/model"}, "'model.path': there is no folder no/such/model"),
        ({"train_dataset": None}, "there is no data: pass `train_dataset`"),
        ({"train_dataset": []}, "`train_dataset` has no rows"),
        ({"train_dataset": {"train": ROWS}}, "pass one split of it, for instance train_dataset=dataset['train']"),
        ({"train_dataset": 7}, "`train_dataset` must be rows with the column 'prompt', not int"),
        ({"train_dataset": [*ROWS, {"question": "?"}]}, "train_dataset, row 2: there is no column 'prompt'"),
        ({"train_dataset": [{"prompt": "1", "x": object()}]}, "train_dataset, row 1: a value of type object"),
        ({"train_dataset": "missing.jsonl"}, "missing.jsonl"),
        ({"eval_dataset": ROWS}, "`eval_dataset` is not used while 'evaluation.every' is 0"),
        ({"reward_funcs": None}, "nothing says what a response is worth: pass `reward_funcs` or `environment`"),
        ({"reward_funcs": 5}, "`reward_funcs` must be a function or a list of them, not int"),
        ({"reward_funcs": [5]}, "`reward_funcs` must be functions or their names, not int"),
        ({"reward_funcs": "exactly"}, "reward 'exactly' is unknown"),
        ({"reward_funcs": lambda x: 1.0}, "reward 'lambda' takes (x): write it as f(prompts, completions"),
        ({"reward_funcs": crashes}, "crashes: ValueError: never again"),
        ({"reward_funcs": [lambda completion: LOCK]}, "lambda can't be stored for the workers"),
        ({"callbacks": ["on_step"]}, "a callback has none of the methods on_step, on_publish, on_eval, on_sample"),
        ({"name": "a/b"}, "'a/b' can't be the name of a run"),
        ({"resume": "runs/x"}, "a run is resumed with what it was started with: leave out `model`"),
        ({"tokenizer": 3}, "`tokenizer` must be a path, a hub name or a tokenizer, not int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_gives_one_sentence_and_leaves_nothing(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = children()
    config = small(job).replace(out="out")
    given: dict[str, Any] = {
        "model": job / "model",
        "reward_funcs": odd_digits,
        "train_dataset": ROWS,
        "config": config,
    }
    with pytest.raises(UserError) as caught:
        train(**given | arguments, quiet=True)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert children() == before


def test_callbacks_are_refused_where_they_would_not_be_called(job: Path) -> None:
    class Callback:
        def on_publish(self, version: int) -> None: ...

    config = small(job).replace(runtime="ray")
    with pytest.raises(UserError, match="callbacks need 'runtime' = \"local\""):
        train(job / "model", odd_digits, ROWS, config=config, callbacks=[Callback()], quiet=True)
    assert not (job / "runs" / "refused").exists()


def test_a_missing_run_is_named() -> None:
    with pytest.raises(UserError, match="'nowhere' is not a run directory"):
        dora_rl.Run.open("nowhere")


def test_a_config_is_needed_where_settings_have_no_default() -> None:
    with pytest.raises(UserError, match="'control' is missing"):
        DoraConfig()
