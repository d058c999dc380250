"""Shared by all tests."""

from __future__ import annotations

import os

# Each xdist worker has one core to itself; torch reads this when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
