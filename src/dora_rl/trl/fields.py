"""What becomes of each field of TRL's `GRPOConfig`: the one table of the mapping, which docs/from-trl.md shows.

Every field is of one kind:
- mapped: it sets what `sets` names; `mapping` has the translation, and refuses by name the values that have none;
- without effect: by construction no value of it can change a run, for the reason that is given;
- refused: a value other than TRL's default is refused by name, with the nearest setting of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from dora_rl.core.errors import ConfigError

TRL_VERSION = "1.16.0"
"""The version of TRL that the table was made from, with transformers 5.23."""

Kind = Literal["mapped", "without effect", "refused"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of one field."""

    kind: Kind
    sets: str = ""
    """What a mapped field sets: settings of dora-rl, or a part of `GRPOTrainer`."""
    reason: str = ""
    """Why there is no effect, or what to do in place of what is refused; for a mapped field, what to know."""


def _to(sets: str, reason: str = "") -> Entry:
    return Entry("mapped", sets, reason)


def _idle(reason: str) -> Entry:
    return Entry("without effect", "", reason)


def _no(reason: str) -> Entry:
    return Entry("refused", "", reason)


_BATCH = "`control.groups_per_step`"
_PUSH = "only `push_to_hub` uses it, which is refused"
_DDP = "no DistributedDataParallel: ranks are sharded by FSDP2, with the same gradients"
_LOADER = "no DataLoader: the supervisor reads rows from a file in the run directory"
_SERVER = "no vLLM server is contacted: each rollout instance starts its own engine"
_NO_METRICS = "GRPO has no labels and no `compute_metrics`, in TRL as here"
_ENTROPY = "only `use_adaptive_entropy` uses it, which is refused"
_RANKS = "several trainer processes are `dora={'trainer.ranks': N}`, sharded by FSDP2"
_OTHER_LOSS = "only a `loss_type` that is refused uses it"
_CORRECTION = "`trainer.algorithm.correction`"
_ONE_CARD = "`dora-rl push RUN REPO` uploads a policy after the run"

FIELDS: Mapping[str, Entry] = {
    # -- of transformers' TrainingArguments -------------------------------------------------------------------------
    "output_dir": _to("`out`", "each run is a directory in it; `save_model()` writes the policy into it"),
    "per_device_train_batch_size": _to(_BATCH, "the memory of a pass is `trainer.micro_batch_tokens`"),
    "num_train_epochs": _to("`control.steps`", "by the number of rows, as TRL counts them"),
    "max_steps": _to("`control.steps`", "TRL counts updates: several of them may be one step here"),
    "learning_rate": _to("`trainer.optimiser.learning_rate`"),
    "lr_scheduler_type": _to(
        "`trainer.optimiser.schedule`", "`constant`, `constant_with_warmup`, `linear`, `cosine`, `cosine_with_min_lr`"
    ),
    "lr_scheduler_kwargs": _to("`trainer.optimiser.final_share`", "only `min_lr` and `min_lr_rate`"),
    "warmup_steps": _to("`trainer.optimiser.warmup_updates`", "the first update has 1/N of the rate; in TRL, 0"),
    "optim": _no("AdamW is the only optimiser: leave it out, or set `adamw_torch`"),
    "optim_args": _no("AdamW has `adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay`"),
    "weight_decay": _to("`trainer.optimiser.weight_decay`"),
    "adam_beta1": _to("`trainer.optimiser.betas`"),
    "adam_beta2": _to("`trainer.optimiser.betas`"),
    "adam_epsilon": _to("`trainer.optimiser.epsilon`"),
    "optim_target_modules": _no("only GaLore and its relatives use it; a `peft_config` trains fewer weights"),
    "gradient_accumulation_steps": _to(_BATCH),
    "average_tokens_across_devices": _idle("gradients never depend on how a batch is divided over processes"),
    "max_grad_norm": _to("`trainer.optimiser.max_gradient_norm`", "0 is no limit"),
    "label_smoothing_factor": _idle(_NO_METRICS),
    "bf16": _to("`trainer.precision`", "unset: bfloat16 on a GPU, float32 on a CPU"),
    "fp16": _no("the trainer computes in bfloat16 (`bf16=True`) or float32"),
    "bf16_full_eval": _no("evaluation has the precision of rollout, `dora={'model.dtype': ...}`"),
    "fp16_full_eval": _no("evaluation has the precision of rollout, `dora={'model.dtype': ...}`"),
    "tf32": _no("the precision of matrix products is `bf16`, which sets `trainer.precision`"),
    "activation_checkpointing": _to("`trainer.gradient_checkpointing`"),
    "activation_checkpointing_kwargs": _idle("what is recomputed does not change the gradient"),
    "gradient_checkpointing": _to("`trainer.gradient_checkpointing`"),
    "gradient_checkpointing_kwargs": _idle("what is recomputed does not change the gradient"),
    "torch_compile": _no("nothing is compiled by torch.compile: leave it out"),
    "torch_compile_backend": _no("nothing is compiled by torch.compile: leave it out"),
    "torch_compile_mode": _no("nothing is compiled by torch.compile: leave it out"),
    "use_liger_kernel": _no("`trainer.micro_batch_tokens` limits the memory of a pass: leave it out"),
    "liger_kernel_config": _no("`trainer.micro_batch_tokens` limits the memory of a pass: leave it out"),
    "use_cache": _idle("training has no KV cache, and rollout always has its own"),
    "neftune_noise_alpha": _no("noise would make the trainer's log-probs differ from those of rollout: leave it out"),
    "torch_empty_cache_steps": _no("`trainer.micro_batch_tokens` limits the memory of a pass: leave it out"),
    "auto_find_batch_size": _no("TRL refuses it too; `trainer.micro_batch_tokens` limits the memory of a pass"),
    "logging_strategy": _to("`GRPOTrainer`: `log_history`, `on_log`", "`steps` or `no`; metrics.jsonl has every step"),
    "logging_steps": _to("`GRPOTrainer`: `log_history`, `on_log`", "metrics.jsonl has every step"),
    "logging_first_step": _to("`GRPOTrainer`: `log_history`, `on_log`"),
    "log_on_each_node": _idle("one supervisor writes all logs"),
    "logging_nan_inf_filter": _idle("a step whose loss is not finite is undone, so no such loss is ever logged"),
    "include_num_input_tokens_seen": _no("`batch/response_tokens` in metrics.jsonl has the trained tokens"),
    "log_level": _to("`logging.level`", "`debug`, `info`, `warning`, `error`; `passive` is our default"),
    "log_level_replica": _idle("a script has one process"),
    "disable_tqdm": _to("`GRPOTrainer`: whether a run prints"),
    "report_to": _to("`logging.tensorboard`, `logging.wandb`, `logging.trackio`"),
    "run_name": _to("`GRPOTrainer`: name of the run directory", "a number is added if it is taken"),
    "project": _to("`logging.wandb`, `logging.trackio`"),
    "trackio_space_id": _no("`report_to='trackio'` writes to a local project"),
    "trackio_bucket_id": _no("`report_to='trackio'` writes to a local project"),
    "trackio_static_space_id": _no("`report_to='trackio'` writes to a local project"),
    "eval_strategy": _to("`evaluation.every`"),
    "eval_steps": _to("`evaluation.every`"),
    "eval_delay": _no("evaluation begins with the model as it was given; `eval_steps` says how often"),
    "per_device_eval_batch_size": _idle("the evaluator batches its requests itself"),
    "prediction_loss_only": _idle(_NO_METRICS),
    "eval_on_start": _idle("with an `eval_strategy`, the model as it was given is always evaluated"),
    "eval_do_concat_batches": _idle(_NO_METRICS),
    "eval_use_gather_object": _idle(_NO_METRICS),
    "eval_accumulation_steps": _idle(_NO_METRICS),
    "include_for_metrics": _idle(_NO_METRICS),
    "batch_eval_metrics": _idle(_NO_METRICS),
    "save_only_model": _no("a run can always be resumed; `save_total_limit` limits the space"),
    "save_strategy": _to("`checkpoint.every`", "`no` leaves the checkpoint at the end; `best` is refused"),
    "save_steps": _to("`checkpoint.every`"),
    "save_on_each_node": _idle("one trainer writes checkpoints"),
    "save_total_limit": _to("`checkpoint.keep`"),
    "enable_jit_checkpoint": _idle("a run that is ended in any way can be resumed"),
    "push_to_hub": _no(_ONE_CARD),
    "hub_token": _idle(_PUSH),
    "hub_private_repo": _idle(_PUSH),
    "hub_model_id": _idle(_PUSH),
    "hub_strategy": _idle(_PUSH),
    "hub_always_push": _idle(_PUSH),
    "hub_revision": _idle(_PUSH),
    "load_best_model_at_end": _no("the policy with the best held-out accuracy is in `checkpoints/best` of the run"),
    "metric_for_best_model": _to("`GRPOTrainer`: `state.best_metric`", "for `EarlyStoppingCallback`"),
    "greater_is_better": _to("`GRPOTrainer`: `state.best_metric`"),
    "ignore_data_skip": _no("a resumed run goes on with exactly the rows that are left"),
    "restore_callback_states_from_checkpoint": _no("a resumed run has the callbacks of the new `GRPOTrainer`"),
    "full_determinism": _no("`seed` determines which tokens a version samples"),
    "seed": _to("`seed`, `data.seed`"),
    "data_seed": _idle("TRL's GRPO shuffles with `seed` too"),
    "use_cpu": _to("`model.device`", "otherwise a GPU is used if torch finds one"),
    "accelerator_config": _no(_RANKS),
    "parallelism_config": _no(_RANKS),
    "dataloader_drop_last": _idle("every step has whole groups"),
    "dataloader_num_workers": _idle(_LOADER),
    "dataloader_pin_memory": _idle(_LOADER),
    "dataloader_persistent_workers": _idle(_LOADER),
    "dataloader_prefetch_factor": _idle(_LOADER),
    "dataloader_multiprocessing_context": _idle(_LOADER),
    "dataloader_in_order": _idle(_LOADER),
    "remove_unused_columns": _to("`GRPOTrainer`: columns that reward functions get"),
    "label_names": _idle(_NO_METRICS),
    "train_sampling_strategy": _idle("TRL's GRPO has its own sampler too; `shuffle_dataset` is mapped"),
    "length_column_name": _idle("nothing is grouped by length"),
    "ddp_find_unused_parameters": _idle(_DDP),
    "ddp_bucket_cap_mb": _idle(_DDP),
    "ddp_broadcast_buffers": _idle(_DDP),
    "ddp_static_graph": _idle(_DDP),
    "ddp_backend": _no(_RANKS),
    "ddp_timeout": _idle("a step that takes too long is restarted, after `control.deadlines.train`"),
    "fsdp": _no(_RANKS),
    "fsdp_config": _no(_RANKS),
    "deepspeed": _no(_RANKS),
    "debug": _no("`log_level='debug'` writes more to the logs of the run"),
    "skip_memory_metrics": _no("memory is not measured: leave it out"),
    "do_train": _idle("only scripts read it"),
    "do_eval": _idle("only scripts read it; `eval_strategy` is mapped"),
    "do_predict": _idle("only scripts read it"),
    "resume_from_checkpoint": _idle("only scripts read it, and pass it to `train`"),
    "local_rank": _no("start the script once, with `python`; " + _RANKS),
    # -- of TRL's GRPOConfig ----------------------------------------------------------------------------------------
    "model_init_kwargs": _to("`model.dtype`", "only `dtype`"),
    "trust_remote_code": _no("code of a model repository is never run: use a model that transformers has"),
    "router_aux_loss_coef": _to("`trainer.moe.auxiliary_loss`", "unset: what the model's config says, as in TRL"),
    "disable_dropout": _idle("the trainer has no dropout, so that its log-probs are those of rollout"),
    "cast_lm_head_to_fp32": _no("weights are float32 with `bf16` too: leave it out"),
    "num_generations": _to("`control.group_size`, " + _BATCH),
    "num_generations_eval": _to("`evaluation.samples`"),
    "max_completion_length": _to("`control.max_response_tokens`"),
    "ds3_gather_for_generation": _idle("rollout instances have whole weights of their own"),
    "shuffle_dataset": _to("`data.shuffle`"),
    "pad_to_multiple_of": _idle("sequences are packed, not padded"),
    "generation_batch_size": _to("`trainer.mini_batches`, " + _BATCH),
    "steps_per_generation": _to("`trainer.mini_batches`, " + _BATCH),
    "temperature": _to("`sampling.temperature`, `evaluation.temperature`"),
    "top_p": _to("`sampling.top_p`"),
    "top_k": _to("`sampling.top_k`"),
    "min_p": _to("`sampling.min_p`"),
    "generation_kwargs": _to("`sampling`", "`stop`, `stop_strings`, `temperature`, `top_p`, `top_k`, `min_p`"),
    "chat_template_kwargs": _no("the chat template gets no arguments: pass a `processing_class` with another template"),
    "repetition_penalty": _no("a penalty changes the policy that is sampled; the nearest is a reward function"),
    "cache_implementation": _idle("rollout engines have their own paged KV cache"),
    "use_vllm": _to("`rollout.engine.kind`"),
    "vllm_mode": _idle(_SERVER),
    "vllm_model_impl": _to("`rollout.engine.vllm.arguments`"),
    "vllm_enable_sleep_mode": _no("rollout and training never take turns on a device: leave it out"),
    "vllm_structured_outputs_regex": _no("sampling is not constrained; the reward `format:REGEX` is the nearest"),
    "vllm_server_base_url": _idle(_SERVER),
    "vllm_server_host": _idle(_SERVER),
    "vllm_server_port": _idle(_SERVER),
    "vllm_server_timeout": _idle(_SERVER),
    "vllm_group_port": _idle(_SERVER),
    "vllm_gpu_memory_utilization": _to("`rollout.engine.vllm.gpu_memory_utilization`", "with `use_vllm`, on a GPU"),
    "vllm_max_model_length": _to("`rollout.engine.max_context`"),
    "vllm_tensor_parallel_size": _to("`rollout.engine.vllm.tensor_parallel_size`", "with `use_vllm`"),
    "beta": _to("`trainer.algorithm.kl_coefficient`"),
    "num_iterations": _to("`trainer.epochs`"),
    "epsilon": _to("`trainer.algorithm.clip_low`, `trainer.algorithm.clip_high`"),
    "delta": _to("`trainer.algorithm.clip_negative`", "unset: 3 where groups may be stale"),
    "epsilon_high": _to("`trainer.algorithm.clip_high`"),
    "sapo_temperature_neg": _idle(_OTHER_LOSS),
    "sapo_temperature_pos": _idle(_OTHER_LOSS),
    "vespo_k_pos": _idle(_OTHER_LOSS),
    "vespo_lambda_pos": _idle(_OTHER_LOSS),
    "vespo_k_neg": _idle(_OTHER_LOSS),
    "vespo_lambda_neg": _idle(_OTHER_LOSS),
    "importance_sampling_level": _to("`trainer.algorithm.name`"),
    "reward_weights": _to("`reward.weights`"),
    "multi_objective_aggregation": _no("the reward is the weighted sum; normalise each score in its function"),
    "scale_rewards": _to("`trainer.algorithm.name`", "`group` or `none`; for `batch`, see `reinforce_pp_baseline`"),
    "loss_type": _to(
        "`trainer.algorithm.name`, `trainer.algorithm.aggregation`", "`grpo`, `bnpo`, `dr_grpo`, `dapo`, `cispo`"
    ),
    "mask_truncated_completions": _no("truncated responses are trained; a reward function can see their length"),
    "sync_ref_model": _no("the reference is the model as it was given; `beta` is its weight"),
    "ref_model_mixup_alpha": _idle("only `sync_ref_model` uses it, which is refused"),
    "ref_model_sync_steps": _idle("only `sync_ref_model` uses it, which is refused"),
    "top_entropy_quantile": _no("all tokens are trained; the nearest is `trainer.algorithm.trust_region`"),
    "entropy_coef": _to("`trainer.algorithm.entropy_coefficient`", "with a loss that averages over tokens"),
    "use_adaptive_entropy": _no("the bonus is constant: set `entropy_coef`"),
    "entropy_coef_min": _idle(_ENTROPY),
    "entropy_coef_max": _idle(_ENTROPY),
    "entropy_coef_delta": _idle(_ENTROPY),
    "entropy_target": _idle(_ENTROPY),
    "max_tool_calling_iterations": _idle("only `tools` use it, which are refused"),
    "vllm_importance_sampling_correction": _to(_CORRECTION, "with `use_vllm`, as in TRL"),
    "vllm_importance_sampling_mode": _to(_CORRECTION, "with `use_vllm`"),
    "vllm_importance_sampling_clip_max": _to("`trainer.algorithm.correction_high`", "with `use_vllm`"),
    "vllm_importance_sampling_clip_min": _to("`trainer.algorithm.correction_low`", "with `use_vllm`, for masks"),
    "off_policy_mask_threshold": _no("the nearest is `dora={'trainer.algorithm.veto': 1e-4}`"),
    "use_bias_correction_kl": _to("`trainer.algorithm.kl_ratio`", "with `beta`"),
    "log_completions": _to("`logging.samples`", "all groups of a step; otherwise two"),
    "log_multimodal": _idle("there are no images"),
    "num_completions_to_print": _to("`logging.samples`", "with `log_completions`; nothing is printed"),
    "log_unique_prompts": _no("samples.jsonl has whole groups: leave it out"),
    "log_completions_hub_repo": _no("samples.jsonl in the run directory has the completions"),
    "use_transformers_continuous_batching": _idle("rollout engines always batch continuously"),
    "transformers_continuous_batching_config": _no("`rollout.engine` has the settings of the engine"),
    "use_transformers_paged": _idle("rollout engines always have a paged KV cache"),
    "vllm_importance_sampling_cap": _to("`trainer.algorithm.correction_high`", "with `use_vllm`"),
}

FORMER: Mapping[str, str] = {
    "max_prompt_length": "TRL has removed it; a run refuses prompts that do not fit `rollout.engine.max_context`",
    "warmup_ratio": "transformers has removed it: set `warmup_steps` to a number below 1",
    "evaluation_strategy": "transformers calls it `eval_strategy`",
    "no_cuda": "transformers calls it `use_cpu`",
    "logging_dir": "transformers has removed it; event files are in `tensorboard/` of the run directory",
    "overwrite_output_dir": "transformers has removed it; each run has a directory of its own",
    "ref_model": "the reference is the model as it was given; `beta` is its weight",
}
"""Names that scripts still have, and what to do about them."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "optim": ("adamw_torch",),
    "tf32": (False,),
    "trackio_static_space_id": (False,),
    "include_num_input_tokens_seen": (False,),
    "debug": ([],),
}
"""Values beside the default that ask for nothing else than the default does."""


def check_refused(config: Any) -> None:
    """Refuse a value that dora-rl has no equivalent for."""
    for each in fields(config):
        entry = FIELDS.get(each.name)
        if entry is None or entry.kind != "refused":
            continue
        value = getattr(config, each.name)
        default = each.default if each.default is not MISSING else None
        if value is None or value == default or value in _HARMLESS.get(each.name, ()):
            continue
        raise ConfigError(f"GRPOConfig: '{each.name}' = {value!r:.60} has no equivalent in dora-rl: {entry.reason}")


def markdown() -> str:
    """The table as in docs/from-trl.md."""
    lines = ["| field | | dora-rl |", "|---|---|---|"]
    for name, entry in FIELDS.items():
        text = f"{entry.sets}; {entry.reason}" if entry.sets and entry.reason else entry.sets or entry.reason
        lines.append(f"| `{name}` | {entry.kind} | {text} |")
    return "\n".join(lines)


def counts() -> str:
    """How many fields there are of each kind, as in docs/from-trl.md."""
    found = [entry.kind for entry in FIELDS.values()]
    mapped, idle, refused = (found.count(kind) for kind in ("mapped", "without effect", "refused"))
    return (
        f"Of the {len(found)} fields of `GRPOConfig` in TRL {TRL_VERSION}, {mapped} are mapped, {idle} have no effect "
        f"here by construction, and {refused} are refused by name if they differ from TRL's default. None is ignored "
        "silently."
    )
