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


class IntegrityError(DoraError):
    """What was reported contradicts a promise: wrong version, wrong fingerprint, a batch trained out of order."""
