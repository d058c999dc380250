"""Traces of runs: valid under faults, complete, with the sums of the report, and the same in a window."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora_rl.apps import run_reader
from dora_rl.apps.cli import app
from dora_rl.apps.event_log import read_log
from dora_rl.apps.export import parse_window
from dora_rl.apps.exports.perfetto import PerfettoWriter, Window
from dora_rl.apps.exports.trace import RunTracks, write_trace
from dora_rl.apps.log_state import LogState
from dora_rl.apps.run_reader import open_ledger
from dora_rl.apps.summary import shares, summarise, totals, worker_id
from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import UserError
from dora_rl.core.types import SECOND, InstanceSpec, Prompt, SlotId
from dora_rl.ledger.ledger import Ledger
from dora_rl.runtime.run_dir import RunDir
from dora_rl.sim.chaos import ChaosRuntime
from tests.apps.conftest import STEPS, MadeRun
from tests.apps.perfetto_reader import Slice, TraceFile, read_trace
from tests.schedules import run_schedule


@pytest.fixture(scope="module")
def trace(made_run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> TraceFile:
    return exported(made_run.folder, tmp_path_factory.mktemp("trace"))


def exported(folder: RunDir, out: Path, start: float | None = None, end: float | None = None) -> TraceFile:
    write_trace(folder, out / "run.pftrace", start, end)
    return read_trace(out / "run.pftrace")


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "100"})


# -- a real run -------------------------------------------------------------------------------------------------


def test_the_time_of_each_slot_adds_up_to_its_lifetime(made_run: MadeRun, trace: TraceFile) -> None:
    windows = run_reader.read_activity(made_run.folder).windows
    lifetimes = Counter[str]()
    for window in windows:
        lifetimes[worker_id(window.who)] += window.end - window.start
    assert {"i0/0", "i1/0", "trainer"} <= lifetimes.keys()
    for name, lifetime in lifetimes.items():
        path = (name,) if name == "trainer" else (name.partition("/")[0], name)
        assert sum(one.length for one in trace.on(*path)) == lifetime


def test_the_time_by_cause_is_that_of_the_report(made_run: MadeRun, trace: TraceFile) -> None:
    def spent(slices: list[Slice]) -> Counter[str]:
        found = Counter[str]()
        for one in slices:
            found[one.name if one.name.startswith("idle: ") else one.name.split(" ")[0]] += one.length
        return found

    summary = summarise(made_run.folder)
    slots = spent([one for one in trace.slices if len(one.path) == 3 and "/" in one.path[2]])
    assert slots == totals(run_reader.read_activity(made_run.folder).windows)[0]
    assert shares(slots) == summary.slots
    assert shares(spent(trace.on("trainer"))) == summary.trainer


def test_every_trajectory_version_and_step_is_in_the_trace(made_run: MadeRun, trace: TraceFile) -> None:
    with open_ledger(made_run.folder) as ledger:
        rows = ledger.execute(
            'SELECT id, "group", version, tokens FROM trajectories WHERE tokens IS NOT NULL'
        ).fetchall()
    assert rows
    requests = [one for one in trace.slices if one.path[-1] == "requests" and one.depth == 0]
    done = {one.arguments["trajectory"]: one for one in requests if one.arguments.get("outcome") == "generated"}
    for trajectory, group, version, tokens in rows:
        found = done[trajectory]
        assert (found.arguments["group"], found.name, found.arguments["response tokens"]) == (
            group,
            f"v{version}",
            tokens,
        )
        assert found.colour == f"version {version}"
    assert sorted(one.name for one in trace.on("versions")) == [f"v{version}" for version in range(STEPS + 1)]
    assert [one.name for one in trace.on("steps")] == [f"step {step}" for step in range(STEPS)]
    metrics = run_reader.read_metrics(made_run.folder).steps
    for step, slice_ in enumerate(trace.on("steps")):
        assert slice_.arguments["reward/mean"] == metrics[step]["reward/mean"]


def test_a_request_runs_while_its_slot_serves_its_version(trace: TraceFile) -> None:
    requests = [one for one in trace.slices if one.path[-1] == "requests" and one.depth == 0]
    assert requests
    for request in requests:
        weights = trace.on(*request.path[1:-1], "weights")
        assert any(one.name == request.name and one.start <= request.start <= request.end <= one.end for one in weights)


def test_the_restart_after_an_interrupt_is_a_fault(trace: TraceFile) -> None:
    kinds = Counter((name, arguments["what"]) for name, _, arguments in trace.instants)
    assert kinds["trainer lost", "trainer"] == 1
    assert kinds["instance lost", "i0.1"] == 1
    assert "trajectory failed" in {name for name, _ in kinds}, "the reward raises for some responses"


def test_counters_end_where_a_finished_run_ends(made_run: MadeRun, trace: TraceFile) -> None:
    last = {path[-1]: values[-1][1] for path, values in trace.counters.items() if len(path) == 2}
    assert (last["live versions"], last["requests"], last["untrained groups"]) == (0, 0, 0)
    assert last["staleness bound"] == 2
    assert {path[1] for path in trace.counters if path[-1] == "KV tokens in use"} == {"i0", "i1"}
    times, rates = zip(*trace.counters[trace.slices[0].path[0], "generated tokens/s"], strict=True)
    assert list(times) == sorted(times)
    with open_ledger(made_run.folder) as ledger:
        (tokens,) = ledger.execute("SELECT sum(tokens) FROM trajectories").fetchone()
    assert sum(rates) / 2 == pytest.approx(tokens), "samples are half a second apart"


# -- windows ----------------------------------------------------------------------------------------------------


def clipped(trace: TraceFile, start: int, end: int) -> Counter[tuple[Any, ...]]:
    """What a window shows of all slices that are longer than nothing."""
    found = Counter[tuple[Any, ...]]()
    for one in trace.slices:
        first, last = max(one.start, start), min(one.end, end)
        if first < last:
            found[one.path, one.name, one.depth, one.colour, first, last] += 1
    return found


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.4), (0.3, 0.6), (0.55, 1.0)])
def test_a_window_is_a_part_of_the_whole(
    made_run: MadeRun, trace: TraceFile, tmp_path: Path, first: float, last: float
) -> None:
    whole = max(one.end for one in trace.slices)
    start, end = round(first * whole), round(last * whole)
    part = exported(made_run.folder, tmp_path, start / SECOND, end / SECOND)
    assert clipped(part, start, end) == clipped(trace, start, end)
    assert min(one.start for one in part.slices) >= start
    assert max(one.end for one in part.slices) <= end
    times = [at for _, at, _ in part.instants] + [at for values in part.counters.values() for at, _ in values]
    assert start <= min(times)
    assert max(times) <= end
    assert Counter(part.instants[i][0] for i in range(len(part.instants))) == Counter(
        name for name, at, _ in trace.instants if start <= at <= end
    )


def test_a_window_starts_with_the_counts_of_that_moment(made_run: MadeRun, trace: TraceFile, tmp_path: Path) -> None:
    root = trace.slices[0].path[0]
    values = trace.counters[root, "untrained groups"]
    at = values[len(values) // 2][0] + 1
    part = exported(made_run.folder, tmp_path, at / SECOND)
    start = round(at / SECOND * SECOND)
    expected = [value for when, value in values if when < start][-1]
    assert part.counters[root, "untrained groups"][0] == (start, expected)


# -- runs that go on, or were killed ----------------------------------------------------------------------------


def test_windows_that_overlap_after_a_kill_are_all_there(made_run: MadeRun, tmp_path: Path) -> None:
    """A killed supervisor may have written windows after the last event on disk, where the next one goes on."""
    folder = RunDir(shutil.copytree(made_run.folder.path, tmp_path / "copy"))
    lines = [
        {"who": "trainer", "start": 0, "end": 100, "shares": [["train", 0, "", 70], ["idle", 0, "rollout", 30]]},
        {"who": "trainer", "start": 100, "end": 200, "shares": [["idle", 0, "rollout", 100]]},
        {"who": "trainer", "start": 150, "end": 260, "shares": [["idle", None, "starting", 110]]},
        {"who": "trainer", "start": 260, "end": 300, "shares": [["publish", 1, "", 40]]},
        {"who": "i0.1/0", "start": 0, "end": 100, "shares": [["decode", 0, "", 100]]},
        {"who": "i0.2/0", "start": 130, "end": 140, "shares": [["decode", 0, "", 10]]},
    ]
    folder.activity.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"who": "trainer", "sta')
    found = exported(folder, tmp_path)
    assert sorted((one.name, one.start, one.end) for one in found.on("trainer")) == [
        ("idle: rollout", 70, 200),
        ("idle: starting", 150, 260),
        ("publish v1", 260, 300),
        ("train step 0", 0, 70),
    ]
    # Between two processes of an instance there is nothing.
    assert [(one.start, one.end) for one in found.on("i0", "i0/0")] == [(0, 100), (130, 140)]


def test_a_run_that_goes_on_is_exported_up_to_now(made_run: MadeRun, tmp_path: Path) -> None:
    """Half of the log of a run: requests and versions that are open end with the trace, and say so."""
    folder = RunDir(shutil.copytree(made_run.folder.path, tmp_path / "copy"))
    folder.activity.unlink()
    with sqlite3.connect(folder.ledger) as ledger:
        group = "SELECT seq FROM events WHERE CAST(commands AS TEXT) LIKE '%\"StartGroup\"%' LIMIT 1"
        ledger.execute(f"DELETE FROM events WHERE seq > ({group})")
    ledger.close()
    found = exported(folder, tmp_path)
    requests = [one for one in found.slices if one.path[-1] == "requests"]
    assert requests
    assert all(one.arguments["still open"] for one in [*requests, *found.on("versions")])


# -- under faults -----------------------------------------------------------------------------------------------


class FollowedRuntime(ChaosRuntime):
    """Compares the state from the log with the orchestrator after each event."""

    followed: LogState | None = None

    def deliver(self, event: e.Event) -> None:
        super().deliver(event)
        self.followed = state = self.followed or LogState(self.config.group_size)
        logged, at, commands = self.log[-1]
        state.apply(logged, commands, at)
        snapshot = self.orchestrator.snapshot()
        assert state.running == self.orchestrator.requests_by_version
        assert state.waiting == snapshot.waiting
        assert Counter(state.untrained.values()) == snapshot.untrained
        assert state.newest == snapshot.newest
        assert {
            slot: (one.version, one.loading, len(one.requests), len(one.incoming)) for slot, one in state.slots.items()
        } == {one.slot: (one.version, one.loading, one.requests, one.incoming) for one in snapshot.slots}


@pytest.mark.parametrize("block", range(4))
def test_the_state_from_the_log_is_that_of_the_orchestrator(block: int) -> None:
    for seed in range(block * 20, (block + 1) * 20):
        run_schedule(seed, kind=FollowedRuntime)


def test_a_late_report_of_a_lost_trainer_publishes_nothing() -> None:
    state = LogState(1)
    state.apply(e.TrainerReady(version=0), [c.Publish(version=0, attempt=1)], 0)
    state.apply(e.TrainerLost(), [], 1)
    state.apply(e.Published(version=0, attempt=1, fingerprint=""), [], 2)
    assert state.newest is None
    state.apply(e.TrainerReady(version=0), [c.Publish(version=0, attempt=2)], 3)
    state.apply(e.Published(version=0, attempt=1, fingerprint=""), [], 4)
    assert state.newest is None
    state.apply(e.Published(version=0, attempt=2, fingerprint=""), [], 5)
    assert state.newest == 0


def chaos_run(folder: Path, seed: int, mode: Any = None) -> tuple[RunDir, ChaosRuntime]:
    """The run directory of a schedule with faults, without activity."""
    runtime = run_schedule(seed, mode)
    folder.mkdir()
    control = json.loads(runtime.config.model_dump_json())
    (folder / "config.json").write_text(json.dumps({"base": str(folder), "config": {"control": control}}))
    made = RunDir(folder)
    ledger = Ledger(made.ledger, runtime.config.group_size)
    for event, at, commands in runtime.log:
        ledger.log(event, commands, at)
    ledger.close()
    return made, runtime


def test_traces_are_valid_under_faults_and_show_every_move(tmp_path: Path) -> None:
    moved = faults = tools = 0
    for seed in (2, 3, 13, 14, 37, 55):
        folder, runtime = chaos_run(tmp_path / str(seed), seed)
        found = exported(folder, tmp_path)
        for source, target in found.arrows:
            assert source.name == f"move to {'/'.join(target.path[2:3])}"
            assert source.end == target.start
            inside = [one for one in found.slices if one.track == source.track and one.depth == 0]
            request = next(one for one in inside if one.start <= source.start and source.end <= one.end)
            assert request.arguments["trajectory"] == target.arguments["trajectory"]
            assert request.arguments["outcome"] == f"moved to {target.path[2]}"
        outcomes = Counter(one.arguments["outcome"].split(" ")[0] for one in found.slices if "outcome" in one.arguments)
        assert outcomes["moved"] == len(found.arrows)
        moved += len(found.arrows)
        faults += len(found.instants)
        tools += sum(one.name == "waits for its environment" for one in found.slices)
        failed = sum(isinstance(one, c.FailTrajectory) for _, _, commands in runtime.log for one in commands)
        assert sum(name == "trajectory failed" for name, _, _ in found.instants) == failed
    assert moved > 10
    assert faults > 10
    assert tools > 10


def test_new_weights_under_a_request_split_its_slice(tmp_path: Path) -> None:
    """In mode `partial` the colour of a request is that of the version that generates it."""
    folder, _ = chaos_run(tmp_path / "partial", 4, "partial")
    found = exported(folder, tmp_path)
    split = [one for one in found.slices if one.arguments.get("outcome") == "continues under new weights"]
    assert split
    for one in split:
        (after,) = (
            other
            for other in found.slices
            if other.start == one.end
            and other.depth == 0
            and other.arguments.get("trajectory") == one.arguments["trajectory"]
            and (other.end, other.name) != (one.end, one.name)
        )
        assert int(after.name[1:]) > int(one.name[1:])


# -- memory -----------------------------------------------------------------------------------------------------


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def long_log(groups: int) -> Iterator[tuple[e.Event, list[c.Command]]]:
    slot = SlotId("i0.1", 0)
    yield e.InstanceJoined(spec=InstanceSpec(instance="i0.1", max_requests=4, kv_tokens=100)), []
    yield e.TrainerReady(version=0), [c.Publish(version=0, attempt=1)]
    yield e.Published(version=0, attempt=1, fingerprint=""), [c.LoadVersion(slot=slot, version=0)]
    yield e.SlotLoaded(slot=slot, version=0, fingerprint=""), []
    for group in range(groups):
        yield e.Tick(), [c.StartGroup(group=group, prompt=Prompt(key=str(group)), version=0, slot=slot)]
        yield e.Progress(instance="i0.1", kv_tokens=group % 7, tokens={group: 5}), []
        generated = e.Generated(
            trajectory=group, attempt=0, instance="i0.1", version=0, fingerprint="", tokens=9, kv_tokens=0
        )
        yield generated, [c.Score(trajectory=group)]
        failed = c.FailTrajectory(trajectory=group, reason=f"it was the {group}th")
        yield e.Tick(), [failed, c.GroupFailed(group=group, reasons=("one failed",))]


def test_memory_does_not_grow_with_the_run(made_run: MadeRun) -> None:
    def peak(groups: int) -> int:
        window = Window(0, groups * SECOND)
        tracemalloc.start()
        writer = PerfettoWriter(_Nowhere(), window)  # type: ignore[arg-type]
        state = LogState(1, RunTracks(writer, made_run.folder, window))
        for number, (event, commands) in enumerate(long_log(groups)):
            state.apply(event, commands, number * SECOND // 10)
            if number % 100 == 0:
                writer.close()
        writer.finish(state.at)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert writer.slices >= groups
        return found

    peak(10)  # imports and caches
    assert peak(400) < 1.3 * peak(100) + 20_000


# -- the command ------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_and_changes_nothing_in_the_run(made_run: MadeRun, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made_run.folder.path.rglob("*")}
    done = run("export", made_run.folder.path, "--to", "trace", tmp_path / "a.pftrace.gz", "--window", "0:1000")
    assert done.exit_code == 0, done.output
    assert "ui.perfetto.dev" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["a.pftrace.gz"]
    assert read_trace(tmp_path / "a.pftrace.gz").slices
    assert {path: path.stat().st_mtime_ns for path in made_run.folder.path.rglob("*")} == before


@pytest.mark.parametrize("text", ["", "5", "a:b", "5:x", "-1:3", "nan:", "3:3", "4:2", "1:2:3"])
def test_a_window_that_can_not_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--window"):
        parse_window(text)


def test_windows_in_seconds() -> None:
    assert parse_window("1.5:20") == (1.5, 20.0)
    assert parse_window("7:") == (7.0, None)
    assert parse_window(":7") == (None, 7.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda run, out: ["--window", "9e8:"], "the run lasted"),
        (lambda run, out: shutil.rmtree(out), "cannot write"),
        (lambda run, out: (run / "ledger.db").unlink(), "has not started"),
        (lambda run, out: (run / "ledger.db").write_bytes(b"x" * 5000), "ledger"),
        (lambda run, out: (run / "config.json").unlink(), "not a run directory"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_file(
    made_run: MadeRun, tmp_path: Path, change: Any, complaint: str
) -> None:
    folder = shutil.copytree(made_run.folder.path, tmp_path / "copy")
    out = tmp_path / "out"
    out.mkdir()
    options = change(folder, out)
    done = run("export", folder, "--to", "trace", out / "t", *(options if isinstance(options, list) else []))
    assert isinstance(done.exception, UserError)
    assert complaint in str(done.exception)
    assert not out.exists() or not any(out.iterdir())


def test_reading_the_log_goes_on_where_it_stopped(made_run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora_rl.apps.event_log._PAGE", 7)
    with open_ledger(made_run.folder) as connection:
        (count,) = connection.execute("SELECT count(*) FROM events").fetchone()
        numbers = [one.seq for one in read_log(connection)]
        assert numbers == list(range(1, count + 1))
        assert [one.seq for one in read_log(connection, after=count - 9)] == numbers[-9:]
