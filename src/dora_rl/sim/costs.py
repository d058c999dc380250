"""The cost model: bytes over bandwidth, FLOPs over speed, and fixed overheads.

A decode step of an instance takes

    overhead + weights read + KV read + compute

On tensor-parallel devices, weights and KV are divided over all devices. On lock-step ranks, each rank reads the shared
weights and the KV of its own requests; the experts are divided over the ranks, and only experts that some token of the
batch is routed to are read; the slowest rank determines the time of a step.
"""

from __future__ import annotations

import math
from functools import lru_cache

from dora_rl.core.errors import ConfigError
from dora_rl.core.types import DecodeCost
from dora_rl.sim.config import SimConfig


class Costs:
    """Costs in seconds for one configuration."""

    def __init__(self, config: SimConfig) -> None:
        hardware, model, rollout = config.hardware, config.model, config.rollout
        self._config = config
        self._speed = hardware.memory_bandwidth * rollout.bandwidth_efficiency
        self._compute = hardware.flops * rollout.compute_efficiency * rollout.devices
        self.ranks = rollout.devices if rollout.lock_step else 1
        weights = model.weight_bytes
        if rollout.lock_step:
            shared = model.shared_parameters * model.bytes_per_parameter
            self._shared_seconds = shared / self._speed
            self._expert_seconds = (weights - shared) / rollout.devices / self._speed
            held = shared * rollout.devices + (weights - shared)
        else:
            self._shared_seconds = weights / rollout.devices / self._speed
            self._expert_seconds = 0.0
            held = weights
        room = hardware.memory_bytes * rollout.memory_share * rollout.devices - held * rollout.slots
        self.kv_tokens = int(room / model.kv_bytes_per_token)
        if self.kv_tokens < config.control.max_response_tokens + config.workload.prompt_tokens:
            raise ConfigError(
                f"'rollout.devices': {rollout.devices} devices with {rollout.slots} sets of weights leave room for "
                f"{max(0, self.kv_tokens)} tokens of KV cache, fewer than one trajectory of "
                f"{config.control.max_response_tokens} needs: give an instance more devices"
            )
        # On lock-step ranks only one rank reads the KV of a request, so a token costs as much as on a single device.
        self.per_token = model.kv_bytes_per_token / self._speed / (1 if rollout.lock_step else rollout.devices)
        self.per_request = 2 * model.active / self._compute
        self._step_base = lru_cache(maxsize=4096)(self._base)

    def _base(self, requests: int, versions: int) -> float:
        model = self._config.model
        missed = (1 - model.experts_per_token / model.experts) ** max(1, requests) if self._expert_seconds else 0.0
        read = self._shared_seconds + self._expert_seconds * (1 - missed)
        return self._config.rollout.step_overhead + read * max(1, versions)

    def step_base(self, requests: int, versions: int = 1) -> float:
        """Seconds of a decode step without reading KV, for a batch that uses the weights of this many versions."""
        return self._step_base(requests, versions) + self.per_request * requests

    def decode(self) -> DecodeCost:
        """The cost as the orchestrator plans with it: linear, for a full batch and evenly loaded ranks."""
        full = self._config.rollout.max_requests
        return DecodeCost(
            base=self._step_base(full, 1), per_request=self.per_request, per_token=self.per_token / self.ranks
        )

    def prefill(self, tokens: int) -> float:
        return 2 * self._config.model.active * tokens / self._compute

    def load(self) -> float:
        """Seconds to load weights from the trainer or a peer over the links of the instance's devices."""
        rollout = self._config.rollout
        rate = self._config.hardware.link_bandwidth * rollout.devices
        return rollout.load_overhead + self._config.model.weight_bytes / rate

    def move(self, tokens: int) -> float:
        """Seconds to move the KV of requests over the links of the instance's devices."""
        rollout = self._config.rollout
        rate = self._config.hardware.link_bandwidth * rollout.devices
        return rollout.move_overhead + tokens * self._config.model.kv_bytes_per_token / rate

    def swap(self, tokens: int) -> float:
        """Seconds to copy KV to host memory, or back."""
        rate = self._config.hardware.host_bandwidth * self._config.rollout.devices
        return tokens * self._config.model.kv_bytes_per_token / rate

    def switch_role(self, tokens: int) -> float:
        """Seconds to copy KV to host memory before training, and weights and KV back after it."""
        rate = self._config.hardware.host_bandwidth * self._config.rollout.devices
        return 2 * self.swap(tokens) + self._config.model.weight_bytes / rate

    def train(self, tokens: int, devices: int) -> float:
        """Seconds to compute the gradients of `tokens` tokens on `devices` devices."""
        trainer = self._config.trainer
        flops = trainer.passes * self._config.model.active * tokens
        return flops / (self._config.hardware.flops * trainer.utilisation * devices)

    # -- limits -----------------------------------------------------------------------------------------------

    def peak_rate(self, mean_context: float) -> float:
        """The highest decode rate of an instance, in tokens per second, for requests of this mean context."""
        most = min(self._config.rollout.max_requests, int(self.kv_tokens / mean_context))
        best = 0.0
        requests = self.ranks
        while True:
            requests = min(requests, max(1, most))
            kv = self.per_token * mean_context * math.ceil(requests / self.ranks)
            best = max(best, requests / (self.step_base(requests) + kv))
            if requests >= most:
                return best
            requests += max(1, requests // 8)

    def single_request(self, tokens: int, prompt_tokens: int) -> float:
        """Seconds that a response of `tokens` tokens takes as the only request of an instance."""
        context = prompt_tokens + tokens / 2
        return tokens * (self.step_base(1) + self.per_token * context)
