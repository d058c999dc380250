"""The quickstart task: rewards, tail of lengths, tokenizer and warm start."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parent.parent / "examples" / "quickstart"
WARM = FOLDER / "warm"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


task: Any = _load("task")


def score(prompt: str, completion: str) -> float:
    (value,) = task.reward(prompts=[prompt], completions=[completion], answer=["7"], steps=[3])
    assert isinstance(value, float)
    return value


def test_a_right_response_scores_one() -> None:
    assert score("3*4+7=", "2*4+1=1*4+5=0*4+9=9") == 1.0
    for row in task.problems(200, seed=3):
        solution = task.solution(row["prompt"])
        assert score(row["prompt"], solution) == 1.0
        assert solution.endswith(f"={row['answer']}")
        assert solution.count("=") == row["steps"]


def test_partial_credit_grows_with_the_right_steps_and_stays_below_a_right_response() -> None:
    prompt = "12*7+3="
    right = task.solution(prompt).split("=")
    cut = [score(prompt, "=".join(right[:steps])) for steps in range(len(right))]
    slipped = [score(prompt, "=".join([*right[:steps], "5*5+5", *right[steps + 1 :]])) for steps in range(len(right))]
    for values in (cut, slipped):
        assert values[0] == 0.0
        assert all(less < more for less, more in itertools.pairwise(values))
        assert max(values) <= 0.5


@pytest.mark.parametrize(
    "hostile",
    ["", "=", "9", "=9", "9=9=9", " 2*4+1=1*4+5=0*4+9=9", "\uff12*4+1=1*4+5=0*4+9=9", "\x00", "2*4+1\n=9", "0*4+9=9",
     "__import__('os')", "=" * 100_000, "1" * 100_000, "nan", "-1", "<end>", "2*4+1 =1*4+5=0*4+9=9"],
)  # fmt: skip
def test_hostile_responses_score_zero(hostile: str) -> None:
    assert score("3*4+7=", hostile) == 0.0


@given(st.text(alphabet=task.ALPHABET + " \n"))
def test_no_response_raises_an_error_or_scores_too_much(text: str) -> None:
    value = score("3*4+7=", text)
    assert (value == 1.0) == (text == "2*4+1=1*4+5=0*4+9=9")
    assert value == 1.0 or 0.0 <= value <= 0.5


def test_text_after_the_answer_is_wrong() -> None:
    for more in ("=9", "=", "0", "=8*4+1"):
        assert score("3*4+7=", "2*4+1=1*4+5=0*4+9=9" + more) <= 0.5


def test_the_same_arguments_give_the_same_problems() -> None:
    assert list(task.problems(50, seed=1)) == list(task.problems(50, seed=1))
    assert list(task.problems(50, seed=1)) != list(task.problems(50, seed=2))
    # Literal values, so that they are the same on any machine.
    assert [row["prompt"] for row in task.problems(3)] == ["5*9+9=", "7*5+3=", "1*5+1="]


def test_no_prompt_is_both_trained_and_held_out() -> None:
    trained = {row["prompt"] for row in task.problems(5000)}
    assert trained.isdisjoint(row["prompt"] for row in task.held_out(2000))


@pytest.mark.parametrize(("tail", "low", "high"), [("light", 1.7, 2.7), ("medium", 3.2, 5.2), ("heavy", 8.0, 30.0)])
def test_the_tail_of_lengths(tail: str, low: float, high: float) -> None:
    rows = list(task.problems(5000, tail=tail))
    lengths = np.array([len(task.solution(row["prompt"])) + 1 for row in rows])
    assert low <= np.percentile(lengths, 99) / np.median(lengths) <= high
    assert 30 <= np.median(lengths) <= 90
    assert 75 <= lengths.mean() <= 100
    assert lengths.max() <= task.MAX_TOKENS


def test_the_longest_response_fits() -> None:
    assert 900 < len(task.solution(f"{task.LONGEST}*9+9=")) + 1 <= task.MAX_TOKENS


@pytest.fixture(scope="module")
def loaded() -> Any:
    from dora_rl.models.loading import ModelConfig, load

    return load(ModelConfig(path=str(WARM)))


def test_the_tokenizer_round_trips(loaded: Any) -> None:
    tokenizer = loaded.tokenizer
    for text in ("3*4+7=", task.solution("130*9+9="), task.ALPHABET):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.unk_token_id in tokenizer("x")["input_ids"]
    assert len(tokenizer) == loaded.model.config.vocab_size


def test_the_warm_start_is_small_and_knows_the_task_but_makes_mistakes(loaded: Any) -> None:
    assert sum(file.stat().st_size for file in WARM.iterdir()) < 4_000_000
    rows = list(task.held_out(96))
    sampled, greedy = (_accuracy(loaded, rows, temperature) for temperature in (1.0, 0.0))
    assert 0.25 <= sampled <= 0.55
    assert greedy >= 0.9


def _accuracy(loaded: Any, rows: list[Any], temperature: float) -> float:
    from dora_rl.engine.requests import Request, Sampling
    from tests.engine import tiny

    sampling = Sampling(max_tokens=task.MAX_TOKENS, temperature=temperature, stop_ids=(loaded.tokenizer.eos_token_id,))
    engine = tiny.engine(loaded.model, kv_bytes=1 << 27, prefill_chunk=256, stream_every=16, max_requests=96)
    prompts = [tuple(loaded.tokenizer(row["prompt"])["input_ids"]) for row in rows]
    responses = tiny.run(
        engine,
        [Request(trajectory=i, version=0, prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)],
    ).responses
    texts = [loaded.tokenizer.decode(list(responses[i].tokens), skip_special_tokens=True) for i in range(len(rows))]
    return float(np.mean(np.array(task.reward([row["prompt"] for row in rows], texts)) == 1.0))
