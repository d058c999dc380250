"""Layers import only the layers below them; `core`, the orchestrator, the simulator and environments need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dora_rl

PACKAGE = Path(dora_rl.__file__).parent

# What each layer may import besides itself, as in docs/architecture.md.
COMPONENTS = {"engine", "trainer", "weights", "envs", "ledger"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "orchestrator": {"core"},
    "sim": {"core", "orchestrator"},
    "models": {"core"},
    **{component: {"core", "models"} for component in COMPONENTS},
    "runtime": {"core", "orchestrator", "models", *COMPONENTS},
    "apps": {"core", "orchestrator", "sim", "models", "runtime", *COMPONENTS},
    "api": {"core", "orchestrator", "sim", "models", "runtime", "apps", *COMPONENTS},
    "trl": {"core", "models", "envs", "runtime", "apps", "api"},
}
TORCH_FREE = ("core", "orchestrator", "sim", "envs")


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0]
    used = {name.split(".")[1] for name in imports(path) if name.startswith("dora_rl.")}
    assert used - {layer} <= ALLOWED[layer]


def test_the_sandbox_imports_only_core_and_its_jail_only_the_standard_library() -> None:
    sandbox = PACKAGE / "envs" / "sandbox"
    for path in sandbox.rglob("*.py"):
        own = [name for name in imports(path) if name.startswith("dora_rl.")]
        allowed = ("dora_rl.envs.sandbox", *(() if path.parent.name == "jail" else ("dora_rl.core",)))
        assert all(name.startswith(allowed) for name in own), path
    for path in (sandbox / "jail").rglob("*.py"):
        roots = {name.partition(".")[0] for name in imports(path)}
        assert roots - {"dora_rl"} <= sys.stdlib_module_names, path


@pytest.mark.parametrize("layer", TORCH_FREE)
def test_imports_without_torch(layer: str) -> None:
    program = f"""
import importlib, pkgutil, sys
sys.modules["torch"] = None  # any import of it raises
import dora_rl.{layer} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_cpu_kernels_import_nothing_from_the_rest() -> None:
    """They could be a package of their own: see src/dora_rl/engine/cpu_kernels/README.md."""
    package = "dora_rl.engine.cpu_kernels"
    for path in (PACKAGE / "engine" / "cpu_kernels").glob("*.py"):
        used = {name for name in imports(path) if name.startswith("dora_rl")}
        assert all(name == package or name.startswith(package + ".") for name in used), f"{path}: {used}"
