"""An engine is its own module and one row of `ENGINES`; the engines are known without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.engine.config import ENGINES, EngineConfig
from dora_rl.engine.registry import EngineFactory, EngineResources, EngineRun, engine_factory
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.workers.engine_factory import make_engine
from tests.settings.workers import tree_with


class ToyFactory(EngineFactory):
    """Makes nothing but shows what it was given."""

    def check_run(self, run: EngineRun) -> None:
        if run.seed == 13:
            raise ValueError("'seed' can't be 13 with the toy engine")

    def make(self, run: EngineRun, resources: EngineResources) -> Any:
        return run, resources


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ENGINES, "toy", f"{__name__}:ToyFactory")
    return "toy"


def tree(tmp_path: Path, kind: str, **more: Any) -> dict[str, Any]:
    return tree_with(tmp_path, {"rollout": {"engine": {"kind": kind}}}, more)


def test_an_engine_is_one_module_and_one_row(toy: str, tmp_path: Path) -> None:
    config = build(RunConfig, tree(tmp_path, toy))
    store: Any = None
    made: Any = make_engine(config, store, "rollout0", 3, lambda: 0)
    run, resources = made
    assert (run.engine.kind, run.max_versions) == ("toy", config.control.staleness + 1)
    assert (resources.instance, resources.threads) == ("rollout0", 3)


def test_an_engine_says_which_runs_it_refuses(toy: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'seed' can't be 13 with the toy engine"):
        build(RunConfig, tree(tmp_path, toy, seed=13))


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="there is no engine 'vlm'; did you mean 'vllm'"):
        build(EngineConfig, {"kind": "vlm"})


def test_all_engines_are_known_without_torch_and_without_their_packages() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["vllm"] = None  # any import of them raises
from dora_rl.engine.registry import ENGINES, engine_factory
for kind in ENGINES:
    engine_factory(kind)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ENGINES)
def test_every_registered_factory_exists(kind: str) -> None:
    assert isinstance(engine_factory(kind), EngineFactory)
