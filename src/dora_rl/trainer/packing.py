"""Trajectories to micro-batches, without padding.

Invariants:
- every trajectory is in exactly one micro-batch, whole; its tokens appear in order;
- a micro-batch holds at most `budget` tokens, unless a single trajectory is longer than that: then it is alone;
- siblings in one micro-batch share the tokens before their first trained one where these are equal, so a prompt is
  computed once for all of them. The gradient is the same, since it sums over all that look at the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.models.packed import PackedLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A row may be padded up to this share of its bucket's length: more buckets mean more calls, fewer mean more padding.
_FILL = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """P packed tokens, of which N predictions are trained, of S trajectories."""

    trajectories: tuple[Trajectory, ...]
    tokens: Tensor
    """[1, P]"""
    positions: Tensor
    """[1, P]"""
    layout: PackedLayout
    predictors: Tensor
    """[N] packed index of the token whose hidden state predicts each trained token."""
    targets: Tensor
    """[N]"""
    behaviour: Tensor
    """[N] behaviour log-probs."""
    sequence: Tensor
    """[N] index of the trajectory, 0..S-1."""
    lengths: Tensor
    """[S] trained tokens."""
    experts: Tensor | None
    """[P, L, E] the experts that rollout used; -1 where unknown."""

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return MicroBatch(
            trajectories=self.trajectories,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            layout=self.layout.to(device),
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
            behaviour=self.behaviour.to(device),
            sequence=self.sequence.to(device),
            lengths=self.lengths.to(device),
            experts=None if self.experts is None else self.experts.to(device),
        )


def plan(groups: Iterable[Group], budget: int) -> list[list[Trajectory]]:
    """Which trajectories go together: siblings stay together as far as the budget allows, largest chunks first."""
    chunks: list[tuple[int, list[Trajectory]]] = []
    for group in groups:
        for family in _families(group):
            chunks.extend(_chunks(family, budget))
    chunks.sort(key=lambda chunk: -chunk[0])
    bins: list[tuple[int, list[Trajectory]]] = []
    for size, members in chunks:
        for place, (used, held) in enumerate(bins):
            if used + size <= budget:
                bins[place] = (used + size, held + members)
                break
        else:
            bins.append((size, list(members)))
    return [members for _, members in bins]


def pack(trajectories: Sequence[Trajectory]) -> MicroBatch:
    """One micro-batch of these trajectories."""
    tokens: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    experts: list[NDArray[np.int16]] = []
    rows: list[NDArray[np.int64]] = []
    prompts: dict[bytes, NDArray[np.int64]] = {}
    size = 0

    def add(trajectory: Trajectory, part: slice) -> NDArray[np.int64]:
        nonlocal size
        tokens.append(trajectory.tokens[part])
        positions.append(np.arange(part.start, part.stop))
        if trajectory.routed_experts is not None:
            experts.append(trajectory.routed_experts[part])
        size += part.stop - part.start
        return np.arange(size - (part.stop - part.start), size)

    for trajectory in trajectories:
        prompt = trajectory.prompt_length
        key = trajectory.tokens[:prompt].tobytes()
        if key not in prompts:
            prompts[key] = add(trajectory, slice(0, prompt))
        rows.append(np.concatenate([prompts[key], add(trajectory, slice(prompt, len(trajectory.tokens)))]))
    trained = [np.flatnonzero(trajectory.loss_mask) for trajectory in trajectories]
    assert not experts or sum(map(len, experts)) == size, "routed experts for some trajectories only"
    return MicroBatch(
        trajectories=tuple(trajectories),
        tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)).unsqueeze(0),
        positions=torch.from_numpy(np.concatenate(positions)).unsqueeze(0),
        layout=_layout(rows, size),
        predictors=torch.from_numpy(np.concatenate([row[at - 1] for row, at in zip(rows, trained, strict=True)])),
        targets=torch.from_numpy(
            np.concatenate([t.tokens[at] for t, at in zip(trajectories, trained, strict=True)]).astype(np.int64)
        ),
        behaviour=torch.from_numpy(
            np.concatenate([t.behaviour_logprobs[at] for t, at in zip(trajectories, trained, strict=True)])
        ),
        sequence=torch.from_numpy(np.repeat(np.arange(len(trained)), [len(at) for at in trained])),
        lengths=torch.tensor([len(at) for at in trained]),
        experts=torch.from_numpy(np.concatenate(experts).astype(np.int64)) if experts else None,
    )


def _families(group: Group) -> list[list[Trajectory]]:
    """Siblings by equal prompt, longest first."""
    families: dict[bytes, list[Trajectory]] = {}
    for trajectory in sorted(group.trajectories, key=lambda trajectory: -len(trajectory.tokens)):
        families.setdefault(trajectory.tokens[: trajectory.prompt_length].tobytes(), []).append(trajectory)
    return list(families.values())


def _chunks(family: Sequence[Trajectory], budget: int) -> list[tuple[int, list[Trajectory]]]:
    """Siblings that share a prompt, cut into sets that fit the budget."""
    prompt = family[0].prompt_length
    chunks: list[tuple[int, list[Trajectory]]] = []
    for trajectory in family:
        extra = len(trajectory.tokens) - prompt
        if chunks and chunks[-1][0] + extra <= budget:
            chunks[-1] = (chunks[-1][0] + extra, [*chunks[-1][1], trajectory])
        else:
            chunks.append((prompt + extra, [trajectory]))
    return chunks


def _layout(rows: list[NDArray[np.int64]], size: int) -> PackedLayout:
    """Rows of like length in buckets, longest first."""
    buckets: list[list[NDArray[np.int64]]] = []
    for row in sorted(rows, key=len, reverse=True):
        if buckets and len(row) >= _FILL * len(buckets[-1][0]):
            buckets[-1].append(row)
        else:
            buckets.append([row])
    outputs = np.empty(size, dtype=np.int64)
    shapes: list[tuple[int, int]] = []
    padded: list[NDArray[np.int64]] = []
    offset = 0
    for bucket in buckets:
        length = len(bucket[0])
        index = np.zeros((len(bucket), length), dtype=np.int64)
        for place, row in enumerate(bucket):
            index[place, : len(row)] = row
            index[place, len(row) :] = row[0]
            outputs[row] = offset + place * length + np.arange(len(row))
        offset += index.size
        shapes.append((len(bucket), length))
        padded.append(index.ravel())
    return PackedLayout(tuple(shapes), torch.from_numpy(np.concatenate(padded)), torch.from_numpy(outputs))
