"""verl: `verl.trainer.main_ppo` and its asynchronous variants, by the fields of their hydra config.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, so they are groups here. Schedules count training steps
there and updates here. `main_ppo` is synchronous; `one_step_off_policy` and `fully_async_policy` overlap.
"""

from __future__ import annotations

from typing import Any

from dora_rl.apps.conversion.translation import (
    Framework,
    Mapped,
    Rule,
    Same,
    Unmapped,
    choice,
    no,
    only,
    same,
    to,
    when,
)
from dora_rl.apps.conversion.verl_rules import (
    ACTOR,
    ALGORITHM,
    MODEL,
    OPTIM,
    ROLLOUT,
    aggregation,
    batch_size,
    clip_both,
    context,
    critic,
    dual_clip,
    engine,
    estimator,
    evaluated_prompt,
    files,
    finish,
    greedy_evaluation,
    groups,
    logger,
    loss_mode,
    micro_batch,
    mini_batch_size,
    of_another_loss,
    positive,
    reward_function,
    schedule,
    threshold,
    warmup,
    warmup_share,
)

_DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
}
_HARDWARE = "the number of workers is 'trainer.ranks' and 'rollout.instances', their devices are in [ray]"
_WORKERS = "it has no counterpart: it concerns how verl's workers compute"
_OFF = [False, None, 0, 1]
"""Values that switch nothing on: sizes of 1 and empty ones."""

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{OPTIM}.betas": [0.9, 0.999],
    f"{OPTIM}.weight_decay": 0.01,
    f"{MODEL}.enable_gradient_checkpointing": True,
}


TABLE: dict[str, Rule] = {
    "*_target_": same("hydra's own"),  # before the other patterns: every section has one
    "$@": same("further arguments of the script"),
    "main": same("the command"),
    # -- data
    "data.train_files": files("data.source"),
    "data.val_files": files("evaluation.data.source"),
    "data.train_max_samples": positive("data.limit", "all rows"),
    "data.val_max_samples": positive("evaluation.data.limit", "all rows"),
    "data.prompt_key": evaluated_prompt,
    "data.train_batch_size": batch_size,
    "data.max_prompt_length": context,
    "data.max_response_length": to("control.max_response_tokens"),
    "data.shuffle": to("data.shuffle"),
    "data.seed": to("data.seed"),
    "data.reward_fn_key": only(["data_source", None], "a verl-style function gets the column 'data_source'"),
    "data.filter_overlong_prompts": only(
        [False, None], "a run refuses prompts that fill the context: leave them out of the file"
    ),
    "data.truncation": only(["error", None], "prompts are never truncated", "prompts are never truncated"),
    "data.custom_cls.path": only([None], "the nearest setting is 'data.source' = \"FILE.py:function\""),
    "data.custom_cls.name": same("belongs to custom_cls.path"),
    "data.gen_batch_size": no("the nearest setting is 'control.dynamic_sampling'"),
    "data.apply_chat_template_kwargs": only([None], "the model's chat template is used as it is"),
    "data.trust_remote_code": only([False, None], "code that comes with data or models is never run"),
    "data.val_batch_size": same("evaluation runs beside training"),
    # -- model
    f"{MODEL}.path": to("model.path"),
    f"{MODEL}.lora_rank": positive("trainer.lora.rank", "no adapter"),
    f"{MODEL}.lora_alpha": when(f"{MODEL}.lora_rank", to("trainer.lora.alpha", via=int), "no adapter"),
    f"{MODEL}.target_modules": when(f"{MODEL}.lora_rank", to("trainer.lora.targets"), "no adapter"),
    f"{MODEL}.enable_gradient_checkpointing": to("trainer.gradient_checkpointing"),
    f"{MODEL}.use_remove_padding": same("micro-batches are always packed"),
    f"{MODEL}.trust_remote_code": only([False, None], "code that comes with data or models is never run"),
    f"{MODEL}.tokenizer_path": only([None], "the tokenizer is read from 'model.path'"),
    f"{MODEL}.custom_chat_template": only([None], "put it into the tokenizer of 'model.path'"),
    f"{MODEL}.override_config": only([None], "change config.json in the folder of 'model.path'"),
    f"{MODEL}.lora_adapter_path": only([None], "merge that adapter into 'model.path' first"),
    f"{MODEL}.exclude_modules": only([None], "name the modules that get an adapter in 'trainer.lora.targets'"),
    # -- optimiser
    f"{OPTIM}.lr": to("trainer.optimiser.learning_rate"),
    f"{OPTIM}.betas": to("trainer.optimiser.betas"),
    f"{OPTIM}.weight_decay": to("trainer.optimiser.weight_decay"),
    f"{OPTIM}.clip_grad": to("trainer.optimiser.max_gradient_norm"),
    f"{ACTOR}.grad_clip": to("trainer.optimiser.max_gradient_norm"),
    f"{OPTIM}.lr_warmup_steps": warmup,
    f"{OPTIM}.lr_warmup_steps_ratio": warmup_share,
    f"{OPTIM}.lr_scheduler_type": schedule,
    f"{OPTIM}.warmup_style": schedule,
    f"{OPTIM}.min_lr_ratio": to("trainer.optimiser.final_share"),
    f"{OPTIM}.num_cycles": only([0.5, None], "'trainer.optimiser.schedule' falls once"),
    f"{OPTIM}.total_training_steps": same("the number of steps is trainer.total_training_steps"),
    f"{OPTIM}.optimizer": only(["AdamW", None], "the optimiser is AdamW", "AdamW, as here"),
    f"{OPTIM}.optimizer_impl": only(["torch.optim", None], "the optimiser is AdamW", "AdamW, as here"),
    f"{OPTIM}.override_optimizer_config": only([None], "the nearest settings are in [trainer.optimiser]"),
    # -- objective
    f"{ACTOR}.ppo_mini_batch_size": mini_batch_size,
    f"{ACTOR}.ppo_epochs": to("trainer.epochs"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro_batch,
    f"{ACTOR}.ppo_micro_batch_size": only([None], "the nearest setting is 'trainer.micro_batch_tokens'"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": when(
        f"{ACTOR}.use_dynamic_bsz", to("trainer.micro_batch_tokens"), "use_dynamic_bsz is off"
    ),
    f"{ACTOR}.use_dynamic_bsz": same("micro-batches are always filled by tokens"),
    f"{ACTOR}.clip_ratio": clip_both,
    f"{ACTOR}.clip_ratio_low": to(f"{ALGORITHM}.clip_low", via=float),
    f"{ACTOR}.clip_ratio_high": to(f"{ALGORITHM}.clip_high", via=float),
    f"{ACTOR}.clip_ratio_c": dual_clip,
    f"{ACTOR}.policy_loss.loss_mode": loss_mode,
    f"{ACTOR}.loss_agg_mode": aggregation,
    f"{ACTOR}.loss_scale_factor": same("used with loss_agg_mode seq-mean-token-sum-norm"),
    f"{ACTOR}.entropy_coeff": to(f"{ALGORITHM}.entropy_coefficient", via=float),
    f"{ACTOR}.use_kl_loss": same("kl_loss_coef counts if it is on"),
    f"{ACTOR}.kl_loss_coef": when(
        f"{ACTOR}.use_kl_loss", to(f"{ALGORITHM}.kl_coefficient", via=float), "use_kl_loss is off"
    ),
    f"{ACTOR}.kl_loss_type": when(
        f"{ACTOR}.use_kl_loss",
        only(["low_var_kl", "k3", "low_var_kl+", "k3+"], "the estimate is k3 (low_var_kl)", "k3, as here"),
        "use_kl_loss is off",
    ),
    "algorithm.adv_estimator": estimator,
    "algorithm.norm_adv_by_std_in_grpo": same("decides between grpo and dr_grpo"),
    "algorithm.use_kl_in_reward": only([False, None], "the nearest setting is 'trainer.algorithm.kl_coefficient'"),
    "algorithm.kl_ctrl.*": when(
        "algorithm.use_kl_in_reward", no("the nearest setting is 'trainer.algorithm.kl_coefficient'"), "not used"
    ),
    "algorithm.kl_penalty": when("algorithm.use_kl_in_reward", no("there is no KL in the reward"), "not used"),
    "algorithm.gamma": only([1, None], "rewards are not discounted", "rewards are not discounted"),
    "algorithm.lam": only([1, None], "no critic is trained", "no critic is trained"),
    "algorithm.use_pf_ppo": only([False, None], "there is no such reweighting"),
    "algorithm.pf_ppo.*": when("algorithm.use_pf_ppo", no("there is no such reweighting"), "not used"),
    "algorithm.filter_groups.enable": lambda value, fields: (
        Mapped({"control.dynamic_sampling": int(fields.get("algorithm.filter_groups.max_num_gen_batches") or 10)})
        if value
        else Same("off, as here")
    ),
    "algorithm.filter_groups.max_num_gen_batches": same("used with filter_groups.enable"),
    "algorithm.filter_groups.metric": no("groups are compared by their reward"),
    "algorithm.rollout_correction.rollout_is": choice(
        f"{ALGORITHM}.correction",
        {None: "none", "token": "token_truncate", "sequence": "sequence_truncate"},
        "the nearest setting is 'trainer.algorithm.correction'",
    ),
    "algorithm.rollout_correction.rollout_is_threshold": when(
        "algorithm.rollout_correction.rollout_is", to(f"{ALGORITHM}.correction_high", via=float), "not used"
    ),
    "algorithm.rollout_correction.rollout_rs": only(
        [None], "the nearest values of 'trainer.algorithm.correction' are token_mask, sequence_mask and geometric_mask"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": only(
        [None], "the nearest settings are 'trainer.algorithm.correction_low' and 'correction_high'"
    ),
    "algorithm.rollout_correction.bypass_mode": same(
        "without a correction the ratio refers to the rollout's log-probs"
    ),
    "algorithm.rollout_correction.*": no("the nearest setting is 'trainer.algorithm.correction'"),
    # -- rollout
    f"{ROLLOUT}.n": to("control.group_size"),
    f"{ROLLOUT}.temperature": to("sampling.temperature", via=float),
    f"{ROLLOUT}.top_p": to("sampling.top_p", via=float),
    f"{ROLLOUT}.top_k": to("sampling.top_k", via=lambda value: max(0, int(value))),
    f"{ROLLOUT}.name": engine,
    f"{ROLLOUT}.dtype": choice("model.dtype", _DTYPES, "the nearest setting is 'model.dtype'"),
    f"{ROLLOUT}.max_model_len": to("rollout.engine.max_context"),
    f"{ROLLOUT}.max_num_seqs": to("rollout.engine.max_requests"),
    f"{ROLLOUT}.tensor_model_parallel_size": to("rollout.engine.vllm.tensor_parallel_size"),
    f"{ROLLOUT}.gpu_memory_utilization": to("rollout.engine.vllm.gpu_memory_utilization"),
    f"{ROLLOUT}.enforce_eager": to("rollout.engine.vllm.enforce_eager"),
    f"{ROLLOUT}.prompt_length": same("the same as data.max_prompt_length"),
    f"{ROLLOUT}.response_length": same("the same as data.max_response_length"),
    f"{ROLLOUT}.do_sample": only([True, None], "rollout always samples", "rollout always samples"),
    f"{ROLLOUT}.ignore_eos": only([False, None], "a response ends with the end-of-text token"),
    f"{ROLLOUT}.mode": same("requests are always served one by one"),
    f"{ROLLOUT}.calculate_log_probs": same("log-probs are always recorded"),
    f"{ROLLOUT}.enable_chunked_prefill": same("prompts are always prefilled in chunks"),
    f"{ROLLOUT}.enable_prefix_caching": same("the prompt of a group is always shared"),
    f"{ROLLOUT}.max_num_batched_tokens": no("the nearest setting is 'rollout.engine.prefill_chunk'"),
    f"{ROLLOUT}.enable_rollout_routing_replay": to("trainer.moe.replay_routing"),
    f"{ROLLOUT}.val_kwargs.temperature": greedy_evaluation,
    f"{ROLLOUT}.val_kwargs.do_sample": same("decides whether val_kwargs.temperature counts"),
    f"{ROLLOUT}.val_kwargs.n": to("evaluation.samples"),
    f"{ROLLOUT}.val_kwargs.*": only([-1, 1, 1.0, None], "evaluation uses 'sampling.top_p' and 'sampling.top_k'"),
    f"{ROLLOUT}.multi_turn.enable": only([False, None], "name the environment in 'environment.kind'"),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": to("environment.max_turns"),
    f"{ROLLOUT}.multi_turn.*": when(
        f"{ROLLOUT}.multi_turn.enable", no("the nearest settings are in [environment]"), "not used"
    ),
    f"{ROLLOUT}.engine_kwargs*": only([None], "the nearest setting is 'rollout.engine.vllm.arguments'"),
    f"{ROLLOUT}.agent.*": no("the nearest settings are 'reward.workers' and 'environment.concurrency'"),
    f"{ROLLOUT}.*": only(_OFF, _WORKERS),
    # -- asynchronous variants
    "async_training.staleness_threshold": threshold,
    "async_training.trigger_parameter_sync_step": same(
        "part of 'control.groups_per_step': weights are published each step"
    ),
    "async_training.require_batches": same("part of 'control.groups_per_step'"),
    "async_training.partial_rollout": only(
        [False, None],
        'a trajectory has one version in mode "dora"; the nearest setting is \'control.mode\' = "partial"',
    ),
    "async_training.*": no("weights are published by the store of the run"),
    "rollout.n": to("control.group_size"),
    "rollout.total_rollout_steps": lambda value, fields: Mapped(
        {"control.steps": max(1, int(value) // groups(fields))}
    ),
    "rollout.total_epochs": to("data.epochs"),
    "rollout.test_freq": positive("evaluation.every", "no evaluation"),
    "rollout.*": no(_HARDWARE),
    # -- rewards
    "custom_reward_function.path": reward_function,
    "custom_reward_function.name": same("part of 'reward.functions'"),
    "reward.custom_reward_function.path": reward_function,
    "reward.custom_reward_function.name": same("part of 'reward.functions'"),
    "*custom_reward_function.reward_kwargs*": only([None], "give the function its arguments by functools.partial"),
    "reward_model.enable": only([False, None], "call that model from a function in 'reward.functions'"),
    "reward_model.reward_manager": only(
        ["naive", None], "put it into a function of 'reward.functions'", "each response is scored alone"
    ),
    "reward_model.num_workers": to("reward.workers"),
    "reward_model.overlong_buffer.*": no("subtract the penalty in a function of 'reward.functions'"),
    "reward_model.sandbox_fusion.*": no("the nearest setting is 'reward.functions' = [\"code\"], with its own sandbox"),
    "reward_model.*": when(
        "reward_model.enable", no("call that model from a function in 'reward.functions'"), "not used"
    ),
    "reward_manager.*": only(
        ["naive", "register", "custom_reward_manager", None], "put it into a function of 'reward.functions'"
    ),
    # -- trainer
    "trainer.total_epochs": to("data.epochs"),
    "trainer.total_training_steps": to("control.steps"),
    "trainer.logger": logger,
    "trainer.project_name": same("used with trainer.logger"),
    "trainer.experiment_name": no("the name of a run is an option: dora-rl train FILE --name NAME"),
    "trainer.save_freq": positive("checkpoint.every", "a checkpoint is written after each step"),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep"),
    "trainer.test_freq": positive("evaluation.every", "no evaluation"),
    "trainer.val_before_train": only([True, None], "the first version is always evaluated", "it is always evaluated"),
    "trainer.val_only": only([False, None], "evaluate with: dora-rl eval"),
    "trainer.default_local_dir": to("out"),
    "trainer.device": choice("model.device", {"cuda": "cuda", "cpu": "cpu"}, "'model.device' is cpu, cuda or mps"),
    "trainer.nnodes": no(_HARDWARE),
    "trainer.n_gpus_per_node": no(_HARDWARE),
    "trainer.resume_mode": same("a run is resumed with: dora-rl train --resume RUN"),
    "trainer.resume_from_path": only([None], "a run is resumed with: dora-rl train --resume RUN"),
    "trainer.critic_warmup": only([0, None], "no critic is trained"),
    "trainer.balance_batch": same("tokens are always balanced over the ranks"),
    "trainer.log_val_generations": only([0, None], "the nearest setting is 'logging.samples'"),
    "trainer.*": only(_OFF, "it has no counterpart: it concerns verl's own processes and files"),
    # -- the rest
    f"{ACTOR}.fsdp_config.dtype": lambda value, _: (
        Mapped({"trainer.precision": _DTYPES[value]})
        if _DTYPES.get(value) in ("bfloat16", "float32")
        else Unmapped("'trainer.precision' is float32 or bfloat16")
    ),
    f"{ACTOR}.fsdp_config.model_dtype": only(
        ["fp32", "float32", None], "the trainer's weights are float32", "the trainer's weights are float32"
    ),
    f"{ACTOR}.fsdp_config.optimizer_offload": to("trainer.optimiser.offload"),
    f"{ACTOR}.fsdp_config.param_offload": only([False, None], "the nearest setting is 'trainer.optimiser.offload'"),
    f"{ACTOR}.policy_loss.*": of_another_loss,
    f"{ACTOR}.tau_*": of_another_loss,
    f"{ACTOR}.*": only(_OFF, _WORKERS),
    f"{MODEL}.*": only(_OFF, _WORKERS),
    "actor_rollout_ref.ref.*": same("the reference policy is computed by the trainer, like its own policy"),
    "actor_rollout_ref.*": no("it concerns verl's own processes"),
    "data.*": only(_OFF, "it concerns how verl reads its rows; the nearest settings are in [data]"),
    "critic.*": critic,
    "global_profiler.*": no("the report of a run shows where its time goes"),
    "ray_*": no("the nearest settings are in [ray]"),
    "transfer_queue.*": no("it concerns verl's own processes"),
    "hydra*": same("hydra's own"),
    "defaults*": same("hydra's own"),
    "--config*": no("convert that config file, and give these overrides as options of dora-rl train"),
}

VERL = Framework("verl", TABLE, DEFAULTS, finish)
