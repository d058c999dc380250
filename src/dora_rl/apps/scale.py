"""`dora-rl scale`: changes the number of rollout instances of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is running or will be resumed.")],
    instances: Annotated[int, typer.Option(help="Number of instances to have.")],
) -> None:
    """Change the number of rollout instances. Requests of removed instances continue from their tokens on others."""
    from dora_rl.runtime.run_dir import RunDir
    from dora_rl.runtime.supervisor.scaling import scale as write

    before = write(RunDir.open(run), instances)
    Console().print(f"{run}: {before} -> {instances} instances", highlight=False, markup=False, soft_wrap=True)
