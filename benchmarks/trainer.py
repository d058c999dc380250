"""Our update of a step against TRL's on the same batch, and the time from publishing a version to serving it.

    python -m benchmarks.trainer [--repeats 2] [--models 3m,smollm2]

Each measurement runs in a separate process, so that its peak memory is separate too; the two sides alternate. The
measurement covers all gradients of a step and the optimiser's update, without generation and rewards. TRL pads all
completions of a step to the longest before it splits them into micro-batches, so the size of a micro-batch hardly
changes its speed, and TRL gets the size that needs the least memory: one completion. Our micro-batch has as many tokens
as that one row. Neither side recomputes activations. Memory is the peak of the process above its memory before the
first step, so that imports count for neither side. The default is one thread: on a shared machine, two threads would
measure the load of other programs.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "trainer.json"
GROUP, PROMPT = 8, 64
# Completions, median and longest length. SmolLM2 gets fewer and shorter ones: TRL still needs a minute for them.
BATCHES = {"3m": (64, 64, 1024), "smollm2": (8, 48, 512)}
STEPS = {"3m": 2, "smollm2": 1}  # the last is measured; a step of SmolLM2 is long enough to need no warm-up


def make_model(name: str) -> Any:
    """A 3M-parameter Llama, or SmolLM2-135M."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if name == "smollm2":
        from benchmarks.smollm2 import ensure

        return AutoModelForCausalLM.from_pretrained(ensure(), dtype=torch.float32)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=2048,
        )
    )


def make_groups(name: str, lengths: str, version: int) -> list[Any]:
    """Groups with shared prompts; lengths are lognormal with a long tail, or all equal to the same mean."""
    from dora_rl.core.trajectory import Group, Trajectory

    count, median, longest = BATCHES[name]
    random = np.random.default_rng(0)  # the same for every step and process
    sizes = np.clip(random.lognormal(np.log(median), 1.1, count), 4, longest).astype(int)
    sizes[0] = longest
    if lengths == "equal":
        sizes[:] = round(sizes.mean())
    vocabulary = 128
    groups = []
    for number in range(count // GROUP):
        prompt = random.integers(1, vocabulary, PROMPT)
        siblings = []
        for sibling in range(GROUP):
            index = number * GROUP + sibling
            response = random.integers(1, vocabulary, sizes[index])
            tokens = np.concatenate([prompt, response]).astype(np.int32)
            siblings.append(
                Trajectory(
                    id=index,
                    version=version,
                    tokens=tokens,
                    loss_mask=np.arange(len(tokens)) >= PROMPT,
                    behaviour_logprobs=np.full(len(tokens), -5.0, np.float32),
                    reward=float(random.random()),
                )
            )
        groups.append(Group(id=number, trajectories=tuple(siblings)))
    return groups


class PeakMemory:
    """Peak resident memory of this process above its memory at the start, sampled every 5 ms."""

    def __init__(self, kind: str = "VmRSS") -> None:
        self.kind = kind

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self.start = self.peak = _resident(self.kind)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, _resident(self.kind))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.above = max(self.peak, _resident(self.kind)) - self.start


def _resident(kind: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def measure_ours(name: str, lengths: str) -> dict[str, float]:
    from dora_rl.trainer.config import TrainerConfig
    from dora_rl.trainer.trainer import Trainer

    settings = {"micro_batch_tokens": PROMPT + BATCHES[name][2], "optimiser": {"learning_rate": 1e-6}}
    trainer = Trainer(make_model(name), TrainerConfig.model_validate(settings))
    with PeakMemory() as memory:
        for step in range(STEPS[name]):
            groups = make_groups(name, lengths, step)
            begin = time.perf_counter()
            trainer.accumulate(step, groups)
            report = trainer.apply(step)
            seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "memory_mb": memory.above / 1e6,
        "loss": report.metrics["loss"],
        "mfu": report.metrics["mfu"],
    }


def measure_trl(name: str, lengths: str) -> dict[str, float]:
    from tests.trainer.trl_peer import trl_trainer
    from transformers import TrainerCallback

    warnings.simplefilter("ignore")
    groups = make_groups(name, lengths, 0)
    count = sum(len(group.trajectories) for group in groups)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(
            make_model(name),
            groups,
            Path(folder),
            loss_type="grpo",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=count,
            max_steps=STEPS[name],
            learning_rate=1e-6,
            max_completion_length=BATCHES[name][2],
        )

        class Clock(TrainerCallback):
            begin = seconds = 0.0

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                trainer.preparing = 0.0
                self.begin = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                self.seconds = time.perf_counter() - self.begin - trainer.preparing

        clock = Clock()
        trainer.add_callback(clock)
        with PeakMemory() as memory:
            trainer.train()
    return {"seconds": clock.seconds, "memory_mb": memory.above / 1e6}


def measure_publish(name: str, lengths: str) -> dict[str, float]:
    """Time from the end of a step until an instance holds the verified weights, and the time of each stage."""
    from dora_rl.trainer.config import TrainerConfig
    from dora_rl.trainer.trainer import Trainer
    from dora_rl.weights.store import WeightStore

    del lengths
    trainer = Trainer(make_model(name), TrainerConfig())
    served = make_model(name)
    store = WeightStore.in_shared_memory(f"bench-{os.getpid()}", keep=2)
    try:
        best: dict[str, float] = {}
        for version in range(5):
            trainer.version = version
            # Private memory only: all processes that map the copy in the store share it.
            with PeakMemory("RssAnon") as memory:
                begin = time.perf_counter()
                trainer.publish(version, store)
                published = time.perf_counter()
                lease = store.lease(version)
                tensors = lease.tensors()
                served.load_state_dict(tensors, strict=False, assign=True)
                served.tie_weights()
                mapped = time.perf_counter()
                state = served.state_dict()
                lease.verify({key: state[key] for key in tensors})
                proven = time.perf_counter()
            lease.close()
            timing = {
                "publish_s": published - begin,
                "map_s": mapped - published,
                "prove_s": proven - mapped,
                "total_s": proven - begin,
                "copy_s": copying_alone(trainer.model),
                "bytes": float(store.manifest(version).bytes),
                "memory_mb": memory.above / 1e6,
            }
            if not best or timing["total_s"] < best["total_s"]:
                best = timing
        return best
    finally:
        store.clear()


def copying_alone(model: Any) -> float:
    """Seconds to write the weights once into a new file in shared memory, and nothing else."""
    arrays = [parameter.detach().flatten().view(torch.uint8).numpy() for parameter in model.parameters()]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        begin = time.perf_counter()
        size = sum(len(array) for array in arrays)
        os.posix_fallocate(file.fileno(), 0, size)
        with mmap.mmap(file.fileno(), size) as memory:
            target, offset = np.frombuffer(memory, dtype=np.uint8), 0
            for array in arrays:
                target[offset : offset + len(array)] = array
                offset += len(array)
            seconds = time.perf_counter() - begin
            del target
    return seconds


MEASURES = {"ours": measure_ours, "trl": measure_trl, "publish": measure_publish}


def run(what: str, name: str, lengths: str) -> dict[str, float]:
    """One measurement in a separate process."""
    command = [sys.executable, "-m", "benchmarks.trainer", "--measure", what, name, lengths]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{what} {name} {lengths} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, lengths: str, repeats: int) -> dict[str, Any]:
    """Measure both sides in turn; returns medians and their ratio."""
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    for repeat in range(repeats):
        for what in ("ours", "trl") if repeat % 2 == 0 else ("trl", "ours"):
            rows[what].append(run(what, name, lengths))
    groups = make_groups(name, lengths, 0)
    trained = sum(t.response_length for g in groups for t in g.trajectories)
    total = sum(len(t.tokens) for g in groups for t in g.trajectories)
    middle = {
        what: {key: statistics.median(row[key] for row in found) for key in found[0]} for what, found in rows.items()
    }
    return {
        "model": name,
        "lengths": lengths,
        "trained_tokens": trained,
        "tokens": total,
        "ours_tokens_per_s": trained / middle["ours"]["seconds"],
        "trl_tokens_per_s": trained / middle["trl"]["seconds"],
        "speed_ratio": middle["trl"]["seconds"] / middle["ours"]["seconds"],
        "ours_memory_mb": middle["ours"]["memory_mb"],
        "trl_memory_mb": middle["trl"]["memory_mb"],
        "ours_mfu": middle["ours"]["mfu"],
        "runs": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--models", default="3m,smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", nargs=3, metavar=("WHAT", "MODEL", "LENGTHS"))
    arguments = parser.parse_args()
    if arguments.measure:
        what, name, lengths = arguments.measure
        print(json.dumps(MEASURES[what](name, lengths)))
        return
    models = arguments.models.split(",")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read by the measuring processes
    rows, targets = [], []
    for name in models:
        for lengths in ("long-tailed", "equal"):
            row = compare(name, lengths, arguments.repeats if lengths == "long-tailed" else 1)
            rows.append(row)
            if lengths == "long-tailed":
                ratio, memory = row["speed_ratio"], row["ours_memory_mb"] / row["trl_memory_mb"]
                targets.append(target(f"{name}: trained tokens/s, times TRL's", ">= 2", ratio, ratio >= 2))
                targets.append(target(f"{name}: peak memory, share of TRL's", "<= 1", memory, memory <= 1))
    published = {name: run("publish", name, "") for name in models}
    RESULTS.parent.mkdir(exist_ok=True)
    found = {"targets": targets, "threads": arguments.threads, "updates": rows, "publish": published}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    show(rows, published, targets)


def target(name: str, wanted: str, value: float, met: bool) -> dict[str, Any]:
    return {"name": name, "target": wanted, "value": round(value, 3), "met": bool(met)}


def show(rows: list[dict[str, Any]], published: dict[str, dict[str, float]], targets: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    table = Table(title="one update on the same batch")
    for column in ("model", "lengths", "ours/TRL", "ours tok/s", "TRL tok/s", "ours MB", "TRL MB", "ours mfu"):
        table.add_column(column, justify="left" if column in ("model", "lengths") else "right")
    for row in rows:
        table.add_row(
            row["model"], row["lengths"], f"{row['speed_ratio']:.2f}", f"{row['ours_tokens_per_s']:,.0f}",
            f"{row['trl_tokens_per_s']:,.0f}", f"{row['ours_memory_mb']:,.0f}", f"{row['trl_memory_mb']:,.0f}",
            f"{row['ours_mfu']:.2f}",
        )  # fmt: skip
    console.print(table)
    table = Table(title="published to served, best of 5, seconds")
    for column in ("model", "MB", "total", "publish", "map", "prove", "copying alone", "its share", "private MB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, row in published.items():
        seconds = (f"{row[key]:.3f}" for key in ("total_s", "publish_s", "map_s", "prove_s", "copy_s"))
        share = f"{row['copy_s'] / row['total_s']:.0%}"
        table.add_row(name, f"{row['bytes'] / 1e6:,.0f}", *seconds, share, f"{row['memory_mb']:,.1f}")
    console.print(table)
    table = Table(title="targets")
    for column in ("target", "wanted", "value", "met"):
        table.add_column(column)
    for one in targets:
        table.add_row(one["name"], one["target"], f"{one['value']:.2f}", "yes" if one["met"] else "NO")
    console.print(table)


if __name__ == "__main__":
    main()
