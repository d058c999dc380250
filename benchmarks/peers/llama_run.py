"""llama.cpp on the CPU, through llama-cpp-python. `benchmarks.llama` starts it in the environment of that package.

argv: GGUF file, threads, tokens of a response, comma-separated batches, repeats, JSON list of prompts (token ids).
Prints `GREEDY [[...], ...]`, the most likely responses to the prompts, and `RATES {...}` after each batch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class Batches:
    """Decodes many sequences together, one token of each per step."""

    def __init__(self, file: str, threads: int, sequences: int, context: int) -> None:
        import llama_cpp as native  # type: ignore[import-not-found]  # installed in a separate environment

        self._native = native
        native.llama_backend_init()
        self._model = native.llama_model_load_from_file(file.encode(), native.llama_model_default_params())
        params = native.llama_context_default_params()
        params.n_ctx = sequences * context
        params.n_batch = params.n_ubatch = 1024
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = native.llama_init_from_model(self._model, params)
        self._batch = native.llama_batch_init(1024, 0, 1)

    def run(self, prompts: list[list[int]], tokens: int, *, greedy: bool) -> list[list[int]]:
        """Generate this many tokens after each prompt."""
        native = self._native
        native.llama_memory_clear(native.llama_get_memory(self._context), True)
        samplers = [
            native.llama_sampler_init_greedy() if greedy else native.llama_sampler_init_dist(row)
            for row in range(len(prompts))
        ]
        last = [self._prefill(row, prompt, samplers[row]) for row, prompt in enumerate(prompts)]
        responses = [[token] for token in last]
        for step in range(tokens - 1):
            for row, prompt in enumerate(prompts):
                self._put(row, last[row], len(prompt) + step, row, wanted=True)
            self._decode(len(prompts))
            for row, sampler in enumerate(samplers):
                last[row] = native.llama_sampler_sample(sampler, self._context, row)
                responses[row].append(last[row])
        for sampler in samplers:
            native.llama_sampler_free(sampler)
        return responses

    def _prefill(self, row: int, prompt: list[int], sampler: Any) -> int:
        for position, token in enumerate(prompt):
            self._put(position, token, position, row, wanted=position == len(prompt) - 1)
        self._decode(len(prompt))
        first: int = self._native.llama_sampler_sample(sampler, self._context, len(prompt) - 1)
        return first

    def _put(self, at: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch = self._batch
        batch.token[at] = token
        batch.pos[at] = position
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = sequence
        batch.logits[at] = wanted

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        code = self._native.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")


def main() -> None:
    file, threads, tokens, batches, repeats, prompts = sys.argv[1:7]
    asked: list[list[int]] = json.loads(prompts)
    engine = Batches(file, int(threads), len(asked), 256)
    print("GREEDY " + json.dumps(engine.run(asked, 32, greedy=True)), flush=True)
    rates: dict[str, list[float]] = {}
    for batch in map(int, batches.split(",")):
        engine = Batches(file, int(threads), batch, 128)
        given = [[3 + (row + i) % 100 for i in range(16)] for row in range(batch)]
        for repeat in range(int(repeats) + 1):
            start = time.perf_counter()
            responses = engine.run(given, int(tokens), greedy=False)
            seconds = time.perf_counter() - start
            if repeat:  # the first repeat warms up
                rates.setdefault(str(batch), []).append(sum(map(len, responses)) / seconds)
        print("RATES " + json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
