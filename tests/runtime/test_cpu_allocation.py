"""How cores are shared out between rollout and training."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.config import build
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.backend import LocalBackend
from dora_rl.runtime.launch.cpu_allocation import niceness, share
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.making import merged, settings
from tests.runtime.test_supervision import NoForkServer

CORES = st.integers(1, 64)
COUNT = st.integers(0, 8)


@given(CORES, COUNT, COUNT, st.booleans(), st.booleans())
def test_no_core_is_lent_twice(cores: int, busy: int, idle: int, trainer_busy: bool, overlap: bool) -> None:
    shares = share(cores, busy + idle, busy, trainer_busy=trainer_busy, overlap=overlap)
    assert shares.instance >= 1
    assert shares.trainer >= 1
    working = busy + trainer_busy
    used = busy * shares.instance + trainer_busy * shares.trainer
    assert used <= max(cores, working)


@given(CORES, st.integers(1, 8))
def test_who_waits_gives_up_its_cores(cores: int, instances: int) -> None:
    assert share(cores, instances, 0, trainer_busy=True, overlap=False).trainer == cores
    assert share(cores, instances, 1, trainer_busy=False, overlap=True).instance == cores


@given(CORES, st.integers(1, 8), st.data())
def test_the_trainer_keeps_its_threads_where_rollout_comes_and_goes(
    cores: int, instances: int, data: st.DataObject
) -> None:
    busy = st.integers(0, instances)
    found = {
        share(cores, instances, data.draw(busy), trainer_busy=data.draw(st.booleans()), overlap=True).trainer
        for _ in range(4)
    }
    assert found == {max(1, cores - instances)}


@given(CORES, st.integers(1, 64))
def test_instances_give_way_to_the_trainer_and_no_further(cores: int, instances: int) -> None:
    """By weight, as Linux has it: a level of niceness is a factor of 1.25."""
    levels = niceness(cores, instances, overlap=True)
    assert 0 <= levels <= 15
    trainer = share(cores, instances, instances, trainer_busy=True, overlap=True).trainer
    rollout = instances * 1.25**-levels
    left = cores * trainer / (trainer + rollout)
    assert left >= min(trainer, 0.8 * cores) - 1e-9 or levels == 15, (
        "of the cores, the trainer gets what it has threads for"
    )
    if levels:
        more = instances * 1.25 ** (1 - levels)
        assert more > cores - trainer, "one level less would not do: other programs on the machine count too"


@given(CORES, st.integers(1, 64))
def test_nobody_gives_way_where_rollout_and_training_take_turns(cores: int, instances: int) -> None:
    assert niceness(cores, instances, overlap=False) == 0


def test_processes_start_as_nice_as_their_role_asks(tmp_path: Path) -> None:
    def found(mode: str, role: str, place: str) -> int:
        config = build(RunConfig, merged(settings(tmp_path, mode), {"rollout": {"instances": 3}, "threads": 2}))
        folder = RunDir(tmp_path)
        processes = ProcessManager(folder, config, LocalBackend(folder, NoForkServer()), 0, {})
        try:
            return processes._niceness(WorkerProcess(role, place))
        finally:
            processes.stop(patience=0.0)

    assert found("dora", "instance", "i0") == niceness(2, 3, overlap=True) == 5
    assert found("sync", "instance", "i0") == 0
    assert found("sync", "instance", "evaluator") == 5
    assert found("dora", "trainer", "trainer") == found("dora", "reward", "reward0") == 0
