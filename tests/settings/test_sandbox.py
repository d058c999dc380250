"""Limits of the sandbox: a program that passes under one value is cut off under another."""

from __future__ import annotations

import pytest

from dora_rl.envs.sandbox.sandbox import Sandbox, SandboxLimits

MEMORY = "print(len(bytearray(150 << 20)))"
UNHURRIED = {"wall_seconds": 600.0, "cpu_seconds": 60.0}
# It waits for its end where there is one: whoever counts the entries comes by.
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
def test_a_limit_holds_where_it_was_set(name: str, enough: int, too_little: int, code: str) -> None:
    for limit, seconds in ((enough, "1"), (too_little, "300")):
        sandbox = Sandbox(SandboxLimits.model_validate({name: limit, **UNHURRIED}))
        assert bool(sandbox.run(code.replace("SECONDS", seconds)).stdout) == (limit == enough)
