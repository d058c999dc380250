"""The shapes that reward functions have in this field, told apart by their parameters.

- TRL: `f(prompts, completions, **columns) -> list[float]`, for many answers at once;
- verl: `f(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float}`;
- plain: `f(prompt, completion, answer) -> float`; a parameter called `problem` gets the whole `Problem`.

A shape only says how a function is called and how many answers it takes; what it returns is read in `rewards`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from dora_rl.core.errors import ConfigError
from dora_rl.envs.data import ChatMessage, Problem


class Answer(NamedTuple):
    """One completion of one problem, to be judged."""

    problem: Problem
    completion: str
    completion_ids: tuple[int, ...] = ()


class RewardSignature(NamedTuple):
    """A reward function and how to call it; awaitables come back as they are."""

    name: str
    many: Callable[[Sequence[Answer]], Any] | None
    """Scores a list; none if the function takes one answer at a time."""
    one: Callable[[Answer], Any]
    """Scores one; a list of one score if `many` is there."""


Parameters: TypeAlias = dict[str, inspect.Parameter]

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_of(name: str, function: Any) -> RewardSignature:
    """Find out how a function is to be called, or say what it should look like."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise ConfigError(f"reward '{name}' is not a function") from None
    if inspect.isclass(function):
        raise ConfigError(f"reward '{name}' is a class: name a function")
    only_keywords = [kind.kind for kind in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
    if "solution_str" in parameters:
        return RewardSignature(name, None, lambda answer: _call(function, parameters, _verl(answer)))
    if only_keywords or parameters.keys() & {"prompts", "completions"}:
        return RewardSignature(
            name,
            lambda answers: _call(function, parameters, _trl(answers, parameters)),
            lambda answer: _call(function, parameters, _trl([answer], parameters)),
        )
    if "completion" in parameters:
        return RewardSignature(name, None, lambda answer: _call(function, parameters, _plain(answer)))
    if _three_places(parameters):
        return RewardSignature(name, None, lambda answer: function(*_places(answer, next(iter(parameters)))))
    raise ConfigError(
        f"reward '{name}' takes ({', '.join(parameters)}): write it as f(prompts, completions, **columns), "
        "f(data_source, solution_str, ground_truth, extra_info) or f(prompt, completion, answer)"
    )


def _call(function: Any, parameters: Parameters, given: dict[str, Any]) -> Any:
    """Call with what the function asks for; all there is if it takes any keyword."""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**given)
    asked = {name for name, parameter in parameters.items() if parameter.kind in _KEYWORDS}
    return function(**{name: value for name, value in given.items() if name in asked})


def _trl(answers: Sequence[Answer], parameters: Parameters) -> dict[str, Any]:
    chat = [not isinstance(answer.problem.prompt, str) for answer in answers]
    columns = [_columns(answer.problem) for answer in answers]
    names = sorted({name for each in columns for name in each})
    given: dict[str, Any] = {name: [each.get(name) for each in columns] for name in names}
    given["prompts"] = [prompt_value(answer.problem) for answer in answers]
    given["completions"] = [
        [{"role": "assistant", "content": answer.completion}] if is_chat else answer.completion
        for answer, is_chat in zip(answers, chat, strict=True)
    ]
    given["completion_ids"] = [list(answer.completion_ids) for answer in answers]
    # TRL hands these to every function; here they say nothing, and are there for those that name them.
    spare = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return {**{name: value for name, value in spare.items() if name in parameters}, **given}


def _verl(answer: Answer) -> dict[str, Any]:
    columns = _columns(answer.problem)
    return {
        **columns,
        "data_source": columns.get("data_source", ""),
        "solution_str": answer.completion,
        "ground_truth": columns.get("answer", answer.problem.answer),
        "extra_info": columns.get("extra_info"),
    }


def _plain(answer: Answer) -> dict[str, Any]:
    problem = own(answer.problem)
    return {
        **problem.columns,
        "problem": problem,
        "prompt": prompt_value(answer.problem),
        "completion": answer.completion,
        "completion_ids": list(answer.completion_ids),
        "answer": answer.problem.answer,
    }


def _three_places(parameters: Parameters) -> bool:
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([kind for kind in parameters.values() if kind.kind in places]) == 3


def _places(answer: Answer, first: str) -> tuple[Any, str, str | None]:
    asked = own(answer.problem) if first == "problem" else prompt_value(answer.problem)
    return asked, answer.completion, answer.problem.answer


def prompt_value(problem: Problem) -> str | list[dict[str, str]]:
    """The prompt as other libraries pass it: a text or a list of plain messages."""
    return problem.prompt if isinstance(problem.prompt, str) else [_message(message) for message in problem.prompt]


def _message(message: ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _columns(problem: Problem) -> dict[str, Any]:
    """The function's own copy: what it changes there is not seen by the other siblings' verdicts."""
    return copy.deepcopy(problem.columns)


def own(problem: Problem) -> Problem:
    """A copy that its user may change."""
    return msgspec.structs.replace(problem, columns=_columns(problem))


def _ignore(*_: Any) -> None:
    """Where TRL would write down a metric."""
