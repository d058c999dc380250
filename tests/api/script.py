"""A user's program, without a guard for `__main__`: it starts a run, is interrupted, and goes on.

It is executed by `test_train`, and mypy checks it with all other files.
"""

import os
import signal
import sys

import dora_rl
from dora_rl import DoraConfig, Run, train

model, config, out = sys.argv[1:]
FEW = 10


def brief(prompts: list[str], completions: list[str], **columns: list[int]) -> list[float]:
    """Uses a global of this script and a column of the rows."""
    return [(number % FEW - len(text)) / 100 for text, number in zip(completions, columns["number"], strict=True)]


class Interrupt:
    """The user presses Ctrl-C after the first step."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)


rows = [{"prompt": f"{number}*2=", "number": number} for number in range(1, 40)]
settings = DoraConfig.from_toml(config, control={"steps": 3}, **{"data.seed": 7})
handler = signal.getsignal(signal.SIGINT)
try:
    train(model, brief, rows, config=settings, callbacks=[Interrupt()], out=out, name="script", quiet=True)
except KeyboardInterrupt as interrupt:
    assert "dora_rl.train(resume=" in str(interrupt)  # noqa: PT017
else:
    raise AssertionError("the interrupt was lost")
assert signal.getsignal(signal.SIGINT) is handler
stopped: Run = Run.open(f"{out}/script")
assert stopped.state == "stopped"
assert len(stopped.metrics) == 1
run: Run = train(resume=stopped.path, quiet=True)
assert run.state == "finished"
assert run.audit().ok
rewards: list[float] = [metrics["reward/brief/mean"] for metrics in run.metrics]
assert len(rewards) == 3
try:
    DoraConfig(control={"group_sise": 2})
except dora_rl.UserError as error:
    assert "did you mean 'control.group_size'?" in str(error)  # noqa: PT017
