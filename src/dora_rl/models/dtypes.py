"""Types of tensors as safetensors spells them."""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.core.interfaces import TensorSpec

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_SPELLING = {dtype: name for name, dtype in DTYPES.items()}


def spec(name: str, tensor: Tensor) -> TensorSpec:
    """What a tensor is, said by name, type and shape."""
    return TensorSpec(name, _SPELLING[tensor.dtype], tuple(tensor.shape))
