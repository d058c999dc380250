"""vLLM as a rollout engine: one batch for all slots, token in and token out.

    submit, load, abort, export, import_      between steps
    step()                                    pending loads -> one step of vLLM -> report

Invariants:
- a request goes to vLLM with the adapter of its slot's version, or to the one set of weights, which changes only while
  nothing runs; the version that vLLM reports for a response is compared with the version of the request;
- vLLM schedules: which requests wait or are pre-empted inside vLLM is its decision, and what it computes again is
  counted;
- tokens that vLLM had sampled when a request was withdrawn were reported before.

Differences from the built-in engine: vLLM draws its own random numbers, so the tokens of a request depend on its batch;
the number of threads is fixed at the start; and a request that leaves vLLM without its KV is prefilled again.
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
from dora_rl.engine.reports import Reports
from dora_rl.engine.request_checks import check_request, contains_stop, stop_window
from dora_rl.engine.requests import FinishReason, Request, StepOutput
from dora_rl.engine.stats import Stats
from dora_rl.engine.vllm.accounting import StepAccounting
from dora_rl.engine.vllm.active_requests import ActiveRequests
from dora_rl.engine.vllm.core import Core, Output
from dora_rl.engine.vllm.kv_transfer import check_frame, imported_kv, pack
from dora_rl.engine.vllm.probe import VllmProber
from dora_rl.engine.vllm.sequence import VllmSequence
from dora_rl.engine.vllm.serving import Serving, label

Clock = Callable[[], Nanoseconds]


class VllmSlot:
    """The version that a slot serves or is about to load."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.fingerprint: Fingerprint = ""
        self.loading: Version | None = None


class VllmEngine:
    """One rollout engine. It is not thread-safe: one thread calls it."""

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
        self._accounting = StepAccounting(clock)
        self._segments = SegmentPool()
        self._sequences: dict[TrajectoryId, VllmSequence] = {}
        self._active = ActiveRequests(core, serving.adapter)
        self._reports = Reports(instance)
        self._prober = VllmProber(core, config.probe_tolerance, self._receive)

    # Slots.

    def serving(self, slot: int) -> Version | None:
        """Return the version that a slot serves, or None."""
        return self._slot(slot).version

    def load(self, slot: int, version: Version, *, in_flight: bool = False) -> None:
        """Load a version in the next step, which reports `SlotLoaded` or `SlotLoadFailed`."""
        target = self._slot(slot)
        if in_flight:
            raise SlotError(
                "vLLM can't change the weights under running requests; mode 'partial' needs the engine 'builtin'"
            )
        if target.loading is not None:
            raise SlotError(f"slot {slot} is already loading version {target.loading}")
        self.unload(slot)
        target.loading = version

    def unload(self, slot: int) -> None:
        """Stop serving from a slot that has no requests, and release its weights."""
        target = self._slot(slot)
        if any(sequence.slot == slot for sequence in self._sequences.values()):
            raise SlotError(f"slot {slot} still has requests of version {target.version}")
        self._serving.unload(slot)
        target.version, target.fingerprint = None, ""

    def wait_for_loads(self) -> None:
        """Do all pending loads."""
        self._load_all()

    def note_idle(self, slot: int, cause: IdleCause) -> None:
        """Account idle time to this cause; all slots share one account, so it counts when no slot has work."""
        self._slot(slot)
        if not self._active:
            self._accounting.record_idle(cause)

    def set_threads(self, threads: int) -> None:
        """Do nothing: vLLM's kernels keep the number of threads that they were started with."""

    # Requests.

    def submit(self, request: Request, slot: int) -> None:
        """Accept a request, or refuse it with a typed error."""
        target = self._slot(slot)
        if target.version is None or target.version != request.version:
            raise VersionError(f"slot {slot} serves version {target.version}, not {request.version}")
        self._check(request)
        sequence = VllmSequence(request, slot, target.fingerprint, self._core.context)
        try:
            self._active.add(sequence)
        except ValueError as error:
            raise PromptError(f"vLLM refuses trajectory {request.trajectory}: {error}") from error
        self._sequences[request.trajectory] = sequence

    def has(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Return whether this attempt is here, running, waiting or parked."""
        sequence = self._sequences.get(trajectory)
        return sequence is not None and sequence.request.attempt == attempt

    def abort(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Forget this attempt, and return whether it was here."""
        if not self.has(trajectory, attempt):
            return False
        sequence = self._sequences.pop(trajectory)
        self._flush(sequence)
        self._active.withdraw([sequence])
        return True

    def extend(self, trajectory: TrajectoryId, attempt: Attempt, tokens: Iterable[int]) -> None:
        """Append the environment's tokens to a parked request and resume it; vLLM's cache may still have its KV."""
        sequence = self._parked(trajectory, attempt)
        added = list(tokens)
        if any(not 0 <= token < self._core.vocab for token in added):
            raise PromptError(f"the environment of trajectory {trajectory} returned an unknown token id")
        length = len(sequence.tokens) + len(added)
        if length >= sequence.limit:
            raise PromptError(f"trajectory {trajectory} would have {length} tokens, and {sequence.limit} are allowed")
        sequence.known = len(sequence.tokens) - 1
        sequence.tokens.extend(added)
        sequence.reported += len(added)
        sequence.turn_start = sequence.response_length
        self._active.add(sequence)

    def end(self, trajectory: TrajectoryId, attempt: Attempt) -> None:
        """Report a parked request as generated: its last turn is over."""
        sequence = self._parked(trajectory, attempt)
        del self._sequences[trajectory]
        self._reports.generated(sequence, self.kv_tokens)

    def export(self, trajectories: Iterable[TrajectoryId], *, shared: bool = True) -> KvBundle:
        """Remove requests and return them with their tokens and KV; what they have sampled is reported here."""
        start = self._clock()
        leaving = [self._sequence(trajectory) for trajectory in trajectories]
        parked = {sequence for sequence in leaving if sequence.name is None}
        for sequence in leaving:
            self._flush(sequence)
        taken = self._active.withdraw(leaving, with_kv=True)
        try:
            bundle = pack(taken, parked, self._core.transit, self._segments if shared else None)
        except BundleError:
            for sequence, kv in taken.items():
                if sequence not in parked:
                    self._active.add(sequence, kv)
            raise
        for sequence in leaving:
            del self._sequences[sequence.request.trajectory]
        self.stats.exported += len(leaving)
        self._accounting.record_activity(Activity(ActivityLabel.MIGRATE, leaving[0].request.version), start)
        return bundle

    def import_(self, bundle: KvBundle, slot: int) -> tuple[tuple[TrajectoryId, ...], tuple[BundleError, ...]]:
        """Resume the requests of a bundle; return those that arrived, and an error for each of the others."""
        start = self._clock()
        target = self._slot(slot)
        arrived, errors = [], []
        for frame in bundle.frames():
            try:
                moved = check_frame(frame, target.version, target.fingerprint)
                kv = imported_kv(moved, frame, self._core.transit)
                self._check(moved.request)
            except RequestError as error:
                errors.append(error if isinstance(error, BundleError) else BundleError(str(error)))
                continue
            sequence = VllmSequence(moved.request, slot, target.fingerprint, self._core.context)
            sequence.known = moved.known
            sequence.keep_alive = None if kv is None else bundle
            self._sequences[moved.request.trajectory] = sequence
            if not moved.parked:
                self._active.add(sequence, kv)
            arrived.append(moved.request.trajectory)
        bundle.release()
        self.stats.imported += len(arrived)
        self._accounting.record_activity(Activity(ActivityLabel.MIGRATE, target.version), start)
        return tuple(arrived), tuple(errors)

    # State.

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        loading = any(slot.loading is not None for slot in self.slots)
        return bool(self._active) or loading or bool(self._reports)

    @property
    def running(self) -> int:
        """Number of requests inside vLLM, which may let some of them wait."""
        return len(self._active)

    @property
    def accounts(self) -> list[TimeAccount]:
        """All slots decode in one batch, so there is one account."""
        return [self._accounting.account]

    @property
    def stats(self) -> Stats:
        """Counters since the engine began."""
        return self._accounting.stats

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV blocks in use."""
        return round(self._core.counters.usage * self._core.kv_tokens) if self._active else 0

    def spec(self) -> InstanceSpec:
        """Return the capacity of this instance."""
        return InstanceSpec(
            instance=self.instance,
            slots=len(self.slots),
            max_requests=self.config.max_requests,
            kv_tokens=self._core.kv_tokens,
            one_batch=True,
        )

    def progress(self) -> Progress:
        """Return the heartbeat: KV in use and the length of each response."""
        tokens = {trajectory: sequence.response_length for trajectory, sequence in self._sequences.items()}
        return Progress(instance=self.instance, kv_tokens=self.kv_tokens, tokens=tokens)

    # One step.

    def step(self) -> StepOutput:
        """Compute one step of vLLM, for all slots together; return the reports."""
        self._load_all()
        start = self._clock()
        if self._active:
            versions = {sequence.request.version for sequence in self._active.by_name.values()}
            for output in self._core.step():
                self._receive(output)
            self._accounting.record_step(start, versions)
            if self._accounting.record_preemptions(self._core.counters):
                self._reports.event(KvPressure(instance=self.instance, kv_tokens=self.kv_tokens))
        elif self._accounting.account.current.label is not ActivityLabel.IDLE:
            self._accounting.record_idle(IdleCause(reason=IdleReason.NO_PROMPTS))
        return self.drain()

    def drain(self) -> StepOutput:
        """Return what there is to report without computing."""
        return self._reports.take()

    # Loads.

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
                probe = self._prober.check(self._serving.probe(index), self._serving.adapter(index), where, version)
            except (DoraError, OSError, ValueError, KeyError, RuntimeError) as error:
                differs = isinstance(error, ProbeError)
                if differs:
                    self._serving.unload(index)
                failed = SlotLoadFailed(slot=where, version=version, reason=str(error), differs=differs)
                self._reports.event(failed)
            else:
                slot.version = version
                loaded = SlotLoaded(slot=where, version=version, fingerprint=slot.fingerprint, probe=probe)
                self._reports.event(loaded)
            self._accounting.record_activity(Activity(ActivityLabel.LOAD, version), start)

    # Requests inside vLLM.

    def _receive(self, output: Output) -> None:
        """Take over what one step of vLLM gave for one request."""
        sequence = self._active.by_name.get(output.name)
        if sequence is None:
            return  # the request was withdrawn
        self._compare(sequence, output)
        if not sequence.computed and output.tokens:
            self._accounting.record_prefill(sequence, output.cached)
            sequence.computed = len(sequence.tokens)
            self._active.kv_used(sequence)
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            if not math.isfinite(logprob):
                self._fail(sequence, "the model's logits are not finite numbers")
                return
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob if sequence.request.sampling.temperature else 0.0)
            sequence.computed += 1
        self._accounting.record_decode(sequence.request.version, len(output.tokens))
        if output.reason is None and not self._contains_stop(sequence):
            if sequence.response_length - sequence.reported >= self.config.stream_every:
                self._flush(sequence)
            return
        if output.reason in (None, "stop", "length"):
            self._finish(sequence, ended=output.reason is not None)
        else:
            self._fail(sequence, f"vLLM ended it with '{output.reason}'")

    def _flush(self, sequence: VllmSequence) -> None:
        """Report the tokens that were sampled since the last report."""
        if sequence.response_length > sequence.reported:
            self._reports.chunk(sequence.flush())

    def _finish(self, sequence: VllmSequence, *, ended: bool) -> None:
        """End a turn; `ended`: vLLM itself has ended the request."""
        request = sequence.request
        if ended:
            self._active.forget(sequence)
        else:
            self._active.withdraw([sequence])
        self._flush(sequence)
        if not ended or sequence.tokens[-1] in request.sampling.stop_ids:
            reason = FinishReason.STOP
        else:
            reason = (
                FinishReason.LENGTH if sequence.response_length >= request.sampling.max_tokens else FinishReason.CONTEXT
            )
        parks = request.parks and reason is FinishReason.STOP and len(sequence.tokens) + 1 < sequence.limit
        self._reports.finished(sequence, reason)
        if parks:
            self._reports.parked(sequence, self.kv_tokens)
        else:
            del self._sequences[request.trajectory]
            self._reports.generated(sequence, self.kv_tokens)

    def _fail(self, sequence: VllmSequence, reason: str) -> None:
        self._active.withdraw([sequence])
        self._flush(sequence)
        del self._sequences[sequence.request.trajectory]
        self._reports.finished(sequence, FinishReason.FAILED)
        self._reports.failed(sequence, reason)

    def _compare(self, sequence: VllmSequence, output: Output) -> None:
        """Compare the version that vLLM reports with the version of the request."""
        expected = label(sequence.request.version)
        if output.versions - {expected}:
            raise IntegrityError(
                f"vLLM reports that trajectory {sequence.request.trajectory} was sampled from "
                f"{', '.join(sorted(output.versions))}, but the request is for {expected}"
            )

    def _contains_stop(self, sequence: VllmSequence) -> bool:
        stops = sequence.request.sampling.stop
        turn = sequence.response[sequence.turn_start :]
        return bool(stops) and contains_stop(turn[-stop_window(stops) :], stops, self._tokenizer)

    # Lookups and checks.

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
