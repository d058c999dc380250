"""Models load from a folder or a GGUF file; a model that can't be loaded is a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from dora_rl.core.errors import ConfigError, ModelError
from dora_rl.models.loading import ModelConfig, load
from tests.engine import tiny


def test_a_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    made = tiny.model("qwen3_moe")
    made.save_pretrained(tmp_path)
    loaded = load(ModelConfig(path=str(tmp_path)))
    assert loaded.tokenizer is None
    assert not loaded.model.training
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, made(ids).logits)


def test_the_dtype_is_what_was_asked_for(tmp_path: Path) -> None:
    tiny.model("llama").save_pretrained(tmp_path)
    assert load(ModelConfig(path=str(tmp_path), dtype="bfloat16")).model.dtype == torch.bfloat16


def test_a_gguf_file_can_be_loaded_saved_and_loaded_again(tmp_path: Path) -> None:
    made = tiny.model("llama")
    file = tmp_path / "tiny.gguf"
    write_gguf(made, file)
    loaded = load(ModelConfig(path=str(file)))
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.allclose(loaded.model(ids).logits, made(ids).logits, atol=1e-4)
    loaded.model.save_pretrained(tmp_path / "again")
    again = load(ModelConfig(path=str(tmp_path / "again")))
    with torch.no_grad():
        assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)


@pytest.mark.parametrize(
    ("path", "message"),
    [("./not/here", "config.json"), ("missing.gguf", "no GGUF file")],
)
def test_a_missing_model_is_reported(path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(ModelConfig(path=path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device exists here")
def test_a_missing_device_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cuda"):
        load(ModelConfig(path=str(tmp_path), device="cuda"))


def test_an_unknown_dtype_names_the_known_ones() -> None:
    from dora_rl.core.config import build

    with pytest.raises(ConfigError, match="float32"):
        build(ModelConfig, {"path": "x", "dtype": "float8"})


def write_gguf(made: Any, file: Path) -> None:
    """Write a small Llama as llama.cpp does: with its tensor names and its order of the rows of queries and keys."""
    config = made.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = ["a", "b", "ab", *(f"<{index}>" for index in range(3, config.vocab_size))]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {name: tensor.numpy() for name, tensor in made.state_dict().items()}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            if heads:
                shape = (heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
                weight = np.ascontiguousarray(weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape))
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
