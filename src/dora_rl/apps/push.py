"""`dora-rl push`: uploads a run's policy to the Hugging Face Hub, with a model card.

Invariants:
- everything that is pushed goes into one commit, so that a push that fails leaves the repository as it was (a new
  repository stays empty, and the message says so). `HfApi.upload_folder` may make several commits;
- a run whose audit fails is refused, or its card says so;
- with `--private`, nothing is uploaded to a repository that is public;
- weight files that an earlier push has left, and that this one does not have, are deleted in the same commit: a loader
  would mix them with the new ones.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from dora_rl.apps import run_reader
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from dora_rl.core.types import Version
    from dora_rl.runtime.run_dir import RunDir

_CARD = "README.md"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", "adapter_config.json")
_ADAPTER = "adapter"


class Upload(NamedTuple):
    """What would be pushed."""

    files: dict[str, Path | bytes]
    """By their path in the repository."""
    version: Version
    message: str
    """The message of the commit."""


class Choice(NamedTuple):
    """Which policy is pushed, and how it is described."""

    version: Version | None = None
    """None: the best one that is kept, or else the newest; version 0, the model before training, only if asked for."""
    adapter_only: bool = False
    base_model: str | None = None
    """Name on the hub of the model that training started from; None: that of the config, if it is one."""
    force: bool = False
    """Whether a run whose audit fails is pushed."""


def push(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub: USER/NAME; it is created if it is missing.")],
    private: Annotated[bool, typer.Option("--private", help="Use a private repository only.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; it is created if it is missing.")] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Version of the run; default: the best that is kept, or else the newest.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Push only the LoRA adapter.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="Name on the Hub of the base model, if the run has it from a folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Push a run whose audit fails; its card says so.")] = False,
    dry_run: Annotated[Path | None, typer.Option(metavar="DIR", help="Only write the files to this folder.")] = None,
) -> None:
    """Push a run's policy to the Hugging Face Hub, with a model card."""
    from dora_rl.runtime.run_dir import RunDir

    upload = prepare(RunDir.open(run), repo, Choice(version, adapter, base_model, force))
    if dry_run is not None:
        write(upload, dry_run)
        text = f"wrote {len(upload.files)} files of version {upload.version} to {dry_run}"
    else:
        text = f"pushed version {upload.version}: {send(upload, repo, private=private, revision=revision)}"
    Console(soft_wrap=True).print(text, highlight=False, markup=False)


def prepare(folder: RunDir, repo: str, choice: Choice) -> Upload:
    """What is pushed of a run; nothing is written or sent."""
    _need_hub(repo)
    from dora_rl.apps.audit import audited
    from dora_rl.apps.model_card import CURVES, CardFacts, card, curves, hub_name
    from dora_rl.apps.summary import summarise

    version, policy = _policy(folder, choice.version)
    found = audited(folder)
    if found.problems and not choice.force:
        raise UserError(
            f"the audit of {folder.path} fails, so it is not pushed: {found.problems[0]}; `dora-rl audit` shows all, "
            "and --force pushes it with a card that says so"
        )
    config, summary, metrics = folder.read(), summarise(folder), run_reader.read_metrics(folder)
    base_model = choice.base_model or hub_name(config.model.path)
    adapter = _adapter(folder, version)
    if choice.adapter_only and adapter is None:
        why = "it trains all weights" if config.trainer.lora is None else f"no checkpoint of version {version} is kept"
        raise UserError(f"{folder.path} has no adapter to push: {why}; leave out --adapter")
    files: dict[str, Path | bytes] = {} if choice.adapter_only else dict(_below(policy, ""))
    if adapter is not None:
        prefix = "" if choice.adapter_only else f"{_ADAPTER}/"
        files |= dict(_below(adapter, prefix))
        files[f"{prefix}adapter_config.json"] = _adapter_config(adapter, base_model)
    facts = CardFacts(
        repo=repo,
        config=config,
        metrics=metrics,
        summary=summary,
        audit=found,
        version=version,
        base_model=base_model,
        merged=not choice.adapter_only,
        adapter=adapter is not None,
    )
    files |= {_CARD: card(facts).encode(), CURVES: curves(metrics, summary).encode()}
    return Upload(files, version, f"Version {version} of the dora-rl run {summary.name}")


def write(upload: Upload, target: Path) -> None:
    """Write the files to a folder, which must be empty or missing."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UserError(f"{target} is not empty: name another folder for --dry-run")
        for name, content in upload.files.items():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, place)
            else:
                place.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error


def send(upload: Upload, repo: str, *, private: bool, revision: str | None) -> str:
    """Push in one commit, and return the address of the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(library_name="dora-rl")
    if get_token() is None:
        raise UserError("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN to a token that can write")
    state = "nothing was changed on the Hub"
    try:
        existed = api.repo_exists(repo)
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and existed and not api.model_info(repo).private:
            raise UserError(f"'{repo}' is public: leave out --private, or name another repository")
        state = f"no file of '{repo}' was changed" if existed else f"the new repository '{repo}' is still empty"
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        old = [name for name in api.list_repo_files(repo, revision=revision) if name not in upload.files]
        operations: list[Any] = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in upload.files.items()
        ]
        operations += [CommitOperationDelete(name) for name in old if _is_weights(name)]
        done = api.create_commit(repo, operations, commit_message=upload.message, revision=revision)
    except UserError:
        raise
    except Exception as error:  # of the HTTP library, of the Hub's client, and of the storage behind it
        raise UserError(f"{_complaint(error, repo)}; {state}") from error
    return str(done.commit_url)


# -- inside -----------------------------------------------------------------------------------------------------


def _need_hub(repo: str) -> None:
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError as error:
        raise UserError("this command requires huggingface_hub: pip install 'dora-rl[train]'") from error
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"'{repo}' can't be the name of a repository: write USER/NAME") from None


def _policy(folder: RunDir, version: Version | None) -> tuple[Version, Path]:
    """The policy to push: the one asked for, the best that is kept, or the newest."""
    from dora_rl.runtime.checkpoint_manifest import best_version

    found = run_reader.policies(folder)
    if not found:
        raise UserError(f"{folder.path} has no checkpoint yet: there is no policy to push")
    best = best_version(folder.checkpoints)
    default = best if best and best in found else max(found)  # version 0 is the model before training
    chosen = default if version is None else version
    if chosen not in found:
        have = ", ".join(map(str, sorted(found)))
        raise UserError(f"{folder.path} has no checkpoint of version {chosen}; it has: {have}")
    return chosen, found[chosen]


def _adapter(folder: RunDir, version: Version) -> Path | None:
    """The adapter of a version, if there is one and its checkpoint is kept."""
    checkpoints = sorted(folder.checkpoints.glob(f"version-{version:08d}.*/{_ADAPTER}"))
    return checkpoints[-1] if checkpoints else None


def _below(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """The files of a folder by their path in the repository; the card is ours."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _CARD:
            yield f"{prefix}{path.relative_to(folder).as_posix()}", path.resolve()


def _adapter_config(adapter: Path, base_model: str | None) -> bytes:
    """`adapter_config.json`, with a base model that others can load instead of a folder of this machine."""
    from dora_rl.apps.changed_settings import without_folders

    document = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    document["base_model_name_or_path"] = base_model or without_folders(document.get("base_model_name_or_path"))
    return json.dumps(document, indent=2).encode()


def _is_weights(name: str) -> bool:
    folder, _, _ = name.rpartition("/")
    return folder in ("", _ADAPTER) and name.endswith(_WEIGHTS)


def _complaint(error: Exception, repo: str) -> str:
    """What the Hub refused, in one sentence without its end."""
    cause: BaseException = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status == 401:
        return "the Hub refused the token (401): run `hf auth login`, or set HF_TOKEN to a token that can write"
    if status == 403:
        return f"the token may not write to '{repo}' (403): use one that can, or name another repository"
    text = getattr(cause, "server_message", None) or str(cause).strip() or type(cause).__name__
    answer = "" if status is None else f" ({status})"
    return f"the push to '{repo}' failed{answer}: {text.splitlines()[0].rstrip('.:')}"
