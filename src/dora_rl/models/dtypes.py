"""The names of tensor dtypes in safetensors files."""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.core.interfaces import TensorSpec

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def spec(name: str, tensor: Tensor) -> TensorSpec:
    """Name, dtype and shape of a tensor."""
    return TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape))
