"""The trainer: `accumulate` groups, `apply` the step, `publish` the version.

Invariants:
- step n starts from version n and produces version n + 1; groups for another step are refused;
- gradients are sums until the step closes, and are then divided by one denominator: how groups are split over calls,
  micro-batches and ranks does not change the gradient;
- a non-finite loss or gradient ends the step with an error that names the trajectories at fault; weights and optimiser
  are then those of the version that the step started from, and the step can be started again;
- all ranks call the same methods with the same groups.

    accumulate --groups--> score --> plan --> pack --> policy --> objective --> .grad   (once per micro-batch)
    apply      --.grad / denominator--> AdamW --> version + 1
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dora_rl.core.errors import IntegrityError, NonFiniteError
from dora_rl.core.interfaces import WeightSink
from dora_rl.core.probe import Probe
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.core.types import Fingerprint, Record, StepId, TrajectoryId, Version
from dora_rl.trainer import effective_samples, logprob_gap, metrics, trainable
from dora_rl.trainer.algorithms.losses import denominator, kl_estimate, second_moment_kept
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.moe import Routers
from dora_rl.trainer.objective import MicroLoss, References, micro_loss
from dora_rl.trainer.open_step import OpenStep
from dora_rl.trainer.optimiser import Optimiser, all_finite, learning_rate
from dora_rl.trainer.packing import MicroBatch, pack, plan
from dora_rl.trainer.past_versions import PastVersions, most_frequent
from dora_rl.trainer.policy import checkpoint_activations, choose_form, sharded_policy
from dora_rl.trainer.probe import TrainerProbe
from dora_rl.trainer.rank_group import RankGroup


class StepReport(Record, frozen=True, kw_only=True):
    """The result of a step."""

    step: StepId
    version: Version
    """The version that the step produced."""
    metrics: dict[str, float]


class Trainer:
    """A policy, its optimiser and the open step."""

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        version: Version = 0,
        rank_group: RankGroup | None = None,
        truncation: float = 0.0,
        max_staleness: int = 0,
        seed: int = 0,
    ) -> None:
        self.config = config
        self._truncation = truncation
        """How much truncated sampling can raise the log-prob of a token, see `logprob_gap.explained_by_sampling`."""
        self.rank_group = rank_group or RankGroup()
        self.version = version
        # Evaluation mode: with dropout, the trained tokens would have other log-probs than rollout sampled them with.
        model.eval()
        self.peft_model = trainable.add_adapter(model, config.lora)
        form = choose_form(model)
        self.reference = None
        if config.algorithm.kl_coefficient:
            self.reference = trainable.Reference(model, config, self.rank_group, form)
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        self.policy = sharded_policy(model, form, config, self.rank_group)
        self.routers = Routers(model, config.moe, packed=form.packed)
        self.optimiser = Optimiser(self.policy, config.optimiser)
        held = max_staleness if config.measure_gap_every else 0
        self._past = PastVersions(self.policy, self.optimiser.parameters, held)
        self._open: OpenStep | None = None
        self._probe = TrainerProbe(model, seed)

    @property
    def model(self) -> Any:
        """The `transformers` model inside the policy."""
        return self.policy.model

    def accumulate(self, step: StepId, groups: Sequence[Group]) -> None:
        """Add finished groups to the step; their gradients are computed now if the algorithm allows it."""
        opened = self._opened(step)
        begin = time.perf_counter()
        opened.add(groups)
        if self.config.streams:
            with self._cleared_on_error():
                self._gradients(opened, opened.score(list(groups), self.config.algorithm), {})
        opened.seconds += time.perf_counter() - begin

    def apply(self, step: StepId) -> StepReport:
        """Close the step with one or more optimiser updates; the model then holds the next version."""
        opened = self._opened(step)
        if not opened.groups:
            raise IntegrityError(f"step {step} has no groups to apply")
        begin = time.perf_counter()
        scheduled = learning_rate(self.config.optimiser, self.optimiser.updates)
        norms: list[float] = []
        with self._cleared_on_error():
            self._measure_gaps(opened)
            self._past.hold(self.version)
            if self.config.streams:
                norms.extend(self._update(opened))
            else:
                norms.extend(self._updates(opened))
        opened.seconds += time.perf_counter() - begin
        self._open = None
        self.version += 1
        return StepReport(step=step, version=self.version, metrics=self._metrics(opened, norms, scheduled))

    def abandon(self) -> None:
        """Discard the open step and its gradients."""
        self._open = None
        self.optimiser.clear()

    def publish(self, version: Version, sink: WeightSink) -> Fingerprint:
        """Make the weights loadable as this version. A step may be open: it has not changed the weights yet."""
        if version != self.version:
            raise IntegrityError(f"version {version} can't be published: the trainer holds version {self.version}")
        probe = self.probe()
        specs, tensors = trainable.published_tensors(self.model, self.peft_model)
        return sink.publish(
            version, specs, tensors, adapter=self.peft_model is not None, write=self.rank_group.rank == 0, probe=probe
        )

    def probe(self) -> Probe:
        """The log-probs that the policy computes for the probe now; all ranks take part."""
        with self._precision():
            return self._probe.compute(self.policy, self.routers, self.config.precision)

    def _opened(self, step: StepId) -> OpenStep:
        if step != self.version:
            raise IntegrityError(f"step {step} can't be trained: the trainer holds version {self.version}")
        if self._open is None:
            self._open = OpenStep(step)
        return self._open

    @contextlib.contextmanager
    def _cleared_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def _updates(self, opened: OpenStep) -> Iterator[float]:
        """One update per mini-batch and epoch; yields their gradient norms. A failure undoes all of them."""
        several = self.config.mini_batches * self.config.epochs > 1
        undo = self.optimiser.snapshot() if several else None
        trained = opened.score(opened.groups, self.config.algorithm)
        anchors = self._logprobs(trained) if several and self.config.algorithm.correction != "none" else {}
        count = min(self.config.mini_batches, max(1, len(trained)))
        try:
            for _ in range(self.config.epochs):
                for mini_batch in range(count):
                    self._gradients(opened, trained[mini_batch::count], anchors)
                    yield from self._update(opened)
        except BaseException:
            if undo is not None:
                self.optimiser.restore(undo)
            raise

    def _gradients(self, opened: OpenStep, groups: Sequence[Group], anchors: dict[TrajectoryId, Tensor]) -> None:
        """Add the gradient sums of these groups to `.grad`."""
        for group in groups:
            opened.denominator += self._denominator(group.trajectories)
        computed = [group for group in groups if self._has_gradient(opened, group)]
        if self.config.algorithm.trust_region == "second_moment":
            opened.kept = self._second_moment_kept(opened, computed)
        planned = plan(computed, self.config.micro_batch_tokens)
        bad: list[TrajectoryId] = []
        totals: dict[str, Tensor] = {}
        for mine in self.rank_group.share(planned):
            # A rank without a micro-batch still takes part in the collectives, with a gradient of zero.
            batch = pack(mine or planned[0][:1]).to(self.policy.device)
            loss = self._loss(opened, batch, anchors, weight=0.0 if mine is None else 1.0)
            loss.total.backward()  # type: ignore[no-untyped-call]
            metrics.add_expert_load(opened.expert_load, self.routers, include=mine is not None)
            if mine is None:
                continue
            bad.extend(t.id for t, finite in zip(batch.trajectories, loss.finite.tolist(), strict=True) if not finite)
            self._add_metrics(opened, totals, batch, loss)
        for key, value in totals.items():
            opened.sums[key] = opened.sums.get(key, 0.0) + float(value)
        for key in effective_samples.KEYS:
            opened.update_weights[key] = opened.update_weights.get(key, 0.0) + float(totals.get(key, 0.0))
        culprits = self.rank_group.union(bad)
        if culprits:
            raise NonFiniteError("the loss", opened.step, culprits)

    def _loss(
        self, opened: OpenStep, batch: MicroBatch, anchors: dict[TrajectoryId, Tensor], weight: float
    ) -> MicroLoss:
        reference = None
        with self._precision():
            if self.reference is not None:
                self.routers.begin(batch.experts)
                reference = self.reference.logprobs(self.policy, self.peft_model, batch)
            self.routers.begin(batch.experts)
            output = self.policy(batch)
        anchor = torch.cat([anchors[t.id] for t in batch.trajectories]) if anchors else None
        known = all(t.id in opened.kept for t in batch.trajectories)  # not of trajectories outside of this update
        kept = torch.cat([opened.kept[t.id] for t in batch.trajectories]) if known else None
        advantages = torch.tensor(
            [opened.advantages[trajectory.id] for trajectory in batch.trajectories], device=self.policy.device
        )
        loss = micro_loss(self.config.algorithm, output, batch, advantages, References(reference, anchor, kept))
        total = loss.total
        if self.config.moe.auxiliary_loss and self.routers.routers:
            share = self._denominator(batch.trajectories)
            total = total + self.config.moe.auxiliary_loss * share * self.routers.auxiliary_loss()
        return loss._replace(total=total * weight)

    def _has_gradient(self, opened: OpenStep, group: Group) -> bool:
        """Whether a group can have a non-zero gradient.

        If all its advantages are zero, only KL or entropy terms can give it one; without these it counts in the average
        but is not computed. For a mixture of experts every group is computed: AdamW treats an expert with a gradient of
        zero differently from an expert without a gradient.
        """
        algorithm = self.config.algorithm
        always = algorithm.kl_coefficient or algorithm.entropy_coefficient or self.routers.routers
        return bool(always) or any(opened.advantages[trajectory.id] for trajectory in group.trajectories)

    def _denominator(self, trajectories: Sequence[Trajectory]) -> int:
        return sum(denominator(self.config.algorithm.averaging, trajectory) for trajectory in trajectories)

    def _add_metrics(self, opened: OpenStep, totals: dict[str, Tensor], batch: MicroBatch, loss: MicroLoss) -> None:
        """Add a micro-batch to the step's metrics; only the largest ratio is fetched from the device here."""
        # After the first update of the step, a difference no longer comes from the engine and the trainer alone.
        unchanged = opened.total_denominator == 0
        fresh = torch.tensor(
            [unchanged and t.version == opened.step for t in batch.trajectories], device=loss.kl.device
        )
        distances = logprob_gap.unexplained(loss.gap[fresh[batch.sequence]], self._truncation)
        counts = logprob_gap.histogram(distances)
        opened.gap_counts = counts if opened.gap_counts is None else opened.gap_counts + counts
        sums = loss.sums | {
            "policy_kl": loss.kl.sum(),
            "mismatch_kl": loss.kl[fresh].sum(),
            "mismatch_gap": distances.sum(),
            "fresh_tokens": batch.lengths[fresh].sum(),
            **effective_samples.weight_sums(loss.log_weight),
        }
        for key, value in sums.items():
            totals[key] = totals[key] + value if key in totals else value.clone()
        opened.max_ratio = max(opened.max_ratio, float(loss.max_ratio))
        opened.packed_tokens += batch.tokens.numel()
        opened.trained_tokens += len(batch.targets)
        opened.attended_pairs += sum(len(t.tokens) * (len(t.tokens) + 1) // 2 for t in batch.trajectories)

    def _update(self, opened: OpenStep) -> list[float]:
        """One optimiser update with the accumulated gradient; no update if every group was skipped."""
        if not opened.denominator:
            return []
        # FSDP averages gradients over the ranks; this turns the average into the sum.
        scale = self.rank_group.size / opened.denominator
        norm = self.optimiser.gradient_norm(scale)
        if not torch.isfinite(torch.tensor(norm)):
            raise NonFiniteError("the gradient", opened.step, self._culprits(opened))
        opened.rates.append(self.optimiser.update(scale, norm, self._rate_factor(opened)))
        opened.update_weights.clear()
        opened.total_denominator += opened.denominator
        opened.denominator = 0
        return [norm]

    def _rate_factor(self, opened: OpenStep) -> float:
        """The square root of the relative effective sample size of this update, if it scales the learning rate.

        VCPO (arXiv 2602.17616) scales by the square root since for AdamW the learning rate that suits a batch grows
        with the square root of its size. An update in which nothing was computed is not scaled.
        """
        if not self.config.optimiser.ess_scaling:
            return 1.0
        mine = [opened.update_weights.get(key, 0.0) for key in effective_samples.KEYS]
        sums = self.rank_group.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
        size = effective_samples.relative_size(dict(zip(effective_samples.KEYS, sums, strict=True)))
        return 1.0 if size is None else math.sqrt(size)

    def _culprits(self, opened: OpenStep) -> tuple[TrajectoryId, ...]:
        """The trajectories with a non-finite gradient: each is computed again alone, by all ranks together."""
        bad: list[TrajectoryId] = []
        for group in opened.groups:
            for trajectory in group.trajectories:
                if group.id in opened.skipped:
                    continue
                self.optimiser.clear()
                self._loss(opened, pack([trajectory]).to(self.policy.device), {}, 1.0).total.backward()  # type: ignore[no-untyped-call]
                gradients = [p.grad for p in self.optimiser.parameters if p.grad is not None]
                if not all_finite(gradients):
                    bad.append(trajectory.id)
        return self.rank_group.union(bad)

    def _second_moment_kept(self, opened: OpenStep, groups: Sequence[Group]) -> dict[TrajectoryId, Tensor]:
        """Which trained tokens of an update M2PO keeps, by trajectory; a first pass without gradient determines it."""
        logprobs = self._logprobs(groups)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if not trajectories:
            return {}
        behaviour = [torch.from_numpy(t.behaviour_logprobs[t.loss_mask]) for t in trajectories]
        log_ratios = torch.cat([logprobs[t.id] for t in trajectories]) - torch.cat(behaviour).to(self.policy.device)
        lengths = [len(values) for values in behaviour]
        advantages = torch.tensor([opened.advantages[t.id] for t in trajectories], device=self.policy.device)
        of_token = advantages.repeat_interleave(torch.tensor(lengths, device=self.policy.device))
        kept = second_moment_kept(log_ratios, of_token, self.config.algorithm.delta)
        return {t.id: tokens for t, tokens in zip(trajectories, torch.split(kept, lengths), strict=True)}

    def _logprobs(self, groups: Sequence[Group]) -> dict[TrajectoryId, Tensor]:
        """Log-probs of all trained tokens under the policy as it is now, by trajectory, without gradient."""
        found: dict[TrajectoryId, Tensor] = {}
        # Every rank computes all of them: with FSDP a forward pass is collective anyway.
        for trajectories in plan(groups, self.config.micro_batch_tokens):
            batch = pack(trajectories).to(self.policy.device)
            per_trajectory = torch.split(self._logprobs_of(batch), batch.lengths.tolist())
            found |= {t.id: values for t, values in zip(batch.trajectories, per_trajectory, strict=True)}
        return found

    @torch.no_grad()
    def _logprobs_of(self, batch: MicroBatch) -> Tensor:
        self.routers.begin(batch.experts)
        with self._precision():
            return self.policy(batch).logprobs  # type: ignore[no-any-return]

    def _measure_gaps(self, opened: OpenStep) -> None:
        """Divide the gap of one micro-batch of stale trajectories into that of the engine and that of staleness.

        The policy still has the weights that the step starts from. All ranks compute the same micro-batch.
        """
        every = self.config.measure_gap_every
        groups = most_frequent(opened.groups, self._past.versions) if every and opened.step % every == 0 else []
        if not groups:
            return
        batch = pack(plan(groups, self.config.micro_batch_tokens)[0]).to(self.policy.device)
        now = self._logprobs_of(batch)
        with self._past.loaded(groups[0].version):
            then = self._logprobs_of(batch)
        opened.gaps = {
            "off_policy/engine_kl": float(kl_estimate(batch.behaviour, then).mean()),
            "off_policy/staleness_kl": float(kl_estimate(then, now).mean()),
            "off_policy/gap_staleness": float(opened.step - groups[0].version),
        }

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "bfloat16" and self.rank_group.mesh is None:
            return torch.autocast(self.policy.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _metrics(self, opened: OpenStep, norms: list[float], scheduled: float) -> dict[str, float]:
        # A fixed list of names, not what this rank happened to measure, so that all ranks reduce the same values.
        keys = [key for key in metrics.SUMS if self.rank_group.size > 1 or key in opened.sums]
        counts = [float(opened.packed_tokens), float(opened.trained_tokens), float(opened.attended_pairs)]
        values = torch.tensor([opened.sums.get(key, 0.0) for key in keys] + counts, dtype=torch.float64)
        *sums, packed_tokens, trained_tokens, attended = self.rank_group.sum(values).tolist()
        max_ratio = float(self.rank_group.max(torch.tensor(opened.max_ratio)))
        no_gaps = logprob_gap.histogram(torch.empty(0))
        gap_counts = self.rank_group.sum(no_gaps if opened.gap_counts is None else opened.gap_counts.cpu())
        expert_load = [self.rank_group.sum(load) for load in opened.expert_load]
        seconds = max(opened.seconds, 1e-9)
        flops = metrics.training_flops(self.model, int(packed_tokens), int(attended))
        advantages = torch.tensor(list(opened.advantages.values()), dtype=torch.float64)
        return {
            **metrics.group_metrics(opened.groups, opened.step),
            **metrics.token_metrics(dict(zip(keys, sums, strict=True)), max_ratio, opened.total_denominator),
            **logprob_gap.percentile(gap_counts),
            **metrics.expert_metrics(expert_load),
            **opened.gaps,
            "advantage/mean": float(advantages.mean()),
            "advantage/max": float(advantages.max()),
            "advantage/min": float(advantages.min()),
            "batch/groups_without_signal": float(opened.no_signal),
            "batch/groups_skipped": float(len(opened.skipped)),
            "batch/updates": float(len(norms)),
            "gradient_norm": max(norms, default=0.0),
            "learning_rate": opened.rates[0] if opened.rates else scheduled,
            "tokens_per_second": trained_tokens / seconds,
            "timing_s/train": seconds,
            "mfu": flops / seconds / (metrics.peak_flops(self.policy.device.type) * self.rank_group.size),
        }
