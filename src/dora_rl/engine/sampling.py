"""Samples tokens for a whole batch at once.

Invariants:
- the random number of a token is a function of (seed, trajectory, position in the response) and of nothing else;
- truncation is a threshold on probabilities: top-k, then top-p within what is left, then min-p; ties are kept;
- the draw walks the tokens in the order of their ids.

The compiled sampler and the torch sampler follow the same rules; the torch sampler runs on any device. The generator,
Philox, is written by hand since torch's has one stream per device and no key per row: tokens would depend on the batch.
"""

from __future__ import annotations

import ctypes as c
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dora_rl.engine.cpu_kernels import binding
from dora_rl.engine.cpu_kernels.build import library as compiled

if TYPE_CHECKING:
    from dora_rl.engine.requests import Sampling

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.uint64]


class Drawn(NamedTuple):
    """One token for each row, with its log-probs. Token -1: the logits are not finite."""

    token: npt.NDArray[np.int64]
    logprob: Floats
    model_logprob: Floats


class Settings:
    """The sampling parameters of the rows of a batch, as columns."""

    COLUMNS = binding.SAMPLING_COLUMNS

    def __init__(self, rows: int) -> None:
        self.temperature = np.ones(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int32)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.trajectory = np.zeros(rows, dtype=np.uint64)
        self.bias: list[dict[int, float]] = [{} for _ in range(rows)]

    def put(self, row: int, sampling: Sampling, trajectory: int) -> None:
        """Set the parameters of one row."""
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.top_k[row] = sampling.top_k
        self.seed[row] = sampling.seed
        self.trajectory[row] = trajectory
        self.bias[row] = sampling.logit_bias

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        for name in self.COLUMNS:
            column = getattr(self, name)
            column[a], column[b] = column[b], column[a]
        self.bias[a], self.bias[b] = self.bias[b], self.bias[a]

    def part(self, first: int, end: int) -> Settings:
        """Return some rows, as views."""
        some = Settings(0)
        for name in self.COLUMNS:
            setattr(some, name, getattr(self, name)[first:end])
        some.bias = self.bias[first:end]
        return some


def draw(logits: torch.Tensor, settings: Settings, position: Longs, threads: int, use_kernels: bool) -> Drawn:
    """Sample one token for each row of logits; `position` is the index of the token in the response."""
    if use_kernels and logits.device.type == "cpu" and compiled() is not None:
        return _draw_native(logits, settings, position, threads)
    return _draw_torch(logits, settings, position)


def uniform(seed: Longs, trajectory: Longs, position: Longs) -> npt.NDArray[np.float64]:
    """Return 53 random bits in [0, 1) for each row: Philox4x32-10 of the key `seed` and (position, trajectory)."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = [position & low, position >> shift, trajectory & low, trajectory >> shift]
    key = [seed & low, seed >> shift]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = [(b >> shift) ^ counter[1] ^ key[0], b & low, (a >> shift) ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    bits = ((counter[0] << shift) | counter[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _draw_native(logits: torch.Tensor, settings: Settings, position: Longs, threads: int) -> Drawn:
    library = compiled()
    assert library is not None
    rows, vocab = logits.shape
    logits = logits.contiguous()
    drawn = Drawn(np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.float32))
    start = token = value = None
    if any(settings.bias):
        start = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum([len(bias) for bias in settings.bias], out=start[1:])
        token = np.fromiter((t for bias in settings.bias for t in bias), np.int32)
        value = np.fromiter((v for bias in settings.bias for v in bias.values()), np.float32)
    call = binding.Draws(
        rows=rows,
        vocab=vocab,
        logits=logits.data_ptr(),
        **{name: getattr(settings, name).ctypes.data for name in Settings.COLUMNS},
        position=position.ctypes.data,
        bias_start=None if start is None else start.ctypes.data,
        bias_token=None if token is None else token.ctypes.data,
        bias_value=None if value is None else value.ctypes.data,
        token=drawn.token.ctypes.data,
        logprob=drawn.logprob.ctypes.data,
        model_logprob=drawn.model_logprob.ctypes.data,
    )
    library.sample(c.byref(call), threads)
    return drawn


@torch.no_grad()
def _draw_torch(logits: torch.Tensor, settings: Settings, position: Longs) -> Drawn:
    device = logits.device
    temperature = torch.from_numpy(settings.temperature).to(device)[:, None]
    scale = torch.where(temperature > 0, 1.0 / temperature.clamp_min(1e-30), 1.0)
    model = (logits * scale).log_softmax(-1)
    used = logits
    if any(settings.bias):
        used = logits.clone()
        for row, biases in enumerate(settings.bias):
            for biased, value in biases.items():
                used[row, biased] += value
    weight = ((used - used.amax(-1, keepdim=True)) * scale).exp().double()  # the likeliest token has 1
    weight = weight * (weight >= _threshold(weight, settings, device))
    reach = weight.cumsum(-1)
    mass = reach[:, -1:]
    goal = torch.from_numpy(uniform(settings.seed, settings.trajectory, position)).to(device)[:, None] * mass
    sampled = (reach <= goal).sum(-1, keepdim=True)
    greedy = used.argmax(-1, keepdim=True)
    token = torch.where(temperature > 0, sampled.clamp_max(logits.shape[1] - 1), greedy)
    logprob = torch.where(temperature > 0, weight.gather(1, token).log() - mass.log(), 0.0)
    broken = ~mass.isfinite() | ~model.gather(1, token).isfinite()
    token = token.masked_fill(broken, -1)
    columns = (token, logprob.float(), model.gather(1, token.clamp_min(0)).float())
    return Drawn(*(column[:, 0].cpu().numpy() for column in columns))


def _threshold(weight: Any, settings: Settings, device: torch.device) -> Any:
    """Return the lowest weight that is kept, for each row."""
    vocab = weight.shape[1]
    top_k = torch.from_numpy(settings.top_k).to(device).long()[:, None]
    top_p = torch.from_numpy(settings.top_p).to(device).double()[:, None]
    cut = torch.from_numpy(settings.min_p).to(device).double()[:, None]
    if not bool((top_k > 0).any() or (top_p < 1).any()):
        return cut
    ordered = weight.sort(-1, descending=True).values
    kth = ordered.gather(1, torch.where(top_k > 0, top_k, vocab).clamp_max(vocab) - 1)
    ordered = ordered * (ordered >= kth)
    mass = ordered.cumsum(-1)
    inside = (mass < top_p * mass[:, -1:]).sum(-1, keepdim=True).clamp_max(vocab - 1)
    nucleus = torch.where(top_p < 1, ordered.gather(1, inside), 0.0)
    return torch.maximum(torch.maximum(cut, kth), nucleus)
