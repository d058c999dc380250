"""Messages between the supervisor and its workers.

    supervisor -> any worker       StartWorker, SetThreads, StopWorker, RunCommand
    supervisor -> rollout worker   SubmitRequests, ExtendRequest, EndRequest, ExportKv, ImportKv
    rollout worker -> supervisor   RolloutReady, RolloutReport, KvExported, KvImported, NotParked, SlotTime, EngineStats
    supervisor -> trainer          TrainGroups, JoinRanks, SaveCheckpoint
    trainer -> supervisor          TrainerReport, StepMetrics, CheckpointWritten, SaveDone, RanksAddress
    supervisor -> reward worker    ScoreRequest, EnvRequest, CloseSession
    reward worker -> supervisor    ScoreResult, EnvResult
    any worker -> supervisor       WorkerReady, Heartbeat, WorkerFailed

The orchestrator's own commands and events travel inside `RunCommand`, `RolloutReport` and `TrainerReport`. Generated
tokens have one form on every link, `core.tokens.TokenChunk`.
"""

from __future__ import annotations

import msgspec

from dora_rl.core.commands import AnyCommand
from dora_rl.core.events import AnyEvent
from dora_rl.core.file_digests import FileDigest
from dora_rl.core.time_accounting import TimeAccount
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.trajectory import StopReason
from dora_rl.core.types import (
    Attempt,
    GroupId,
    InstanceId,
    InstanceSpec,
    Nanoseconds,
    StepId,
    TrajectoryId,
    Version,
)
from dora_rl.engine.requests import Request
from dora_rl.envs.data import Problem


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="message", tag=True):
    """Base of all messages."""


# -- to every worker --------------------------------------------------------------------------------------------


class StartWorker(Message, frozen=True, kw_only=True):
    """The first message on a link: which role the worker has, and with which settings."""

    role: str
    name: InstanceId
    """Process name, unique per restart."""
    config: bytes
    """The run's config as JSON."""
    folder: str
    """The run directory; only the trainer and instances on its node can rely on it."""
    base: str
    """The folder that relative paths of the config start from."""
    origin: Nanoseconds
    """Monotonic time at which the run's clock reads zero."""
    threads: int
    niceness: int = 0
    """Added to the niceness of the process."""
    rank: int = 0
    """Rank of this trainer process."""
    ranks: int = 1
    """Number of trainer processes."""


class RunCommand(Message, frozen=True, kw_only=True):
    """A command of the orchestrator that the worker carries out as it is."""

    command: AnyCommand


class SetThreads(Message, frozen=True, kw_only=True):
    """Compute with this many threads from now on."""

    count: int


class StopWorker(Message, frozen=True, kw_only=True):
    """Report what is left to report, then exit."""


# -- to rollout workers -----------------------------------------------------------------------------------------


class SubmitRequests(Message, frozen=True, kw_only=True):
    """Generate these requests in a slot."""

    slot: int
    requests: tuple[Request, ...]


class ExtendRequest(Message, frozen=True, kw_only=True):
    """Continue a parked request after these tokens of its environment."""

    trajectory: TrajectoryId
    attempt: Attempt
    tokens: bytes
    """int32"""


class EndRequest(Message, frozen=True, kw_only=True):
    """End a parked request: its environment is done."""

    trajectory: TrajectoryId
    attempt: Attempt


class ExportKv(Message, frozen=True, kw_only=True):
    """Pack those of these requests that are still running, with their KV, into a bundle."""

    move: int
    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]


class ImportKv(Message, frozen=True, kw_only=True):
    """Continue the requests of a bundle in a slot."""

    move: int
    bundle: str
    slot: int


# -- to the trainer ---------------------------------------------------------------------------------------------


class SampledTrajectory(Message, frozen=True, kw_only=True):
    """A scored trajectory, ready for training."""

    id: TrajectoryId
    version: Version
    prompt: bytes
    """int32"""
    chunks: tuple[TokenChunk, ...]
    """The whole response, in order."""
    reward: float
    stop_reason: StopReason


class SampledGroup(Message, frozen=True, kw_only=True):
    """The siblings of a group that were finished."""

    id: GroupId
    trajectories: tuple[SampledTrajectory, ...]


class TrainGroups(Message, frozen=True, kw_only=True):
    """Accumulate the gradients of these groups."""

    step: StepId
    attempt: Attempt
    groups: tuple[SampledGroup, ...]


class JoinRanks(Message, frozen=True, kw_only=True):
    """Join the process group of the trainer at this address."""

    address: str
    port: int


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Write a checkpoint, unless the last one has the current version."""


# -- to reward workers ------------------------------------------------------------------------------------------


class ScoreRequest(Message, frozen=True, kw_only=True):
    """Compute the reward of a response."""

    item: int
    problem: Problem
    completion: str
    tokens: tuple[int, ...]


class EnvRequest(Message, frozen=True, kw_only=True):
    """Reset an environment session, step it with the policy's last turn, or finish it."""

    item: int
    session: TrajectoryId
    problem: Problem
    texts: tuple[str, ...]
    """The policy's turns so far, so that a session that was lost can be replayed; empty: reset the environment."""
    tokens: tuple[int, ...]
    """Tokens of the last turn."""
    finish: bool
    """No turn follows: return the final reward."""


class CloseSession(Message, frozen=True, kw_only=True):
    """Close an environment session that is no longer needed."""

    session: TrajectoryId


# -- from rollout workers ---------------------------------------------------------------------------------------


class RolloutReady(Message, frozen=True, kw_only=True):
    """The engine is up and can load weights."""

    spec: InstanceSpec
    kernels: str


class ResponseEnded(Message, frozen=True, kw_only=True):
    """A response is complete."""

    trajectory: TrajectoryId
    attempt: Attempt
    reason: StopReason


class RolloutReport(Message, frozen=True, kw_only=True):
    """Generated tokens, then the events that follow from them."""

    chunks: tuple[TokenChunk, ...] = ()
    ended: tuple[ResponseEnded, ...] = ()
    events: tuple[AnyEvent, ...] = ()


class KvExported(Message, frozen=True, kw_only=True):
    """A bundle with these requests is ready; if the list is empty there is no bundle."""

    move: int
    bundle: str
    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]
    problem: str = ""
    """Why there is no bundle: the requests stay on this instance."""


class KvImported(Message, frozen=True, kw_only=True):
    """The requests of a bundle that arrived; the others did not."""

    move: int
    arrived: tuple[TrajectoryId, ...]
    problems: tuple[str, ...] = ()


class NotParked(Message, frozen=True, kw_only=True):
    """A request that was to continue is not parked on this instance."""

    trajectory: TrajectoryId
    attempt: Attempt


class TimeShare(msgspec.Struct, frozen=True, kw_only=True):
    """Time spent on one activity."""

    label: str
    version: Version | None
    cause: str
    spent: Nanoseconds

    @classmethod
    def take(cls, account: TimeAccount, now: Nanoseconds) -> tuple[TimeShare, ...]:
        """How the time up to now was spent since the last call.

        The totals of the account are cleared: every version adds its own, so they would grow with the run.
        """
        account.settle(now)
        shares = tuple(
            cls(
                label=activity.label.value,
                version=activity.version,
                cause="" if activity.cause is None else activity.cause.reason.value,
                spent=spent,
            )
            for activity, spent in account.totals.items()
        )
        account.totals.clear()
        return shares


class SlotTime(Message, frozen=True, kw_only=True):
    """How a slot spent a window of time; the shares add up to its length."""

    slot: int
    start: Nanoseconds
    end: Nanoseconds
    shares: tuple[TimeShare, ...]


class EngineStats(Message, frozen=True, kw_only=True):
    """Counters of an engine since it started, in tokens and requests."""

    figures: dict[str, int]


# -- from the trainer -------------------------------------------------------------------------------------------


class TrainerReport(Message, frozen=True, kw_only=True):
    """Events of the trainer for the orchestrator."""

    events: tuple[AnyEvent, ...]


class StepMetrics(Message, frozen=True, kw_only=True):
    """Metrics of a training step."""

    step: StepId
    metrics: dict[str, float]


class CheckpointWritten(Message, frozen=True, kw_only=True):
    """A checkpoint on disk, with a digest of each file."""

    name: str
    files: dict[str, FileDigest]
    kept: tuple[str, ...]
    """All checkpoints that are on disk now."""
    restored: bool = False
    """The checkpoint was on disk when this trainer started; this trainer did not write it."""


class SaveDone(Message, frozen=True, kw_only=True):
    """The answer to `SaveCheckpoint`."""

    version: Version
    path: str


class RanksAddress(Message, frozen=True, kw_only=True):
    """Where rank 0 waits for the other ranks."""

    address: str
    port: int


# -- from reward workers ----------------------------------------------------------------------------------------


class ScoreResult(Message, frozen=True, kw_only=True):
    """The reward of a response, or why it failed."""

    item: int
    reward: float | None
    components: dict[str, float]
    """What each reward function returned, and further numbers that it reported."""
    failed: str | None
    notes: dict[str, bool | int | float | str | None] = {}
    """Further values that the reward functions logged."""
    replayed: tuple[str, ...] = ()
    """As in `EnvResult`."""


class EnvResult(Message, frozen=True, kw_only=True):
    """The observation of an environment."""

    item: int
    observation: str | None
    done: bool
    replayed: tuple[str, ...] = ()
    """The observations of the earlier turns, if the session had to be replayed."""
    failed: str | None = None


# -- from every worker ------------------------------------------------------------------------------------------


class WorkerReady(Message, frozen=True, kw_only=True):
    """A reward worker accepts requests; a rank of the trainer can be sent `JoinRanks`."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """A sign of life of a worker that has sent nothing else for a while."""


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The last message of a worker that can't continue."""

    reason: str
    by_user: bool = False
    """The config is wrong, and a restart would not help."""
    final: bool = False
    """The same would happen after a restart."""


ToWorker = (
    StartWorker
    | RunCommand
    | SetThreads
    | StopWorker
    | SubmitRequests
    | ExportKv
    | ImportKv
    | ExtendRequest
    | EndRequest
    | TrainGroups
    | JoinRanks
    | SaveCheckpoint
    | ScoreRequest
    | EnvRequest
    | CloseSession
)
FromWorker = (
    RolloutReady
    | RolloutReport
    | KvExported
    | KvImported
    | NotParked
    | SlotTime
    | EngineStats
    | TrainerReport
    | StepMetrics
    | CheckpointWritten
    | SaveDone
    | RanksAddress
    | ScoreResult
    | EnvResult
    | WorkerReady
    | Heartbeat
    | WorkerFailed
)
