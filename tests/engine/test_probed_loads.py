"""A slot serves only if it computes the log-probs that the trainer published."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.core.errors import ConfigError, ModelError
from dora_rl.core.events import AnyEvent, SlotLoaded, SlotLoadFailed
from dora_rl.engine.engine import Engine
from dora_rl.models import lora
from dora_rl.models.sources import MemoryWeights
from dora_rl.runtime.transport.weight_source import StoreWeights
from dora_rl.trainer.config import LoraConfig, TrainerConfig
from dora_rl.trainer.trainable import merged_state
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.buffer import WeightBuffer
from dora_rl.weights.store import WeightStore
from tests.engine import tiny

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "olmoe", "qwen3_moe", "gemma2"]


def plain(family: Any = "llama") -> Any:
    return copy.deepcopy(tiny.model(family))


def sources(model: Any) -> tuple[MemoryWeights, dict[str, Any]]:
    """A version with its probe, and its tensors."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = MemoryWeights()
    weights.put(0, tensors, Trainer(copy.deepcopy(model), TrainerConfig()).probe())
    return weights, tensors


def load(model: Any, weights: Any, **config: Any) -> tuple[Engine, AnyEvent]:
    engine = tiny.engine(model, weights=weights, versions=(0,), **config)
    (event,) = engine.drain().events
    return engine, event


def refused(model: Any, weights: Any, **config: Any) -> float:
    """The difference with which a slot is refused."""
    engine, event = load(model, weights, **config)
    assert isinstance(event, SlotLoadFailed)
    assert event.differs
    assert engine.serving(0) is None
    assert "slot a/0 does not compute what the trainer published as version 0" in event.reason
    return float(event.reason.partition("differs by ")[2].split()[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_the_trainer_published_is_served(family: Any, kernels: str) -> None:
    weights, _ = sources(plain(family))
    _, event = load(plain(family), weights, kernels=kernels)
    assert isinstance(event, SlotLoaded)
    assert event.probe is not None
    assert event.probe.difference < event.probe.tolerance / 5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_one_changed_weight_is_detected(family: Any, kernels: str) -> None:
    """One element of one matrix that the slot computes with is changed by the matrix's standard deviation."""
    weights, tensors = sources(plain(family))
    matrix = tensors["model.layers.0.self_attn.o_proj.weight"]
    matrix[3, 5] += 2 * matrix.std()
    assert refused(plain(family), weights, kernels=kernels) > 1e-3


def test_a_wrong_rope_setting_is_detected() -> None:
    weights, _ = sources(plain())
    model = plain()
    model.config.rope_parameters["rope_theta"] *= 2
    served = type(model)(model.config).eval()
    for kernels in ("auto", "torch"):
        assert refused(served, weights, kernels=kernels) > 1e-3


def test_a_short_context_and_a_small_batch_are_probed_too() -> None:
    weights, tensors = sources(plain())
    small = {"max_context": 6, "max_requests": 1, "prefill_chunk": 1}
    _, event = load(plain(), weights, **small)
    assert isinstance(event, SlotLoaded)
    tensors["model.norm.weight"][0] += 1.0
    assert refused(plain(), weights, **small) > 1e-3


def test_a_wider_tolerance_can_be_set() -> None:
    weights, tensors = sources(plain())
    tensors["model.norm.weight"][0] += 0.1
    difference = refused(plain(), weights)
    _, event = load(plain(), weights, probe_tolerance=2 * difference)
    assert isinstance(event, SlotLoaded)
    assert event.probe is not None
    assert event.probe.tolerance == 2 * difference


def test_a_load_in_flight_is_probed_beside_running_requests() -> None:
    weights, tensors = sources(plain())
    engine, _ = load(plain(), weights, kv_bytes=tiny.kv_bytes(plain(), 4))
    for request in tiny.requests(3, max_tokens=8):
        engine.submit(request)
    engine.step()
    before = engine.kv_tokens
    weights.put(1, tensors, weights.probe(0))
    engine.load(0, 1, in_flight=True)
    collector = tiny.Collector()
    engine.slots[0].loading.wait()  # type: ignore[union-attr]
    assert engine.kv_tokens == before
    collector.run(engine)
    (loaded,) = [event for event in collector.events if isinstance(event, SlotLoaded)]
    assert loaded.probe is not None
    assert len(collector.finished) == 3


# -- adapters -------------------------------------------------------------------------------------------------------


def adapted(tmp_path: Path, targets: Any, model: Any = None) -> tuple[Trainer, WeightStore, LoraConfig]:
    """A trainer with an adapter that has an effect, and the store that it is published to."""
    settings = LoraConfig(rank=4, alpha=12, targets=targets)
    trainer = Trainer(model or plain(), TrainerConfig(lora=settings))
    torch.manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn_like(parameter)
    store = WeightStore(tmp_path, keep=2)
    trainer.publish(0, store)
    return trainer, store, settings


def served(store: WeightStore, settings: LoraConfig | None, model: Any = None) -> Any:
    made = model or plain()
    return made, StoreWeights(store, made, settings)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), ("embed_tokens", "q_proj"), ("lm_head",)])
def test_an_adapter_is_served_as_it_was_trained(tmp_path: Path, targets: Any) -> None:
    trainer, store, settings = adapted(tmp_path, targets)
    _, event = load(*served(store, settings))
    assert isinstance(event, SlotLoaded), event
    assert event.probe is not None
    exported = plain()
    exported.load_state_dict(dict(merged_state(trainer.model, trainer.peft_model)))
    again = Trainer(exported, TrainerConfig()).probe()
    for ours, theirs in zip(again.logprobs, trainer.probe().logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_dropped_adapter_is_detected(tmp_path: Path) -> None:
    _, store, settings = adapted(tmp_path, ("q_proj",))
    model, weights = served(store, settings)
    weights._merge = lambda _: dict(weights._base)
    assert refused(model, weights) > 1e-3


def test_a_wrong_scale_is_detected(tmp_path: Path) -> None:
    _, store, settings = adapted(tmp_path, ("q_proj",))
    assert refused(*served(store, settings.model_copy(update={"alpha": 13}))) > 1e-3


def test_a_part_of_an_adapter_that_cannot_be_merged_is_refused() -> None:
    base = {"q.weight": torch.zeros(2, 2)}
    pair = {"base_model.model.q.lora_A.weight": torch.ones(1, 2), "base_model.model.q.lora_B.weight": torch.ones(2, 1)}
    merged = dict(lora.merge(base.items(), pair, scale=3.0, transposed=()))
    assert merged["q.weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    with pytest.raises(ModelError, match=r"'base_model.model.q.lora_magnitude_vector', which can't be merged"):
        dict(
            lora.merge(
                base.items(),
                pair | {"base_model.model.q.lora_magnitude_vector": torch.ones(2)},
                scale=1.0,
                transposed=(),
            )
        )
    with pytest.raises(ModelError, match="is not a weight of the model"):
        dict(lora.merge([], pair, scale=1.0, transposed=()))


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_all_linear_of_a_mixture_is_its_linear_layers(tmp_path: Path, family: Any) -> None:
    trainer, store, settings = adapted(tmp_path, "all-linear", plain(family))
    _, event = load(*served(store, settings, plain(family)))
    assert isinstance(event, SlotLoaded), event
    assert not any("experts" in name or ".gate." in name for name in store.lease(0).tensors())
    assert trainer.peft_model is not None


def test_targets_that_cannot_be_merged_are_refused() -> None:
    def adapt(model: Any, *targets: str) -> None:
        Trainer(model, TrainerConfig(lora=LoraConfig(targets=targets)))

    with pytest.raises(ConfigError, match=r"'model.layers.0.mlp.gate' is a MixtralTopKRouter, not a linear layer"):
        adapt(plain("mixtral"), "gate")
    tied = tiny.model("llama")
    config = copy.deepcopy(tied.config)
    config.tie_word_embeddings = True
    with pytest.raises(ConfigError, match=r"'model.embed_tokens' is tied to other embeddings"):
        adapt(type(tied)(config), "embed_tokens")


def test_a_weight_buffer_carries_the_probe(tmp_path: Path) -> None:
    import numpy as np

    trainer, store, _ = adapted(tmp_path, ("q_proj",))
    data = np.frombuffer(store.path(0).read_bytes(), dtype=np.uint8)
    assert WeightBuffer(0, data).manifest.probe == store.manifest(0).probe == trainer.probe()
