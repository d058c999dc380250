"""No module executes data that it reads, and secrets stay in the environment."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import dora_rl
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import make_base, make_run, settings

PACKAGE = Path(dora_rl.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("pd", "read_pickle")}


def dangers(source: str) -> list[str]:
    """Everything in a module's source that could execute data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name) and name.id in CALLS:
                found.append(name.id)
            if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name):
                found += [f"{a}.{b}" for a, b in METHODS if (name.value.id, name.attr) == (a, b)]
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not off:
                    found.append(keyword.arg)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_executes_what_it_reads(path: Path) -> None:
    allowed = {
        # The one module that runs model-written code, inside the sandbox.
        PACKAGE / "envs" / "sandbox" / "jail" / "inside.py": ["exec", "compile"],
        # The user's own functions: writes them, and reads files whose digest is their name.
        PACKAGE / "envs" / "pickled_code.py": ["cloudpickle", "cloudpickle"],
    }
    assert dangers(path.read_text()) == allowed.get(path, [])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "from_pretrained(name, trust_remote_code=yes)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_scan_finds_dangerous_code(source: str) -> None:
    assert dangers(source)


def test_secrets_stay_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of a run contains the secrets in its environment."""
    secrets = {name: f"secret-{name.lower()}-4711" for name in ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY")}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    base = make_base(tmp_path / "job")
    host = Host()
    run = host.start(make_run(base, "secret", settings(base, steps=2)))
    outcome = run.wait()
    host.close()
    assert broken(run, outcome, 2) == []
    for path in run.folder.path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [name for name, value in secrets.items() if value.encode() in data], path
    assert os.environ["HF_TOKEN"] == secrets["HF_TOKEN"]


def test_a_run_stays_in_its_folder(tmp_path: Path) -> None:
    from dora_rl.core.errors import UserError

    for name in ("../outside", "/tmp/outside", "a/b", "..", "."):
        with pytest.raises(UserError, match="name"):
            make_run(tmp_path, name, settings(tmp_path))
