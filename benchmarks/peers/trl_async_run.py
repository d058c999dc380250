"""TRL's unmodified asynchronous GRPO with a vLLM server. `benchmarks.trl_async` starts it in TRL's environment.

argv: the JSON file of `trl_run.Settings`, the server's address. Prints `STEP {...}` after each step.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    torch.set_num_threads(settings["threads"])
    file, _, function = settings["reward"].partition(":")
    sys.path.insert(0, str(Path(file).parent))  # TRL's worker imports the function by name
    reward = getattr(importlib.import_module(Path(file).stem), function)
    completions = settings["groups"] * settings["group_size"]
    arguments = AsyncGRPOConfig(
        output_dir=str(Path(settings["out"]) / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        vllm_server_base_url=sys.argv[2],
        vllm_server_timeout=60.0,
        num_generations=settings["group_size"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=completions // settings["micro_batch"],
        max_steps=settings["steps"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["learning_rate"],
        epsilon=settings["clip"][0],
        epsilon_high=settings["clip"][1],
        save_strategy="no",
    )
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]

    class Clock(TrainerCallback):
        begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            step = {"step": state.global_step, "seconds": time.perf_counter() - self.begin}
            print("STEP " + json.dumps(step), flush=True)

    trainer = AsyncGRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
