"""One exception tree.

`UserError` is a mistake that its reader can mend: one sentence that says what to change, exit code 2, no traceback.
`IntegrityError` is a broken promise: the run stops at once rather than train on doubtful data. A rollout that fails
is neither: it is data, a `failed` verdict.
"""


class DoraError(Exception):
    """Base of all errors raised on purpose."""


class UserError(DoraError):
    """The input can't be used; the message says what to change."""


class ConfigError(UserError):
    """A configuration can't be used; the message names the field."""


class TraceError(UserError):
    """A trace can't be used; the message names the file and line."""


class ModelError(UserError):
    """A model or its weights can't be loaded; the message names what was asked for."""


class MemoryCapError(ConfigError):
    """What shall fit into a memory cap does not; the message says how much it needs."""


class RequestError(UserError):
    """One request can't be served; the others go on."""


class PromptError(RequestError):
    """A prompt can't be used: empty, too long, or with an unknown token."""


class SamplingError(RequestError):
    """Sampling parameters can't be used; the message names the one."""


class VersionError(RequestError):
    """A version is not there: not published, retired, or in no slot."""


class SlotError(RequestError):
    """A slot can't do what was asked of it: it does not exist, or requests still run in it."""


class BundleError(RequestError):
    """A request's bundle is damaged or does not fit this engine; the request goes on from its tokens."""


class RunError(DoraError):
    """A run can't go on; what is finished is kept, and the message says what to mend before resuming it."""


class IntegrityError(DoraError):
    """What was reported contradicts a promise: wrong version, wrong fingerprint, a batch trained out of order."""


class TrajectoryError(IntegrityError):
    """A trajectory or group contradicts itself; the message names it."""


class DataError(UserError):
    """A file of training data can't be used; the message names the file and line."""


class SandboxError(UserError):
    """Code can't be run as confined as it must be; the message says what is missing."""


class CheckpointError(UserError):
    """A checkpoint can't be read or does not fit; the message says which and why."""


class StoreError(DoraError):
    """The weight store can't do what was asked: no such version, or it is still held."""


class FingerprintError(IntegrityError):
    """Weights are not those that were published under their version."""


class ProbeError(IntegrityError):
    """A slot does not compute what the trainer published under its version; the message says by how much."""


class NonFiniteError(DoraError):
    """A loss or gradient is not a number; weights and optimiser stay those of the last version."""

    def __init__(self, what: str, step: int, trajectories: tuple[int, ...]) -> None:
        self.step = step
        self.trajectories = trajectories
        culprits = ", ".join(str(trajectory) for trajectory in trajectories) or "unknown (no single one does it alone)"
        super().__init__(f"step {step}: {what} is not finite; trajectories at fault: {culprits}")
