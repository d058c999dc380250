"""`dora_rl.train`: a run from a Python program.

The supervisor of the run is in the calling process, as with `dora-rl train`, and uses the same functions. What is
passed as an object is written to the run directory first (`inputs`); from there on nothing distinguishes the run from
one that was started with a config file, so it can also be resumed on the command line. A run that is refused leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from dora_rl.api.callbacks import Callbacks
from dora_rl.api.config import DoraConfig
from dora_rl.api.inputs import code_names, data_source, model_path
from dora_rl.api.run import Run
from dora_rl.apps.train import Ready, checked, conclude, discarding, drive_run, need_engine
from dora_rl.core.config import merge
from dora_rl.core.errors import UserError
from dora_rl.runtime.packages import need_packages
from dora_rl.runtime.preflight import check_out
from dora_rl.runtime.resume import change, changed
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dora_rl.runtime.config import RunConfig

RewardFunction: TypeAlias = str | Callable[..., Any]
Rows: TypeAlias = str | Path | Iterable[Mapping[str, Any]]


def train(
    model: str | Path | PreTrainedModel | None = None,
    reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
    train_dataset: Rows | None = None,
    *,
    config: DoraConfig | Mapping[str, Any] | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    eval_dataset: Rows | None = None,
    environment: str | Callable[..., Any] | None = None,
    callbacks: Iterable[object] = (),
    out: str | Path | None = None,
    name: str | None = None,
    resume: str | Path | None = None,
    quiet: bool = False,
) -> Run:
    """Train a model with reinforcement learning, and return the run when it ends.

    Arguments take the place of what the config says.

    - `model`: a folder with safetensors, a name on the hub, or a model of `transformers` in memory, which is saved to
      the run directory and stays as it is;
    - `tokenizer`: that of a model in memory, or one that takes the place of a folder's own;
    - `reward_funcs`: what a response is worth: functions with the signatures of TRL, verl or `f(prompt, completion,
      answer)`, from any module, script or notebook, or names as in `reward.functions`; the reward is their sum,
      weighted by `reward.weights`;
    - `train_dataset`, `eval_dataset`: rows with the column `prompt` (a text or messages) and any others, which the
      functions get by name: a `datasets.Dataset`, any other iterable of mappings, or a source as in `data.source`;
    - `environment`: a class for trajectories of several turns, or its name as in `environment.kind`;
    - `callbacks`: objects with any of the methods of `Callback`, called in this process;
    - `out`, `name`: the folder for runs and the name of the run in it;
    - `config`: the settings, as a `DoraConfig` or as a mapping of its keywords;
    - `resume`: the directory of a run that was stopped. It goes on with what it was started with, so that only
      `callbacks`, `quiet` and `config` can be given with it; `config` has the settings that change, and they are those
      that `dora-rl train --resume` can change: `{"control.steps": 200}`, `{"rollout.instances": 2}`;
    - `quiet`: print nothing.

    A mistake raises `UserError` with one sentence that says what to change. An interrupt (Ctrl-C) stops the run after
    what is in progress, then raises `KeyboardInterrupt`; a second one does not wait. In both cases, as after a callback
    has ended the run, `resume` goes on where it stopped.
    """
    if not isinstance(config, DoraConfig | Mapping | None):
        raise UserError(f"`config` must be a DoraConfig or a mapping of settings, not {type(config).__name__}")
    console = Console(file=io.StringIO(), quiet=True) if quiet else Console()
    observer = Callbacks(callbacks)
    given = {
        "model": model,
        "reward_funcs": reward_funcs,
        "train_dataset": train_dataset,
        "tokenizer": tokenizer,
        "eval_dataset": eval_dataset,
        "environment": environment,
        "out": out,
        "name": name,
    }
    if resume is not None:
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise UserError(f"a run is resumed with what it was started with: leave out `{extra[0]}`")
        return _resume(RunDir.open(resume), config, console, observer)
    settings = config if isinstance(config, DoraConfig) else DoraConfig(**config or {})
    settings = settings if out is None else settings.replace(out=str(out))
    with _new_folder(settings, name) as folder:
        resolved = settings.resolve(_supplied(folder, settings, given))
        _check_callbacks(resolved, observer)
        with checked(resolved, settings.base, trial=True, notify=_notify(console)) as ready:
            folder.begin(resolved, settings.base)
            with discarding(folder):
                return _run(folder, console, observer, ready)


def _resume(
    folder: RunDir, config: DoraConfig | Mapping[str, Any] | None, console: Console, observer: Callbacks
) -> Run:
    before = folder.read()
    need_engine(before)
    need_packages()
    settings = _changes(config) if isinstance(config, DoraConfig) else config or {}
    _check_callbacks(changed(before, settings).config, observer)
    return _run(folder, console, observer, Ready(), bound=change(folder, settings))


def _changes(config: DoraConfig) -> dict[str, Any]:
    """The settings of a config as a run has them: the path of a model in a folder is absolute."""
    settings = config.settings
    path = settings.get("model", {}).get("path")
    return settings if path is None else merge(settings, {"model.path": model_path(path, None, config.base, Path())})


def _run(folder: RunDir, console: Console, observer: Callbacks, ready: Ready, *, bound: int | None = None) -> Run:
    """Run to the end, or until a callback or the user stops it."""
    aborted = False

    def abort() -> None:
        nonlocal aborted
        if not aborted:  # only once: the processes of the run are ended before this process goes on
            aborted = True
            raise KeyboardInterrupt

    asked = observer.observe if observer else None
    finished = drive_run(folder, console, bound=bound, ready=ready, abort=abort, observe=asked)
    if observer.error is not None:
        raise observer.error
    if not finished and not observer.stopped:
        raise KeyboardInterrupt(f"the run was stopped; go on with dora_rl.train(resume={str(folder.path)!r})")
    conclude(folder, console)
    return Run(folder)


@contextlib.contextmanager
def _new_folder(settings: DoraConfig, name: str | None) -> Iterator[RunDir]:
    """The directory of a new run; it is removed if the run can't begin."""
    parent = Path(settings.settings.get("out", "runs"))
    RunDir.check_name(name)
    check_out(parent)
    folder = RunDir.reserve(parent, name)
    try:
        yield folder
    finally:
        if not folder.config.exists():
            shutil.rmtree(folder.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                parent.rmdir()  # only if it is empty


def _supplied(folder: RunDir, settings: DoraConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the arguments stand for."""
    supplied: dict[str, Any] = {}
    model = given["model"] if given["model"] is not None else settings.settings.get("model", {}).get("path")
    if model is not None:
        base = settings.base if given["model"] is None else Path.cwd()
        supplied["model.path"] = model_path(model, given["tokenizer"], base, folder.inputs / "model")
    functions = given["reward_funcs"]
    if functions is not None:
        several = [functions] if isinstance(functions, str) or callable(functions) else functions
        if not isinstance(several, Sequence):
            raise UserError(f"`reward_funcs` must be a function or a list of them, not {type(several).__name__}")
        supplied["reward.functions"] = code_names(several, folder.inputs, "reward_funcs")
    if given["environment"] is not None:
        supplied["environment.kind"] = code_names([given["environment"]], folder.inputs, "environment")[0]
    data = settings.settings.get("data", {})
    if given["train_dataset"] is not None:
        source = data_source(given["train_dataset"], folder.inputs / "train.jsonl", data, "train_dataset")
        supplied["data.source"] = source
    if given["eval_dataset"] is not None:
        if not settings.settings.get("evaluation", {}).get("every"):
            raise UserError("`eval_dataset` is not used while 'evaluation.every' is 0: set it in the config")
        columns = {key: value for key, value in data.items() if key in ("prompt", "answer", "system")}
        columns |= settings.settings["evaluation"].get("data") or {}
        source = data_source(given["eval_dataset"], folder.inputs / "eval.jsonl", columns, "eval_dataset")
        supplied["evaluation.data"] = {**columns, "source": source}
    return supplied


def _check_callbacks(config: RunConfig, observer: Callbacks) -> None:
    if observer and config.runtime == "ray":
        raise UserError("callbacks need 'runtime' = \"local\": on a cluster the supervisor is in another process")


def _notify(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
