"""`DoraConfig` is the config tree of a run: the same settings, defaults and sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from dora_rl import ConfigError, DoraConfig
from dora_rl.apps.train import read_config
from dora_rl.core.config import build, merge, override
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.runtime.config import RunConfig

CONTROL = {"groups_per_step": 4, "group_size": 2, "max_response_tokens": 16}
SUPPLIED = {"model.path": "m", "data.source": "d.jsonl", "reward.functions": ["exact"]}


def test_sections_dotted_names_and_config_objects_are_the_same() -> None:
    nested = DoraConfig(control={**CONTROL, "steps": 3}, seed=5)
    dotted = DoraConfig(**{f"control.{key}": value for key, value in CONTROL.items()}, **{"control.steps": 3}, seed=5)
    typed = DoraConfig(control=ControlConfig(**CONTROL, steps=3), seed=5)
    assert nested == dotted == typed == DoraConfig(control=CONTROL).replace(control={"steps": 3}, seed=5)
    tree = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}, "reward": {"functions": ["exact"]}}
    assert nested.resolve(SUPPLIED) == build(RunConfig, {**tree, "control": {**CONTROL, "steps": 3}, "seed": 5})


def test_a_config_file_gives_what_the_command_line_reads(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    tree = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}, "reward": {"functions": ["exact"]}}
    file.write_text(tomli_w.dumps({**tree, "control": CONTROL}))
    config = DoraConfig.from_toml(file, control={"steps": 3}, **{"rollout.engine.max_context": 99})
    assert config.resolve({}) == read_config(file, ["control.steps=3", "rollout.engine.max_context=99"])
    assert config.base == tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        {"contrl": {}},
        {"control": {"max_stalenes": 2}},
        {"control": {"group_size": 0}},
        {"sampling": {"temperature": 0}},
        {"reward": {"functions": ["exact"], "weights": [1, 2]}},
        {"control": {"mode": "dorra"}},
    ],
)
def test_a_mistake_has_the_sentence_of_a_config_file(tmp_path: Path, wrong: dict[str, Any]) -> None:
    base = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}, "reward": {"functions": ["exact"]}}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(merge({**base, "control": CONTROL}, wrong)))
    with pytest.raises(ConfigError) as of_file:
        read_config(tmp_path / "run.toml", [])
    with pytest.raises(ConfigError) as of_keywords:
        DoraConfig(**merge({"control": CONTROL}, wrong))
    assert str(of_keywords.value) == str(of_file.value).replace(str(tmp_path / "run.toml"), "config")


def test_weights_can_be_given_for_functions_that_come_later() -> None:
    config = DoraConfig(control=CONTROL, reward={"weights": [1, 2]})
    assert config.resolve({**SUPPLIED, "reward.functions": ["exact", "contains"]}).reward.weights == [1, 2]
    with pytest.raises(ConfigError, match="weights has 2 entries for 1 functions"):
        config.resolve(SUPPLIED)


KEYS = st.sampled_from(["a", "b", "c"])
TREES = st.recursive(st.integers(), lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3))


@given(st.dictionaries(KEYS, TREES, max_size=3), st.lists(KEYS, min_size=1, max_size=3), st.integers())
def test_merging_a_dotted_name_is_an_override(tree: dict[str, Any], path: list[str], value: int) -> None:
    key, before = ".".join(path), merge({}, tree)
    try:
        expected = override(tree, [f"{key}={value}"])
    except ConfigError as error:
        with pytest.raises(ConfigError) as ours:
            merge(tree, {key: value})
        assert str(ours.value) == str(error)  # noqa: PT017
    else:
        assert merge(tree, {key: value}) == expected
    assert tree == before
