"""`dora_rl.train` with real runs: what goes in as objects, callbacks, stopping and resuming."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import dora_rl
from dora_rl import STOP, Run, train
from tests.api.conftest import children, small
from tests.api.rewards import Judge, brevity, odd_digits

ROWS = [{"prompt": f"{number}*2=", "number": number} for number in range(1, 40)]


class Recorder:
    """A callback that keeps what it was told, and stops after some step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.steps: dict[int, dict[str, float]] = {}
        self.versions: list[int] = []
        self.evaluated: list[int] = []
        self.samples: list[dict[str, Any]] = []
        self.checkpoints: list[int] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> object:
        self.steps[step] = dict(metrics)
        metrics.clear()  # its own copy
        return STOP if step == self.stop_after else None

    def on_publish(self, version: int) -> None:
        self.versions.append(version)

    def on_eval(self, version: int, metrics: dict[str, float]) -> None:
        assert "eval/held_out/reward" in metrics
        self.evaluated.append(version)

    def on_sample(self, sample: dict[str, Any]) -> None:
        self.samples.append(sample)

    def on_checkpoint(self, version: int, path: Path) -> None:
        assert path.name.startswith(f"version-{version:08d}")
        assert (path / "policy" / "model.safetensors").exists()
        self.checkpoints.append(version)


def functions_of(run: Run) -> list[str]:
    found: list[str] = json.loads((run.path / "config.json").read_text())["config"]["reward"]["functions"]
    return found


def test_a_run_from_objects_is_stopped_by_a_callback_and_resumed(
    job: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    recorder = Recorder(stop_after=1)
    config = small(job, steps=4).replace(evaluation={"every": 4}, **{"reward.weights": [1, 0.5]})
    run = train(
        job / "model",
        [odd_digits, brevity],
        iter(ROWS),
        config=config,
        eval_dataset=ROWS[:2],
        callbacks=[recorder],
        name="objects",
        quiet=True,
    )
    assert capfd.readouterr() == ("", "")
    assert children() == before
    assert run.state == "stopped"
    assert list(recorder.steps) == [0, 1]
    assert recorder.versions == [0, 1, 2]
    for record, (step, metrics) in zip(run.metrics, recorder.steps.items(), strict=True):
        assert record.items() >= {"step": step, **metrics}.items()
    assert list(run.samples()) == recorder.samples
    assert functions_of(run) == ["tests.api.rewards:odd_digits", "tests.api.rewards:brevity"]
    sample = recorder.samples[0]
    components = sample["reward_components"]
    assert sample["prompt"].startswith(f"{components['brevity/number']:.0f}*")
    assert sample["reward"] == pytest.approx(components["odd_digits"] + 0.5 * components["brevity"])

    rest = Recorder()
    resumed = train(resume=str(run.path), callbacks=[rest], quiet=True)
    assert (resumed.state, list(rest.steps)) == ("finished", [2, 3])
    assert [*recorder.evaluated, *rest.evaluated] == [0, 4]  # where the first one ended depends on the stop
    assert [one["step"] for one in resumed.metrics] == [0, 1, 2, 3]
    assert rest.checkpoints[-1] == 4
    assert max(recorder.checkpoints) < min(rest.checkpoints)
    assert [one["version"] for one in resumed.evaluations] == [0, 4]
    assert resumed.policy_path is not None
    assert "version-00000004" in str(resumed.policy_path)
    assert (resumed.policy_path / "model.safetensors").exists()
    assert resumed.summary().steps == 4
    assert resumed.report().read_text().startswith("<!")
    audit = resumed.audit()
    assert audit.ok, audit.lines
    assert audit.figures["trained"] == "8"
    assert audit.lines[-1] == audit.conclusion
    assert children() == before
    monkeypatch.chdir(run.path.parent)
    assert Run.open("objects").metrics == resumed.metrics


NOTEBOOK = """
class Fails:
    def on_step(self, step, metrics):
        raise ValueError("no more")

bonus = 0.25
def with_bonus(completions, **columns):
    return [bonus + len(text) / 100 for text in completions]

functions = [with_bonus, lambda prompts, completions, **_: [0.5] * len(prompts), Judge(0.125), lambda completion: 0.0]
try:
    train(model, functions, rows, config=config, tokenizer=tokenizer, callbacks=[Fails()], name="notebook", quiet=True)
except ValueError as error:
    caught = error
"""


def test_functions_of_a_notebook_are_stored_and_a_changed_one_is_never_executed(job: Path, tmp_path: Path) -> None:
    """A model in memory, functions without an import path, and a callback that raises."""
    import transformers

    t: Any = transformers
    before = children()
    names: dict[str, Any] = {
        "train": train,
        "Judge": Judge,
        "model": t.AutoModelForCausalLM.from_pretrained(job / "model"),
        "tokenizer": t.AutoTokenizer.from_pretrained(job / "model"),
        "rows": ROWS,
        "config": small(job, steps=2),
        "__name__": "__main__",
    }
    exec(NOTEBOOK, names)
    assert str(names["caught"]) == "no more"
    assert children() == before
    run = Run.open(job / "runs" / "notebook")
    assert run.state == "stopped"
    files = [Path(name.rpartition(":")[0]) for name in functions_of(run)]
    assert [name.rpartition(":")[2] for name in functions_of(run)] == ["with_bonus", "lambda", "Judge", "lambda_2"]
    assert {file.parent for file in files} == {run.path / "inputs"}

    content = files[0].read_bytes()
    trap = tmp_path / "executed"
    files[0].write_bytes(content[: content.index(b"\n") + 1] + f"cos\nmkdir\n(V{trap}\ntR.".encode())
    with pytest.raises(dora_rl.UserError, match="has changed since the run was started, and is not executed"):
        train(resume=run.path, quiet=True)
    assert not trap.exists()
    files[0].write_bytes(content)
    resumed = train(resume=run.path, quiet=True)
    assert resumed.state == "finished"
    assert resumed.audit().ok
    components = {name: value for one in resumed.samples() for name, value in one["reward_components"].items()}
    assert (components["lambda"], components["Judge"], components["lambda_2"]) == (0.5, 0.125, 0.0)
    assert children() == before


def test_a_script_without_a_guard_is_interrupted_and_goes_on(job: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(small(job).settings))
    script = Path(__file__).with_name("script.py")
    command = [sys.executable, str(script), str(job / "model"), "run.toml", "here"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1000)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
