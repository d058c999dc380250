"""What may change when a run is resumed.

A run continues with the settings that it was started with. Only settings that do not change its results, or that the
orchestrator changes by an event, can get other values: `rollout.instances`, `rollout.engine.probe_tolerance`,
`control.max_staleness`, `control.steps`, `runtime`, `ray`, `mismatch` and `logging.level`. Whether the bound is `auto`
can't change, and the number of steps can only grow. The schedule of the learning rate stays as it is: with another one,
steps that are trained again after a crash would give other weights.
"""

from __future__ import annotations

from dora_rl.core.config import build, override
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir


def change(run_dir: RunDir, settings: list[str]) -> int | None:
    """Write changed settings to the run directory; return the staleness bound if it is among them, else None."""
    before = run_dir.read()
    tree = override(before.model_dump(mode="json"), settings)
    after = build(type(before), tree, "options")
    logging = before.logging.model_copy(update={"level": after.logging.level})
    changed = {"runtime": after.runtime, "ray": after.ray, "mismatch": after.mismatch, "logging": logging}
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
    if before.model_copy(update={**changed, "rollout": rollout, "control": control}) != after:
        raise UserError(
            "a run is resumed with the settings that it was started with; only 'rollout.instances', "
            "'rollout.engine.probe_tolerance', 'control.max_staleness', 'control.steps', 'runtime', 'ray', 'mismatch' "
            "and 'logging.level' can be changed: leave out the others"
        )
    control = before.control.model_copy(update=steps)
    written = before.model_copy(update={**changed, "rollout": rollout, "control": control})
    if written != before:
        run_dir.write(written)
    given = any(one.startswith("control.max_staleness=") for one in settings)
    return None if not given or after.control.adaptive else after.control.staleness


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
