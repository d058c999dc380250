"""The engine against `transformers` generate and vLLM on the CPU, what a migration costs, and what a second slot costs.

    python -m benchmarks.engine [--models 3m,smollm2] [--vllm PYTHON] [--repeats 3]

All in one run, ours and theirs alternating; ratios are of medians. Everybody samples at temperature 1 in float32 from
the same weights, with prompts of 16 tokens and as many threads as there are cores. Long-tailed lengths are lognormal
with median 64, cut at 1,024, with at least one of 1,024. `generate` gets batches of 64 that run until their longest is
done, as it works; only wanted tokens count. vLLM runs in a Python of its own (`make vllm`), eager and compiled; the
better of the two counts at each batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.smollm2 import ensure
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.loading import ModelConfig, load
from dora_rl.models.sources import MemoryWeights

RESULTS = Path(__file__).parent / "results" / "engine.json"
CACHE = Path(".cache")
PROMPT = 16
BATCHES = (1, 8, 32, 64)
# Requests of the long-tailed run, and tokens of a response at fixed lengths. `generate` needs half a second for a step
# of SmolLM2, and 1,024 of them for a batch.
SIZES = {"3m": (256, 128), "smollm2": (64, 32)}
LONG_TAILED_TARGET = {"3m": 6.0, "smollm2": 4.0}

Target = dict[str, Any]


def folder_of(name: str) -> Path:
    """The model as a folder that everybody loads."""
    if name == "smollm2":
        return ensure()
    folder = CACHE / "llama-3m"
    if not (folder / "config.json").exists():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 128}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
        made: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads))  # type: ignore[arg-type]
        made.save_pretrained(folder)
    return folder


def make_engine(model: Any, **config: Any) -> Engine:
    """An engine with room for everything here."""
    slots = config.get("slots", 1)
    weights = MemoryWeights.of(model)
    for version in range(1, slots):
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        weights.put(version, state)
    engine = Engine(model, weights, EngineConfig(kv_bytes=6 << 30, max_context=2048, **config))
    for slot in range(slots):
        engine.load(slot, slot)
    engine.wait_for_loads()
    return engine


def requests(lengths: Any, versions: int = 1) -> list[Request]:
    return [
        Request(
            trajectory=row,
            version=row % versions,
            prompt=tuple(3 + (row + i) % 100 for i in range(PROMPT)),
            sampling=Sampling(max_tokens=int(length)),
        )
        for row, length in enumerate(lengths)
    ]


def run_engine(engine: Engine, some: list[Request]) -> float:
    """Tokens/s from the first request to the last token."""
    start = time.perf_counter()
    for request in some:
        engine.submit(request)
    tokens = 0
    while engine.busy:
        tokens += sum(one.tokens for one in engine.step().finished)
    assert tokens == sum(request.sampling.max_tokens for request in some)
    engine.check()
    return tokens / (time.perf_counter() - start)


def run_generate(model: Any, some: list[Request]) -> float:
    """Wanted tokens/s of `generate` in batches of 64."""
    start = time.perf_counter()
    wanted = 0
    for at in range(0, len(some), 64):
        batch = some[at : at + 64]
        ids = torch.tensor([request.prompt for request in batch])
        longest = max(request.sampling.max_tokens for request in batch)
        lengths = {"min_new_tokens": longest, "max_new_tokens": longest, "do_sample": True, "top_k": 0}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **lengths)
        assert out.shape[1] == PROMPT + longest
        wanted += sum(request.sampling.max_tokens for request in batch)
    return wanted / (time.perf_counter() - start)


def against_generate(name: str, model: Any, kind: str, repeats: int) -> tuple[dict[str, Any], list[Target]]:
    """Fixed lengths, or long-tailed ones (those once: minutes long as it is)."""
    count, fixed = SIZES[name]
    random = np.random.default_rng(0)
    tail = np.clip(random.lognormal(np.log(64), 1.0, count), 1, 1024).astype(int)
    tail[0] = 1024
    engine = make_engine(model)
    run_engine(engine, requests([4] * 8))
    lengths, target = ([fixed] * 64, 2.0) if kind == "fixed" else (tail.tolist(), LONG_TAILED_TARGET[name])
    ours, theirs = [], []
    for _ in range(repeats if kind == "fixed" else 1):
        ours.append(run_engine(engine, requests(lengths)))
        theirs.append(run_generate(model, requests(lengths)))
    ratio = statistics.median(ours) / statistics.median(theirs)
    raw = {"requests": len(lengths), "tokens": sum(lengths), "ours": ours, "generate": theirs}
    return raw, [{"name": f"{name}: {kind} lengths, times generate", "target": target, "value": ratio}]


def against_vllm(
    name: str, model: Any, python: str, repeats: int, kinds: list[str]
) -> tuple[dict[str, Any], list[Target]]:
    fixed = SIZES[name][1]
    engine = make_engine(model)
    ours: dict[str, list[float]] = {}

    def measure() -> None:
        for batch in BATCHES:
            rate = run_engine(engine, requests([fixed] * batch))
            ours.setdefault(str(batch), []).append(rate)

    run_engine(engine, requests([4] * 8))
    measure()
    modes = {}
    for mode in kinds:
        arguments = [str(folder_of(name)), mode, str(fixed), ",".join(map(str, BATCHES)), str(repeats)]
        modes[mode] = _vllm([python, str(Path(__file__).parent / "vllm_peer.py"), *arguments])
        measure()
    raw = {"ours": ours, **{f"vllm {mode}": rates for mode, rates in modes.items()}}
    targets = []
    for batch in map(str, BATCHES):
        best = max(statistics.median(rates[batch]) for rates in modes.values() if rates)
        ratio = statistics.median(ours[batch]) / best
        targets.append({"name": f"{name}: batch {batch}, times vLLM", "target": 1.0, "value": ratio})
    return raw, targets


def _vllm(command: list[str]) -> dict[str, list[float]]:
    cores = os.cpu_count() or 1
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
    for line in done.stdout.splitlines():
        if line.startswith("RATES "):
            found: dict[str, list[float]] = json.loads(line[6:])
            return found
    print(f"vLLM gave nothing: {done.stderr[-600:]}")
    return {}


def migration(model: Any, repeats: int) -> tuple[dict[str, Any], list[Target]]:
    """Moving a request with 1,024 tokens of context by shared memory, against computing them again."""
    engines = [make_engine(model) for _ in range(2)]
    again, move = [], []
    for repeat in range(repeats):
        prompt = tuple(3 + (repeat + 7 * i) % 100 for i in range(1023))
        sampling = Sampling(max_tokens=16)
        engines[0].submit(Request(trajectory=repeat, version=0, prompt=prompt, sampling=sampling))
        start = time.perf_counter()
        while engines[0].stats.decoded <= repeat * 2:  # until its first token is sampled
            engines[0].step()
        again.append(time.perf_counter() - start)
        engines[0].step()
        start = time.perf_counter()
        bundle = engines[0].export([repeat])
        arrived, errors = engines[1].import_(bundle, 0)
        move.append(time.perf_counter() - start)
        assert arrived == (repeat,)
        assert not errors
        assert engines[1].running == 1
        before = engines[1].stats.prefilled
        while engines[1].busy:
            engines[1].step()
        assert engines[1].stats.prefilled == before
    share = statistics.median(move) / statistics.median(again)
    target = {"name": "smollm2: moving 1,024 tokens, share of prefilling them", "target": 0.1, "value": share}
    return {"prefill_s": again, "move_s": move}, [target | {"below": True}]


def slots(name: str, model: Any, repeats: int) -> tuple[dict[str, Any], list[Target]]:
    """64 requests of one version against 32 + 32 of two on one engine."""
    one, two = make_engine(model), make_engine(model, slots=2)
    lengths = [SIZES[name][1]] * 64
    single, double = [], []
    for _ in range(repeats):
        single.append(run_engine(one, requests(lengths)))
        double.append(run_engine(two, requests(lengths, versions=2)))
    ratio = statistics.median(double) / statistics.median(single)
    target = {"name": f"{name}: two versions, share of one version's tokens/s", "target": 0.8, "value": ratio}
    return {"one": single, "two": double}, [target]


def limits(models: dict[str, Any]) -> dict[str, Any]:
    """What the machine can do, and which share of it is reached at batch 64 (FLOPs) and at batch 1 (bandwidth)."""
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    flops = max(2 * 1536**3 / _seconds(lambda: a @ b) for _ in range(10))
    x, y = torch.randn(1 << 25), torch.randn(1 << 25)
    out = torch.empty_like(x)
    triad = max(3 * x.nbytes / _seconds(lambda: torch.add(x, y, alpha=2.0, out=out)) for _ in range(6))
    shares = {}
    for name, model in models.items():
        engine = make_engine(model)
        # An embedding is looked up, not multiplied, unless it is the head too.
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        weights = sum(p.numel() for p in model.parameters()) - (
            0 if tied else model.get_input_embeddings().weight.numel()
        )
        wide = max(run_engine(engine, requests([SIZES[name][1]] * 64)) for _ in range(2))
        narrow = max(run_engine(engine, requests([SIZES[name][1]])) for _ in range(2))
        shares[name] = {
            "flops_share_at_64": 2 * weights * wide / flops,
            "bandwidth_share_at_1": 4 * weights * narrow / triad,
        }
    return {"gemm_gflops": flops / 1e9, "triad_gb_s": triad / 1e9, "shares": shares}


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="3m,smollm2")
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="a Python that has vllm; skipped if not there")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default="migration,slots,vllm,limits,fixed,long-tailed")
    parser.add_argument("--vllm-modes", default="eager,compiled")
    given = parser.parse_args()
    parts = given.parts.split(",")
    models = {name: load(ModelConfig(path=str(folder_of(name)))).model for name in given.models.split(",")}
    # Parts and models that are not measured now keep their last figures; a ratio is always of one run.
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"targets": []}
    targets: list[Target] = known.pop("targets")
    raw: dict[str, Any] = known | {"threads": torch.get_num_threads(), "cores": os.cpu_count()}

    def note(key: str, result: tuple[dict[str, Any], list[Target]]) -> None:
        raw[key] = result[0]
        for target in result[1]:
            below = target.pop("below", False)
            met = target["value"] <= target["target"] if below else target["value"] >= target["target"]
            targets[:] = [one for one in targets if one["name"] != target["name"]]
            targets.append(target | {"met": bool(met)})
            sign = "at most" if below else "at least"
            print(
                f"{target['name']:58} {target['value']:8.3f}  {sign} {target['target']}  {'met' if met else 'MISSED'}"
            )
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"targets": targets, **raw}, indent=1) + "\n")

    if "migration" in parts and "smollm2" in models:
        note("migration", migration(models["smollm2"], given.repeats))
    for name, model in models.items():
        if "slots" in parts:
            note(f"{name} slots", slots(name, model, given.repeats))
        if "vllm" in parts and Path(given.vllm).exists():
            note(f"{name} vllm", against_vllm(name, model, given.vllm, given.repeats, given.vllm_modes.split(",")))
    if "limits" in parts:
        note("limits", (limits(models), []))
        print(json.dumps(raw["limits"], indent=1))
    for kind in ("fixed", "long-tailed"):
        for name, model in models.items():
            if kind in parts:
                note(f"{name} {kind}", against_generate(name, model, kind, given.repeats))


if __name__ == "__main__":
    main()
