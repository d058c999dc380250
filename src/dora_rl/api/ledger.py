"""`dora_rl.Ledger`: the ledger of a run for reading. It never writes, so it works on a run that is going on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.ledger.reader import LedgerReader
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from dora_rl.api.run import Run


class Ledger(LedgerReader):
    """The ledger of a run: its groups, trajectories, steps, tokens and events, as iterators of typed rows.

    `run` is a run, its directory, or the path of a `ledger.db`. Each iterator reads one snapshot, that of the moment of
    its first row; call the method again to see what a running run has done since.
    """

    def __init__(self, run: str | Path | Run) -> None:
        path = Path(run) if isinstance(run, str | Path) else run.path
        super().__init__(path if path.is_file() else RunDir.open(path).ledger)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"
