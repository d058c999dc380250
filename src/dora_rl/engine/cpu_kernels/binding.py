"""The kernels' structs for ctypes, field by field as in interface.h.

A library reports how its compiler lays them out; one that differs from these classes is not used (`mismatch`).
"""

from __future__ import annotations

import ctypes as c
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dora_rl.engine.cpu_kernels.inputs import PagedCache

FLOATS = c.c_void_p
INTS = c.c_void_p
SAMPLING_COLUMNS = ("temperature", "top_p", "min_p", "top_k", "seed", "trajectory")
"""Sampling parameters that `Draws` and `Stretch` have a column for."""


class Layer(c.Structure):
    """Weights of one decoder layer; a null pointer is a tensor that the layer does not have."""

    _fields_ = tuple(
        (name, FLOATS)
        for name in (
            *(
                "input_norm",
                "q",
                "k",
                "v",
                "q_bias",
                "k_bias",
                "v_bias",
                "o",
                "o_bias",
                "q_norm",
                "k_norm",
                "post_norm",
            ),
            *("gate", "up", "down", "router", "experts_gate_up", "experts_down"),
        )
    )


class Model(c.Structure):
    """Dimensions and weights of a decoder."""

    _fields_ = (
        *((name, c.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab")),
        *((name, c.c_int32) for name in ("experts", "experts_used", "expert_inner", "norm_topk", "full_qk_norm")),
        ("packed", c.c_int32),
        ("eps", c.c_float),
        ("scale", c.c_float),
        *((name, FLOATS) for name in ("embed", "norm", "head", "cos", "sin")),
        ("layer", c.POINTER(Layer)),
    )


class Cache(c.Structure):
    """The memory of the KV blocks."""

    _fields_ = (
        ("data", FLOATS),
        *((name, c.c_int32) for name in ("block_size", "layers", "kv_heads", "head_dim")),
    )

    @classmethod
    def of(cls, cache: PagedCache) -> Cache:
        """Return the struct for a cache, whose memory must outlive it."""
        shape = cache.shape
        sizes = {name: getattr(shape, name) for name in ("block_size", "layers", "kv_heads", "head_dim")}
        return cls(data=cache.data.data_ptr(), **sizes)


class Rows(c.Structure):
    """The tokens of one forward pass."""

    _fields_ = (
        *((name, c.c_int32) for name in ("count", "table_stride", "logit_count")),
        *((name, INTS) for name in ("token", "position", "sequence", "table", "logit_row")),
        ("logits", FLOATS),
        ("routed", INTS),
    )


class Draws(c.Structure):
    """The rows of one sampling pass."""

    _fields_ = (
        ("rows", c.c_int32),
        ("vocab", c.c_int32),
        ("logits", FLOATS),
        *((name, FLOATS) for name in ("temperature", "top_p", "min_p")),
        *((name, INTS) for name in ("top_k", "seed", "trajectory", "position", "bias_start", "bias_token")),
        ("bias_value", FLOATS),
        ("token", INTS),
        *((name, FLOATS) for name in ("logprob", "model_logprob")),
    )


class Stretch(c.Structure):
    """Sequences that decode several steps in one call."""

    _fields_ = (
        *((name, c.c_int32) for name in ("rows", "steps", "width", "stop_ids", "table_stride", "vocab")),
        *(
            (name, INTS)
            for name in ("chosen", "token", "position", "fill", "last", "response_index", "stops", "table", "history")
        ),
        *((name, FLOATS) for name in ("logprobs", "model_logprobs", "temperature", "top_p", "min_p")),
        *((name, INTS) for name in ("top_k", "seed", "trajectory")),
        ("logits", FLOATS),
        ("kv_budget", c.c_int64),
    )


STRUCTS: tuple[type[c.Structure], ...] = (Layer, Model, Cache, Rows, Draws, Stretch)


def layout() -> str:
    """Return sizes and offsets of all structs, in the form of the function of this name in interface.h."""
    lines = []
    for struct in STRUCTS:
        lines.append(f"{struct.__name__} {c.sizeof(struct)}")
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            lines.append(f"  {name} {field.offset} {field.size}")
    return "\n".join(lines)


def mismatch(library: c.CDLL) -> str:
    """Return the first struct or field that a library lays out in another way; empty if there is none."""
    theirs, ours = library.layout().decode().splitlines(), layout().splitlines()
    for index in range(max(len(theirs), len(ours))):
        pair = [" ".join(lines[index].split()) if index < len(lines) else "nothing" for lines in (theirs, ours)]
        if pair[0] != pair[1]:
            return f"it has '{pair[0]}' where Python has '{pair[1]}'"
    return ""


def declare(library: c.CDLL) -> c.CDLL:
    """Declare the types of the library's functions."""
    library.vector_width.restype = c.c_int
    library.layout.restype = c.c_char_p
    library.panel_columns.restype = c.c_int
    library.scratch_floats.restype = c.c_int64
    library.scratch_floats.argtypes = [c.POINTER(Model), c.c_int, c.c_int, c.c_int]
    library.forward.restype = None
    library.forward.argtypes = [c.POINTER(Model), c.POINTER(Cache), c.POINTER(Rows), FLOATS, c.c_int, c.c_int]
    library.multiply_floats.restype = c.c_int64
    library.multiply_floats.argtypes = [c.c_int, c.c_int]
    library.multiply.restype = None
    library.multiply.argtypes = [c.c_int, FLOATS, FLOATS, c.c_int, c.c_int, c.c_int, FLOATS, FLOATS, c.c_int]
    library.paged_attention.restype = None
    library.paged_attention.argtypes = [
        *(c.POINTER(Cache), c.POINTER(Rows), c.c_int, c.c_int, c.c_int, c.c_float, c.c_float),
        *(FLOATS, FLOATS, c.c_int, FLOATS, c.c_int),
    ]
    library.cache_budget.restype = c.c_int64
    library.decode.restype = c.c_int64
    library.decode.argtypes = [c.POINTER(Model), c.POINTER(Cache), c.POINTER(Stretch), FLOATS, c.c_int, c.c_int]
    library.sample.restype = None
    library.sample.argtypes = [c.POINTER(Draws), c.c_int]
    return library
