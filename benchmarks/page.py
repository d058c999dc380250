"""Writes `docs/benchmarks.md` and its plots from the files under `results/` alone.

python -m benchmarks.page    # write the page again without measuring
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.compare import BY_ACCURACY, NOISE
from benchmarks.machine import IDLE
from benchmarks.plots import Band, Spread
from benchmarks.report import RESULTS
from benchmarks.tables import prose, ratio_table, shares, span, table, target_table

DOCS = Path(__file__).parent.parent / "docs"
TITLES = {
    "training": "Whole training runs against TRL",
    "trl_async": "TRL's asynchronous GRPO",
    "tails": "Our own modes over three tails of lengths",
    "engine": "Engine against generate and vLLM",
    "llama": "Engine against llama.cpp",
    "trainer": "One update against TRL's; from publishing to serving",
    "control": "Control plane",
    "paper_table": "Deadline against proportional placement, simulated",
    "reality": "Simulator against reality",
    "scale": "Growth of costs",
}
Content = dict[str, Any]
_SINGLE = ("supervisor", "trainer")


def write() -> None:
    bench: Content = json.loads((RESULTS / "bench.json").read_text())
    outcomes = {one["name"]: one for one in bench["parts"]}
    parts = [_head(bench, outcomes)]
    for name, title in TITLES.items():
        outcome = outcomes.get(name, {"status": "not run", "reason": "it was not selected"})
        body = f"Not measured in this run: {outcome['reason']}."
        if outcome["status"] in ("ok", "kept"):
            content = json.loads((RESULTS / f"{name}.json").read_text())
            body = SECTIONS[name](content)
            if outcome["status"] == "kept":
                body = f"From an earlier run of its own command ({outcome['reason']}).\n\n{body}"
        parts.append(f"## {title}\n{body}")
    (DOCS / "benchmarks.md").write_text("\n\n".join(parts).rstrip() + "\n")


def _head(bench: Content, outcomes: dict[str, Content]) -> str:
    kind = "quick" if bench["quick"] else "full"
    command = "make bench-quick" if bench["quick"] else "make bench"
    only = f" (only these parts: {', '.join(bench['only'])})" if bench["only"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in bench["packages"].items())
    rows = [
        "# Benchmarks",
        prose(f"""
                `{command}` writes this page; don't edit it. **From a {kind} run**{only} of {bench["started"]} at
                commit {bench["commit"]}, which took {bench["seconds"] / 60:.0f} minutes; the load average of the
                machine at the start was {bench["load at the start"]:.1f}.
            """),
        _loaded(bench),
        prose(f"""
                {bench["cores"]} cores of {bench["processor"]}, {bench["memory"]}, {bench["system"]}; Python
                {bench["python"]}, {packages}.
            """),
        prose(f"""
                Ratios are taken within interleaved repeats; the lowest and the highest repeat stand in parentheses. A
                second run should lie within that range widened by {NOISE:.0%}, the noise of a shared machine between
                one hour and another (by {BY_ACCURACY:.0%} for times to an accuracy, and for our own modes by the noise
                that is measured below). `python -m benchmarks.bench --compare OLD NEW` lists the ratios that lie
                outside. Raw figures: [benchmarks/results](../benchmarks/results).
            """),
        table(
            ["part", "outcome", "seconds", "measured", "commit", ""],
            [_row(name, one) for name, one in outcomes.items()],
        ),
    ]
    return "\n\n".join(row for row in rows if row)


def _row(name: str, outcome: Content) -> list[str]:
    """A part may have been run at another time than the others."""
    when, commit = (outcome.get(key, "") for key in ("when", "commit"))
    return [name, outcome["status"], f"{outcome['seconds']:.0f}", when, commit, outcome["reason"]]


def _loaded(bench: Content) -> str:
    if bench["load at the start"] < IDLE:
        return ""
    return "Other programs were running on the machine: speeds are lower bounds, and ratios are not reliable."


# -- sections ---------------------------------------------------------------------------------------------------


def _training(content: Content) -> str:
    rows, settings = [], []
    for name, job in content["jobs"].items():
        repeats = job["repeats"]
        ours, theirs = ([one[side] for one in repeats] for side in ("ours", "trl"))
        first = repeats[0]["ours"]
        rows.append(
            [
                f"{name} ({first['median']:.0f} / {first['p99']:.0f})",
                span([one["tokens"] / one["seconds"] for one in ours], "{:,.0f}"),
                span([one["tokens"] / one["seconds"] for one in theirs], "{:,.0f}"),
                span([one["seconds"] / one["steps"] for one in ours], "{:.2f}"),
                span([one["seconds"] / one["steps"] for one in theirs], "{:.2f}"),
                _accuracy(ours),
                _accuracy(theirs),
                span([one["memory"] / 1e6 for one in ours], "{:,.0f}"),
                span([one["memory"] / 1e6 for one in theirs], "{:,.0f}"),
            ]
        )
        shown = job["settings"] | {"held-out prompts": repeats[0]["prompts"]}
        settings.append(f"- `{name}`: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    versions = next(iter(content["jobs"].values()))["repeats"][0]["trl"]["versions"]
    columns = ["job (median / 99th percentile of tokens)", "tokens/s", "TRL's", "s per step", "TRL's"]
    columns += ["accuracy", "TRL's", "MB", "TRL's"]
    _training_plot(content)
    return "\n\n".join(
        [
            prose("""
                Both sides have the same model, data, rewards, batch, lengths, learning rate, loss and threads. TRL
                generates with `transformers`, its default. Both clocks run from the first version to the last;
                imports, loading and saving count for neither side. Accuracy is held-out accuracy at the start and
                after equal steps, measured by the code of `dora-rl eval` on the saved weights of both sides; the time
                to an accuracy is given where both sides improve by more than chance. Memory is the peak of all
                processes together, with shared pages counted once.
            """),
            table(columns, rows),
            ratio_table(content),
            "\n".join(f"![{name}: accuracy](benchmarks-{name}.svg)" for name in content["jobs"]),
            "TRL's environment: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            "\n".join(settings),
        ]
    )


def _accuracy(sides: list[Content]) -> str:
    start = statistics.median(one["curve"][0][2] for one in sides)
    return f"{start:.1%} to {span([one['curve'][-1][2] for one in sides], '{:.1%}')}"


def _training_plot(content: Content) -> None:
    for name, job in content["jobs"].items():
        curves = {}
        for side, label in (("ours", "dora-rl"), ("trl", "TRL")):
            points = list(zip(*[one[side]["curve"] for one in job["repeats"]], strict=True))
            y = [statistics.mean(point[2] for point in column) for column in points]
            half = [(max(p[2] for p in column) - min(p[2] for p in column)) / 2 for column in points]
            by_step = Band([column[0][0] for column in points], y, half)
            by_second = Band([statistics.mean(p[1] for p in column) for column in points], y, half)
            curves[label] = (by_step, by_second)
        title = "held-out accuracy, mean and range over the repeats"
        plots.curves(DOCS / f"benchmarks-{name}.svg", title, curves)


def _tails(content: Content) -> str:
    parts = [
        prose(f"""
                `dora-rl train` on the quickstart's task, {content["steps"]} steps of {content["batch"]},
                {content["instances"]} instances. Learning is switched off, so that every mode generates the same
                responses to the same prompts. The lower bound of a step is the trainer's time when it runs alone plus
                the time of the step's tokens at the engine's best rate at these contexts, since both share the cores;
                or the time of the longest trajectory divided by K + 1, if that is longer.
            """)
    ]
    groups: dict[str, dict[str, Spread]] = {}
    for tail, found in content["tails"].items():
        rows = []
        groups[tail] = {}
        for variant in found["repeats"][0]:
            some = [one[variant] for one in found["repeats"]]
            rates = [one["tokens"] / one["seconds"] for one in some]
            groups[tail][variant] = Spread(statistics.median(rates), min(rates), max(rates))
            steps = [one["seconds"] / one["steps"] for one in some]
            over = [step / one["lower_bound"] for step, one in zip(steps, some, strict=True) if one["lower_bound"]]
            rows.append(
                [
                    variant,
                    span(rates, "{:,.0f}"),
                    span([_rate(one[variant]) / _rate(one["sync"]) for one in found["repeats"]], "{:.2f}"),
                    f"{statistics.median(steps):.3f}",
                    f"{statistics.median(over):.2f}",
                    f"{statistics.median(one['occupancy'] for one in some):.0%}",
                    shares(some[0]["idle"]),
                    shares(some[0]["staleness"], least=0.005),
                ]
            )
        columns = [
            "mode",
            "tokens/s",
            "times sync",
            "s per step",
            "times the bound",
            "occupancy",
            "slots idle",
            "staleness",
        ]
        about = f"median {found['median']:.0f} tokens, 99th percentile {found['p99']}, mean {found['mean']:.0f}"
        parts.append(f"**{tail} tail**: {about}.\n\n{table(columns, rows)}")
    ledger = [one["ledger"] / one["seconds"] for found in content["tails"].values() for one in _runs(found)]
    parts.append(f"Writing the ledger took {min(ledger):.1%} to {max(ledger):.1%} of the time of one core.")
    if "noise" in content:
        parts.append(
            prose(f"""
                Repeats of a cell differ only by the state of the machine. Two and a half standard deviations of them,
                pooled over all ratios, are {content["noise"]:.0%}: the spread of a ratio is that much wider than its
                repeats.
            """)
        )
    plots.bars(DOCS / "benchmarks-tails.svg", "trained tokens/s by tail of the lengths and by mode", groups)
    return "\n\n".join([*parts, "![tokens/s by mode and tail](benchmarks-tails.svg)"])


def _runs(found: Content) -> list[Content]:
    return [one for cells in found["repeats"] for one in cells.values()]


def _rate(one: Content) -> float:
    return float(one["tokens"] / one["seconds"])


def _reality(content: Content) -> str:
    rows = [
        [
            cell["tail"],
            cell["variant"],
            f"{cell['tokens/s']:,.0f}",
            f"{cell['predicted']:,.0f}",
            f"{cell['error']:+.0%}",
            f"{cell['occupancy']:.0%}",
            f"{cell['predicted occupancy']:.0%}",
            f"{cell['trainer busy']:.3f}",
            f"{cell['predicted trainer busy']:.3f}",
        ]
        for cell in content["cells"]
    ]
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in content["cells"]:
        series.setdefault(cell["tail"], []).append((cell["tokens/s"], cell["predicted"]))
    plots.predictions(DOCS / "benchmarks-reality.svg", "trained tokens/s, predicted and measured", series, 0.15)
    roles = content["details"]["processor seconds by role in a short run"]
    costs = ", ".join(f"{name} {_seconds(name, value)}" for name, value in content["costs"].items())
    columns = ["tail", "mode", "tokens/s", "predicted", "error", "occupancy", "predicted", "trainer s", "predicted"]
    return "\n\n".join(
        [
            prose("""
                The production orchestrator predicts every cell of the modes on a virtual clock, from the lengths of the
                responses and from costs of the components, each measured by itself on this machine. Nothing is fitted
                to a run. The simulator gives the trainer and each instance separate devices; here they are processes
                that share cores, which `benchmarks/shared_cores.py` models after the operating system. Costs are
                processor time, so the measured value is the fastest of the repeats, which other programs disturbed
                least. The aim is an error within 15%.
            """),
            prose(f"""
                {content["within the aim"]} of {len(rows)} cells are within the aim; the median error is
                {content["median |error|"]:.0%}. The machine limits the accuracy: repeats of the same cell differ by
                more than the aim (see the noise of our own modes), and a cost is valid only for the minutes in which it
                was measured. A shared core that is slower during the runs than during the measurement of the
                components looks like an error of the prediction, and vice versa.
            """),
            table(columns, rows),
            "![predicted and measured tokens/s](benchmarks-reality.svg)",
            f"Measured costs: {costs}.",
            f"Processor time of a short run in mode dora, by process: {shares(_by_process(roles))}.",
        ]
    )


def _by_process(seconds: dict[str, float]) -> dict[str, float]:
    """Shares of the total by process; all reward workers together."""
    total = sum(seconds.values()) or 1.0
    found: dict[str, float] = {}
    for worker, spent in seconds.items():
        instance = re.fullmatch(r"i\d+", worker)
        name = f"instance {worker}" if instance else worker if worker in _SINGLE else "reward workers"
        found[name] = found.get(name, 0.0) + spent / total
    return found


def _seconds(name: str, value: float) -> str:
    if name.endswith("speed"):
        return f"{value:.2f} times"
    return f"{value * 1e3:.2f} ms" if value >= 1e-4 else f"{value * 1e6:.2f} us"


def _scale(content: Content) -> str:
    rows = [
        [
            one["what"],
            one["along"],
            f"{one['values'][0]} to {one['values'][-1]}",
            f"{one['costs'][0]:.3g} to {one['costs'][-1]:.3g} {one['unit']}",
            f"{one['exponent']:.2f} ± {one['error']:.2f}",
        ]
        for one in content["series"]
    ]
    series = {f"{one['what']} over {one['along']}": (one["values"], one["costs"]) for one in content["series"]}
    plots.growth(DOCS / "benchmarks-scale.svg", "how costs grow with size", series)
    return "\n\n".join(
        [
            prose("""
                Exponents of power laws, fitted as straight lines through logarithms, with their standard error. A
                cost with exponent 0 does not grow; one with exponent 1 grows in proportion.
            """),
            table(["operation", "size", "from, to", "cost", "exponent"], rows),
            "![growth of costs](benchmarks-scale.svg)",
        ]
    )


def _llama(content: Content) -> str:
    check = content["check"]
    trust = "are trusted" if check["trusted"] else "are **not** trusted"
    theirs, own = "log-prob a token of its responses", "of the float32 model's own"
    rows = [
        [batch, span(content["ours"][batch], "{:.0f}"), span(content["llama.cpp"][batch], "{:.0f}")]
        for batch in content["ours"]
    ]
    return "\n\n".join(
        [
            prose(f"""
                SmolLM2-135M, {content["tokens"]} tokens after 16, temperature 1, {content["threads"]} threads,
                llama-cpp-python {content["version"]}. llama.cpp computes with the 4-bit file that our float32
                weights were expanded from. Its responses {trust}: under the float32 model, the mean log-prob per token
                of llama.cpp's greedy responses is {statistics.fmean(check[theirs]):.2f}, and that of the model's own
                greedy responses is {statistics.fmean(check[own]):.2f};
                the first {", ".join(map(str, check["first tokens that are the same"]))} tokens are the same.
            """),
            table(["batch", "tokens/s", "llama.cpp's"], rows),
            ratio_table(content),
        ]
    )


def _trl_async(content: Content) -> str:
    return f"It ran unmodified: {content['seconds a step']:.1f} s per step over {len(content['steps'])} steps."


def _trainer(content: Content) -> str:
    published = [
        f"- `{name}`: {one['bytes'] / 1e6:,.0f} MB from publishing to serving in {one['total_s'] * 1e3:.0f} ms, of "
        f"which copying takes {one['copy_s'] * 1e3:.0f}"
        for name, one in content["publish"].items()
    ]
    return f"{target_table(content)}\n\n" + "\n".join(published)


SECTIONS = {
    "training": _training,
    "trl_async": _trl_async,
    "tails": _tails,
    "engine": target_table,
    "llama": _llama,
    "trainer": _trainer,
    "control": target_table,
    "paper_table": target_table,
    "reality": _reality,
    "scale": _scale,
}


if __name__ == "__main__":
    write()
