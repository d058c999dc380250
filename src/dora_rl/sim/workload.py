"""Where trajectories' lengths come from: a lognormal with alike siblings, or a trace of real ones.

A workload is a pure function of the seed, the prompt's number and the sibling: every mode of a comparison gets the
same work, whatever order it is taken in. Lengths are drawn in blocks of prompts, each with a generator of its own.
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
"""Prompts per block: large enough that drawing costs nothing per prompt."""


class SimTurn(NamedTuple):
    """Tokens to sample, then a tool call (none after the last turn)."""

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
    """The groups of a trace, in order; lines without a group are groups of their own."""
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
    """Draws the work of prompts."""

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
        """What the trajectory will do."""
        tokens = self.response_tokens(prompt, sibling)
        workload = self._workload
        count = min(workload.turns, tokens)
        if count == 1:
            return [SimTurn(tokens, 0.0, 0)]
        random = np.random.default_rng((self._seed, 1, prompt, sibling))
        waits = workload.tool_seconds * np.exp(random.standard_normal(count - 1))
        each = tokens // count
        turns = [SimTurn(each, float(wait), workload.tool_tokens) for wait in waits]
        return [*turns, SimTurn(tokens - each * (count - 1), 0.0, 0)]

    def sample(self, prompts: int) -> np.ndarray:
        """Response lengths of the first prompts, one row each."""
        return np.array([[self.response_tokens(p, s) for s in range(self._size)] for p in range(prompts)])

    def _draw(self, block: int) -> np.ndarray:
        random = np.random.default_rng((self._seed, 0, block))
        if self._groups is None:
            lengths = self._lognormal(random, self._mu, _BLOCK)
        else:
            lengths = np.empty((_BLOCK, self._size))
            for row in range(_BLOCK):
                members = [traced.response_tokens for traced in self._groups[self._trace_group(block * _BLOCK + row)]]
                lengths[row] = random.choice(members, self._size, replace=len(members) < self._size)
        return np.asarray(np.clip(np.rint(lengths), 1, self._longest), dtype=np.int64)

    def _trace_group(self, prompt: int) -> int:
        """Traces are walked in a shuffled order, anew for each epoch."""
        assert self._groups is not None
        epoch, position = divmod(prompt, len(self._groups))
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng((self._seed, 2, epoch)).permutation(len(self._groups))
        return int(self._orders[epoch][position])

    def _lognormal(self, random: np.random.Generator, mu: float, prompts: int) -> np.ndarray:
        alike = self._workload.group_correlation
        between = random.standard_normal((prompts, 1)) * math.sqrt(alike)
        within = random.standard_normal((prompts, self._size)) * math.sqrt(1 - alike)
        return np.asarray(np.exp(mu + self._workload.sigma * (between + within)))

    def _fit_mu(self) -> float:
        """The location for which the clipped mean is as asked, by bisection on a fixed sample."""
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
