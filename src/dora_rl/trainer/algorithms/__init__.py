"""The registry of algorithms. A module of this package that defines an `Algorithm` adds it; nothing else lists it.

The modules are imported when the registry is first read, sorted by file name. Modules without an `Algorithm` hold what
several algorithms share.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from dora_rl.trainer.algorithms.algorithm import Algorithm


@functools.cache
def all_algorithms() -> Mapping[str, Algorithm]:
    """Every algorithm of this package by name, in the order of the modules and of the definitions in each."""
    algorithms: dict[str, Algorithm] = {}
    for module in sorted(found.name for found in pkgutil.iter_modules(__path__)):
        for value in vars(importlib.import_module(f"{__name__}.{module}")).values():
            if isinstance(value, Algorithm):
                # A module may import an algorithm from another one to build on it: that is the same object.
                other = algorithms.setdefault(value.name, value)
                assert other is value, f"two algorithms are called '{value.name}', the second one in {module}.py"
    return MappingProxyType(algorithms)


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of this name; an unknown name is a `ValueError` that says what to write in its place."""
    algorithms = all_algorithms()
    if name not in algorithms:
        nearest = difflib.get_close_matches(name, algorithms, n=1)
        raise ValueError(
            f"must be a known algorithm such as '{nearest[0]}'"
            if nearest
            else f"must be one of {', '.join(algorithms)}"
        )
    return algorithms[name]
