"""What a program passes to `train` as objects: written to the `inputs` folder of the run, and named as in a config.

The processes of a run, now and after any restart, read only these files; nothing is passed to them in memory. A
function that they can import goes by its import path, and any other one by `envs.pickled_code`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError, UserError
from dora_rl.envs import pickled_code
from dora_rl.envs.config import DataConfig
from dora_rl.envs.data import plain, problem
from dora_rl.envs.row_readers import Row
from dora_rl.models.loading import ModelConfig, load_tokenizer

# -- functions --------------------------------------------------------------------------------------------------


def code_names(given: Iterable[object], folder: Path, argument: str) -> list[str]:
    """The names of functions or classes as a config has them; those that can't be imported are stored in `folder`."""
    names: list[str | None] = []
    several = list(given)
    for one in several:
        if isinstance(one, str):
            names.append(_located(one))
        elif callable(one):
            names.append(_import_name(one))
        else:
            raise UserError(f"`{argument}` must be functions or their names, not {type(one).__name__}")
    # The name that metrics have; those that are stored get one that no other has.
    taken = {name.rpartition(":")[2] for name in names if name is not None}
    found = []
    for one, name in zip(several, names, strict=True):
        if name is None:
            short = _short_name(one, taken)
            taken.add(short)
            name = f"{_stored(one, folder, argument)}:{short}"
        found.append(name)
    return found


def _import_name(code: object) -> str | None:
    """The name under which a worker finds this very object; None if it would not find it."""
    module_name, qualified = getattr(code, "__module__", None), getattr(code, "__qualname__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if module is None or not isinstance(qualified, str) or module_name == "__main__" or "<" in qualified:
        return None
    found: object = module
    for part in qualified.split("."):
        found = getattr(found, part, None)
    file = getattr(module, "__file__", None)
    if found is not code or not isinstance(file, str):
        return None
    assert module_name is not None
    if _imports(module_name, file):
        return f"{module_name}:{qualified}"
    # A module beside the script, which is not the working directory; a module of a package needs its package.
    return f"{Path(file).resolve()}:{qualified}" if Path(file).name == f"{module_name}.py" else None


def _imports(name: str, file: str) -> bool:
    """Whether a worker that imports a module of this name gets this file."""
    where: list[str] | None = worker_path(str(Path.cwd()), os.environ.get("PYTHONPATH", ""))
    origin: str | None = None
    for part in name.split("."):
        spec = None if where is None else PathFinder.find_spec(part, where)
        if spec is None:
            return False
        origin = spec.origin
        where = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return origin is not None and Path(origin).exists() and Path(origin).samefile(file)


@functools.lru_cache(maxsize=4)
def worker_path(folder: str, python_path: str) -> list[str]:
    """Where a new process of this interpreter looks for modules: a script adds its own folder, and a program may add
    others, that its workers do not have."""
    program = "import json, sys; sys.stdout.write(json.dumps(sys.path))"
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": python_path},
    )
    return [entry or folder for entry in json.loads(done.stdout)]


def _stored(code: object, folder: Path, argument: str) -> Path:
    try:
        return pickled_code.store(code, folder).resolve()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"`{argument}`: {_short_name(code, set())} can't be stored for the workers ({error}): define it in a module"
        ) from error


def _short_name(code: object, taken: set[str]) -> str:
    """A name for metrics, different from those that are taken."""
    given = getattr(code, "__name__", None) or type(code).__name__
    stem = "".join(letter if letter.isalnum() or letter == "_" else "" for letter in given) or "function"
    names = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _located(name: str) -> str:
    """A name that a program passes: a file in it is relative to the working directory, not to a config file."""
    file, colon, rest = name.rpartition(":") if not Path(name).is_file() else (name, "", "")
    return f"{Path(file).resolve()}{colon}{rest}" if Path(file).is_file() else name


# -- rows -------------------------------------------------------------------------------------------------------


def data_source(given: object, file: Path, columns: Mapping[str, Any], argument: str) -> str:
    """The source that a config names: a string as it is, rows in a new file. `columns` are settings of the data."""
    if isinstance(given, str | Path):
        return _located(str(given))
    if isinstance(given, Mapping):
        raise UserError(f"`{argument}` is a mapping: pass one split of it, for instance {argument}=dataset['train']")
    if not isinstance(given, Iterable):
        raise UserError(f"`{argument}` must be rows with the column 'prompt', not {type(given).__name__}")
    config = build(DataConfig, {**columns, "source": argument}, argument)
    count = 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as lines:
        for count, value in enumerate(itertools.islice(given, config.limit), start=1):
            problem(Row(value, f"{argument}, row {count}"), count - 1, config)  # raises if it can't be used
            lines.write(msgspec.json.encode(plain(value)) + b"\n")
    if not count:
        raise ConfigError(f"`{argument}` has no rows")
    return str(file.resolve())


# -- models -----------------------------------------------------------------------------------------------------


def model_path(model: object, tokenizer: object, base: Path, folder: Path) -> str:
    """The path or hub name of a model; a module, or a model with another tokenizer, is put into `folder`."""
    if isinstance(model, str | Path):
        local = base / Path(model).expanduser()
        path = str(local.resolve()) if local.exists() else str(model)  # a name on the hub, or a path that is refused
        return path if tokenizer is None else _with_tokenizer(path, tokenizer, folder)
    if not hasattr(model, "save_pretrained"):
        raise UserError(f"`model` must be a path, a hub name or a model of transformers, not {type(model).__name__}")
    if hasattr(model, "peft_config"):
        raise UserError("`model` has an adapter: pass model.merge_and_unload(), and set 'trainer.lora' for a new one")
    if tokenizer is None:
        raise UserError("a model in memory has no tokenizer: pass `tokenizer` too")
    folder.mkdir(parents=True)
    _quiet_transformers()
    model.save_pretrained(folder)  # as safetensors, which is all that transformers 5 writes
    _save_tokenizer(tokenizer, folder)
    return str(folder.resolve())


def _with_tokenizer(path: str, tokenizer: object, folder: Path) -> str:
    """A folder with the files of a local model and another tokenizer."""
    if not Path(path).is_dir():
        raise UserError(
            f"`tokenizer` needs a model in a folder or in memory, and '{path}' is neither: download it first"
        )
    folder.mkdir(parents=True)
    _save_tokenizer(tokenizer, folder)
    for file in Path(path).iterdir():
        if file.is_file() and not file.name.startswith(_TOKENIZER_FILES) and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return str(folder.resolve())


_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def _save_tokenizer(tokenizer: object, folder: Path) -> None:
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(ModelConfig(path=str(tokenizer)))
    if not hasattr(tokenizer, "save_pretrained"):
        raise UserError(f"`tokenizer` must be a path, a hub name or a tokenizer, not {type(tokenizer).__name__}")
    tokenizer.save_pretrained(folder)


def _quiet_transformers() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
