"""Fuzzes every parser of untrusted data: `python -m tests.fuzz --inputs 20000`.

An input is random bytes, or valid data with a few bytes changed, removed, duplicated or truncated. It must be read or
rejected with a typed error; anything else, a crash or a hang, is a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build, override, read_toml
from dora_rl.core.errors import BundleError, ConfigError, DoraError, IntegrityError, StoreError, TraceError, UserError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import InstanceSpec, Prompt, SlotId
from dora_rl.engine.kv import KvShape
from dora_rl.engine.kv_transfer.format import KvBundle, MovedRequest
from dora_rl.engine.requests import Request
from dora_rl.envs.data import Problem
from dora_rl.ledger.audit import audit
from dora_rl.ledger.auditor import Terms
from dora_rl.ledger.ledger import Ledger, LedgerError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel, ChannelError
from dora_rl.sim.workload import read_trace
from dora_rl.weights.store import WeightStore

Fuzz = Callable[[bytes], None]

# -- inputs -------------------------------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """Valid data with a few changes, or sometimes random bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.sampled_from([1, 1, 2, 8, 100]))
        match draw(st.sampled_from(["change", "cut", "double", "end"])):
            case "change":
                data[start : start + size] = draw(st.binary(min_size=1, max_size=size))
            case "cut":
                del data[start : start + size]
            case "double":
                data[start:start] = data[start : start + size]
            case _:
                del data[start:]
    return bytes(data)


# -- targets ------------------------------------------------------------------------------------------------------


def frames(data: bytes) -> None:
    """Frames on a channel, from a worker to the supervisor and back."""
    for kind in (m.FromWorker, m.ToWorker):
        ours, theirs = socket.socketpair()
        channel: Channel[m.Message] = Channel(ours, kind)  # type: ignore[arg-type]
        theirs.sendall(data)
        theirs.close()
        try:
            while not channel.closed:
                channel.receive()
        except ChannelError:
            pass
        finally:
            channel.close()


def valid_frames() -> bytes:
    slot = SlotId("i0.1", 0)
    messages: list[m.Message] = [
        m.RolloutReady(spec=InstanceSpec(instance="i0.1", slots=1, max_requests=4, kv_tokens=100), kernels="torch"),
        m.RolloutReport(
            chunks=(TokenChunk.of(1, [1], [0.0], version=0),),
            ended=(m.ResponseEnded(trajectory=1, attempt=0, reason="stop"),),
            events=(e.SlotLoaded(slot=slot, version=0, fingerprint="f" * 64), e.Progress(instance="i0.1", kv_tokens=3)),
        ),
        m.KvImported(move=1, arrived=(1, 2)),
        m.ScoreResult(item=1, reward=0.5, components={"a": 0.5}, failed=None),
        m.RunCommand(command=c.LoadVersion(slot=slot, version=3)),
        m.SubmitRequests(slot=0, requests=(Request(trajectory=1, version=0, prompt=(1, 2, 3)),)),
        m.ScoreRequest(item=1, problem=Problem(key="k", prompt="1+1=", answer="2"), completion="2", tokens=(3,)),
    ]
    ours, theirs = socket.socketpair()
    channel: Channel[m.Message] = Channel(ours, m.FromWorker)  # type: ignore[arg-type]
    for message in messages:
        channel.send(message)
    data = theirs.recv(1 << 20)
    ours.close()
    theirs.close()
    return data


def bundle(data: bytes) -> None:
    try:
        made = KvBundle.from_bytes(data)
        for frame in made.frames():
            assert frame.error is not None or frame.moved is not None
        made.trajectories()
    except BundleError:
        pass


def valid_bundle() -> bytes:
    shape = KvShape(1, 1, 4, 2, "float32")
    moved = [
        MovedRequest(
            request=Request(trajectory=number, version=0, prompt=(1, 2, 3), response=(4, 5)),
            fingerprint="f" * 64,
            computed=2,
            known=0,
            kv_shape=shape,
        )
        for number in range(2)
    ]
    made, _ = KvBundle.lay_out(moved, [64, 64], None)
    return made.to_bytes()


def config(folder: Path, data: bytes) -> None:
    path = folder / "config.toml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        build(RunConfig, override(read_toml(path), [data[:40].decode(errors="replace")]), str(path))
    with contextlib.suppress(ConfigError):
        build(RunConfig, read_toml(path), str(path))


VALID_CONFIG = b"""seed = 1
[model]
path = "m"
[data]
source = "task.py:problems"
[reward]
functions = ["exact"]
weights = [1.0]
[control]
mode = "dora"
max_staleness = 3
groups_per_step = 8
group_size = 8
max_response_tokens = 1024
[rollout.engine]
kv_bytes = 67108864
[trainer.optimiser]
learning_rate = 1e-3
"""


def run_folder(folder: Path, data: bytes) -> None:
    path = folder / "run"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes(data)
    with contextlib.suppress(UserError):
        RunDir.open(path).read()


def trace(folder: Path, data: bytes) -> None:
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    with contextlib.suppress(TraceError):
        read_trace(path)


VALID_TRACE = b'{"response_tokens": 12, "prompt_tokens": 3, "group": "a"}\n{"response_tokens": 7, "group": 2}\n'


def weights(folder: Path, data: bytes) -> None:
    store = WeightStore(folder / "weights", keep=9)
    store.path(0).write_bytes(data)
    try:
        with store.lease(0) as lease:
            lease.verify(lease.tensors())
    except (StoreError, IntegrityError):
        pass


def valid_weights(folder: Path) -> bytes:
    import torch

    from dora_rl.core.interfaces import TensorSpec

    store = WeightStore(folder / "made", keep=9)
    store.publish(0, [TensorSpec("w", "F32", (2, 3))], [torch.ones(2, 3)])
    return store.path(0).read_bytes()


def ledger(folder: Path, data: bytes) -> None:
    """An audit of a damaged ledger reports problems or finds none; opening the ledger raises only typed errors."""
    for left in folder.glob("ledger.db*"):
        left.unlink(missing_ok=True)
    path = folder / "ledger.db"
    path.write_bytes(data)
    audit(path, Terms(1, 2, 1, False, None))
    try:
        opened = Ledger(path, 2)
    except (LedgerError, IntegrityError):
        return
    try:
        opened.check_tables()
        for trajectory in range(4):
            opened.trajectory(trajectory)
    except DoraError:
        pass
    finally:
        opened.close()


def valid_ledger(folder: Path) -> bytes:
    """A ledger with rows in every table."""
    path = folder / "valid.db"
    made = Ledger(path, 2)
    slot, other = SlotId("i0.1", 0), SlotId("i1.1", 0)
    prompts = tuple(Prompt(key=f"prompt {number}", tokens=5) for number in range(40))
    at = 0
    lines: list[tuple[e.Event, list[c.Command]]] = [
        (e.PromptsArrived(prompts=prompts), [c.Publish(version=0, attempt=1)]),
        (
            e.Published(version=0, attempt=1, fingerprint="f" * 64),
            [c.StartGroup(group=number, prompt=prompts[number], version=0, slot=slot) for number in range(2)],
        ),
        (e.Tick(), [c.Move(trajectories=(0,), attempts=(0,), version=0, source=slot, target=other)]),
        (e.Moved(trajectories=(0,), attempts=(0,), source=slot, target=other), []),
        *((e.Progress(instance="i0.1", kv_tokens=number, tokens={0: number}), []) for number in range(40)),
        (e.Tick(), [c.Apply(step=0, attempt=1, groups=(0,))]),
    ]
    for event, commands in lines:
        at += 1_000_000
        made.append_tokens([TokenChunk.of(0, [1] * 8, version=0, start=at)] if at > 2_000_000 else [], [])
        made.log(event, commands, at)
    made.append_tokens([], [(0, "stop")])
    made.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    return path.read_bytes()


# -- running ------------------------------------------------------------------------------------------------------


def targets(folder: Path) -> dict[str, tuple[bytes, Fuzz]]:
    """Valid data to start from and the function to feed, by name of the target."""
    document = {"base": "/", "config": {"model": {"path": "m"}, "data": {"source": "s"}, "control": {"steps": 3}}}
    return {
        "frames and messages": (valid_frames(), frames),
        "bundles": (valid_bundle(), bundle),
        "configs": (VALID_CONFIG, functools.partial(config, folder)),
        "run folders": (json.dumps(document).encode(), functools.partial(run_folder, folder)),
        "traces": (VALID_TRACE, functools.partial(trace, folder)),
        "weights": (valid_weights(folder), functools.partial(weights, folder)),
        "ledgers": (valid_ledger(folder), functools.partial(ledger, folder)),
    }


def fuzz(valid: bytes, feed: Fuzz, inputs: int, seed: int = 0) -> None:
    """Feed this many inputs and raise the first finding, shrunk to its smallest form."""

    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        derandomize=seed == 0,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(mutated(valid))
    def fed(data: bytes) -> None:
        feed(data)

    fed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="for each target; ledgers get a tenth")
    options = parser.parse_args()
    console = Console()
    table = Table("fuzzed", "inputs", "seconds")
    folder = Path(tempfile.mkdtemp(prefix="dora-rl-fuzz-"))
    failed, total = 0, 0
    for name, (valid, feed) in targets(folder).items():
        inputs = options.inputs // 10 if name in ("ledgers", "weights") else options.inputs
        begin = time.monotonic()
        try:
            fuzz(valid, feed, inputs)
        except Exception as error:  # any exception is a finding
            failed += 1
            console.print(f"{name}: {type(error).__name__}: {error}", highlight=False, markup=False)
        total += inputs
        table.add_row(name, f"{inputs:,}", f"{time.monotonic() - begin:.0f}")
    shutil.rmtree(folder)
    console.print(table)
    console.print(f"{total:,} inputs, {failed} findings")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
