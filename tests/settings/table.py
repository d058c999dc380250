"""Which function reads each setting, and which test shows that it has its effect.

A row is `"dotted.key": Row("module:Class.function", "file.py::test")`:

- the key as it stands in a config file;
- the function that reads it, below `dora_rl`; if several do, the one that the effect comes from;
- the test that shows the effect, below `tests`; if none is needed, `why="..."` says why.

A new setting needs a new row; `test_table.py` finds the functions that read the key, and checks the row.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Row(NamedTuple):
    """One setting."""

    consumer: str
    proof: str = ""
    why: str = ""
    """Why no test is needed."""


Table: TypeAlias = dict[str, Row]
SECTION = "a section: its keys have rows of their own"

RUN: Table = {
    "model": Row("runtime.workers.trainer:TrainerWorker.__init__", why=SECTION),
    "model.path": Row("models.loading:load", "models/test_loading.py::test_a_folder_gives_back_what_was_saved"),
    "model.device": Row("models.loading:load", "models/test_loading.py::test_a_missing_device_is_reported"),
    "model.dtype": Row("models.loading:load", "models/test_loading.py::test_the_dtype_is_what_was_asked_for"),
    "data": Row("runtime.supervisor.run:Run._wire", why=SECTION),
    "data.source": Row("envs.row_readers:rows", "envs/test_data.py::test_every_source_gives_the_same_problems"),
    "data.params": Row("envs.row_readers:_function", "envs/test_data.py::test_every_source_gives_the_same_problems"),
    "data.prompt": Row("envs.data:_prompt", "envs/test_data.py::test_columns_can_have_other_names"),
    "data.answer": Row("envs.data:_answer", "envs/test_data.py::test_columns_can_have_other_names"),
    "data.system": Row("envs.data:_prompt", "envs/test_data.py::test_a_system_message_makes_a_chat"),
    "data.limit": Row("envs.data:load", "envs/test_data.py::test_nothing_is_read_beyond_the_limit"),
    "data.held_out": Row("envs.data:load", "envs/test_data.py::test_held_out_rows_are_the_last_and_never_trained"),
    "data.shuffle": Row(
        "envs.data:load", "settings/test_supervisor.py::test_data_settings_determine_the_order_of_prompts"
    ),
    "data.seed": Row(
        "envs.data:load", "settings/test_supervisor.py::test_data_settings_determine_the_order_of_prompts"
    ),
    "data.size": Row("envs.row_readers:_reasoning_gym", "envs/test_data.py::test_every_source_gives_the_same_problems"),
    "data.epochs": Row("envs.data:load", "settings/test_supervisor.py::test_prompts_end_after_the_configured_epochs"),
    "reward": Row("runtime.workers.reward:serve", why=SECTION),
    "reward.functions": Row(
        "envs.rewards:_resolve",
        "settings/test_supervisor.py::test_the_scorer_applies_the_configured_functions_and_weights",
    ),
    "reward.weights": Row(
        "envs.rewards:RewardScorer.__init__",
        "settings/test_supervisor.py::test_the_scorer_applies_the_configured_functions_and_weights",
    ),
    "reward.timeout_seconds": Row(
        "runtime.supervisor.reward_client:RewardClient.__init__",
        "settings/test_supervisor.py::test_reward_requests_carry_the_configured_timeout",
    ),
    "reward.workers": Row(
        "runtime.supervisor.reward_client:RewardClient.__init__",
        "settings/test_supervisor.py::test_the_configured_number_of_processes_is_started",
    ),
    "reward.concurrency": Row(
        "runtime.supervisor.reward_client:RewardClient.__init__",
        "settings/test_supervisor.py::test_a_reward_worker_receives_the_configured_number_of_requests",
    ),
    "environment": Row("runtime.workers.reward:serve", why=SECTION),
    "environment.kind": Row(
        "envs.environment:Environments.__init__",
        "runtime/test_env_sessions.py::test_turns_are_complete_also_when_a_process_is_lost",
    ),
    "environment.params": Row(
        "envs.environment:Environments.begin",
        "runtime/test_env_sessions.py::test_a_worker_steps_environments_up_to_its_concurrency_at_once",
    ),
    "environment.max_turns": Row(
        "envs.environment:Environments.begin",
        "envs/test_environment.py::test_turns_are_counted_and_the_last_has_no_observation",
    ),
    "environment.timeout_seconds": Row(
        "runtime.supervisor.supervisor:session_limits",
        "settings/test_supervisor.py::test_reward_requests_carry_the_configured_timeout",
    ),
    "environment.concurrency": Row(
        "runtime.supervisor.reward_client:RewardClient.__init__",
        "settings/test_supervisor.py::test_a_reward_worker_receives_the_configured_number_of_requests",
    ),
    "control": Row("runtime.supervisor.run:Run._wire", why=SECTION),
    "control.mode": Row(
        "orchestrator.context:Context.__init__",
        "settings/test_supervisor.py::test_mode_and_staleness_bound_limit_admission",
    ),
    "control.max_staleness": Row(
        "orchestrator.context:Context.__init__",
        "settings/test_supervisor.py::test_mode_and_staleness_bound_limit_admission",
    ),
    "control.max_staleness_cap": Row(
        "orchestrator.bound_control:BoundControl.__init__",
        "test_adaptive_bound.py::test_the_bound_never_exceeds_the_configured_cap",
    ),
    "control.groups_per_step": Row(
        "orchestrator.trainer_state:TrainerState._complete",
        "settings/test_supervisor.py::test_mode_and_staleness_bound_limit_admission",
    ),
    "control.group_size": Row(
        "orchestrator.request_scheduler:RequestScheduler.start",
        "settings/test_supervisor.py::test_a_group_has_the_configured_size",
    ),
    "control.steps": Row(
        "orchestrator.context:Context.__init__",
        "settings/test_supervisor.py::test_no_more_groups_start_than_the_steps_need",
    ),
    "control.max_response_tokens": Row(
        "runtime.supervisor.supervisor:session_limits",
        "settings/test_sampling.py::test_no_response_exceeds_the_configured_length",
    ),
    "control.min_survivors": Row(
        "orchestrator.context:Context.__init__",
        "settings/test_supervisor.py::test_a_group_with_too_few_survivors_fails",
    ),
    "control.dynamic_sampling": Row(
        "orchestrator.context:Context.__init__",
        "settings/test_supervisor.py::test_groups_without_signal_are_replaced_only_if_configured",
    ),
    "control.placement": Row(
        "orchestrator.rebalance:Rebalancer.__init__",
        "settings/test_simulation.py::test_every_setting_changes_what_is_predicted",
    ),
    "control.admission": Row(
        "orchestrator.context:Context.just_in_time",
        "settings/test_simulation.py::test_every_setting_changes_what_is_predicted",
    ),
    "control.stream": Row(
        "orchestrator.context:Context.streams",
        "settings/test_supervisor.py::test_groups_are_streamed_only_if_configured",
    ),
    "control.rebalance_seconds": Row(
        "orchestrator.orchestrator:Orchestrator._expire",
        "settings/test_simulation.py::test_every_setting_changes_what_is_predicted",
    ),
    "control.kv_reserve_tokens": Row(
        "orchestrator.admission:Admission._admission_tokens",
        "settings/test_supervisor.py::test_admission_reserves_the_configured_kv_room",
    ),
    "control.kv_headroom": Row(
        "orchestrator.admission:Admission._emptiest_slot",
        "settings/test_supervisor.py::test_admission_reserves_the_configured_kv_room",
    ),
    "control.pack_limit": Row(
        "orchestrator.rebalance:Rebalancer._facts",
        why="how tightly requests are packed on slots moves them, but changes no result; not shown by a test",
    ),
    "control.deadlines": Row("runtime.supervisor.supervisor:Supervisor._deadlines", why=SECTION),
    "control.deadlines.load": Row(
        "orchestrator.slot_assignment:SlotAssignment._load",
        "settings/test_supervisor.py::test_a_wait_ends_at_its_deadline",
    ),
    "control.deadlines.move": Row(
        "orchestrator.request_scheduler:RequestScheduler.move",
        "test_promises.py::test_promises_hold_under_random_faults",
    ),
    "control.deadlines.score": Row(
        "orchestrator.request_scheduler:RequestScheduler.generated",
        "settings/test_supervisor.py::test_a_wait_ends_at_its_deadline",
    ),
    "control.deadlines.tool": Row(
        "orchestrator.request_scheduler:RequestScheduler.parked",
        "settings/test_supervisor.py::test_a_wait_ends_at_its_deadline",
    ),
    "control.deadlines.progress": Row(
        "orchestrator.orchestrator:Orchestrator._progress_due",
        "settings/test_supervisor.py::test_a_wait_ends_at_its_deadline",
    ),
    "control.deadlines.train": Row(
        "orchestrator.trainer_state:TrainerState._enter",
        "settings/test_supervisor.py::test_a_wait_ends_at_its_deadline",
    ),
    "control.deadlines.stall": Row(
        "orchestrator.orchestrator:Orchestrator._check_for_stall",
        "settings/test_supervisor.py::test_a_wait_ends_at_its_deadline",
    ),
    "control.deadlines.heartbeat": Row(
        "runtime.supervisor.supervisor:Supervisor._maintain",
        "settings/test_supervisor.py::test_an_instance_silent_past_the_heartbeat_deadline_is_lost",
    ),
    "sampling": Row("runtime.supervisor.rollout_client:RolloutClient.__init__", why=SECTION),
    "sampling.temperature": Row(
        "runtime.supervisor.rollout_client:RolloutClient.__init__",
        "settings/test_sampling.py::test_log_probs_include_the_temperature",
    ),
    "sampling.top_p": Row(
        "runtime.supervisor.rollout_client:RolloutClient.__init__",
        "settings/test_sampling.py::test_top_p_keeps_the_smallest_set_that_reaches_it",
    ),
    "sampling.top_k": Row(
        "runtime.supervisor.rollout_client:RolloutClient.__init__",
        "settings/test_sampling.py::test_top_k_keeps_the_k_likeliest_tokens",
    ),
    "sampling.min_p": Row(
        "runtime.supervisor.rollout_client:RolloutClient.__init__",
        "settings/test_sampling.py::test_min_p_keeps_sufficiently_likely_tokens",
    ),
    "sampling.stop": Row(
        "runtime.supervisor.rollout_client:RolloutClient.__init__",
        "settings/test_sampling.py::test_a_response_ends_at_a_stop_string",
    ),
    "rollout": Row("runtime.workers.engine_factory:make_engine", why=SECTION),
    "rollout.instances": Row(
        "runtime.supervisor.scaling:Scaling._written",
        "settings/test_supervisor.py::test_the_configured_number_of_processes_is_started",
    ),
    "rollout.engine": Row("runtime.workers.engine_factory:make_engine", why=SECTION),
    "rollout.engine.kind": Row(
        "runtime.workers.engine_factory:make_engine",
        "engine/test_vllm_settings.py::test_without_vllm_a_run_says_how_to_install_it",
    ),
    "rollout.engine.slots": Row(
        "engine.engine:Engine.__init__", "settings/test_instance.py::test_an_instance_reports_its_configured_capacity"
    ),
    "rollout.engine.max_requests": Row(
        "engine.engine:Engine.spec", "settings/test_instance.py::test_an_instance_reports_its_configured_capacity"
    ),
    "rollout.engine.max_context": Row(
        "engine.engine:Engine.__init__",
        "settings/test_instance.py::test_a_response_ends_at_the_configured_context_length",
    ),
    "rollout.engine.kv_bytes": Row(
        "engine.engine:Engine.__init__", "settings/test_instance.py::test_an_instance_reports_its_configured_capacity"
    ),
    "rollout.engine.host_bytes": Row(
        "engine.scheduler:Scheduler._to_host", "engine/test_memory.py::test_recomputation_only_when_the_host_is_full"
    ),
    "rollout.engine.block_size": Row(
        "engine.kernel_choice:choose_runner",
        "settings/test_instance.py::test_an_instance_reports_its_configured_capacity",
    ),
    "rollout.engine.prefill_chunk": Row(
        "engine.scheduler:Scheduler._chunks", "settings/test_instance.py::test_prompts_are_computed_in_chunks"
    ),
    "rollout.engine.stream_every": Row(
        "engine.engine:Engine.__init__",
        "settings/test_instance.py::test_tokens_are_reported_at_the_configured_interval",
    ),
    "rollout.engine.stretch": Row(
        "engine.step_execution:StepExecutor._turn", "engine/test_schedules.py::test_a_stretch_is_several_steps"
    ),
    "rollout.engine.probe_tolerance": Row(
        "engine.engine:Engine.__init__", "engine/test_probed_loads.py::test_a_wider_tolerance_can_be_set"
    ),
    "rollout.engine.threads": Row(
        "engine.builtin:BuiltinFactory.make",
        "settings/test_instance.py::test_configured_engine_threads_override_the_supervisor",
    ),
    "rollout.engine.kernels": Row(
        "engine.kernel_choice:choose_runner", "settings/test_instance.py::test_the_configured_kernels_are_used"
    ),
    "rollout.engine.vllm": Row("engine.vllm.core:arguments", why=SECTION),
    "rollout.engine.vllm.enforce_eager": Row(
        "engine.vllm.core:arguments", "settings/test_vllm.py::test_vllm_gets_its_arguments"
    ),
    "rollout.engine.vllm.tensor_parallel_size": Row(
        "engine.vllm.core:arguments", "settings/test_vllm.py::test_vllm_gets_its_arguments"
    ),
    "rollout.engine.vllm.gpu_memory_utilization": Row(
        "engine.vllm.core:arguments", "settings/test_vllm.py::test_vllm_gets_its_arguments"
    ),
    "rollout.engine.vllm.block_size": Row(
        "engine.vllm.core:arguments", "settings/test_vllm.py::test_vllm_gets_its_arguments"
    ),
    "rollout.engine.vllm.move_kv": Row(
        "engine.vllm.core:arguments", "settings/test_vllm.py::test_vllm_gets_its_arguments"
    ),
    "rollout.engine.vllm.arguments": Row(
        "engine.vllm.core:arguments", "settings/test_vllm.py::test_vllm_gets_its_arguments"
    ),
    "rollout.engine.vllm.prove": Row(
        "engine.vllm.factory:VllmFactory.make", "settings/test_vllm.py::test_weights_are_proven_unless_told_otherwise"
    ),
    "rollout.heartbeat_seconds": Row(
        "runtime.workers.rollout:RolloutWorker.__init__",
        "settings/test_instance.py::test_an_idle_instance_reports_once_per_heartbeat",
    ),
    "trainer": Row("runtime.supervisor.trainer_client:TrainerClient.start", why=SECTION),
    "trainer.ranks": Row(
        "runtime.supervisor.trainer_client:TrainerClient.start",
        "settings/test_supervisor.py::test_the_configured_number_of_processes_is_started",
    ),
    "trainer.algorithm": Row("trainer.trainer:Trainer._loss", why=SECTION),
    "trainer.algorithm.name": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.aggregation": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.constant_length": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.clip_low": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.clip_high": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.clip_negative": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.trust_region": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.trust_region_delta": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.veto": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.correction": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.correction_low": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.correction_high": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.kl_coefficient": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.kl_ratio": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.entropy_coefficient": Row(
        "trainer.objective:micro_loss", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.algorithm.no_signal": Row(
        "trainer.open_step:OpenStep.score", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser": Row("trainer.trainer:Trainer.__init__", why=SECTION),
    "trainer.optimiser.learning_rate": Row(
        "trainer.optimiser:learning_rate", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.warmup_updates": Row(
        "trainer.optimiser:learning_rate", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.schedule": Row(
        "trainer.optimiser:learning_rate", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.total_updates": Row(
        "trainer.optimiser:learning_rate", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.final_share": Row(
        "trainer.optimiser:learning_rate", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.betas": Row(
        "trainer.optimiser:Optimiser.__init__", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.epsilon": Row(
        "trainer.optimiser:Optimiser.__init__", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.weight_decay": Row(
        "trainer.optimiser:Optimiser.__init__", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.max_gradient_norm": Row(
        "trainer.optimiser:Optimiser.update", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.ess_scaling": Row(
        "trainer.trainer:Trainer._rate_factor", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.optimiser.offload": Row(
        "trainer.optimiser:Optimiser.__init__", "settings/test_training.py::test_memory_settings_take_effect"
    ),
    "trainer.lora": Row("trainer.trainer:Trainer.__init__", why=SECTION),
    "trainer.lora.rank": Row(
        "trainer.trainable:add_adapter", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.lora.alpha": Row(
        "trainer.trainable:add_adapter", "settings/test_training.py::test_the_scale_of_an_adapter_is_alpha_over_rank"
    ),
    "trainer.lora.targets": Row(
        "trainer.trainable:add_adapter", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "trainer.moe": Row("trainer.trainer:Trainer.__init__", why=SECTION),
    "trainer.moe.replay_routing": Row(
        "runtime.supervisor.rollout_client:RolloutClient.__init__",
        "settings/test_instance.py::test_experts_are_recorded_only_for_replay",
    ),
    "trainer.moe.auxiliary_loss": Row(
        "trainer.trainer:Trainer._loss",
        "trainer/test_moe.py::test_expert_load_is_measured_and_balancing_changes_the_router_gradient",
    ),
    "trainer.micro_batch_tokens": Row(
        "trainer.trainer:Trainer._gradients", "settings/test_training.py::test_memory_settings_take_effect"
    ),
    "trainer.mini_batches": Row(
        "trainer.trainer:Trainer._updates", "settings/test_training.py::test_updates_are_counted"
    ),
    "trainer.epochs": Row("trainer.trainer:Trainer._updates", "settings/test_training.py::test_updates_are_counted"),
    "trainer.temperature": Row(
        "trainer.policy:sharded_policy",
        "settings/test_training.py::test_the_trainer_uses_the_sampling_temperature",
    ),
    "trainer.gradient_checkpointing": Row(
        "trainer.trainer:Trainer.__init__", "settings/test_training.py::test_memory_settings_take_effect"
    ),
    "trainer.measure_gap_every": Row(
        "trainer.trainer:Trainer._measure_gaps", "settings/test_training.py::test_gaps_are_measured_as_configured"
    ),
    "trainer.precision": Row(
        "trainer.trainer:Trainer._precision", "settings/test_training.py::test_another_value_gives_other_weights"
    ),
    "mismatch": Row("runtime.supervisor.mismatch:limits", why=SECTION),
    "mismatch.warn": Row(
        "runtime.supervisor.mismatch:limits",
        "runtime/test_mismatch.py::test_a_run_warns_on_the_terminal_in_the_table_and_as_a_metric",
    ),
    "mismatch.stop": Row(
        "runtime.supervisor.mismatch:limits",
        "runtime/test_mismatch.py::test_a_run_stops_before_it_publishes_and_can_be_resumed",
    ),
    "evaluation": Row("runtime.supervisor.run:Run._wire", why=SECTION),
    "evaluation.every": Row(
        "runtime.supervisor.run:Run._evaluation",
        "settings/test_supervisor.py::test_versions_are_evaluated_at_the_configured_interval",
    ),
    "evaluation.data": Row(
        "runtime.supervisor.held_out:held_out_problems",
        "settings/test_supervisor.py::test_evaluation_may_have_separate_data",
    ),
    "evaluation.samples": Row(
        "runtime.supervisor.run:Run._evaluation",
        "settings/test_sampling.py::test_evaluation_requests_use_the_evaluation_settings",
    ),
    "evaluation.temperature": Row(
        "runtime.supervisor.run:Run._evaluation",
        "settings/test_sampling.py::test_evaluation_requests_use_the_evaluation_settings",
    ),
    "evaluation.success_threshold": Row(
        "runtime.supervisor.run:Run._evaluation",
        "settings/test_supervisor.py::test_accuracy_uses_the_configured_threshold",
    ),
    "checkpoint": Row("runtime.workers.trainer:TrainerWorker._handle", why=SECTION),
    "checkpoint.every": Row(
        "runtime.workers.trainer:TrainerWorker._handle",
        "settings/test_training.py::test_checkpoints_are_written_and_kept_as_configured",
    ),
    "checkpoint.keep": Row(
        "runtime.workers.trainer:TrainerWorker._checkpoint",
        "settings/test_training.py::test_checkpoints_are_written_and_kept_as_configured",
    ),
    "logging": Row("runtime.supervisor.trackers:_tensorboard", why=SECTION),
    "logging.level": Row(
        "runtime.workers.main:run_worker", "runtime/test_logs.py::test_a_worker_logs_at_the_level_of_its_config"
    ),
    "logging.tensorboard": Row(
        "runtime.supervisor.trackers:_tensorboard",
        "settings/test_supervisor.py::test_metrics_go_to_the_configured_trackers",
    ),
    "logging.wandb": Row(
        "runtime.supervisor.trackers:_wandb", "settings/test_supervisor.py::test_metrics_go_to_the_configured_trackers"
    ),
    "logging.trackio": Row(
        "runtime.supervisor.trackers:_trackio",
        "settings/test_supervisor.py::test_metrics_go_to_the_configured_trackers",
    ),
    "logging.mlflow": Row("runtime.supervisor.trackers:_mlflow", "runtime/test_trackers.py::test_mlflow_has_the_run"),
    "logging.completions_every": Row(
        "runtime.supervisor.run:Run._wire",
        "runtime/test_trackers.py::test_completions_are_sent_every_so_many_steps",
    ),
    "logging.samples": Row(
        "runtime.supervisor.run:Run._wire",
        "settings/test_supervisor.py::test_the_configured_number_of_groups_is_written_as_samples",
    ),
    "supervision": Row("runtime.launch.process_manager:ProcessManager.lost", why=SECTION),
    "supervision.restarts": Row(
        "runtime.launch.process_manager:ProcessManager.lost",
        "settings/test_supervisor.py::test_restarts_follow_the_configured_limit_and_backoff",
    ),
    "supervision.backoff_seconds": Row(
        "runtime.launch.process_manager:ProcessManager.lost",
        "settings/test_supervisor.py::test_restarts_follow_the_configured_limit_and_backoff",
    ),
    "runtime": Row(
        "apps.train:checked", "test_cli.py::test_a_missing_ray_gives_the_install_command_before_the_run_starts"
    ),
    "ray": Row("runtime.launch.ray.init:cluster", why=SECTION),
    "ray.address": Row(
        "runtime.launch.ray.init:cluster", "settings/test_ray.py::test_the_cluster_is_the_one_that_was_named"
    ),
    "ray.instances": Row(
        "runtime.launch.ray.backend:RayBackend.capacity",
        "runtime/test_cluster.py::test_instances_follow_the_nodes_and_the_supervisor_can_be_killed",
    ),
    "ray.instance": Row("runtime.launch.ray.nodes:capacity", why=SECTION),
    "ray.instance.num_cpus": Row(
        "runtime.launch.ray.backend:RayBackend.start",
        "settings/test_ray.py::test_a_process_takes_of_the_cluster_what_it_was_told",
    ),
    "ray.instance.num_gpus": Row(
        "runtime.launch.ray.backend:RayBackend.start",
        "settings/test_ray.py::test_a_process_takes_of_the_cluster_what_it_was_told",
    ),
    "ray.instance.resources": Row(
        "runtime.launch.ray.backend:RayBackend.start",
        "settings/test_ray.py::test_a_process_takes_of_the_cluster_what_it_was_told",
    ),
    "ray.trainer": Row(
        "runtime.launch.ray.nodes:capacity",
        "runtime/test_room.py::test_ranks_and_evaluator_have_room_beside_the_instances",
    ),
    "ray.reward": Row(
        "runtime.launch.ray.init:_cpus", "settings/test_ray.py::test_a_process_takes_of_the_cluster_what_it_was_told"
    ),
    "ray.shared_folder": Row(
        "runtime.launch.ray.backend:RayBackend._group",
        "runtime/test_room.py::test_a_trainer_on_any_node_can_not_publish_to_memory",
    ),
    "seed": Row(
        "runtime.supervisor.rollout_client:RolloutClient.__init__",
        "settings/test_sampling.py::test_sampling_is_reproducible_and_depends_on_the_seed",
    ),
    "threads": Row(
        "runtime.launch.process_manager:ProcessManager.cores",
        "settings/test_supervisor.py::test_cores_are_shared_up_to_the_thread_limit",
    ),
    "weights": Row(
        "runtime.run_dir:RunDir.store",
        "settings/test_supervisor.py::test_the_run_directory_and_weights_are_where_configured",
    ),
    "out": Row(
        "runtime.run_dir:RunDir.create",
        "settings/test_supervisor.py::test_the_run_directory_and_weights_are_where_configured",
    ),
}

SIMULATION: Table = {
    "devices": Row(
        "sim.runtime:SimRuntime.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "steps": Row(
        "sim.runtime:SimRuntime.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "warmup_steps": Row(
        "sim.runtime:SimRuntime.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "seed": Row(
        "sim.runtime:SimRuntime.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "control": Row("sim.costs:Costs.__init__", why=SECTION),
    "hardware": Row("sim.costs:Costs.__init__", why=SECTION),
    "hardware.flops": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "hardware.memory_bytes": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "hardware.memory_bandwidth": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "hardware.link_bandwidth": Row(
        "sim.costs:Costs.load", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "hardware.host_bandwidth": Row(
        "sim.costs:Costs.swap", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "model": Row("sim.costs:Costs.__init__", why=SECTION),
    "model.parameters": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "model.active_parameters": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "model.shared_parameters": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "model.experts": Row(
        "sim.costs:Costs._base", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "model.experts_per_token": Row(
        "sim.costs:Costs._base", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "model.bytes_per_parameter": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "model.kv_bytes_per_token": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout": Row("sim.costs:Costs.__init__", why=SECTION),
    "rollout.devices": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.lock_step": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.slots": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.max_requests": Row(
        "sim.costs:Costs.decode", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.memory_share": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.bandwidth_efficiency": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.compute_efficiency": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.step_overhead": Row(
        "sim.costs:Costs._base", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.load_overhead": Row(
        "sim.costs:Costs.load", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "rollout.move_overhead": Row(
        "sim.costs:Costs.move", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "trainer": Row("sim.costs:Costs.train", why=SECTION),
    "trainer.utilisation": Row(
        "sim.costs:Costs.train", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "trainer.passes": Row(
        "sim.costs:Costs.train", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "trainer.fixed_seconds": Row(
        "sim.runtime:SimRuntime._apply", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "trainer.publish_seconds": Row(
        "sim.runtime:SimRuntime._publish", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload": Row("sim.costs:Costs.__init__", why=SECTION),
    "workload.trace": Row("sim.workload:Source.__init__", "settings/test_simulation.py::test_a_trace_is_drawn_from"),
    "workload.prompt_tokens": Row(
        "sim.costs:Costs.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.mean_tokens": Row(
        "sim.workload:Source._fit_mu", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.sigma": Row(
        "sim.workload:Source._fit_mu", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.group_correlation": Row(
        "sim.workload:Source._lognormal", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.turns": Row(
        "sim.workload:Source.turns", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.tool_seconds": Row(
        "sim.workload:Source.turns", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.tool_tokens": Row(
        "sim.workload:Source.turns", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.no_signal": Row(
        "sim.workload:Source.reward", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "workload.reward_seconds": Row(
        "sim.runtime:SimRuntime._score", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "layouts": Row("sim.run:simulate", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"),
    "trainer_devices": Row(
        "sim.runtime:SimRuntime.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
    "elastic_trainer_devices": Row(
        "sim.runtime:SimRuntime.__init__", "settings/test_simulation.py::test_every_setting_changes_what_is_predicted"
    ),
}

SFT: Table = {
    "epochs": Row("trainer.sft:_batches", "settings/test_sft.py::test_another_value_gives_other_weights"),
    "batch_size": Row("trainer.sft:_batches", "settings/test_sft.py::test_another_value_gives_other_weights"),
    "max_length": Row("apps.sft:sft", "test_sft.py::test_a_bad_line_is_named"),
    "seed": Row("trainer.sft:_batches", "settings/test_sft.py::test_another_value_gives_other_weights"),
    "learning_rate": Row("trainer.sft:train", "settings/test_sft.py::test_another_value_gives_other_weights"),
    "weight_decay": Row("trainer.sft:train", "settings/test_sft.py::test_another_value_gives_other_weights"),
    "lora": Row("trainer.sft:train", "settings/test_sft.py::test_another_value_gives_other_weights"),
    "micro_batch_tokens": Row("trainer.sft:train", "settings/test_sft.py::test_memory_settings_are_passed_on"),
    "gradient_checkpointing": Row("trainer.sft:train", "settings/test_sft.py::test_memory_settings_are_passed_on"),
}

SANDBOX: Table = {
    "wall_seconds": Row(
        "envs.sandbox.sandbox:Sandbox._watch", "envs/test_sandbox.py::test_code_that_does_not_end_is_ended"
    ),
    "cpu_seconds": Row(
        "envs.sandbox.sandbox:Sandbox._plan",
        "envs/test_sandbox.py::test_code_that_only_computes_is_ended_by_its_cpu_time",
    ),
    "memory_bytes": Row(
        "envs.sandbox.sandbox:Sandbox._plan",
        "settings/test_sandbox.py::test_a_limit_is_enforced_at_its_configured_value",
    ),
    "output_bytes": Row(
        "envs.sandbox.sandbox:Sandbox._read", "envs/test_sandbox.py::test_a_flood_of_output_is_cut_off"
    ),
    "disk_bytes": Row(
        "envs.sandbox.sandbox:Sandbox._excess", "envs/test_sandbox.py::test_filling_the_disk_is_cut_off_and_cleaned_up"
    ),
    "disk_entries": Row(
        "envs.sandbox.sandbox:Sandbox._excess",
        "settings/test_sandbox.py::test_a_limit_is_enforced_at_its_configured_value",
    ),
    "open_files": Row(
        "envs.sandbox.sandbox:Sandbox._plan",
        "settings/test_sandbox.py::test_a_limit_is_enforced_at_its_configured_value",
    ),
    "threads": Row(
        "envs.sandbox.sandbox:Sandbox._excess", "envs/test_sandbox.py::test_threads_can_be_started_and_are_limited"
    ),
}

TABLES: dict[str, Table] = {"RunConfig": RUN, "SimConfig": SIMULATION, "SftConfig": SFT, "SandboxLimits": SANDBOX}
