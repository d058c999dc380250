"""Counters of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters since the engine began: tokens, requests and blocks."""

    decoded: int = 0
    prefilled: int = 0
    reprefilled: int = 0
    """Tokens whose KV existed once and was computed again."""
    shared: int = 0
    """Prompt tokens that a sibling had already computed."""
    preempted: int = 0
    recomputed: int = 0
    """Pre-emptions and moves whose KV had to be dropped, since host memory was full."""
    copied_blocks: int = 0
    exported: int = 0
    imported: int = 0
    together: int = 0
    """Most versions that computed in one step."""
