"""A step is applied completely or not at all, reports its metrics, and names the trajectories at fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import peft
import pytest
import torch

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError, IntegrityError, NonFiniteError, TrajectoryError
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.trainer.config import OptimiserConfig, TrainerConfig
from dora_rl.trainer.logprob_gap import explained_by_sampling
from dora_rl.trainer.optimiser import learning_rate
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.store import WeightStore
from tests.trainer.factories import gradients, groups, llama, plain_logprobs, trainer

if TYPE_CHECKING:
    from numpy.typing import NDArray

FAST = {"learning_rate": 1e-2}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def replaced(group: Group, index: int, **changes: Any) -> Group:
    """The group with one trajectory changed."""
    old = group.trajectories[index]
    fields = {name: getattr(old, name) for name in old.__struct_fields__} | changes
    trajectories = [*group.trajectories]
    trajectories[index] = Trajectory(**fields)
    return Group(id=group.id, trajectories=tuple(trajectories))


def even(group: Group) -> Group:
    """The group with equal rewards, so that all advantages are zero."""
    for index in range(len(group.trajectories)):
        group = replaced(group, index, reward=1.0)
    return group


def train_step(made: Trainer, batch: list[Group]) -> None:
    step = made.version
    made.accumulate(step, batch)
    made.apply(step)


class PoisonedBackward(torch.autograd.Function):
    """A forward pass that changes nothing, with a backward pass that gives NaN."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("nan")


def poison(model: Any, token: int) -> None:
    """Make the gradient of every forward pass with this token NaN, and leave all losses as they are."""

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = PoisonedBackward.apply(output) if (inputs[0] == token).any() else output
        return found

    model.get_input_embeddings().register_forward_hook(hook)


def test_a_step_changes_the_weights_and_the_version() -> None:
    model = llama()
    before = weights(model)
    made = trainer(model, optimiser=FAST)
    made.accumulate(0, groups())
    assert same(before, weights(model)), "accumulating must not move the weights"
    report = made.apply(0)
    assert (report.step, report.version, made.version) == (0, 1, 1)
    assert not same(before, weights(model))
    assert not gradients(model)


@pytest.mark.parametrize("settings", [{}, {"mini_batches": 2}, {"epochs": 2}], ids=["one", "mini_batches", "epochs"])
def test_nan_in_a_loss_names_the_trajectories_and_leaves_the_weights(settings: dict[str, Any]) -> None:
    model = llama()
    made = trainer(model, optimiser=FAST, micro_batch_tokens=60, **settings)
    made.accumulate(0, groups(seed=1))
    made.apply(0)
    before, moments = weights(model), {name: value.clone() for name, value in made.optimiser.moments().items()}
    bad = groups(seed=2, version=1)
    worst = bad[1].trajectories[2]
    # A behaviour log-prob of almost minus infinity makes the ratio overflow; the advantage must be negative to matter.
    behaviour = np.where(worst.loss_mask, np.float32(-1e9), worst.behaviour_logprobs)
    bad[1] = replaced(bad[1], 2, behaviour_logprobs=behaviour, reward=-9.0)
    with pytest.raises(NonFiniteError, match="step 1: the loss is not finite") as caught:
        train_step(made, bad)
    assert caught.value.trajectories == (worst.id,)
    assert same(before, weights(model))
    assert same(moments, made.optimiser.moments())
    made.accumulate(1, groups(seed=2, version=1))  # the step can be started again
    assert made.apply(1).version == 2


M2PO = {"algorithm": {"trust_region": "second_moment"}}


@pytest.mark.parametrize(
    "settings", [{}, {"mini_batches": 3}, {"mini_batches": 3, **M2PO}], ids=["one", "mini_batches", "second_moment"]
)
def test_nan_in_a_gradient_names_the_trajectories_and_leaves_the_weights(settings: dict[str, Any]) -> None:
    model = llama()
    made = trainer(model, optimiser=FAST, **settings)
    made.accumulate(0, groups(seed=1))
    made.apply(0)
    before, moments = weights(model), {name: value.clone() for name, value in made.optimiser.moments().items()}
    batch = groups(seed=2, version=1)
    tokens = batch[2].trajectories[1].tokens.copy()
    tokens[-2] = 60
    batch[2] = replaced(batch[2], 1, tokens=tokens)
    guilty = tuple(t.id for g in batch for t in g.trajectories if (t.tokens == 60).any())
    poison(model, 60)
    with pytest.raises(NonFiniteError, match="the gradient is not finite") as caught:
        train_step(made, batch)
    assert batch[2].trajectories[1].id in caught.value.trajectories
    assert caught.value.trajectories == guilty
    assert len(guilty) < 12
    assert same(before, weights(model))
    assert same(moments, made.optimiser.moments())


def test_groups_without_signal_are_counted_and_skipped_only_if_asked() -> None:
    batch = groups(count=4, model=llama())
    batch[1] = even(batch[1])
    losses = {}
    for policy in ("train", "skip"):
        made = trainer(llama(), algorithm={"name": "dapo", "no_signal": policy})
        made.accumulate(0, batch)
        metrics = made.apply(0).metrics
        losses[policy] = metrics["loss"]
        assert metrics["batch/groups"] == 4
        assert metrics["batch/groups_without_signal"] == 1
        assert metrics["batch/groups_skipped"] == (policy == "skip")
    tokens = [sum(t.response_length for t in g.trajectories) for g in batch]
    assert losses["skip"] == pytest.approx(losses["train"] * sum(tokens) / (sum(tokens) - tokens[1]), rel=1e-5)


@pytest.mark.parametrize("without", [{1}, {0, 2}, {0, 1, 2, 3}])
def test_groups_without_gradient_are_not_computed_and_change_nothing(
    without: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    after, computed = [], []
    for everything in (True, False):
        model = llama()
        # Weight decay and moments also apply in a step without any gradient.
        made = trainer(model, optimiser={**FAST, "weight_decay": 0.1})
        if everything:
            monkeypatch.setattr(made, "_has_gradient", lambda *_: True)
        for step in range(3):
            batch = groups(count=4, model=llama(), first=4 * step)
            made.accumulate(step, [even(g) if step and n in without else g for n, g in enumerate(batch)])
            opened = made._open
            assert opened is not None
            tokens = opened.trained_tokens
            made.apply(step)
        computed.append(tokens)
        after.append(weights(model))
    assert computed[0] > computed[1]
    for name, tensor in after[0].items():
        torch.testing.assert_close(after[1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("other", [{"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}])
def test_groups_without_advantages_are_computed_if_another_term_has_a_gradient(other: dict[str, float]) -> None:
    made = trainer(llama(), algorithm=other)
    made.accumulate(0, [even(group) for group in groups()])
    assert made._open is not None
    assert made._open.trained_tokens > 0


def test_a_step_of_skipped_groups_makes_a_version_without_an_update() -> None:
    model = llama()
    before = weights(model)
    made = trainer(model, algorithm={"no_signal": "skip"}, optimiser=FAST)
    made.accumulate(0, [even(group) for group in groups()])
    report = made.apply(0)
    assert report.version == 1
    assert report.metrics["batch/updates"] == 0
    assert same(before, weights(model))


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    made = trainer(llama())
    with pytest.raises(IntegrityError, match="step 3 can't be trained: the trainer holds version 0"):
        made.accumulate(3, groups())
    with pytest.raises(IntegrityError, match="no groups"):
        made.apply(0)
    with pytest.raises(IntegrityError, match="group 2 is of version 1, which does not exist before step 0"):
        made.accumulate(0, [*groups(count=2), *groups(count=1, first=2, version=1)])
    made.accumulate(0, groups(count=2))
    with pytest.raises(IntegrityError, match="group 1 is already in step 0"):
        made.accumulate(0, groups(count=1, first=1))
    with pytest.raises(IntegrityError, match="can't be published"):
        made.publish(1, WeightStore(tmp_path, keep=1))
    assert made.publish(0, WeightStore(tmp_path, keep=1)), "an open step has not changed the weights"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft uses that name
@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_published_weights_give_the_policy_of_the_trainer(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = llama(tie_word_embeddings=True)
    made = trainer(model, optimiser=FAST, **settings)
    made.accumulate(0, groups())
    made.apply(0)
    store = WeightStore(tmp_path, keep=2)
    fingerprint = made.publish(1, store)
    served: Any = llama(tie_word_embeddings=True)
    if made.peft_model is not None:
        served = peft.get_peft_model(served, made.peft_model.peft_config["default"])
    with store.lease(1) as lease:
        assert lease.manifest.adapter == bool(settings)
        tensors = lease.tensors()
        if settings:
            assert all("lora_" in name for name in tensors), "only the adapter is published"
            peft.set_peft_model_state_dict(served, tensors)
            lease.verify(peft.get_peft_model_state_dict(served))
        else:
            assert "lm_head.weight" not in tensors, "tied weights are published once"
            served.load_state_dict(tensors, strict=False, assign=True)
            served.tie_weights()
            lease.verify({name: served.state_dict()[name] for name in tensors})
    assert store.manifest(1).fingerprint == fingerprint
    model.set_attn_implementation("sdpa")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, model.eval()(ids).logits)


def test_mini_batches_and_epochs_equal_single_updates() -> None:
    """Two mini-batches in two epochs equal four single updates; all ratios refer to the behaviour policy."""
    batch = groups(count=4, model=llama())
    model = llama()
    made = trainer(model, optimiser=FAST, mini_batches=2, epochs=2)
    made.accumulate(0, batch)
    assert made.apply(0).metrics["batch/updates"] == 4

    by_hand = llama()
    again = trainer(by_hand, optimiser=FAST)
    for step in range(4):
        again.accumulate(step, batch[step % 2 :: 2])
        again.apply(step)
    assert same(weights(model), weights(by_hand))


def test_a_correction_with_several_updates_keeps_the_gap_of_the_first() -> None:
    """The gap is that at the start of the step, even after updates have changed the policy."""
    model = llama()
    batch = groups(count=2, model=model, noise=0.5)
    made = trainer(model, optimiser=FAST, epochs=3, algorithm={"name": "dapo", "correction": "token_truncate"})
    made.accumulate(0, batch)
    metrics = made.apply(0).metrics
    gaps = []
    for trajectory in (t for g in batch for t in g.trajectories):
        own = plain_logprobs(llama(), trajectory.tokens)[trajectory.loss_mask]
        gaps.append(np.minimum(np.exp(own - trajectory.behaviour_logprobs[trajectory.loss_mask]), 2.0))
    assert metrics["correction/mean"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)
    assert metrics["ratio/max"] != pytest.approx(1.0), "later updates see a ratio to the start of the step"


def test_optimiser_state_in_host_memory_gives_the_same_weights() -> None:
    models = [llama(), llama()]
    for model, offload in zip(models, (False, True), strict=True):
        made = trainer(model, optimiser={**FAST, "weight_decay": 0.1, "offload": offload})
        for step in range(3):
            made.accumulate(step, groups(seed=step, version=step))
            made.apply(step)
    assert same(weights(models[0]), weights(models[1]))


def test_weights_follow_adamw_of_plain_torch() -> None:
    batch = groups(model=llama())
    model, by_hand = llama(), llama()
    made = trainer(model, optimiser={"learning_rate": 1e-2, "max_gradient_norm": 0.05, "betas": (0.8, 0.9)})
    made.accumulate(0, batch)
    assert made._open is not None
    denominator = made._open.denominator
    for parameter, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        other.grad = parameter.grad / denominator
    norm = float(made.apply(0).metrics["gradient_norm"])
    assert norm > 0.05
    assert float(torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)) == pytest.approx(norm, rel=1e-5)
    torch.optim.AdamW(by_hand.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.0).step()
    for name, tensor in weights(by_hand).items():
        torch.testing.assert_close(weights(model)[name], tensor, atol=1e-6, rtol=1e-4)


def test_lora_trains_the_adapter_and_nothing_else() -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in llama().state_dict().items()}
    made = trainer(model, lora={"rank": 4}, optimiser=FAST, algorithm={"kl_coefficient": 0.1})
    made.accumulate(0, groups())
    assert all("lora_" in name for name in gradients(model))
    metrics = made.apply(0).metrics
    assert metrics["reference_kl"] == pytest.approx(0, abs=1e-6), "an untrained adapter gives the reference policy"
    made.accumulate(1, groups(version=1))
    assert made.apply(1).metrics["reference_kl"] > 1e-4
    after = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    assert same(before, after)


def test_metrics_of_fresh_and_stale_groups() -> None:
    model = llama()
    made = trainer(model, optimiser=FAST)
    made.accumulate(0, groups(count=2, model=llama(), noise=0.0))
    fresh = made.apply(0).metrics
    assert fresh["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert fresh["mismatch_gap"] == pytest.approx(0, abs=1e-4)
    assert fresh["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert fresh["clip_fraction"] == 0
    assert 0 < fresh["entropy"] < np.log(61)
    assert fresh["tokens_per_second"] > 0
    assert fresh["mfu"] > 0
    made.accumulate(1, groups(count=2, version=0, seed=4))
    stale = made.apply(1).metrics
    assert "mismatch_kl" not in stale, "the KL of a stale trajectory has other causes than engine and trainer"
    assert stale["off_policy/kl"] > 0
    assert stale["off_policy/trajectory_staleness"] == 1


def test_the_mismatch_gap_is_the_error_of_the_engine() -> None:
    made = trainer(llama(), optimiser=FAST)

    def off(one: Trajectory) -> Trajectory:
        return msgspec.structs.replace(one, behaviour_logprobs=one.behaviour_logprobs - np.float32(0.25))

    right = groups(count=2, model=llama(), noise=0.0)
    made.accumulate(0, [Group(id=group.id, trajectories=tuple(map(off, group.trajectories))) for group in right])
    assert made.apply(0).metrics["mismatch_gap"] == pytest.approx(0.25, abs=1e-3)


def off_by(group: Group, by: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Group:
    """The group as if the engine had reported other log-probs."""
    return Group(
        id=group.id,
        trajectories=tuple(
            msgspec.structs.replace(one, behaviour_logprobs=by(one.behaviour_logprobs.copy()))
            for one in group.trajectories
        ),
    )


def test_a_gap_of_few_tokens_shows_in_the_percentile() -> None:
    made = trainer(llama(), optimiser=FAST)

    def last_is_wrong(logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
        logprobs[-1] -= np.float32(1.5)
        return logprobs

    right = groups(count=2, model=llama(), noise=0.0)
    made.accumulate(0, [off_by(group, last_is_wrong) for group in right])
    metrics = made.apply(0).metrics
    tokens = sum(one.response_length for group in right for one in group.trajectories)
    wrong = sum(len(group.trajectories) for group in right)
    assert metrics["mismatch_tokens"] == tokens
    assert metrics["mismatch_gap"] == pytest.approx(1.5 * wrong / tokens, rel=1e-2)
    assert 1.5 <= metrics["mismatch_gap_p99"] < 1.5 * 1.35


def test_the_gap_excludes_what_truncated_sampling_explains() -> None:
    right = groups(count=2, model=llama(), noise=0.0)
    raised = [off_by(group, lambda logprobs: logprobs + np.float32(0.1)) for group in right]  # as top-p = 0.9 would
    lowered = [off_by(group, lambda logprobs: logprobs - np.float32(0.1)) for group in right]

    def gap(given: list[Group], truncation: float) -> float:
        made = Trainer(llama(), TrainerConfig(), truncation=truncation)
        made.accumulate(0, given)
        return made.apply(0).metrics["mismatch_gap"]

    nucleus, unbounded = explained_by_sampling(0.9, 0, 0.0), explained_by_sampling(1.0, 50, 0.0)
    assert explained_by_sampling(1.0, 0, 0.0) == 0.0
    assert gap(raised, 0.0) == pytest.approx(0.1, abs=1e-3)
    assert gap(raised, nucleus) == pytest.approx(0.0, abs=1e-3)
    assert gap(raised, explained_by_sampling(0.95, 0, 0.0)) == pytest.approx(0.1 + np.log(0.95), abs=1e-3)
    assert gap(raised, unbounded) == pytest.approx(0.0, abs=1e-3)
    for truncation in (0.0, nucleus, unbounded, explained_by_sampling(1.0, 0, 0.05)):
        assert gap(lowered, truncation) == pytest.approx(0.1, abs=1e-3), "truncation never lowers a log-prob"


def test_the_gap_does_not_depend_on_how_the_step_is_divided() -> None:
    given = [off_by(group, lambda logprobs: logprobs - np.float32(0.3)) for group in groups(count=4, model=llama())]
    found = []
    for tokens in (16, 4096):
        made = trainer(llama(), micro_batch_tokens=tokens)
        for group in given:
            made.accumulate(0, [group])
        metrics = made.apply(0).metrics
        found.append([metrics[name] for name in ("mismatch_tokens", "mismatch_gap", "mismatch_gap_p99")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_mismatch_is_measured_before_the_step_moves_the_policy() -> None:
    made = trainer(llama(), optimiser=FAST, epochs=3)
    made.accumulate(0, groups(count=2, model=llama(), noise=0.0))
    metrics = made.apply(0).metrics
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["off_policy/kl"] > 1e-4


def test_bfloat16_products_stay_close() -> None:
    reports = []
    for precision in ("float32", "bfloat16"):
        model = llama()
        made = trainer(model, precision=precision)
        made.accumulate(0, groups(model=llama()))
        assert {tensor.dtype for tensor in gradients(model).values()} == {torch.float32}
        reports.append(made.apply(0).metrics)
    exact, rounded = reports
    assert rounded["entropy"] == pytest.approx(exact["entropy"], rel=0.05)
    assert rounded["entropy"] != exact["entropy"]


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.1]),
        ("cosine", [0.5, 1, 1, None, 0.55, 0.1]),
    ],
)
def test_schedules(schedule: str, shares: list[float | None]) -> None:
    config = OptimiserConfig.model_validate(
        {
            "learning_rate": 2.0,
            "warmup_updates": 2,
            "schedule": schedule,
            "total_updates": 6,
            "final_share": 0.1,
        }
    )
    for update, share in zip((0, 1, 2, 3, 4, 99), shares, strict=True):
        if share is not None:
            assert learning_rate(config, update) == pytest.approx(2.0 * share)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"algorithm": {"name": "grpoo"}}, "'algorithm.name': must be a known algorithm such as 'grpo', not 'grpoo'"),
        ({"algorithm": {"name": "best"}}, "'algorithm.name': must be one of cispo, dapo, .*, supervised, not 'best'"),
        ({"algorithm": {"name": "dr_grpo"}}, "set constant_length"),
        ({"optimiser": {"schedule": "cosine"}}, "needs total_updates"),
        ({"optimizer": {}}, "did you mean 'optimiser'"),
    ],
)
def test_mistakes_in_the_configuration_are_one_sentence(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(TrainerConfig, tree)


def test_weights_too_coarse_to_train_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is bfloat16, too coarse.*load the model in float32"):
        trainer(llama().to(torch.bfloat16))
    trainer(llama().to(torch.bfloat16), lora={"rank": 2})  # the base is frozen; the adapter is float32


def test_an_invalid_trajectory_cannot_be_constructed() -> None:
    good = groups(count=1)[0].trajectories[0]
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reward": float("nan")}, "its reward is nan"),
        ({"loss_mask": np.ones_like(good.loss_mask)}, "first token"),
        ({"loss_mask": np.zeros_like(good.loss_mask)}, "selects no token"),
        ({"behaviour_logprobs": good.behaviour_logprobs[:-1]}, "has the shape"),
        ({"behaviour_logprobs": np.full_like(good.behaviour_logprobs, np.nan)}, "no finite behaviour"),
        ({"behaviour_logprobs": np.full_like(good.behaviour_logprobs, 0.5)}, "no finite behaviour"),
    ]
    for changes, message in cases:
        with pytest.raises(TrajectoryError, match=message):
            Trajectory(**(fields | changes))
    other = Trajectory(**(fields | {"version": 5}))
    with pytest.raises(TrajectoryError, match="mixes versions"):
        Group(id=0, trajectories=(good, other))
