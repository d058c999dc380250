"""What may change when a run is resumed.

A run continues with the settings that it was started with. Only settings that do not change its results, or that the
orchestrator changes by an event, can get other values: `rollout.instances`, `rollout.engine.probe_tolerance`,
`control.max_staleness`, `control.steps`, `runtime`, `ray`, `mismatch` and `logging.level`. Whether the bound is `auto`
can't change, and the number of steps can only grow. The schedule of the learning rate stays as it is: with another one,
steps that are trained again after a crash would give other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dora_rl.core.config import build, merge, override
from dora_rl.core.errors import UserError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir

Settings = Sequence[str] | Mapping[str, Any]
"""Assignments such as `control.steps=8`, or a tree of settings."""


class Change(NamedTuple):
    """How a run goes on."""

    config: RunConfig
    """Its configuration from now on."""
    bound: int | None
    """The staleness bound from now on, if it was given; the event log has it, not the configuration."""


def change(run_dir: RunDir, settings: Settings) -> int | None:
    """Write changed settings to the run directory; return the staleness bound if it is among them, else None."""
    found = changed(run_dir.read(), settings)
    if found.config != run_dir.read():
        run_dir.write(found.config)
    return found.bound


def changed(before: RunConfig, settings: Settings) -> Change:
    """The configuration with other settings; one that can't change when a run is resumed is a `UserError`."""
    tree = before.model_dump(mode="json")
    if isinstance(settings, Mapping):
        given, tree = merge({}, settings), merge(tree, settings)
    else:
        given, tree = override({}, settings), override(tree, settings)
    after = build(RunConfig, tree, "options")
    logging = before.logging.model_copy(update={"level": after.logging.level})
    free = {"runtime": after.runtime, "ray": after.ray, "mismatch": after.mismatch, "logging": logging}
    engine = before.rollout.engine.model_copy(update={"probe_tolerance": after.rollout.engine.probe_tolerance})
    rollout = before.rollout.model_copy(update={"instances": after.rollout.instances, "engine": engine})
    if before.control.adaptive != after.control.adaptive:
        raise UserError(
            "'control.max_staleness' can't change between \"auto\" and a number when a run is resumed: leave it out, "
            "or start a new run"
        )
    if problem := steps_problem(before.control.steps, after.control.steps):
        raise UserError(problem)
    steps = {"steps": after.control.steps}
    control = before.control.model_copy(update={"max_staleness": after.control.max_staleness, **steps})
    if before.model_copy(update={**free, "rollout": rollout, "control": control}) != after:
        raise UserError(
            "a run is resumed with the settings that it was started with; only 'rollout.instances', "
            "'rollout.engine.probe_tolerance', 'control.max_staleness', 'control.steps', 'runtime', 'ray', 'mismatch' "
            "and 'logging.level' can be changed: leave out the others"
        )
    control = before.control.model_copy(update=steps)
    control_given = given.get("control")
    bound_given = isinstance(control_given, Mapping) and "max_staleness" in control_given
    return Change(
        before.model_copy(update={**free, "rollout": rollout, "control": control}),
        None if not bound_given or after.control.adaptive else after.control.staleness,
    )


def steps_problem(before: int | None, after: int | None) -> str:
    """Why a run that was asked for some number of steps can't be asked for another one; empty if it can."""
    if before == after:
        return ""
    if before is None or after is None:
        return "'control.steps' can't be set when a run without it is resumed, nor unset: leave it out"
    if after < before:
        return (
            f"the run was asked for {before} steps and can't be asked for fewer ({after}): give 'control.steps' a "
            "larger number, or leave it out"
        )
    return ""
