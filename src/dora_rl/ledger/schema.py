"""The tables of a ledger.

The event log is the truth that a run is resumed from: it, the notes and the tokens are all that can't be derived.
The other tables say the same in a form that people and `dora-rl audit` can ask; both are written in one transaction.

Damage is noticed before anything is done with what is damaged: log and notes by their chains, tokens by a digest in
each row, the other tables by deriving them from the log again.
"""

from __future__ import annotations

SCHEMA_VERSION = 5

TABLES = """
-- Figures about the ledger itself.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;

-- Every event that reached the orchestrator, in order, and the commands that it answered with.
-- `chain` is a digest over this row and the chain before it: no row can be changed, added or left out unnoticed.
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, event BLOB NOT NULL, commands BLOB NOT NULL, chain BLOB NOT NULL
) STRICT;

-- What the run was made from and what it has made (`ledger.notes`), chained like the events.
CREATE TABLE notes (
    number INTEGER PRIMARY KEY, at INTEGER NOT NULL, note BLOB NOT NULL, chain BLOB NOT NULL
) STRICT;

CREATE TABLE prompts (key TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, tokens INTEGER NOT NULL) STRICT;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    prompt TEXT NOT NULL UNIQUE REFERENCES prompts (key),
    version INTEGER NOT NULL,
    admitted_at INTEGER NOT NULL,
    step INTEGER,           -- that trained it
    failure TEXT            -- why it was not trained
) STRICT;

CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY,
    "group" INTEGER NOT NULL REFERENCES groups (id),
    attempt INTEGER NOT NULL DEFAULT 0,
    instance TEXT,
    version INTEGER,        -- that served it, as the engine said
    fingerprint TEXT,
    tokens INTEGER,
    reward REAL,
    failed TEXT             -- why it was not finished
) STRICT;

-- The tokens of each trajectory so far, a chunk a row; kept until no checkpoint can ask for them again.
CREATE TABLE tokens (
    trajectory INTEGER NOT NULL REFERENCES trajectories (id),
    start INTEGER NOT NULL,
    version INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    sampled INTEGER NOT NULL,   -- 0: the environment produced them
    experts BLOB NOT NULL,
    expert_layers INTEGER NOT NULL,
    experts_per_token INTEGER NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (trajectory, start)
) STRICT, WITHOUT ROWID;

CREATE TABLE ended (
    trajectory INTEGER PRIMARY KEY REFERENCES trajectories (id), reason TEXT NOT NULL, digest BLOB NOT NULL
) STRICT;

CREATE TABLE moves (
    trajectory INTEGER NOT NULL REFERENCES trajectories (id),
    attempt INTEGER NOT NULL,
    source TEXT NOT NULL,
    target TEXT NOT NULL,
    begun_at INTEGER NOT NULL,
    ended_at INTEGER,
    arrived INTEGER         -- 1: with its KV; 0: it went on from its tokens, or stayed
) STRICT;
CREATE INDEX moves_open ON moves (trajectory) WHERE ended_at IS NULL;

CREATE TABLE steps (
    step INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL, published_at INTEGER, fingerprint TEXT
) STRICT;
"""
