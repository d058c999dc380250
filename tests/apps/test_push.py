"""`dora-rl push`: one commit with the policy and a card that tells the truth, or one sentence and no change."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from typer.testing import CliRunner

from dora_rl import Run, UserError, __version__
from dora_rl.apps.changed_settings import changed_settings, without_folders
from dora_rl.apps.cli import app
from dora_rl.apps.model_card import hub_name
from dora_rl.apps.push import Choice, prepare
from dora_rl.apps.run_reader import policies
from dora_rl.apps.summary import summarise
from dora_rl.apps.svg_chart import Panel, draw, ticks
from dora_rl.core.config import build
from dora_rl.core.file_digests import tree_digests
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from tests.apps import hub as hubs
from tests.apps.conftest import STEPS, MadeRun
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import make_base, make_run, settings

REPO = "someone/small"


@pytest.fixture
def hub() -> Iterator[hubs.Hub]:
    with hubs.serving() as found:
        yield found


def push(hub: hubs.Hub, home: Path, *arguments: str | Path, token: str = hubs.TOKEN) -> Any:
    """The command in a process of its own: the client reads its address when it is imported."""
    command = [sys.executable, "-m", "dora_rl.apps.cli", "push", *map(str, arguments)]
    return subprocess.run(command, env=environment(hub, home, token), capture_output=True, text=True, timeout=600)


def environment(hub: hubs.Hub, home: Path, token: str = hubs.TOKEN) -> dict[str, str]:
    # Xet, the other storage protocol of the Hub, is not HTTP alone: the stand-in has only LFS.
    ours = {"HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return {**os.environ, **ours, "HF_HUB_OFFLINE": "0"}


def front_matter(card: str) -> Any:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


# -- what arrives -----------------------------------------------------------------------------------------------


def test_a_push_is_one_commit_with_a_policy_that_loads_and_a_card(
    made_run: MadeRun, hub: hubs.Hub, tmp_path: Path
) -> None:
    done = push(hub, tmp_path, made_run.folder.path, REPO, "--version", str(STEPS))
    assert done.returncode == 0, done.stderr
    repo = hub.repos[REPO]
    assert repo.commits == [("main", f"Version {STEPS} of the dora-rl run small")]
    assert f"/{REPO}/commit/" in done.stdout
    assert not repo.private
    files = repo.branches["main"]
    policy = policies(made_run.folder)[STEPS]
    assert files.keys() == {*tree_digests(policy), "README.md", "curves.svg"}
    assert all(files[name] == (policy / name).read_bytes() for name in tree_digests(policy))
    card = files["README.md"].decode()
    assert front_matter(card)["library_name"] == "transformers"
    assert 'from_pretrained("someone/small")' in card
    assert __version__ in card
    assert "**kept: all promises" in card
    assert str(made_run.folder.path.parent) not in card


def test_the_pushed_files_load(made_run: MadeRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = CliRunner().invoke(app, ["push", str(made_run.folder.path), REPO, "--dry-run", str(tmp_path / "out")])
    assert done.exit_code == 0, done.exception
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size >= len(tokenizer)
    again = CliRunner().invoke(app, ["push", str(made_run.folder.path), REPO, "--dry-run", str(tmp_path / "out")])
    assert isinstance(again.exception, UserError)
    assert "is not empty" in str(again.exception)


def test_the_card_has_the_figures_and_the_settings_of_the_run(made_run: MadeRun) -> None:
    summary = summarise(made_run.folder)
    assert summary.best is not None
    card = prepare(made_run.folder, REPO, Choice(version=summary.best[0], base_model="maker/base")).files["README.md"]
    assert isinstance(card, bytes)
    text = card.decode()
    metadata = front_matter(text)
    assert metadata["base_model"] == "maker/base"
    (result,) = metadata["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(summary.best[1], abs=1e-4)
    for age, count in summary.staleness.items():
        assert f"| {age} | {count:,} | {count / sum(summary.staleness.values()):.1%} |" in text
    assert f"the mean was {summary.mean_staleness:.2f}" in text
    assert f"highest held-out accuracy: {summary.best[1]:.1%}" in text
    told = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    assert told["control"]["max_staleness"] == 2
    assert "mode" not in told["control"], "it is the default"
    assert told["model"]["path"] == "model"
    assert "logging" not in told


def test_the_best_policy_is_pushed_unless_it_is_the_model_before_training(made_run: MadeRun, tmp_path: Path) -> None:
    shutil.copytree(made_run.folder.path, tmp_path / "small", symlinks=True)
    folder = RunDir.open(tmp_path / "small")
    newest = max(policies(folder))
    best = folder.checkpoints / "best"
    for version, pushed in ((0, newest), (newest - 1, newest - 1)):
        best.unlink(missing_ok=True)
        kept = folder.checkpoints / f"best-{version:08d}"
        shutil.copytree(policies(folder)[newest], kept / "policy", dirs_exist_ok=True)
        (kept / "version.json").write_text(json.dumps({"version": version}))
        best.symlink_to(kept.name)
        assert prepare(folder, REPO, Choice(force=True)).version == pushed


def test_the_curves_are_an_image_of_all_steps_and_evaluations(made_run: MadeRun) -> None:
    picture = prepare(made_run.folder, REPO, Choice()).files["curves.svg"]
    assert isinstance(picture, bytes)
    root = ET.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    reward, accuracy = root.iter(f"{space}polyline")
    assert len(reward.attrib["points"].split()) == STEPS
    assert len(accuracy.attrib["points"].split()) == len(Run.open(made_run.folder.path).evaluations)
    bars = [one for one in root.iter(f"{space}rect") if "fill" in one.attrib and one.attrib["width"] != "100%"]
    assert len(bars) == len(summarise(made_run.folder).staleness)


def test_the_python_api_pushes_to_a_branch_of_a_private_repository(
    made_run: MadeRun, hub: hubs.Hub, tmp_path: Path
) -> None:
    program = f"""
from dora_rl import Run
print(Run.open({str(made_run.folder.path)!r}).push({REPO!r}, private=True, revision="trial"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(hub, tmp_path), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    repo = hub.repos[REPO]
    assert repo.private
    assert [branch for branch, _ in repo.commits] == ["trial"]
    assert repo.branches["main"] == {}
    assert "model.safetensors" in repo.branches["trial"]
    assert "/commit/" in done.stdout


def test_weights_that_an_earlier_push_left_are_removed_and_other_files_stay(
    made_run: MadeRun, hub: hubs.Hub, tmp_path: Path
) -> None:
    hub.repos[REPO] = hubs.Repo(private=False)
    old = {"model-00001-of-00002.safetensors": b"a", "model.safetensors.index.json": b"b", "notes.txt": b"c"}
    hub.repos[REPO].branches["main"] = {**old, "data/kept.safetensors": b"d"}
    assert push(hub, tmp_path, made_run.folder.path, REPO).returncode == 0
    files = hub.repos[REPO].branches["main"]
    assert not old.keys() - {"notes.txt"} & files.keys()
    assert {"notes.txt", "data/kept.safetensors", "model.safetensors"} <= files.keys()
    assert len(hub.repos[REPO].commits) == 1


# -- adapters ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of one step that trains an adapter; only the newest checkpoint is kept."""
    base = make_base(tmp_path_factory.mktemp("lora"))
    tree = settings(base, steps=1)
    tree["trainer"]["lora"] = {"rank": 4}
    tree["checkpoint"] = {"keep": 1}
    host = Host()
    try:
        run = host.start(make_run(base, "lora", tree))
        assert broken(run, run.wait(), 1) == []
    finally:
        host.close()
    return RunDir.open(run.folder.path)


def test_an_adapter_is_pushed_beside_the_merged_weights_or_alone(lora: RunDir) -> None:
    both = prepare(lora, REPO, Choice(base_model="maker/base"))
    assert {
        "model.safetensors",
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
    } <= both.files.keys()
    alone = prepare(lora, REPO, Choice(adapter_only=True, base_model="maker/base"))
    assert "adapter_model.safetensors" in alone.files
    assert "model.safetensors" not in alone.files
    config, card = alone.files["adapter_config.json"], alone.files["README.md"]
    assert isinstance(config, bytes)
    assert isinstance(card, bytes)
    assert json.loads(config)["base_model_name_or_path"] == "maker/base"
    assert front_matter(card.decode())["base_model_relation"] == "adapter"
    assert 'PeftModel.from_pretrained(base, "someone/small")' in card.decode()


def test_no_file_of_an_adapter_names_a_folder_of_this_machine(lora: RunDir) -> None:
    files = prepare(lora, REPO, Choice()).files
    contents = {name: one if isinstance(one, bytes) else one.read_bytes() for name, one in files.items()}
    assert not [name for name, data in contents.items() if str(lora.base()).encode() in data]


def test_a_run_without_an_adapter_can_not_push_one(made_run: MadeRun) -> None:
    with pytest.raises(UserError, match="has no adapter to push: it trains all weights; leave out --adapter"):
        prepare(made_run.folder, REPO, Choice(adapter_only=True))


# -- refusals ---------------------------------------------------------------------------------------------------


def refused(done: Any) -> str:
    """The one sentence of a refused command."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    return str(line)


def test_a_wrong_token_is_one_sentence_and_changes_nothing(made_run: MadeRun, hub: hubs.Hub, tmp_path: Path) -> None:
    line = refused(push(hub, tmp_path, made_run.folder.path, REPO, token="hf_wrong"))
    assert "the Hub refused the token (401)" in line
    assert "nothing was changed on the Hub" in line
    assert not hub.repos


@pytest.mark.parametrize(
    ("part", "code", "complaint"),
    [
        ("PUT /large/", 400, "failed (400): refused by the test"),
        ("/commit/", 403, "may not write to 'someone/small' (403)"),
    ],
)
def test_a_push_that_fails_says_what_is_on_the_hub(
    made_run: MadeRun, hub: hubs.Hub, tmp_path: Path, part: str, code: int, complaint: str
) -> None:
    hub.refuse[part] = code
    line = refused(push(hub, tmp_path, made_run.folder.path, REPO))
    assert complaint in line
    assert "the new repository 'someone/small' is still empty" in line
    assert hub.repos[REPO].commits == []
    assert hub.repos[REPO].branches == {"main": {}}


def test_a_private_push_never_goes_to_a_public_repository(made_run: MadeRun, hub: hubs.Hub, tmp_path: Path) -> None:
    hub.repos[REPO] = hubs.Repo(private=False)
    line = refused(push(hub, tmp_path, made_run.folder.path, REPO, "--private"))
    assert "'someone/small' is public: leave out --private" in line
    assert not hub.large
    assert hub.repos[REPO].commits == []


def test_without_a_server_there_is_one_sentence(made_run: MadeRun, tmp_path: Path) -> None:
    with hubs.serving() as gone:
        pass
    assert "the push to 'someone/small' failed" in refused(push(gone, tmp_path, made_run.folder.path, REPO))


def test_a_run_whose_audit_fails_is_refused_unless_forced(made_run: MadeRun, tmp_path: Path) -> None:
    shutil.copytree(made_run.folder.path, tmp_path / "small", symlinks=True)
    folder = RunDir.open(tmp_path / "small")
    connection = sqlite3.connect(folder.ledger)
    (name,) = connection.execute("SELECT max(step) FROM groups").fetchone()
    connection.execute("UPDATE groups SET version = version + 1 WHERE step = ? AND version < step", (name,))
    connection.execute("DELETE FROM groups WHERE id = (SELECT max(id) FROM groups WHERE step IS NOT NULL)")
    connection.commit()
    connection.close()
    with pytest.raises(UserError, match=r"the audit of .* fails, so it is not pushed: .*--force"):
        prepare(folder, REPO, Choice())
    card = prepare(folder, REPO, Choice(force=True)).files["README.md"]
    assert isinstance(card, bytes)
    assert b"**The audit of this run failed, and the policy was pushed with `--force`: see below.**" in card
    assert b"**broken: " in card
    good = prepare(made_run.folder, REPO, Choice(force=True)).files["README.md"]
    assert isinstance(good, bytes)
    assert b"--force" not in good


@pytest.mark.parametrize(
    ("repo", "choice", "complaint"),
    [
        ("a b", Choice(), "'a b' can't be the name of a repository: write USER/NAME"),
        (REPO, Choice(version=77), "has no checkpoint of version 77; it has:"),
    ],
)
def test_a_mistake_is_named_before_anything_is_sent(
    made_run: MadeRun, repo: str, choice: Choice, complaint: str
) -> None:
    with pytest.raises(UserError) as caught:
        prepare(made_run.folder, repo, choice)
    assert complaint in str(caught.value)


# -- parts ------------------------------------------------------------------------------------------------------


def test_only_settings_that_differ_are_listed_and_sections_that_are_on() -> None:
    tree: dict[str, Any] = {
        "model": {"path": "/home/me/models/small"},
        "data": {"source": "datasets:/data/mine:train"},
        "reward": {"functions": ["/code/rewards.py:score", "exact"]},
        "control": {"groups_per_step": 4, "group_size": 8, "max_response_tokens": 64, "mode": "dora"},
        "rollout": {"engine": {"slots": 2}},
        "trainer": {"lora": {}},
        "out": "/home/me/runs",
        "logging": {"wandb": "secret-project"},
    }
    assert changed_settings(build(RunConfig, tree)) == {
        "model": {"path": "small"},
        "data": {"source": "datasets:mine:train"},
        "reward": {"functions": ["rewards.py:score", "exact"]},
        "control": {"groups_per_step": 4, "group_size": 8, "max_response_tokens": 64},
        "rollout": {"engine": {"slots": 2}},
        "trainer": {"lora": {}},
    }
    assert without_folders("/no_think") == "/no_think"


def test_a_folder_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maker" / "base").mkdir(parents=True)
    assert hub_name("maker/other") == "maker/other"
    assert [hub_name(one) for one in ("maker/base", "/a/b", "weights.gguf", "a/b/c")] == [None] * 4


def test_charts_of_few_or_odd_values_are_drawn() -> None:
    for curve in ([], [(1.0, 0.0)], [(1.0, -3.0), (2.0, -1.0)], [(0.0, float("nan")), (1.0, 5.0)]):
        root = ET.fromstring(draw([Panel("a <b>", "x", curve), Panel("c", "y", bars={})]))
        assert "nan" not in ET.tostring(root, encoding="unicode")
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3.0, 110.0, 5) == [50.0, 100.0]
