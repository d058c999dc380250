"""The gradient of a step equals the gradient of the formula, however the step is divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.trajectory import Group
from dora_rl.trainer.algorithms import all_algorithms
from dora_rl.trainer.algorithms.losses import second_moment_kept
from dora_rl.trainer.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.objective import References, micro_loss
from dora_rl.trainer.packing import pack
from dora_rl.trainer.policy import PolicyOutput
from tests.trainer import plain
from tests.trainer.factories import assert_close, gradients, groups, llama, moe, trainer

CONSTANT = 64


def step_gradient(model: Any, calls: list[list[Group]], **settings: Any) -> dict[str, torch.Tensor]:
    """The gradient that the optimiser would use, from a trainer that is given the groups in several calls."""
    made = trainer(model, **settings)
    opened = None
    for batch in calls:
        made.accumulate(0, batch)
    opened = made._open
    assert opened is not None
    if not made.config.streams:
        made._gradients(opened, opened.score(opened.groups, made.config.algorithm), {})
    return {name: gradient / opened.denominator for name, gradient in gradients(model).items()}


def padded_gradient(name: str, model: Any, batch: list[Group]) -> dict[str, torch.Tensor]:
    plain.objective(name, model, batch, CONSTANT).backward()
    return gradients(model)


def settings_of(name: str) -> dict[str, Any]:
    return {"algorithm": {"name": name, "constant_length": CONSTANT}}


@pytest.mark.parametrize("name", all_algorithms())
def test_packed_gradient_equals_one_padded_batch_of_the_plain_formula(name: str) -> None:
    noise = 0.001 if name == "gspo" else 0.4  # so that ratios fall on both sides of the bounds
    batch = groups(model=llama(), noise=noise)
    wanted = padded_gradient(name, llama(), batch)
    found = step_gradient(llama(), [batch], micro_batch_tokens=70, **settings_of(name))
    assert_close(found, wanted)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "reinforce_pp"])
def test_streamed_equals_batched(name: str) -> None:
    batch = groups(count=5, model=llama())
    whole = step_gradient(llama(), [batch], micro_batch_tokens=4096, **settings_of(name))
    streamed = step_gradient(llama(), [[group] for group in batch], micro_batch_tokens=50, **settings_of(name))
    assert_close(streamed, whole)


REGIONS = {"binary_tv": 0.15, "binary_kl": 0.05, "second_moment": 0.04}
"""Trust regions in place of the clip, with their default thresholds."""
CORRECTIONS = ["token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "geometric_mask"]


@pytest.mark.parametrize("name", ["grpo", "dapo", "longcat", "reinforce_pp"])
@pytest.mark.parametrize("region", REGIONS)
def test_a_trust_region_in_place_of_the_clip_equals_the_plain_formula(name: str, region: str) -> None:
    batch = groups(model=llama(initializer_range=0.6), noise=0.8)  # likely tokens too: rare ones hardly diverge
    for delta in (None, 0.005):
        model = llama(initializer_range=0.6)
        plain.objective(name, model, batch, CONSTANT, (region, delta or REGIONS[region])).backward()
        algorithm = {"name": name, "constant_length": CONSTANT, "trust_region": region, "trust_region_delta": delta}
        made = llama(initializer_range=0.6)
        assert_close(step_gradient(made, [batch], micro_batch_tokens=70, algorithm=algorithm), gradients(model))
    free = llama(initializer_range=0.6)
    plain.objective(name, free, batch, CONSTANT, (region, 1e9)).backward()
    masked, unmasked = gradients(model), gradients(free)
    assert any(not torch.allclose(masked[key], unmasked[key]) for key in masked), "no token was masked"


def test_a_trust_region_masks_only_tokens_that_move_further_away() -> None:
    """The same divergence is kept where the advantage pulls the token back."""
    batch = pack(groups(count=1, longest=9, noise=0)[0].trajectories)
    behaviour = torch.full_like(batch.behaviour, -0.7)
    same = batch.__class__(**{n: getattr(batch, n) for n in batch.__slots__} | {"behaviour": behaviour})
    for shift, kept_sign in ((0.6, -1), (-0.6, 1)):
        for region in ("binary_tv", "binary_kl"):
            config = AlgorithmConfig.model_validate({"name": "dapo", "trust_region": region})
            logprobs = (behaviour + shift).requires_grad_()
            advantages = torch.tensor([1.0, -1.0, 2.0, -2.0])
            output = PolicyOutput(logprobs, torch.zeros_like(logprobs))
            loss = micro_loss(config, output, same, advantages, References())
            (found,) = torch.autograd.grad(loss.total, logprobs)
            of_token = advantages[batch.sequence]
            wanted = torch.where(of_token * kept_sign > 0, -of_token * np.exp(shift), torch.zeros_like(of_token))
            torch.testing.assert_close(found, wanted)
            assert float(loss.sums["clipped"]) == int((of_token * kept_sign < 0).sum())


def test_a_masked_token_whose_ratio_overflows_has_no_gradient() -> None:
    batch = pack(groups(count=1, longest=9, noise=0)[0].trajectories)
    behaviour = torch.full_like(batch.behaviour, -1e6)
    same = batch.__class__(**{n: getattr(batch, n) for n in batch.__slots__} | {"behaviour": behaviour})
    logprobs = torch.full_like(behaviour, -1e-9).requires_grad_()  # its probability rounds to 1
    none = torch.zeros_like(batch.sequence, dtype=torch.bool)
    for region in REGIONS:
        config = AlgorithmConfig.model_validate({"name": "dapo", "trust_region": region})
        output = PolicyOutput(logprobs, torch.zeros_like(logprobs))
        loss = micro_loss(config, output, same, torch.ones(4), References(kept=none))
        (found,) = torch.autograd.grad(loss.total, logprobs)
        assert float(loss.total.detach()) == 0
        assert not found.any()


@pytest.mark.parametrize(
    "pieces",
    [{"trust_region": region, "trust_region_delta": 0.005} for region in REGIONS]
    + [{"correction": correction} for correction in CORRECTIONS]
    + [{"veto": 0.5}, {"trust_region": "second_moment", "veto": 0.5, "correction": "token_mask"}],
    ids=lambda pieces: "-".join(f"{key}={value}" for key, value in pieces.items()),
)
def test_pieces_streamed_equal_batched(pieces: dict[str, Any]) -> None:
    batch = groups(count=5, model=llama())
    algorithm = {"name": "dapo"} | pieces
    whole = step_gradient(llama(), [batch], micro_batch_tokens=4096, algorithm=algorithm)
    streamed = step_gradient(llama(), [[group] for group in batch], micro_batch_tokens=50, algorithm=algorithm)
    assert_close(streamed, whole)


@pytest.mark.parametrize(("name", "region"), [("grpo", None), ("gspo", None), ("cispo", None), ("dapo", "binary_tv")])
def test_a_veto_equals_the_plain_formula(name: str, region: str | None) -> None:
    batch = groups(model=llama(), noise=0.001 if name == "gspo" else 0.4)
    threshold = 0.998 if name == "gspo" else 0.5
    algorithm = settings_of(name)["algorithm"] | {"veto": threshold} | ({"trust_region": region} if region else {})
    of_region = (region, REGIONS[region]) if region else None
    model, without = llama(), llama()
    plain.objective(name, model, batch, CONSTANT, of_region, threshold).backward()
    plain.objective(name, without, batch, CONSTANT, of_region).backward()
    wanted, unvetoed = gradients(model), gradients(without)
    assert any(not torch.allclose(wanted[key], unvetoed[key], rtol=0.1) for key in wanted), "no trajectory was vetoed"
    assert_close(step_gradient(llama(), [batch], micro_batch_tokens=70, algorithm=algorithm), wanted)


def test_a_veto_spares_trajectories_with_a_positive_advantage() -> None:
    batch = pack(groups(count=1, longest=9, noise=0)[0].trajectories)
    config = AlgorithmConfig.model_validate({"name": "dapo", "clip_low": 1.0, "veto": 1e-4})
    logprobs = batch.behaviour.clone()
    for sequence in (0, 1):
        logprobs[torch.nonzero(batch.sequence == sequence)[0]] -= 9.3  # e^-9.3 < 1e-4
    logprobs[torch.nonzero(batch.sequence == 3)[0]] -= 9.1  # e^-9.1 > 1e-4
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    output = PolicyOutput(logprobs.requires_grad_(), torch.zeros_like(logprobs))
    loss = micro_loss(config, output, batch, advantages, References())
    (found,) = torch.autograd.grad(loss.total, logprobs)
    assert [bool(found[batch.sequence == sequence].any()) for sequence in range(4)] == [True, False, True, True]
    assert float(loss.sums["vetoed"]) == pytest.approx(1)


def test_the_share_of_vetoed_trajectories_is_reported() -> None:
    batch = groups(model=llama())
    made = trainer(llama(), algorithm={"veto": 0.5}, micro_batch_tokens=50)
    made.accumulate(0, batch)
    trajectories = [t for g in batch for t in g.trajectories]
    logprobs, _ = plain.padded_logprobs(llama(), trajectories)
    count = 0
    for row, (trajectory, advantage) in enumerate(zip(trajectories, plain.advantages_of("grpo", batch), strict=True)):
        trained = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
        behaviour = torch.from_numpy(trajectory.behaviour_logprobs.copy())[trained]
        count += plain.vetoed(0.5, logprobs[row, trained], behaviour, advantage)
    assert 0 < count < len(trajectories)
    assert made.apply(0).metrics["off_policy/vetoed"] == pytest.approx(count / len(trajectories))


TOKENS = st.lists(st.tuples(st.integers(-20, 20), st.sampled_from([-1.0, 0.0, 0.5, 2.0])), max_size=30)


@given(TOKENS, st.sampled_from([0.0004, 0.01, 0.04, 1.0]), st.randoms())
def test_the_second_moment_of_what_is_kept_is_bounded_and_no_more_is_masked(
    tokens: list[tuple[int, float]], threshold: float, random: Any
) -> None:
    def kept_of(given: list[tuple[int, float]]) -> list[bool]:
        log_ratios = torch.tensor([ratio / 50 for ratio, _ in given], dtype=torch.float64)
        advantages = torch.tensor([advantage for _, advantage in given], dtype=torch.float64)
        return [bool(one) for one in second_moment_kept(log_ratios, advantages, threshold)]

    kept = kept_of(tokens)
    outwards = [(ratio * advantage > 0) for ratio, advantage in tokens]
    assert all(one or away for one, away in zip(kept, outwards, strict=True)), "only tokens that move away are masked"
    squares = [(ratio / 50) ** 2 for ratio, _ in tokens]
    rest = [square for square, one, away in zip(squares, kept, outwards, strict=True) if one and away]
    assert not rest or sum(rest) / len(rest) <= threshold + 1e-12
    out = [square for square, one in zip(squares, kept, strict=True) if not one]
    if out:
        assert max(rest, default=0) < min(out), "the largest squares are masked, equal ones together"
        tied = [square for square in out if square == min(out)]
        assert sum(rest + tied) / len(rest + tied) > threshold - 1e-12, "one value more would be too much"
    order = list(range(len(tokens)))
    random.shuffle(order)
    assert kept_of([tokens[at] for at in order]) == [kept[at] for at in order]


def test_the_second_moment_needs_the_whole_update() -> None:
    assert TrainerConfig().streams
    assert TrainerConfig.model_validate({"algorithm": {"trust_region": "binary_tv", "veto": 0.1}}).streams
    assert not TrainerConfig.model_validate({"algorithm": {"trust_region": "second_moment"}}).streams


def test_each_update_has_its_own_second_moment() -> None:
    """With mini-batches, the tokens of one update do not decide on those of another."""
    batch = groups(count=2, model=llama())
    settings: dict[str, Any] = {
        "algorithm": {"trust_region": "second_moment"},
        "optimiser": {"learning_rate": 1e-12},
    }
    made = trainer(llama(), mini_batches=2, **settings)
    made.accumulate(0, batch)
    opened = made._open
    assert opened is not None
    made.apply(0)
    alone = trainer(llama(), **settings)
    alone.accumulate(0, batch[1:])
    other = alone._open
    assert other is not None
    alone.apply(0)
    assert opened.kept.keys() == other.kept.keys() == {trajectory.id for trajectory in batch[1].trajectories}
    assert all(torch.equal(opened.kept[one], other.kept[one]) for one in other.kept)
    assert not all(bool(tokens.all()) for tokens in other.kept.values())


def test_the_geometric_mask_has_bounds_of_its_own() -> None:
    def bounds(**settings: Any) -> tuple[float, float]:
        return AlgorithmConfig.model_validate(settings).correction_bounds

    assert bounds(correction="geometric_mask") == (0.9, 1.1)
    assert bounds(correction="geometric_mask", correction_low=0.99) == (0.99, 1.1)
    assert bounds(correction="sequence_mask", correction_high=3.0) == (0.5, 3.0)


@pytest.mark.parametrize("correction", CORRECTIONS[:4])
def test_default_bounds_of_corrections_are_bit_for_bit_one_half_and_two(correction: str) -> None:
    batch = groups(model=llama())
    bounds = {"correction_low": 0.5, "correction_high": 2.0}
    wanted = step_gradient(llama(), [batch], algorithm={"correction": correction, **bounds})
    found = step_gradient(llama(), [batch], algorithm={"correction": correction})
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("tied", [True, False])
def test_packed_equals_padded_with_and_without_tied_embeddings(tied: bool) -> None:
    batch = groups(model=llama(tie_word_embeddings=tied))
    wanted = padded_gradient("dapo", llama(tie_word_embeddings=tied), batch)
    found = step_gradient(llama(tie_word_embeddings=tied), [batch], **settings_of("dapo"))
    assert_close(found, wanted)


def test_packed_equals_padded_for_a_mixture_of_experts() -> None:
    batch = groups(model=moe())
    wanted = padded_gradient("grpo", moe(), batch)
    found = step_gradient(moe(), [batch], **settings_of("grpo"))
    assert_close(found, wanted)


def test_gradient_checkpointing_changes_nothing() -> None:
    batch = groups(model=llama())
    wanted = step_gradient(llama(), [batch])
    found = step_gradient(llama(), [batch], gradient_checkpointing=True)
    assert_close(found, wanted)


@pytest.mark.parametrize("correction", ["none", *CORRECTIONS])
@pytest.mark.parametrize(
    ("name", "region", "veto"),
    [
        *((name, "clip", None) for name in all_algorithms()),
        *(("dapo", region, None) for region in REGIONS),
        ("dapo", "clip", 0.4),
        ("dapo", "binary_kl", 0.4),
    ],
)
def test_gradients_of_every_loss_against_finite_differences(
    name: str, region: str, veto: float | None, correction: str
) -> None:
    """The derivatives with respect to the log-prob and entropy of each token, in double precision and away from the
    points where clipping or masking starts."""
    config = AlgorithmConfig.model_validate(
        {
            "name": name,
            "constant_length": CONSTANT,
            "correction": correction,
            "trust_region": region,
            "veto": veto,
            "kl_coefficient": 0.3,
            "entropy_coefficient": 0.2,
        }
    )
    batch = pack(groups(count=1, longest=9, noise=0)[0].trajectories)
    random = torch.Generator().manual_seed(3)
    count = len(batch.targets)

    def noisy(scale: float) -> torch.Tensor:
        return batch.behaviour.double() + scale * torch.randn(count, generator=random, dtype=torch.float64)

    anchor, reference = noisy(0.1), noisy(0.5)
    advantages = torch.tensor([1.5, -0.7, 0.4, -1.2], dtype=torch.float64)

    def value(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        double = batch.__class__(
            **{n: getattr(batch, n) for n in batch.__slots__} | {"behaviour": batch.behaviour.double()}
        )
        return micro_loss(
            config, PolicyOutput(logprobs, entropy), double, advantages, References(reference, anchor)
        ).total

    inputs = (
        noisy(0.0004 if name == "gspo" else 0.5).requires_grad_(),
        torch.rand(count, generator=random, dtype=torch.float64).requires_grad_(),
    )
    # CISPO's ratio is a weight without gradient by design: the derivative is taken with a constant weight.
    if name == "cispo":
        total = value(*inputs)
        (found,) = torch.autograd.grad(total, inputs[0])
        base = (inputs[0] - (anchor if correction != "none" else batch.behaviour.double())).detach().exp()
        gap = (anchor - batch.behaviour.double()).exp()
        weight = base.clamp(0, 1.28) * advantages[batch.sequence]
        if correction == "geometric_mask":
            sums = torch.zeros(4, dtype=torch.float64).index_add(0, batch.sequence, gap.log())
            used = (sums / batch.lengths).exp()[batch.sequence]
            weight = weight * ((used >= 0.9) & (used <= 1.1))
        elif correction != "none":
            sums = torch.zeros(4, dtype=torch.float64).index_add(0, batch.sequence, gap.log())[batch.sequence].exp()
            used = sums if correction.startswith("sequence") else gap
            weight = weight * (
                used.clamp(max=2.0) if correction.endswith("truncate") else used * ((used >= 0.5) & (used <= 2.0))
            )
        kl = 0.3 * (1 - (reference - inputs[0].detach()).exp())
        torch.testing.assert_close(found, -weight + kl)
        return
    assert torch.autograd.gradcheck(value, inputs, eps=1e-7, atol=1e-5)


def test_corrections_follow_their_formulas() -> None:
    batch = pack(groups(count=1, longest=9, noise=0)[0].trajectories)
    anchor = batch.behaviour + 0.3 * torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(1))
    policy = PolicyOutput(anchor.clone().requires_grad_(), torch.zeros_like(anchor))
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0])
    gap = np.exp((anchor - batch.behaviour).numpy().astype(np.float64))
    masked = 0
    for kind in CORRECTIONS:
        config = AlgorithmConfig.model_validate(
            {"name": "dapo", "correction": kind}
            | (
                {"correction_low": 0.95, "correction_high": 1.05}
                if kind == "geometric_mask"
                else {"correction_low": 0.8, "correction_high": 1.2}
            )
        )
        (found,) = torch.autograd.grad(
            micro_loss(config, policy, batch, advantages, References()).total, policy.logprobs
        )
        for token in range(len(anchor)):
            siblings = batch.sequence == batch.sequence[token]
            value = float(np.prod(gap[siblings.numpy()])) if kind.startswith("sequence") else float(gap[token])
            if kind.endswith("truncate"):
                weight = min(value, 1.2)
            elif kind == "geometric_mask":
                mean = float(np.prod(gap[siblings.numpy()])) ** (1 / int(siblings.sum()))
                weight = 1.0 if 0.95 <= mean <= 1.05 else 0.0
                masked += weight == 0.0
            else:
                weight = value if 0.8 <= value <= 1.2 else 0.0
            wanted = -weight * float(advantages[batch.sequence[token]])
            assert float(found[token]) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert 0 < masked < len(anchor)


@pytest.mark.parametrize("weighted", [False, True])
def test_kl_entropy_and_temperature_against_the_plain_formula(weighted: bool) -> None:
    batch = groups(model=llama())
    settings = {"name": "dapo", "kl_coefficient": 0.1, "kl_ratio": weighted, "entropy_coefficient": 0.05}
    model = llama()
    made = trainer(model, algorithm=settings, temperature=0.7)
    with torch.no_grad():  # move away from the reference, which is the model as given
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.sin(torch.arange(parameter.numel()).float()).view_as(parameter))
    moved = {name: value.clone() for name, value in model.state_dict().items()}
    made.accumulate(0, batch)
    assert made._open is not None
    found = {name: gradient / made._open.denominator for name, gradient in gradients(model).items()}

    trajectories = [t for g in batch for t in g.trajectories]
    with torch.no_grad():
        reference, _ = plain.padded_logprobs(llama(), trajectories, 0.7)
    again = llama()
    again.load_state_dict(moved)
    logprobs, entropy = plain.padded_logprobs(again, trajectories, 0.7)
    total, count = torch.tensor(0.0), 0
    for row, (trajectory, advantage) in enumerate(zip(trajectories, plain.advantages_of("dapo", batch), strict=True)):
        for at in np.flatnonzero(trajectory.loss_mask):
            new, old = logprobs[row, at], float(trajectory.behaviour_logprobs[at])
            ratio = torch.exp(new - old)
            gain = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.28) * advantage)
            kl = torch.exp(reference[row, at] - new) - (reference[row, at] - new) - 1
            total = total - gain + 0.1 * kl * (ratio if weighted else 1) - 0.05 * entropy[row, at]
            count += 1
    (total / count).backward()
    assert_close(found, gradients(again))
