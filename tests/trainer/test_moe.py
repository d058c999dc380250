"""Training replays the routing of rollout, and the load of the experts is measured and can be balanced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.core.errors import ModelError
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.trainer.config import MoeConfig
from dora_rl.trainer.packing import pack, plan
from tests.trainer.factories import assert_close, gradients, groups, moe, trainer

LAYERS, EXPERTS, USED = 2, 6, 2


def routed(batch: list[Group], choose: Any, layers: int = LAYERS) -> list[Group]:
    """The groups with routed experts: `choose(trajectory)` gives [T, layers, USED]."""
    made = []
    for group in batch:
        trajectories = []
        for trajectory in group.trajectories:
            fields = {name: getattr(trajectory, name) for name in trajectory.__struct_fields__}
            trajectories.append(Trajectory(**(fields | {"routed_experts": choose(trajectory)})))
        made.append(Group(id=group.id, trajectories=tuple(trajectories)))
    return made


def own_experts(model: Any, trajectory: Trajectory) -> Any:
    """The experts that the model itself would choose."""
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda *call: seen.append(call[2][2]))
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    with torch.no_grad():
        model(torch.from_numpy(trajectory.tokens.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy().astype(np.int16)


def random_experts(trajectory: Trajectory) -> Any:
    # Seeded by the prompt, so that siblings have the same experts for the tokens that they share.
    random = np.random.default_rng(int(trajectory.tokens[0]))
    ranks = random.random((256, LAYERS, EXPERTS))[: len(trajectory.tokens)]
    return ranks.argsort(-1)[:, :, :USED].astype(np.int16)


def gradient(model: Any, batch: list[Group], **settings: Any) -> dict[str, torch.Tensor]:
    made = trainer(model, **settings)
    made.accumulate(0, batch)
    return gradients(model)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_replaying_the_models_own_choice_changes_nothing(kind: str) -> None:
    batch = groups(model=moe(kind))
    chosen = routed(batch, lambda t: own_experts(moe(kind), t))
    assert_close(gradient(moe(kind), chosen), gradient(moe(kind), batch))


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_other_experts_are_used_when_rollout_used_them(kind: str) -> None:
    """The gradient of replay equals that of a model whose router outputs are replaced by hooks."""
    batch = routed(groups(model=moe(kind)), random_experts)
    found = gradient(moe(kind), batch)
    plain = gradient(moe(kind), groups(model=moe(kind)))
    assert any(not torch.allclose(found[name], plain[name], rtol=1e-2) for name in found)

    forced = moe(kind)
    packed: list[torch.Tensor] = []
    made = trainer(forced, moe={"replay_routing": False})
    routers = [module for module in forced.modules() if type(module).__name__.endswith("TopKRouter")]
    for layer, router in enumerate(routers):
        # The softmax over all experts, and the weights of the wanted experts scaled so that they sum to one.
        def hook(module: Any, inputs: Any, output: Any, layer: int = layer) -> Any:
            wanted = packed[0][:, layer]
            probabilities = torch.exp(output[0]) / torch.exp(output[0]).sum(-1, keepdim=True)
            picked = torch.stack([probabilities[row, wanted[row]] for row in range(len(wanted))])
            return output[0], picked / picked.sum(-1, keepdim=True), wanted

        router.register_forward_hook(hook)
    (trajectories,) = plan(batch, made.config.micro_batch_tokens)
    experts = pack(trajectories).experts
    assert experts is not None
    packed.append(experts)
    made.accumulate(0, batch)
    assert_close(found, gradients(forced))


def test_the_probe_uses_the_models_own_routing_even_within_a_step() -> None:
    """The probe must not depend on the experts of the micro-batch that was computed last."""
    made = trainer(moe())
    before = made.probe()
    made.accumulate(0, routed(groups(model=moe()), random_experts))
    assert made.probe() == before


def test_replay_with_gradient_checkpointing() -> None:
    batch = routed(groups(model=moe()), random_experts)
    assert_close(gradient(moe(), batch, gradient_checkpointing=True), gradient(moe(), batch))


def test_unknown_experts_are_the_models_choice() -> None:
    def last_unknown(trajectory: Trajectory) -> Any:
        chosen = own_experts(moe(), trajectory)
        chosen[-1] = -1
        return chosen

    batch = groups(model=moe())
    assert_close(gradient(moe(), routed(batch, last_unknown)), gradient(moe(), batch))


def test_expert_load_is_measured_and_balancing_changes_the_router_gradient() -> None:
    batch = groups(model=moe())
    made = trainer(moe(), optimiser={"learning_rate": 1e-9})
    made.accumulate(0, batch)
    metrics = made.apply(0).metrics
    assert 1 < metrics["moe/load_max"] <= EXPERTS / USED
    everyone_to_two = routed(batch, lambda t: np.tile(np.array([0, 1], np.int16), (len(t.tokens), LAYERS, 1)))
    made.accumulate(1, everyone_to_two)
    metrics = made.apply(1).metrics
    assert metrics["moe/load_max"] == EXPERTS / USED
    assert metrics["moe/unused_experts"] == LAYERS * (EXPERTS - USED)

    def router_gradient(weight: float) -> torch.Tensor:
        found = gradient(moe(), everyone_to_two, moe={"auxiliary_loss": weight})
        return next(tensor for name, tensor in found.items() if name.endswith("gate.weight"))

    assert not torch.allclose(router_gradient(0.0), router_gradient(1.0))


def test_auxiliary_loss_is_one_when_even() -> None:
    from dora_rl.trainer.moe import Routers

    model = moe()
    routers = Routers(model, MoeConfig(replay_routing=False))
    logits = torch.zeros(12, EXPERTS)
    indices = torch.arange(24).reshape(12, 2) % EXPERTS
    routers._seen = {0: (logits, indices)}
    assert float(routers.auxiliary_loss()) == pytest.approx(USED)
    routers._seen = {0: (torch.eye(EXPERTS)[torch.zeros(12, dtype=torch.long)] * 99, torch.tensor([[0, 1]] * 12))}
    assert float(routers.auxiliary_loss()) == pytest.approx(EXPERTS)


def test_experts_of_another_depth_are_refused() -> None:
    batch = routed(groups(), lambda t: np.zeros((len(t.tokens), 5, USED), np.int16))
    with pytest.raises(ModelError, match="experts of 5 layers, but the model has 2 layers with routers"):
        gradient(moe(), batch)
