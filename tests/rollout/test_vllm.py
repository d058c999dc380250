"""The engine with a real vLLM, and whole runs with it. `make test-vllm` installs the requirements and runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dora_rl.engine.vllm.version_check import version

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.timeout(900),
]


def run(*arguments: str | Path) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def gathered(kind: str, folder: Path) -> dict[str, Any]:
    """Return the results that `program` prints."""
    output = run("tests.rollout.program", kind, folder)
    result: dict[str, Any] = json.loads(output[output.index("RESULT ") :].removeprefix("RESULT ").splitlines()[0])
    return result


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return gathered("weights", tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return gathered("adapters", tmp_path_factory.mktemp("adapters"))


def test_a_slot_serves_the_published_weights_also_after_a_switch(weights: dict[str, Any]) -> None:
    assert weights["loaded"] == weights["fingerprints"]
    assert weights["greedy"] == [True, True]
    assert max(weights["gap"]) < 1e-3


def test_the_probe_accepts_the_published_weights(weights: dict[str, Any], adapters: dict[str, Any]) -> None:
    assert len(weights["probed"]) == 2
    assert all(difference < tolerance / 5 for difference, tolerance in weights["probed"])
    assert adapters["probed"] == [True] * 4


def test_the_probe_detects_output_embeddings_of_another_version(weights: dict[str, Any]) -> None:
    """`reload_weights` of vLLM 0.32 on a CPU keeps the former output embeddings if they are tied."""
    tied = weights["tied"]
    assert tied["sound"] == [True, True]
    assert tied["differs"], tied["reason"]
    assert "does not compute what the trainer published as version 1" in tied["reason"]


def test_the_probe_detects_a_dropped_and_a_wrongly_scaled_adapter(adapters: dict[str, Any]) -> None:
    assert "does not compute what the trainer published as version 2" in adapters["dropped"]
    assert "does not compute what the trainer published as version 2" in adapters["scaled"]


def test_logprobs_are_those_of_the_sampling_distribution(weights: dict[str, Any]) -> None:
    assert weights["warm_gap"] < 1e-3, "at temperature 0.7"
    assert weights["of_one"] == 0, "the only token left by top_k = 1 has the probability 1"


def test_weights_that_vllm_did_not_load_are_detected(weights: dict[str, Any], adapters: dict[str, Any]) -> None:
    assert "other weights than were published as version 1" in weights["caught"]
    assert "than were published as version 2" in adapters["caught"]
    assert weights["missing"], "a version that was never published"


def test_a_moved_request_gives_the_tokens_of_an_unmoved_one(weights: dict[str, Any]) -> None:
    with_kv, without = weights["moved"], weights["prefilled"]
    assert with_kv["tokens"] == without["tokens"] == weights["unmoved"]
    assert not with_kv["errors"]
    assert not without["errors"]


def test_re_prefilled_tokens_are_counted(weights: dict[str, Any]) -> None:
    assert weights["moved"]["reprefilled"] == 0
    assert weights["prefilled"]["reprefilled"] == 70 + 20 - 1, "the prompt and the response without its last token"


def test_turns_park_and_resume(weights: dict[str, Any]) -> None:
    assert weights["turns"]["kinds"][0] == "Parked"
    assert weights["turns"]["ended"]


def test_bad_requests_are_refused(weights: dict[str, Any]) -> None:
    assert weights["refused"] == ["PromptError"] * 3 + ["VersionError"]


def test_more_requests_than_the_cache_holds_all_end(weights: dict[str, Any]) -> None:
    assert weights["crowd"]["ends"] == 16
    assert weights["crowd"]["preempted"] > 0, "preempted requests are counted"


def test_four_adapters_share_one_batch(adapters: dict[str, Any]) -> None:
    assert adapters["loaded"] == adapters["fingerprints"]
    assert len(set(adapters["fingerprints"])) == 4
    assert adapters["live"] == 4
    assert adapters["together"] == 8
    assert adapters["greedy"] == [True] * 4
    assert max(adapters["gap"]) < 1e-3
    assert adapters["left"] == [1, 2, 4], "the unloaded adapter was removed"


def test_every_response_carries_its_version(adapters: dict[str, Any]) -> None:
    fingerprints = adapters["fingerprints"]
    assert adapters["stamps"] == sorted([version % 10, version, fingerprints[version]] for version in (0, 1, 2, 3) * 2)


def train(folder: Path, name: str, *settings: str) -> list[dict[str, float]]:
    """Train the model of the quickstart for a few steps, audit the run and return its metrics."""
    common = {
        "control.groups_per_step": 4,
        "control.group_size": 4,
        "control.max_response_tokens": 160,
        "rollout.engine.kind": "vllm",
        "rollout.engine.max_requests": 24,
        "rollout.engine.max_context": 256,
        "trainer.optimiser.schedule": "constant",
        "evaluation.every": 0,
        "logging.tensorboard": "false",
    }
    options = [word for key, value in common.items() for word in (f"--{key}", str(value))]
    config = ROOT / "examples" / "quickstart" / "quickstart.toml"
    run("dora_rl.apps.cli", "train", config, "--out", folder, "--name", name, *options, *settings)
    audited = run("dora_rl.apps.cli", "audit", folder / name)
    assert "kept: all promises" in audited
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_with_adapters_keeps_all_promises(tmp_path: Path) -> None:
    one = (
        "--rollout.instances",
        "1",
        "--trainer.lora.rank",
        "8",
        "--control.steps",
        "5",
        "--control.max_staleness",
        "3",
    )
    figures = train(tmp_path, "adapters", *one)
    assert len(figures) == 5
    assert figures[-1]["rollout/versions_together"] >= 2
    assert sum(one["rollout/migrations"] for one in figures) == 0, "every version has a separate slot on every instance"
    assert figures[0]["mismatch_kl"] == pytest.approx(0, abs=1e-4)


def test_a_run_with_all_weights_on_two_instances_keeps_all_promises(tmp_path: Path) -> None:
    two = ("--rollout.instances", "2", "--control.steps", "4", "--control.max_staleness", "2")
    figures = train(tmp_path, "weights", *two)
    assert len(figures) == 4
    assert figures[0]["mismatch_kl"] == pytest.approx(0, abs=1e-4)


def test_the_installed_version_is_supported() -> None:
    assert version() is not None
