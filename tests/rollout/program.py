"""Exercises vLLM for `test_vllm` in a separate process, because importing vLLM changes torch and gives warnings.

The arguments are `weights` or `adapters`, and a directory to work in. One of the lines printed is `RESULT` and JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dora_rl.core.errors import RequestError
from dora_rl.core.events import AnyEvent, Generated, Parked, SlotLoaded, SlotLoadFailed
from dora_rl.core.probe import Probe
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.requests import Request, Sampling, StepOutput
from dora_rl.engine.vllm.core import Core, Lora
from dora_rl.engine.vllm.engine import VllmEngine
from dora_rl.engine.vllm.serving import Adapters, AllWeights, Serving
from dora_rl.models.dtypes import spec
from dora_rl.models.loading import ModelConfig, linear_modules
from dora_rl.runtime.transport.weight_source import StoreFiles
from dora_rl.trainer.config import LoraConfig, TrainerConfig
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.store import WeightStore

VOCAB, RANK, ALPHA = 96, 8, 12
GREEDY = Sampling(max_tokens=48, temperature=0.0)
FREE = Sampling(max_tokens=48, temperature=0.7, top_p=0.9)
PROMPT = tuple(range(5, 75))


def tiny() -> Any:
    """Return a model with two layers, tied embeddings and heads of 32, the smallest size that vLLM's kernels accept."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def publish(
    store: WeightStore, version: int, tensors: dict[str, Any], *, probe: Probe | None, adapter: bool = False
) -> str:
    specs = [spec(name, tensor) for name, tensor in tensors.items()]
    return store.publish(version, specs, list(tensors.values()), adapter=adapter, probe=probe)


def probe_of(model: Any, lora: LoraConfig | None = None, state: dict[str, Any] | None = None) -> Probe:
    """Return the probe that a trainer gives of the model, with the weights of an adapter if there are any."""
    import peft

    trainer = Trainer(copy.deepcopy(model), TrainerConfig(lora=lora))
    if state is not None:
        peft.set_peft_model_state_dict(trainer.peft_model, state)
    return trainer.probe()


class Driver:
    """An engine, with the tokens, log-probs and events that it has produced."""

    def __init__(self, folder: Path, serve: Callable[[Core, StoreFiles], Serving], lora: Lora | None) -> None:
        config = EngineConfig(kind="vllm", max_requests=8, max_context=256, kv_bytes=512 << 10, stream_every=8)
        model = ModelConfig(path=str(folder / "model"))
        self.store = WeightStore(folder / "weights", keep=99)
        self.core = Core(model, config, slots=4, lora=lora, threads=1, seed=3)
        self.engine = VllmEngine(self.core, serve(self.core, StoreFiles(self.store)), config)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.events: list[AnyEvent] = []

    def take(self, output: StepOutput) -> None:
        for chunk in output.chunks:
            assert chunk.start == len(self.tokens.setdefault(chunk.trajectory, [])), (
                "a token is missing, or was sent twice"
            )
            self.tokens[chunk.trajectory] += chunk.tokens.tolist()
            self.logprobs.setdefault(chunk.trajectory, []).extend(chunk.logprobs.tolist())
        self.events += output.events

    def step(self, steps: int | None = None) -> list[AnyEvent]:
        """Make this number of steps, or step until the engine is idle, and return the events of these steps."""
        before = len(self.events)
        while self.engine.busy and (steps is None or steps > 0):
            self.take(self.engine.step())
            steps = None if steps is None else steps - 1
        return self.events[before:]

    def load(self, slot: int, version: int) -> AnyEvent:
        self.engine.load(slot, version)
        (event,) = self.step()
        return event

    def submit(self, trajectory: int, version: int, slot: int = 0, sampling: Sampling = GREEDY, **more: Any) -> None:
        self.tokens[trajectory] = []
        request = Request(trajectory=trajectory, version=version, prompt=PROMPT, sampling=sampling, **more)
        self.engine.submit(request, slot)


@torch.no_grad()
def gap(model: Any, response: list[int], logprobs: list[float], temperature: float = 1.0) -> float:
    """Return the largest difference between the log-probs of the engine and those of the model."""
    logits = model(torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 : -1].float()
    expected = torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    return float((expected - torch.tensor(logprobs)).abs().max())


@torch.no_grad()
def likeliest(model: Any, count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def moved(driver: Driver, first: int, *, with_kv: bool) -> dict[str, Any]:
    """Export a request in the middle of its response, and import it when the cache is empty."""
    engine = driver.engine
    transit = driver.core.transit
    driver.submit(first, version=1)
    driver.step(20)
    driver.core.transit = transit if with_kv else None
    bundle = engine.export([first])
    driver.core.transit = transit
    driver.take(engine.drain())
    assert driver.core._engine.reset_prefix_cache()
    before = engine.stats.reprefilled
    arrived, errors = engine.import_(bundle, 0)
    driver.step()
    reprefilled = engine.stats.reprefilled - before
    return {
        "arrived": arrived,
        "errors": list(map(str, errors)),
        "reprefilled": reprefilled,
        "tokens": driver.tokens[first],
    }


def turns(driver: Driver) -> dict[str, Any]:
    """Let a request park, extend it and end it."""
    stop = driver.tokens[1][10]  # also sampled here, so the turn ends where it first occurs
    driver.submit(90, version=1, sampling=Sampling(max_tokens=100, temperature=0.0, stop_ids=(stop,)), parks=True)
    kinds = [type(event).__name__ for event in driver.step()]
    first = len(driver.tokens[90])
    driver.engine.extend(90, 0, [7, 8, 9])
    driver.tokens[90] += [7, 8, 9]
    kinds += [type(event).__name__ for event in driver.step()]
    parked = isinstance(driver.events[-1], Parked)
    if parked:
        driver.engine.end(90, 0)
        driver.take(driver.engine.drain())
    return {"first": first, "kinds": kinds, "ended": isinstance(driver.events[-1], Generated)}


def refused(driver: Driver) -> list[str]:
    """Submit requests that can't be served, and return the types of the errors."""
    found = []
    wrong: tuple[dict[str, Any], ...] = ({"prompt": ()}, {"prompt": (VOCAB,)}, {"prompt": (1,) * 300}, {"version": 7})
    for number, more in enumerate(wrong):
        given: dict[str, Any] = {"version": 1, "prompt": PROMPT} | more
        try:
            driver.engine.submit(Request(trajectory=200 + number, **given), 0)
        except RequestError as error:
            found.append(type(error).__name__)
    return found


def weights(folder: Path) -> dict[str, Any]:
    """Exercise an engine that holds all weights of one version at a time."""
    model, other = tiny(), tiny()
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder / "model")
    store = WeightStore(folder / "weights", keep=99)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    fingerprints = [
        publish(store, version, {name: one.state_dict()[name] for name in names}, probe=probe_of(one))
        for version, one in enumerate((model, other))
    ]
    driver = Driver(folder, lambda core, files: AllWeights(core, files, prove=True), None)
    result: dict[str, Any] = {"fingerprints": fingerprints, "loaded": []}
    for version, one in enumerate((model, other)):
        event = driver.load(0, version)
        result["loaded"].append(event.fingerprint if isinstance(event, SlotLoaded) else str(event))
        probed = event.probe if isinstance(event, SlotLoaded) else None
        result.setdefault("probed", []).append(None if probed is None else [probed.difference, probed.tolerance])
        driver.submit(version, version)
        driver.submit(10 + version, version, sampling=Sampling(max_tokens=48))
        driver.step()
        result.setdefault("greedy", []).append(driver.tokens[version] == likeliest(one, 48))
        result.setdefault("gap", []).append(gap(one, driver.tokens[10 + version], driver.logprobs[10 + version]))
    driver.submit(20, 1, sampling=Sampling(max_tokens=48, temperature=0.7))
    driver.step()
    result["warm_gap"] = gap(other, driver.tokens[20], driver.logprobs[20], 0.7)
    driver.submit(21, 1, sampling=Sampling(max_tokens=48, top_k=1))
    driver.step()
    result["of_one"] = max(map(abs, driver.logprobs[21]))
    result["moved"] = moved(driver, 30, with_kv=True)
    result["prefilled"] = moved(driver, 31, with_kv=False)
    result["unmoved"] = driver.tokens[1]
    result["turns"] = turns(driver)
    result["refused"] = refused(driver)
    for trajectory in range(40, 56):
        driver.submit(trajectory, 1, sampling=Sampling(max_tokens=150))
    ends = sum(isinstance(event, Generated) for event in driver.step())
    result["crowd"] = {"ends": ends, "preempted": driver.engine.stats.preempted, "kv": driver.core.kv_tokens}
    result["missing"] = isinstance(driver.load(0, 5), SlotLoadFailed)
    result["tied"] = tied_fault(driver, folder)
    # From here on a reload has no effect: vLLM keeps the weights of the model directory, which are version 0.
    driver.core._engine.collective_rpc("dora_reload", args=(str(folder / "model"),))
    driver.core.reload = lambda folder, label: None  # type: ignore[method-assign]
    event = driver.load(0, 1)
    result["caught"] = event.reason if isinstance(event, SlotLoadFailed) else str(event)
    return result


def adapter_faults(driver: Driver, lora: Lora) -> tuple[str, str]:
    """Return the reasons of the probe for two faults: requests without their adapter, and a wrong alpha.

    Another request runs meanwhile. The comparison of the weights is off, so only the probe can detect the faults.
    """
    serving: Any = driver.engine._serving
    serving._prove = False
    driver.submit(40, 1, 1)
    driver.step(1)
    named = serving.adapter
    serving.adapter = lambda slot: None if slot == 2 else named(slot)
    driver.engine.load(2, 2)
    reasons = [event.reason for event in driver.step() if isinstance(event, SlotLoadFailed) and event.differs]
    serving.adapter = named
    serving._lora = lora._replace(alpha=ALPHA + 1)
    driver.engine.load(2, 2)
    reasons += [event.reason for event in driver.step() if isinstance(event, SlotLoadFailed) and event.differs]
    serving._lora, serving._prove = lora, True
    dropped, scaled = reasons
    return dropped, scaled


def tied_fault(driver: Driver, folder: Path) -> dict[str, Any]:
    """Return what the probe detects after vLLM's `reload_weights`, which keeps the former output embeddings if tied.

    The comparison of the weights is off, so only the probe can detect the fault.
    """
    engine, original = driver.core._engine, driver.core.reload

    def reload(path: str, label: str) -> None:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        engine.reset_prefix_cache()
        engine.set_weight_version(label)

    driver.engine._serving._prove = False  # type: ignore[attr-defined]
    first = driver.load(0, 0)
    driver.core.reload = reload  # type: ignore[method-assign,assignment]
    event = driver.load(0, 1)
    driver.core.reload = original  # type: ignore[method-assign]
    again = driver.load(0, 1)
    driver.engine._serving._prove = True  # type: ignore[attr-defined]
    return {
        "sound": [isinstance(one, SlotLoaded) for one in (first, again)],
        "differs": isinstance(event, SlotLoadFailed) and event.differs,
        "reason": event.reason if isinstance(event, SlotLoadFailed) else str(event),
    }


def adapters(folder: Path) -> dict[str, Any]:
    """Exercise an engine that serves one adapter per version in the same batch."""
    import peft

    base = tiny()
    base.save_pretrained(folder / "model")
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    store = WeightStore(folder / "weights", keep=99)
    models, fingerprints = [], []
    for version in range(4):
        model = peft.get_peft_model(tiny(), settings)
        torch.manual_seed(version)
        for name, parameter in model.named_parameters():
            if ".lora_" in name and version:
                parameter.data = 0.1 * torch.randn_like(parameter)
        models.append(model.eval())
        state = dict(peft.get_peft_model_state_dict(model))
        probe = probe_of(base, LoraConfig(rank=RANK, alpha=ALPHA), state)
        fingerprints.append(publish(store, version, state, adapter=True, probe=probe))
    lora = Lora(RANK, ALPHA, linear_modules(ModelConfig(path=str(folder / "model"))))
    driver = Driver(folder, lambda core, files: Adapters(core, files, 4, lora, prove=True), lora)
    events = [driver.load(slot, slot) for slot in range(4)]
    result: dict[str, Any] = {
        "fingerprints": fingerprints,
        "loaded": [event.fingerprint if isinstance(event, SlotLoaded) else str(event) for event in events],
        "live": len(driver.core.adapters()),
        "probed": [event.probe is not None for event in events if isinstance(event, SlotLoaded)],
    }
    for version in range(4):
        driver.submit(version, version, version)
        driver.submit(10 + version, version, version, sampling=Sampling(max_tokens=48))
    driver.step(1)
    result["together"] = driver.engine.running
    ends = [event for event in driver.step() if isinstance(event, Generated)]
    result["stamps"] = sorted((event.trajectory % 10, event.version, event.fingerprint) for event in ends)
    result["greedy"] = [driver.tokens[v] == likeliest(models[v], 48) for v in range(4)]
    result["gap"] = [gap(models[v], driver.tokens[10 + v], driver.logprobs[10 + v]) for v in range(4)]
    driver.engine.unload(2)
    result["left"] = sorted(driver.core.adapters())
    result["dropped"], result["scaled"] = adapter_faults(driver, lora)
    driver.core.add_adapter = lambda adapter: None  # type: ignore[method-assign]  # the adapter is not loaded
    event = driver.load(2, 2)
    result["caught"] = event.reason if isinstance(event, SlotLoadFailed) else str(event)
    return result


if __name__ == "__main__":
    gathered = {"weights": weights, "adapters": adapters}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.write("RESULT " + json.dumps(gathered) + "\n")
