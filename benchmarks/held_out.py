"""Held-out accuracy of several models, measured by the code of `dora-rl eval` in one process.

python -m benchmarks.held_out CONFIG MODEL... [--section.key value]...    # prints one line: ACCURACY {model: result}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dora_rl.apps.config_options import split
from dora_rl.apps.evaluate import Evaluation, respond, summary
from dora_rl.apps.train import read_config
from dora_rl.runtime.config import RunConfig


def accuracy(config_file: Path, models: list[str], settings: list[str]) -> dict[str, dict[str, Any]]:
    """All models answer the same prompts with the same random numbers."""
    config = read_config(config_file, settings)
    source = config.evaluation.data
    if source is not None:  # the same tail of lengths as in training
        source = source.model_copy(update={"params": {**config.data.params, **source.params}})
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"data": source})})
    found = {}
    for model in models:
        evaluation = Evaluation(config, config_file.resolve().parent, model, 0, Path())
        samples = config.evaluation.samples
        found[model] = summary(respond(evaluation, samples), config.evaluation.success_threshold, samples)
    return found


def main() -> None:
    given = sys.argv[1:]
    (config_file, *models), settings = split(given, {}, RunConfig)
    result = accuracy(Path(config_file), models, settings)
    print("ACCURACY " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
