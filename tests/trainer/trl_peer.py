"""TRL's GRPO trainer on given trajectories instead of generated ones."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dora_rl.core.trajectory import Group, Trajectory

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer in which each id is a word, since TRL decodes the tokens that it trains."""
    words = {str(number): number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0", pad_token="0", unk_token="0")


def trl_trainer(model: Any, groups: list[Group], folder: Path, **settings: Any) -> Any:
    """A `GRPOTrainer` that takes its rollouts and rewards from the groups, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset

        from trl import GRPOConfig, GRPOTrainer

    trajectories = [t for g in groups for t in g.trajectories]
    by_id = {str(t.id): t for t in trajectories}
    size = len(groups[0].trajectories)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = _in_order(prompts, groups)
        return {
            "prompt_ids": [t.tokens[: t.prompt_length].tolist() for t in chosen],
            "completion_ids": [t.tokens[t.prompt_length :].tolist() for t in chosen],
            "logprobs": [t.behaviour_logprobs[t.prompt_length :].tolist() for t in chosen],
            "trajectory": [str(t.id) for t in chosen],
        }

    def reward(trajectory: list[str], **_: Any) -> list[float]:
        return [by_id[name].reward for name in trajectory]

    class Timed(GRPOTrainer):
        """Measures the seconds spent on rollouts and rewards, which are not part of the update."""

        preparing = 0.0

        def _prepare_inputs(self, batch: Any) -> Any:
            begin = time.perf_counter()
            try:
                return super()._prepare_inputs(batch)
            finally:
                self.preparing += time.perf_counter() - begin

    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "num_generations": size,
        "per_device_train_batch_size": len(trajectories),
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "beta": 0.0,
        "temperature": 1.0,
        "lr_scheduler_type": "constant",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Timed(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(**(arguments | settings)),
            train_dataset=Dataset.from_list([{"prompt": str(g.id)} for g in groups]),
            processing_class=number_tokenizer(model.config.vocab_size),
            rollout_func=rollout,
        )


def scored_inputs(trainer: Any, groups: list[Group]) -> dict[str, Any]:
    """TRL's training inputs, with TRL's advantages and the given behaviour log-probs."""
    trainer.current_gradient_accumulation_steps = 1  # as its training loop sets it
    rows = [{"prompt": str(g.id)} for g in groups for _ in g.trajectories]
    inputs: dict[str, Any] = trainer._generate_and_score_completions(rows)
    behaviour = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32)
    for row, trajectory in enumerate(t for g in groups for t in g.trajectories):
        values = torch.from_numpy(trajectory.behaviour_logprobs[trajectory.prompt_length :].copy())
        behaviour[row, : len(values)] = values
    inputs["old_per_token_logps"] = behaviour
    return inputs


def _in_order(prompts: list[str], groups: list[Group]) -> list[Trajectory]:
    """The next unused sibling for each prompt."""
    left = {str(g.id): list(g.trajectories) for g in groups}
    return [left[prompt].pop(0) for prompt in prompts]
