"""The objectives as plain formulas, for comparison: one padded batch, and loops over trajectories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dora_rl.core.trajectory import Group, Trajectory


def padded_logprobs(model: Any, trajectories: list[Trajectory], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs and entropies of each token given the tokens before it, from one right-padded batch."""
    longest = max(len(t.tokens) for t in trajectories)
    ids = torch.zeros(len(trajectories), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, trajectory in enumerate(trajectories):
        ids[row, : len(trajectory.tokens)] = torch.from_numpy(trajectory.tokens.astype(np.int64))
        mask[row, : len(trajectory.tokens)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits / temperature
    distribution = torch.log_softmax(logits[:, :-1], dim=-1)
    picked = torch.gather(distribution, 2, ids[:, 1:, None])[:, :, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    first = torch.zeros(len(trajectories), 1)
    return torch.cat([first, picked], 1), torch.cat([first, entropy], 1)


def advantages_of(name: str, groups: list[Group]) -> list[float]:
    rewards = [[t.reward for t in g.trajectories] for g in groups]
    everyone = [r for group in rewards for r in group]
    result = []
    if name == "reinforce_pp_baseline":
        centred = [r - sum(group) / len(group) for group in rewards for r in group]
        spread = (sum(c * c for c in centred) / len(centred)) ** 0.5
        return [c / (spread + 1e-4) for c in centred]
    for group in rewards:
        mean = sum(group) / len(group)
        for index, reward in enumerate(group):
            if name == "supervised":
                result.append(1.0)
            elif name == "dr_grpo":
                result.append(reward - mean)
            elif name == "rloo":
                others = group[:index] + group[index + 1 :]
                result.append(reward - sum(others) / len(others))
            elif name == "reinforce_pp":
                overall = sum(everyone) / len(everyone)
                spread = (sum((r - overall) ** 2 for r in everyone) / len(everyone)) ** 0.5
                result.append((reward - overall) / (spread + 1e-4))
            else:
                spread = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
                result.append((reward - mean) / (spread + 1e-4))
    return result


BOUNDS = {
    "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "rloo": (0.2, 0.2), "reinforce_pp": (0.2, 0.2),
    "supervised": (0, 0), "reinforce_pp_baseline": (0.2, 0.2),
    "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28), "longcat": (0.2, 0.28),
}  # fmt: skip


def trajectory_losses(name: str, logprobs: Tensor, behaviour: Tensor, advantage: float) -> list[Tensor]:
    """The loss of each trained token of one trajectory."""
    low, high = BOUNDS[name]
    ratios = torch.exp(logprobs - behaviour)
    if name == "gspo":
        ratios = torch.exp((logprobs - behaviour).sum() / len(logprobs)).repeat(len(logprobs))
    losses = []
    for ratio, logprob in zip(ratios, logprobs, strict=True):
        if name == "supervised":
            losses.append(-logprob)
            continue
        if name == "cispo":
            losses.append(-min(max(float(ratio.detach()), 1 - low), 1 + high) * advantage * logprob)
            continue
        if advantage >= 0:
            used = ratio if ratio < 1 + high else torch.tensor(1 + high)
        else:
            used = ratio if ratio > 1 - low else torch.tensor(1 - low)
            if name == "longcat" and used > 3.0:
                used = torch.tensor(3.0)
        losses.append(-used * advantage)
    return losses


def divergence(kind: str, logprob: float, behaviour: float) -> float:
    """The divergence of (this token, any other token) under the behaviour policy from that under the policy."""
    new, old = math.exp(logprob), math.exp(behaviour)
    if kind == "binary_tv":
        return abs(new - old)
    others = (1 - old) * math.log((1 - old) / (1 - new)) if old < 1 else 0.0
    return old * math.log(old / new) + others


def masked_losses(kind: str, delta: float, logprobs: Tensor, behaviour: Tensor, advantage: float) -> list[Tensor]:
    """The loss of each trained token of one trajectory, with a mask on divergence in place of the clip."""
    losses = []
    for new, old in zip(logprobs, behaviour, strict=True):
        away = (new > old and advantage > 0) or (new < old and advantage < 0)
        masked = away and divergence(kind, float(new.detach()), float(old)) > delta
        losses.append(0.0 * new if masked else -torch.exp(new - old) * advantage)
    return losses


def second_moment_losses(threshold: float, rows: list[tuple[Tensor, Tensor, float]]) -> list[list[Tensor]]:
    """The losses of all trained tokens of an update; a row has log-probs, behaviour log-probs and the advantage.

    The token with the largest squared log ratio is masked until the mean square is small enough.
    """
    squares = {}
    for row, (logprobs, behaviour, advantage) in enumerate(rows):
        for token, gap in enumerate((logprobs.detach() - behaviour).double().tolist()):
            if gap * advantage > 0:
                squares[row, token] = gap * gap
    masked = set()
    while squares and sum(squares.values()) / len(squares) > threshold:
        worst = max(squares, key=lambda at: squares[at])
        masked.add(worst)
        del squares[worst]
    losses = []
    for row, (logprobs, behaviour, advantage) in enumerate(rows):
        surrogate = -torch.exp(logprobs - behaviour) * advantage
        losses.append([0.0 * loss if (row, token) in masked else loss for token, loss in enumerate(surrogate)])
    return losses


def vetoed(threshold: float, logprobs: Tensor, behaviour: Tensor, advantage: float) -> bool:
    """Whether a trajectory is left out: it is a bad one, and has a token that has become extremely unlikely."""
    return advantage < 0 and any(new - old < math.log(threshold) for new, old in zip(logprobs, behaviour, strict=True))


def relative_ess(model: Any, groups: list[Group]) -> float:
    """(sum w)^2 / (n sum w^2) of the trajectories' importance weights."""
    trajectories = [t for g in groups for t in g.trajectories]
    with torch.no_grad():
        logprobs, _ = padded_logprobs(model, trajectories)
    weights = []
    for row, trajectory in enumerate(trajectories):
        trained = np.flatnonzero(trajectory.loss_mask)
        ratios = np.exp(logprobs[row].numpy()[trained].astype(np.float64) - trajectory.behaviour_logprobs[trained])
        weights.append(float(np.prod(ratios)))
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def average(kind: str, rows: list[list[Tensor]], length: int) -> Tensor:
    """The average of the token losses of all trajectories."""
    tokens = torch.stack([loss for row in rows for loss in row])
    if kind == "token_mean":
        return tokens.mean()
    if kind == "sequence_mean":
        return torch.stack([torch.stack(row).mean() for row in rows]).mean()
    return tokens.sum() / (len(rows) * length)


AGGREGATIONS = {
    "grpo": "sequence_mean", "dr_grpo": "constant_length", "dapo": "token_mean", "rloo": "token_mean",
    "reinforce_pp": "token_mean", "reinforce_pp_baseline": "token_mean", "gspo": "sequence_mean",
    "supervised": "token_mean", "cispo": "token_mean", "longcat": "constant_length",
}  # fmt: skip


def objective(
    name: str,
    model: Any,
    groups: list[Group],
    constant_length: int,
    region: tuple[str, float] | None = None,
    veto: float | None = None,
) -> Tensor:
    """The loss of a whole step, on one padded batch; `region` is a trust region in place of the clip."""
    trajectories = [t for g in groups for t in g.trajectories]
    logprobs, _ = padded_logprobs(model, trajectories)
    rows, inputs = [], []
    for row, (trajectory, advantage) in enumerate(zip(trajectories, advantages_of(name, groups), strict=True)):
        trained = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
        behaviour = torch.from_numpy(trajectory.behaviour_logprobs.copy())[trained]
        inputs.append((logprobs[row, trained], behaviour, advantage))
        if region is None:
            rows.append(trajectory_losses(name, logprobs[row, trained], behaviour, advantage))
        elif region[0] != "second_moment":
            rows.append(masked_losses(*region, logprobs[row, trained], behaviour, advantage))
    if region is not None and region[0] == "second_moment":
        rows = second_moment_losses(region[1], inputs)
    if veto is not None:
        rows = [
            [0.0 * loss for loss in row] if vetoed(veto, *of) else row for row, of in zip(rows, inputs, strict=True)
        ]
    return average(AGGREGATIONS[name], rows, constant_length)
