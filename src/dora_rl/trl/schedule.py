"""How many groups, updates and steps a `GRPOConfig` stands for.

TRL counts updates of the optimiser; a step of dora-rl trains the groups of one generation batch, with one or more
updates. Everything that TRL counts in updates is translated here, and refused if it is not a whole number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_rl.core.errors import ConfigError

if TYPE_CHECKING:
    from dora_rl.trl.config import GRPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a run does, in steps of dora-rl and in updates."""

    groups_per_step: int
    mini_batches: int
    """Updates over which the groups of a step are divided."""
    epochs: int
    """Passes over the groups of a step."""
    updates: int
    """Updates of the whole run; what TRL calls `max_steps`."""
    updates_per_epoch: int | None
    """Updates in one pass over the rows; None if their number is not known."""

    @property
    def updates_per_step(self) -> int:
        return self.mini_batches * self.epochs

    @property
    def steps(self) -> int:
        return math.ceil(self.updates / self.updates_per_step)

    def in_steps(self, name: str, value: float) -> int:
        """A number of updates, or a share of all of them if it is below 1, in steps."""
        updates = self.in_updates(name, value)
        if updates % self.updates_per_step:
            raise ConfigError(
                f"GRPOConfig: '{name}' is {updates} updates, but a step has {self.updates_per_step}: "
                "make it a multiple of them"
            )
        return updates // self.updates_per_step

    def in_updates(self, name: str, value: float) -> int:
        """A number of updates, or a share of all of them if it is below 1."""
        if value <= 0 or (value >= 1 and value != int(value)):
            raise ConfigError(f"GRPOConfig: '{name}' must be a whole number, or a share below 1, not {value}")
        return math.ceil(self.updates * value) if value < 1 else int(value)

    def epoch_in_steps(self, name: str) -> int:
        """The steps of one pass over the rows."""
        if self.updates_per_epoch is None:
            raise ConfigError(f"GRPOConfig: '{name}' = 'epoch' needs a dataset with a length: set it to 'steps'")
        return max(1, self.updates_per_epoch // self.updates_per_step)


def schedule(args: GRPOConfig, rows: int | None, processes: int) -> Schedule:
    """The schedule of a run on this many rows (None if unknown) with this many trainer processes."""
    if args.num_generations is None or args.num_generations < 2:
        raise ConfigError("GRPOConfig: 'num_generations' must be 2 or more: advantages compare the siblings of a group")
    size, accumulation = args.num_generations, args.gradient_accumulation_steps
    per_pass = args.per_device_train_batch_size * processes
    slices = _slices(args, per_pass)
    if min(size, accumulation, per_pass, slices, args.num_iterations) < 1:
        raise ConfigError("GRPOConfig: batch sizes, 'gradient_accumulation_steps' and 'num_iterations' must be above 0")
    if per_pass * slices % size:
        raise ConfigError(
            f"GRPOConfig: a generation batch of {per_pass * slices} completions has no whole number of groups of "
            f"'num_generations' = {size}: change 'per_device_train_batch_size' or 'gradient_accumulation_steps'"
        )
    if slices % accumulation == 0:
        groups, mini_batches = per_pass * slices // size, slices // accumulation
    elif accumulation % slices == 0 and args.num_iterations == 1:
        groups, mini_batches = per_pass * accumulation // size, 1  # all of them are sampled by the same version
    else:
        raise ConfigError(
            f"GRPOConfig: 'steps_per_generation' = {slices} must be a multiple of 'gradient_accumulation_steps' = "
            f"{accumulation}, or with 'num_iterations' = 1 a divisor of it, so that no update has a part of a batch"
        )
    if mini_batches > groups:
        raise ConfigError(
            f"GRPOConfig: a generation batch of {groups} groups can't be divided over {mini_batches} updates, since "
            "groups stay whole: raise 'gradient_accumulation_steps' or 'per_device_train_batch_size'"
        )
    per_epoch = None
    if rows is not None:
        batches = rows // (per_pass * slices // size)  # TRL leaves out the rows that do not fill a batch
        per_epoch = math.ceil(batches * args.num_iterations * slices / accumulation)
    made = Schedule(
        groups_per_step=groups,
        mini_batches=mini_batches,
        epochs=args.num_iterations,
        updates=_updates(args, rows, per_epoch, groups),
        updates_per_epoch=per_epoch or None,
    )
    if args.max_steps > 0:
        made.in_steps("max_steps", args.max_steps)
    return made


def _slices(args: GRPOConfig, per_pass: int) -> int:
    """The passes that one generation batch is divided into: `steps_per_generation` of TRL."""
    if args.generation_batch_size is None:
        return args.gradient_accumulation_steps if args.steps_per_generation is None else args.steps_per_generation
    if args.steps_per_generation is not None:
        raise ConfigError("GRPOConfig: set 'generation_batch_size' or 'steps_per_generation', not both")
    if args.generation_batch_size % per_pass:
        raise ConfigError(
            f"GRPOConfig: 'generation_batch_size' = {args.generation_batch_size} must be a multiple of the "
            f"{per_pass} completions of a pass"
        )
    return args.generation_batch_size // per_pass


def _updates(args: GRPOConfig, rows: int | None, per_epoch: int | None, groups: int) -> int:
    if args.max_steps > 0:
        return args.max_steps
    if per_epoch is None:
        raise ConfigError("GRPOConfig: set 'max_steps': the dataset has no length to derive it from")
    if per_epoch == 0:
        raise ConfigError(f"`train_dataset` has {rows} rows, but a step has {groups} prompts: set 'max_steps'")
    if args.num_train_epochs <= 0:
        raise ConfigError("GRPOConfig: 'num_train_epochs' must be above 0, or set 'max_steps'")
    return math.ceil(args.num_train_epochs * per_epoch)
