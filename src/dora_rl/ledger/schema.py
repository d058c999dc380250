"""The tables of a ledger.

The event log, the run records and the tokens are the primary data: a run is resumed from them, and they can't be
derived from anything else. The other tables are a projection of the event log that people and `dora-rl audit` can
query; log and tables are written in one transaction.

Damage is detected before damaged data is used: in the event log and the run records by their digest chains, in the
tokens by a digest in each row, in the other tables by deriving them from the log again.
"""

from __future__ import annotations

SCHEMA_VERSION = 6

TABLES = """
-- Facts about the ledger itself.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;

-- Every event that reached the orchestrator, in order, and the commands that the orchestrator answered with.
-- `chain` is a digest of this row and the chain of the row before, so changed, added and removed rows are detected.
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, event BLOB NOT NULL, commands BLOB NOT NULL, chain BLOB NOT NULL
) STRICT;

-- Inputs and outputs of the run (`ledger.run_records`), chained like the events.
CREATE TABLE records (
    number INTEGER PRIMARY KEY, at INTEGER NOT NULL, record BLOB NOT NULL, chain BLOB NOT NULL
) STRICT;

CREATE TABLE prompts (key TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, tokens INTEGER NOT NULL) STRICT;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    prompt TEXT NOT NULL UNIQUE REFERENCES prompts (key),
    version INTEGER NOT NULL,
    admitted_at INTEGER NOT NULL,
    step INTEGER,           -- the step that trained it
    failure TEXT,           -- why it could not be trained
    no_signal REAL          -- the reward of all its trajectories, if it ended without signal
) STRICT;

CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY,
    "group" INTEGER NOT NULL REFERENCES groups (id),
    attempt INTEGER NOT NULL DEFAULT 0,
    instance TEXT,
    version INTEGER,        -- the version that served it, as the engine reported
    fingerprint TEXT,
    tokens INTEGER,
    reward REAL,
    failed TEXT             -- why it was not finished
) STRICT;

-- The tokens of each trajectory, one chunk per row; kept until its group has no signal or is in a checkpoint.
CREATE TABLE tokens (
    trajectory INTEGER NOT NULL REFERENCES trajectories (id),
    start INTEGER NOT NULL,
    version INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    sampled INTEGER NOT NULL,   -- 1: by the policy; 0: from the environment
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
    arrived INTEGER         -- 1: with its KV cache; 0: it was resumed from its tokens, or stayed
) STRICT;
CREATE INDEX moves_open ON moves (trajectory) WHERE ended_at IS NULL;

CREATE TABLE steps (
    step INTEGER PRIMARY KEY, applied_at INTEGER NOT NULL, published_at INTEGER, fingerprint TEXT
) STRICT;
"""
