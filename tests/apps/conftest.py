"""A small real run: interrupted after its first step, then resumed in a terminal until its end."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dora_rl.apps.train import run_to_end
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.trial import _COMPLETION
from tests.trainer.factories import llama

STEPS = 5
# Some of the words that the model generates would end a script element, or start one.
WORDS = ["<end>", "one", "two", "three", "</script>", "<script>alert(1)", "<!--", "[bold]"]

CONFIG = f"""
[model]
path = "MODEL"
[data]
source = "problems.jsonl"
[reward]
functions = ["reward.py:reward"]
concurrency = 64
timeout_seconds = 600.0
[control]
mode = "dora"
max_staleness = 2
groups_per_step = 2
group_size = 2
steps = {STEPS}
max_response_tokens = 24
deadlines = {{ heartbeat = 600.0, score = 600.0 }}
[rollout]
instances = 2
[rollout.engine]
max_requests = 8
max_context = 64
kv_bytes = 4000000
host_bytes = 4000000
kernels = "torch"
[evaluation]
every = 5
samples = 2
success_threshold = 0.5
data = {{ source = "held_out.jsonl" }}
[logging]
tensorboard = false
"""

# Until the run is interrupted, only the groups of one step get rewards, so that the interrupt never falls into a step:
# the metrics of a step that was trained but not yet published would be lost with its supervisor. Held-out prompts begin
# with another word and never wait.
REWARD = """
import pathlib, threading, time

HERE = pathlib.Path(__file__).parent
first, lock = set(), threading.Lock()

def interrupted():
    return (HERE / "interrupted").exists()

def reward(prompt, completion, **_):
    if completion != TRIAL and prompt.startswith("one") and not interrupted():
        with lock:
            if len(first) < 2:
                first.add(prompt)
        while prompt not in first and not interrupted():
            time.sleep(0.01)
    if "two two" in completion and interrupted():
        raise ValueError("two [bold] twos")
    return completion.count("one") / max(1, len(completion.split()))
"""


@dataclass(frozen=True)
class MadeRun:
    """The run and its output."""

    folder: RunDir
    config: Path
    interrupted: str
    """Standard output up to the interrupt; not a terminal."""
    code: int
    """Exit code of the interrupted process."""
    screen: str
    """The output on a terminal of 80 columns from the resumption to the end."""
    watched: str
    """The output of `dora-rl watch`, from the first step until the run was interrupted."""
    watch_code: int
    """Its exit code."""


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    # Each worker of xdist has its own session; the first one makes the run for all.
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    home = shared / "made-run"
    with (shared / "made-run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "done.json").exists():
            _make(home)
    output = json.loads((home / "done.json").read_text())
    return MadeRun(RunDir.open(home / "runs" / "small"), home / "run.toml", *output)


def _make(home: Path) -> None:
    home.mkdir()
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(home / "model")
    llama(vocab_size=len(WORDS), eos_token_id=0).save_pretrained(home / "model")
    rows = [{"prompt": f"one {a} {b} {c}"} for a in WORDS[1:] for b in WORDS[1:] for c in WORDS[1:4]]
    (home / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    held_out = [{"prompt": f"two {a} {b}"} for a in WORDS[1:4] for b in WORDS[1:3]]
    (home / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    (home / "reward.py").write_text(f"TRIAL = {_COMPLETION!r}\n{REWARD}")
    (home / "run.toml").write_text(CONFIG.replace("MODEL", str(home / "model")))
    interrupted, code, *watched = _interrupted(home)
    (home / "done.json").write_text(json.dumps([interrupted, code, _resumed(home), *watched]))


def _interrupted(home: Path) -> tuple[str, int, str, int]:
    """Run until the first step is done and another process has seen it."""
    output = watched = ""
    watch_code = -1
    command = [sys.executable, "-m", "dora_rl.apps.cli", "train", "run.toml", "--name", "small"]
    options: dict[str, Any] = {"cwd": home, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if line.startswith("steps done 1/"):
                with subprocess.Popen([*command[:3], "watch", "runs/small"], **options) as watch:
                    assert watch.stdout is not None
                    watched = watch.stdout.readline()
                    process.send_signal(signal.SIGINT)
                    (home / "interrupted").touch()
                    watched += watch.stdout.read()
                watch_code = watch.returncode
    return output, process.returncode, watched, watch_code


def _resumed(home: Path) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=30, legacy_windows=False)
    run_to_end(RunDir.open(home / "runs" / "small"), console)
    return screen.getvalue()
