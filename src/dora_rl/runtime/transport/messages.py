"""What the supervisor and its processes say to each other, besides the orchestrator's own events and commands."""

from __future__ import annotations

import msgspec

from dora_rl.core.commands import AnyCommand
from dora_rl.core.events import AnyEvent
from dora_rl.core.file_digests import FileDigest
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


# -- to every process -------------------------------------------------------------------------------------------


class StartWorker(Message, frozen=True, kw_only=True):
    """The first message: who you are."""

    role: str
    name: InstanceId
    config: bytes
    """The run's config as JSON."""
    folder: str
    """The run's folder; only the trainer, and instances of its machine, may count on it."""
    base: str
    """Where relative paths of the configuration start."""
    origin: Nanoseconds
    """Monotonic time at which the run's clock reads zero."""
    threads: int
    niceness: int = 0
    """Added to that of the process."""
    rank: int = 0
    """Of the trainer's processes, which one."""
    ranks: int = 1


class RunCommand(Message, frozen=True, kw_only=True):
    """A command of the orchestrator that the process carries out as it is."""

    command: AnyCommand


class SetThreads(Message, frozen=True, kw_only=True):
    """Compute with so many threads from now on."""

    count: int


class StopWorker(Message, frozen=True, kw_only=True):
    """Stop, with what you have reported."""


# -- to instances -----------------------------------------------------------------------------------------------


class SubmitRequests(Message, frozen=True, kw_only=True):
    """Generate these."""

    slot: int
    requests: tuple[Request, ...]


class ExportKv(Message, frozen=True, kw_only=True):
    """Pack these requests for a move, those that are still here."""

    move: int
    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]


class ImportKv(Message, frozen=True, kw_only=True):
    """Go on with the requests of a bundle."""

    move: int
    bundle: str
    slot: int


class ExtendRequest(Message, frozen=True, kw_only=True):
    """Go on with a parked request after these tokens."""

    trajectory: TrajectoryId
    attempt: Attempt
    tokens: bytes
    """int32"""


class EndRequest(Message, frozen=True, kw_only=True):
    """A parked request has had its last turn."""

    trajectory: TrajectoryId
    attempt: Attempt


# -- to the trainer ---------------------------------------------------------------------------------------------


class TrainedTrajectory(Message, frozen=True, kw_only=True):
    """A trajectory for training; arrays as little-endian bytes."""

    id: TrajectoryId
    version: Version
    prompt: bytes
    """int32"""
    response: bytes
    """int32"""
    logprobs: bytes
    """float32, one for each token of the response"""
    observed: bytes = b""
    """bool, true where the environment and not the policy said the token; empty: the policy said all"""
    reward: float
    stop_reason: StopReason
    experts: bytes = b""
    """int16 [tokens that the policy said, layers, experts], empty if not recorded"""
    experts_shape: tuple[int, int] = (0, 0)


class TrainedGroup(Message, frozen=True, kw_only=True):
    """A group for training."""

    id: GroupId
    trajectories: tuple[TrainedTrajectory, ...]


class TrainGroups(Message, frozen=True, kw_only=True):
    """Accumulate the gradients of these groups."""

    step: StepId
    attempt: Attempt
    groups: tuple[TrainedGroup, ...]


class JoinRanks(Message, frozen=True, kw_only=True):
    """Where the ranks of the trainer meet."""

    address: str
    port: int


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Write a checkpoint, unless the last one is of this version."""


# -- to judges --------------------------------------------------------------------------------------------------


class ScoreRequest(Message, frozen=True, kw_only=True):
    """What is this response worth?"""

    item: int
    problem: Problem
    completion: str
    tokens: tuple[int, ...]


class EnvRequest(Message, frozen=True, kw_only=True):
    """Give an environment what the policy said; with nothing said yet, begin it."""

    item: int
    session: TrajectoryId
    problem: Problem
    texts: tuple[str, ...]
    """Of all turns that it was or is to be told, so that a session which was lost can be played again."""
    tokens: tuple[int, ...]
    """Of the last one."""
    finish: bool
    """No more turns: the verdict, please."""


class CloseSession(Message, frozen=True, kw_only=True):
    """A session is not needed any more."""

    session: TrajectoryId


# -- from processes ---------------------------------------------------------------------------------------------


class RolloutReady(Message, frozen=True, kw_only=True):
    """An instance is ready."""

    spec: InstanceSpec
    kernels: str


class Said(Message, frozen=True, kw_only=True):
    """Tokens of a response, in order."""

    trajectory: TrajectoryId
    attempt: Attempt
    version: Version
    start: int
    tokens: bytes
    """int32"""
    logprobs: bytes
    """float32"""
    experts: bytes = b""
    experts_shape: tuple[int, int] = (0, 0)


class ResponseEnded(Message, frozen=True, kw_only=True):
    """A response has ended."""

    trajectory: TrajectoryId
    attempt: Attempt
    reason: StopReason


class Report(Message, frozen=True, kw_only=True):
    """What an instance has to tell: first what was said, then what follows from it."""

    said: tuple[Said, ...] = ()
    ended: tuple[ResponseEnded, ...] = ()
    events: tuple[AnyEvent, ...] = ()


class KvExported(Message, frozen=True, kw_only=True):
    """A bundle is ready, with these requests in it; without any there is no bundle."""

    move: int
    bundle: str
    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]
    problem: str = ""
    """Why there is no bundle: the requests are still here."""


class KvImported(Message, frozen=True, kw_only=True):
    """Who arrived out of a bundle; the others did not."""

    move: int
    arrived: tuple[TrajectoryId, ...]
    problems: tuple[str, ...] = ()


class TimeShare(msgspec.Struct, frozen=True, kw_only=True):
    """Time spent on one activity."""

    label: str
    version: Version | None
    cause: str
    spent: Nanoseconds


class SlotTime(Message, frozen=True, kw_only=True):
    """Where a slot's time went in a window; the shares add up to its length."""

    slot: int
    start: Nanoseconds
    end: Nanoseconds
    shares: tuple[TimeShare, ...]


class EngineStats(Message, frozen=True, kw_only=True):
    """What an instance has done so far, in tokens and requests."""

    figures: dict[str, int]


class StepMetrics(Message, frozen=True, kw_only=True):
    """The trainer's metrics of a step."""

    step: StepId
    metrics: dict[str, float]


class CheckpointWritten(Message, frozen=True, kw_only=True):
    """A checkpoint was written, file by file; `kept` are all that are on disk now."""

    name: str
    files: dict[str, FileDigest]
    kept: tuple[str, ...]
    restored: bool = False
    """It was there when this trainer began, and not written by it."""


class SaveDone(Message, frozen=True, kw_only=True):
    """A checkpoint is on disk."""

    version: Version
    path: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """A sign of life of an instance that has had nothing else to say for a while."""


class WorkerReady(Message, frozen=True, kw_only=True):
    """A judge can be asked; a rank of the trainer can be told where to meet."""


class RanksAddress(Message, frozen=True, kw_only=True):
    """Where the first rank of the trainer waits for the others."""

    address: str
    port: int


class ScoreResult(Message, frozen=True, kw_only=True):
    """What a response is worth, or why that can't be said."""

    item: int
    reward: float | None
    components: dict[str, float]
    failed: str | None
    replayed: tuple[str, ...] = ()
    """As in `EnvResult`."""


class EnvResult(Message, frozen=True, kw_only=True):
    """What an environment answered."""

    item: int
    observation: str | None
    done: bool
    replayed: tuple[str, ...] = ()
    """What it said to begin with and to the earlier turns, if they had to be played again."""
    failed: str | None = None


class NotParked(Message, frozen=True, kw_only=True):
    """A request that shall go on is not parked here."""

    trajectory: TrajectoryId
    attempt: Attempt


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The last words of a process: why it can't go on."""

    reason: str
    by_user: bool = False
    """A mistake in the configuration, that starting again does not mend."""
    final: bool = False
    """The same would happen to the next life."""


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
    | Report
    | KvExported
    | KvImported
    | SlotTime
    | EngineStats
    | Heartbeat
    | StepMetrics
    | CheckpointWritten
    | RanksAddress
    | SaveDone
    | WorkerReady
    | ScoreResult
    | EnvResult
    | NotParked
    | WorkerFailed
)
