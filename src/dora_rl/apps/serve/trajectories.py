"""The data of Trajectories: a filtered list from the ledger, and one trajectory with its text, tokens and siblings.

Invariants:
- all values of a request are bound parameters of a query, never part of its text;
- text comes from `samples.jsonl`, or from the tokens while the ledger has them; the tokenizer that decodes them is the
  one in a checkpoint of the run, since no file outside the run is read.
"""

from __future__ import annotations

import functools
import math
import os
import sqlite3
from pathlib import Path
from typing import Any

from dora_rl.apps.run_reader import open_ledger, policies
from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.apps.serve.runs_folder import is_inside
from dora_rl.apps.serve.tail import line_at
from dora_rl.core.errors import UserError
from dora_rl.ledger.ledger import read_tokens

PAGE = 50
_MOST_TOKENS = 4000
_MOST_FOUND = 5000
"""Most trajectories that a search in texts gives."""
_COLUMNS = ("id", "group", "version", "tokens", "reward", "failed", "instance", "step", "staleness", "state")
_STATE = """
CASE WHEN t.failed IS NOT NULL THEN 'failed' WHEN g.step IS NOT NULL THEN 'trained' WHEN g.failure IS NOT NULL
THEN 'failed' WHEN g.no_signal IS NOT NULL THEN 'without signal' WHEN t.tokens IS NULL THEN 'generating'
WHEN t.reward IS NULL THEN 'scoring' ELSE 'waiting' END
"""
_SELECT = f"""
SELECT t.id, t."group", g.version, t.tokens, t.reward, t.failed, t.instance, g.step, g.step - g.version, {_STATE}
FROM trajectories t JOIN groups g ON g.id = t."group"
"""  # noqa: S608  # constants only
_FILTERS = {
    "state": f"({_STATE}) = :state",
    "version": "g.version = :version",
    "staleness": "g.step - g.version = :staleness",
    "least_reward": "t.reward >= :least_reward",
    "most_reward": "t.reward <= :most_reward",
    "least_tokens": "t.tokens >= :least_tokens",
    "most_tokens": "t.tokens <= :most_tokens",
    "group": 't."group" = :group',
    "ids": "t.id IN (SELECT value FROM json_each(:ids))",
}
_ORDERS = {
    "newest": "t.id DESC",
    "oldest": "t.id",
    "reward": "t.reward DESC NULLS LAST, t.id",
    "worst": "t.reward IS NULL, t.reward, t.id",
    "longest": "t.tokens DESC NULLS LAST, t.id",
}
FILTERS = tuple(name for name in _FILTERS if name != "ids")


def trajectories(
    run: LiveRun, given: dict[str, Any], *, text: str, recorded: bool, order: str, page: int
) -> dict[str, Any]:
    """A page of the trajectories that satisfy all filters; hold the run's lock."""
    run.refresh()
    values = dict(given)
    if text or recorded:
        values["ids"] = str(_containing(run, text) if text else list(run.samples))
    where = " AND ".join(_FILTERS[name] for name in values) or "1"
    if order not in _ORDERS:
        raise UserError(f"'order' must be one of {', '.join(_ORDERS)}")
    if not run.folder.ledger.exists():
        return {"total": 0, "page": 0, "size": PAGE, "rows": []}
    with open_ledger(run.folder) as ledger:
        count = f'SELECT count(*) FROM trajectories t JOIN groups g ON g.id = t."group" WHERE {where}'  # noqa: S608
        (total,) = ledger.execute(count, values).fetchone()
        page = max(0, min(page, (total - 1) // PAGE))
        query = f"{_SELECT} WHERE {where} ORDER BY {_ORDERS[order]} LIMIT {PAGE} OFFSET {page * PAGE}"
        rows = _rows(ledger, query, values)
    found = [{**row, "text": row["id"] in run.samples} for row in rows]
    return {"total": total, "page": page, "size": PAGE, "rows": found}


def trajectory(run: LiveRun, number: int) -> dict[str, Any]:
    """One trajectory with its siblings; hold the run's lock."""
    run.refresh()
    with open_ledger(run.folder) as ledger:
        found = _rows(ledger, f"{_SELECT} WHERE t.id = :id", {"id": number})
        if not found:
            raise UserError(f"there is no trajectory {number}")
        siblings = _rows(ledger, f'{_SELECT} WHERE t."group" = :group ORDER BY t.id', {"group": found[0]["group"]})
        chunks, ended = read_tokens(ledger, number)
    turns: list[dict[str, Any]] = []
    left = _MOST_TOKENS
    for chunk in chunks:
        ids, logprobs = chunk.tokens.tolist()[:left], chunk.logprobs.tolist()[:left]
        left -= len(ids)
        rounded = [round(one, 3) if math.isfinite(one) else None for one in logprobs]
        texts = _texts(run, ids)
        tokens = [[text, logprob if chunk.sampled else None] for text, logprob in zip(texts, rounded, strict=True)]
        if turns and (turns[-1]["sampled"], turns[-1]["version"]) == (chunk.sampled, chunk.version):
            turns[-1]["tokens"] += tokens
        else:
            turns.append({"sampled": chunk.sampled, "version": chunk.version, "tokens": tokens})
    return {
        **found[0],
        "ended": ended,
        "sample": _sample(run, number),
        "turns": turns,
        "siblings": [{**one, "response": (_sample(run, one["id"]) or {}).get("response")} for one in siblings],
    }


def _rows(ledger: sqlite3.Connection, query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(_COLUMNS, row, strict=True)) for row in ledger.execute(query, values)]


def _sample(run: LiveRun, number: int) -> dict[str, Any] | None:
    offset = run.samples.get(number)
    return None if offset is None else line_at(run.folder.samples, offset)


def _containing(run: LiveRun, text: str) -> list[int]:
    """Trajectories whose prompt or response contains the text, in any case; the newest, if there are too many."""
    wanted, found = text.casefold(), []
    for number in sorted(run.samples, reverse=True):
        sample = _sample(run, number)
        if sample and (wanted in sample["prompt"].casefold() or wanted in sample["response"].casefold()):
            found.append(number)
            if len(found) == _MOST_FOUND:
                break
    return found


def _texts(run: LiveRun, ids: list[int]) -> list[str]:
    """The text of each token; its number in angle brackets if the run has no tokenizer that can be read."""
    tokenizer = _tokenizer(run)
    if tokenizer is None:
        return [f"\u2329{number}\u232a" for number in ids]
    texts = []
    for before, number in zip([None, *ids[:-1]], ids, strict=True):
        # Decoded after the token before it: some tokenizers drop the space at the beginning of a text.
        head = "" if before is None else tokenizer.decode([before], skip_special_tokens=False)
        both = tokenizer.decode([number] if before is None else [before, number], skip_special_tokens=False)
        texts.append(both.removeprefix(head))
    return texts


def _tokenizer(run: LiveRun) -> Any:
    root = run.folder.path.resolve()
    for policy in reversed(list(policies(run.folder).values())):
        path = policy / "tokenizer.json"
        if path.is_file() and is_inside(path, root):
            return _load(path, os.stat(path).st_mtime_ns)  # noqa: PTH116
    return None


@functools.lru_cache(maxsize=4)
def _load(path: Path, _changed: int) -> Any:
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    except Exception:  # not installed, or damaged: numbers are shown instead
        return None
