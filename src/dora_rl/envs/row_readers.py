"""Reads rows one by one from every kind of source, each with its position for error messages.

Nothing is read beyond the rows that are consumed, so that `limit` also bounds a large file or an endless generator.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dora_rl.core.errors import DataError, UserError
from dora_rl.envs.config import DataConfig
from dora_rl.envs.user_code import named_object, one_line


class Row(NamedTuple):
    """One row as it was read, unchecked."""

    value: Any
    where: str


def rows(config: DataConfig, folder: Path) -> Iterator[Row]:
    """All rows of a source, in the order of the source."""
    kind, _, rest = config.source.partition(":")
    if kind == "datasets":
        return _datasets(rest, config, folder)
    if kind == "reasoning_gym":
        return _reasoning_gym(rest, config)
    suffix = Path(config.source).suffix.lower()
    if suffix in _READERS:
        return _READERS[suffix](folder / config.source)
    if ":" in config.source:
        return _function(config, folder)
    raise DataError(
        f"data source '{config.source}' is unknown: give a .jsonl, .json or .parquet file, datasets:NAME, "
        "reasoning_gym:NAME or FILE.py:function"
    )


def _jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield Row(_json(line, where), where)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _json_file(path: Path) -> Iterator[Row]:
    """A JSON list, or JSON lines in a file called .json."""
    try:
        with path.open("rb") as file:
            listed = file.read(4096).lstrip()[:1] == b"["
        data = path.read_bytes() if listed else b""
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if not listed:
        yield from _jsonl(path)
        return
    for number, value in enumerate(_json(data, str(path)), 1):
        yield Row(value, f"{path}, row {number}")


def _json(data: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    _need("pyarrow", "parquet files need pyarrow: pip install 'dora-rl[train]'")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    if not path.is_file():
        raise DataError(f"cannot read {path}: there is no such file")
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(value, f"{path}, row {number}")
    except (ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {one_line(error)}") from error


_READERS = {".jsonl": _jsonl, ".json": _json_file, ".parquet": _parquet}


def _datasets(name: str, config: DataConfig, folder: Path) -> Iterator[Row]:
    _need("datasets", "datasets:NAME needs the datasets package: pip install 'dora-rl[train]'")
    name, _, split = name.partition(":")
    try:
        found = _dataset(name, split or "train", config.params, folder)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"cannot load the dataset '{name}': {one_line(error)}") from error
    return _counted(found, config.source)


def _dataset(name: str, split: str, params: dict[str, Any], folder: Path) -> Any:
    """A dataset from the hub, or from a local folder that holds the output of `save_to_disk` or data files."""
    import datasets

    local = folder / name
    if not local.is_dir():
        return datasets.load_dataset(name, split=split, **params)
    if (local / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(local))
        if split not in splits:
            raise DataError(f"{local} has no split '{split}': it has {', '.join(splits)}")
        return splits[split]
    if (local / "state.json").is_file():
        return datasets.load_from_disk(str(local))
    return datasets.load_dataset(str(local), split=split, **params)


def _reasoning_gym(name: str, config: DataConfig) -> Iterator[Row]:
    """Generated problems; each row includes what its score is computed from."""
    _need("reasoning_gym", "reasoning_gym:NAME needs reasoning-gym: pip install 'dora-rl[tasks]'")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no dataset '{name}'")
    params = {"size": config.size, "seed": config.seed, **config.params}
    try:
        made = reasoning_gym.create_dataset(name, **params)
    except Exception as error:
        raise DataError(f"reasoning-gym can't make '{name}' with {params}: {one_line(error)}") from error
    origin = {"dataset": name, "params": params}
    for row in _counted(made, config.source):
        number = row.where.rpartition(" ")[2]
        entry = {config.prompt: row.value["question"], **row.value}
        yield Row({**entry, "reasoning_gym": {**origin, "index": int(number) - 1}}, row.where)


def _function(config: DataConfig, folder: Path) -> Iterator[Row]:
    function = named_object(config.source, folder)
    if not callable(function):
        raise DataError(f"{config.source} can't be called: name a function that returns rows")
    try:
        made = iter(function(**config.params))
    except UserError:
        raise
    except Exception as error:
        raise DataError(f"{config.source} returned no rows: {one_line(error)}") from error
    return _counted(made, config.source)


def _counted(values: Iterable[Any], source: str) -> Iterator[Row]:
    """Numbered rows from third-party code; an error that it raises becomes a message of one sentence."""
    number = 0
    iterator = iter(values)
    while True:
        number += 1
        try:
            value = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(f"{source}, row {number}: {one_line(error)}") from error
        yield Row(value, f"{source}, row {number}")


def _need(module: str, sentence: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(sentence)
