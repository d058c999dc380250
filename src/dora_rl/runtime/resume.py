"""What may change when a run is resumed.

A run goes on with the settings that it began with. Only what does not change its results, or what the orchestrator
takes as an event of its own, can be given anew: `rollout.instances`, `rollout.engine.probe_tolerance`,
`control.max_staleness`, `runtime`, `ray` and `mismatch`.
"""

from __future__ import annotations

from dora_rl.core.config import build, override
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir


def change(folder: RunDir, settings: list[str]) -> int | None:
    """Resume elsewhere or with more or fewer instances, which is written down, or another K, which is returned."""
    before = folder.read()
    tree = override(before.model_dump(mode="json"), settings)
    after = build(type(before), tree, "options")
    elsewhere = {"runtime": after.runtime, "ray": after.ray, "mismatch": after.mismatch}
    engine = before.rollout.engine.model_copy(update={"probe_tolerance": after.rollout.engine.probe_tolerance})
    rollout = before.rollout.model_copy(update={"instances": after.rollout.instances, "engine": engine})
    control = before.control.model_copy(update={"max_staleness": after.control.max_staleness})
    if before.model_copy(update={**elsewhere, "rollout": rollout, "control": control}) != after:
        raise UserError(
            "a run is resumed with the settings that it began with; only 'rollout.instances', "
            "'rollout.engine.probe_tolerance', 'control.max_staleness', 'runtime', 'ray' and 'mismatch' can be others: "
            "leave out the rest"
        )
    written = before.model_copy(update={**elsewhere, "rollout": rollout})
    if written != before:
        folder.write(written)
    return after.control.max_staleness if any(one.startswith("control.max_staleness=") for one in settings) else None
