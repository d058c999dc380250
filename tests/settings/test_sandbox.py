"""Sandbox limits: a program that succeeds under one value is stopped under a lower one."""

from __future__ import annotations

import pytest

from dora_rl.envs.sandbox.sandbox import Sandbox, SandboxLimits

MEMORY = "print(len(bytearray(150 << 20)))"
UNHURRIED = {"wall_seconds": 600.0, "cpu_seconds": 60.0}
# The program sleeps so that the periodic count of disk entries can stop it.
ENTRIES = """
import time
for n in range(30): open(str(n), 'w').close()
time.sleep(SECONDS)
print('done')
"""
FILES = "print(len([open('/dev/zero') for _ in range(40)]))"


@pytest.mark.parametrize(
    ("name", "enough", "too_little", "code"),
    [
        ("memory_bytes", 512 << 20, 128 << 20, MEMORY),
        ("disk_entries", 100, 10, ENTRIES),
        ("open_files", 64, 20, FILES),
    ],
)
def test_a_limit_is_enforced_at_its_configured_value(name: str, enough: int, too_little: int, code: str) -> None:
    for limit, seconds in ((enough, "1"), (too_little, "300")):
        sandbox = Sandbox(SandboxLimits.model_validate({name: limit, **UNHURRIED}))
        assert bool(sandbox.run(code.replace("SECONDS", seconds)).stdout) == (limit == enough)
