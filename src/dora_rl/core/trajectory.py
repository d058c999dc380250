"""The records that are trained on: trajectories, and the groups that they come in.

Invariants, checked when a record is made, so that no bad record exists:

- every per-token array has the length of `tokens`; the arrays are read-only;
- the first token is never trained: nothing predicts it;
- a trained token has a finite behaviour log-prob of at most zero, under the one version that the trajectory names;
- the siblings of a group have one version.

Dimensions: T tokens of prompt and response together, L layers with routed experts, E experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from dora_rl.core.errors import TrajectoryError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import GroupId, Record, TrajectoryId, Version

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

StopReason: TypeAlias = Literal["stop", "length", "environment"]

# A float32 log-softmax of a certain token can come out a rounding error above zero.
_ROUNDING = 1e-4


class Trajectory(Record, frozen=True, kw_only=True, eq=False):
    """One interaction, sampled wholly under one version."""

    id: TrajectoryId
    version: Version
    tokens: NDArray[np.int32]
    """[T] the prompt, then the response: tokens of the policy and of its environment."""
    loss_mask: NDArray[np.bool_]
    """[T] true where the policy sampled the token, which is then trained."""
    behaviour_logprobs: NDArray[np.float32]
    """[T] log-prob of each trained token under the distribution that it was sampled from; not read elsewhere."""
    reward: float
    stop_reason: StopReason = "stop"
    routed_experts: NDArray[np.int16] | None = None
    """[T, L, E] the experts that rollout routed each token to, -1 where they are not recorded (the last token)."""

    @classmethod
    def from_chunks(
        cls,
        id: TrajectoryId,  # noqa: A002 - the name of the field
        version: Version,
        prompt: ArrayLike,
        chunks: Sequence[TokenChunk],
        reward: float,
        stop_reason: StopReason,
    ) -> Trajectory:
        """Make the record from a prompt and the chunks of the whole response, in order."""
        prompt = np.asarray(prompt, dtype=np.int32)
        _check_response(id, len(prompt), chunks)
        return cls(
            id=id,
            version=version,
            tokens=np.concatenate([prompt, *(chunk.tokens for chunk in chunks)]),
            loss_mask=np.repeat([False, *(chunk.sampled for chunk in chunks)], [len(prompt), *map(len, chunks)]),
            behaviour_logprobs=np.concatenate(
                [np.zeros(len(prompt), dtype=np.float32), *(chunk.logprobs for chunk in chunks)]
            ),
            reward=reward,
            stop_reason=stop_reason,
            routed_experts=_routed_experts(len(prompt), chunks),
        )

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("tokens", "loss_mask", "behaviour_logprobs"):
            array: NDArray[Any] = getattr(self, name)
            if array.shape != (length,):
                self._refuse(f"{name} has the shape {array.shape}, not ({length},)")
            array.flags.writeable = False
        if length == 0 or self.loss_mask[0]:
            self._refuse("the first token has no context and can't be trained")
        if not self.loss_mask.any():
            self._refuse("loss_mask selects no token")
        trained = self.behaviour_logprobs[self.loss_mask]
        if not np.isfinite(trained).all() or trained.max() > _ROUNDING:
            self._refuse("a trained token has no finite behaviour log-prob of at most 0")
        if not np.isfinite(self.reward):
            self._refuse(f"its reward is {self.reward}")
        if self.routed_experts is not None and (self.routed_experts.ndim != 3 or len(self.routed_experts) != length):
            self._refuse(f"routed_experts has the shape {self.routed_experts.shape}, not ({length}, layers, experts)")

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(self.loss_mask.argmax())

    @property
    def response_length(self) -> int:
        """Trained tokens."""
        return int(self.loss_mask.sum())

    def _refuse(self, why: str) -> None:
        raise TrajectoryError(f"trajectory {self.id}: {why}")


class Group(Record, frozen=True, kw_only=True, eq=False):
    """The siblings of one prompt."""

    id: GroupId
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise TrajectoryError(f"group {self.id} has no trajectories")
        if len({trajectory.version for trajectory in self.trajectories}) > 1:
            raise TrajectoryError(f"group {self.id} mixes versions")

    @property
    def version(self) -> Version:
        return self.trajectories[0].version


def _check_response(trajectory: TrajectoryId, prompt_length: int, chunks: Sequence[TokenChunk]) -> None:
    if not prompt_length:
        raise TrajectoryError(f"trajectory {trajectory} has no prompt")
    end = 0
    for chunk in chunks:
        if chunk.trajectory != trajectory:
            raise TrajectoryError(f"trajectory {trajectory} was given tokens of trajectory {chunk.trajectory}")
        if chunk.start != end:
            raise TrajectoryError(
                f"trajectory {trajectory}: a chunk starts at token {chunk.start} of the response, not {end}"
            )
        end = chunk.end
    if len({chunk.expert_shape for chunk in chunks if chunk.expert_data}) > 1:
        raise TrajectoryError(
            f"trajectory {trajectory}: its experts are recorded for different numbers of layers or experts"
        )


def _routed_experts(prompt_length: int, chunks: Sequence[TokenChunk]) -> NDArray[np.int16] | None:
    """A chunk records, for each token, the forward pass that gave its logits: the pass over the token before it."""
    recorded = [(chunk, chunk.experts) for chunk in chunks if chunk.expert_data]
    if not recorded:
        return None
    placed = np.full((prompt_length + chunks[-1].end, *recorded[0][0].expert_shape), -1, dtype=np.int16)
    for chunk, experts in recorded:
        assert experts is not None
        placed[prompt_length + chunk.start - 1 : prompt_length + chunk.end - 1] = experts
    return placed
