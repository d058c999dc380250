"""`dora-rl generate`: completes prompts in batches with the built-in engine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dora_rl.apps.log_level import LogLevel, log_to_stderr
from dora_rl.apps.output_file import check_writable
from dora_rl.core.errors import RequestError, UserError

if TYPE_CHECKING:
    from dora_rl.engine.engine import Engine
    from dora_rl.engine.requests import Finished, Sampling, StepOutput

INSTALL = "this command needs torch and transformers: pip install 'dora-rl[torch]'"


class PromptLine(NamedTuple):
    """One line of the prompts file."""

    number: int
    prompt: str | list[dict[str, str]]


def generate(
    model: Annotated[str, typer.Argument(help="Folder with safetensors, hub name, or GGUF file.")],
    prompts: Annotated[
        Path, typer.Option(help="JSONL with a 'prompt' (text or messages), or a text file with one prompt per line.")
    ],
    out: Annotated[Path | None, typer.Option(help="JSONL file to write; default: standard output.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a response.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens that together have this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0: from all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Sample from tokens at least this fraction as likely as the likeliest.")
    ] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends a response. Repeatable.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same responses in any batch.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(min=0, help="Number of threads; 0: all cores.")] = 0,
    max_requests: Annotated[int, typer.Option(min=1, help="Responses generated at a time.")] = 64,
    kv_gib: Annotated[float, typer.Option(help="Size of the KV cache in GiB.")] = 2.0,
    log_level: LogLevel = None,
) -> None:
    """Complete prompts in batches; writes JSONL with text, tokens and log-probs."""
    log_to_stderr(log_level)
    lines = read_prompts(prompts)
    if out is not None:
        check_writable(out)
    console = Console(stderr=True)
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise UserError(INSTALL) from error
    from dora_rl.core.config import build
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.engine import Engine
    from dora_rl.engine.requests import Sampling
    from dora_rl.models.loading import ModelConfig, load
    from dora_rl.models.sources import MemoryWeights
    from dora_rl.models.text import end_ids

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    given = {"max_requests": max_requests, "kv_bytes": round(kv_gib * 2**30), "threads": threads}
    config = build(EngineConfig, given, "generate")
    loaded = load(build(ModelConfig, {"path": model, "device": device, "dtype": dtype}, "generate"))
    if loaded.tokenizer is None:
        raise UserError(f"'{model}' has no tokenizer beside its weights")
    engine = Engine(loaded.model, MemoryWeights.of(loaded.model), config, tokenizer=loaded.tokenizer)
    engine.load(0, 0)
    engine.wait_for_loads()
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=tuple(stop or ()),
        stop_ids=end_ids(loaded.model, loaded.tokenizer),
        seed=seed,
    )
    sampling.check(engine.vocab)
    sink = out.open("w", encoding="utf-8") if out else sys.stdout
    try:
        _Job(engine, loaded.tokenizer, sampling, samples, sink, console).run(lines)
    finally:
        if out:
            sink.close()


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a file: JSONL if its name ends so, else one text per line; empty lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file in UTF-8") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    is_json = path.suffix in (".jsonl", ".json")
    lines = [
        PromptLine(number, _json_prompt(path, number, line) if is_json else line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not lines:
        raise UserError(f"{path} has no prompts")
    return lines


def _json_prompt(path: Path, number: int, line: str) -> Any:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number}: not JSON: {error.msg}") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if isinstance(prompt, str):
        return prompt
    messages = isinstance(prompt, list) and all(isinstance(one, dict) and "content" in one for one in prompt)
    if not messages or not prompt:
        raise UserError(f"{path}:{number}: 'prompt' must be a text or a list of messages with role and content")
    return prompt


class _Job:
    """One batch job: submits all requests and writes each response when it ends."""

    def __init__(
        self, engine: Engine, tokenizer: Any, sampling: Sampling, samples: int, sink: Any, console: Console
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._samples = samples
        self._sink = sink
        self._console = console
        self._responses: dict[int, dict[str, list[Any]]] = {}
        self._tokens = 0
        self._refused = 0

    def run(self, lines: list[PromptLine]) -> None:
        """Generate all responses, then print a line with the totals on standard error."""
        columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        with Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True) as bar:
            task = bar.add_task("", total=len(lines) * self._samples, rate="")
            start = time.perf_counter()
            for trajectory, error in self._submit(lines):
                self._write(lines, trajectory, {"error": str(error)})
                bar.advance(task)
            while self._engine.busy:
                output = self._engine.step()
                self._collect(output)
                for finished in output.finished:
                    self._finish(lines, finished)
                    rate = f"{self._tokens / (time.perf_counter() - start):,.0f} tokens/s"
                    bar.update(task, advance=1, rate=rate)
            seconds = time.perf_counter() - start
        done = len(lines) * self._samples - self._refused
        refused = f", {self._refused} refused" if self._refused else ""
        self._console.print(
            f"{done} responses{refused}, {self._tokens:,} tokens in {seconds:.1f} s: "
            f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s ({self._engine.kernels} kernels, "
            f"{self._engine.threads} threads)",
            highlight=False,
        )

    def _submit(self, lines: list[PromptLine]) -> Iterator[tuple[int, RequestError]]:
        """Submit all requests; yields those that can't be served, with the reason."""
        from dora_rl.engine.requests import Request
        from dora_rl.models.text import encode_prompt

        for index, line in enumerate(lines):
            ids = tuple(encode_prompt(self._tokenizer, line.prompt))
            for sample in range(self._samples):
                trajectory = index * self._samples + sample
                try:
                    request = Request(trajectory=trajectory, version=0, prompt=ids, sampling=self._sampling)
                    self._engine.submit(request)
                except RequestError as error:
                    self._refused += 1
                    yield trajectory, error

    def _collect(self, output: StepOutput) -> None:
        for chunk in output.chunks:
            response = self._responses.setdefault(chunk.trajectory, {"tokens": [], "logprobs": []})
            response["tokens"].extend(chunk.tokens.tolist())
            response["logprobs"].extend(chunk.logprobs.tolist())
            self._tokens += len(chunk)

    def _finish(self, lines: list[PromptLine], finished: Finished) -> None:
        response = self._responses.pop(finished.trajectory, {"tokens": [], "logprobs": []})
        text = self._tokenizer.decode(response["tokens"], skip_special_tokens=True)
        self._write(lines, finished.trajectory, {"text": text, "stop": finished.reason.value, **response})

    def _write(self, lines: list[PromptLine], trajectory: int, record: dict[str, Any]) -> None:
        line = lines[trajectory // self._samples]
        place = {"line": line.number, "sample": trajectory % self._samples, "prompt": line.prompt}
        self._sink.write(json.dumps(place | record, ensure_ascii=False) + "\n")
        self._sink.flush()
