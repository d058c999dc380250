"""Shared by all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Each xdist worker has one core to itself; torch reads this when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A slow machine is no finding: examples have no deadline, and making them may take its time.
settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")
