"""The vocabulary that all layers share: records, events, commands, interfaces and errors. No torch, no event loops.

Glossary. Each word has this one meaning in code, config, metrics, docs and messages.

What is trained
- prompt: one problem, with a stable key.
- version: the policy after n optimiser steps. Step n starts from version n and publishes version n + 1.
- trajectory: one response to a prompt, or one interaction with an environment, sampled under a single version.
- group: the trajectories (siblings) of one prompt, all of one version; the unit of admission, advantage and training.
- step: one training iteration over a batch of B whole groups.
- staleness: the step that trains a group minus the group's version.
- bound: the largest staleness allowed, K (`max_staleness`).
- deadline: the last step that may train a group: its version plus the bound under which it was admitted.
- attempt: a counter on a trajectory or on the trainer, raised at each restart, so that late reports are recognised.
- failure: a trajectory or group that can't be finished; it is counted with its reason and is never trained.
- without signal: the outcome of a group that was replaced because its rewards are all equal; it is counted and never
  trained.

Where tokens come from
- instance: one rollout engine, under a name that is unique per restart.
- slot: room for one set of weights on an instance. The slots of an instance share its request limit and KV cache.
- request: a trajectory that an engine is generating.
- token chunk: consecutive tokens of one response with their log-probs; the form of tokens from engine to trainer.
- parked: the state of a request that waits for its environment; it keeps its KV and does not decode.
- KV bundle: requests with their KV cache, packed so that another instance can continue them.
- move (migration): a running request goes to another slot of its version with its KV.
- fingerprint: a digest of published weights; it proves which weights a slot loaded.
- probe: fixed token sequences with the trainer's log-probs, published with a version; it proves what a slot computes.

How decisions are taken
- orchestrator: the pure state machine that takes every decision: `step(event, now) -> commands`.
- event: a report to the orchestrator of something that happened.
- command: an instruction of the orchestrator to the runtime.
- runtime: what executes commands and reports events: the supervisor with its workers, or a simulator.
- mode: how rollout and training overlap: `sync`, `one_step_off`, `partial` or `dora`.
- admission: the decision to start a new group, which fixes its version and deadline.
- slot assignment: which slot serves which version. A rebalance changes it.
- length predictor: estimates how many tokens a running request still needs.
- idle cause: the reason that a slot or the trainer has nothing to do; every idle second has exactly one.

Which processes run
- supervisor: the process that runs the orchestrator, the ledger and the clients of all workers.
- worker: a process of a run: rollout worker (one instance), trainer worker (one rank), reward worker, evaluator.
- ledger: the SQLite file with the event log of a run and the tables derived from it.
- projection: state derived from the event log, event by event.
- auditor: code that checks the promises of a run from its event log, independently of the orchestrator.
"""
