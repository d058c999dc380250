"""A run as an object: what `train` returns, and `Run.open` for any run directory.

Everything is read from the files of the run directory when it is asked for, so a run can be inspected while another
process executes it; only `report` writes a file, and only `push` sends something.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dora_rl.apps import run_reader
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from dora_rl.api.ledger import Ledger
    from dora_rl.apps.summary import Summary


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Whether a run has kept its promises."""

    ok: bool
    problems: tuple[str, ...]
    """The promises that it has broken."""
    figures: dict[str, str]
    """What was counted and compared."""
    conclusion: str

    @property
    def lines(self) -> list[str]:
        """The result as text, as `dora-rl audit` prints it."""
        figures = [f"{name}: {value}" for name, value in self.figures.items()]
        return [*figures, *(f"- {problem}" for problem in self.problems), self.conclusion]

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Run:
    """A run that was started, whether it is finished, stopped or running."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in this directory."""
        return cls(RunDir.open(path))

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._folder.path

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self._folder.path.resolve().name

    @property
    def state(self) -> Literal["finished", "stopped", "running"]:
        """Whether the run is finished; a run that is stopped can be resumed."""
        from dora_rl.apps.summary import progress

        return progress(self._folder).state

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, in order; `step`, `version` and `time` are keys too."""
        return list(run_reader.read_metrics(self._folder).steps.values())

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation, by version."""
        return list(run_reader.read_metrics(self._folder).evaluations.values())

    @property
    def policy_path(self) -> Path | None:
        """The policy of the newest checkpoint, which `transformers` can load; None before the first checkpoint."""
        policies = run_reader.policies(self._folder)
        return policies[max(policies)] if policies else None

    def samples(self) -> Iterator[dict[str, Any]]:
        """Some responses of each step, as text with their rewards."""
        return run_reader.lines(self._folder.samples)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run, for reading: its groups, trajectories, steps, tokens and events."""
        from dora_rl.api.ledger import Ledger

        return Ledger(self)

    def summary(self) -> Summary:
        """The figures of the whole run, however often it was resumed."""
        from dora_rl.apps.summary import summarise

        return summarise(self._folder)

    def report(self) -> Path:
        """Write `report.html`, a page with curves, timeline and samples, and return its path."""
        from dora_rl.apps.report import write_report

        write_report(self._folder, self.summary())
        return self._folder.report

    def audit(self) -> AuditResult:
        """Verify from its ledger that the run has lost no group, trained none twice and kept the staleness bound."""
        from dora_rl.apps.audit import audited, conclusion

        found = audited(self._folder)
        return AuditResult(
            ok=not found.problems,
            problems=tuple(found.problems),
            figures={figure.name.strip(): figure.value for figure in found.figures},
            conclusion=conclusion(found),
        )

    def push(
        self,
        repo: str,
        *,
        private: bool = False,
        revision: str | None = None,
        version: int | None = None,
        adapter: bool = False,
        base_model: str | None = None,
        force: bool = False,
    ) -> str:
        """Push a policy to the Hugging Face Hub with a model card, in one commit, and return the commit's address.

        It is the best policy that is kept, or else the newest, unless a version is given; `adapter` pushes only the
        LoRA adapter. A run whose audit fails is refused unless `force` is true: then its card says so.
        """
        from dora_rl.apps.push import Choice, prepare, send

        upload = prepare(self._folder, repo, Choice(version, adapter, base_model, force))
        return send(upload, repo, private=private, revision=revision)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"
