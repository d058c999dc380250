"""Each reward function is called as its library calls it, and nothing that it does gets past the scorer."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError, UserError
from dora_rl.envs.async_bridge import SharedLoop
from dora_rl.envs.config import RewardConfig
from dora_rl.envs.data import Problem
from dora_rl.envs.reward_signatures import Answer, signature_of
from dora_rl.envs.rewards import RewardResult, RewardScorer
from dora_rl.envs.user_code import named_object
from tests.envs.making import CHAT, a_problem, loaded, scorer, write_code

SEEN = "seen = []\n"


def test_trl_functions_get_lists_and_columns(tmp_path: Path) -> None:
    write_code(
        tmp_path,
        SEEN
        + """
def by_length(prompts, completions, completion_ids, answer, level, **kwargs):
    seen.append((prompts, completions, completion_ids, answer, level, sorted(kwargs)))
    return [float(len(text)) for text in completions]
""",
    )
    made = scorer(tmp_path, "task.py:by_length")
    answers = [Answer(a_problem(level=n, other=None), "x" * n, (n,)) for n in range(3)]
    assert [result.reward for result in made.score_many(answers)] == [0.0, 1.0, 2.0]
    seen = named_object("task.py:seen", tmp_path)
    assert seen == [(["What is 6 x 7?"] * 3, ["", "x", "xx"], [[0], [1], [2]], ["42"] * 3, [0, 1, 2], ["other"])]


def test_trl_functions_get_messages_if_the_prompt_is_a_chat(tmp_path: Path) -> None:
    write_code(
        tmp_path, SEEN + "def f(prompts, completions):\n    seen.append((prompts, completions))\n    return [1.0]\n"
    )
    made = scorer(tmp_path, "task.py:f")
    assert made.score(a_problem(prompt=CHAT), "42").reward == 1.0
    assert named_object("task.py:seen", tmp_path) == [
        ([[{"role": "user", "content": "What is 6 x 7?"}]], [[{"role": "assistant", "content": "42"}]])
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_async_functions_are_awaited_on_one_loop(count: int, tmp_path: Path) -> None:
    write_code(
        tmp_path,
        """
import asyncio
loops = set()
async def f(completions, **kwargs):
    await asyncio.sleep(0)
    loops.add(asyncio.get_running_loop())
    return [float(len(loops))] * len(completions)
""",
    )
    made = scorer(tmp_path, "task.py:f")
    for _ in range(2):
        assert [result.reward for result in made.score_many([Answer(a_problem(), "")] * count)] == [1.0] * count


def test_verl_functions_get_the_arguments_that_verl_passes(tmp_path: Path) -> None:
    write_code(
        tmp_path,
        SEEN
        + """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seen.append((data_source, solution_str, ground_truth, extra_info))
    return {"score": 0.5, "acc": True, "note": "fine"}
""",
    )
    made = scorer(tmp_path, "task.py:compute_score")
    result = made.score(a_problem('{"n":1}', data_source="gsm8k", extra_info={"i": 1}), "42")
    assert result == RewardResult(reward=0.5, components={"compute_score": 0.5, "compute_score/acc": 1.0})
    made.score(Problem(key="k", prompt="p", answer="4", columns={"answer": 4}), "4")
    assert named_object("task.py:seen", tmp_path) == [("gsm8k", "42", '{"n":1}', {"i": 1}), ("", "4", 4, None)]


@pytest.mark.parametrize(
    "code",
    [
        "def f(prompt, completion, answer):\n    return prompt == 'What is 6 x 7?' and completion == answer",
        "def f(problem, completion, answer):\n    return problem.answer == completion == answer",
        "def f(completion, level):\n    return completion == '42' and level == 3",
        "def f(question, response, wanted):\n    return question == 'What is 6 x 7?' and response == wanted",
        "class F:\n    def __call__(self, completion, answer):\n        return completion == answer\nf = F()",
        "import numpy\ndef f(completion, answer):\n    return numpy.float32(completion == answer)",
        "async def f(completion, answer):\n    return completion == answer",
    ],
)
def test_plain_functions_get_the_arguments_that_they_name(code: str, tmp_path: Path) -> None:
    write_code(tmp_path, code)
    made = scorer(tmp_path, "task.py:f")
    assert [made.score(a_problem(level=3), text).reward for text in ("42", "41")] == [1.0, 0.0]


def test_rewards_are_summed_with_their_weights(tmp_path: Path) -> None:
    made = scorer(tmp_path, "exact", "format:^4", "format:2$", weights=[1.0, 0.5, -2.0])
    assert made.score(a_problem(), "43") == RewardResult(
        reward=0.5, components={"exact": 0.0, "format:^4": 1.0, "format:2$": 0.0}
    )
    assert made.score(a_problem(), "42").reward == -0.5
    assert scorer(tmp_path).score(a_problem(), "42") == RewardResult(reward=0.0)


def test_a_trl_function_may_skip_rows_that_others_score(tmp_path: Path) -> None:
    write_code(tmp_path, "def f(completions, **kwargs):\n    return [None for _ in completions]\n")
    both = scorer(tmp_path, "task.py:f", "exact")
    assert both.score(a_problem(), "42") == RewardResult(reward=1.0, components={"exact": 1.0})
    assert scorer(tmp_path, "task.py:f").score(a_problem(), "42").failed == "f returned None"


def test_changes_to_a_row_are_not_seen_by_other_functions(tmp_path: Path) -> None:
    write_code(
        tmp_path,
        """
def spoil(completions, info, **kwargs):
    for each in info:
        each.clear()
    return [0.0] * len(completions)
def spoil_problem(problem, completion, answer):
    problem.columns.clear()
    return 0.0
def count(completion, info):
    return len(info)
""",
    )
    made = scorer(tmp_path, "task.py:spoil", "task.py:spoil_problem", "task.py:count")
    mine = a_problem(info={"a": 1})
    assert [result.reward for result in made.score_many([Answer(mine, "")] * 2)] == [1.0, 1.0]


HOSTILE = {
    "raise ValueError('bad\\nnews')": "f: ValueError: bad news",
    "raise SystemExit(3)": "f: SystemExit: 3",
    "raise GeneratorExit": "f: GeneratorExit",
    "import asyncio; raise asyncio.CancelledError": "f: CancelledError",
    "return f(**{name: value for name, value in locals().items() if name != 'f'})": "f: RecursionError",
    "raise Awful": "f: Awful",
    "return float('nan')": "f returned nan",
    "return float('inf')": "f returned inf",
    "return 10 ** 400": "f: OverflowError",
    "return 'one'": "f returned str, not a number",
    "return None": "f returned None",
    "return {}": "f returned a dict without 'score'",
    "return {'score': 'x'}": "f returned str, not a number",
    "return Liar()": "f: RuntimeError: no",
    "return object()": "f returned object, not a number",
    "return [1.0]": "f returned list, not a number",
}
CLASSES = """
class Awful(BaseException):
    def __str__(self): raise SystemError('no text')
class Liar:
    def __float__(self): raise RuntimeError('no')
"""


@pytest.mark.parametrize("line", HOSTILE)
@pytest.mark.parametrize("parameters", ["completion, answer", "data_source, solution_str, ground_truth"])
def test_a_function_that_raises_or_returns_nonsense_fails(line: str, parameters: str, tmp_path: Path) -> None:
    write_code(tmp_path, f"{CLASSES}\ndef f({parameters}):\n    {line}\n")
    result = scorer(tmp_path, "task.py:f").score(a_problem(), "x")
    message = HOSTILE[line].replace("f returned None", "f returned NoneType, not a number")
    assert result.reward is None
    assert result.failed is not None
    assert result.failed.startswith(message)
    assert "\n" not in result.failed
    assert len(result.failed) < 250


@pytest.mark.parametrize("line", HOSTILE)
def test_one_bad_answer_does_not_fail_its_neighbours(line: str, tmp_path: Path) -> None:
    code = f"{CLASSES}\ndef g(f):\n    {line}\ndef f(completions, **kwargs):\n"
    write_code(tmp_path, code + "    return [g(g) if text == 'bad' else 1.0 for text in completions]\n")
    results = scorer(tmp_path, "task.py:f").score_many([Answer(a_problem(), text) for text in ("a", "bad", "c")])
    assert [result.reward for result in results] == [1.0, None, 1.0]


@pytest.mark.parametrize("returned", ["[]", "[1.0, 1.0]", "1.0", "None", "iter([])", "{}"])
def test_a_wrong_number_of_scores_fails(returned: str, tmp_path: Path) -> None:
    write_code(tmp_path, f"def f(completions, **kwargs):\n    return {returned}\n")
    for count in (1, 3):
        results = scorer(tmp_path, "task.py:f").score_many([Answer(a_problem(), "x")] * count)
        assert all(result.failed is not None and "f" in result.failed for result in results)


def test_the_failure_names_a_column_that_does_not_exist(tmp_path: Path) -> None:
    write_code(tmp_path, "def f(completion, levle):\n    return 1.0\n")
    failed = scorer(tmp_path, "task.py:f").score(a_problem(level=1), "x").failed
    assert failed is not None
    assert "'levle'" in failed


def test_a_keyboard_interrupt_is_raised(tmp_path: Path) -> None:
    write_code(tmp_path, "def f(completion):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        scorer(tmp_path, "task.py:f").score(a_problem(), "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "reward 'exakt' is unknown: use .*contains, exact"),
        ("format:(", "is not a regular expression"),
        ("task.py:absent", "has no 'absent'"),
        ("task.py:constant", "is not a function"),
        ("task.py:Class", "is a class"),
        ("task.py:strange", r"takes \(a, b\): write it as"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(name: str, message: str, tmp_path: Path) -> None:
    write_code(tmp_path, "constant = 3\nclass Class: pass\ndef strange(a, b): return 1.0\n")
    with pytest.raises(ConfigError, match=message):
        scorer(tmp_path, name)


def test_each_function_needs_one_weight() -> None:
    with pytest.raises(ConfigError, match="weights has 1 entries for 2 functions"):
        build(RewardConfig, {"functions": ["exact", "number"], "weights": [1.0]})


@pytest.mark.parametrize(
    ("name", "answer", "text", "reward"),
    [
        ("exact", "42", " 42\n", 1.0),
        ("exact", "42", "It is 42", 0.0),
        ("contains", " 42 ", "It is 42.", 1.0),
        ("contains", "42", "It is 41.", 0.0),
        ("number", "42", "6 x 7 = 42.", 1.0),
        ("number", "42", "42 or 43", 0.0),
        ("number", "#### 1,234", "so $1234.00", 1.0),
        ("number", "-3", "the sum is -3", 1.0),
        ("number", "3", "6-3", 1.0),
        ("number", "-3", "= \u22123", 1.0),
        ("number", "0.5", "about .5", 1.0),
        ("number", "42", "no digits", 0.0),
        ("number", "7", "1,2,7", 1.0),
        ("math", "1/2", r"The answer is \boxed{\frac{1}{2}}", 1.0),
        ("math", r"\frac{1}{2}", "The answer is $0.5$", 1.0),
        ("math", "1/2", "The answer is $0.25$", 0.0),
        ("math", "1/2", "", 0.0),
        ("format:^<think>.*</think>", None, "<think>\nhm\n</think> 42", 1.0),
        ("format:^<think>.*</think>", None, "42", 0.0),
    ],
)
def test_builtins(name: str, answer: str | None, text: str, reward: float, tmp_path: Path) -> None:
    assert scorer(tmp_path, name).score(a_problem(answer), text) == RewardResult(
        reward=reward, components={name: reward}
    )


@pytest.mark.parametrize("name", ["exact", "contains", "number", "math"])
def test_a_row_without_answer_fails(name: str, tmp_path: Path) -> None:
    assert scorer(tmp_path, name).score(a_problem(None), "42").failed == f"{name}: ValueError: the row has no answer"


def test_math_can_be_scored_off_the_main_thread(tmp_path: Path) -> None:
    results: list[RewardResult] = []
    made = scorer(tmp_path, "math")
    thread = threading.Thread(target=lambda: results.append(made.score(a_problem("2"), "$1+1$")))
    thread.start()
    thread.join()
    assert results == [RewardResult(reward=1.0, components={"math": 1.0})]


@pytest.mark.parametrize("name", ["chain_sum", "rearc", "knights_knaves", "countdown"])
def test_reasoning_gym_scores_its_own_rows(name: str, tmp_path: Path) -> None:
    dataset = loaded(tmp_path, f"reasoning_gym:{name}", size=3, seed=5)
    made = scorer(tmp_path, "reasoning_gym")
    for row in dataset.train:
        crossed = msgspec.json.decode(msgspec.json.encode(row), type=Problem)
        assert crossed.answer is not None
        assert made.score(crossed, f"Thus <answer>{crossed.answer}</answer>").reward == 1.0
        assert made.score(crossed, crossed.answer).reward == 1.0
        wrong = made.score(crossed, "<answer>nothing of the kind</answer>")
        assert wrong.reward is not None
        assert wrong.reward < 0.5


def test_rows_exported_from_reasoning_gym_are_scored_too(tmp_path: Path) -> None:
    row = a_problem("3", question="1 + 2?", metadata={"source_dataset": "chain_sum"})
    made = scorer(tmp_path, "reasoning_gym")
    assert made.score(row, "3").reward == 1.0
    failed = made.score(a_problem("3"), "3").failed
    assert failed == "reasoning_gym: ValueError: the row does not come from reasoning-gym"


def test_a_missing_extra_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'dora-rl\[tasks\]'"):
        scorer(tmp_path, "math")


@given(text=st.text() | st.from_regex(r"[-\u2212]?[\d,.]*[eE.]?\d*", fullmatch=True))
def test_every_completion_has_a_reward(text: str) -> None:
    for name in ("exact", "contains", "number"):
        result = scorer(Path(), name).score(a_problem(), text)
        assert result.failed is None, result
        assert result.reward in (0.0, 1.0)


returned = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.complex_numbers() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("score"), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(values=st.lists(returned, max_size=4), listed=returned, count=st.integers(1, 3))
def test_any_returned_value_gives_one_result_per_answer(values: list[Any], listed: Any, count: int) -> None:
    made = RewardScorer(RewardConfig(), Path())
    for value in (values, listed):
        made._functions, made._weights = [signature_of("f", lambda completions, it=value: it)], [1.0]
        results = made.score_many([Answer(a_problem(), "x")] * count)
        assert len(results) == count
        for result in results:
            assert (result.reward is None) != (result.failed is None)
            assert result.reward is None or math.isfinite(result.reward)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=RewardResult) == result


def test_a_shared_loop_is_closed_with_its_owner() -> None:
    before = set(threading.enumerate())
    shared = SharedLoop()
    loop = shared._loop
    (thread,) = set(threading.enumerate()) - before
    shared.close()
    thread.join()
    assert loop.is_closed()


def logs_it(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
    assert not columns.keys() & {"log_metric", "log_extra", "trainer_state"}
    for text in completions:
        log_metric("length", len(text))
    log_metric("infinite", math.inf)
    log_extra("text", completions)
    log_extra("odd", [object if text == "aaa" else 10**400 if text == "aa" else None for text in completions])
    log_extra("long", ["x" * 5000 for _ in completions])
    log_extra("sign", ["\ud800" for _ in completions])
    return [1.0 for _ in completions]


def too_many_values(completions: list[str], log_extra: Any) -> list[float]:
    log_extra("column", [*completions, "one more"])
    return [1.0 for _ in completions]


def no_number(completions: list[str], log_metric: Any) -> list[float]:
    log_metric("name", "text")
    return [1.0 for _ in completions]


async def logs_later(completions: list[str], log_metric: Any) -> list[dict[str, float]]:
    await asyncio.sleep(0)
    log_metric("seen", 1)
    log_metric("seen", 2)
    log_metric("both", 5)
    for number in range(100):
        log_metric(f"more {number}", number)
    return [{"score": 1.0, "both": 7.0} for _ in completions]


def scorer_of(*functions: Any) -> RewardScorer:
    made = RewardScorer(RewardConfig(), Path())
    made._functions = [signature_of(function.__name__, function) for function in functions]
    made._weights = [1.0] * len(functions)
    return made


def test_a_function_logs_metrics_and_notes_of_each_completion() -> None:
    several = scorer_of(logs_it).score_many([Answer(a_problem(), text) for text in ("a", "aaa")])
    assert [result.components for result in several] == [{"logs_it": 1.0, "logs_it/length": 2.0}] * 2
    assert [result.notes["logs_it/text"] for result in several] == ["a", "aaa"]
    assert several[0].notes["logs_it/odd"] is None
    assert several[1].notes["logs_it/odd"] == "<class 'object'>"
    assert several[0].notes["logs_it/long"] == "x" * 1000
    alone = scorer_of(logs_it).score(a_problem(), "aa")
    assert alone.components["logs_it/length"] == 2.0
    assert str(alone.notes["logs_it/odd"]).startswith("1000")
    for result in (alone, *several):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=RewardResult) == result


def test_an_async_function_logs_too_and_its_metrics_are_few() -> None:
    result = scorer_of(logs_later).score(a_problem(), "a")
    assert result.components["logs_later/seen"] == 1.5
    assert result.components["logs_later/both"] == 7.0  # what is returned comes first
    assert len(result.components) == 1 + 32


def test_a_wrong_note_fails_the_function_by_name() -> None:
    found = scorer_of(too_many_values).score(a_problem(), "a")
    assert found.failed is not None
    assert "too_many_values" in found.failed
    assert "log_extra('column') has 2 values for 1 completions" in found.failed
    assert (scorer_of(no_number).score(a_problem(), "a").failed or "").startswith("no_number: ")


@pytest.mark.filterwarnings("ignore")
def test_the_rewards_of_trl_work() -> None:
    rewards = pytest.importorskip("trl.rewards")
    scorer = scorer_of(rewards.think_format_reward)
    texts = ("<think>six sevens</think>42", "42")
    assert [scorer.score(a_problem(prompt=CHAT), text).reward for text in texts] == [1.0, 0.0]
