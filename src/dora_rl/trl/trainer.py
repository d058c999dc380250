"""`GRPOTrainer` with TRL's signature, on top of `dora_rl.train`.

Invariants:
- whatever has no equivalent is refused in the constructor, before a run exists;
- a run is an ordinary run directory below `args.output_dir`, and each command of dora-rl works on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dora_rl.api.config import DoraConfig
from dora_rl.api.run import Run
from dora_rl.api.training import train
from dora_rl.core.errors import UserError
from dora_rl.trl import callbacks as callback_bridge
from dora_rl.trl.arguments import (
    difference,
    refuse_arguments,
    refuse_launchers,
    reward_functions,
    row_count,
    short_name,
    torch_device,
)
from dora_rl.trl.config import GRPOConfig
from dora_rl.trl.history import History
from dora_rl.trl.lora import lora_settings
from dora_rl.trl.mapping import Situation, translate
from dora_rl.trl.policies import evaluate_run, given_tokenizer, model_config, newest_run, save_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
    from transformers.trainer_utils import TrainOutput


class GRPOTrainer:
    """Train with GRPO, as TRL's class of this name, in a run of dora-rl."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        refuse_arguments(locals())
        refuse_launchers()
        if args is None:
            args = GRPOConfig(f"{short_name(model)}-GRPO")
        if not isinstance(args, GRPOConfig):
            raise UserError(
                f"`args` must be a GRPOConfig of dora_rl.trl, not {type(args).__module__}: change its import"
            )
        self.args = args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.reward_funcs = reward_functions(reward_funcs)
        self.run: Run | None = None
        """The run, once `train` was called."""
        self._given = model
        self._processing_class = processing_class
        self._callbacks = [callback_bridge.check(one) for one in callbacks or ()]
        self._loaded: tuple[object, Any] | None = None
        settings = model_config(model)
        text = settings.get_text_config() if settings is not None else None
        declared = getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0.0
        tree, self._schedule = translate(
            args,
            Situation(
                rows=row_count(train_dataset, args.own_settings.get("data", {})),
                evaluates=eval_dataset is not None,
                device=torch_device(),
                expert_balance=declared or 0.0,
            ),
        )
        if peft_config is not None:
            lora = lora_settings(peft_config, getattr(text, "model_type", None))
            tree = {**tree, "trainer": {"lora": lora, **tree["trainer"]}}
        self.config = DoraConfig(**tree)
        """The settings of the run."""
        self.state, self._history = self._new_state()
        self._bridge().call("on_init_end")

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train to the end, or until a callback stops the run.

        `resume_from_checkpoint` is the directory of a run, or True for the newest one in `args.output_dir`. A resumed
        run goes on with the model, rows and functions that it was started with.
        """
        from transformers.trainer_utils import TrainOutput

        resumed = self._resumed(resume_from_checkpoint)
        self.state, self._history = self._new_state()
        if resumed is not None:
            self._replay(resumed)
        bridge = self._bridge()
        own = [one for one in self._callbacks if not _of_transformers(one)]
        bridge.call("on_train_begin")
        quiet = bool(self.args.disable_tqdm)
        if resumed is not None:
            self.run = train(resume=resumed.path, callbacks=[bridge, *own], quiet=quiet)
        else:
            evaluates = bool(self.config.settings.get("evaluation", {}).get("every"))
            self.run = train(
                self._given,
                self.reward_funcs or None,
                self._training_rows(),
                config=self.config,
                tokenizer=given_tokenizer(self._given, self._processing_class),
                eval_dataset=self._columns(self.eval_dataset) if evaluates else None,
                callbacks=[bridge, *own],
                name=self.args.run_name,
                quiet=quiet,
            )
        bridge.call("on_train_end")
        losses = [one["loss"] for one in self.run.metrics if "loss" in one]
        loss = sum(losses) / len(losses) if losses else 0.0
        return TrainOutput(self.state.global_step, loss, {"train_loss": loss})

    def _resumed(self, given: str | Path | bool | None) -> Run | None:
        """The run to resume; it must have been started with the settings of this trainer."""
        if given is None or given is False:
            return None
        run = newest_run(Path(self.config.settings["out"])) if given is True else Run.open(given)
        changed = difference(self.config.settings, run._folder.settings())
        if changed is not None:
            name, ours, theirs = changed
            raise UserError(
                f"a run is resumed with the settings that it was started with: '{name}' is {ours!r} here and "
                f"{theirs!r} in {run.path} (`dora-rl train --resume RUN --control.steps N` extends a run)"
            )
        return run

    def _replay(self, run: Run) -> None:
        """Rebuild the state from the steps before the run was stopped."""
        bridge = callback_bridge.Bridge(self.args, self.state, [], self._history, None)
        evaluations = {int(one["version"]): one for one in run.evaluations}
        heads = ("step", "version", "time", "evaluation")
        for record in [{"step": -1}, *run.metrics]:
            if record["step"] >= 0:
                bridge.on_step(record["step"], {name: value for name, value in record.items() if name not in heads})
            found = evaluations.get(record["step"] + 1)
            if found is not None:
                bridge.on_eval(record["step"] + 1, {name: value for name, value in found.items() if name not in heads})

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate the newest policy of the run on `eval_dataset`, or on that of the constructor."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise UserError("there is no `eval_dataset`: pass one to `evaluate` or to GRPOTrainer")
        if self.run is None:
            raise UserError(
                "`evaluate` evaluates the policy of a run: call `train` first; with an 'eval_strategy', "
                "the model as it was given is evaluated too"
            )
        version, metrics = evaluate_run(self.run, self._columns(rows))
        named = {name.replace("eval_", f"{metric_key_prefix}_", 1): value for name, value in metrics.items()}
        self._bridge().evaluated(version, named)
        return named

    # -- results ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel:
        """The policy, loaded when it is asked for: the newest of the run, or before `train` the model as given."""
        from transformers import AutoModelForCausalLM

        path = self.run.policy_path if self.run is not None else None
        if path is None and not isinstance(self._given, str | Path):
            return self._given
        where = str(path or self._given)
        if self._loaded is None or self._loaded[0] != where:
            self._loaded = (where, AutoModelForCausalLM.from_pretrained(where))
        return cast("PreTrainedModel", self._loaded[1])

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        from dora_rl.models.loading import ModelConfig, load_tokenizer

        if self._processing_class is None and isinstance(self._given, str | Path):
            self._processing_class = load_tokenizer(ModelConfig(path=str(self._given)))
        return self._processing_class

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the newest policy and the tokenizer to a folder, by default `args.output_dir`; of LoRA, the adapter."""
        if self.run is None or self.run.policy_path is None:
            raise UserError("there is no policy to save yet: call `train` first")
        save_policy(self.run.policy_path, Path(output_dir or self.config.settings["out"]))

    def save_state(self) -> None:
        """Write `trainer_state.json` to `args.output_dir`."""
        self.state.save_to_json(str(Path(self.config.settings["out"]) / "trainer_state.json"))

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        """Refused: `dora-rl push` does it."""
        where = "RUN" if self.run is None else str(self.run.path)
        raise UserError(f"GRPOTrainer does not upload: use `dora-rl push {where} REPO`")

    def is_world_process_zero(self) -> bool:
        """A script has one process."""
        return True

    is_local_process_zero = is_world_process_zero

    def add_callback(self, callback: Any) -> None:
        """Add a callback before `train`."""
        self._callbacks.append(callback_bridge.check(callback))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _new_state(self) -> tuple[TrainerState, History]:
        from transformers import TrainerState

        epochs = math.ceil(self.args.num_train_epochs)
        state = TrainerState(max_steps=self._schedule.updates, num_train_epochs=epochs)
        return state, History(self.args, self._schedule)

    def _bridge(self) -> callback_bridge.Bridge:
        theirs = [one for one in self._callbacks if _of_transformers(one)]
        return callback_bridge.Bridge(self.args, self.state, theirs, self._history, self._processing_class)

    def _training_rows(self) -> Any:
        """All rows, or of a dataset without a length as many as the run needs: it may be endless."""
        rows = self.train_dataset
        if isinstance(rows, Iterable) and not isinstance(rows, Sized):
            rows = itertools.islice(rows, self._schedule.steps * self._schedule.groups_per_step)
        return self._columns(rows)

    def _columns(self, rows: Any) -> Any:
        """The rows with the columns that reward functions get."""
        if isinstance(rows, str | Path | Mapping) or not isinstance(rows, Iterable):
            return rows
        if not self.args.remove_unused_columns:
            return rows
        column = self.config.settings.get("data", {}).get("prompt", "prompt")
        return ({name: value for name, value in row.items() if name == column} for row in rows)


def _of_transformers(callback: object) -> bool:
    from transformers import TrainerCallback

    return isinstance(callback, TrainerCallback)
