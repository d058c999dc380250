"""`dora-rl sft`: supervised fine-tuning of a model on a JSONL file."""

from __future__ import annotations

import importlib.util
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dora_rl.apps.log_level import LogLevel, log_to_stderr
from dora_rl.core.config import build
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from dora_rl.trainer.sft import SftConfig, SftProgress
    from dora_rl.trainer.trainer import Trainer


def sft(
    model: Annotated[str, typer.Argument(help="Folder, hub name or .gguf file of the model to start from.")],
    data: Annotated[
        Path, typer.Option(help="JSONL with 'prompt' and 'completion': text, chat messages, or token ids.")
    ],
    out: Annotated[Path, typer.Option(help="New folder for the trained model.")],
    epochs: Annotated[int, typer.Option(help="Number of passes over the examples.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Examples per update.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-5,
    max_length: Annotated[int, typer.Option(help="Longest example, in tokens.")] = 2048,
    lora_rank: Annotated[
        int, typer.Option(help="Train a LoRA adapter of this rank and merge it; 0: train all weights.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the order of the examples.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    log_level: LogLevel = None,
) -> None:
    """Fine-tune a model on prompts and completions, as a warm start for reinforcement learning."""
    log_to_stderr(log_level)
    if importlib.util.find_spec("torch") is None:
        raise UserError("training needs torch: pip install 'dora-rl[torch]'")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' already exists: name a new folder with --out")
    import torch

    from dora_rl.models.loading import ModelConfig, load
    from dora_rl.trainer.sft import SftConfig, read_examples, train

    settings = {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "max_length": max_length,
        "lora": {"rank": lora_rank} if lora_rank else None,
        "seed": seed,
    }
    config: SftConfig = build(SftConfig, settings, source="sft")
    loaded = load(build(ModelConfig, {"path": model, "device": device}, source="sft"))
    vocabulary = loaded.model.get_input_embeddings().weight
    assert isinstance(vocabulary, torch.Tensor)
    examples = read_examples(data, loaded.tokenizer, len(vocabulary), config.max_length)
    begin = time.perf_counter()
    history: list[SftProgress] = []
    columns = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sft", total=None, status="")

        def show(done: SftProgress) -> None:
            history.append(done)
            status = f"loss {done.loss:.3f}  {done.tokens_per_second:,.0f} tokens/s"
            bar.update(task, completed=done.update, total=done.updates, status=status)

        trainer = train(loaded.model, examples, config, show)
    _write(trainer, loaded.tokenizer, out)
    seconds = time.perf_counter() - begin
    tokens = sum(done.tokens for done in history)
    Console().print(
        f"{len(examples):,} examples, {len(history):,} updates, {tokens:,} tokens in {seconds:.1f} s; "
        f"loss {history[0].loss:.3f} -> {history[-1].loss:.3f}; written to {out}",
        highlight=False,
        soft_wrap=True,
    )


def _write(trainer: Trainer, tokenizer: object | None, out: Path) -> None:
    """Write the model to a folder that is either complete or does not exist."""
    from dora_rl.trainer.checkpoint import save_policy

    staged = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        save_policy(staged, trainer, tokenizer)
        if out.exists():
            out.rmdir()
        staged.rename(out)
    except OSError as error:
        raise UserError(f"cannot write '{out}': {error.strerror}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
