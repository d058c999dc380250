"""`dora-rl convert`: the printed config is valid and means the same, and no field of the file is left unmentioned."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dora_rl.apps.cli import app
from dora_rl.apps.config_options import settings
from dora_rl.apps.conversion.prime_rl import PRIME_RL
from dora_rl.apps.conversion.reading import read_shell, read_yaml
from dora_rl.apps.conversion.translation import Framework, flatten, outcome_of, translate
from dora_rl.apps.conversion.verl import VERL
from dora_rl.core.config import build
from dora_rl.core.errors import UserError
from dora_rl.runtime.config import RunConfig
from tests.runtime.making import make_base

SCRIPT = """\
#!/bin/bash
# A run on grade-school problems.
set -euo pipefail
export TOKENIZERS_PARALLELISM=false
MODEL=${MODEL:-BASE/model}
GROUPS=32 MINI=8
DATA="BASE"
args="unused"

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$DATA/train.jsonl" \\
    data.val_files=['BASE/test.jsonl'] \\
    data.train_batch_size=${GROUPS} data.max_prompt_length=16 data.max_response_length=24 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \\
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$MINI \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.temperature=0.9 \\
    actor_rollout_ref.rollout.top_k=-1 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4 \\
    trainer.logger='["console", "tensorboard"]' \\
    trainer.total_training_steps=20 trainer.test_freq=5 trainer.save_freq=10 \\
    trainer.n_gpus_per_node=8 trainer.experiment_name="run-$UNKNOWN_NAME" \\
    trainer.shiny_new_field=3 $@
"""

ASYNC = """\
hydra:
  searchpath: [file://verl/trainer/config]
defaults: [ppo_trainer, _self_]
async_training:
  staleness_threshold: 0.5
  trigger_parameter_sync_step: 4
  require_batches: 2
  partial_rollout: true
data:
  train_files: [a.parquet, b.parquet]
  max_response_length: 64
  prompt_key: question
actor_rollout_ref:
  hybrid_engine: false
  model:
    path: some/model
    lora_rank: 32
    lora_alpha: 64
    use_shm: ${oc.select:data.use_shm,false}
  actor:
    ppo_mini_batch_size: 16
    loss_agg_mode: seq-mean-token-sum-norm
    policy_loss:
      loss_mode: gspo
    optim: {lr: 1e-5, weight_decay: 0.1}
    strategy: fsdp2
  rollout:
    n: ${rollout.n}
    name: sglang
algorithm:
  adv_estimator: grpo
  rollout_correction: {rollout_is: token, rollout_is_threshold: 3.0}
custom_reward_function: {path: score.py, name: compute}
rollout: {n: 8, nnodes: 2, total_rollout_steps: 12800}
trainer:
  project_name: mine
  logger: [console, wandb, swanlab]
  default_local_dir: out/${trainer.project_name}
"""

PRIME = """\
max_steps = 40
seq_len = 48
output_dir = "outputs/digits"

[model]
name = "BASE/model"

[ckpt]
interval = 20
keep_last = 3

[monitors.wandb]
project = "digits"
name = "first"

[deployment]
num_train_gpus = 1
num_infer_gpus = 4

[trainer.optim]
lr = 2e-5
max_norm = 0.5
betas1 = 0.85

[trainer.scheduler]
type = "cosine"
warmup_steps = 4
min_lr = 2e-6

[trainer.loss]
dppo_mask_low = 0.1
dppo_mask_high = 0.3
kl_tau = 0.0

[trainer.model]
attn = "sdpa"
[trainer.model.lora]
rank = 8

[orchestrator]
batch_size = 32
group_size = 8
max_off_policy_steps = 4
strange_key = "x"

[orchestrator.train.sampling]
temperature = 0.8
max_completion_tokens = 24
extra_body = { top_k = 20, repetition_penalty = 1.1 }

[[orchestrator.train.source]]
name = "digits"
[orchestrator.train.source.env.taskset]
id = "digit-sums"

[[orchestrator.train.source]]
name = "more"
[orchestrator.train.source.env.taskset]
id = "more-sums"

[orchestrator.eval]
interval = 10
num_examples = 4

[inference.vllm]
tensor_parallel_size = 2
"""


def converted(*files: Path, env: dict[str, str] | None = None) -> tuple[str, dict[str, Any]]:
    """What is printed, and its settings by their dotted names."""
    done = CliRunner().invoke(app, ["convert", *map(str, files)], env=env)
    assert done.exit_code == 0, done.exception
    return done.stdout, dict(flatten(tomllib.loads(done.stdout)))


def written(folder: Path, name: str, text: str, base: str = "") -> Path:
    path = folder / name
    path.write_text(text.replace("BASE", base))
    return path


# -- what it means ----------------------------------------------------------------------------------------------


def test_a_launch_script_of_verl(tmp_path: Path) -> None:
    text, found = converted(written(tmp_path, "run.sh", SCRIPT, "/job"))
    expected = {
        "model.path": "/job/model",
        "data.source": "/job/train.jsonl",
        "evaluation.data.source": "/job/test.jsonl",
        "control.mode": "sync",
        "control.groups_per_step": 32,
        "control.group_size": 4,
        "control.max_response_tokens": 24,
        "control.steps": 20,
        "rollout.engine.max_context": 40,
        "trainer.mini_batches": 4,
        "trainer.micro_batch_tokens": 4 * 40,
        "trainer.algorithm.name": "grpo",
        "trainer.algorithm.aggregation": "token_mean",
        "trainer.algorithm.clip_low": 0.2,
        "trainer.algorithm.clip_high": 0.28,
        "trainer.algorithm.kl_coefficient": 0.002,
        "trainer.optimiser.learning_rate": 3e-6,
        "trainer.optimiser.schedule": "cosine",
        "trainer.optimiser.total_updates": 80,
        "trainer.optimiser.warmup_updates": 8,
        "trainer.optimiser.betas": [0.9, 0.999],
        "sampling.temperature": 0.9,
        "sampling.top_k": 0,
        "evaluation.every": 5,
        "checkpoint.every": 10,
        "logging.tensorboard": True,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert "logging.wandb" not in found
    lines = text.splitlines()
    assert any(re.fullmatch(r"groups_per_step = 32 +# data.train_batch_size", line) for line in lines)
    assert any(re.fullmatch(r"clip_low = 0.2 +# default of actor_rollout_ref.actor.clip_ratio", line) for line in lines)
    unmapped = text.partition("# Not mapped:")[2].partition("# Needs no setting:")[0]
    assert "trainer.shiny_new_field = 3" in unmapped
    assert "for vLLM: pip install 'dora-rl[vllm]'" in unmapped
    assert 'trainer.experiment_name = "run-$UNKNOWN_NAME": the value contains a variable' in unmapped
    assert "engine_kwargs.vllm.swap_space = 4: the nearest setting is 'rollout.engine.vllm.arguments'" in unmapped


def test_variables_come_from_the_script_or_else_from_the_environment(tmp_path: Path) -> None:
    script = written(tmp_path, "run.sh", SCRIPT, "/job")
    _, found = converted(script, env={"MODEL": "/other", "GROUPS": "999"})
    assert found["model.path"] == "/other"
    assert found["control.groups_per_step"] == 32


def test_an_asynchronous_config_of_verl(tmp_path: Path) -> None:
    text, found = converted(written(tmp_path, "run.yaml", ASYNC))
    expected = {
        "control.mode": "dora",
        "control.max_staleness": 1,
        "control.groups_per_step": 16 * 2 * 4,
        "control.group_size": 8,
        "control.steps": 100,
        "trainer.mini_batches": 8,
        "trainer.algorithm.name": "gspo",
        "trainer.algorithm.aggregation": "sequence_mean",
        "trainer.algorithm.correction": "token_truncate",
        "trainer.algorithm.correction_high": 3.0,
        "trainer.lora.rank": 32,
        "trainer.lora.alpha": 64,
        "trainer.optimiser.weight_decay": 0.1,
        "data.source": "a.parquet",
        "data.prompt": "question",
        "reward.functions": ["score.py:compute"],
        "logging.wandb": "mine",
        "out": "out/mine",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert "there is no tracker 'swanlab'" in text
    assert "data.train_files: a run has one source: join the other 1 to it" in text
    assert 'async_training.partial_rollout = true: a trajectory has one version in mode "dora"' in text


def test_a_config_of_prime_rl(tmp_path: Path) -> None:
    text, found = converted(written(tmp_path, "rl.toml", PRIME, "/job"))
    expected = {
        "model.path": "/job/model",
        "control.steps": 40,
        "control.groups_per_step": 4,
        "control.group_size": 8,
        "control.max_staleness": 4,
        "control.max_response_tokens": 24,
        "rollout.engine.max_context": 48,
        "rollout.instances": 2,
        "trainer.algorithm.name": "dr_grpo",
        "trainer.algorithm.aggregation": "token_mean",
        "trainer.algorithm.trust_region": "binary_tv",
        "trainer.algorithm.trust_region_delta": 0.1,
        "trainer.algorithm.no_signal": "skip",
        "trainer.optimiser.learning_rate": 2e-5,
        "trainer.optimiser.betas": [0.85, 0.999],
        "trainer.optimiser.max_gradient_norm": 0.5,
        "trainer.optimiser.schedule": "cosine",
        "trainer.optimiser.warmup_updates": 4,
        "trainer.optimiser.final_share": pytest.approx(0.1),
        "trainer.lora.rank": 8,
        "sampling.temperature": 0.8,
        "sampling.top_k": 20,
        "checkpoint.keep": 3,
        "evaluation.every": 10,
        "data.held_out": 4,
        "data.source": "digit-sums.jsonl",
        "logging.wandb": "digits",
        "out": "outputs/digits",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert "control.mode" not in found, "the default: dora"
    assert "prime-rl drops rollouts beyond this; dora-rl finishes them in time" in text
    assert "extra_body.repetition_penalty = 1.1: the nearest settings are in [sampling]" in text
    assert 'orchestrator.train.source.1.env.taskset.id = "more-sums"' in text


def test_the_parts_of_prime_rl_may_be_files_of_their_own(tmp_path: Path) -> None:
    orchestrator = written(tmp_path, "orch.toml", "batch_size = 32\ngroup_size = 8\nseq_len = 512\n[train]\n")
    trainer = written(tmp_path, "train.toml", "max_steps = 7\n[optim]\nlr = 1e-4\n")
    _, found = converted(orchestrator, trainer)
    assert (found["control.groups_per_step"], found["control.steps"]) == (4, 7)
    assert found["trainer.optimiser.learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"algorithm.norm_adv_by_std_in_grpo": False}, {"trainer.algorithm.name": "dr_grpo"}),
        ({"algorithm.adv_estimator": "rloo"}, {"trainer.algorithm.name": "rloo"}),
        ({"trainer.total_epochs": 3}, {"data.epochs": 3}),
        ({"algorithm.filter_groups.enable": True}, {"control.dynamic_sampling": 10}),
        ({"main": "verl.one_step_off_policy.main_ppo"}, {"control.mode": "one_step_off"}),
        ({"async_training.staleness_threshold": 0}, {"control.max_staleness": 0}),
        ({"actor_rollout_ref.rollout.val_kwargs.do_sample": True}, {"evaluation.temperature": 0.0}),
        (
            {
                "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
                "data.max_response_length": 77,
            },
            {"trainer.algorithm.aggregation": "constant_length", "trainer.algorithm.constant_length": 77},
        ),
        (
            {
                "actor_rollout_ref.actor.use_dynamic_bsz": True,
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 9000,
            },
            {"trainer.micro_batch_tokens": 9000},
        ),
    ],
    ids=str,
)
def test_fields_of_verl_that_depend_on_others(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    found = translate(VERL, {"algorithm.adv_estimator": "grpo", **fields})
    assert {key: found.lines[key].value for key in settings} == settings


def test_a_default_that_is_lost_is_named() -> None:
    assert [one.field for one in translate(VERL, {}).unmapped] == ["default of algorithm.adv_estimator"]
    assert [one.field for one in translate(PRIME_RL, {}).unmapped] == ["default of trainer.loss.kl_tau"]


# -- a config that can be used ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [("run.sh", SCRIPT), ("rl.toml", PRIME)])
def test_the_printed_config_passes_a_dry_run(tmp_path: Path, name: str, text: str) -> None:
    base = make_base(tmp_path)
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 9)]
    for file in ("train.jsonl", "test.jsonl", "digit-sums.jsonl"):
        (base / file).write_text("\n".join(map(json.dumps, rows)))
    text = text.replace("[monitors.wandb]\nproject", "[monitors.wandb]\nentity")  # needs a package
    config = base / "run.toml"
    config.write_text(converted(written(base, name, text, str(base)))[0])
    done = CliRunner().invoke(app, ["train", str(config), "--dry-run", "--out", str(base / "runs")])
    assert done.exit_code == 0, done.exception
    assert tomllib.loads(done.stdout)["control"]["group_size"] in (4, 8)


# -- nothing is ignored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [("run.sh", SCRIPT), ("run.yaml", ASYNC), ("rl.toml", PRIME)])
def test_every_field_of_a_file_is_in_the_output(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, text, "/job")
    output, _ = converted(path)
    read = {".sh": read_shell, ".yaml": read_yaml}
    fields = read[path.suffix](path) if path.suffix in read else dict(flatten(tomllib.loads(path.read_text())))
    assert len(fields) > 20
    told = {one for line in output.splitlines() for one in re.findall(r"[^\s,:]+", line.partition("#")[2])}
    assert fields.keys() - told == set()


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 70), st.floats(0, 5), st.text(max_size=8), st.just([]))


@pytest.mark.parametrize("name", ["verl", "prime-rl"])
@given(data=st.data())
def test_whatever_the_values_each_field_has_an_outcome(name: str, data: st.DataObject) -> None:
    framework = {"verl": VERL, "prime-rl": PRIME_RL}[name]
    names = st.sampled_from([*(one.replace("*", "thing") for one in framework.table), "unheard.of", "new_field"])
    fields = data.draw(st.dictionaries(names, VALUES, max_size=8))
    found = translate(framework, fields)
    origins = {name for line in found.lines.values() for name in line.origin.split(", ")}
    assert fields.keys() <= origins | {one.field for one in [*found.unmapped, *found.same]}


@pytest.mark.parametrize("framework", [VERL, PRIME_RL], ids=lambda one: one.name)
def test_tables_name_settings_that_exist(framework: Framework) -> None:
    known = {one.key for one in settings(RunConfig)}
    sections = {key.partition(".")[0] for key in known}
    for name in framework.table:
        for value in (None, True, False, 0, 3, 0.5, "odd", [], ["odd"]):
            field = name.replace("*", "thing")
            outcome = outcome_of(framework, field, {**framework.defaults, field: value})
            keys = list(getattr(outcome, "settings", {}))
            keys += re.findall(r"'([a-z_]+(?:\.[a-z_]+)+)'", getattr(outcome, "reason", ""))
            ours = [key for key in keys if key.partition(".")[0] in sections and ".params" not in key]
            assert set(ours) <= known, name


# -- the pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "framework", "file"), [("from-verl.md", VERL, "run.sh"), ("from-prime-rl.md", PRIME_RL, "rl.toml")]
)
def test_the_pages_show_what_the_command_prints(tmp_path: Path, page: str, framework: Framework, file: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    theirs, ours = re.findall(r"```(?:bash|toml)\n(.*?)```", text, re.DOTALL)
    _, found = converted(written(tmp_path, file, theirs))
    shown = dict(flatten(tomllib.loads(ours)))
    assert {key: found.get(key) for key in shown} == shown
    known = {one.key for one in settings(RunConfig)}
    rows = re.findall(r"^\| `([^`]+)` \|(.*?)\|", text, re.MULTILINE)
    assert len(rows) > 10
    for field, right in rows:
        assert field in framework.table, field
        assert set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", right)) <= known, right


# -- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.sh", "echo hello\n", "has no command that starts verl"),
        ("a.yaml", "a: [1\n", "is not valid YAML"),
        ("a.yaml", "- 1\n", "is not a config file"),
        ("a.toml", "a = \n", "is not valid TOML"),
        ("a.toml", "max_steps = 3\n", "'control.groups_per_step' is missing: complete it by hand"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    done = CliRunner().invoke(app, ["convert", str(written(tmp_path, name, text))])
    assert isinstance(done.exception, UserError)
    assert complaint in str(done.exception)


def test_files_that_can_not_be_read_together_are_refused(tmp_path: Path) -> None:
    files = [written(tmp_path, "a.yaml", ASYNC), written(tmp_path, "b.toml", PRIME)]
    for arguments, complaint in ((files, "different frameworks"), ([tmp_path / "no.yaml"], "cannot read")):
        done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        assert isinstance(done.exception, UserError)
        assert complaint in str(done.exception)


def test_the_result_is_a_config(tmp_path: Path) -> None:
    text, _ = converted(written(tmp_path, "run.yaml", ASYNC))
    build(RunConfig, tomllib.loads(text))
