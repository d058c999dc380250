"""The engine against `transformers` generate and vLLM on the CPU; costs of a migration and a second slot; limits.

    python -m benchmarks.engine [--models 3m,smollm2] [--parts ...] [--vllm PYTHON] [--repeats 3]

All systems are measured in one run and in turn. Ratios are ratios of medians, and the results have all repeats of every
system. All systems sample at temperature 1 in float32 from the same weights, with prompts of 16 tokens and as many
threads as there are cores. Long-tailed lengths are lognormal with median 64, clipped at 1,024, with at least one of
1,024. `generate` gets batches of 64, which run until the longest response is done; only requested tokens count. vLLM
runs in a separate Python environment (see the Makefile), eager and compiled; the faster mode counts at each batch.

A part or model that is not measured keeps its last figures, so the benchmark can be run in several goes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_limits import shares
from benchmarks.report import RESULTS, Target, at_least, at_most, publish
from benchmarks.smollm2 import ensure
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.loading import ModelConfig, load
from dora_rl.models.sources import MemoryWeights

CACHE = Path(".cache")
PROMPT = 16
BATCHES = (1, 8, 32, 64)
# Requests of the long-tailed run, and tokens of a response at fixed lengths. They are few for SmolLM2, where `generate`
# needs half a second for a step and 1,024 steps for a batch.
SIZES = {"3m": (128, 128), "smollm2": (64, 32)}
VLLM_SECONDS = 600  # loading and compiling included
LONG_TAILED_TARGET = {"3m": 6.0, "smollm2": 4.0}
PARTS = ("migration", "slots", "limits", "fixed", "vllm", "long-tailed")

Figures = tuple[dict[str, Any], list[Target]]
_started = time.perf_counter()


def report(text: str) -> None:
    """Print progress with the seconds since the start."""
    print(f"[{time.perf_counter() - _started:5.0f} s] {text}", flush=True)


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


def folder_of(name: str) -> Path:
    """The model's folder, which all systems load."""
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
    """An engine with enough KV cache for all measurements here."""
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
    """Requested tokens/s of `generate` in batches of 64."""
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


def against_generate(name: str, model: Any, kind: str, repeats: int) -> Figures:
    """Fixed lengths, or long-tailed ones, which are measured once because that takes minutes."""
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
        report(f"{name} {kind}: ours {ours[-1]:.1f} tokens/s")
        theirs.append(run_generate(model, requests(lengths)))
        report(f"{name} {kind}: generate {theirs[-1]:.1f} tokens/s")
    if kind == "fixed":
        ours.append(run_engine(engine, requests(lengths)))
    ratio = statistics.median(ours) / statistics.median(theirs)
    raw = {"requests": len(lengths), "tokens": sum(lengths), "ours": ours, "generate": theirs}
    return raw, [at_least(f"{name}: {kind} lengths, times generate", target, ratio)]


def against_vllm(name: str, model: Any, given: argparse.Namespace) -> Figures:
    """Both engines at each batch; ours is measured before, between and after the modes of vLLM."""
    fixed, batches = SIZES[name][1], [int(batch) for batch in given.batches.split(",")]
    engine = make_engine(model)
    ours: dict[str, list[float]] = {}

    def measure() -> None:
        for batch in batches:
            run = [run_engine(engine, requests([fixed] * batch)) for _ in range(2)]
            ours.setdefault(str(batch), []).extend(run)

    run_engine(engine, requests([4] * 8))
    measure()
    theirs = {}
    for mode in given.vllm_modes.split(","):
        arguments = [str(folder_of(name)), mode, str(fixed), given.batches, str(given.repeats)]
        theirs[mode] = _vllm([given.vllm, str(Path(__file__).parent / "vllm_peer.py"), *arguments])
        report(f"{name}: vLLM {mode}: " + ", ".join(f"batch {batch} {spread(r)}" for batch, r in theirs[mode].items()))
        measure()
    report(f"{name}: ours: " + ", ".join(f"batch {batch} {spread(rates)}" for batch, rates in ours.items()))
    raw: dict[str, Any] = {"ours": ours, **{f"vllm {mode}": rates for mode, rates in theirs.items()}}
    targets = []
    for batch in map(str, batches):
        medians = {mode: statistics.median(rates[batch]) for mode, rates in theirs.items() if batch in rates}
        if medians:
            fastest = max(medians, key=lambda mode: medians[mode])
            raw.setdefault("fastest mode of vllm", {})[batch] = fastest
            ratio = statistics.median(ours[batch]) / medians[fastest]
            targets.append(at_least(f"{name}: batch {batch}, times vLLM", 1.0, ratio))
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
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=VLLM_SECONDS)
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:  # the finished batches still count
        out = late.stdout or b""
        output, errors = out.decode() if isinstance(out, bytes) else out, f"not done after {VLLM_SECONDS} s"
    lines = [line[6:] for line in output.splitlines() if line.startswith("RATES ")]
    if not lines or errors.startswith("not done"):
        report(f"vLLM: {errors[-600:]}")
    rates: dict[str, list[float]] = json.loads(lines[-1]) if lines else {}
    return rates


def migration(model: Any, repeats: int) -> Figures:
    """Moving a request with 1,024 tokens of context through shared memory, against prefilling them again."""
    engines = [make_engine(model, stretch=1) for _ in range(2)]
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
    target = at_most("smollm2: moving 1,024 tokens, share of prefilling them", 0.1, share)
    return {"prefill_s": again, "move_s": move}, [target]


def slots(name: str, model: Any, repeats: int) -> Figures:
    """64 requests of one version against 32 + 32 requests of two versions on one engine."""
    one, two = make_engine(model), make_engine(model, slots=2)
    lengths = [SIZES[name][1]] * 64
    single, double = [], []
    for _ in range(repeats):
        single.append(run_engine(one, requests(lengths)))
        double.append(run_engine(two, requests(lengths, versions=2)))
    ratio = statistics.median(double) / statistics.median(single)
    return {"one": single, "two": double}, [at_least(f"{name}: two versions, share of one's tokens/s", 0.8, ratio)]


def limits(name: str, model: Any) -> Figures:
    """Shares of the machine's limits that a decode step reaches, and the limit that binds."""
    found = shares(model, make_engine(model), requests, BATCHES)
    report(f"{name} limits: " + ", ".join(f"{key} {value:.1f}" for key, value in found["limits"].items()))
    for batch, one in found["batches"].items():
        report(
            f"{name} batch {batch}: a step takes {one['step_ms']:.2f} ms, its products {one['products_ms']:.2f} "
            f"(torch {one['products_by_torch_ms']:.2f}); share of FLOPs {one['flop_share']:.2f}, "
            f"of bandwidth {one['bandwidth_share']:.2f}; binds: {one['binds']}"
        )
    return found, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="3m,smollm2")
    parser.add_argument(
        "--vllm", default=".venv-vllm/bin/python", help="a Python that has vllm; skipped if it does not exist"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--vllm-modes", default="eager,compiled")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="batches of the part vllm")
    given = parser.parse_args()
    models = {name: load(ModelConfig(path=str(folder_of(name)))).model for name in given.models.split(",")}
    figures = _known()
    targets = {target["name"]: Target(**target) for target in figures.pop("targets", [])}
    figures |= {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "processor": _processor()}
    for part in given.parts.split(","):
        for name, model in models.items():
            measured = _measure(part, name, model, given)
            if measured is None:
                continue
            figures[f"{name} {part}"] = measured[0]
            targets |= {target.name: target for target in measured[1]}
            for target in measured[1]:
                report(f"{target.name}: {target.value:.3f}, aim {target.target}, {'met' if target.met else 'MISSED'}")
            publish("engine", list(targets.values()), figures, quiet=True)
    publish("engine", list(targets.values()), figures)


def _measure(part: str, name: str, model: Any, given: argparse.Namespace) -> Figures | None:
    """Measure one part for one model; None where there is nothing to measure."""
    report(f"{name}: {part}")
    if part == "migration":
        return migration(model, given.repeats) if name == "smollm2" else None
    if part == "slots":
        return slots(name, model, given.repeats)
    if part == "limits":
        return limits(name, model)
    if part == "vllm":
        return against_vllm(name, model, given) if Path(given.vllm).exists() else None
    return against_generate(name, model, part, given.repeats)


def _known() -> dict[str, Any]:
    path = RESULTS / "engine.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known.pop("python", None)
    return known


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
