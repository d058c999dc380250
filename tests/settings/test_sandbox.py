"""Limits of the sandbox: a program that passes under one value is cut off under another."""

from __future__ import annotations

import pytest

from dora_rl.envs.sandbox import Sandbox, SandboxLimits

MEMORY = "print(len(bytearray(150 << 20)))"
ENTRIES = "import time\nfor n in range(30): open(str(n), 'w').close()\ntime.sleep(1)\nprint('done')"
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
    assert Sandbox(SandboxLimits.model_validate({name: enough})).run(code).stdout
    assert not Sandbox(SandboxLimits.model_validate({name: too_little})).run(code).stdout
