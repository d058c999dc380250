"""prime-rl: the file of its `rl` command, with the sections orchestrator, trainer and inference.

`orchestrator.batch_size` counts rollouts, so a step has `batch_size / group_size` groups. Its GRPO subtracts the mean
of the group and does not divide by the standard deviation, averages over tokens and masks tokens by the divergence of
their probability (DPPO): here that is `dr_grpo` with `token_mean` and the trust region `binary_tv`.

Tasks are packages of the `verifiers` library, which bring their own rows and rewards: those have to be chosen by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from dora_rl.apps.conversion.translation import (
    Fields,
    Framework,
    Mapped,
    Outcome,
    Rule,
    Same,
    Unmapped,
    choice,
    held_out,
    no,
    only,
    same,
    to,
    whole,
)
from dora_rl.core.errors import ConfigError

_SOURCE, _EVAL = "orchestrator.train.source", "orchestrator.eval.source"
_ALGORITHM = "trainer.algorithm"
_LORA = "trainer.model.lora"
_HARDWARE = "the number of workers is 'trainer.ranks' and 'rollout.instances', their devices are in [ray]"
_WORKERS = "it has no counterpart: it concerns how prime-rl's workers compute"
_TASK = "a task of the verifiers library: write its rows to a file and its rubric as a function of 'reward.functions'"
_MAX_STALENESS = 64

DEFAULTS: dict[str, Any] = {
    "model.name": "Qwen/Qwen3-0.6B",
    "seq_len": 2048,
    "orchestrator.group_size": 1,
    "orchestrator.algo.type": "grpo",
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.train.filter_zero_advantages": True,
    "trainer.loss.type": "default",
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.dppo_mask_high": 0.2,
    "trainer.loss.kl_tau": 0.001,
    "trainer.optim.betas1": 0.9,
    "trainer.optim.betas2": 0.999,
    "trainer.optim.weight_decay": 0.01,
    "trainer.model.ac.mode": "full",
    "deployment.num_infer_gpus": 1,
}


def prefixed(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree as in a file of the `rl` command; a file of the trainer or the orchestrator alone is one part of it."""
    if {"orchestrator", "trainer", "inference"} & tree.keys():
        return tree
    if {"batch_size", "token_batch_size", "train", "renderer", "max_off_policy_steps"} & tree.keys():
        return {"orchestrator": tree}
    if {"optim", "loss", "scheduler"} & tree.keys():
        return {"trainer": tree}
    return {"inference": tree} if {"vllm", "server"} & tree.keys() else tree


# -- rules that look at several fields --------------------------------------------------------------------------


def _group_size(fields: Fields) -> int:
    return int(fields.get("orchestrator.rollouts_per_example") or fields["orchestrator.group_size"])


def _batch_size(value: Any, fields: Fields) -> Outcome:
    try:
        groups = whole(value, _group_size(fields), "orchestrator.batch_size counts rollouts, in whole groups")
    except ConfigError as error:
        return Unmapped(f"{error}: set 'control.groups_per_step'")
    return Mapped({"control.groups_per_step": groups})


def _staleness(value: Any, _: Fields) -> Outcome:
    remark = "prime-rl drops rollouts beyond this; dora-rl finishes them in time and drops none"
    return Mapped({"control.max_staleness": min(int(value), _MAX_STALENESS)}, remark)


def _algorithm(value: Any, _: Fields) -> Outcome:
    if value != "grpo":
        return Unmapped("the nearest algorithms of 'trainer.algorithm.name' are dr_grpo and grpo; dr_grpo is used")
    return Mapped({f"{_ALGORITHM}.name": "dr_grpo", f"{_ALGORITHM}.aggregation": "token_mean"})


def _loss(value: Any, _: Fields) -> Outcome:
    if value != "default":
        return Unmapped("the nearest setting is 'trainer.algorithm.trust_region'; binary_tv is used")
    return Mapped({f"{_ALGORITHM}.trust_region": "binary_tv"})


def _mask(_: Any, fields: Fields) -> Outcome:
    low, high = fields["trainer.loss.dppo_mask_low"], fields["trainer.loss.dppo_mask_high"]
    remark = "" if low == high else "one threshold serves both directions: the smaller one is used"
    return Mapped({f"{_ALGORITHM}.trust_region_delta": float(min(low, high))}, remark)


def _betas(_: Any, fields: Fields) -> Outcome:
    return Mapped({"trainer.optimiser.betas": [fields["trainer.optim.betas1"], fields["trainer.optim.betas2"]]})


def _steps(fields: Fields) -> int | None:
    names = ("max_steps", "trainer.max_steps", "orchestrator.max_steps")
    return next((int(fields[one]) for one in names if fields.get(one)), None)


def _schedule(value: Any, fields: Fields) -> Outcome:
    if value == "constant":
        return Same("constant, as here")
    steps, warmup = _steps(fields), int(fields.get("trainer.scheduler.warmup_steps", 10))
    falls = int(fields.get("trainer.scheduler.decay_steps", 10))
    if value == "linear" and falls == 0:
        return Mapped({"trainer.optimiser.warmup_updates": warmup})
    if value not in ("linear", "cosine") or steps is None:
        return Unmapped("'trainer.optimiser.schedule' needs 'trainer.optimiser.total_updates': set both")
    remark = ""
    if value == "linear" and falls != steps - warmup:
        remark = f"prime-rl falls over the last {falls} steps, 'trainer.optimiser.schedule' from the warm-up to the end"
    end = {"schedule": value, "warmup_updates": warmup, "total_updates": steps}
    return Mapped({f"trainer.optimiser.{key}": one for key, one in end.items()}, remark)


def _lowest_rate(value: Any, fields: Fields) -> Outcome:
    highest = float(fields.get("trainer.optim.lr", 1e-6))
    return Mapped({"trainer.optimiser.final_share": min(1.0, float(value) / highest)})


def _instances(value: Any, fields: Fields) -> Outcome:
    devices = int(fields.get("inference.vllm.tensor_parallel_size") or 1)
    return Mapped({"rollout.instances": max(1, int(value) // devices)})


def _context(value: Any, fields: Fields) -> Outcome:
    if "inference.vllm.max_model_len" in fields or "orchestrator.seq_len" in fields:
        return Mapped({"trainer.micro_batch_tokens": int(value)})
    return Mapped({"rollout.engine.max_context": int(value), "trainer.micro_batch_tokens": int(value)})


def _orchestrator_context(value: Any, fields: Fields) -> Outcome:
    if "inference.vllm.max_model_len" in fields:
        return Same("inference.vllm.max_model_len is set")
    return Mapped({"rollout.engine.max_context": int(value)})


def _dataset(base: str, key: str) -> Rule:
    """The dataset on the hub that a task names."""

    def rule(value: Any, fields: Fields) -> Outcome:
        task = f"{base}.0.env.taskset"
        split = fields.get(f"{task}.dataset_split")
        settings: dict[str, Any] = {f"{key}.source": f"datasets:{value}" + (f":{split}" if split else "")}
        if fields.get(f"{task}.dataset_subset"):
            settings[f"{key}.params.name"] = fields[f"{task}.dataset_subset"]
        return Mapped(settings, "check 'prompt' and 'answer', the columns of the dataset")

    return rule


def _examples(value: Any, _: Fields) -> Outcome:
    return Mapped({"data.held_out": int(value)}) if int(value) > 0 else Same("all examples")


def _extra_body(name: str) -> Rule:
    return to(f"sampling.{name}", via=lambda value: max(0, int(value)) if name == "top_k" else float(value))


def _finish(fields: Fields, there: Collection[str]) -> Iterator[Mapped]:
    more = sorted(name for name in fields if name.startswith(f"{_SOURCE}.1."))
    if more:
        yield Mapped({}, "a run has one source: the rows of the other train sources have to be joined to it")
    task = str(fields.get(f"{_SOURCE}.0.env.taskset.id") or fields.get("orchestrator.env.0.id") or "problems")
    if "data.source" not in there:
        yield Mapped({"data.source": f"{task}.jsonl"}, f"write the rows of the task '{task}' to this file")
    if "reward.functions" not in there:
        guess = "math" if "math" in task or "gsm8k" in task else "exact"
        yield Mapped(
            {"reward.functions": [guess]}, f"a guess: name what a response is worth, as the rubric of '{task}' does"
        )
    if "control.max_response_tokens" not in there:
        lengths = [fields.get(name) for name in ("orchestrator.seq_len", "seq_len")]
        known = [length for length in lengths if isinstance(length, int)]
        if known:
            yield Mapped({"control.max_response_tokens": known[0]}, "seq_len, since max_completion_tokens is not set")
    yield from held_out(there)
    if "model.device" not in there:
        yield Mapped({"model.device": "cpu"}, 'prime-rl runs on GPUs: set "cuda" on a machine that has them')


TABLE: dict[str, Rule] = {
    "max_steps": to("control.steps"),
    "seq_len": _context,
    "output_dir": to("out", via=str),
    "model.name": to("model.path"),
    "orchestrator.model.name": to("model.path"),
    "trainer.model.name": to("model.path"),
    "inference.vllm.model": to("model.path"),
    "inference.model.name": to("model.path"),
    # -- orchestrator
    "orchestrator.max_steps": to("control.steps"),
    "trainer.max_steps": to("control.steps"),
    "orchestrator.batch_size": _batch_size,
    "orchestrator.token_batch_size": no("a step has whole groups: set 'control.groups_per_step'"),
    "orchestrator.group_size": to("control.group_size"),
    "orchestrator.rollouts_per_example": to("control.group_size"),
    "orchestrator.max_off_policy_steps": _staleness,
    "*max_async_level": no(
        "the trainer never runs ahead of its weights; the nearest setting is 'control.max_staleness'"
    ),
    "orchestrator.seq_len": _orchestrator_context,
    "orchestrator.algo.type": _algorithm,
    "orchestrator.algo.length_penalty*": only([None], "subtract it in a function of 'reward.functions'"),
    "orchestrator.algo.*": no("the nearest settings are in [trainer.algorithm]"),
    "orchestrator.train.sampling.temperature": to("sampling.temperature", via=float),
    "orchestrator.train.sampling.max_completion_tokens": to("control.max_response_tokens"),
    "orchestrator.sampling.temperature": to("sampling.temperature", via=float),
    "orchestrator.sampling.max_tokens": to("control.max_response_tokens"),
    "orchestrator.train.sampling.extra_body.top_p": _extra_body("top_p"),
    "orchestrator.train.sampling.extra_body.top_k": _extra_body("top_k"),
    "orchestrator.train.sampling.extra_body.min_p": _extra_body("min_p"),
    "orchestrator.train.sampling.*": only([None], "the nearest settings are in [sampling]"),
    "orchestrator.train.filter_zero_advantages": choice(
        f"{_ALGORITHM}.no_signal",
        {True: "skip", False: "train"},
        "the nearest setting is 'trainer.algorithm.no_signal'",
    ),
    f"{_SOURCE}.0.env.taskset.dataset_name": _dataset(_SOURCE, "data"),
    f"{_SOURCE}.0.env.taskset.dataset_subset": same("part of 'data.params', if dataset_name is set"),
    f"{_SOURCE}.0.env.taskset.dataset_split": same("part of 'data.source', if dataset_name is set"),
    f"{_SOURCE}.0.env.taskset.id": no(_TASK),
    f"{_SOURCE}.0.name": same("a run has one source, without a name"),
    f"{_SOURCE}.0.ratio": same("a run has one source"),
    f"{_SOURCE}.0.group_size": to("control.group_size"),
    f"{_SOURCE}.0.sampling.temperature": to("sampling.temperature", via=float),
    f"{_SOURCE}.0.sampling.max_completion_tokens": to("control.max_response_tokens"),
    f"{_SOURCE}.*curriculum*": no(
        "the nearest setting is 'control.dynamic_sampling', which replaces groups without signal"
    ),
    f"{_SOURCE}.0.env.agent.*": no("the harness of a verifiers task; several turns are 'environment.kind'"),
    f"{_SOURCE}.0.*": no(_TASK),
    f"{_SOURCE}.*": no("a run has one source: join the rows to those of the first"),
    "orchestrator.env.0.*": no(_TASK),
    "orchestrator.env.*": no("a run has one source: join the rows to those of the first"),
    "orchestrator.eval.interval": to("evaluation.every"),
    "orchestrator.eval.num_examples": _examples,
    "orchestrator.eval.group_size": to("evaluation.samples"),
    "orchestrator.eval.rollouts_per_example": to("evaluation.samples"),
    "orchestrator.eval.sampling.temperature": to("evaluation.temperature", via=float),
    "orchestrator.eval.sampling.*": no("evaluation has the limits of 'sampling' and 'control.max_response_tokens'"),
    "orchestrator.eval.skip_first_step": only([False], "the first version is always evaluated"),
    f"{_EVAL}.0.env.taskset.dataset_name": _dataset(_EVAL, "evaluation.data"),
    f"{_EVAL}.0.env.taskset.dataset_subset": same("part of 'evaluation.data.params', if dataset_name is set"),
    f"{_EVAL}.0.env.taskset.dataset_split": same("part of 'evaluation.data.source', if dataset_name is set"),
    f"{_EVAL}.*": no("held-out rows are 'evaluation.data' or 'data.held_out'"),
    "orchestrator.eval.*": no("the nearest settings are in [evaluation]"),
    "orchestrator.concurrency.*": no("the nearest settings are 'rollout.engine.max_requests' and 'control.admission'"),
    "orchestrator.renderer*": no("prompts are rendered by the chat template of the model's tokenizer"),
    "orchestrator.ckpt.*": same("the section ckpt counts"),
    "orchestrator.model.lora.*": same("the section trainer.model.lora counts"),
    "orchestrator.weight_broadcast*": no("weights are published by the store of the run: 'weights'"),
    "orchestrator.*": no("it concerns prime-rl's own processes"),
    # -- trainer
    "trainer.loss.type": _loss,
    "trainer.loss.dppo_mask_low": _mask,
    "trainer.loss.dppo_mask_high": _mask,
    "trainer.loss.kl_tau": only(
        [0, None],
        "it refers to the policy that sampled; 'trainer.algorithm.kl_coefficient' refers to the first one",
    ),
    "trainer.loss.adv_tau": only([1, None], "multiply the rewards with it: 'reward.weights'"),
    "trainer.loss.*": no("the nearest settings are in [trainer.algorithm]"),
    "trainer.optim.lr": to("trainer.optimiser.learning_rate"),
    "trainer.optim.weight_decay": to("trainer.optimiser.weight_decay"),
    "trainer.optim.max_norm": to("trainer.optimiser.max_gradient_norm"),
    "trainer.optim.betas1": _betas,
    "trainer.optim.betas2": _betas,
    "trainer.optim.type": only(["adamw"], "the optimiser is AdamW", "AdamW, as here"),
    "trainer.optim.*": no("the optimiser is AdamW: the nearest settings are in [trainer.optimiser]"),
    "trainer.scheduler.type": _schedule,
    "trainer.scheduler.warmup_steps": same("part of 'trainer.optimiser', with scheduler.type"),
    "trainer.scheduler.decay_steps": same("part of 'trainer.optimiser', with scheduler.type"),
    "trainer.scheduler.min_lr": _lowest_rate,
    f"{_LORA}": lambda _value, _fields: Mapped({"trainer.lora.rank": 16}),
    f"{_LORA}.rank": to("trainer.lora.rank"),
    f"{_LORA}.alpha": to("trainer.lora.alpha", via=int),
    f"{_LORA}.target_modules": to("trainer.lora.targets"),
    f"{_LORA}.dropout": only([0], "adapters have no dropout"),
    f"{_LORA}.modules_to_save": only([None], "only adapters are trained with [trainer.lora]"),
    "trainer.model.seq_len": to("trainer.micro_batch_tokens"),
    "trainer.model.ac": lambda _value, _fields: Mapped({"trainer.gradient_checkpointing": True}),
    "trainer.model.ac.mode": lambda _value, _fields: Mapped({"trainer.gradient_checkpointing": True}),
    "trainer.model.ac.*": same("activations are recomputed in every layer"),
    "trainer.model.optim_cpu_offload": to("trainer.optimiser.offload"),
    "trainer.model.trust_remote_code": only([False], "code that comes with models is never run"),
    "trainer.model.*": no(_WORKERS),
    "trainer.enable_router_replay": to("trainer.moe.replay_routing"),
    "trainer.ckpt.*": same("the section ckpt counts"),
    "trainer.weight_broadcast*": no("weights are published by the store of the run: 'weights'"),
    "trainer.*": no("it concerns prime-rl's own processes"),
    # -- inference
    "inference": same("an empty section"),
    "inference.vllm.max_model_len": to("rollout.engine.max_context"),
    "inference.vllm.tensor_parallel_size": to("rollout.engine.vllm.tensor_parallel_size"),
    "inference.vllm.gpu_memory_utilization": to("rollout.engine.vllm.gpu_memory_utilization"),
    "inference.vllm.enforce_eager": to("rollout.engine.vllm.enforce_eager"),
    "inference.vllm.max_num_seqs": to("rollout.engine.max_requests"),
    "inference.vllm.seed": to("seed"),
    "inference.vllm.dtype": lambda value, _: (
        Same("the precision of the model") if value == "auto" else Mapped({"model.dtype": value})
    ),
    "inference.vllm.enable_lora": same("follows from 'trainer.lora'"),
    "inference.vllm.*": no("the nearest setting is 'rollout.engine.vllm.arguments'"),
    "inference.*": no("requests do not go through a server: engines belong to the run"),
    # -- shared
    "ckpt": same("a checkpoint is written after each step"),
    "ckpt.interval": to("checkpoint.every"),
    "ckpt.keep_last": to("checkpoint.keep"),
    "ckpt.*": no("the nearest settings are in [checkpoint]"),
    "resume*": no("a run is resumed with: dora-rl train --resume RUN"),
    "monitors.wandb.project": to("logging.wandb"),
    "wandb.project": to("logging.wandb"),
    "monitors.wandb.name": no("the name of a run is an option: dora-rl train FILE --name NAME"),
    "wandb.name": no("the name of a run is an option: dora-rl train FILE --name NAME"),
    "monitors.*": no("the nearest settings are in [logging]"),
    "wandb.*": no("the nearest settings are in [logging]"),
    "log.level": to("logging.level"),
    "log.*": no("the nearest settings are in [logging]"),
    "deployment.num_infer_gpus": _instances,
    "deployment.num_train_gpus": to("trainer.ranks"),
    "deployment.*": no(_HARDWARE),
    "weight_broadcast*": no("weights are published by the store of the run: 'weights'"),
    "rollout_transport*": no("it concerns prime-rl's own processes"),
    "tokenizer.*": no("the tokenizer is read from 'model.path'"),
    "run.*": no("the name of a run is an option: dora-rl train FILE --name NAME"),
    "slurm*": no("start the command in a job of your cluster: docs/cluster.md"),
    "env_vars*": no("set environment variables where the command is started"),
    "clean": no("a run never overwrites another"),
    "dry_run": same("an option: dora-rl train FILE --dry-run"),
}

PRIME_RL = Framework("prime-rl", TABLE, DEFAULTS, _finish)
