"""How cores are shared out between rollout and training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.runtime.threads import share

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
