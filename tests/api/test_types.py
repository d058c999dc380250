"""A user's program passes `mypy --strict` against the installed package, and its mistakes are reported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = '''
from pathlib import Path

import dora_rl
from dora_rl import (
    STOP,
    Callback,
    Completion,
    Conservation,
    DoraConfig,
    Engine,
    EngineSession,
    GroupRow,
    Ledger,
    LoggedEvent,
    Orchestrator,
    Run,
    Sampling,
    SimulationResult,
    Simulator,
    UserError,
    commands,
    events,
    train,
)


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer)]


class EarlyStop(Callback):
    """A callback may also be any object with one of the methods."""

    def on_step(self, step: int, metrics: dict[str, float]) -> object:
        return STOP if metrics["reward/mean"] > 0.9 else None


class Follows:
    def on_publish(self, version: int) -> None:
        print(version)


class Environment:
    def reset(self, problem: object) -> str:
        return "go on"

    def step(self, text: str) -> tuple[str | None, float, bool]:
        return None, 1.0, True


config = DoraConfig.from_toml("run.toml", control={"steps": 3}, **{"trainer.optimiser.learning_rate": 1e-5})
try:
    run: Run = train(
        "Qwen/Qwen3-0.6B",
        [correct, "length", lambda completion: 1.0],
        [{"prompt": "1+1=", "answer": "2"}],
        config=config.replace(seed=1),
        environment=Environment,
        callbacks=[EarlyStop(), Follows()],
        out=Path("runs"),
        quiet=True,
    )
except UserError as error:
    raise SystemExit(str(error)) from error
run = dora_rl.train(resume=run.path, config={"control.steps": 9})
rewards: list[float] = [metrics["reward/mean"] for metrics in run.metrics]
policy: Path | None = run.policy_path
assert run.audit().ok, run.audit().lines

with Engine("Qwen/Qwen3-0.6B", max_versions=2, kv_tokens=1000, dtype="bfloat16") as engine:
    if policy is not None:
        engine.load_version(3, policy)
    greedy = Sampling(temperature=0, max_tokens=8, stop=("=",))
    answers: list[list[Completion]] = engine.generate(["1+1=", [1, 2], [{"role": "user", "content": "?"}]], greedy, n=2)
    best: float = max(sum(one.logprobs) for some in answers for one in some if one.finish_reason == "stop")
    with engine.session("1+1=", greedy, version=3, key=7) as session:
        turn: Completion = session.generate()
        session.extend("2")
        moved: EngineSession = session.move_to(engine)
        data: bytes = moved.export()

simulator = Simulator("laptop", steps=2, control={"max_staleness": 2})
result: SimulationResult = simulator.run("dora", timeline=True)
seconds: float = result.step_seconds * result.mean_staleness
speedup: float = simulator.compare("sync", "dora")["dora"].tokens_per_second

ledger: Ledger = run.ledger
count: Conservation = ledger.conservation()
stale: list[int] = [group.staleness for group in ledger.groups() if group.staleness is not None]
groups: dict[int, GroupRow] = {group.id: group for group in Ledger("runs/x").groups(step=1)}
orchestrator = Orchestrator(groups_per_step=1, group_size=1, max_response_tokens=1)
entry: LoggedEvent
for entry in ledger.events():
    answer: list[commands.Command] = orchestrator.step(entry.event, entry.at)
    for command in answer:
        match command:
            case commands.StartGroup(group=number, slot=slot):
                print(number, slot.instance)
            case commands.Apply(groups=several):
                print(len(several))
spec = events.InstanceSpec(instance="a", max_requests=1, kv_tokens=1)
orchestrator.step(events.InstanceJoined(spec=spec), 0)
'''

MISTAKES = """
from dora_rl import Callback, DoraConfig, Engine, Ledger, Run, Sampling, Simulator, events, train


class Wrong(Callback):
    def on_step(self, step: str, metrics: dict[str, float]) -> object:  # expect: override
        return None


run: int = train("model", "exact", [{"prompt": "1"}])  # expect: assignment
train("model", 5, [{"prompt": "1"}])  # expect: arg-type
train("model", "exact", reward="exact")  # expect: call-arg
DoraConfig.from_toml(3)  # expect: arg-type
Run.open("x").metric  # expect: attr-defined
engine = Engine("model", dtype="float8")  # expect: arg-type
text: str = engine.generate(["1"])[0]  # expect: assignment
engine.generate(["1"], Sampling(temperatur=1.0))  # expect: call-arg
engine.session("1").generate().logprob  # expect: attr-defined
Simulator("laptop").run("dora").step_time  # expect: attr-defined
lag: int = next(Ledger("x").groups()).staleness  # expect: assignment
events.Published(version=1, attempt=1)  # expect: call-arg
"""

SETTINGS = """
[mypy]
strict = True
cache_dir = cache
[mypy-torch.*,transformers.*,numpy.*,pydantic.*,pydantic_core.*,rich.*,typer.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
"""Large packages below ours are not read: what they add to the types of the API are models, tensors and arrays."""


def test_a_program_is_checked_against_the_types_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py", "mistakes.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1000)
    assert done.stderr == ""
    found = {
        (file, int(line), code)
        for file, line, code in re.findall(r"^(\S+?):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    }
    expected = {
        ("mistakes.py", number, line.partition("# expect: ")[2])
        for number, line in enumerate(MISTAKES.splitlines(), start=1)
        if "# expect: " in line
    }
    assert found == expected, done.stdout
    assert len(expected) == 13
