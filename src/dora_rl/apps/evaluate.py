"""`dora-rl eval`: a policy on held-out prompts, in this process: an engine and a judge, no orchestrator.

A version of a run is sampled with the very numbers that the run's own evaluation uses, so the two agree.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dora_rl.apps import run_reader as recorded
from dora_rl.apps.output_file import make_sure_of
from dora_rl.apps.train import read_config
from dora_rl.core.errors import RequestError, UserError
from dora_rl.core.types import Version
from dora_rl.runtime.packages import need_packages
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from dora_rl.engine.engine import Engine
    from dora_rl.runtime.config import RunConfig

_NORMAL = 1.959964
"""The middle 95% of a normal distribution lie within so many standard deviations."""


class Asked(NamedTuple):
    """What is evaluated, with which settings, and where the result goes."""

    config: RunConfig
    base: Path
    """Where relative paths start."""
    model: Path | str
    version: Version
    out: Path


class Response(NamedTuple):
    """One response; no reward if it has a `failed` verdict."""

    prompt: int
    tokens: int
    reward: float | None


def evaluate(
    policy: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="Folder of a run, or a model.")],
    config: Annotated[Path | None, typer.Option(help="Config with data and rewards; needed for a model.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Of a run; the newest if not given.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses to each prompt; as the config says.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the result.")] = None,
) -> None:
    """Evaluate a run's policy, or a model, on held-out prompts."""
    need_packages()
    asked = _asked(policy, config, version, json_file)
    if not asked.config.reward.functions:
        raise UserError(
            "'reward.functions' is empty, and eval judges one response by nothing else, without the run's environment: "
            "give a config that names some with --config FILE"
        )
    make_sure_of(asked.out, folders=True)
    count = samples or asked.config.evaluation.samples
    result = summary(respond(asked, count), asked.config.evaluation.success_threshold, count)
    result = {"policy": str(asked.model), "version": asked.version, **result}
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _say(result, asked)


def summary(responses: list[Response], right: float, samples: int) -> dict[str, Any]:
    """The figures; a response without a reward counts as wrong."""
    by_prompt: dict[int, list[bool]] = {}
    for one in responses:
        by_prompt.setdefault(one.prompt, []).append(one.reward is not None and one.reward >= right)
    means = [statistics.fmean(some) for some in by_prompt.values()]
    low, high = interval(means, samples)
    return {
        "prompts": len(means),
        "samples": samples,
        "accuracy": statistics.fmean(means),
        "interval_95": [low, high],
        f"avg@{samples}": statistics.fmean(means),
        f"pass@{samples}": statistics.fmean(any(some) for some in by_prompt.values()),
        "reward": statistics.fmean(one.reward or 0.0 for one in responses),
        "failed": sum(one.reward is None for one in responses),
        "mean_tokens": statistics.fmean(one.tokens for one in responses),
    }


def interval(means: list[float], samples: int) -> tuple[float, float]:
    """Wilson's 95% interval. Responses to one prompt are alike, so they count only for as much as they differ."""
    mean = statistics.fmean(means)
    prompts = len(means)
    spread = statistics.variance(means) / prompts if prompts > 1 else 0.0
    binomial = mean * (1 - mean)
    worth = binomial / spread if spread else prompts * samples if binomial else prompts
    count = min(max(worth, prompts), prompts * samples)
    square = _NORMAL**2 / count
    middle = (mean + square / 2) / (1 + square)
    half = _NORMAL / (1 + square) * math.sqrt(mean * (1 - mean) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


# -- what is asked ----------------------------------------------------------------------------------------------


def _asked(policy: str, config: Path | None, version: Version | None, out: Path | None) -> Asked:
    if recorded.is_run(Path(policy)):
        return _of_run(RunDir.open(policy), config, version, out)
    if config is None:
        raise UserError(f"'{policy}' is not the folder of a run; to evaluate a model, say on what with --config FILE")
    if version is not None:
        raise UserError("a model has no versions: leave out --version, or name the folder of a run")
    name = Path(policy).name or policy
    return Asked(read_config(config, []), config.resolve().parent, policy, 0, out or Path(f"eval-{name}.json"))


def _of_run(folder: RunDir, config: Path | None, version: Version | None, out: Path | None) -> Asked:
    own = folder.read()
    settings, base = (own, folder.base()) if config is None else (read_config(config, []), config.resolve().parent)
    found: dict[Version, Path | str] = {**recorded.policies(folder), 0: _beside(own.model.path, folder.base())}
    chosen = max(found) if version is None else version
    if chosen not in found:
        have = ", ".join(map(str, sorted(found)))
        raise UserError(f"{folder.path} has no checkpoint of version {chosen}; it has: {have}")
    out = out or folder.path / "evaluations" / f"version-{chosen:08d}.json"
    return Asked(settings, base, found[chosen], chosen, out)


def _beside(path: str, base: Path) -> str:
    """A model's path as the run's own folder of paths has it, or its name on the hub."""
    local = base / path
    return str(local) if local.exists() else path


# -- generating and judging -------------------------------------------------------------------------------------


def respond(asked: Asked, samples: int) -> list[Response]:
    """What the policy says to each held-out prompt so many times, and what that is worth."""
    from dora_rl.engine.engine import Engine
    from dora_rl.envs.rewards import RewardScorer
    from dora_rl.models.loading import load
    from dora_rl.models.sources import MemoryWeights
    from dora_rl.runtime.supervisor.evaluation import held_out_problems
    from dora_rl.runtime.tokenization import Tokenization

    config = asked.config
    held_out = held_out_problems(config, asked.base)
    scorer = RewardScorer(config.reward, asked.base)
    model = config.model.model_copy(update={"path": str(asked.model)})
    loaded = load(model)
    text = Tokenization(loaded.tokenizer, config.model_copy(update={"model": model}))
    engine_config = config.rollout.engine.model_copy(update={"slots": 1})
    engine = Engine(
        loaded.model, MemoryWeights.of(loaded.model, asked.version), engine_config, tokenizer=loaded.tokenizer
    )
    engine.load(0, asked.version)
    engine.wait_for_loads()
    said = _generate(engine, asked, [text.encode(problem) for problem in held_out], text.stop_ids, samples)
    responses = []
    for number, tokens in enumerate(said):
        problem = held_out[number // samples]
        result = None if tokens is None else scorer.score(problem, text.decode(tokens), tuple(tokens))
        reward = None if result is None else result.reward
        responses.append(Response(number // samples, len(tokens or ()), reward))
    return responses


def _generate(
    engine: Engine, asked: Asked, prompts: list[tuple[int, ...]], stop_ids: tuple[int, ...], samples: int
) -> list[array[int] | None]:
    """What was said to each prompt so many times; None where a request can't be served."""
    from dora_rl.engine.requests import Request
    from dora_rl.runtime.supervisor.evaluation import first_trajectory

    sampling = asked.config.request_sampling(stop_ids, temperature=asked.config.evaluation.temperature)
    count = len(prompts) * samples
    first = first_trajectory(asked.version, count)
    said: dict[int, array[int]] = {}
    for number in range(count):
        prompt = prompts[number // samples]
        request = Request(trajectory=first + number, version=asked.version, prompt=prompt, sampling=sampling)
        with contextlib.suppress(RequestError):
            engine.submit(request, 0)
            said[number] = array("i")
    columns = (TextColumn("eval"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(said))
        while engine.busy:
            output = engine.step()
            for chunk in output.chunks:
                said[chunk.trajectory - first].frombytes(chunk.token_data)
            bar.advance(task, len(output.finished))
    return [said.get(number) for number in range(count)]


def _say(result: dict[str, Any], asked: Asked) -> None:
    console = Console(soft_wrap=True)
    low, high = result["interval_95"]
    samples = result["samples"]
    console.print(
        f"{result['policy']}: accuracy {result['accuracy']:.1%} (95% interval {low:.1%} to {high:.1%}) "
        f"on {result['prompts']} held-out prompts",
        highlight=False,
        markup=False,
    )
    console.print(
        f"avg@{samples} {result[f'avg@{samples}']:.1%}  pass@{samples} {result[f'pass@{samples}']:.1%}  "
        f"reward {result['reward']:.3f}  {result['mean_tokens']:.0f} tokens a response  failed {result['failed']}",
        highlight=False,
        markup=False,
    )
    console.print(f"result: {asked.out}", highlight=False, markup=False)
