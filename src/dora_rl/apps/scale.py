"""`dora-rl scale`: more or fewer instances while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a run, going on or to be resumed.")],
    instances: Annotated[int, typer.Option(help="How many instances it shall have.")],
) -> None:
    """Change the number of rollout instances. Requests of those that leave go on elsewhere from their tokens."""
    from dora_rl.runtime.run_dir import RunDir
    from dora_rl.runtime.supervisor.scaling import scale as write

    before = write(RunDir.open(run), instances)
    Console().print(f"{run}: {before} -> {instances} instances", highlight=False, markup=False, soft_wrap=True)
