"""Packs trajectories into micro-batches without padding.

Invariants:
- every trajectory is completely in exactly one micro-batch, with its tokens in order;
- a micro-batch has at most `budget` tokens, unless it consists of a single trajectory that is longer;
- siblings in one micro-batch share the tokens before their first trained token if these are equal, so a prompt is
  computed once for all of them. The gradient is the same, since it is summed over all tokens that attend to the prompt.
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

# A row goes into a bucket if it fills at least this share of the bucket's length: a higher share means more buckets and
# so more attention calls, a lower one means more padding.
_FILL = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """P packed tokens of S trajectories, with N trained tokens among them."""

    trajectories: tuple[Trajectory, ...]
    tokens: Tensor
    """[1, P]"""
    positions: Tensor
    """[1, P]"""
    layout: PackedLayout
    predictors: Tensor
    """[N] the packed index of the token whose hidden state predicts each trained token."""
    targets: Tensor
    """[N] the trained tokens."""
    behaviour: Tensor
    """[N] their behaviour log-probs."""
    sequence: Tensor
    """[N] index of each token's trajectory, 0..S-1."""
    lengths: Tensor
    """[S] number of trained tokens of each trajectory."""
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
    """Assign trajectories to micro-batches; siblings stay together as far as the budget allows."""
    chunks: list[tuple[int, list[Trajectory]]] = []
    for group in groups:
        for family in _families(group):
            chunks.extend(_chunks(family, budget))
    chunks.sort(key=lambda chunk: -chunk[0])
    bins: list[tuple[int, list[Trajectory]]] = []
    for size, trajectories in chunks:
        for index, (used, packed) in enumerate(bins):
            if used + size <= budget:
                bins[index] = (used + size, packed + trajectories)
                break
        else:
            bins.append((size, list(trajectories)))
    return [trajectories for _, trajectories in bins]


def pack(trajectories: Sequence[Trajectory]) -> MicroBatch:
    """Pack these trajectories into one micro-batch."""
    tokens: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    experts: list[NDArray[np.int16]] = []
    rows: list[NDArray[np.int64]] = []
    prompts: dict[bytes, NDArray[np.int64]] = {}
    size = 0

    def add(trajectory: Trajectory, span: slice) -> NDArray[np.int64]:
        nonlocal size
        tokens.append(trajectory.tokens[span])
        positions.append(np.arange(span.start, span.stop))
        if trajectory.routed_experts is not None:
            experts.append(trajectory.routed_experts[span])
        size += span.stop - span.start
        return np.arange(size - (span.stop - span.start), size)

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
    """Siblings with equal prompts, longest first."""
    families: dict[bytes, list[Trajectory]] = {}
    for trajectory in sorted(group.trajectories, key=lambda trajectory: -len(trajectory.tokens)):
        families.setdefault(trajectory.tokens[: trajectory.prompt_length].tobytes(), []).append(trajectory)
    return list(families.values())


def _chunks(family: Sequence[Trajectory], budget: int) -> list[tuple[int, list[Trajectory]]]:
    """Siblings that share a prompt, divided into chunks that fit the budget, with the number of tokens of each."""
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
    """Rows of similar length in buckets, longest first."""
    filled: list[list[NDArray[np.int64]]] = []
    for row in sorted(rows, key=len, reverse=True):
        if filled and len(row) >= _FILL * len(filled[-1][0]):
            filled[-1].append(row)
        else:
            filled.append([row])
    outputs = np.empty(size, dtype=np.int64)
    buckets: list[tuple[int, int]] = []
    padded: list[NDArray[np.int64]] = []
    offset = 0
    for bucket in filled:
        length = len(bucket[0])
        inputs = np.zeros((len(bucket), length), dtype=np.int64)
        for number, row in enumerate(bucket):
            inputs[number, : len(row)] = row
            inputs[number, len(row) :] = row[0]
            outputs[row] = offset + number * length + np.arange(len(row))
        offset += inputs.size
        buckets.append((len(bucket), length))
        padded.append(inputs.ravel())
    return PackedLayout(tuple(buckets), torch.from_numpy(np.concatenate(padded)), torch.from_numpy(outputs))
