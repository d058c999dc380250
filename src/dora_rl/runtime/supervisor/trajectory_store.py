"""What the supervisor knows of groups and trajectories and the orchestrator need not: prompts, tokens, rewards.

Invariants:
- the tokens of a trajectory are one unbroken sequence: a report is taken only if it is of the current attempt and
  begins where the last one ended;
- prompts are handed out in an order that depends on the data alone, so their number says which problem they are;
- a group is kept until no trainer can ask for it again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.trajectory import StopReason
from dora_rl.core.types import Attempt, GroupId, Prompt, StepId, TrajectoryId, Version
from dora_rl.envs.data import Dataset, Problem
from dora_rl.ledger.ledger import Ledger
from dora_rl.runtime.transport import messages as m

Encode = Callable[[Problem], tuple[int, ...]]


@dataclass(slots=True)
class TrajectoryEntry:
    """One trajectory."""

    attempt: Attempt = 0
    response: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    experts: bytearray = field(default_factory=bytearray)
    experts_shape: tuple[int, int] = (0, 0)
    parts: list[tuple[bool, int]] = field(default_factory=list)
    """Who said how many tokens, in turn: the environment (true) or the policy."""
    versions: list[Version] = field(default_factory=list)
    """That said something, in order; more than one only in mode `partial`."""
    ended: StopReason | None = None
    generated: int | None = None
    """Tokens of the whole response, once it is known to be whole."""
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    """What each reward function gave, and further numbers that it told of."""
    failed: bool = False

    def take(self, chunk: TokenChunk) -> None:
        self.response.frombytes(chunk.token_data)
        self.logprobs.frombytes(chunk.logprob_data)
        if chunk.expert_data:  # tokens of the environment have none
            self.experts += chunk.expert_data
            self.experts_shape = chunk.expert_shape
        self._part(not chunk.sampled, len(chunk))
        if not self.versions or self.versions[-1] != chunk.version:
            self.versions.append(chunk.version)

    def spans(self, *, observed: bool, first: int = 0) -> list[array[int]]:
        """What the environment, or the policy, said in turn, from its turn of that number on."""
        spans, start, turn = [], 0, 0
        for by_environment, count in self.parts:
            if by_environment == observed:
                if turn >= first:
                    spans.append(self.response[start : start + count])
                turn += 1
            start += count
        return spans

    def last_said(self, *, observed: bool) -> array[int]:
        """What was said last, if the environment, or the policy, said it; nothing otherwise."""
        if not self.parts or self.parts[-1][0] != observed:
            return array("i")
        return self.response[len(self.response) - self.parts[-1][1] :]

    def observed(self) -> bytes:
        """One byte a token, true where the environment said it; empty if it said nothing."""
        if not any(observed for observed, _ in self.parts):
            return b""
        return b"".join(bytes([observed]) * count for observed, count in self.parts)

    def _part(self, observed: bool, count: int) -> None:
        if self.parts and self.parts[-1][0] == observed:
            count += self.parts.pop()[1]
        self.parts.append((observed, count))


@dataclass(slots=True)
class GroupEntry:
    """One group."""

    problem: Problem
    prompt: tuple[int, ...]
    key: str
    version: Version
    trajectories: dict[TrajectoryId, TrajectoryEntry]
    step: StepId | None = None


class PromptSource:
    """Problems in the order in which they are handed out: epoch after epoch, each in its own order."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._orders: dict[int, list[int]] = {}

    @property
    def count(self) -> int | None:
        """How many there are in all; None: no end."""
        return None if self._dataset.epochs is None else self._dataset.epochs * len(self._dataset.train)

    def problem(self, number: int) -> tuple[str, Problem]:
        """The prompt of this number: its key in the run, and the problem."""
        epoch, place = divmod(number, len(self._dataset.train))
        if epoch not in self._orders:
            self._orders = {epoch: self._dataset.order(epoch)}
        problem = self._dataset.train[self._orders[epoch][place]]
        return f"{problem.key}@{epoch}", problem


class TrajectoryStore:
    """All groups that are not over."""

    def __init__(self, prompts: PromptSource, encode: Encode, group_size: int) -> None:
        self._prompts = prompts
        self._encode = encode
        self._group_size = group_size
        self.cursor = 0
        """Prompts handed out."""
        self._numbers: dict[str, int] = {}
        self.groups: dict[GroupId, GroupEntry] = {}
        self.fingerprints: dict[Version, str] = {}
        """Of all versions that a trajectory of these groups can have been served by."""
        self.failed: dict[str, int] = {}
        """Verdicts by reason."""
        self.live_versions = 0
        """The most versions that had running requests at once, between the last two versions that were published."""
        self._running: Counter[Version] = Counter()
        """Trajectories that generate, by the version of their group."""
        self._most_live = 0

    # -- prompts ----------------------------------------------------------------------------------------------

    def fetch(self, count: int) -> e.PromptsArrived:
        """The next prompts; noted when their event is."""
        end = self._prompts.count
        last = self.cursor + count if end is None else min(self.cursor + count, end)
        prompts = []
        for number in range(self.cursor, last):
            key, problem = self._prompts.problem(number)
            prompts.append(Prompt(key=key, tokens=len(self._encode(problem))))
        return e.PromptsArrived(prompts=tuple(prompts), last=last == end)

    # -- what happens -----------------------------------------------------------------------------------------

    def note(self, event: e.Event, commands: list[c.Command]) -> None:
        """Keep up with an event and the commands that answered it."""
        match event:
            case e.PromptsArrived(prompts=prompts):
                for prompt in prompts:
                    self._numbers[prompt.key] = self.cursor
                    self.cursor += 1
            case e.Generated(trajectory=trajectory, attempt=attempt, tokens=tokens):
                book = self.find(trajectory)
                if book is not None and book.attempt == attempt:
                    self._stopped(trajectory, book)
                    book.generated = tokens
            case e.Scored(trajectory=trajectory, reward=reward, components=components):
                book = self.find(trajectory)
                if book is not None and book.reward is None:
                    book.reward, book.reward_components = reward, components
            case e.Published(version=version, fingerprint=fingerprint):
                self.fingerprints.setdefault(version, fingerprint)
                self.live_versions, self._most_live = self._most_live, len(self._running)
            case e.Checkpointed(version=version):
                for group in [g for g, book in self.groups.items() if book.step is not None and book.step < version]:
                    del self.groups[group]
                oldest = min((book.version for book in self.groups.values()), default=version)
                for past in [one for one in self.fingerprints if one < min(oldest, version)]:
                    del self.fingerprints[past]
            case _:
                pass
        for command in commands:
            self._note_command(command)

    def _note_command(self, command: c.Command) -> None:
        match command:
            case c.StartGroup():
                self._admit(command)
            case c.Resume(trajectory=trajectory, attempt=attempt):
                self.trajectory(trajectory).attempt = attempt
            case c.FailTrajectory(trajectory=trajectory, reason=reason):
                book = self.trajectory(trajectory)
                self._stopped(trajectory, book)
                book.failed = True
                self.failed[reason] = self.failed.get(reason, 0) + 1
            case c.GroupFailed(group=group):
                del self.groups[group]
            case c.Apply(step=step, groups=groups):
                for group in groups:
                    if group in self.groups:
                        self.groups[group].step = step
            case _:
                pass

    def _admit(self, command: c.StartGroup) -> None:
        key, problem = self._prompts.problem(self._numbers.pop(command.prompt.key))
        if key != command.prompt.key:
            raise UserError(f"the data is not what the run began with: prompt '{command.prompt.key}' is now '{key}'")
        first = command.group * self._group_size
        self.groups[command.group] = GroupEntry(
            problem=problem,
            prompt=self._encode(problem),
            key=key,
            version=command.version,
            trajectories={first + sibling: TrajectoryEntry() for sibling in range(self._group_size)},
        )
        self._running[command.version] += self._group_size
        self._most_live = max(self._most_live, len(self._running))

    def _stopped(self, trajectory: TrajectoryId, book: TrajectoryEntry) -> None:
        """It generates no more, if it did."""
        if book.generated is None and not book.failed:
            version = self.group_of(trajectory).version
            self._running[version] -= 1
            if not self._running[version]:
                del self._running[version]

    def take(self, said: m.Said) -> TokenChunk | None:
        """Tokens that continue a trajectory; None if they are of a former attempt. A gap is an `IntegrityError`."""
        book = self.find(said.trajectory)
        if book is None or book.attempt != said.attempt or book.failed:
            return None
        if said.start != len(book.response):
            raise IntegrityError(
                f"trajectory {said.trajectory} has {len(book.response)} tokens, and what came begins at {said.start}"
            )
        chunk = TokenChunk(
            trajectory=said.trajectory,
            attempt=said.attempt,
            version=said.version,
            start=said.start,
            token_data=said.tokens,
            logprob_data=said.logprobs,
            expert_data=said.experts,
            expert_shape=said.experts_shape,
        )
        book.take(chunk)
        return chunk

    def recall(self, ledger: Ledger, trajectory: TrajectoryId) -> None:
        """What the ledger knows of a trajectory; `IntegrityError` if that is not all that was written."""
        book = self.trajectory(trajectory)
        chunks, ended = ledger.trajectory(trajectory)
        for chunk in chunks:
            if chunk.start != len(book.response):
                raise IntegrityError(
                    f"the ledger has lost the tokens of trajectory {trajectory} at {len(book.response)}"
                )
            book.take(chunk)
        if book.generated is not None and (len(book.response) != book.generated or ended is None):
            raise IntegrityError(
                f"the ledger has lost the end of trajectory {trajectory}: {len(book.response)} of its "
                f"{book.generated} tokens are there"
            )
        book.ended = cast("StopReason | None", ended)

    # -- look-ups ---------------------------------------------------------------------------------------------

    def group_of(self, trajectory: TrajectoryId) -> GroupEntry:
        return self.groups[trajectory // self._group_size]

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryEntry:
        return self.group_of(trajectory).trajectories[trajectory]

    def find(self, trajectory: TrajectoryId) -> TrajectoryEntry | None:
        group = self.groups.get(trajectory // self._group_size)
        return None if group is None else group.trajectories.get(trajectory)

    def trained(self, group: GroupId) -> m.TrainedGroup:
        """A group as the trainer gets it: its siblings that were finished."""
        book = self.groups[group]
        prompt = array("i", book.prompt).tobytes()
        return m.TrainedGroup(
            id=group,
            trajectories=tuple(
                m.TrainedTrajectory(
                    id=id_,
                    version=book.version,
                    prompt=prompt,
                    response=one.response.tobytes(),
                    logprobs=one.logprobs.tobytes(),
                    observed=one.observed(),
                    reward=one.reward,
                    stop_reason=one.ended or "stop",
                    experts=bytes(one.experts),
                    experts_shape=one.experts_shape,
                )
                for id_, one in book.trajectories.items()
                if not one.failed and one.reward is not None
            ),
        )
