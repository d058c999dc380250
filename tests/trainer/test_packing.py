"""Packing loses, repeats and pads no tokens; the head equals a plain log-softmax in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma3TextConfig, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from dora_rl.models import head
from dora_rl.trainer.packing import pack, plan
from dora_rl.trainer.policy import Policy
from tests.trainer.factories import SMALL, groups, plain_logprobs


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 6), size=st.integers(1, 5), seed=st.integers(0, 999), budget=st.integers(1, 300))
def test_every_trajectory_once_and_no_bin_over_budget(count: int, size: int, seed: int, budget: int) -> None:
    batch = groups(count, size, seed=seed)
    bins = plan(batch, budget)
    planned = sorted(t.id for trajectories in bins for t in trajectories)
    assert planned == sorted(t.id for g in batch for t in g.trajectories)
    for trajectories in bins:
        packed = pack(trajectories)
        assert packed.tokens.numel() <= budget or len(trajectories) == 1


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 4), size=st.integers(1, 5), seed=st.integers(0, 999))
def test_rows_hold_the_trajectories_and_prompts_are_shared(count: int, size: int, seed: int) -> None:
    batch = groups(count, size, seed=seed)
    trajectories = [t for g in batch for t in g.trajectories]
    packed = pack(trajectories)
    prompts = {t.tokens[: t.prompt_length].tobytes(): t.prompt_length for t in trajectories}
    responses = sum(len(t.tokens) - t.prompt_length for t in trajectories)
    assert packed.tokens.numel() == sum(prompts.values()) + responses
    flat = packed.layout.inputs
    assert torch.equal(flat[packed.layout.outputs], torch.arange(packed.tokens.numel()))
    targets = torch.cat([torch.from_numpy(t.tokens[t.loss_mask].astype("int64")) for t in trajectories])
    assert torch.equal(packed.targets, targets)
    assert packed.lengths.tolist() == [t.response_length for t in trajectories]


def exotic(kind: str) -> Any:
    """Models with attention windows shorter than the trajectories, soft caps and unusual head sizes."""
    torch.manual_seed(0)
    common: dict[str, Any] = SMALL | {"head_dim": 8, "pad_token_id": 0, "sliding_window": 8}
    config: Any = {
        "gemma2": lambda: Gemma2Config(**common, query_pre_attn_scalar=8, final_logit_softcapping=5.0),
        "gemma3": lambda: Gemma3TextConfig(**common, query_pre_attn_scalar=8),
        "qwen2": lambda: Qwen2Config(**common, use_sliding_window=True, max_window_layers=1),
    }[kind]()
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "qwen2"])
def test_windows_and_soft_caps(kind: str) -> None:
    batch = groups(count=2)
    trajectories = [t for g in batch for t in g.trajectories]
    wanted = torch.cat(
        [torch.from_numpy(plain_logprobs(exotic(kind), t.tokens)[t.loss_mask]).float() for t in trajectories]
    )
    with torch.no_grad():
        found = Policy(exotic(kind), 1.0)(pack(trajectories)).logprobs
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_head_equals_log_softmax(keep: bool, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 50 * 7)  # seven rows, so that the last chunk is shorter
    monkeypatch.setattr(head, "KEEP_BYTES", 10**9 if keep else 0)
    random = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 50, (24,), generator=random)
    coefficients = torch.randn(2, 24, generator=random)
    results = []
    for fused in (True, False):
        random.manual_seed(1)
        states = torch.randn(24, 16, generator=random).requires_grad_()
        weight = (0.3 * torch.randn(50, 16, generator=random)).requires_grad_()
        if fused:
            logprobs, entropy = head.logprobs_and_entropy(states, weight, targets, temperature)
        else:
            logprobs, entropy = head.from_logits(states @ weight.T, targets, temperature)
        (logprobs @ coefficients[0] + entropy @ coefficients[1]).backward()
        results.append((logprobs, entropy, states.grad, weight.grad))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
