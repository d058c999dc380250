"""Requests move with their KV; damage affects only the damaged request."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_rl.core.activities import ActivityLabel
from dora_rl.core.errors import BundleError
from dora_rl.engine.engine import Engine
from dora_rl.engine.kv_transfer.format import KvBundle
from dora_rl.engine.kv_transfer.shared_memory import PREFIX, RELEASED, STATE, SegmentPool
from dora_rl.models.sources import MemoryWeights
from tests.engine import tiny
from tests.engine.tiny import Collector, Response

COUNT = 6


def halfway(steps: int = 9, **config: Any) -> tuple[Engine, Collector]:
    engine = tiny.engine(tiny.model("llama"), **config)
    collector = Collector()
    for request in tiny.requests(COUNT, max_tokens=24):
        engine.submit(request)
    for _ in range(steps):
        collector.collect(engine.step())
    return engine, collector


def unmoved() -> dict[int, Response]:
    return tiny.run(tiny.engine(tiny.model("llama")), tiny.requests(COUNT, max_tokens=24)).responses


def test_bytes_carry_everything() -> None:
    source, collector = halfway()
    here = list(source.progress().tokens)
    assert len(here) > 2
    data = source.export(here, shared=False).to_bytes()
    collector.collect(source.drain())
    source.check()
    assert source.kv_tokens == 0
    assert source.slots[0].account.by_label()[ActivityLabel.MIGRATE] > 0
    target = tiny.engine(tiny.model("llama"), name="b")
    arrived, errors = target.import_(KvBundle.from_bytes(data), 0)
    assert arrived == tuple(here)
    assert not errors
    collector.run(target)
    assert collector.responses == unmoved()
    assert target.stats.prefilled <= 1 + sum(len(r.prompt) for r in tiny.requests(COUNT)) - source.stats.prefilled
    assert target.stats.reprefilled == 0


def test_shared_memory_between_processes(tmp_path: Path) -> None:
    source, collector = halfway()
    here = list(source.progress().tokens)
    bundle = source.export(here)
    collector.collect(source.drain())
    out = tmp_path / "said.json"
    program = f"""
import sys, msgspec
from dora_rl.engine.kv_transfer.format import KvBundle
from tests.engine import tiny
target = tiny.engine(tiny.model("llama"), name="b")
arrived, errors = target.import_(KvBundle.attach(sys.argv[1]), 0)
assert len(arrived) == {len(here)} and not errors, errors
chunks = []
while target.busy:
    chunks += target.step().chunks
assert target.stats.reprefilled == 0
open(sys.argv[2], "wb").write(msgspec.json.encode([[chunk.trajectory, chunk.tokens.tolist()] for chunk in chunks]))
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, bundle.name, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=root)
    assert done.returncode == 0, done.stderr
    # The importer has released the memory, so the next bundle reuses it; the engine removes it in the end.
    name = bundle.name
    assert bundle.memory[STATE] == RELEASED
    source.submit(tiny.requests(1, first=500)[0])
    source.step()
    assert source.export([500]).name == name
    del source, bundle
    gc.collect()
    assert not Path(name).exists(), "the shared memory was left behind"
    said = {key: list(one.tokens) for key, one in collector.responses.items()}
    for trajectory, tokens in msgspec.json.decode(out.read_bytes()):
        said[trajectory] = said.get(trajectory, []) + tokens
    assert said == {key: list(one.tokens) for key, one in unmoved().items()}


@pytest.mark.parametrize("place", ["header", "kv"])
def test_a_damaged_frame_affects_only_its_request(place: str) -> None:
    source, collector = halfway()
    here = list(source.progress().tokens)
    data = bytearray(source.export(here, shared=False).to_bytes())
    collector.collect(source.drain())
    bundle = KvBundle.from_bytes(data)
    kv = bundle.frames()[1].kv
    if place == "kv":
        kv[len(kv) // 2] ^= 1
    else:
        places = [at for at in range(len(data)) if data.startswith(b"trajectory", at)]
        bundle.memory[places[1] + 1] ^= 1
    target = tiny.engine(tiny.model("llama"), name="b")
    arrived, errors = target.import_(bundle, 0)
    assert arrived == tuple(one for one in here if one != here[1])
    assert len(errors) == 1
    # It continues from its tokens, and the re-prefill is counted.
    lost = tiny.requests(COUNT, max_tokens=24)[here[1]]
    told = collector.responses[here[1]].tokens
    computed = len(lost.prompt) + len(told) - 1
    target.submit(msgspec.structs.replace(lost, response=told, attempt=1))
    collector.run(target)
    assert collector.responses == unmoved()
    assert target.stats.reprefilled == computed


@pytest.mark.parametrize("cut", [4, 100, -10])
def test_a_truncated_bundle_is_refused(cut: int) -> None:
    source, _ = halfway()
    data = source.export(list(source.progress().tokens), shared=False).to_bytes()
    with pytest.raises(BundleError, match="cut off"):
        tiny.engine(tiny.model("llama")).import_(KvBundle.from_bytes(data[:cut]), 0)


def test_segments_of_killed_processes_are_removed_and_no_others() -> None:
    """Other processes may sweep at the same time, but only segments of processes that no longer exist."""
    program = f"import os; open(f'/dev/shm/{PREFIX}{{os.getpid()}}-x', 'w'); print(os.getpid(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = Path("/dev/shm") / f"{PREFIX}{process.stdout.readline().decode().strip()}-x"
        SegmentPool()
        assert left.exists()
        process.kill()
    SegmentPool()
    assert not left.exists()


def test_other_data_is_refused_as_a_bundle() -> None:
    with pytest.raises(BundleError, match="not a bundle"):
        KvBundle.from_bytes(b"x" * 200).frames()
    with pytest.raises(BundleError, match="gone"):
        KvBundle.attach("/nowhere/at/all")


def test_other_weights_are_refused() -> None:
    source, _ = halfway()
    here = list(source.progress().tokens)
    bundle = source.export(here, shared=False)
    other = tiny.model("llama", seed=1)
    target = tiny.engine(other, weights=MemoryWeights.of(other))
    arrived, errors = target.import_(bundle, 0)
    assert not arrived
    assert len(errors) == len(here)
    assert all("serves" in str(error) for error in errors)


def test_another_layout_is_refused() -> None:
    source, _ = halfway()
    bundle = source.export(list(source.progress().tokens)[:1], shared=False)
    arrived, errors = tiny.engine(tiny.model("llama"), block_size=8).import_(bundle, 0)
    assert not arrived
    assert "shape" in str(errors[0])
