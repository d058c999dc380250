"""The usual signatures of reward functions, recognised by their parameters.

- TRL: `f(prompts, completions, **columns) -> list[float]`, for many answers at once; if it names them, it gets
  `log_metric` and `log_extra` too;
- verl: `f(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float}`;
- plain: `f(prompt, completion, answer) -> float`; a parameter called `problem` gets the whole `Problem`.

A signature determines how a function is called and how many answers it takes; `rewards` reads what it returns.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from dora_rl.core.errors import ConfigError
from dora_rl.envs.data import ChatMessage, Problem
from dora_rl.envs.reward_notes import Notes


class Answer(NamedTuple):
    """One completion of one problem, to be scored."""

    problem: Problem
    completion: str
    completion_ids: tuple[int, ...] = ()


class RewardSignature(NamedTuple):
    """A reward function and how to call it; awaitables are returned as they are."""

    name: str
    many: Callable[[Sequence[Answer], Notes], Any] | None
    """Scores a list of answers, and logs to the notes; None if the function takes one answer at a time."""
    one: Callable[[Answer, Notes], Any]
    """Scores one answer; returns a list of one score if `many` is set."""


Parameters: TypeAlias = dict[str, inspect.Parameter]

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_of(name: str, function: Any) -> RewardSignature:
    """How a function is called, found from its parameters; an error that lists the signatures if none matches."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise ConfigError(f"reward '{name}' is not a function") from None
    if inspect.isclass(function):
        raise ConfigError(f"reward '{name}' is a class: name a function")
    only_keywords = [parameter.kind for parameter in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
    if "solution_str" in parameters:
        return RewardSignature(name, None, lambda answer, _: _call(function, parameters, _verl(answer)))
    if only_keywords or parameters.keys() & {"prompts", "completions"}:
        return RewardSignature(
            name,
            lambda answers, notes: _call(function, parameters, _trl(answers, parameters, notes)),
            lambda answer, notes: _call(function, parameters, _trl([answer], parameters, notes)),
        )
    if "completion" in parameters:
        return RewardSignature(name, None, lambda answer, _: _call(function, parameters, _plain(answer)))
    if _three_positional(parameters):
        return RewardSignature(name, None, lambda answer, _: function(*_positional(answer, next(iter(parameters)))))
    raise ConfigError(
        f"reward '{name}' takes ({', '.join(parameters)}): write it as f(prompts, completions, **columns), "
        "f(data_source, solution_str, ground_truth, extra_info) or f(prompt, completion, answer)"
    )


def _call(function: Any, parameters: Parameters, given: dict[str, Any]) -> Any:
    """Call a function with the arguments that it names, or with all of them if it has `**keywords`."""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**given)
    asked = {name for name, parameter in parameters.items() if parameter.kind in _KEYWORDS}
    return function(**{name: value for name, value in given.items() if name in asked})


def _trl(answers: Sequence[Answer], parameters: Parameters, notes: Notes) -> dict[str, Any]:
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
    # TRL passes these to every function; here only functions that name them get them, since they are no columns. A
    # reward worker does not know the state of the trainer.
    spare = {"trainer_state": None, "log_extra": notes.log_extra, "log_metric": notes.log_metric}
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
    problem = copy_of(answer.problem)
    return {
        **problem.columns,
        "problem": problem,
        "prompt": prompt_value(answer.problem),
        "completion": answer.completion,
        "completion_ids": list(answer.completion_ids),
        "answer": answer.problem.answer,
    }


def _three_positional(parameters: Parameters) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional for parameter in parameters.values()) == 3


def _positional(answer: Answer, first: str) -> tuple[Any, str, str | None]:
    asked = copy_of(answer.problem) if first == "problem" else prompt_value(answer.problem)
    return asked, answer.completion, answer.problem.answer


def prompt_value(problem: Problem) -> str | list[dict[str, str]]:
    """The prompt as other libraries pass it: a text or a list of dicts."""
    return problem.prompt if isinstance(problem.prompt, str) else [_message(message) for message in problem.prompt]


def _message(message: ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _columns(problem: Problem) -> dict[str, Any]:
    """A copy for one call: changes that the function makes do not affect other calls."""
    return copy.deepcopy(problem.columns)


def copy_of(problem: Problem) -> Problem:
    """A copy of a problem, which user code may change."""
    return msgspec.structs.replace(problem, columns=_columns(problem))
