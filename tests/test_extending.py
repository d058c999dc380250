"""Every example in docs/extending.md works: it is executed from the page and used as the page says."""

from __future__ import annotations

import random
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

import dora_rl.engine
from dora_rl.core.activities import IdleCause, IdleReason
from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError, RequestError, VersionError
from dora_rl.core.events import Generated, SlotLoaded, SlotLoadFailed
from dora_rl.core.interfaces import PublishedFile
from dora_rl.engine.config import ENGINES
from dora_rl.engine.interface import RolloutEngine
from dora_rl.engine.registry import EngineResources, engine_factory
from dora_rl.engine.requests import Request, Sampling, StepOutput
from dora_rl.envs.config import EnvironmentConfig, RewardConfig
from dora_rl.envs.environment import Environments
from dora_rl.envs.rewards import RewardScorer
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.modes import MODES
from dora_rl.orchestrator.placement import PLACEMENT_RULES
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.metrics import MetricsRecorder
from dora_rl.runtime.supervisor.trackers import TRACKERS, trackers
from dora_rl.sim.chaos import ChaosRuntime
from dora_rl.sim.presets import preset
from dora_rl.sim.run import parse_variant, simulate
from dora_rl.trainer import algorithms
from dora_rl.trainer.algorithms import all_algorithms
from tests.envs.making import a_problem
from tests.schedules import draw_config, draw_plan, run_schedule
from tests.settings.workers import tree_with
from tests.trainer.factories import SMALL, groups, llama, trainer

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


class Block(NamedTuple):
    """One code block of the page."""

    section: str
    path: str
    """From its first line."""
    code: str


def blocks() -> list[Block]:
    found = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for code in re.findall(r"```(?:python|toml)\n(.*?)```", section, re.DOTALL):
            first = code.partition("\n")[0]
            assert first.startswith("# "), f"a block of '{title}' does not name its file"
            found.append(Block(title, first[2:], code))
    return found


def code_of(path: str) -> str:
    (code,) = [block.code for block in blocks() if block.path == path]
    return code


def settings_of(section: str) -> dict[str, Any]:
    """The settings that a section shows."""
    (code,) = [block.code for block in blocks() if block.section == section and block.path == "run.toml"]
    return tomllib.loads(code)


def run_config(base: Path, section: str) -> RunConfig:
    return build(RunConfig, tree_with(base, settings_of(section)))


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Examples add rows to these; other tests must not see them."""
    kept = [(registry, dict(registry)) for registry in (MODES, PLACEMENT_RULES, cast("dict[str, str]", ENGINES))]
    makers = len(TRACKERS)
    yield
    for registry, before in kept:
        for name in set(registry) - set(before):
            del registry[name]
    del TRACKERS[makers:]


def in_package(package: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules of a folder belong to a package."""
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])


def test_a_reward(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(code_of("rewards.py"))
    scorer = RewardScorer(build(RewardConfig, settings_of("A reward")["reward"]), tmp_path)
    result = scorer.score(a_problem(), "it is 42 " + "indeed " * 17)
    assert result.reward == pytest.approx(0.9)
    assert result.components == {"brief": pytest.approx(0.9), "brief/words": 20.0}
    assert scorer.score(a_problem(), "41").reward == 0.0


def test_an_environment(tmp_path: Path) -> None:
    (tmp_path / "countdown.py").write_text(code_of("countdown.py"))
    environments = Environments(build(EnvironmentConfig, settings_of("An environment")["environment"]), tmp_path)
    session = environments.begin(a_problem())
    assert session.opening == "Count down from 2."
    assert [session.step(text).observation for text in ("2", "1")] == ["Next.", None]
    assert session.result().reward == 1.0
    session = environments.begin(a_problem())
    assert session.step("3").done
    assert session.result().reward == 0.0


def test_an_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_package(algorithms, tmp_path, monkeypatch)
    (tmp_path / "ranked.py").write_text(code_of("trainer/algorithms/ranked.py"))
    all_algorithms.cache_clear()
    try:
        (advantages,) = all_algorithms()["ranked"].advantage([np.array([5.0, 1.0, 5.0, 100.0])])
        assert advantages.tolist() == pytest.approx([0.0, -1.0, 0.0, 1.0])
        model = llama()
        made = trainer(model, **settings_of("An algorithm")["trainer"], optimiser={"learning_rate": 0.01})
        made.accumulate(0, groups(model=llama()))
        report = made.apply(0)
        assert report.version == 1
        assert report.metrics["gradient_norm"] > 0
        assert report.metrics["advantage/max"] == 1.0
    finally:
        all_algorithms.cache_clear()
        sys.modules.pop(f"{algorithms.__name__}.ranked", None)


def test_a_mode(tmp_path: Path) -> None:
    exec(code_of("orchestrator/modes.py"), {})
    assert run_config(tmp_path, "A mode").control.staleness == 2
    result = simulate(preset("laptop", ["steps=4", "warmup_steps=1"]), parse_variant("two_steps_off"))
    assert max(result.staleness) == 2
    chaos = [run_schedule(seed, "two_steps_off") for seed in range(10)]
    assert all(runtime.log for runtime in chaos)


def test_a_placement_rule(tmp_path: Path) -> None:
    exec(code_of("orchestrator/placement.py"), {})
    assert run_config(tmp_path, "A placement rule").control.placement == "smallest"
    result = simulate(preset("laptop", ["steps=4", "warmup_steps=1"]), parse_variant("dora:smallest"))
    assert result.tokens_per_second > 0
    for seed in range(10):
        random_ = random.Random(seed)
        drawn = draw_config(random_, "dora").model_dump() | settings_of("A placement rule")["control"]
        config = build(ControlConfig, drawn)
        ChaosRuntime(config, draw_plan(random_, config), random_.randrange).run()


class Files:
    """Published versions, of which there is nothing but a fingerprint."""

    def hold(self, version: int) -> AbstractContextManager[PublishedFile]:
        if version > 1:
            raise VersionError(f"there is no version {version}")
        return nullcontext(PublishedFile(Path("nowhere"), f"fingerprint-{version}", adapter=False))


def collected(engine: RolloutEngine) -> list[StepOutput]:
    """The outputs of all steps until the engine has nothing to do."""
    outputs = []
    while engine.busy:
        outputs.append(engine.step())
    return outputs


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Register the engine of the page; returns a clock."""
    in_package(dora_rl.engine, tmp_path, monkeypatch)
    (tmp_path / "parrot").mkdir()
    (tmp_path / "parrot" / "__init__.py").touch()
    (tmp_path / "parrot" / "factory.py").write_text(code_of("engine/parrot/factory.py"))
    exec(code_of("engine/config.py"), {})
    ticks = iter(range(1 << 30))
    yield lambda: next(ticks)
    for name in ("parrot.factory", "parrot"):
        sys.modules.pop(f"{dora_rl.engine.__name__}.{name}", None)


def test_an_engine_keeps_the_contract(parrot: Callable[[], int], tmp_path: Path) -> None:
    run = run_config(tmp_path, "An engine").engine_run()
    weights = cast("Callable[[Any], Any]", None)
    resources = EngineResources(weights, Files(), "rollout0", parrot, threads=1, fixed_threads=1)
    engine = engine_factory("parrot").make(run, resources)
    assert engine.spec().slots == run.engine.slots

    engine.load(0, 5)
    assert isinstance(engine.step().events[0], SlotLoadFailed)
    assert engine.serving(0) is None
    engine.load(0, 1)
    (loaded,) = engine.drain().events
    assert isinstance(loaded, SlotLoaded)
    assert (engine.serving(0), loaded.fingerprint) == (1, "fingerprint-1")

    def request(trajectory: int, version: int, tokens: int) -> Request:
        return Request(trajectory=trajectory, version=version, prompt=(3,), sampling=Sampling(max_tokens=tokens))

    with pytest.raises(RequestError):
        engine.submit(request(0, 0, 3), 0)
    for trajectory, tokens in enumerate((3, 5, 4)):
        engine.submit(request(trajectory, 1, tokens), 0)
    assert engine.running == 3
    assert engine.abort(2, 0)
    assert not engine.has(2, 0)
    with pytest.raises(RequestError):
        engine.export([0])
    assert engine.has(0, 0), "a request that can't be moved stays"

    responses: dict[int, list[int]] = {0: [], 1: []}
    ended: dict[int, int] = {}
    for output in collected(engine):
        for chunk in output.chunks:
            assert (chunk.version, chunk.start) == (1, len(responses[chunk.trajectory])), "once, and in order"
            responses[chunk.trajectory] += chunk.tokens.tolist()
        for event in output.events:
            assert isinstance(event, Generated)
            assert event.fingerprint == "fingerprint-1"
            assert event.tokens == len(responses[event.trajectory]), "tokens come before the event that follows"
            ended[event.trajectory] = event.tokens
    assert ended == {0: 3, 1: 5}
    assert engine.progress().kv_tokens == 0
    engine.note_idle(0, IdleCause(reason=IdleReason.NO_PROMPTS))
    for account in engine.accounts:
        account.settle(parrot())
        assert sum(account.totals.values()) == account.lifetime


def test_an_engine_refuses_a_run_that_it_cannot_serve(parrot: Callable[[], int], tmp_path: Path) -> None:
    del parrot
    tree = tree_with(tmp_path, settings_of("An engine"), {"control": {"mode": "partial"}})
    with pytest.raises(ConfigError, match="'parrot' can't load weights under requests, as mode 'partial' does"):
        build(RunConfig, tree)


def test_a_model(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes: dict[str, Any] = SMALL | {"intermediate_size": 64}
    sizes.pop("num_key_value_heads")
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).save_pretrained(tmp_path)
    namespace: dict[str, Any] = {}
    exec(code_of("try_model.py"), namespace)
    assert namespace["try_model"](str(tmp_path)) == ("generic", "packed")


def test_a_tracker(tmp_path: Path) -> None:
    exec(code_of("runtime/supervisor/trackers.py"), {})
    namespace: dict[str, Any] = {}
    exec(code_of("runtime/config.py"), namespace)
    logging = build(namespace["LoggingConfig"], settings_of("A tracker")["logging"] | {"tensorboard": False})
    config = build(RunConfig, tree_with(tmp_path))
    run_dir = RunDir.create(config, tmp_path, "run")
    made = trackers(run_dir, config.model_copy(update={"logging": logging}))
    recorder = MetricsRecorder(run_dir, made, 0, decode=str, samples=0)
    recorder.step_trained(0, {"loss": 0.5}, {})
    recorder.published(1, 10**9, live=1, failed=0, without_signal=0, ledger_seconds=0.0, bound=3)
    recorder.close()
    lines = (run_dir.path / "metrics.csv").read_text().splitlines()
    assert "1,loss,0.5" in lines
    assert "1,timing_s/step,1.0" in lines


def test_the_page_shows_no_block_without_a_test_and_lists_every_section() -> None:
    tested = Path(__file__).read_text()
    for block in blocks():
        assert block.path == "run.toml" or f'code_of("{block.path}")' in tested, f"{block.path} is not tested"
    listed: Mapping[str, str] = dict(re.findall(r"^\| \[(.*?)\]\(#(.*?)\)", PAGE, re.MULTILINE))
    sections = [section.partition("\n")[0] for section in PAGE.split("\n## ")[1:]]
    assert sections == [f"{name[0].upper()}{name[1:]}" for name in listed]
    assert list(listed.values()) == [section.lower().replace(" ", "-") for section in sections]
