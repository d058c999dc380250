"""The algorithms by name. A new one is one file that ends in an `Algorithm`, and one line here."""

from __future__ import annotations

import difflib

from dora_rl.core.errors import ConfigError
from dora_rl.trainer.algorithms.algorithm import Algorithm
from dora_rl.trainer.algorithms.cispo import CISPO
from dora_rl.trainer.algorithms.dapo import DAPO
from dora_rl.trainer.algorithms.dr_grpo import DR_GRPO
from dora_rl.trainer.algorithms.grpo import GRPO
from dora_rl.trainer.algorithms.gspo import GSPO
from dora_rl.trainer.algorithms.longcat import LONGCAT
from dora_rl.trainer.algorithms.reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from dora_rl.trainer.algorithms.rloo import RLOO
from dora_rl.trainer.algorithms.supervised import SUPERVISED

ALGORITHMS: dict[str, Algorithm] = {
    "cispo": CISPO,
    "dapo": DAPO,
    "dr_grpo": DR_GRPO,
    "grpo": GRPO,
    "gspo": GSPO,
    "longcat": LONGCAT,
    "reinforce_pp": REINFORCE_PP,
    "reinforce_pp_baseline": REINFORCE_PP_BASELINE,
    "rloo": RLOO,
    "supervised": SUPERVISED,
}


def find(name: str) -> Algorithm:
    """The algorithm of this name; an unknown one is refused with the nearest."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    nearest = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"known are: {', '.join(ALGORITHMS)}"
    raise ConfigError(f"there is no algorithm '{name}'; {hint}")
