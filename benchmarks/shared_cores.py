"""The simulator's runtime on a machine whose processes share its cores.

The simulator gives each instance and the trainer separate devices. On a CPU they are processes on the same cores, so
this runtime slows them down to the share of the cores that the operating system gives them. Nothing else changes: the
orchestrator, the batching of the instances and the trainer are those of `dora_rl.sim`.

- The supervisor uses a fixed amount of processor time for each generated token.
- The rest is shared by weight, as Linux does it: instances have a higher niceness than the trainer
  (`runtime.launch.cpu_allocation`), and one level of niceness changes the weight by a factor of 1.25. No process gets
  more cores than it has threads.
- Threads are allocated as in the runtime (`runtime.launch.cpu_allocation.share`); the speed-up by more threads is
  measured.
- A call of the trainer keeps the speed with which it began.

Every number in `Measured` is a time that `benchmarks.reality` measures on this machine for one component by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dora_rl.core import events as e
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.interfaces import drive
from dora_rl.core.types import DecodeCost, InstanceSpec, Nanoseconds
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.runtime.launch.cpu_allocation import niceness, share
from dora_rl.sim.config import SimConfig
from dora_rl.sim.costs import Costs
from dora_rl.sim.instance import SimInstance
from dora_rl.sim.run import MeasuredRuntime, Result, Variant
from dora_rl.sim.workload import Source

_ROUNDS = 8
_NEVER = dict.fromkeys(("load", "move", "score", "tool", "heartbeat", "progress", "train", "stall"), 1e7)
"""Deadlines that never pass, since nothing fails here."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Costs in seconds, on one core unless a field's docstring says otherwise."""

    step_base: float
    """Fixed cost of a decode step."""
    per_request: float
    """Cost of each request in a decode step."""
    per_token: float
    """Cost of each token of context in a decode step."""
    per_generated: float
    """Cost of the supervisor and the reward workers for each generated token."""
    train_call: float
    """Fixed cost of a call of the trainer with finished groups."""
    train_token: float
    apply: float
    durable: float
    """From an event until it is on disk; nothing is computed in the meantime."""
    score: float
    """From the end of a response to its reward."""
    publish: float
    load: float
    move: float
    """Cost of moving one KV bundle."""
    decode_speed: float
    """Speed of an instance alone on all cores, as a multiple of its speed on one."""
    train_speed: float
    """Speed of the trainer alone on all cores, as a multiple of its speed on one."""


class MeasuredCosts(Costs):
    """The simulator's costs, with a fixed cost for each call of the trainer."""

    def __init__(self, config: SimConfig, measured: Measured, runtime: SharedCores) -> None:
        super().__init__(config)
        self._measured = measured
        self._runtime = runtime

    def train(self, tokens: int, devices: int) -> float:
        del devices
        return (self._measured.train_call + self._measured.train_token * tokens) / self._runtime.trainer_speed()


class SharedInstance(SimInstance):
    """An instance that has a share of a core."""

    speed = 1.0
    _rest = 0.0
    """Fraction of a nanosecond of work that is not yet counted: `advance` may be called every few nanoseconds."""

    def advance(self, now: Nanoseconds) -> None:
        whole, self._rest = divmod((now - self._since) * self.speed + self._rest, 1.0)
        self._since = now - int(whole)
        super().advance(now)

    def next_wake(self) -> Nanoseconds | None:
        wake = super().next_wake()
        if wake is None or self._stall_end is not None:
            return wake
        return self._since + math.ceil((wake - self._since) / self.speed)

    @property
    def works(self) -> bool:
        return bool(self._active) and not self.paused

    @property
    def rate(self) -> float:
        """Tokens per second on a whole core."""
        return self._active / self._pace()[0]


class InOrder(Source):
    """A trace in its recorded order, because the predicted run had the same prompts in the same order."""

    def _trace_group(self, prompt: int) -> int:
        assert self._groups is not None
        return prompt % len(self._groups)


class SharedCores(MeasuredRuntime):
    """Instances and a trainer that share a number of cores."""

    def __init__(self, config: SimConfig, measured: Measured, cores: int) -> None:
        self._cores = cores
        self._overlap = config.control.mode != "sync"
        levels = niceness(cores, config.devices - (config.trainer_devices or 0), overlap=self._overlap)
        self._weight = 1.25**-levels
        """Weight of an instance; the trainer's is 1."""
        self._measured = measured
        super().__init__(config, "disaggregated", keep_segments=False, progress=None)
        self.costs = MeasuredCosts(config, measured, self)
        control = config.control
        self.source = InOrder(config.workload, control.group_size, control.max_response_tokens, config.seed)

    def _add_instance(self, number: int, *, shares_trainer: bool, keep_segments: bool) -> None:
        rollout = self.config.rollout
        spec = InstanceSpec(
            instance=f"i{number}",
            slots=rollout.slots,
            max_requests=rollout.max_requests,
            kv_tokens=self.costs.kv_tokens,
            shares_trainer=shares_trainer,
            decode=DecodeCost(),  # an engine does not know its decode cost when it joins
        )
        self.instances[spec.instance] = SharedInstance(spec, self.costs, self.now, keep_segments=keep_segments)
        self._events.append(e.InstanceJoined(spec=spec))

    def trainer_speed(self) -> float:
        """Speed of a call that begins now."""
        return self._speeds(training=True)[0]

    def _schedule_dirty(self) -> None:
        training = self.trainer.current.label in (ActivityLabel.TRAIN, ActivityLabel.PUBLISH)
        _, speed = self._speeds(training=training)
        for instance in self._shared():
            if instance.speed != speed:
                self._touch(instance)
                instance.speed = speed
        super()._schedule_dirty()

    def _speeds(self, *, training: bool) -> tuple[float, float]:
        """Speed of the trainer and of each working instance with the current sharing of the cores."""
        here = self._shared()
        working = [instance for instance in here if instance.works]
        threads = share(self._cores, len(here), len(working), trainer_busy=training, overlap=self._overlap)
        supervisor = self._measured.per_generated * sum(instance.rate for instance in working)
        trainer, each = 0.0, 1.0
        for _ in range(_ROUNDS):  # the supervisor's share depends on the share that it leaves
            left = self._cores - min(1.0, supervisor * each)
            if training:
                weighed = left / (1 + self._weight * len(working))
                trainer = min(threads.trainer, max(weighed, left - threads.instance * len(working)))
            each = min(threads.instance, (left - trainer) / max(1, len(working)))
        return (
            self._worth(threads.trainer, self._measured.train_speed) * trainer / threads.trainer,
            self._worth(threads.instance, self._measured.decode_speed) * each / threads.instance,
        )

    def _worth(self, threads: int, of_all: float) -> float:
        """Speed with a number of threads, interpolated linearly between one thread and all cores."""
        if self._cores == 1:
            return 1.0
        return 1.0 + (of_all - 1.0) * (threads - 1) / (self._cores - 1)

    def _shared(self) -> list[SharedInstance]:
        return [instance for instance in self.instances.values() if isinstance(instance, SharedInstance)]


def sim_config(control: dict[str, Any], engine: dict[str, Any], instances: int, trace: str, m: Measured) -> SimConfig:
    """A simulator config whose cost model gives the measured costs.

    A token of context is one byte and weights take no memory, so each rate is the inverse of a measured time.
    """
    unit = 1e9
    return SimConfig.model_validate(
        {
            "devices": instances + 1,
            "trainer_devices": 1,
            "steps": control["steps"],
            "warmup_steps": 0,
            "control": control | {"deadlines": _NEVER},
            "hardware": {
                "flops": 2 * unit / m.per_request,
                "memory_bytes": engine["kv_tokens"] + 1.0,
                "memory_bandwidth": 1.0 / m.per_token,
                "link_bandwidth": 1e30,
                "host_bandwidth": 1e30,
            },
            "model": {"parameters": unit, "bytes_per_parameter": 1e-12, "kv_bytes_per_token": 1.0},
            "rollout": {
                "devices": 1,
                "slots": engine["slots"],
                "max_requests": engine["max_requests"],
                "memory_share": 1.0,
                "bandwidth_efficiency": 1.0,
                "compute_efficiency": 1.0,
                "step_overhead": m.step_base,
                "load_overhead": m.load,
                "move_overhead": m.move,
            },
            "trainer": {"utilisation": 1.0, "fixed_seconds": m.apply + m.durable, "publish_seconds": m.publish},
            "workload": {"trace": trace, "prompt_tokens": 7, "reward_seconds": m.score},
        }
    )


def predict(config: SimConfig, measured: Measured, cores: int, heartbeat: float) -> Result:
    """Drive the production orchestrator with this runtime; instances report progress at the heartbeat interval."""
    often = config.control.model_copy(update={"rebalance_seconds": heartbeat})
    runtime = SharedCores(config.model_copy(update={"control": often}), measured, cores)
    drive(Orchestrator(config.control), runtime)
    runtime.close()
    variant = Variant(name=config.control.mode, mode=config.control.mode, staleness=config.control.staleness)
    return runtime.result(variant, "disaggregated")
