"""vLLM as a rollout engine: one batch for all slots, token in and token out.

    submit, load, abort, export, import_      between steps
    step()                                    loads that are due -> one step of vLLM -> report

Invariants:
- a request goes to vLLM with the adapter of its slot's version, or with the one set of weights, and those change only
  while nothing runs; vLLM's own stamp on what it says is compared with the version;
- vLLM schedules: who waits and who is pre-empted there is its business, and what it computes again is counted;
- tokens that vLLM had when a request left it were reported before.

What differs from the built-in engine: random numbers are vLLM's own, so what a request says depends on its batch; the
number of threads is that of the start; and where a request leaves vLLM without its KV, it is prefilled again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.errors import (
    BundleError,
    DoraError,
    IntegrityError,
    ProbeError,
    PromptError,
    RequestError,
    SlotError,
    VersionError,
)
from dora_rl.core.events import KvPressure, Progress, SlotLoaded, SlotLoadFailed
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.core.types import (
    Attempt,
    Fingerprint,
    InstanceId,
    InstanceSpec,
    Nanoseconds,
    SlotId,
    TrajectoryId,
    Version,
)
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.kv_transfer.format import KvBundle
from dora_rl.engine.kv_transfer.shared_memory import SegmentPool
from dora_rl.engine.request_checks import check_request, reach, says_stop
from dora_rl.engine.requests import FinishReason, Request, StepOutput
from dora_rl.engine.stats import Stats
from dora_rl.engine.vllm.accounting import StepAccounting
from dora_rl.engine.vllm.active_requests import ActiveRequests
from dora_rl.engine.vllm.core import Core, Output
from dora_rl.engine.vllm.kv_transfer import brought, pack, sound
from dora_rl.engine.vllm.probe import VllmProbe
from dora_rl.engine.vllm.reports import Reports
from dora_rl.engine.vllm.sequence import VllmSequence
from dora_rl.engine.vllm.serving import Serving, label

Clock = Callable[[], Nanoseconds]


class VllmSlot:
    """One place for one version."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.fingerprint: Fingerprint = ""
        self.loading: Version | None = None


class VllmEngine:
    """One rollout engine. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        core: Core,
        serving: Serving,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        instance: InstanceId = "engine",
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self.config = config
        self.instance = instance
        self.kernels = f"vLLM {core.version}"
        self.slots = [VllmSlot() for _ in range(serving.slots)]
        self._core = core
        self._serving = serving
        self._tokenizer = tokenizer
        self._clock = clock
        self._tally = StepAccounting(clock)
        self._segments = SegmentPool()
        self._sequences: dict[TrajectoryId, VllmSequence] = {}
        self._hosted = ActiveRequests(core, serving.adapter)
        self._reports = Reports(instance)
        self._probing = VllmProbe(core, config.probe_tolerance, self._take)

    # Slots.

    def serving(self, slot: int) -> Version | None:
        """The version in a slot."""
        return self._slot(slot).version

    def load(self, slot: int, version: Version, *, in_flight: bool = False) -> None:
        """Load a version in the next step, which says `SlotLoaded` or `SlotLoadFailed`."""
        place = self._slot(slot)
        if in_flight:
            raise SlotError("vLLM can't change the weights under running requests here; mode `partial` needs 'builtin'")
        if place.loading is not None:
            raise SlotError(f"slot {slot} is already loading version {place.loading}")
        self.unload(slot)
        place.loading = version

    def unload(self, slot: int) -> None:
        """The slot serves nothing from now on and lets go of its weights."""
        place = self._slot(slot)
        if any(sequence.slot == slot for sequence in self._sequences.values()):
            raise SlotError(f"slot {slot} still has requests of version {place.version}")
        self._serving.unload(slot)
        place.version, place.fingerprint = None, ""

    def wait_for_loads(self) -> None:
        """Until every load that was asked for is done and its slot serves."""
        self._load_all()

    def note_idle(self, slot: int, cause: IdleCause) -> None:
        """Why a slot has nothing to do: the instance's time is one account, so it counts when all have nothing."""
        self._slot(slot)
        if not self._hosted:
            self._tally.idle(cause)

    def set_threads(self, threads: int) -> None:
        """Nothing: vLLM's kernels keep the number of threads that they were started with."""

    # Requests.

    def submit(self, request: Request, slot: int) -> None:
        """Take a request in, or refuse it with a typed error."""
        place = self._slot(slot)
        if place.version is None or place.version != request.version:
            raise VersionError(f"slot {slot} serves version {place.version}, not {request.version}")
        self._check(request)
        sequence = VllmSequence(request, slot, place.fingerprint, self._core.context)
        try:
            self._hosted.add(sequence)
        except ValueError as error:
            raise PromptError(f"vLLM refuses trajectory {request.trajectory}: {error}") from error
        self._sequences[request.trajectory] = sequence

    def has(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """This attempt is here, running, waiting or parked."""
        sequence = self._sequences.get(trajectory)
        return sequence is not None and sequence.request.attempt == attempt

    def abort(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Forget this attempt, should it be here."""
        if not self.has(trajectory, attempt):
            return False
        sequence = self._sequences.pop(trajectory)
        self._reports.flush(sequence)
        self._hosted.withdraw([sequence])
        return True

    def extend(self, trajectory: TrajectoryId, attempt: Attempt, tokens: Iterable[int]) -> None:
        """A parked request goes on after what its environment said; vLLM's cache may still have the rest."""
        sequence = self._parked(trajectory, attempt)
        said = list(tokens)
        if any(not 0 <= token < self._core.vocab for token in said):
            raise PromptError(f"what the environment of trajectory {trajectory} said has an unknown token id")
        length = len(sequence.tokens) + len(said)
        if length >= sequence.limit:
            raise PromptError(f"trajectory {trajectory} would have {length} tokens, and {sequence.limit} are allowed")
        sequence.known = len(sequence.tokens) - 1
        sequence.tokens.extend(said)
        sequence.reported += len(said)
        self._hosted.add(sequence)

    def end(self, trajectory: TrajectoryId, attempt: Attempt) -> None:
        """A parked request has had its last turn; it is reported as generated."""
        sequence = self._parked(trajectory, attempt)
        del self._sequences[trajectory]
        self._reports.generated(sequence, self.kv_tokens)

    def export(self, trajectories: Iterable[TrajectoryId], *, shared: bool = True) -> KvBundle:
        """Requests leave with their tokens and KV. What they sampled so far is reported here first."""
        start = self._clock()
        leaving = [self._sequence(trajectory) for trajectory in trajectories]
        parked = {sequence for sequence in leaving if sequence.name is None}
        for sequence in leaving:
            self._reports.flush(sequence)
        taken = self._hosted.withdraw(leaving, with_kv=True)
        try:
            bundle = pack(taken, parked, self._core.transit, self._segments if shared else None)
        except BundleError:
            for sequence, kv in taken.items():
                if sequence not in parked:
                    self._hosted.add(sequence, kv)
            raise
        for sequence in leaving:
            del self._sequences[sequence.request.trajectory]
        self.stats.exported += len(leaving)
        self._tally.spent(Activity(ActivityLabel.MIGRATE, leaving[0].request.version), start)
        return bundle

    def import_(self, bundle: KvBundle, slot: int) -> tuple[tuple[TrajectoryId, ...], tuple[BundleError, ...]]:
        """Requests of a bundle go on here: who arrived, and what was wrong with the rest."""
        start = self._clock()
        place = self._slot(slot)
        arrived, errors = [], []
        for frame in bundle.frames():
            try:
                moved = sound(frame, place.version, place.fingerprint)
                kv = brought(moved, frame, self._core.transit)
                self._check(moved.request)
            except RequestError as error:
                errors.append(error if isinstance(error, BundleError) else BundleError(str(error)))
                continue
            sequence = VllmSequence(moved.request, slot, place.fingerprint, self._core.context)
            sequence.known = moved.known
            sequence.keep_alive = None if kv is None else bundle
            self._sequences[moved.request.trajectory] = sequence
            if not moved.parked:
                self._hosted.add(sequence, kv)
            arrived.append(moved.request.trajectory)
        bundle.taken()
        self.stats.imported += len(arrived)
        self._tally.spent(Activity(ActivityLabel.MIGRATE, place.version), start)
        return tuple(arrived), tuple(errors)

    # What the engine is.

    @property
    def busy(self) -> bool:
        """There is something to do in a step."""
        loading = any(slot.loading is not None for slot in self.slots)
        return bool(self._hosted) or loading or bool(self._reports)

    @property
    def running(self) -> int:
        """Requests that vLLM has; it may let some of them wait."""
        return len(self._hosted)

    @property
    def accounts(self) -> list[TimeAccount]:
        """All slots decode in one batch, so there is one account."""
        return [self._tally.account]

    @property
    def stats(self) -> Stats:
        """What it has done so far."""
        return self._tally.stats

    @property
    def kv_tokens(self) -> int:
        """Tokens' worth of KV blocks in use."""
        return round(self._core.counters.usage * self._core.kv_tokens) if self._hosted else 0

    def spec(self) -> InstanceSpec:
        """What this instance can do."""
        return InstanceSpec(
            instance=self.instance,
            slots=len(self.slots),
            max_requests=self.config.max_requests,
            kv_tokens=self._core.kv_tokens,
            one_batch=True,
        )

    def progress(self) -> Progress:
        """Heartbeat: load, and how far each request is."""
        tokens = {trajectory: sequence.said for trajectory, sequence in self._sequences.items()}
        return Progress(instance=self.instance, kv_tokens=self.kv_tokens, tokens=tokens)

    # One step.

    def step(self) -> StepOutput:
        """One step of vLLM, for all slots together; gives what there is to report."""
        self._load_all()
        start = self._clock()
        if self._hosted:
            versions = {sequence.request.version for sequence in self._hosted.by_name.values()}
            for output in self._core.step():
                self._take(output)
            self._tally.stepped(start, versions)
            if self._tally.preempted(self._core.counters):
                self._reports.events.append(KvPressure(instance=self.instance, kv_tokens=self.kv_tokens))
        elif self._tally.account.current.label is not ActivityLabel.IDLE:
            self._tally.idle(IdleCause(reason=IdleReason.NO_PROMPTS))
        return self.drain()

    def drain(self) -> StepOutput:
        """What is waiting to be reported."""
        return self._reports.take()

    # Inside: weights.

    def _load_all(self) -> None:
        for index, slot in enumerate(self.slots):
            version = slot.loading
            if version is None:
                continue
            slot.loading = None
            where = SlotId(self.instance, index)
            start = self._clock()
            try:
                slot.fingerprint = self._serving.load(index, version)
                probe = self._probing.check(self._serving.probe(index), self._serving.adapter(index), where, version)
            except (DoraError, OSError, ValueError, KeyError, RuntimeError) as error:
                differs = isinstance(error, ProbeError)
                if differs:
                    self._serving.unload(index)
                failed = SlotLoadFailed(slot=where, version=version, reason=str(error), differs=differs)
                self._reports.events.append(failed)
            else:
                slot.version = version
                loaded = SlotLoaded(slot=where, version=version, fingerprint=slot.fingerprint, probe=probe)
                self._reports.events.append(loaded)
            self._tally.spent(Activity(ActivityLabel.LOAD, version), start)

    # Inside: requests in vLLM.

    def _take(self, output: Output) -> None:
        sequence = self._hosted.by_name.get(output.name)
        if sequence is None:
            return  # it was withdrawn
        self._compare(sequence, output)
        if not sequence.computed and output.tokens:
            self._tally.prefilled(sequence, output.cached)
            sequence.computed = len(sequence.tokens)
            self._hosted.placed(sequence)
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            if not math.isfinite(logprob):
                self._fail(sequence, "the model's logits are not finite numbers")
                return
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob if sequence.request.sampling.temperature else 0.0)
            sequence.computed += 1
        self._tally.decoded(sequence.request.version, len(output.tokens))
        if output.reason is None and not self._says_stop(sequence):
            if sequence.said - sequence.reported >= self.config.stream_every:
                self._reports.flush(sequence)
            return
        if output.reason in (None, "stop", "length"):
            self._end(sequence, ended=output.reason is not None)
        else:
            self._fail(sequence, f"vLLM ended it with '{output.reason}'")

    def _end(self, sequence: VllmSequence, *, ended: bool) -> None:
        """A turn is over; vLLM knows it already if `ended`."""
        request = sequence.request
        if ended:
            self._hosted.gone(sequence)
        else:
            self._hosted.withdraw([sequence])
        self._reports.flush(sequence)
        if not ended or sequence.tokens[-1] in request.sampling.stop_ids:
            reason = FinishReason.STOP
        else:
            reason = FinishReason.LENGTH if sequence.said >= request.sampling.max_tokens else FinishReason.CONTEXT
        parks = request.parks and reason is FinishReason.STOP and len(sequence.tokens) + 1 < sequence.limit
        self._reports.ended(sequence, reason)
        if parks:
            self._reports.parked(sequence, self.kv_tokens)
        else:
            del self._sequences[request.trajectory]
            self._reports.generated(sequence, self.kv_tokens)

    def _fail(self, sequence: VllmSequence, reason: str) -> None:
        self._hosted.withdraw([sequence])
        self._reports.flush(sequence)
        del self._sequences[sequence.request.trajectory]
        self._reports.ended(sequence, FinishReason.FAILED)
        self._reports.failed(sequence, reason)

    def _compare(self, sequence: VllmSequence, output: Output) -> None:
        """vLLM's own stamp says the version that we asked for."""
        expected = label(sequence.request.version)
        if output.versions - {expected}:
            raise IntegrityError(
                f"vLLM says that trajectory {sequence.request.trajectory} was sampled from "
                f"{', '.join(sorted(output.versions))}, but it was to be from {expected}"
            )

    def _says_stop(self, sequence: VllmSequence) -> bool:
        stops = sequence.request.sampling.stop
        return bool(stops) and says_stop(sequence.response[-reach(stops) :], stops, self._tokenizer)

    # Checks.

    def _check(self, request: Request) -> None:
        core = self._core
        if request.trajectory in self._sequences:
            raise RequestError(f"trajectory {request.trajectory} is already here")
        check_request(request, vocab=core.vocab, context=core.context, tokenizer=self._tokenizer)
        limit = request.length_limit(core.context)
        if limit > core.kv_tokens:
            raise PromptError(
                f"trajectory {request.trajectory} may grow to {limit} tokens, but kv_bytes allows {core.kv_tokens}; "
                "raise kv_bytes or lower max_tokens"
            )

    def _slot(self, index: int) -> VllmSlot:
        if not 0 <= index < len(self.slots):
            raise SlotError(f"there is no slot {index}: the engine has {len(self.slots)}")
        return self.slots[index]

    def _parked(self, trajectory: TrajectoryId, attempt: Attempt) -> VllmSequence:
        sequence = self._sequences.get(trajectory)
        if sequence is None or sequence.request.attempt != attempt or sequence.name is not None:
            raise RequestError(f"trajectory {trajectory}, attempt {attempt}, is not parked here")
        return sequence

    def _sequence(self, trajectory: TrajectoryId) -> VllmSequence:
        sequence = self._sequences.get(trajectory)
        if sequence is None:
            raise RequestError(f"trajectory {trajectory} is not here")
        return sequence
