"""Writes the table in `docs/models.md`: whether each causal LM of the installed `transformers` is exact or refused.

python -m tests.models.table             check all models and write the page
python -m tests.models.table --check     check all models and compare with the page
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- generated -->"


class Row(NamedTuple):
    """One line of the table."""

    name: str
    rollout: str
    training: str


def row(name: str) -> Row:
    """Check one architecture."""
    from tests.models import architectures

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checked = architectures.check(name)
    except architectures.NotTinyError as error:
        return Row(name, "not built", str(error))
    except Exception as error:  # an assertion about what was computed, or a crash behind the check
        return Row(name, "WRONG", f"{type(error).__name__}: {str(error)[:200]}")
    return Row(
        name,
        f"exact, {checked.rollout}" if checked.rollout_exact else "refused",
        f"exact, {checked.training}" if checked.training_exact else "refused",
    )


def rows_of(text: str) -> dict[str, Row]:
    """The rows of a page."""
    found = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"
    ]
    return {cells[0]: Row(*cells) for cells in found}


def version_of(text: str) -> str:
    """The version of `transformers` that a page was written with."""
    line = next((line for line in text.splitlines() if line.startswith("Checked with transformers ")), "")
    return line.removeprefix("Checked with transformers ").partition(":")[0]


def rendered(rows: list[Row]) -> str:
    """The generated end of the page, after the mark."""
    import transformers

    def count(column: str, start: str) -> int:
        return sum(getattr(one, column).startswith(start) for one in rows)

    built = [one for one in rows if one.rollout != "not built"]
    summary = (
        f"Checked with transformers {transformers.__version__}: {len(rows)} architectures and variants, {len(built)} "
        f"built tiny. Rollout: {count('rollout', 'exact')} exact, {count('rollout', 'refused')} refused. Training: "
        f"{count('training', 'exact')} exact, {count('training', 'refused')} refused. "
        f"Wrong: {count('rollout', 'WRONG')}."
    )
    lines = [
        summary,
        "",
        "| model type | rollout | training |",
        "|---|---|---|",
        *(f"| `{one.name}` | {one.rollout} | {one.training} |" for one in built),
        "",
        "These could not be built as tiny models from their default config; the check at load decides about them:",
        "",
        "| model type | rollout | why |",
        "|---|---|---|",
        *(f"| `{one.name}` | {one.rollout} | {one.training.replace('|', '/')} |" for one in rows if one not in built),
    ]
    return "\n".join(lines) + "\n"


def check_all(processes: int) -> list[Row]:
    """Check all architectures, several at a time."""
    from tests.models import architectures

    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(pool.imap(row, architectures.names()))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given: Any = arguments.parse_args()
    rows = check_all(given.processes)
    wrong = [one for one in rows if one.rollout == "WRONG"]
    text = PAGE.read_text(encoding="utf-8")
    new = text.partition(BEGIN)[0] + BEGIN + "\n" + rendered(rows)
    if not given.check:
        PAGE.write_text(new, encoding="utf-8")
    changed = [one for one in rows if rows_of(text).get(one.name) != one] if given.check else []
    for one in wrong + changed:
        sys.stdout.write(f"{one.name}: {one.rollout}; {one.training}\n")
    sys.exit(1 if wrong or changed else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
