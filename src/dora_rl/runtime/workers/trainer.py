"""The trainer worker: one rank of the trainer, in its own process.

    TrainGroups, Apply, Publish -> trainer -> Accumulated, Trained, Published, Checkpointed

It starts once no other trainer of the run is alive anywhere, from the newest intact checkpoint. A damaged checkpoint is
set aside and the one before it is used; the supervisor sends the groups since then again.
"""

from __future__ import annotations

import fcntl
import logging
import time
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import torch

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import CheckpointError, FingerprintError
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.core.types import Version
from dora_rl.models.loading import load
from dora_rl.runtime.checkpoint_manifest import checkpoint_names, manifest
from dora_rl.runtime.run_dir import RunDir, parse
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.workers import thread_spinning
from dora_rl.runtime.workers.ranks import MessageBroadcast, NullChannel, join
from dora_rl.trainer import checkpoint
from dora_rl.trainer.logprob_gap import explained_by_sampling
from dora_rl.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 5.0
"""For the next message, before the channel is checked again."""


class TrainerWorker:
    """Serves one rank of the trainer."""

    def __init__(self, start: m.StartWorker, channel: Channel[m.ToWorker], address: str) -> None:
        torch.set_num_threads(start.threads)
        thread_spinning.watch()
        self._run_dir = RunDir.open(start.folder)
        config = parse(start.config)
        self._config = config
        self._channel = channel
        rank_group = join(start, channel, config.model.device, address)
        self._broadcast = MessageBroadcast(rank_group)
        self._reports: Channel[m.ToWorker] | NullChannel = channel if rank_group.rank == 0 else NullChannel()
        torch.manual_seed(config.seed)
        loaded = load(config.model)
        self._tokenizer = loaded.tokenizer
        sampling = config.sampling
        truncation = explained_by_sampling(sampling.top_p, sampling.top_k, sampling.min_p)
        self._trainer = Trainer(
            loaded.model,
            config.trainer_settings(),
            rank_group=rank_group,
            truncation=truncation,
            max_staleness=config.control.largest_staleness,
            seed=config.seed,
        )
        self._trainer.routers.check_replay()
        self._store = self._run_dir.store(config)
        if rank_group.rank == 0:
            self._lock = _acquire_lock(self._run_dir)
            self._store.sweep()
            checkpoint.delete_partial(self._run_dir.checkpoints)  # the last version may never be saved again
        self._checkpoint_due = False
        """A checkpoint is written once the current version is published."""
        self._checkpointed: Version | None = None
        """The version of the newest checkpoint."""
        self._last_step: m.StepMetrics | None = None
        """Metrics of the step that made this version; the checkpoint has them too."""
        self._restore()

    def serve(self, messages: list[m.ToWorker]) -> None:
        """Serve until the supervisor says stop or is gone."""
        if self._checkpointed is None:
            self._checkpoint()  # a crash before the first step goes back to the same weights
        else:
            self._report_checkpoint(checkpoint.latest(self._run_dir.checkpoints), restored=True)
            if self._last_step is not None:
                self._reports.send(self._last_step)  # the supervisor may have ended before it stored them
        self._report(e.TrainerReady(version=self._trainer.version))
        while True:
            for message in self._broadcast.share(merged(messages)):
                if isinstance(message, m.StopWorker):
                    return
                self._handle(message)
            messages = self._receive() if self._broadcast.is_source else []

    def _receive(self) -> list[m.ToWorker]:
        """The next messages of the supervisor; if it is gone, `StopWorker`."""
        messages: list[m.ToWorker] = []
        while not messages:
            if self._channel.closed:
                return [m.StopWorker()]
            self._channel.wait(_WAIT_SECONDS)
            messages = self._channel.receive()
        return messages

    def _handle(self, message: m.ToWorker) -> None:
        match message:
            case m.TrainGroups():
                self._trainer.accumulate(message.step, [group(one) for one in message.groups])
                self._report(e.Accumulated(step=message.step, attempt=message.attempt, groups=len(message.groups)))
            case m.RunCommand(command=c.Apply() as command):
                report = self._trainer.apply(command.step)
                self._last_step = m.StepMetrics(step=command.step, metrics=report.metrics)
                self._reports.send(self._last_step)
                self._report(e.Trained(step=command.step, attempt=command.attempt))
                self._checkpoint_due = self._trainer.version % self._config.checkpoint.every == 0
            case m.RunCommand(command=c.Publish() as command):
                fingerprint = self._publish(command.version)
                self._report(
                    e.Published(
                        version=command.version,
                        attempt=command.attempt,
                        fingerprint=fingerprint,
                        probe=self._probe_digest(command.version),
                    )
                )
                if self._checkpoint_due:
                    self._checkpoint()
            case m.SaveCheckpoint():
                if self._checkpointed != self._trainer.version:
                    self._checkpoint()
                self._reports.send(
                    m.SaveDone(version=self._trainer.version, path=str(checkpoint.latest(self._run_dir.checkpoints)))
                )
            case m.SetThreads(count=count):
                torch.set_num_threads(count)
            case _:
                raise AssertionError(f"not a message for the trainer: {message}")

    def _publish(self, version: Version) -> str:
        """Publish a version. No instance knows it yet, even if a trainer that died had already written it."""
        fingerprint, differs = "", False
        begin = time.monotonic()
        try:
            fingerprint = self._trainer.publish(version, self._store)
        except FingerprintError:
            # Groups that arrived in another order give slightly other weights. No instance has loaded the old ones.
            self._store.retire(version)
            differs = True
        if self._trainer.rank_group.any(differs):  # one rank writes, but all ranks gather the weights
            fingerprint = self._trainer.publish(version, self._store)
        logger.info("published version %d in %.3f s", version, time.monotonic() - begin)
        return fingerprint

    def _probe_digest(self, version: Version) -> str:
        """Digest of the probe in the store, which is what slots are compared with."""
        if self._trainer.rank_group.rank:
            return ""  # only rank 0 reports
        probe = self._store.manifest(version).probe
        return "" if probe is None else probe.digest

    def _checkpoint(self) -> None:
        self._checkpoint_due = False
        begin = time.monotonic()
        directory, keep = self._run_dir.checkpoints, self._config.checkpoint.keep
        last = None if self._last_step is None else msgspec.to_builtins(self._last_step)
        path = checkpoint.save(directory, self._trainer, last_step=last, tokenizer=self._tokenizer, keep=keep)
        self._checkpointed = self._trainer.version
        logger.info("wrote checkpoint %s in %.3f s", path.name, time.monotonic() - begin)
        self._report_checkpoint(path)
        # The event has the oldest version that the run may have to go back to.
        self._report(e.Checkpointed(version=checkpoint.versions(directory)[0]))

    def _report_checkpoint(self, path: Path | None, *, restored: bool = False) -> None:
        """Report a checkpoint; a restored one too, since the trainer that wrote it may have ended before it could."""
        if path is not None and self._broadcast.is_source:
            kept = tuple(checkpoint_names(self._run_dir.checkpoints))
            self._reports.send(m.CheckpointWritten(name=path.name, files=manifest(path), kept=kept, restored=restored))

    def _restore(self) -> None:
        while (path := checkpoint.latest(self._run_dir.checkpoints)) is not None:
            try:
                restored = checkpoint.restore(path, self._trainer)
                self._checkpointed = restored.version
                logger.info("restored checkpoint %s", path.name)
                if restored.last_step is not None:
                    self._last_step = msgspec.convert(restored.last_step, m.StepMetrics)
                return
            except CheckpointError as error:
                self._trainer.rank_group.barrier()  # all ranks have read it and found the same damage
                if self._trainer.rank_group.rank == 0:
                    _set_aside(path)
                self._trainer.rank_group.barrier()
                logger.warning("%s; going back to the checkpoint before it", error)
        if self._run_dir.checkpoints.is_dir() and any(self._run_dir.checkpoints.glob(f"{checkpoint.DAMAGED}*")):
            raise CheckpointError(f"no checkpoint in {self._run_dir.checkpoints} can be read any more")

    def _report(self, event: e.AnyEvent) -> None:
        self._reports.send(m.TrainerReport(events=(event,)))


def merged(messages: list[m.ToWorker]) -> list[m.ToWorker]:
    """Join groups that arrived while the trainer was busy: larger forward passes cost less per token."""
    result: list[m.ToWorker] = []
    for message in messages:
        last = result[-1] if result else None
        if (
            isinstance(message, m.TrainGroups)
            and isinstance(last, m.TrainGroups)
            and (last.step, last.attempt) == (message.step, message.attempt)
        ):
            result[-1] = msgspec.structs.replace(last, groups=last.groups + message.groups)
        else:
            result.append(message)
    return result


def group(sampled: m.SampledGroup) -> Group:
    """The trainer's record of a group."""
    return Group(id=sampled.id, trajectories=tuple(map(_trajectory, sampled.trajectories)))


def _trajectory(sampled: m.SampledTrajectory) -> Trajectory:
    return Trajectory.from_chunks(
        sampled.id,
        sampled.version,
        np.frombuffer(sampled.prompt, dtype=np.int32),
        sampled.chunks,
        sampled.reward,
        sampled.stop_reason,
    )


def _acquire_lock(run_dir: RunDir) -> IO[str]:
    """Wait for the trainer lock: two trainers must not write to one run. The lock ends with the process."""
    file = run_dir.trainer_lock.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _set_aside(path: Path) -> None:
    path.rename(path.with_name(f"{checkpoint.DAMAGED}{path.name}"))
