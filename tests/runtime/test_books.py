"""What the supervisor keeps: as much as somebody can ask for, and figures that miss no moment."""

from __future__ import annotations

from typing import Any

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build
from dora_rl.core.nouns import Prompt, SlotId
from dora_rl.runtime.books import Books
from dora_rl.runtime.config import RunConfig

SLOT = SlotId("i0.1", 0)


class Numbers:
    """As many problems as anybody wants."""

    count = None

    def problem(self, number: int) -> tuple[str, Any]:
        return f"p{number}", {"prompt": str(number)}


def books() -> Books:
    made = Books(Numbers(), lambda _: (1, 2), 1)  # type: ignore[arg-type]
    made.note(made.fetch(8), [])
    return made


def start(made: Books, group: int, version: int) -> None:
    prompt = Prompt(key=f"p{group}", tokens=2)
    made.note(e.Tick(), [c.StartGroup(group=group, prompt=prompt, version=version, slot=SLOT)])


def generated(trajectory: int, version: int) -> e.Generated:
    return e.Generated(
        trajectory=trajectory, attempt=0, instance="i0.1", version=version, fingerprint="", tokens=3, kv_tokens=0
    )


def published(version: int) -> e.Published:
    return e.Published(version=version, attempt=1, fingerprint=f"f{version}")


def test_live_versions_are_the_most_since_the_last_publishing() -> None:
    made = books()
    made.note(published(0), [])
    start(made, 0, 0)
    made.note(published(1), [])
    assert made.live_versions == 1
    start(made, 1, 1)
    made.note(generated(0, 0), [])
    made.note(generated(0, 0), [])  # said twice, counted once
    made.note(generated(1, 1), [])
    made.note(published(2), [])
    assert made.live_versions == 2, "two were live for a while, though none is now"
    made.note(published(3), [])
    assert made.live_versions == 0
    start(made, 2, 3)
    made.note(e.Tick(), [c.FailTrajectory(trajectory=2, reason="why"), c.GroupFailed(group=2, reasons=("why",))])
    start(made, 3, 3)
    made.note(published(4), [])
    assert made.live_versions == 1


def test_fingerprints_are_kept_as_long_as_a_group_may_need_them() -> None:
    made = books()
    for version in range(4):
        made.note(published(version), [])
        start(made, version, version)
    made.note(e.Tick(), [c.Apply(step=3, attempt=1, groups=(0, 1))])
    made.note(e.Checkpointed(version=4), [])
    assert sorted(made.fingerprints) == [2, 3]


def test_one_key_of_an_engine_leaves_the_others_as_they_were() -> None:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"source": "d"},
        "reward": {"functions": ["exact"]},
        "control": {"groups_per_step": 1, "group_size": 1, "max_response_tokens": 8},
    }
    plain = build(RunConfig, tree).rollout.engine
    changed = build(RunConfig, tree | {"rollout": {"engine": {"max_requests": 3}}}).rollout.engine
    assert changed == plain.model_copy(update={"max_requests": 3})
    assert plain.kv_bytes == plain.host_bytes == 256 << 20
