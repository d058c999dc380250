"""The problems of a dataset in the order in which they are admitted: epoch after epoch, each in its own order.

Invariant: the order depends on the data alone, so the number of a prompt identifies its problem, also after a restart.
"""

from __future__ import annotations

from dora_rl.envs.data import Dataset, Problem


class PromptSource:
    """Problems by their number."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._orders: dict[int, list[int]] = {}

    @property
    def count(self) -> int | None:
        """Number of prompts over all epochs; None if there is no end."""
        return None if self._dataset.epochs is None else self._dataset.epochs * len(self._dataset.train)

    def problem(self, number: int) -> tuple[str, Problem]:
        """The prompt with this number: its key in the run, and its problem."""
        epoch, position = divmod(number, len(self._dataset.train))
        if epoch not in self._orders:
            self._orders = {epoch: self._dataset.order(epoch)}
        problem = self._dataset.train[self._orders[epoch][position]]
        return f"{problem.key}@{epoch}", problem
