"""vLLM's settings; vLLM need not be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.vllm.core import Lora, arguments, bind_to_loopback
from dora_rl.engine.vllm.version_check import VllmError, check
from dora_rl.models.loading import ModelConfig
from dora_rl.runtime.config import RunConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = ModelConfig(path="somewhere")


def of(config: EngineConfig, model: ModelConfig = MODEL, lora: Lora | None = None) -> dict[str, object]:
    return arguments(model, config, slots=4, lora=lora, seed=1)


@pytest.mark.parametrize("text", ["0.32.0", "0.32.7+cpu", "0.32.1.dev3"])
def test_supported_versions(text: str) -> None:
    assert check(text) == text


@pytest.mark.parametrize("text", ["0.31.9", "0.33.0", "1.0", "unknown"])
def test_other_versions_are_refused(text: str) -> None:
    with pytest.raises(VllmError, match=f"{text} is not supported, only from 0.32 to before 0.33"):
        check(text)


def test_vllm_reports_log_probs_of_the_sampled_distribution() -> None:
    assert of(EngineConfig(kind="vllm"))["logprobs_mode"] == "processed_logprobs"


def test_adapters_get_room_for_their_rank() -> None:
    given = of(EngineConfig(kind="vllm"), lora=Lora(12, 24, ("q_proj",)))
    assert (given["max_loras"], given["max_lora_rank"]) == (4, 16)
    assert "enable_lora" not in of(EngineConfig(kind="vllm"))


def test_further_arguments_are_passed_on_but_override_none_of_ours() -> None:
    config = EngineConfig.model_validate({"kind": "vllm", "vllm": {"arguments": {"max_num_batched_tokens": 512}}})
    assert of(config)["max_num_batched_tokens"] == 512
    config = EngineConfig.model_validate({"kind": "vllm", "vllm": {"arguments": {"seed": 7}}})
    with pytest.raises(ConfigError, match="must leave 'seed' to other settings"):
        of(config)


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has another name")
def test_an_engine_of_one_process_listens_on_the_loopback_unless_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    bind_to_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    bind_to_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_gguf_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="folders with safetensors"):
        of(EngineConfig(kind="vllm"), ModelConfig(path="model.gguf"))


def test_mode_partial_is_refused() -> None:
    tree = {
        "model": {"path": "x"},
        "data": {"source": "x"},
        "reward": {"functions": ["exact"]},
        "control": {"mode": "partial", "groups_per_step": 1, "group_size": 1, "max_response_tokens": 1},
        "rollout": {"engine": {"kind": "vllm"}},
    }
    with pytest.raises(ConfigError, match=r"'control\.mode' can't be 'partial' with vLLM"):
        build(RunConfig, tree)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_a_run_says_how_to_install_it(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dora_rl.apps.cli",
        "train",
        str(EXAMPLES / "vllm-lora.toml"),
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.endswith("but vLLM is not installed: pip install 'dora-rl[vllm]'")
    assert not list(tmp_path.iterdir()), "the refused run left files"
