"""Resuming a run: its event log is replayed, then the ordinary handling of faults takes over.

The log goes through a fresh orchestrator and through the projections, which are then exactly where they were. The
orchestrator is told that all instances and the trainer are lost, which is true. From there requests continue from their
tokens under their own version, and the trainer from its checkpoint. There is no second way to recover.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.interfaces import Projection
from dora_rl.core.types import Version
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.runtime.resume import steps_problem
from dora_rl.runtime.supervisor.replay import replay
from dora_rl.trainer import checkpoint

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.run_dir import RunDir
    from dora_rl.runtime.supervisor.run_state import RunState
    from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore


def recover(
    run_dir: RunDir,
    config: RunConfig,
    orchestrator: Orchestrator,
    ledger: Ledger,
    projections: Sequence[Projection],
    trajectories: TrajectoryStore,
    state: RunState,
) -> None:
    """Bring the orchestrator and the projections to where the log ends, and verify what the run continues from."""
    for logged in replay(orchestrator, ledger.events()):
        for projection in projections:
            projection.apply(logged.event, logged.commands, logged.at)
    ledger.check_tables()
    trajectories.restore_tokens(ledger)
    _check_checkpoints(run_dir, orchestrator)
    if not orchestrator.finished:
        _check_weights(run_dir, config, state.held)


def check_extension(run_dir: RunDir, config: RunConfig, orchestrator: Orchestrator, state: RunState) -> None:
    """Refuse another number of steps that the run can't have; its config then keeps the number before."""
    problem = steps_problem(state.steps, config.control.steps)
    if not problem and orchestrator.prompts_used_up:
        problem = "the data of the run is used up, so it can't have more steps: start a new run from its policy"
    if not problem and orchestrator.finished and state.held - set(run_dir.store(config).versions()):
        problem = (
            'the run has finished, and its weights were in memory only (weights = "memory"), so it can\'t have more '
            "steps: start a new run from its policy"
        )
    if problem:
        run_dir.write(config.model_copy(update={"control": config.control.model_copy(update={"steps": state.steps})}))
        raise UserError(problem)


def _check_checkpoints(run_dir: RunDir, orchestrator: Orchestrator) -> None:
    """An optimiser step starts only when the ledger has it on disk, so no checkpoint can be ahead of the ledger."""
    checkpoints = checkpoint.versions(run_dir.checkpoints)
    newest = -1 if orchestrator.newest is None else orchestrator.newest
    if checkpoints and checkpoints[-1] > newest + 1:
        raise IntegrityError(
            f"{run_dir.ledger} ends with version {newest}, but there is a checkpoint of version {checkpoints[-1]}: "
            "the ledger has lost what was on disk; put back a copy of it"
        )


def _check_weights(run_dir: RunDir, config: RunConfig, versions: set[Version]) -> None:
    """Groups in flight continue under their own version, so its weights must still exist."""
    gone = sorted(versions - set(run_dir.store(config).versions())) if versions else []
    if gone:
        hint = "; weights in memory do not outlive a restart of the machine" if config.weights == "memory" else ""
        raise IntegrityError(f"the run can't be resumed: the weights of version {gone[0]} are gone{hint}")
