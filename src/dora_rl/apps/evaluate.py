"""`dora-rl eval`: evaluates a policy on held-out prompts in this process, with an engine and reward functions only.

Sampling a version of a run uses the random numbers of the run's own evaluation, so the two give the same responses.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dora_rl.apps import run_reader
from dora_rl.apps.log_level import LogLevel, log_to_stderr
from dora_rl.apps.output_file import check_writable
from dora_rl.apps.summary import wilson
from dora_rl.apps.train import read_config
from dora_rl.core.errors import RequestError, UserError
from dora_rl.core.types import Version
from dora_rl.runtime.packages import need_packages
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from dora_rl.engine.engine import Engine
    from dora_rl.runtime.config import RunConfig


class Evaluation(NamedTuple):
    """What is evaluated, with which settings, and where the result is written."""

    config: RunConfig
    base: Path
    """Folder that relative paths start from."""
    model: Path | str
    version: Version
    out: Path


class Response(NamedTuple):
    """One response; it has no reward if it failed."""

    prompt: int
    tokens: int
    reward: float | None


def evaluate(
    policy: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="Folder of a run, or a model.")],
    config: Annotated[Path | None, typer.Option(help="Config with data and rewards; required for a model.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Version of the run; default: the newest.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Responses per prompt; default: as in the config.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the result to.")] = None,
    log_level: LogLevel = None,
) -> None:
    """Evaluate a run's policy, or a model, on held-out prompts."""
    log_to_stderr(log_level)
    need_packages()
    evaluation = _evaluation(policy, config, version, json_file)
    if not evaluation.config.reward.functions:
        raise UserError(
            "'reward.functions' is empty: eval scores single responses with reward functions and does not run the "
            "environment; give a config that names some with --config FILE"
        )
    check_writable(evaluation.out, folders=True)
    count = samples or evaluation.config.evaluation.samples
    result = summary(respond(evaluation, count), evaluation.config.evaluation.success_threshold, count)
    result = {"policy": str(evaluation.model), "version": evaluation.version, **result}
    evaluation.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print_result(result, evaluation)


def summary(responses: list[Response], success_threshold: float, samples: int) -> dict[str, Any]:
    """The metrics; a response without a reward counts as wrong."""
    by_prompt: dict[int, list[bool]] = {}
    for one in responses:
        by_prompt.setdefault(one.prompt, []).append(one.reward is not None and one.reward >= success_threshold)
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
    """Wilson's 95% interval. Responses to one prompt are correlated, so their number is reduced to an effective one."""
    mean = statistics.fmean(means)
    prompts = len(means)
    spread = statistics.variance(means) / prompts if prompts > 1 else 0.0
    binomial = mean * (1 - mean)
    effective = binomial / spread if spread else prompts * samples if binomial else prompts
    return wilson(mean, min(max(effective, prompts), prompts * samples))


# -- what is evaluated ----------------------------------------------------------------------------------------------


def _evaluation(policy: str, config: Path | None, version: Version | None, out: Path | None) -> Evaluation:
    if run_reader.is_run(Path(policy)):
        return _of_run(RunDir.open(policy), config, version, out)
    if config is None:
        raise UserError(
            f"'{policy}' is not the folder of a run; to evaluate a model, give data and rewards with --config FILE"
        )
    if version is not None:
        raise UserError("a model has no versions: leave out --version, or name the folder of a run")
    name = Path(policy).name or policy
    return Evaluation(read_config(config, []), config.resolve().parent, policy, 0, out or Path(f"eval-{name}.json"))


def _of_run(folder: RunDir, config: Path | None, version: Version | None, out: Path | None) -> Evaluation:
    own = folder.read()
    settings, base = (own, folder.base()) if config is None else (read_config(config, []), config.resolve().parent)
    found: dict[Version, Path | str] = {**run_reader.policies(folder), 0: _beside(own.model.path, folder.base())}
    chosen = max(found) if version is None else version
    if chosen not in found:
        have = ", ".join(map(str, sorted(found)))
        raise UserError(f"{folder.path} has no checkpoint of version {chosen}; it has: {have}")
    out = out or folder.path / "evaluations" / f"version-{chosen:08d}.json"
    return Evaluation(settings, base, found[chosen], chosen, out)


def _beside(path: str, base: Path) -> str:
    """A model's path, relative to the folder of the run's config; otherwise its name on the hub."""
    local = base / path
    return str(local) if local.exists() else path


# -- generating and scoring -------------------------------------------------------------------------------------


def respond(evaluation: Evaluation, samples: int) -> list[Response]:
    """Sample responses to each held-out prompt and score them."""
    from dora_rl.engine.engine import Engine
    from dora_rl.envs.rewards import RewardScorer
    from dora_rl.models.loading import load
    from dora_rl.models.sources import MemoryWeights
    from dora_rl.runtime.supervisor.held_out import held_out_problems
    from dora_rl.runtime.tokenization import Tokenization

    config = evaluation.config
    held_out = held_out_problems(config, evaluation.base)
    scorer = RewardScorer(config.reward, evaluation.base)
    model = config.model.model_copy(update={"path": str(evaluation.model)})
    loaded = load(model)
    text = Tokenization(loaded.tokenizer, config.model_copy(update={"model": model}))
    engine_config = config.rollout.engine.model_copy(update={"slots": 1})
    engine = Engine(
        loaded.model, MemoryWeights.of(loaded.model, evaluation.version), engine_config, tokenizer=loaded.tokenizer
    )
    engine.load(0, evaluation.version)
    engine.wait_for_loads()
    generated = _generate(engine, evaluation, [text.encode(problem) for problem in held_out], text.stop_ids, samples)
    responses = []
    for number, tokens in enumerate(generated):
        problem = held_out[number // samples]
        result = None if tokens is None else scorer.score(problem, text.decode(tokens), tuple(tokens))
        reward = None if result is None else result.reward
        responses.append(Response(number // samples, len(tokens or ()), reward))
    return responses


def _generate(
    engine: Engine, evaluation: Evaluation, prompts: list[tuple[int, ...]], stop_ids: tuple[int, ...], samples: int
) -> list[array[int] | None]:
    """The tokens of each response; None if the engine can't serve the request."""
    from dora_rl.engine.requests import Request
    from dora_rl.runtime.supervisor.held_out import first_trajectory

    sampling = evaluation.config.request_sampling(stop_ids, temperature=evaluation.config.evaluation.temperature)
    count = len(prompts) * samples
    first = first_trajectory(evaluation.version, count)
    responses: dict[int, array[int]] = {}
    for number in range(count):
        prompt = prompts[number // samples]
        request = Request(trajectory=first + number, version=evaluation.version, prompt=prompt, sampling=sampling)
        with contextlib.suppress(RequestError):
            engine.submit(request, 0)
            responses[number] = array("i")
    columns = (TextColumn("eval"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(responses))
        while engine.busy:
            output = engine.step()
            for chunk in output.chunks:
                responses[chunk.trajectory - first].frombytes(chunk.token_data)
            bar.advance(task, len(output.finished))
    return [responses.get(number) for number in range(count)]


def _print_result(result: dict[str, Any], evaluation: Evaluation) -> None:
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
        f"reward {result['reward']:.3f}  {result['mean_tokens']:.0f} tokens per response  failed {result['failed']}",
        highlight=False,
        markup=False,
    )
    console.print(f"result: {evaluation.out}", highlight=False, markup=False)
