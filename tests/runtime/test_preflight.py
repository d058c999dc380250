"""The checks before a run directory is created: each mistake gives one sentence, and no files are left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from dora_rl.apps.train import start_run
from dora_rl.core.config import build
from dora_rl.core.errors import UserError
from dora_rl.core.os_processes import alive
from dora_rl.runtime import preflight, run_dir
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.making import PATIENCE, merged, settings

CODE = """
import os, signal, subprocess, time

def row(count=3):
    return [{"prompt": "1+1=", "answer": "2"}] * count

def nothing():
    return []

def long():
    return [{"prompt": "1" * length} for length in (5, 90, 5, 85)]

def tight():
    return [{"prompt": "1" * length} for length in (5, 40)]

def chats():
    return [{"prompt": [{"role": "user", "content": "1"}]}]

def raises(prompt, completion, answer):
    raise ValueError("never again")

def exits(prompt, completion, answer):
    os._exit(3)

def exits_high(prompt, completion, answer):
    os._exit(255)

def dies(prompt, completion, answer):
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(prompt, completion, answer):
    time.sleep(3600)

def says(prompt, completion, answer):
    return "1.0"

def picky(prompt, completion, answer):
    if completion == answer:
        raise ValueError("too good to be true")
    return 0.5

def starts(prompt, completion, answer):
    process = subprocess.Popen(["sleep", "3600"])
    with open(os.environ["PID_FILE"], "w") as file:
        file.write(str(process.pid))
    return 1.0

class Broken:
    def reset(self, problem):
        raise RuntimeError("no world")
    def step(self, text):
        return None, 0.0, True

class Sound(Broken):
    def reset(self, problem):
        return "begin"
"""
BROKEN = "import nothing_of_this_name\n"


@pytest.fixture
def job(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base / "model", tmp_path / "model")
    shutil.copy(base / "task.py", tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "columns.jsonl").write_text('{"question": "1"}\n')
    (tmp_path / "torn.jsonl").write_text('{"prompt": "1"}\n{"prom')
    return tmp_path


def config(job: Path, other: dict[str, Any]) -> RunConfig:
    return build(RunConfig, merged(settings(job), other))


def refusal(job: Path, other: dict[str, Any]) -> str:
    """Return the error message, which must be one line; no directory may be created."""
    with pytest.raises(UserError) as raised:
        preflight.check(config(job, other), job)
    assert not (job / "runs").exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def reward(name: str, **more: Any) -> dict[str, Any]:
    return {"reward": {"functions": [name], "timeout_seconds": PATIENCE, **more}}


def environment(name: str) -> dict[str, Any]:
    return {"environment": {"kind": f"code.py:{name}"}, "reward": {"functions": []}}


MISTAKES = [
    ({"data": {"source": "nope.jsonl"}}, "nope.jsonl: No such file"),
    ({"data": {"source": "torn.jsonl"}}, "line 2 is not JSON"),
    ({"data": {"source": "columns.jsonl"}}, "set data.prompt to one of question"),
    ({"data": {"source": "code.py:nothing"}}, "has no rows"),
    ({"data": {"source": "code.py:row", "held_out": 3}}, "leaves none to train"),
    ({"data": {"source": "code.py:long"}}, "2 of 4 prompts leave no room for a response"),
    ({"data": {"source": "code.py:chats"}}, "has no chat template"),
    ({"evaluation": {"every": 1}}, "there are no held-out prompts"),
    ({"evaluation": {"every": 1, "data": {"source": "nope.jsonl"}}}, "nope.jsonl: No such file"),
    ({"model": {"path": "/no/such/model"}}, "there is no folder /no/such/model"),
    ({"model": {"path": "./nope.gguf"}}, "there is no file ./nope.gguf"),
    ({"logging": {"wandb": "x"}}, "'logging.wandb': the package is missing: pip install wandb"),
    ({"model": {"device": "mps"}}, "device 'mps' is not available"),
    (reward("code.py:raises"), "of the reward on the first problem failed: raises: ValueError: never again"),
    (reward("code.py:exits"), "ended its process (exit status 3)"),
    (reward("code.py:exits_high"), "ended its process (exit status 255)"),
    (reward("code.py:dies"), "ended its process (SIGSEGV: the last words)"),
    (reward("code.py:hangs", timeout_seconds=0.5), "of the reward on the first problem took longer than 0.5 s"),
    (reward("code.py:says"), "says returned str, not a number"),
    (reward("code.py:missing"), "code.py has no 'missing'"),
    (reward("broken.py:reward"), "No module named 'nothing_of_this_name'"),
    (reward("exactly"), "reward 'exactly' is unknown"),
    (
        environment("Broken"),
        "of the environment on the first problem failed: environment, reset: RuntimeError: no world",
    ),
    (environment("Missing"), "code.py has no 'Missing'"),
]


@pytest.mark.parametrize(("other", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_gives_one_sentence_and_leaves_no_directory(job: Path, other: dict[str, Any], message: str) -> None:
    assert message in refusal(job, other)


@pytest.mark.parametrize("dry_run", [False, True])
def test_runs_and_dry_runs_are_checked_before_the_run_directory_is_created(job: Path, *, dry_run: bool) -> None:
    with pytest.raises(UserError, match="never again"):
        start_run(config(job, reward("code.py:raises")), job, None, dry_run=dry_run, trial=True)
    assert not (job / "runs").exists()


def _removed(name: str) -> Any:
    return lambda model: [path.unlink() for path in model.glob(name)]


def _configured(**changed: Any) -> Any:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_removed("config.json"), "config.json: No such file"),
        (_removed("*.safetensors"), "there are no weights"),
        (_removed("tokenizer*"), "there is no tokenizer"),
        (lambda model: (model / "config.json").write_text("{"), "config.json is not JSON"),
        (_configured(model_type=None), "has no 'model_type'"),
        (_configured(model_type="perceptron"), "'model.path': cannot load"),
        (_configured(model_type="t5"), "'t5' is not a causal language model"),
    ],
)
def test_an_incomplete_or_unsupported_model_is_refused(job: Path, damage: Any, message: str) -> None:
    damage(job / "model")
    assert message in refusal(job, {})


def test_the_context_of_the_model_is_a_limit(job: Path) -> None:
    _configured(max_position_embeddings=6)(job / "model")
    message = refusal(job, {"control": {"max_response_tokens": 4}})
    assert "the context is 6 tokens" in message


def test_prompts_that_leave_little_room_give_a_notice(job: Path) -> None:
    notices: list[str] = []
    preflight.check(config(job, {"data": {"source": "code.py:tight"}}), job, notify=notices.append)
    assert notices == [
        (
            "note: 1 of 2 prompts leave less than 'control.max_response_tokens' = 48 tokens of the context of 80 for "
            "the response; the longest has 40"
        )
    ]


def test_only_a_limited_number_of_prompts_is_checked(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_MAX_PROMPTS", 1)
    assert "1 of 1 prompts that were checked" in refusal(job, {"data": {"source": "code.py:long"}})


@pytest.mark.parametrize("other", [reward("code.py:picky"), environment("Sound")], ids=["picky", "environment"])
def test_working_rewards_and_environments_are_accepted(job: Path, other: dict[str, Any]) -> None:
    """A reward function that fails on some completions only is accepted; the run handles such failures."""
    prepared = preflight.check(config(job, other), job)
    assert prepared.dataset.train
    assert not (job / "runs").exists()


def test_the_trial_can_be_skipped(job: Path) -> None:
    preflight.check(config(job, reward("code.py:raises")), job, trial=False)


def test_processes_that_a_trial_started_end_with_it(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PID_FILE", str(job / "pid"))
    preflight.check(config(job, reward("code.py:starts")), job)
    process = int((job / "pid").read_text())
    while alive(process):  # the signal has been sent; the timeout of the test limits this loop
        time.sleep(0.01)


# -- the output directory -----------------------------------------------------------------------------------------


def test_a_file_as_output_directory_is_refused(job: Path) -> None:
    (job / "file").touch()
    assert "can't write a run" in refusal(job, {"out": str(job / "file")})
    assert "can't write a run" in refusal(job, {"out": str(job / "file" / "runs")})


def test_an_output_directory_that_is_not_writable_is_refused(job: Path) -> None:
    message = refusal(job, {"out": "/proc/runs"})
    assert message.startswith("can't write a run to '/proc/runs': ")
    assert message.endswith("set 'out' to another directory (--out DIRECTORY)")


def test_a_full_disk_at_the_start_leaves_no_run_directory(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(run_dir, "sync", full)
    with pytest.raises(UserError, match="No space left on device"):
        RunDir.create(config(job, {}), job, "full")
    assert not (job / "runs" / "full").exists()


def test_an_invalid_run_name_is_refused_before_the_data_is_read(job: Path) -> None:
    with pytest.raises(UserError, match="can't be the name of a run"):
        start_run(config(job, {"data": {"source": "nope.jsonl"}}), job, "a/b", dry_run=False, trial=True)
