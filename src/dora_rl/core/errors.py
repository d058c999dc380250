"""The exception tree.

`UserError` is a mistake that the user can correct: one sentence that says what to change, exit code 2, no traceback.
`IntegrityError` is a broken promise: the run stops at once instead of training on doubtful data. A rollout that fails
is neither: it is data, a counted failure.
"""


class DoraError(Exception):
    """Base of all errors that this package raises deliberately."""


class UserError(DoraError):
    """The input can't be used; the message says what to change."""


class ConfigError(UserError):
    """A configuration can't be used; the message names the field."""


class TraceError(UserError):
    """A trace can't be used; the message names the file and line."""


class ModelError(UserError):
    """A model or its weights can't be loaded; the message names the model."""


class MemoryCapError(ConfigError):
    """Something does not fit into its memory cap; the message says how much it needs."""


class RequestError(UserError):
    """One request can't be served; the others continue."""


class PromptError(RequestError):
    """A prompt can't be used: it is empty, too long, or has an unknown token."""


class SamplingError(RequestError):
    """A sampling parameter can't be used; the message names it."""


class VersionError(RequestError):
    """A version is not available: it is not published, is retired, or is in no slot."""


class SlotError(RequestError):
    """An operation on a slot is impossible: the slot does not exist, or requests still run in it."""


class BundleError(RequestError):
    """A KV bundle is damaged or does not fit this engine; the request continues from its tokens."""


class RunError(DoraError):
    """A run can't continue. Finished work is kept, and the message says what to correct before the run is resumed."""


class IntegrityError(DoraError):
    """A report contradicts a promise: wrong version, wrong fingerprint, or a batch trained out of order."""


class TrajectoryError(IntegrityError):
    """A trajectory or group contradicts itself; the message names it."""


class DataError(UserError):
    """A training data file can't be used; the message names the file and line."""


class SandboxError(UserError):
    """The sandbox can't isolate code as required; the message says what is missing."""


class CheckpointError(UserError):
    """A checkpoint can't be read or does not fit the run; the message says which one and why."""


class StoreError(DoraError):
    """An operation on the weight store is impossible: the version does not exist, or it is still in use."""


class FingerprintError(IntegrityError):
    """Weights differ from those that were published under their version."""


class ProbeError(IntegrityError):
    """A slot computes other log-probs than the trainer published for its version; the message says by how much."""


class NonFiniteError(DoraError):
    """A loss or gradient is not finite; weights and optimiser state stay those of the last version."""

    def __init__(self, what: str, step: int, trajectories: tuple[int, ...]) -> None:
        self.step = step
        self.trajectories = trajectories
        culprits = ", ".join(str(trajectory) for trajectory in trajectories) or "unknown (no single one does it alone)"
        super().__init__(f"step {step}: {what} is not finite; trajectories at fault: {culprits}")
