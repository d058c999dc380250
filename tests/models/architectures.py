"""Builds every causal LM of the installed `transformers` as a tiny model, and checks it in rollout and training.

A tiny model is made from the default config of its architecture: sizes shrink by the name of their setting (`SIZES`),
lists with one entry per layer keep one entry for each kind of layer, and `CHANGES` has what a single architecture needs
in addition. Weights are random and larger than in a freshly initialised model, so that the log-probs of a token depend
clearly on all tokens before it; otherwise nearly uniform distributions would hide wrong attention.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dora_rl.core.errors import ModelError
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.exactness import attention_of, set_attention
from dora_rl.models.sources import MemoryWeights
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.packing import pack
from dora_rl.trainer.trainer import Trainer

VOCAB = 96
TOLERANCE = 2e-3
"""Largest difference of a log-prob, in nats, that can be rounding."""
CLEAR = 0.02
"""The least amount, in nats, by which another first token must change some later log-prob."""

_NAMES = {
    32: "hidden_size n_embd d_model dim model_dim embed_dim embedding_size hidden_dim word_embed_proj_dim "
    "decoder_hidden_size input_embedding_size hidden_size_per_layer_input attention_hidden_size lru_width emb_dim",
    48: "intermediate_size ffn_dim ffn_hidden_size n_inner decoder_ffn_dim encoder_ffn_dim moe_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size feed_forward_size dff d_inner dim_ff "
    "intermediate_size_mlp moe_shared_expert_intermediate_size block_ff_dim expert_ffn_hidden_size d_ff "
    "expert_intermediate_size moe_latent_size ffn_dim_per_expert",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts num_decoder_attention_heads "
    "num_encoder_attention_heads linear_num_value_heads index_n_heads conv_L_cache linear_conv_kernel_dim",
    2: "num_key_value_heads num_kv_heads num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_experts_per_tok moe_topk num_experts_per_token moe_k linear_num_key_heads top_k "
    "num_decoder_layers num_encoder_layers num_selected_experts swa_num_key_value_heads",
    8: "head_dim kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim qk_nope_head_dim rotary_dim global_head_dim "
    "sliding_window attention_window_size linear_key_head_dim linear_value_head_dim attention_head_dim "
    "index_head_dim laurel_rank attention_chunk_size swa_head_dim swa_v_head_dim kv_channels d_kv mamba_n_heads "
    "mamba_d_head mamba_d_state state_size ssm_state_size mamba_num_heads mamba_head_dim mamba_dt_rank",
    16: "mamba_chunk_size chunk_size",
    64: "mamba_d_ssm",
    VOCAB: "vocab_size vocab_size_per_layer_input n_vocab",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions "
    "model_max_length context_length max_length original_max_position_embeddings",
    1: "n_shared_experts first_k_dense_replace num_shared_experts n_group topk_group",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}

# What single architectures need in addition: settings that depend on each other.
CHANGES: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
}
# In latent attention, keys have as many heads as queries.
_LATENT = "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear "
_LATENT += "longcat_flash minicpm3 youtu"
CHANGES |= {name: {"num_key_value_heads": 4} for name in _LATENT.split()}
CHANGES["deepseek_v2"] |= {"num_experts_per_tok": 2}
# Variants of an architecture that change its attention.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "falcon": {"alibi": {"alibi": True}, "new-decoder": {"new_decoder_architecture": True}},
    "stablelm": {"parallel": {"use_parallel_residual": True, "qk_layernorm": True}},
}


class CheckResult(NamedTuple):
    """The result for one architecture."""

    rollout: str
    """The runner that serves it, or the error message if none does."""
    rollout_exact: bool
    training: str
    """The form in which it is trained, or the error message if there is none."""
    training_exact: bool


class NotTinyError(Exception):
    """A tiny model of this architecture can't be built."""


def names() -> list[str]:
    """All architectures by model type, and their variants as `type:variant`."""
    return [
        name
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        for name in (kind, *(f"{kind}:{variant}" for variant in VARIANTS.get(kind, ())))
    ]


def build(name: str, seed: int = 0) -> Any:
    """Build the tiny model; a `NotTinyError` says why that is not possible."""
    kind, _, variant = name.partition(":")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            changes = CHANGES.get(kind, {}) | (VARIANTS[kind][variant] if variant else {})
            config = shrunk(CONFIG_MAPPING[kind], changes)
            made: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
            if not isinstance(config, made.config_class):
                config = config.get_text_config()  # for a multimodal model, as in `AutoModelForCausalLM`
            with torch.device("meta"):
                parameters = sum(parameter.numel() for parameter in made(config).parameters())
            if parameters > 7_000_000:
                raise NotTinyError(f"{parameters:,} parameters")
            torch.manual_seed(seed)
            model = made(config)
            model.float().eval()
            _sharpen(model)
            _check_usable(model)
    except NotTinyError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise NotTinyError(f"{type(error).__name__}: {lines[0][:160]}") from error
    return model


def shrunk(kind: Any, changes: dict[str, Any]) -> Any:
    """A small config of this class."""
    return kind(**_settings(kind(), changes))


def _settings(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    given = config.to_dict()
    inner = {name: getattr(config, name) for name in given if hasattr(getattr(config, name, None), "to_dict")}
    settings: dict[str, Any] = {}
    picked, layers = _picked_layers(given, changes)
    for name, value in given.items():
        if name in inner:
            settings[name] = _settings(inner[name], changes.get(name, {}))
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            settings[name] = min(SIZES[name], value) if value > 0 else value
        elif name in SIZES and isinstance(value, list) and len(value) == layers:
            settings[name] = [SIZES[name]] * len(picked)
        elif isinstance(value, list) and value and len(value) == layers:
            settings[name] = [value[index] for index in picked]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCAB:
            settings[name] = VOCAB - 1 - len(settings) % 8
        elif name == "is_decoder":
            settings[name] = True
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        if name in settings and picked:
            settings[name] = len(picked)
    settings |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return settings | changes


def _picked_layers(given: dict[str, Any], changes: dict[str, Any]) -> tuple[list[int], int]:
    """The layers to keep (the first of each kind, and at least two), and the number of all layers."""
    layers = next((given[name] for name in ("num_hidden_layers", "n_layer") if isinstance(given.get(name), int)), 0)
    kinds = given.get("layer_types") or given.get("layers_block_type") or given.get("attention_layers")
    if not isinstance(kinds, list) or len(kinds) != layers:
        return ([0, 1] if layers >= 2 else [0] * layers), layers
    picked = sorted({kinds.index(kind) for kind in kinds})
    if len(picked) == 1:
        picked = [picked[0], next(index for index in range(layers) if index != picked[0])]
    return picked, layers


@torch.no_grad()
def _sharpen(model: Any) -> None:
    """Set weights with which the outputs depend clearly on all inputs."""
    generator = torch.Generator().manual_seed(1)
    done: set[int] = set()
    for parameter in model.parameters():
        if id(parameter) in done or not parameter.is_floating_point():
            continue
        done.add(id(parameter))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * (1.2 / math.sqrt(parameter.shape[-1])))
        else:
            parameter.add_(noise * 0.1)
    embeddings = model.get_input_embeddings().weight
    embeddings.copy_(torch.randn(embeddings.shape, generator=generator) * 0.8)


@torch.no_grad()
def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probs from a plain forward pass of the module."""
    own = attention_of(model)
    set_attention(model, "eager")
    try:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    finally:
        set_attention(model, own)
    return logits.float().log_softmax(-1)  # type: ignore[no-any-return]


def _check_usable(model: Any) -> None:
    """A tiny model is useful if a plain forward pass works and its log-probs depend on the earlier tokens."""
    tokens = np.random.default_rng(0).integers(40, 80, 20).tolist()
    logprobs = plain(model, tokens)
    if not logprobs.isfinite().all():
        raise NotTinyError("random weights give no finite log-probs")
    if logprobs.shape[-1] > 4 * VOCAB:
        raise NotTinyError("its vocabulary does not shrink")
    other = plain(model, [tokens[0] + 5, *tokens[1:]])
    if float((logprobs - other)[3:].abs().max()) < CLEAR:
        raise NotTinyError("random weights give log-probs that do not depend on the tokens before")


def check(name: str) -> CheckResult:
    """Build the model and verify what rollout and training compute with it; a wrong result is an `AssertionError`."""
    return CheckResult(*_rollout(build(name)), *_training(build(name)))


def _rollout(model: Any) -> tuple[str, bool]:
    config = EngineConfig(kv_bytes=1 << 22, block_size=4, prefill_chunk=7, max_requests=5, threads=1)
    try:
        engine = Engine(model, MemoryWeights.of(model), config)
    except ModelError as error:
        return str(error), False
    engine.load(0, 0)
    engine.wait_for_loads()
    random = np.random.default_rng(3)
    prompts = [random.integers(40, 80, length).tolist() for length in (9, 1, 17, 4, 26)]
    prompts.append(prompts[2])
    for index, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=8 + index)
        engine.submit(Request(trajectory=index, version=0, prompt=tuple(prompt), sampling=sampling))
    generated: dict[int, tuple[list[int], list[float]]] = {index: ([], []) for index in range(len(prompts))}
    while engine.busy:
        for chunk in engine.step().chunks:
            generated[chunk.trajectory][0].extend(chunk.tokens.tolist())
            generated[chunk.trajectory][1].extend(chunk.model_logprobs.tolist())
    worst = 0.0
    for index, prompt in enumerate(prompts):
        tokens, logprobs = generated[index]
        assert len(tokens) == 8 + index
        reference = plain(model, prompt + tokens)[len(prompt) - 1 : -1]
        wanted = reference.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((wanted - torch.tensor(logprobs)).abs().max()))
        # Some prefixes alone: a model that looks ahead gives other log-probs for a sequence than for its prefix.
        for position in (0, len(tokens) // 2):
            alone = plain(model, prompt + tokens[:position])[-1, tokens[position]]
            worst = max(worst, abs(float(alone) - logprobs[position]))
    assert worst <= TOLERANCE, f"rollout by the {engine.kernels} runner was accepted, and is wrong by {worst:.3g} nats"
    return engine.kernels, True


def _training(model: Any) -> tuple[str, bool]:
    try:
        trainer = Trainer(model, TrainerConfig.model_validate({"optimiser": {"learning_rate": 1e-3}}))
    except ModelError as error:
        return str(error), False
    made = group()
    batch = pack(made.trajectories)
    found = trainer.policy(batch).logprobs.detach()
    wanted = torch.cat([_taken(plain(model, t.tokens.tolist()), t) for t in made.trajectories])
    worst = float((found - wanted).abs().max())
    form = "packed" if trainer.policy.form.packed else "padded"
    assert worst <= TOLERANCE, f"training in {form} form was accepted, and is wrong by {worst:.3g} nats"
    _compare_gradients(trainer, batch)
    trainer.accumulate(0, [made])
    assert math.isfinite(trainer.apply(0).metrics["gradient_norm"])
    return form, True


def _compare_gradients(trainer: Trainer, batch: Any) -> None:
    """Compare the gradient of all log-probs, packed and one trajectory at a time."""
    model = trainer.model
    trainer.policy(batch).logprobs.sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    own = attention_of(model)
    set_attention(model, "eager")
    for trajectory in batch.trajectories:
        ids = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
        logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        _taken(logprobs, trajectory).sum().backward()  # type: ignore[no-untyped-call]
    set_attention(model, own)
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            error = float((found[name] - parameter.grad).abs().max())
            assert error <= 1e-3 * scale, f"the gradient of {name} is wrong by {error / scale:.3g} of the largest"
    model.zero_grad()


def _taken(logprobs: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
    at = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
    return logprobs[at - 1, torch.from_numpy(trajectory.tokens.astype(np.int64))[at]]


def group() -> Group:
    random = np.random.default_rng(4)
    prompt = random.integers(40, 80, 6)
    made = []
    for index, length in enumerate((19, 3, 12, 4)):
        tokens = np.concatenate([prompt, random.integers(40, 80, length)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        behaviour = np.full(len(tokens), -3.0, dtype=np.float32)
        made.append(
            Trajectory(
                id=index, version=0, tokens=tokens, loss_mask=mask, behaviour_logprobs=behaviour, reward=float(index)
            )
        )
    return Group(id=0, trajectories=tuple(made))
