"""Supervised fine-tuning on prompts and completions from a JSONL file, with the same trainer as reinforcement learning.

An example becomes a group of one trajectory, of which only the completion is trained.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from dora_rl.core.config import Config
from dora_rl.core.errors import DataError
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.core.types import Record
from dora_rl.models.text import encode_chat
from dora_rl.trainer.config import LoraConfig, OptimiserConfig, TrainerConfig
from dora_rl.trainer.trainer import Trainer


class SftConfig(Config):
    """Settings of supervised fine-tuning."""

    epochs: int = Field(default=1, gt=0)
    """Passes over the examples."""
    batch_size: int = Field(default=32, gt=0)
    """Examples in one update."""
    max_length: int = Field(default=2048, gt=1)
    """The longest example allowed, in tokens; longer ones are refused."""
    seed: int = 0
    """Seed of the order of the examples."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """The highest learning rate: it is reached after a tenth of the updates, and falls along a cosine to a tenth."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices."""
    lora: LoraConfig | None = None
    """The adapter to train, which is merged at the end; without this section, all weights are trained."""
    micro_batch_tokens: int = Field(default=4096, gt=0)
    """Tokens in one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    def trainer(self, updates: int) -> TrainerConfig:
        """The trainer's settings for this number of updates."""
        return TrainerConfig.model_validate(
            {
                "algorithm": {"name": "supervised"},
                "optimiser": OptimiserConfig(
                    learning_rate=self.learning_rate,
                    weight_decay=self.weight_decay,
                    warmup_updates=updates // 10,
                    schedule="cosine",
                    total_updates=updates,
                    final_share=0.1,
                ),
                "lora": self.lora,
                "micro_batch_tokens": self.micro_batch_tokens,
                "gradient_checkpointing": self.gradient_checkpointing,
            }
        )


class SftProgress(Record, frozen=True, kw_only=True):
    """The report of one update."""

    update: int
    updates: int
    loss: float
    """Mean negative log-likelihood per token, in nats, before the update."""
    tokens: int
    tokens_per_second: float


def read_examples(path: Path, tokenizer: Any | None, vocabulary: int, max_length: int) -> list[Group]:
    """Read one example per line: `prompt` and `completion` as text, as chat messages, or as token ids."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    examples: list[Group] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            prompt, completion = _ids(_fields(line, where), tokenizer, where)
            if len(prompt) + len(completion) > max_length:
                raise DataError(
                    f"{where}: {len(prompt) + len(completion)} tokens are more than max_length = {max_length}"
                )
            if max(prompt + completion) >= vocabulary or min(prompt + completion) < 0:
                raise DataError(f"{where}: a token id is outside the model's vocabulary of {vocabulary}")
            examples.append(example(len(examples), prompt, completion))
    if not examples:
        raise DataError(f"{path} has no examples")
    return examples


def example(number: int, prompt: list[int], completion: list[int]) -> Group:
    """An example as a group of one trajectory, in which the completion is trained."""
    tokens = np.array(prompt + completion, dtype=np.int32)
    trajectory = Trajectory(
        id=number,
        version=0,
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),  # unused: the tokens were not sampled
        reward=0.0,
    )
    return Group(id=number, trajectories=(trajectory,))


def train(model: Any, examples: Sequence[Group], config: SftConfig, progress: Callable[[SftProgress], None]) -> Trainer:
    """Train on the examples; the returned trainer holds the result."""
    updates = config.epochs * -(-len(examples) // config.batch_size)
    trainer = Trainer(model, config.trainer(updates))
    for update, batch in enumerate(_batches(examples, config)):
        trainer.accumulate(update, batch)
        metrics = trainer.apply(update).metrics
        progress(
            SftProgress(
                update=update + 1,
                updates=updates,
                loss=metrics["loss"],
                tokens=sum(len(t.tokens) for g in batch for t in g.trajectories),
                tokens_per_second=metrics["tokens_per_second"],
            )
        )
    return trainer


def _batches(examples: Sequence[Group], config: SftConfig) -> Iterator[list[Group]]:
    """The batches of all epochs. Each epoch has its own order; one seed determines all orders."""
    generator = random.Random(config.seed)  # noqa: S311
    for _ in range(config.epochs):
        order = generator.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), config.batch_size):
            yield [examples[index] for index in order[start : start + config.batch_size]]


def _fields(line: str, where: str) -> tuple[Any, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or not {"prompt", "completion"} <= row.keys():
        raise DataError(f"{where}: the line must be an object with 'prompt' and 'completion'")
    if not row["prompt"] or not row["completion"]:
        raise DataError(f"{where}: prompt and completion must not be empty")
    return row["prompt"], row["completion"]


def _ids(fields: tuple[Any, Any], tokenizer: Any | None, where: str) -> tuple[list[int], list[int]]:
    prompt, completion = fields
    if _is_ids(prompt) and _is_ids(completion):
        return prompt, completion
    if tokenizer is None:
        raise DataError(f"{where}: the model has no tokenizer, so prompt and completion must be lists of token ids")
    if isinstance(prompt, str) and isinstance(completion, str):
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return tokenizer(prompt)["input_ids"], tokenizer(completion, add_special_tokens=False)["input_ids"] + end
    if _is_messages(prompt) and _is_messages(completion):
        if tokenizer.chat_template is None:
            raise DataError(f"{where}: the tokenizer has no chat template; give prompt and completion as text")
        start = encode_chat(tokenizer, prompt)
        whole = encode_chat(tokenizer, prompt + completion, generate=False)
        if whole[: len(start)] != start:
            raise DataError(f"{where}: the chat template does not continue the prompt's tokens with the completion's")
        return start, whole[len(start) :]
    raise DataError(f"{where}: prompt and completion must both be text, chat messages, or token ids")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
