"""A conversation of several turns with an engine, which keeps its KV between turns and can move to another engine.

Invariants:
- between two turns the session is parked in its engine: nothing of it is computed again, on the same engine or after a
  move, except what it says next;
- a session is on one engine, or has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dora_rl.api.engine_driver import Completion, EngineDriver
from dora_rl.core.errors import BundleError, UserError

if TYPE_CHECKING:
    from dora_rl.api.engine import Engine
    from dora_rl.engine.kv_transfer.format import MovedRequest

_FIRST = 1 << 48
"""The trajectory of the session 0 in the engine; the requests of `generate` are counted from 0."""
_MOST = 1 << 47
"""Keys are below this."""


class EngineSession:
    """One conversation: `generate` samples a turn, `extend` says what comes before the next one.

    A turn ends at a stop token or stop string. A turn that reaches `max_tokens` or the end of the context is the last
    one. All sessions of an engine that are in a turn are computed in one batch, so call `extend` on each of them before
    `generate`.
    """

    def __init__(self, driver: EngineDriver, key: int, version: int, forget: Callable[[int], object]) -> None:
        self._driver: EngineDriver | None = driver
        self._key = key
        self._trajectory = trajectory_of(key)
        self._version = version
        self._forget = forget
        self._ended = ""
        """Why there are no more turns."""

    @property
    def key(self) -> int:
        """Its number, which keys the random numbers with the seed and the position."""
        return self._key

    @property
    def version(self) -> int:
        """The version that generates all its turns."""
        return self._version

    @property
    def finished(self) -> bool:
        """Whether there are no more turns."""
        return bool(self._ended) or (self._between_turns and not self._parked)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far: the prompt, the turns, and what was said between them."""
        driver = self._open()
        turn = driver.turn(self._trajectory)
        return (*turn.context, *(token for chunk in turn.chunks for token in chunk.tokens.tolist()))

    def extend(self, observation: str | Sequence[int] | Sequence[Mapping[str, str]]) -> None:
        """Append what follows the last turn: a text as it is, token ids, or messages in the chat template.

        The next turn begins: `generate` of this session, or of any other one of its engine, computes it.
        """
        driver = self._open()
        if not self._between_turns:
            raise UserError("the session is in a turn: call generate before extend")
        if not self._parked:
            raise UserError(f"the session has ended ({self._reason}): begin another one")
        driver.extend(self._trajectory, driver.encode_observation(observation))

    def generate(self, observation: str | Sequence[int] | Sequence[Mapping[str, str]] | None = None) -> Completion:
        """Sample the next turn; an observation is appended first, as by `extend`."""
        driver = self._open()
        if observation is not None:
            self.extend(observation)
        elif self._between_turns:
            wanted = "say what comes next with extend" if self._parked else "begin another one"
            state = "waits" if self._parked else f"has ended ({self._reason})"
            raise UserError(f"the session {state}: {wanted}")
        driver.finish([self._trajectory])
        driver.turn(self._trajectory).returned = True
        return driver.completion(self._trajectory, self._version)

    def export(self) -> bytes:
        """Take the session out of its engine, and return it with its KV for `Engine.import_session`."""
        data = self._packed()
        self._end("it was exported")
        return data

    def move_to(self, engine: Engine) -> EngineSession:
        """Move the session with its KV to another engine, and return it there; this object has ended.

        The turns are those that it would have had here, token by token. If the other engine can't take it, it stays.
        """
        data = self._packed()
        try:
            moved = engine.import_session(data)
        except BaseException:
            self._open().unpack(data)
            raise
        self._end("it was moved to another engine")
        return moved

    def _packed(self) -> bytes:
        driver = self._open()
        if not self._between_turns:
            raise UserError("the session is in a turn: it can leave its engine after generate")
        if not self._parked:
            raise UserError(f"the session has ended ({self._reason}): there is nothing to move")
        return driver.pack(self._trajectory)

    def close(self) -> None:
        """End the session and free its KV. Closing twice is allowed."""
        if self._driver is not None:
            self._end("it was closed")

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EngineSession(key={self._key}, version={self._version}{', finished' * self.finished})"

    @property
    def _between_turns(self) -> bool:
        return self._open().turn(self._trajectory).returned

    @property
    def _parked(self) -> bool:
        return self._open().turn(self._trajectory).parked

    @property
    def _reason(self) -> str:
        return str(self._open().turn(self._trajectory).reason)

    def _open(self) -> EngineDriver:
        if self._driver is None:
            raise UserError(f"the session has ended: {self._ended}")
        return self._driver

    def _end(self, why: str) -> None:
        self._open().drop([self._trajectory])
        self._ended = why
        self._driver = None
        self._forget(self._key)


def trajectory_of(key: int) -> int:
    """The trajectory that a session is in the engine."""
    if not 0 <= key < _MOST:
        raise UserError(f"the `key` of a session is a number from 0 to 2**47 - 1, not {key}")
    return _FIRST + key


def key_of(moved: MovedRequest) -> int:
    """The key of a session that has left its engine."""
    key = moved.request.trajectory - _FIRST
    if not moved.parked or not 0 <= key < _MOST:
        raise BundleError("this is a request of a run, not an exported session")
    return key
