"""What `train` takes as objects reaches the metrics and samples of a real run: an environment, and named rewards."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_rl import Run, UserError, train
from dora_rl.api import training
from tests.api.conftest import children, small
from tests.api.rewards import brevity, odd_digits

ROWS = [{"prompt": f"{number}*2=", "number": number} for number in range(1, 40)]
BONUS = 0.25


def test_an_environment_is_given_as_a_class(job: Path) -> None:
    """A class that no worker can import, with a reward function for the last turn; it is found again on resumption."""
    limit = 2

    class Counts:
        """Asks `limit` times, and gives a quarter for each turn."""

        def __init__(self, worth: float) -> None:
            self.worth = worth

        def reset(self, problem: Any) -> str:
            self.turns = 0
            return f"{problem.columns['number']}1+"

        def step(self, text: str) -> tuple[str | None, float, bool]:
            self.turns += 1
            return (None, self.worth, True) if self.turns > limit else (f"{self.turns}*", self.worth, False)

    class Stop:
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            raise ArithmeticError

    before = children()
    settings = {"environment": {"max_turns": 4, "params": {"worth": BONUS}}, "logging.samples": 2}
    config = small(job, steps=2).replace(**settings, **{"sampling.stop": ["1", "2", "3"]})
    with pytest.raises(ArithmeticError):
        train(
            job / "model",
            [lambda completion: len(completion) / 100],
            ROWS,
            config=config,
            environment=Counts,
            callbacks=[Stop()],
            name="environment",
            quiet=True,
        )
    kind = json.loads((job / "runs" / "environment" / "config.json").read_text())["config"]["environment"]["kind"]
    assert Path(kind.rpartition(":")[0]).parent == job / "runs" / "environment" / "inputs"
    assert kind.endswith(".pickle:Counts")
    run = train(resume=job / "runs" / "environment", quiet=True)
    assert run.state == "finished"
    assert run.audit().ok
    assert children() == before
    samples = list(run.samples())
    assert len(samples) == 8
    for sample in samples:
        number = int(sample["prompt"].partition("*")[0])
        assert sample["response"].startswith(f"{number}1+")  # the opening
        turns = (sample["reward"] - sample["reward_components"]["lambda"]) / BONUS
        assert turns == pytest.approx(round(turns))
        assert 1 <= round(turns) <= limit + 1
    # The stop string in the opening does not end the first turn.
    first = [re.match("[^123]*", sample["response"].partition("1+")[2]) for sample in samples]
    assert any(found is not None and len(found[0]) > 1 for found in first)
    longest = [sample for sample in samples if "1*" in sample["response"] and "2*" in sample["response"]]
    assert longest, "no trajectory took a third turn"


def shaped(scale: float) -> Callable[..., Any]:
    def score(completions: list[str], **_: Any) -> list[dict[str, float]]:
        """The same name for each scale, with further values."""
        return [{"score": scale * len(text), "length": len(text), "scale": scale} for text in completions]

    return score


def brevity_of(number: int) -> Callable[..., Any]:
    def brevity(completion: str) -> float:
        """The name of another function."""
        return -len(completion) / number

    return brevity


@pytest.fixture(scope="module")
def rewarded(job: Path) -> Run:
    functions: list[Any] = [
        brevity_of(50),
        shaped(0.5),
        shaped(2.0),
        lambda completion: 0.125,
        odd_digits,
        brevity,
        "format:^1",
    ]
    config = small(job, steps=2).replace(**{"logging.samples": 2})
    return train(job / "model", functions, ROWS, config=config, name="rewards", quiet=True)


def test_every_function_has_its_own_name_in_metrics_and_samples(rewarded: Run) -> None:
    """The function that has an import path keeps its name; the others get one that no other has."""
    own = {"brevity_2", "score", "score_2", "lambda", "odd_digits", "brevity", "format:^1"}
    extras = {"score/length", "score/scale", "score_2/length", "score_2/scale", "brevity/number"}
    samples = list(rewarded.samples())
    for metrics in rewarded.metrics:
        # Both groups of a step are sampled, so the metrics can be computed from the samples.
        of_step = [sample for sample in samples if sample["step"] == metrics["step"]]
        assert len(of_step) == 4
        for sample in of_step:
            components, length = sample["reward_components"], len(sample["response"])
            assert components.keys() == own | extras
            assert sample["reward"] == pytest.approx(sum(components[name] for name in own))
            assert components["score"] == 0.5 * length
            assert components["score_2"] == components["score_2/scale"] * components["score_2/length"] == 2.0 * length
            assert components["brevity"] == -length / 200
            assert components["brevity_2"] == -length / 50
        for name in own | extras:
            tag = name.replace(":^", "_")
            values = [sample["reward_components"][name] for sample in of_step]
            assert metrics[f"reward/{tag}/mean"] == pytest.approx(statistics.fmean(values)), name
            assert metrics[f"reward/{tag}/std"] == pytest.approx(statistics.pstdev(values), abs=1e-9), name


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"control.steps": 1}, "the run was asked for 2 steps and can't be asked for fewer (1)"),
        ({"control": {"group_size": 4}}, "a run is resumed with the settings that it was started with; only 'rollout"),
        ({"seed": 5, "control.steps": 4}, "a run is resumed with the settings that it was started with"),
        ({"control.stepps": 4}, "unknown key 'control.stepps', did you mean 'control.steps'?"),
        ({"control.max_staleness": "auto"}, "'control.max_staleness' can't change between"),
        ({"runtime": "ray"}, "callbacks need 'runtime' = \"local\": on a cluster the supervisor is in another process"),
        ("control.steps=4", "`config` must be a DoraConfig or a mapping of settings, not str"),
    ],
    ids=str,
)
def test_a_change_that_the_command_refuses_is_refused_and_nothing_changes(
    rewarded: Run, config: Any, sentence: str
) -> None:
    class Callback:
        def on_publish(self, version: int) -> None: ...

    before = (rewarded.path / "config.json").read_bytes()
    with pytest.raises(UserError) as caught:
        train(resume=rewarded.path, config=config, callbacks=[Callback()], quiet=True)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (rewarded.path / "config.json").read_bytes() == before


def test_a_finished_run_goes_on_with_more_steps_and_other_instances(
    job: Path, rewarded: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `dora-rl train --resume RUN --control.steps 3 --rollout.instances 1 --control.max_staleness 1`."""
    changes = {"control": {"steps": 3, "max_staleness": 1}, "rollout.instances": 1}
    run = train(resume=rewarded.path, config=changes, quiet=True)
    assert [one["step"] for one in run.metrics] == [0, 1, 2]
    assert run.state == "finished"
    stored = run.ledger.settings
    assert (stored["control"]["steps"], stored["rollout"]["instances"]) == (2, 2)  # those that the run began with
    now = json.loads((run.path / "config.json").read_text())["config"]
    assert (now["control"]["steps"], now["rollout"]["instances"]) == (3, 1)
    assert now["control"]["max_staleness"] == 3  # another bound is an event
    kinds = [type(entry.event).__name__ for entry in run.ledger.events()]
    assert (kinds.count("StepsChanged"), kinds.count("BoundChanged")) == (1, 1)
    assert run.audit().ok
    # The whole configuration may be given too, with what has changed in it and a relative path of the model.
    again = small(job, steps=4).replace(**{"logging.samples": 2, "rollout.instances": 1, "model.path": "model"})
    monkeypatch.chdir(job)
    monkeypatch.setattr(training, "_run", lambda folder, *_, bound: (folder.read(), bound))
    resumed: Any = train(resume=rewarded.path, config=again, quiet=True)
    config, bound = resumed
    assert (config.control.steps, config.rollout.instances, bound) == (4, 1, 3)
