"""Runs a model of the Llama family, dense or mixture-of-experts, with the compiled kernels.

The weights are used in place: a runner is a table of pointers into the version's tensors, which it keeps alive. If half
of a core's cache holds all weights, the matrices are copied into the panels that the kernels use: with few rows,
packing them at each step would take longer than multiplying.
Cosines and sines come from the module's own rotary embedding, which covers every scaling that does not depend on the
length of a request.
"""

from __future__ import annotations

import contextlib
import ctypes as c
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from dora_rl.engine.cpu_kernels import binding
from dora_rl.engine.cpu_kernels.build import library as compiled

if TYPE_CHECKING:
    from dora_rl.engine.cpu_kernels.inputs import DecodeRows, PagedCache, TokenRows

DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SPARSE = ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen3MoeForCausalLM")
_COLUMNS = ("token", "position", "fill", "last", "response_index", "stops", "history", "logprobs", "model_logprobs")
_PACKED = ("q", "k", "v", "o", "gate", "up", "down")
HEAD_VECTORS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)  # head sizes, in vectors, that attention is compiled for


def obstacle(model: Any, library: c.CDLL) -> str:
    """Return why the kernels can't run this model; empty if they can."""
    config = model.config
    kind = type(model).__name__
    width = library.vector_width()
    if kind not in DENSE + SPARSE:
        return f"{kind} is not a model that the kernels support"
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return f"the kernels compute float32 on a CPU, not {model.dtype} on {model.device.type}"
    head_dim = model.model.layers[0].self_attn.head_dim
    sizes = [config.hidden_size, config.num_attention_heads * head_dim, config.intermediate_size]
    sizes += [config.num_key_value_heads * head_dim, getattr(config, "moe_intermediate_size", width)]
    if any(size % width for size in sizes) or head_dim % width or head_dim // width not in HEAD_VECTORS:
        return f"hidden, inner and head sizes must be multiples of {width}"
    if model.model.rotary_emb.rope_type in ("dynamic", "longrope"):
        return "its rotary embedding depends on the length of a request"
    unsupported = {
        "its activation is not silu": config.hidden_act not in ("silu", "swish"),
        "it has a bias in its MLP": getattr(config, "mlp_bias", False),
        "it clips queries and keys": getattr(config, "clip_qkv", None) is not None,
        "it attends through a sliding window": bool(getattr(config, "sliding_window", None))
        and getattr(config, "use_sliding_window", True),
        "it rotates only a part of each head": model.model.rotary_emb.inv_freq.shape[0] * 2 != head_dim,
    }
    return next((reason for reason, true in unsupported.items() if true), "")


def cache_budget(library: c.CDLL) -> int:
    """Return half of a core's cache: the budget for the weights of a small model, and for the KV of a group of rows."""
    found: int = library.cache_budget()
    return found


class CpuKernelRunner:
    """The weights of one version as pointers for the kernels."""

    stretches = True

    def __init__(self, model: Any, weights: Mapping[str, Any], cache: PagedCache, limit: int, context: int) -> None:
        library = compiled()
        assert library is not None
        self._library = library
        self._weights = dict(weights)
        self._cache_budget = cache_budget(library)
        self.small = sum(tensor.nbytes for tensor in self._weights.values()) <= self._cache_budget
        self._packed: dict[str, torch.Tensor] = {}
        self._limit = limit
        self._context = context
        self._layers, self._model = self._fill_model(model, context)
        shape = cache.shape
        self._cache = binding.Cache.of(cache)
        self._keep = cache.data
        self._scratch = torch.empty(0)
        self._threads = 0
        self._logits = torch.empty(0, self._model.vocab)
        used = self._model.experts_used
        self._routed = np.zeros((limit, shape.layers, used) if used else (0, 0, 0), dtype=np.int16)
        self._rows = 0

    def forward(self, rows: TokenRows, threads: int, record_experts: bool) -> torch.Tensor:
        """Compute the rows by one call of the kernels."""
        self._make_room(threads, rows.logit_count)
        self._rows = rows.count
        given = binding.Rows(
            count=rows.count,
            table_stride=rows.table.shape[1],
            logit_count=rows.logit_count,
            token=rows.token.ctypes.data,
            position=rows.position.ctypes.data,
            sequence=rows.sequence.ctypes.data,
            table=rows.table.ctypes.data,
            logit_row=rows.logit_row.ctypes.data,
            logits=self._logits.data_ptr(),
            routed=self._routed.ctypes.data if record_experts and self._model.experts_used else None,
        )
        self._library.forward(
            c.byref(self._model), c.byref(self._cache), c.byref(given), self._scratch.data_ptr(), threads, self._context
        )
        return self._logits[: rows.logit_count]

    def decode(self, batch: DecodeRows, rows: npt.NDArray[np.int64], steps: int, threads: int) -> int:
        """Decode at most `steps` tokens for each of these rows of a batch; return the number of sampled tokens."""
        self._make_room(threads, len(rows))
        chosen = rows.astype(np.int32)
        settings = {name: getattr(batch.settings, name).ctypes.data for name in binding.SAMPLING_COLUMNS}
        columns = {name: getattr(batch, name).ctypes.data for name in _COLUMNS}
        given = binding.Stretch(
            rows=len(rows),
            steps=steps,
            width=batch.history.shape[1],
            stop_ids=batch.stops.shape[1],
            table_stride=batch.rows.table.shape[1],
            vocab=self._model.vocab,
            chosen=chosen.ctypes.data,
            table=batch.rows.table.ctypes.data,
            logits=self._logits.data_ptr(),
            kv_budget=threads * self._cache_budget if self.small else 1 << 62,
            **columns,
            **settings,
        )
        sampled: int = self._library.decode(
            c.byref(self._model), c.byref(self._cache), c.byref(given), self._scratch.data_ptr(), threads, self._context
        )
        return sampled

    @contextlib.contextmanager
    def computing_in(self, cache: PagedCache) -> Iterator[None]:
        """Let the kernels use another cache meanwhile."""
        usual, self._cache = self._cache, binding.Cache.of(cache)
        try:
            yield
        finally:
            self._cache = usual

    def _make_room(self, threads: int, logits: int) -> None:
        if threads > self._threads:
            floats = self._library.scratch_floats(c.byref(self._model), self._limit, threads, self._context)
            self._scratch = torch.empty(floats)
            self._threads = threads
        if logits > len(self._logits):
            self._logits = torch.empty(logits, self._model.vocab)

    def experts(self) -> npt.NDArray[np.int16]:
        """Return the experts of the last recorded pass."""
        return self._routed[: self._rows]

    def _fill_model(self, model: Any, context: int) -> tuple[Any, binding.Model]:
        config = model.config
        head_dim = model.model.layers[0].self_attn.head_dim
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(context)[None])
        self._tables = (cos[0].contiguous(), sin[0].contiguous())
        layers = (binding.Layer * config.num_hidden_layers)()
        sparse = type(model).__name__ in SPARSE
        for index in range(config.num_hidden_layers):
            for field, name in _tensor_names(f"model.layers.{index}.").items():
                if name in self._weights:
                    setattr(layers[index], field, self._pointer(name, packed=self.small and field in _PACKED))
        pointers = binding.Model(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            inner=config.intermediate_size,
            vocab=self._weights["lm_head.weight"].shape[0],
            experts=_experts(config) if sparse else 0,
            experts_used=config.num_experts_per_tok if sparse else 0,
            expert_inner=getattr(config, "moe_intermediate_size", config.intermediate_size) if sparse else 0,
            norm_topk=int(getattr(config, "norm_topk_prob", True)) if sparse else 0,
            full_qk_norm=int(type(model).__name__ == "OlmoeForCausalLM"),
            packed=int(self.small),
            eps=config.rms_norm_eps,
            scale=head_dim**-0.5,
            embed=self._pointer("model.embed_tokens.weight"),
            norm=self._pointer("model.norm.weight"),
            head=self._pointer("lm_head.weight", packed=self.small),
            cos=self._tables[0].data_ptr(),
            sin=self._tables[1].data_ptr(),
            layer=layers,
        )
        return layers, pointers

    def _pointer(self, name: str, *, packed: bool = False) -> int:
        tensor = self._weights[name]
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            tensor = self._weights[name] = tensor.to(torch.float32).contiguous()
        if packed:
            tensor = self._packed[name] = in_panels(tensor, self._library)
        address: int = tensor.data_ptr()
        return address


def in_panels(matrix: torch.Tensor, library: c.CDLL) -> torch.Tensor:
    """Return a matrix [n, k] as panels [n / panel, k, panel], the last one padded with zeros (see product.h)."""
    panel = library.panel_columns()
    columns, depth = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -columns % panel))
    return padded.view(-1, panel, depth).transpose(1, 2).contiguous()


def _experts(config: Any) -> int:
    return int(getattr(config, "num_local_experts", None) or config.num_experts)


def _tensor_names(prefix: str) -> dict[str, str]:
    """Return the name of the module's tensor for each field of `Layer`."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    names = {name: f"{attention}{name}_proj.weight" for name in ("q", "k", "v", "o")}
    names |= {f"{name}_bias": f"{attention}{name}_proj.bias" for name in ("q", "k", "v", "o")}
    names |= {f"{name}_norm": f"{attention}{name}_norm.weight" for name in ("q", "k")}
    names |= {name: f"{mlp}{name}_proj.weight" for name in ("gate", "up", "down")}
    names |= {"router": f"{mlp}gate.weight"}
    names |= {"experts_gate_up": f"{mlp}experts.gate_up_proj", "experts_down": f"{mlp}experts.down_proj"}
    return names | {
        "input_norm": f"{prefix}input_layernorm.weight",
        "post_norm": f"{prefix}post_attention_layernorm.weight",
    }
