"""`dora_rl.Simulator` gives what `dora-rl sim` prints, and `dora_rl.Orchestrator` what the production class decides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dora_rl import Comparison, ConfigError, Orchestrator, Simulator, UserError
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.orchestrator import Orchestrator as Production
from dora_rl.sim.run import parse_variant, simulate
from tests.test_cli import CLUSTER, run

SETTINGS = {"steps": 3, "warmup_steps": 2}


def test_a_comparison_is_what_the_command_prints_and_writes(tmp_path: Path) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    changed = ("--set", "steps=3", "--set", "warmup_steps=2", "--set", "control.max_staleness=auto")
    modes = ("sync", "dora")
    done = run("sim", "laptop", "--modes", ",".join(modes), *changed, "--json", figures, "--html", page, columns=120)
    assert done.returncode == 0, done.stderr
    simulator = Simulator("laptop", **SETTINGS, control={"max_staleness": "auto"})
    comparison = simulator.compare(*modes, timeline=True)
    assert done.stdout.startswith(comparison.text(width=120))
    assert "dora: the staleness bound was 1 at first" in str(comparison)
    assert json.loads(figures.read_text()) == json.loads(json.dumps(comparison.figures()))
    assert comparison.write_html(tmp_path / "ours.html").read_text() == page.read_text()
    assert list(comparison) == list(modes)
    alone = simulator.run("sync")
    assert alone == dataclasses.replace(comparison["sync"], timeline=None)
    with pytest.raises(UserError, match="call compare with timeline=True"):
        Comparison("laptop", simulator._config, {"sync": alone}).write_html(tmp_path / "none.html")


def test_settings_of_a_file_and_of_keywords_are_those_of_the_simulator(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    versions: list[int] = []
    simulator = Simulator(file, **SETTINGS, **{"control.max_staleness": 2, "workload.mean_tokens": 50})
    result = simulator.run("dora:proportional", timeline=True, progress=versions.append)
    config = simulator._config
    assert (config.steps, config.control.max_staleness) == (3, 2)
    assert result == simulate(config, parse_variant("dora:proportional"), timeline=True)
    assert versions == sorted(versions)
    assert versions[-1] == 5
    assert result.timeline is not None
    assert len(result.timeline.slots) >= 1
    assert simulator.run().timeline is None


@pytest.mark.parametrize(
    ("preset", "settings", "sentence"),
    [
        ("lapptop", {}, "unknown preset 'lapptop': choose from laptop"),
        ("laptop", {"steps": 0}, "laptop: 'steps'"),
        ("laptop", {"control": {"max_stalenes": 2}}, "did you mean 'control.max_staleness'?"),
        ("missing.toml", {}, "cannot read missing.toml"),
    ],
)
def test_a_mistake_has_the_sentence_of_the_command(preset: str, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Simulator(preset, **settings)
    assert sentence in str(caught.value)


def test_an_unknown_mode_is_refused_before_anything_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora_rl.api.simulator.simulate", None)
    with pytest.raises(ConfigError, match="unknown mode 'dorra': choose from sync"):
        Simulator("laptop").compare("sync", "dorra")


def test_the_orchestrator_is_the_production_class_with_checked_settings() -> None:
    control = {"groups_per_step": 2, "group_size": 2, "max_response_tokens": 8}
    made = Orchestrator(**control, deadlines={"stall": 5.0}, **{"deadlines.load": 7.0})
    assert isinstance(made, Production)
    assert made.config == ControlConfig(**control, deadlines={"stall": 5.0, "load": 7.0})
    with pytest.raises(ConfigError, match="orchestrator: unknown key 'group_sise', did you mean 'group_size'"):
        Orchestrator(**control, group_sise=1)
