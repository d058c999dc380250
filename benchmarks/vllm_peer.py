"""Tokens/s of vLLM on the CPU at fixed lengths. `benchmarks.engine` starts it in vLLM's environment.

argv: model folder, eager or compiled, tokens of a response, comma-separated batches, repeats. Prints a JSON line
with all rates so far after each batch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    folder, mode, tokens, batches, repeats = sys.argv[1:6]
    import vllm  # installed in a separate environment

    engine: Any = vllm.LLM(
        model=folder,
        dtype="float32",
        enforce_eager=mode == "eager",
        max_model_len=1024,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    params: Any = vllm.SamplingParams(
        temperature=1.0, max_tokens=int(tokens), min_tokens=int(tokens), ignore_eos=True, detokenize=False
    )
    rates: dict[str, list[float]] = {}
    for batch in map(int, batches.split(",")):
        given = [{"prompt_token_ids": [3 + (row + i) % 100 for i in range(16)]} for row in range(batch)]
        for repeat in range(int(repeats) + 1):
            start = time.perf_counter()
            done = engine.generate(given, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            made = sum(len(one.outputs[0].token_ids) for one in done)
            if repeat:  # the first repeat warms up
                rates.setdefault(str(batch), []).append(made / seconds)
        print("RATES " + json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
