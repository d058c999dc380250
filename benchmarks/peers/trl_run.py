"""A training run of TRL's `GRPOTrainer` on the CPU. `benchmarks.training` starts it in TRL's environment.

argv: a JSON file (`Settings`). Prints a line `STEP {...}` after each step. The clock starts with the first step, after
a warm-up of one generation and one gradient; saving weights for the evaluation does not count.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict


class Settings(TypedDict):
    """The settings of both sides, except for the micro-batch, which only TRL has."""

    model: str
    data: str
    """A JSONL file of rows, in the order of training."""
    reward: str
    """FILE.py:function, with the signature that TRL expects."""
    groups: int
    group_size: int
    steps: int
    max_tokens: int
    learning_rate: float
    betas: tuple[float, float]
    loss: str
    clip: tuple[float, float]
    micro_batch: int
    threads: int
    seed: int
    save: list[int]
    """Steps after which the weights are saved."""
    out: str


def reward_of(name: str) -> Callable[..., list[float]]:
    """Import the reward function from its file."""
    file, _, function = name.partition(":")
    spec = importlib.util.spec_from_file_location("task", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., list[float]] = getattr(module, function)
    return found


def counted(reward: Callable[..., list[float]], tokens: list[int], rewards: list[float]) -> Callable[..., list[float]]:
    """A reward function that records what it is called with."""

    def recorded(completion_ids: list[list[int]], **given: Any) -> list[float]:
        tokens.extend(map(len, completion_ids))
        found = reward(**given)
        rewards.extend(found)
        return found

    return recorded


def arguments(settings: Settings, config: Any) -> Any:
    """TRL's arguments; all others keep their defaults."""
    completions = settings["groups"] * settings["group_size"]
    return config(
        output_dir=str(Path(settings["out"]) / "trl"),
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        report_to=[],
        num_generations=settings["group_size"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=completions // settings["micro_batch"],
        gradient_checkpointing=False,
        max_steps=settings["steps"],
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type=settings["loss"],
        epsilon=settings["clip"][0],
        epsilon_high=settings["clip"][1],
        learning_rate=settings["learning_rate"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        shuffle_dataset=False,
        seed=settings["seed"],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def warm_up(trainer: Any) -> None:
    """Generate and differentiate once, so that imports on first use don't count against TRL."""
    import torch

    ids = torch.ones(1, 4, dtype=torch.long)
    trainer.model.generate(ids, attention_mask=ids, max_new_tokens=2, do_sample=True)
    trainer.model(ids, labels=ids).loss.backward()
    trainer.model.zero_grad()


def main() -> None:
    settings: Settings = json.loads(Path(sys.argv[1]).read_text())
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    tokens: list[int] = []
    rewards: list[float] = []
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    trainer: Any = GRPOTrainer(
        model=settings["model"],
        reward_funcs=counted(reward_of(settings["reward"]), tokens, rewards),
        args=arguments(settings, GRPOConfig),
        train_dataset=Dataset.from_list(rows),
    )

    class Clock(TrainerCallback):
        begin = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            now = time.perf_counter()
            step = {"step": state.global_step, "seconds": now - self.begin, "lengths": tokens[:], "rewards": rewards[:]}
            tokens.clear()
            rewards.clear()
            print("STEP " + json.dumps(step), flush=True)
            if state.global_step in settings["save"]:
                folder = Path(settings["out"]) / f"step-{state.global_step}"
                trainer.model.save_pretrained(folder)
                trainer.processing_class.save_pretrained(folder)
            self.begin += time.perf_counter() - now

    trainer.add_callback(Clock())
    warm_up(trainer)
    names = ("trl", "transformers", "torch", "accelerate", "datasets")
    print("VERSIONS " + json.dumps({name: version(name) for name in names}), flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
