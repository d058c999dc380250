"""Installs the wheel in a new virtual environment and runs the quickstart there: `make test-package`.

    python -m tests.package_install [--borrow] [--steps 3]

It prints what was built and installed, with sizes, and the seconds until the first step and the end. With `--borrow`
the new environment takes all other packages from the one that runs this, and needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tests import packages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--borrow", action="store_true", help="use the other packages of this environment")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = packages.build(folder / "dist")
        for path in built:
            say(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
        home = install(built.wheel, folder / "environment", borrow=arguments.borrow)
        run_quickstart(home / "bin" / "dora-rl", folder / "work", arguments.steps)


def install(wheel: Path, home: Path, *, borrow: bool) -> Path:
    """A virtual environment with the wheel and its extra `train`."""
    begin = time.perf_counter()
    run(sys.executable, "-m", "venv", home)
    pip = (home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    site = Path(run(home / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    if borrow:
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(*pip, "--no-deps", wheel)
    else:
        run(*pip, "--constraint", packages.ROOT / "constraints.txt", f"{wheel}[train]")
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    say(f"installed in {time.perf_counter() - begin:.0f} s: {size / 1e9:.2f} GB")
    return home


def run_quickstart(program: Path, folder: Path, steps: int) -> None:
    """A short quickstart in an empty folder, then an audit of it, and a second part resumed from another folder."""
    (folder / "elsewhere").mkdir(parents=True)
    say(run(program, "--version").strip())
    begin = time.time()
    run(program, "quickstart", "--name", "quick", "--control.steps", steps, folder=folder)
    say(f"{steps} steps of the quickstart: {time.time() - begin:.1f} s")
    published = [json.loads(line) for line in (folder / "runs/quick/metrics.jsonl").read_text().splitlines()]
    say(f"first step on the clock of the run: {next(one['time'] for one in published if 'step' in one):.1f} s")
    say(run(program, "audit", "../runs/quick", folder=folder / "elsewhere").splitlines()[-1])
    run(program, "train", "--resume", "../runs/quick", "--control.steps", steps + 1, folder=folder / "elsewhere")
    say(run(program, "audit", "../runs/quick", folder=folder / "elsewhere").splitlines()[-1])


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*command: object, folder: Path | None = None) -> str:
    # Without the caller's PYTHONPATH, which may lead to the sources.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(one) for one in command], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
