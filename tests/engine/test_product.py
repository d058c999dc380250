"""The matrix product of the compiled kernels is right, and gives a row the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from dora_rl.engine.cpu_kernels.build import library
from dora_rl.engine.cpu_kernels.runner import in_panels
from tests.engine.processors import runnable


def multiply(x: torch.Tensor, w: torch.Tensor, threads: int = 1, *, packed: bool = False) -> torch.Tensor:
    kernels = library()
    assert kernels is not None
    (rows, depth), columns = x.shape, len(w)
    out = torch.full((rows, columns), torch.nan)
    scratch = torch.empty(kernels.multiply_floats(depth, threads))
    if packed:
        w = in_panels(w, kernels)
    pointers = (x.data_ptr(), w.data_ptr(), int(packed), depth, columns, out.data_ptr(), scratch.data_ptr())
    kernels.multiply(rows, *pointers, threads)
    return out


@pytest.mark.parametrize("arch", runnable())
@pytest.mark.parametrize(("depth", "columns"), [(16, 1), (64, 8), (80, 33), (576, 96), (1536, 50)])
def test_a_row_has_the_same_bits_in_any_batch(
    arch: str, depth: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORA_RL_ARCH", arch)
    torch.manual_seed(depth)
    x, w = torch.randn(67, depth), torch.randn(columns, depth)
    alone = torch.cat([multiply(row[None], w) for row in x])
    torch.testing.assert_close(alone.double(), x.double() @ w.double().T, atol=1e-4, rtol=1e-4)
    for rows in range(1, len(x) + 1):
        assert torch.equal(multiply(x[:rows], w, threads=1 + rows % 2), alone[:rows])
        assert torch.equal(multiply(x[:rows], w, threads=1 + rows % 2, packed=True), alone[:rows])


def test_weights_need_not_be_aligned() -> None:
    torch.manual_seed(0)
    x, memory = torch.randn(9, 64), torch.randn(40 * 64 + 3)
    for shift in range(4):
        w = memory[shift : shift + 40 * 64].view(40, 64)
        assert torch.equal(multiply(x, w), multiply(x, w.clone()))
