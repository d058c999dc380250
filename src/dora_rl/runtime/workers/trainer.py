"""The trainer in a process of its own.

    Train, Apply, Publish -> trainer -> Accumulated, Trained, Published, Checkpointed

It starts when no other trainer of the run is alive anywhere, from the newest sound checkpoint. A damaged one is set
aside and the one before it is taken; the groups since then come again.
"""

from __future__ import annotations

import fcntl
import sys
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
from dora_rl.runtime.workers import thread_spinning as spinning
from dora_rl.runtime.workers.ranks import MessageBroadcast, NullChannel, gather
from dora_rl.trainer import checkpoint
from dora_rl.trainer.logprob_gap import explained_by_sampling
from dora_rl.trainer.trainer import Trainer

_IDLE = 5.0


class TrainerWorker:
    """The process."""

    def __init__(self, start: m.StartWorker, channel: Channel[m.ToWorker], address: str) -> None:
        torch.set_num_threads(start.threads)
        spinning.watch()
        self._folder = RunDir.open(start.folder)
        config = parse(start.config)
        self._config = config
        self._channel = channel
        rank_group = gather(start, channel, config.model.device, address)
        self._ears = MessageBroadcast(rank_group)
        self._mouth: Channel[m.ToWorker] | NullChannel = channel if rank_group.rank == 0 else NullChannel()
        torch.manual_seed(config.seed)
        loaded = load(config.model)
        self._tokenizer = loaded.tokenizer
        settings = config.trainer.model_copy(update={"temperature": config.sampling.temperature})
        sampling = config.sampling
        truncation = explained_by_sampling(sampling.top_p, sampling.top_k, sampling.min_p)
        self._trainer = Trainer(loaded.model, settings, rank_group=rank_group, truncation=truncation, seed=config.seed)
        self._trainer.routers.check_replay()
        self._store = self._folder.store(config)
        if rank_group.rank == 0:
            self._sole = _wait_to_be_sole(self._folder)
            self._store.sweep()
        self._due = False
        """A checkpoint is to be written after the next publishing."""
        self._saved: Version | None = None
        """The version of the last checkpoint."""
        self._stepped: m.StepMetrics | None = None
        """Figures of the step that made this version; they are in its checkpoint too."""
        self._restore()

    def serve(self, messages: list[m.ToWorker]) -> None:
        """Until told to stop, or alone."""
        if self._saved is None:
            self._checkpoint()  # so that a crash before the first step goes back to the same weights
        else:
            self._report_checkpoint(checkpoint.latest(self._folder.checkpoints), restored=True)
            if self._stepped is not None:
                self._mouth.send(self._stepped)  # a supervisor that ended meanwhile may have lost these figures
        self._tell(e.TrainerReady(version=self._trainer.version))
        while True:
            for message in self._ears.share(merged(messages)):
                if isinstance(message, m.StopWorker):
                    return
                self._hear(message)
            if self._ears.alone:
                messages = self._listen()
            else:
                messages = []

    def _listen(self) -> list[m.ToWorker]:
        """What the supervisor says next; a supervisor that is gone says stop."""
        messages: list[m.ToWorker] = []
        while not messages:
            if self._channel.closed:
                return [m.StopWorker()]
            self._channel.wait(_IDLE)
            messages = self._channel.receive()
        return messages

    def _hear(self, message: m.ToWorker) -> None:
        match message:
            case m.TrainGroups():
                self._trainer.accumulate(message.step, [group(one) for one in message.groups])
                self._tell(e.Accumulated(step=message.step, attempt=message.attempt, groups=len(message.groups)))
            case m.RunCommand(command=c.Apply() as command):
                report = self._trainer.apply(command.step)
                self._stepped = m.StepMetrics(step=command.step, metrics=report.metrics)
                self._mouth.send(self._stepped)
                self._tell(e.Trained(step=command.step, attempt=command.attempt))
                self._due = self._trainer.version % self._config.checkpoint.every == 0
            case m.RunCommand(command=c.Publish() as command):
                fingerprint = self._publish(command.version)
                self._tell(
                    e.Published(
                        version=command.version,
                        attempt=command.attempt,
                        fingerprint=fingerprint,
                        probe=self._probe_digest(command.version),
                    )
                )
                if self._due:
                    self._checkpoint()
            case m.SaveCheckpoint():
                if self._saved != self._trainer.version:
                    self._checkpoint()
                self._mouth.send(
                    m.SaveDone(version=self._trainer.version, path=str(checkpoint.latest(self._folder.checkpoints)))
                )
            case m.SetThreads(count=count):
                torch.set_num_threads(count)
            case _:
                raise AssertionError(f"not for the trainer: {message}")

    def _publish(self, version: Version) -> str:
        """A version that is asked for is known to nobody yet, even if a trainer that died had written it already."""
        found, differs = "", False
        try:
            found = self._trainer.publish(version, self._store)
        except FingerprintError:
            # Groups that streamed in another order give other last bits. Nobody can have loaded the former ones.
            self._store.retire(version)
            differs = True
        # One rank writes, and all gather.
        return self._trainer.publish(version, self._store) if self._trainer.rank_group.any(differs) else found

    def _probe_digest(self, version: Version) -> str:
        """Of what stands in the store: that is what slots are compared with."""
        if self._trainer.rank_group.rank:
            return ""  # this rank says nothing
        probe = self._store.manifest(version).probe
        return "" if probe is None else probe.digest

    def _checkpoint(self) -> None:
        self._due = False
        folder, keep = self._folder.checkpoints, self._config.checkpoint.keep
        last = None if self._stepped is None else msgspec.to_builtins(self._stepped)
        path = checkpoint.save(folder, self._trainer, last_step=last, tokenizer=self._tokenizer, keep=keep)
        self._saved = self._trainer.version
        self._report_checkpoint(path)
        # What is told is the oldest that may be gone back to.
        self._tell(e.Checkpointed(version=checkpoint.versions(folder)[0]))

    def _report_checkpoint(self, path: Path | None, *, restored: bool = False) -> None:
        """One that was restored is reported too: the trainer that wrote it may have ended before it could."""
        if path is not None and self._ears.alone:
            kept = tuple(checkpoint_names(self._folder.checkpoints))
            self._mouth.send(m.CheckpointWritten(name=path.name, files=manifest(path), kept=kept, restored=restored))

    def _restore(self) -> None:
        while (path := checkpoint.latest(self._folder.checkpoints)) is not None:
            try:
                restored = checkpoint.restore(path, self._trainer)
                self._saved = restored.version
                if restored.last_step is not None:
                    self._stepped = msgspec.convert(restored.last_step, m.StepMetrics)
                return
            except CheckpointError as error:
                self._trainer.rank_group.barrier()  # all ranks have read it, and found the same
                if self._trainer.rank_group.rank == 0:
                    _set_aside(path)
                self._trainer.rank_group.barrier()
                print(f"{error}; going back to the checkpoint before it", file=sys.stderr)  # noqa: T201
        if self._folder.checkpoints.is_dir() and any(self._folder.checkpoints.glob(f"{checkpoint.DAMAGED}*")):
            raise CheckpointError(f"no checkpoint in {self._folder.checkpoints} can be read any more")

    def _tell(self, event: e.AnyEvent) -> None:
        self._mouth.send(m.Report(events=(event,)))


def merged(messages: list[m.ToWorker]) -> list[m.ToWorker]:
    """Groups that came while the trainer was busy, as one call: larger passes cost less a token."""
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


def group(sent: m.TrainedGroup) -> Group:
    """The trainer's record of a group."""
    return Group(id=sent.id, trajectories=tuple(_trajectory(one) for one in sent.trajectories))


def _trajectory(sent: m.TrainedTrajectory) -> Trajectory:
    prompt = np.frombuffer(sent.prompt, dtype=np.int32)
    response = np.frombuffer(sent.response, dtype=np.int32)
    spoken = np.ones(len(response), dtype=np.bool_)
    if sent.observed:
        spoken = ~np.frombuffer(sent.observed, dtype=np.bool_)
    logprobs = np.frombuffer(sent.logprobs, dtype=np.float32)
    experts = None
    if sent.experts:
        said = np.frombuffer(sent.experts, dtype=np.int16).reshape(-1, *sent.experts_shape)
        # A token's record is of the pass that gave its logits, which is the pass over the token before it. What the
        # environment said has none.
        experts = np.full((len(prompt) + len(response), *sent.experts_shape), -1, dtype=np.int16)
        experts[len(prompt) - 1 : -1][spoken] = said
    return Trajectory(
        id=sent.id,
        version=sent.version,
        tokens=np.concatenate([prompt, response]),
        loss_mask=np.concatenate([np.zeros(len(prompt), dtype=np.bool_), spoken]),
        behaviour_logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), logprobs]),
        reward=sent.reward,
        stop_reason=sent.stop_reason,
        routed_experts=experts,
    )


def _wait_to_be_sole(folder: RunDir) -> IO[str]:
    """Two trainers must not write to one folder. The lock is let go of with the process that has it."""
    file = folder.trainer_lock.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _set_aside(path: Path) -> None:
    path.rename(path.with_name(f"{checkpoint.DAMAGED}{path.name}"))
