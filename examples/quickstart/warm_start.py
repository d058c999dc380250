"""Trains the warm start of the quickstart: a tiny Llama that knows the task but makes mistakes.

    python examples/quickstart/warm_start.py [--out FOLDER] [--seed 0] [--updates 500]

It is trained on demonstrations in which every step contains a mistake with some probability, and the chain continues
from it. So the likeliest next step is nearly always right, but a sampled chain makes about as many mistakes as the
demonstrations: short chains are mostly right, long ones hardly ever. Only training problems are used.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dora_rl.core.trajectory import Group
from dora_rl.trainer.checkpoint import save_policy
from dora_rl.trainer.sft import SftConfig, SftProgress, example, train
from task import ALPHABET, MAX_TOKENS, Problem, draw

OUT = Path(__file__).parent / "warm"
MISTAKES = 0.12
"""Probability of a mistake in a step: 41% of the chains have none."""
BATCH = 64


def make_tokenizer() -> Any:
    """One token for each character, and an end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<end>", "<unknown>"]
    vocabulary = {token: index for index, token in enumerate([*special, *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def make_model(tokenizer: Any, seed: int) -> Any:
    """A Llama of 0.1M parameters with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=2 * MAX_TOKENS,
            tie_word_embeddings=True,
            initializer_range=0.08,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def demonstrations(count: int, tokenizer: Any, seed: int) -> Iterator[Group]:
    """Chains with mistakes, as training examples."""
    dice = random.Random(seed)
    for number in range(count):
        problem = draw(dice, "train", "heavy")
        prompt = tokenizer(f"{problem}=")["input_ids"]
        response = tokenizer("=".join(demonstrate(problem, dice)))["input_ids"]
        completion = [*response, tokenizer.eos_token_id][: MAX_TOKENS - len(prompt)]
        yield example(number, prompt, completion)


def demonstrate(problem: Problem, dice: random.Random) -> Iterator[str]:
    """The steps of a response with mistakes."""
    while problem.times:
        problem = with_mistake(problem.then(), dice) if dice.random() < MISTAKES else problem.then()
        yield str(problem)
    yield str(problem.digit)


def with_mistake(problem: Problem, dice: random.Random) -> Problem:
    """A problem with a wrong digit or, in a fifth of cases, a count that is off by one."""
    if problem.times and dice.random() < 0.2:
        return problem._replace(times=problem.times + dice.choice((-1, 1)))
    return problem._replace(digit=(problem.digit + dice.randint(1, 9)) % 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    examples = list(demonstrations(arguments.updates * BATCH, tokenizer, arguments.seed))
    config = SftConfig(
        batch_size=BATCH, learning_rate=arguments.learning_rate, seed=arguments.seed, max_length=2 * MAX_TOKENS
    )
    begin = time.perf_counter()

    def show(done: SftProgress) -> None:
        if done.update % 50 == 0:
            seconds = time.perf_counter() - begin
            print(f"{done.update}/{done.updates}  loss {done.loss:.4f}  {seconds:.0f} s", flush=True)

    trainer = train(make_model(tokenizer, arguments.seed), examples, config, show)
    save_policy(arguments.out, trainer, tokenizer)


if __name__ == "__main__":
    main()
