"""The share of the machine's limits that a decode step of the engine reaches, and which limit binds.

A step at batch B multiplies B rows with every weight and reads every weight once. It can't take less time than its
FLOPs at the rate of a large matrix product, or than its bytes at the rate at which memory is read. The larger of the
two binds in theory, and its share of the measured time shows how close the engine comes. The matrix products of a step
are also measured alone, by the engine's kernel and by torch on the same weights; the rest of a step is attention,
norms, sampling and Python. Every figure is the best of several, and the limits are measured again beside each batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dora_rl.engine.cpu_kernels.build import library

if TYPE_CHECKING:
    from dora_rl.engine.engine import Engine
    from dora_rl.engine.requests import Request

STEPS = 8  # decode steps measured at each batch, and passes over the weights


def machine() -> dict[str, float]:
    """The best of several rates of a large matrix product, of reading memory and of a triad."""
    a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
    x, y = torch.randn(1 << 25), torch.randn(1 << 25)
    out = torch.empty_like(x)
    return {
        "gemm_gflops": 2 * 1536**3 / best(lambda: a @ b, 6) / 1e9,
        "read_gb_s": x.nbytes / best(lambda: x.sum(), 4) / 1e9,
        "triad_gb_s": 3 * x.nbytes / best(lambda: torch.add(x, y, alpha=2.0, out=out), 4) / 1e9,
    }


def shares(model: Any, engine: Engine, requests: Callable[[list[int]], list[Request]], batches: Any) -> dict[str, Any]:
    """For each batch: the time of a decode step, of its products alone, and of the two limits, in milliseconds."""
    matrices = _matrices(model)
    limits, times = [], {}
    for batch in batches:
        limits.append(machine())
        step = min(decode_seconds(engine, requests([STEPS + 4] * batch)) for _ in range(2))
        ours = best(partial(_ours, matrices, batch, engine.threads), 4)
        times[batch] = step, ours, best(partial(_torch, matrices, batch), 4)
    limit = {name: max(one[name] for one in limits) for name in limits[0]}
    numbers = sum(w.numel() for w in matrices)
    found = {str(batch): _share(batch * numbers, numbers, limit, *times[batch]) for batch in batches}
    return {"limits": limit, "batches": found}


def _share(
    multiplied: int, read: int, limit: dict[str, float], step: float, ours: float, theirs: float
) -> dict[str, Any]:
    flops, memory = 2 * multiplied / limit["gemm_gflops"] / 1e9, 4 * read / limit["read_gb_s"] / 1e9
    return {
        "step_ms": step * 1e3,
        "products_ms": ours * 1e3,
        "products_by_torch_ms": theirs * 1e3,
        "flop_limit_ms": flops * 1e3,
        "memory_limit_ms": memory * 1e3,
        "flop_share": flops / step,
        "bandwidth_share": memory / step,
        "products_share_of_step": ours / step,
        "binds": _binds(step, ours, flops, memory),
    }


def _binds(step: float, products: float, flops: float, memory: float) -> str:
    if products < 0.5 * step:
        return "what is not products: attention, sampling, barriers, Python"
    if min(flops, memory) > 0.6 * max(flops, memory):
        return "memory and FLOPs alike"
    return "FLOPs" if flops > memory else "memory"


def decode_seconds(engine: Engine, some: list[Request]) -> float:
    """The shortest time of a step in which all requests decode and none prefills; one call may run several steps."""
    for request in some:
        engine.submit(request)
    seconds = []
    while engine.busy:
        before, prefilled = engine.stats.decoded, engine.stats.prefilled
        start = time.perf_counter()
        engine.step()
        took = time.perf_counter() - start
        steps, rest = divmod(engine.stats.decoded - before, len(some))
        if steps and not rest and engine.stats.prefilled == prefilled:
            seconds.append(took / steps)
    return min(seconds)


def best(call: Callable[[], object], times: int) -> float:
    """The shortest of several runs, in seconds."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _matrices(model: Any) -> list[torch.Tensor]:
    """Every weight that all rows are multiplied with, in the order in which a step uses them."""
    layers = [module.weight.detach() for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    return [*layers, model.get_output_embeddings().weight.detach()]


def _ours(matrices: list[torch.Tensor], rows: int, threads: int) -> None:
    kernels = library()
    assert kernels is not None
    deepest, widest = max(w.shape[1] for w in matrices), max(w.shape[0] for w in matrices)
    x, out = torch.ones(rows, deepest), torch.empty(rows, widest)
    scratch = torch.empty(kernels.multiply_floats(deepest, threads))
    for w in matrices:
        pointers = (x.data_ptr(), w.data_ptr(), 0, w.shape[1], w.shape[0], out.data_ptr(), scratch.data_ptr())
        kernels.multiply(rows, *pointers, threads)


@torch.no_grad()
def _torch(matrices: list[torch.Tensor], rows: int) -> None:
    inputs = {w.shape[1]: torch.ones(rows, w.shape[1]) for w in matrices}
    for w in matrices:
        torch.nn.functional.linear(inputs[w.shape[1]], w)
