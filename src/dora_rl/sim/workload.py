"""Lengths of simulated trajectories: a lognormal distribution with correlated siblings, or a trace of real ones.

A workload is a pure function of the seed, the prompt's number and the sibling, so every mode of a comparison gets the
same work in whatever order it takes it. Lengths are drawn in blocks of prompts, each with a separate generator.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dora_rl.core.errors import ConfigError, TraceError
from dora_rl.sim.config import Workload

_BLOCK = 1024
"""Prompts per block, large enough that the cost of drawing per prompt is negligible."""


class SimTurn(NamedTuple):
    """Tokens to sample, followed by a tool call, except after the last turn."""

    tokens: int
    tool_seconds: float
    tool_tokens: int


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One line of a trace."""

    response_tokens: int
    prompt_tokens: int = 0
    group: str | int | None = None
    """Lines with the same group are siblings and stay together."""


def read_trace(path: Path) -> list[list[TraceLine]]:
    """Read the groups of a trace, in order; a line without a group is a group by itself."""
    groups: dict[str | int, list[TraceLine]] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                traced = _read_line(path, number, line)
                key = f"line {number}" if traced.group is None else traced.group
                groups.setdefault(key, []).append(traced)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    if not groups:
        raise TraceError(f"{path} is empty: a trace needs at least one line with 'response_tokens'")
    return list(groups.values())


def _read_line(path: Path, number: int, line: bytes) -> TraceLine:
    try:
        traced = msgspec.json.decode(line, type=TraceLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}, line {number}: {error}") from error
    if traced.response_tokens < 1 or traced.prompt_tokens < 0:
        raise TraceError(f"{path}, line {number}: lengths must be positive")
    return traced


class Source:
    """Draws the lengths and tool calls of prompts."""

    def __init__(self, workload: Workload, group_size: int, longest: int, seed: int) -> None:
        self._workload = workload
        self._size = group_size
        self._longest = longest
        self._seed = seed
        self._groups = None if workload.trace is None else read_trace(workload.trace)
        self._mu = self._fit_mu() if self._groups is None else 0.0
        self._blocks: dict[int, np.ndarray] = {}
        self._orders: dict[int, np.ndarray] = {}

    def prompt_tokens(self, prompt: int) -> int:
        if self._groups is None:
            return self._workload.prompt_tokens
        return self._groups[self._trace_group(prompt)][0].prompt_tokens

    def response_tokens(self, prompt: int, sibling: int) -> int:
        block, row = divmod(prompt, _BLOCK)
        lengths = self._blocks.get(block)
        if lengths is None:
            lengths = self._blocks[block] = self._draw(block)
        return int(lengths[row, sibling])

    def turns(self, prompt: int, sibling: int) -> list[SimTurn]:
        """The turns of a trajectory."""
        tokens = self.response_tokens(prompt, sibling)
        workload = self._workload
        count = min(workload.turns, tokens)
        if count == 1:
            return [SimTurn(tokens, 0.0, 0)]
        random = np.random.default_rng((self._seed, 1, prompt, sibling))
        waits = workload.tool_seconds * np.exp(random.standard_normal(count - 1))
        per_turn = tokens // count
        turns = [SimTurn(per_turn, float(wait), workload.tool_tokens) for wait in waits]
        return [*turns, SimTurn(tokens - per_turn * (count - 1), 0.0, 0)]

    def reward(self, prompt: int, sibling: int) -> float:
        """The reward of a trajectory: siblings differ, unless their prompt is one of those without signal."""
        share = self._workload.no_signal
        equal = share > 0 and np.random.default_rng((self._seed, 3, prompt)).random() < share
        return 0.0 if equal else float(sibling % 2)

    def sample(self, prompts: int) -> np.ndarray:
        """Response lengths of the first prompts, one row per prompt."""
        return np.array([[self.response_tokens(p, s) for s in range(self._size)] for p in range(prompts)])

    def _draw(self, block: int) -> np.ndarray:
        random = np.random.default_rng((self._seed, 0, block))
        if self._groups is None:
            lengths = self._lognormal(random, self._mu, _BLOCK)
        else:
            lengths = np.empty((_BLOCK, self._size))
            for row in range(_BLOCK):
                group = self._groups[self._trace_group(block * _BLOCK + row)]
                observed = [traced.response_tokens for traced in group]
                lengths[row] = random.choice(observed, self._size, replace=len(observed) < self._size)
        return np.asarray(np.clip(np.rint(lengths), 1, self._longest), dtype=np.int64)

    def _trace_group(self, prompt: int) -> int:
        """The group of the trace for a prompt; the groups are shuffled again for each epoch."""
        assert self._groups is not None
        epoch, position = divmod(prompt, len(self._groups))
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng((self._seed, 2, epoch)).permutation(len(self._groups))
        return int(self._orders[epoch][position])

    def _lognormal(self, random: np.random.Generator, mu: float, prompts: int) -> np.ndarray:
        correlation = self._workload.group_correlation
        between = random.standard_normal((prompts, 1)) * math.sqrt(correlation)
        within = random.standard_normal((prompts, self._size)) * math.sqrt(1 - correlation)
        return np.asarray(np.exp(mu + self._workload.sigma * (between + within)))

    def _fit_mu(self) -> float:
        """The location for which the clipped mean is `mean_tokens`, by bisection on a fixed sample."""
        mean = self._workload.mean_tokens
        if mean >= self._longest:
            raise ConfigError(
                f"'workload.mean_tokens' is {mean:g}, but no trajectory is longer than "
                f"'control.max_response_tokens' = {self._longest}"
            )
        normal = np.random.default_rng(0).standard_normal(200_000)
        low, high = math.log(mean) - 20.0, math.log(mean) + 20.0
        for _ in range(60):
            mu = (low + high) / 2
            if np.clip(np.exp(mu + self._workload.sigma * normal), 1, self._longest).mean() < mean:
                low = mu
            else:
                high = mu
        return (low + high) / 2
