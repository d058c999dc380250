"""The command line: settings as options, quick help, log levels and generated config files."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from transformers import MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

from dora_rl import __version__
from dora_rl.apps.cli import COMMANDS, app, load
from dora_rl.apps.config_options import listing, sentence, settings, split
from dora_rl.apps.evaluate import Response
from dora_rl.apps.init import EXAMPLES, short
from dora_rl.apps.log_level import LEVELS
from dora_rl.core.config import build, override
from dora_rl.core.errors import ConfigError, UserError
from dora_rl.runtime import logs
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from tests.apps.conftest import MadeRun
from tests.runtime import making

OPTIONS = {"--resume": True, "--name": True, "--dry-run": False, "--help": False}


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "100"})


def test_a_config_is_checked_without_torch() -> None:
    program = """
import sys
from dora_rl.apps.cli import app, load
for name in ("init", "train", "runs", "report", "audit", "scale"):
    load(name)
from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.runtime import logs
from dora_rl.runtime.config import RunConfig
import dora_rl.runtime.preflight
tree = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}, "reward": {"functions": ["exact"]},
        "control": {"groups_per_step": 1, "group_size": 2, "max_response_tokens": 8},
        "trainer": {"algorithm": {"name": "gspo"}}}
build(RunConfig, tree)
try:
    build(RunConfig, {**tree, "seed": -1})
except ConfigError:
    print([name for name in ("torch", "transformers", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_imports_no_command() -> None:
    program = """
import sys
from dora_rl.apps.cli import app
try:
    app(["--help"])
except SystemExit:
    pass
print([name for name in sys.modules if name.startswith(("dora_rl.apps.", "pydantic", "numpy"))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "['dora_rl.apps.cli']", done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_agrees_with_their_help(name: str) -> None:
    function = load(name).callback
    assert COMMANDS[name].about == sentence(inspect.getdoc(function) or "")


def test_the_version_is_an_option_and_a_command() -> None:
    assert run("--version").output == run("version").output == f"{__version__}\n"


# -- settings as options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rest", "found"),
    [
        ("run.toml --control.max_staleness 2", "run.toml", ["control.max_staleness=2"]),
        ("--control.max_staleness 2 run.toml", "run.toml", ["control.max_staleness=2"]),
        ("--seed 3 --dry-run run.toml", "--dry-run run.toml", ["seed=3"]),
        ("--resume RUN --rollout.instances 4", "--resume RUN", ["rollout.instances=4"]),
        ("--rollout.instances=4 --resume=RUN", "--resume=RUN", ["rollout.instances=4"]),
        ("--evaluation.success_threshold -1 run.toml", "run.toml", ["evaluation.success_threshold=-1"]),
        ("--logging.tensorboard FALSE run.toml", "run.toml", ["logging.tensorboard=false"]),
        ("--data.params.count 5 run.toml", "run.toml", ["data.params.count=5"]),
        ("--trainer.lora {} run.toml", "run.toml", ["trainer.lora={}"]),
        ("--out 2026 run.toml", "run.toml", ['out="2026"']),
        ("--data.system 'a' run.toml", "run.toml", ["data.system='a'"]),
        ("--name --odd run.toml", "--name --odd run.toml", []),
    ],
)
def test_settings_may_stand_anywhere_on_the_line(arguments: str, rest: str, found: list[str]) -> None:
    assert split(arguments.split(), OPTIONS, RunConfig) == (rest.split(), found)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--control.max_stalenes 2", "'--control.max_stalenes', did you mean '--control.max_staleness'?"),
        ("--max_staleness 2", "did you mean '--control.max_staleness'?"),
        ("--learning_rate 2", "did you mean '--trainer.optimiser.learning_rate'?"),
        ("--resum RUN", "did you mean '--resume'?"),
        ("--xyzzy 2", "lists them"),
        ("--seed", "'--seed' has no value"),
        ("--seed --dry-run", "'--seed' has no value"),
        ("--logging.tensorboard run.toml", "'--logging.tensorboard' must be true or false"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(arguments: str, complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        split(arguments.split(), OPTIONS, RunConfig)
    assert complaint in str(raised.value)


def test_every_listed_setting_is_accepted_as_an_option() -> None:
    """Giving the listed default of a setting as an option changes nothing."""
    tree = override({}, [f"{key}={json.dumps(value)}" for key, value in EXAMPLES.items() if key.count(".") == 1])
    for one in settings(RunConfig):
        if one.kind == "section" or one.default in ("required", "not set") or one.key.startswith("evaluation.data."):
            continue
        (assignment,) = split([f"--{one.key}", one.default], OPTIONS, RunConfig)[1]
        if one.key not in EXAMPLES and not one.key.startswith("trainer.lora."):
            assert build(RunConfig, override(tree, [assignment])) == build(RunConfig, tree), one.key


def test_the_help_lists_every_setting() -> None:
    shown = run("train", "--help").output
    assert listing(RunConfig) in shown
    for one in settings(RunConfig):
        assert (f"[{one.key}] " if one.kind == "section" else f"--{one.key} {one.kind} ") in shown
    assert "--control.mode sync|one_step_off|partial|dora" in shown
    assert "--no-trial" in shown


def test_a_run_is_resumed_with_other_settings(made_run: MadeRun, tmp_path: Path) -> None:
    shutil.copytree(made_run.folder.path, tmp_path / "copy")
    done = run("train", "--resume", tmp_path / "copy", "--rollout.instances", "3")
    assert done.exit_code == 0, done.output
    assert RunDir.open(tmp_path / "copy").read().rollout.instances == 3
    refused = run("train", "--resume", tmp_path / "copy", "--trainer.optimiser.learning_rate", "1")
    assert isinstance(refused.exception, UserError)


def test_the_quickstart_takes_settings_and_is_resumed_like_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("quickstart", "--dry-run", "--no-trial", "--control.max_staleness", "1", "--out", "other")
    assert done.exit_code == 0, done.exception
    printed = build(RunConfig, tomllib.loads(done.stdout))
    assert (printed.control.max_staleness, printed.out) == (1, "other")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="resumed like any other: dora-rl train --resume runs/x"):
        raise run("quickstart", "--resume", "runs/x").exception


# -- logging ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [None, "debug", "INFO", "error"])
def test_the_log_level_of_a_command_is_an_option(
    level: str | None, made_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def respond(*_: object) -> list[Response]:
        for name in LEVELS:
            logging.getLogger("dora_rl.test").log(getattr(logging, name.upper()), "message of level %s", name)
        return [Response(0, 1, 1.0)]

    monkeypatch.setattr("dora_rl.apps.evaluate.respond", respond)
    options = [] if level is None else ["--log-level", level]
    try:
        done = run("eval", made_run.folder.path, "--json", tmp_path / "result.json", *options)
    finally:
        logs.close()
    assert done.exit_code == 0, done.output
    least = LEVELS.index("warning" if level is None else level.lower())
    assert [name for name in LEVELS if f"message of level {name}" in done.stderr] == list(LEVELS[least:])


@pytest.mark.parametrize("command", ["train", "eval", "generate", "sft"])
def test_an_unknown_log_level_is_refused(command: str) -> None:
    with pytest.raises(UserError, match="'--log-level' must be one of debug, info, warning, error, not 'loud'"):
        raise run(command, "x", "--log-level", "loud").exception


def test_the_log_level_of_a_run_is_kept_in_its_config_and_its_messages_go_to_its_log(
    made_run: MadeRun, tmp_path: Path
) -> None:
    shutil.copytree(made_run.folder.path, tmp_path / "copy")
    done = run("train", "--resume", tmp_path / "copy", "--log-level", "debug")
    assert done.exit_code == 0, done.output
    folder = RunDir.open(tmp_path / "copy")
    assert folder.read().logging.level == "debug"
    assert " dora_rl." in (folder.logs / "supervisor.log").read_text()
    assert "DEBUG" not in done.output


# -- init -------------------------------------------------------------------------------------------------------


def test_the_short_config_has_only_the_examples() -> None:
    text = short(RunConfig, EXAMPLES)
    written = tomllib.loads(text)
    assert {f"{section}.{key}" for section in written for key in written[section]} == {
        key for key in EXAMPLES if key.count(".") == 1
    }
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) < 35


@pytest.mark.parametrize("full", [[], ["--full"]], ids=["short", "full"])
def test_a_generated_config_is_accepted(
    made_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    assert run("init", file, *full).exit_code == 0
    model = ("--model.path", made_run.config.parent / "model", "--rollout.engine.max_context", "64")
    missing = run("train", file, "--dry-run", *model)
    assert "problems.jsonl: No such file" in str(missing.exception)
    rows = [json.dumps({"prompt": "one two", "answer": "three"})] * 65
    (tmp_path / "problems.jsonl").write_text("\n".join(rows))
    done = run("train", *model, file, "--dry-run", "--control.max_response_tokens", "32")
    assert done.exit_code == 0, done.exception
    printed = build(RunConfig, tomllib.loads(done.stdout))
    assert printed.control.max_response_tokens == 32
    assert printed.data.held_out == 64
    assert not Path("runs").exists()
    with pytest.raises(UserError, match="already exists"):
        raise run("init", file).exception


def test_a_wrong_value_is_reported_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(short(RunConfig, EXAMPLES))
    for given, complaint in (("--seed=-1", "'seed'"), ("--control.mode=dorra", "'control.mode'")):
        wrong = run("train", tmp_path / "run.toml", given)
        assert isinstance(wrong.exception, ConfigError)
        assert complaint in str(wrong.exception)


def test_a_model_that_the_engine_refuses_leaves_no_run_directory(tmp_path: Path) -> None:
    """The refusal comes from another process, after the run directory was created."""
    base = making.make_base(tmp_path)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "state_size": 4,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    MambaForCausalLM(MambaConfig(vocab_size=15, **sizes)).save_pretrained(tmp_path / "model")
    (base / "refused.toml").write_text(tomli_w.dumps(making.settings(base)))
    command = [sys.executable, "-m", "dora_rl.apps.cli", "train", str(base / "refused.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "MambaForCausalLM can't be used for rollout" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []
