"""Checks whether TRL's asynchronous GRPO with a vLLM server runs unmodified on this machine: its speed, or the error.

    python -m benchmarks.trl_async [--quick]

The server is `vllm serve` from the environment of $VLLM_PYTHON, the trainer is that of $TRL_PYTHON; neither is
changed. If one of them fails, its last error is the reported reason. The job is the quickstart's with a light tail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.progress import tick
from benchmarks.report import publish, shown
from benchmarks.training import JOBS, TRL, _for_trl, _resolved, _rows

ROOT = Path(__file__).parent.parent
VLLM = os.environ.get("VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
PORT = 18611
START_UP = 180.0
"""Seconds that the server may take to start; where it works, it takes half a minute."""
TRAINING = 180.0
STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.parse_args()
    missing = [python for python in (TRL, VLLM) if not Path(python).exists()]
    if missing:
        publish("trl_async", [], {"not run": f"there is no {shown(missing[0])}: `make bench` creates it"}, quiet=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        publish("trl_async", [], _try(Path(folder)), quiet=True)


def _try(out: Path) -> dict[str, Any]:
    job = JOBS["light"]
    config = _resolved(job, STEPS)
    (out / "data.jsonl").write_text("\n".join(map(json.dumps, _rows(config, job.config.parent, 0))))
    (out / "settings.json").write_text(json.dumps(_for_trl(job, config, 0, [], out)))
    tick(0, 2, "starting `vllm serve`")
    command = [VLLM, "-m", "vllm.entrypoints.cli.main", "serve", config.model.path, "--port", str(PORT)]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1040"]
    server = _begin([*command, *options], out / "server.log")
    try:
        if not _serves(server):
            return {"not run": f"`vllm serve` did not start: {_reason(out / 'server.log')}"}
        tick(1, 2, "training")
        script = Path(__file__).parent / "peers" / "trl_async_run.py"
        address = f"http://localhost:{PORT}"
        trainer = _begin([TRL, str(script), str(out / "settings.json"), address], out / "trainer.log")
        try:
            code: int | None = trainer.wait(TRAINING)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(trainer)
    finally:
        _end(server)
    log = (out / "trainer.log").read_text(errors="replace")
    steps = [json.loads(line[5:]) for line in log.splitlines() if line.startswith("STEP ")]
    if code or not steps:
        reason = _reason(out / "trainer.log") if code else f"no step finished in {TRAINING:.0f} s"
        return {"not run": f"`AsyncGRPOTrainer` failed: {reason}"}
    return {"steps": steps, "seconds a step": steps[-1]["seconds"] / steps[-1]["step"]}


def _begin(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _serves(server: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + START_UP
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://localhost:{PORT}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    return False


def _reason(log: Path) -> str:
    """The last error in a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception|NotFound)\b", line)]
    found = (errors or lines or ["it printed nothing"])[-1]
    return re.sub(r"^.*?(?=\b[\w.]*(Error|Exception|NotFound)\b)", "", found)[:300]


if __name__ == "__main__":
    main()
