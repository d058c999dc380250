"""What the supervisor keeps of groups and trajectories and the orchestrator does not need: prompts, tokens, rewards.

Everything but the tokens is a projection of the event log; the tokens come from the rollout workers, or from the ledger
when a run is resumed.

Invariants:
- the tokens of a trajectory are one unbroken sequence: a chunk is accepted only if it belongs to the current attempt
  and starts where the last one ended;
- a group is kept until no trainer can ask for it again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.tokens import TokenChunk, joined
from dora_rl.core.trajectory import StopReason
from dora_rl.core.types import Attempt, GroupId, Nanoseconds, Prompt, StepId, TrajectoryId, Version
from dora_rl.envs.data import Problem
from dora_rl.ledger.ledger import Ledger
from dora_rl.runtime.supervisor.prompt_source import PromptSource
from dora_rl.runtime.transport import messages as m

Encode = Callable[[Problem], tuple[int, ...]]


@dataclass(slots=True)
class TrajectoryEntry:
    """One trajectory."""

    attempt: Attempt = 0
    chunks: list[TokenChunk] = field(default_factory=list)
    """The response so far, in order."""
    length: int = 0
    """Tokens of the response so far."""
    ended: StopReason | None = None
    generated: int | None = None
    """Tokens of the whole response, once the orchestrator knows that it is complete."""
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    """What each reward function returned, and further numbers that it reported."""
    reward_notes: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    """Further values that the reward functions logged."""
    failed: bool = False

    def append(self, chunk: TokenChunk) -> None:
        """Add the next tokens of the response."""
        self.chunks.append(chunk)
        self.length += len(chunk)

    def end(self, reason: StopReason) -> None:
        """The response is complete."""
        self.ended = reason

    def fail(self) -> None:
        """The trajectory will not be finished."""
        self.failed = True

    @property
    def response(self) -> array[int]:
        """Token ids of the response so far."""
        return _token_ids(self.chunks)

    @property
    def turn_start(self) -> int:
        """Tokens of the response before the turn that the policy is in."""
        return next((chunk.end for chunk in reversed(self.chunks) if not chunk.sampled), 0)

    @property
    def versions(self) -> list[Version]:
        """The versions that produced tokens, in order; more than one only in mode `partial`."""
        versions: list[Version] = []
        for chunk in self.chunks:
            if not versions or versions[-1] != chunk.version:
                versions.append(chunk.version)
        return versions

    def turns(self, *, sampled: bool, first: int = 0) -> list[array[int]]:
        """Token ids of each turn of the policy, or of the environment, from its turn number `first` on."""
        turns = [turn for turn in self._turns() if turn[0].sampled == sampled]
        return [_token_ids(turn) for turn in turns[first:]]

    def last_turn(self, *, sampled: bool) -> array[int]:
        """Token ids of the last turn, if the policy, or the environment, took it; otherwise nothing."""
        last: list[TokenChunk] = []
        for chunk in reversed(self.chunks):
            if chunk.sampled != sampled:
                break
            last.append(chunk)
        return _token_ids(last[::-1])

    def _turns(self) -> list[list[TokenChunk]]:
        turns: list[list[TokenChunk]] = []
        for chunk in self.chunks:
            if turns and turns[-1][0].sampled == chunk.sampled:
                turns[-1].append(chunk)
            else:
                turns.append([chunk])
        return turns


@dataclass(slots=True)
class GroupEntry:
    """One group."""

    problem: Problem
    prompt: tuple[int, ...]
    key: str
    version: Version
    trajectories: dict[TrajectoryId, TrajectoryEntry]
    admitted_at: Nanoseconds = 0
    scored_at: Nanoseconds = 0
    """When the last reward so far arrived."""
    step: StepId | None = None
    """The step that trains it, once it is part of one."""


class TrajectoryStore:
    """All groups that are still needed."""

    def __init__(self, prompts: PromptSource, encode: Encode, group_size: int) -> None:
        self._prompts = prompts
        self._encode = encode
        self._group_size = group_size
        self.cursor = 0
        """Prompts delivered to the orchestrator."""
        self._numbers: dict[str, int] = {}
        self.groups: dict[GroupId, GroupEntry] = {}
        self.fingerprints: dict[Version, str] = {}
        """Fingerprints of all versions that can have served a trajectory of these groups."""
        self.failed: dict[str, int] = {}
        """Failed trajectories by reason."""
        self.without_signal = 0
        """Groups that ended without signal, since the run began."""
        self.live_versions = 0
        """The most versions that had running requests at the same time, between the last two published versions."""
        self._running: Counter[Version] = Counter()
        """Trajectories that generate, by the version of their group."""
        self._most_live = 0

    # -- prompts ----------------------------------------------------------------------------------------------

    def fetch(self, count: int) -> e.PromptsArrived:
        """The next prompts. They count as delivered when their event is applied."""
        end = self._prompts.count
        last = self.cursor + count if end is None else min(self.cursor + count, end)
        prompts = []
        for number in range(self.cursor, last):
            key, problem = self._prompts.problem(number)
            prompts.append(Prompt(key=key, tokens=len(self._encode(problem))))
        return e.PromptsArrived(prompts=tuple(prompts), last=last == end)

    # -- the event log ----------------------------------------------------------------------------------------

    def apply(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> None:
        """Fold an event and the commands that answered it."""
        match event:
            case e.PromptsArrived(prompts=prompts):
                for prompt in prompts:
                    self._numbers[prompt.key] = self.cursor
                    self.cursor += 1
            case e.Generated(trajectory=trajectory, attempt=attempt, tokens=tokens):
                entry = self.find(trajectory)
                if entry is not None and entry.attempt == attempt:
                    self._stopped(trajectory, entry)
                    entry.generated = tokens
            case e.Scored(trajectory=trajectory, reward=reward, components=components, notes=notes):
                entry = self.find(trajectory)
                if entry is not None and entry.reward is None:
                    entry.reward, entry.reward_components, entry.reward_notes = reward, components, notes
                    self.group_of(trajectory).scored_at = at
            case e.Published(version=version, fingerprint=fingerprint):
                self.fingerprints.setdefault(version, fingerprint)
                self.live_versions, self._most_live = self._most_live, len(self._running)
            case e.Checkpointed(version=version):
                self._forget_before(version)
            case _:
                pass
        for command in commands:
            self._apply_command(command, at)

    def _apply_command(self, command: c.Command, at: Nanoseconds) -> None:
        match command:
            case c.StartGroup():
                self._admit(command, at)
            case c.Resume(trajectory=trajectory, attempt=attempt):
                self.trajectory(trajectory).attempt = attempt
            case c.FailTrajectory(trajectory=trajectory, reason=reason):
                entry = self.trajectory(trajectory)
                self._stopped(trajectory, entry)
                entry.fail()
                self.failed[reason] = self.failed.get(reason, 0) + 1
            case c.GroupFailed(group=group):
                del self.groups[group]
            case c.GroupWithoutSignal(group=group):
                del self.groups[group]
                self.without_signal += 1
            case c.Apply(step=step, groups=groups):
                for group in groups:
                    if group in self.groups:
                        self.groups[group].step = step
            case _:
                pass

    def _admit(self, command: c.StartGroup, at: Nanoseconds) -> None:
        key, problem = self._prompts.problem(self._numbers.pop(command.prompt.key))
        if key != command.prompt.key:
            raise UserError(
                f"the data has changed since the run began: prompt '{command.prompt.key}' is now '{key}'; restore it"
            )
        first = command.group * self._group_size
        self.groups[command.group] = GroupEntry(
            problem=problem,
            prompt=self._encode(problem),
            key=key,
            version=command.version,
            admitted_at=at,
            trajectories={first + sibling: TrajectoryEntry() for sibling in range(self._group_size)},
        )
        self._running[command.version] += self._group_size
        self._most_live = max(self._most_live, len(self._running))

    def _stopped(self, trajectory: TrajectoryId, entry: TrajectoryEntry) -> None:
        """The trajectory no longer generates, if it did."""
        if entry.generated is None and not entry.failed:
            version = self.group_of(trajectory).version
            self._running[version] -= 1
            if not self._running[version]:
                del self._running[version]

    def _forget_before(self, version: Version) -> None:
        """A trainer can restart from this version: groups of earlier steps are not asked for again."""
        for group in [g for g, entry in self.groups.items() if entry.step is not None and entry.step < version]:
            del self.groups[group]
        oldest = min((entry.version for entry in self.groups.values()), default=version)
        for past in [one for one in self.fingerprints if one < min(oldest, version)]:
            del self.fingerprints[past]

    # -- tokens -----------------------------------------------------------------------------------------------

    def append(self, chunk: TokenChunk) -> bool:
        """Add tokens to their trajectory; False if they belong to a former attempt. A gap is an `IntegrityError`."""
        entry = self.find(chunk.trajectory)
        if entry is None or entry.attempt != chunk.attempt or entry.failed:
            return False
        if chunk.start != entry.length:
            raise IntegrityError(
                f"trajectory {chunk.trajectory} has {entry.length} tokens, but the reported ones start at {chunk.start}"
            )
        entry.append(chunk)
        return True

    def restore_tokens(self, ledger: Ledger) -> None:
        """Read the tokens of all groups back from the ledger; `IntegrityError` if some are missing."""
        for group in self.groups.values():
            for trajectory, entry in group.trajectories.items():
                _restore(ledger, trajectory, entry)

    # -- look-ups ---------------------------------------------------------------------------------------------

    def group_of(self, trajectory: TrajectoryId) -> GroupEntry:
        return self.groups[trajectory // self._group_size]

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryEntry:
        return self.group_of(trajectory).trajectories[trajectory]

    def find(self, trajectory: TrajectoryId) -> TrajectoryEntry | None:
        group = self.groups.get(trajectory // self._group_size)
        return None if group is None else group.trajectories.get(trajectory)

    def of_step(self, step: StepId) -> dict[GroupId, GroupEntry]:
        """The groups that a step trains."""
        return {group: entry for group, entry in self.groups.items() if entry.step == step}

    def for_training(self, group: GroupId) -> m.SampledGroup:
        """A group as the trainer receives it: its siblings that were finished."""
        entry = self.groups[group]
        prompt = array("i", entry.prompt).tobytes()
        return m.SampledGroup(
            id=group,
            trajectories=tuple(
                m.SampledTrajectory(
                    id=id_,
                    version=entry.version,
                    prompt=prompt,
                    chunks=tuple(joined(one.chunks)),
                    reward=one.reward,
                    stop_reason=one.ended or "stop",
                )
                for id_, one in entry.trajectories.items()
                if not one.failed and one.reward is not None
            ),
        )


def _restore(ledger: Ledger, trajectory: TrajectoryId, entry: TrajectoryEntry) -> None:
    chunks, ended = ledger.trajectory(trajectory)
    for chunk in chunks:
        if chunk.start != entry.length:
            raise IntegrityError(f"the ledger has lost tokens of trajectory {trajectory} from {entry.length} on")
        entry.append(chunk)
    if entry.generated is not None and (entry.length != entry.generated or ended is None):
        raise IntegrityError(
            f"the ledger has lost the end of trajectory {trajectory}: it has {entry.length} of {entry.generated} tokens"
        )
    if ended is not None:
        entry.end(cast("StopReason", ended))


def _token_ids(chunks: Sequence[TokenChunk]) -> array[int]:
    ids = array("i")
    ids.frombytes(b"".join([chunk.token_data for chunk in chunks]))
    return ids
