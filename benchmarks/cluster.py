"""The cost of the Ray runtime on one machine: whole runs against the local runtime, and each operation by itself.

The simulator needs the costs of the operations to predict a larger cluster that uses this runtime: `--predict` prints
such predictions from the figures that were measured last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, at_least, publish
from benchmarks.running import Figures, run
from dora_rl.runtime.launch.ray.init import need_ray
from dora_rl.runtime.launch.ray.rendezvous import LOOPBACK, Rendezvous, connect
from dora_rl.sim.presets import preset
from dora_rl.sim.run import parse_variant, simulate

JOB = Path(__file__).parent / "jobs" / "chains.toml"
MEGABYTE = 1e6
WEIGHTS = 100_000_000
BUNDLE = 32_000_000
_console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--predict", action="store_true", help="predict larger clusters from the last figures")
    arguments = parser.parse_args()
    if arguments.predict:
        predict(json.loads((RESULTS / "cluster.json").read_text())["costs"])
        return
    runs = _runs(arguments.repeats, arguments.steps)
    ratios = [steady(one["ray"]) / steady(one["local"]) for one in runs]
    costs = measure()
    figures = {
        "cores": os.cpu_count(),
        "costs": costs,
        "ray over local": ratios,
        "runs": [{kind: asdict(one) for kind, one in found.items()} for found in runs],
    }
    publish("cluster", [at_least("ray over local, trained tokens/s", 0.9, statistics.median(ratios))], figures)
    for name, value in costs.items():
        _console.print(f"{name}: {value:,.6g}", highlight=False)


def _runs(repeats: int, steps: int) -> list[dict[str, Figures]]:
    """Runs of the same job in turn; the order changes with each repeat."""
    found = []
    for repeat in range(repeats):
        kinds = ["local", "ray"] if repeat % 2 == 0 else ["ray", "local"]
        one: dict[str, Figures] = {}
        for kind in kinds:
            one[kind] = run(JOB, runtime=kind, **{"control.steps": steps})
            begun = one[kind].published[1]
            rate = f"{steady(one[kind]):,.0f} tokens/s, first step {begun:.1f} s"
            _console.print(f"{repeat + 1}/{repeats} {kind}: {rate}", highlight=False)
        found.append(one)
    return found


def steady(one: Figures) -> float:
    """Trained tokens/s after the first quarter of a run.

    On a cluster each process imports torch by itself, whereas the local runtime forks, so the first step comes seconds
    later. That cost occurs once and is printed separately.
    """
    first = one.steps // 4
    return one.tokens / one.steps * (one.steps - first) / (one.published[one.steps] - one.published[first])


# -- operations -----------------------------------------------------------------------------------------------------


class Peer:
    """An actor on another node, in the place of an instance."""

    def echo(self, port: int, token: bytes) -> None:
        """Send every message back."""
        link, _ = connect(LOOPBACK, port, token, "")
        with link:
            link.settimeout(None)
            while part := link.recv(1 << 16):
                link.sendall(part)

    def take(self, reference: list[Any]) -> float:
        """Seconds until an object is mapped on this node."""
        ray = need_ray()
        begin = time.perf_counter()
        ray.get(reference[0])
        return time.perf_counter() - begin

    def nothing(self) -> None:
        """Return at once: an empty call."""


def measure() -> dict[str, float]:
    """Costs in seconds, and rates in bytes per second, between two nodes of a cluster on this machine."""
    ray = need_ray()
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 1, "object_store_memory": 600 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=args)
    cluster.add_node(num_cpus=1, resources={"far": 1}, object_store_memory=600 << 20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    peer = ray.remote(Peer).options(resources={"far": 0.1}, num_cpus=0).remote()
    try:
        ray.get(peer.nothing.remote())
        frame = _round_trip(peer)
        call = _median(lambda: ray.get(peer.nothing.remote()), 200)
        put, take = _transfer(peer, WEIGHTS)
        bundle_put, bundle_take = _transfer(peer, BUNDLE)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {
        "message round trip, s": frame,
        "actor call, s": call,
        "weights, published to served on another node, s for 100 MB": put + take + 2 * call,
        "weights, MB/s": WEIGHTS / (put + take) / MEGABYTE,
        "KV bundle, from node to node, s for 32 MB": bundle_put + bundle_take + 2 * call,
        "KV bundle, MB/s": BUNDLE / (bundle_put + bundle_take) / MEGABYTE,
    }


def _round_trip(peer: Any) -> float:
    """Round trip of a small message over the connection that the processes of a run use."""
    links: list[socket.socket] = []
    rendezvous = Rendezvous(lambda _name, _hello, link: links.append(link))
    peer_token = rendezvous.expect("peer")
    ended = peer.echo.remote(rendezvous.listen(LOOPBACK), peer_token)
    while not links:
        time.sleep(0.001)
    link, message = links[0], b"x" * 200
    link.settimeout(10)

    def there_and_back() -> None:
        link.sendall(message)
        left = len(message)
        while left:
            left -= len(link.recv(left))

    found = _median(there_and_back, 2000)
    link.close()
    rendezvous.close()
    need_ray().get(ended)
    return found


def _transfer(peer: Any, size: int, repeats: int = 5) -> tuple[float, float]:
    """Seconds to put bytes into the object store of one node, and to map them on another."""
    ray = need_ray()
    data = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    puts, takes = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        reference = ray.put(data)
        puts.append(time.perf_counter() - begin)
        takes.append(ray.get(peer.take.remote([reference])))
        del reference
    return statistics.median(puts), statistics.median(takes)


def _median(call: Callable[[], Any], times: int) -> float:
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


# -- larger clusters ------------------------------------------------------------------------------------------------


def predict(costs: dict[str, float]) -> None:
    """Simulate the paper's clusters with the planned link speed and with the measured costs of this runtime."""
    calls = 2 * costs["actor call, s"]
    measured = [
        f"hardware.link_bandwidth={min(costs['weights, MB/s'], costs['KV bundle, MB/s']) * MEGABYTE}",
        f"rollout.load_overhead={calls + costs['message round trip, s']}",
        f"rollout.move_overhead={calls + 2 * costs['message round trip, s']}",
    ]
    table = Table(title="dora, minutes a step", caption="each device moves weights and KV at the rate given")
    for column in ("cluster", "RDMA, 50 GB/s a device", "this runtime, as measured here", "cost"):
        table.add_column(column, justify="left" if column == "cluster" else "right")
    for name in ("paper-64", "paper-128"):
        planned, here = (simulate(preset(name, settings), parse_variant("dora")) for settings in ([], measured))
        table.add_row(
            name,
            f"{planned.step_seconds / 60:.2f}",
            f"{here.step_seconds / 60:.2f}",
            f"{here.step_seconds / planned.step_seconds - 1:+.1%}",
        )
    _console.print(table)
    _console.print("settings: " + " ".join(f"--set {one}" for one in measured), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
