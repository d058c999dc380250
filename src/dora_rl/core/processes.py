"""Whether a process of this machine is alive."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STATE = re.compile(rb".*\) (\w)", re.DOTALL)


def alive(pid: int) -> bool:
    """It runs or is stopped. One that has ended and that nobody has buried yet has a number, but is not alive."""
    try:
        os.kill(pid, 0)
        state = _STATE.match(Path(f"/proc/{pid}/stat").read_bytes())
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OSError:
        return not Path("/proc/self").exists()  # no such folder on other systems
    return state is not None and state[1] not in b"ZX"
