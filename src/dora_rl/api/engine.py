"""`dora_rl.Engine`: the built-in rollout engine in this process, with several versions of a model at once.

It is the engine of a run behind a smaller interface: the same scheduler, kernels, sampler and KV transfer. Invariants:
- all tokens of a completion come from one version;
- the tokens depend on the weights, the prompt, the sampling settings and the place of the prompt in the call (for a
  session, its key), and on nothing else: not on what was called before, nor on what else runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dora_rl.api.engine_driver import Completion, EngineDriver
from dora_rl.api.engine_session import EngineSession, key_of, trajectory_of
from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError, RequestError, UserError
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.loading import ModelConfig

if TYPE_CHECKING:
    from torch.nn import Module

    from dora_rl.engine.stats import Stats

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or messages with role and content."""


class Engine:
    """A rollout engine: continuous batching over several versions of one model, with log-probs.

    - `model`: a folder with safetensors, a name on the hub, or a `.gguf` file; it is loaded as `version`;
    - `max_versions`: how many versions can be loaded at once;
    - `kv_tokens`: size of the KV cache in tokens, shared by all versions; unset: 2 GiB;
    - `max_requests`: responses that are generated at once; `max_context`: longest prompt and response together;
    - `dtype`, `device`: of the weights and the computation; `threads`: 0 takes as many as torch would;
    - `kernels`: `native` compiles C++ kernels for this CPU, `torch` runs everywhere, `auto` takes what there is.

    Use it as a context manager, or call `close`. It is not thread-safe.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        version: int = 0,
        max_versions: int = 1,
        kv_tokens: int | None = None,
        max_requests: int = 64,
        max_context: int = 4096,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: Literal["cpu", "cuda", "mps"] = "cpu",
        threads: int = 0,
        kernels: Literal["auto", "native", "torch"] = "auto",
    ) -> None:
        if max_versions < 1:
            raise ConfigError(f"'max_versions' must be at least 1, not {max_versions}")
        settings = {
            "slots": max_versions,
            "max_requests": max_requests,
            "max_context": max_context,
            "threads": threads,
            "kernels": kernels,
        }
        described = {"path": str(model), "dtype": dtype, "device": device}
        self._driver: EngineDriver | None = EngineDriver(build(ModelConfig, described, "engine"), settings, kv_tokens)
        self._sessions: dict[int, EngineSession] = {}
        self._next_key = 0
        self._name = str(model)
        self._driver.load(_number(version), None)

    # -- versions -----------------------------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """The loaded versions, oldest first."""
        return self._open().versions

    def load_version(self, version: int, weights: str | Path | Mapping[str, Any] | Module) -> None:
        """Load other weights of the same model as a version: a folder, a hub name, a module or its `state_dict`.

        Weights in memory are copied, so a module can be trained further. Sessions of other versions are not disturbed.
        """
        if weights is None:
            raise UserError("weights are a folder, a hub name, a module or its state_dict, not None")
        self._open().load(_number(version), weights)

    def unload_version(self, version: int) -> None:
        """Free the weights of a version that no session uses."""
        driver = self._open()
        using = sum(session.version == version for session in self._sessions.values())
        if using:
            raise UserError(f"version {version} has {using} open session{'s' * (using > 1)}: close or move them first")
        driver.unload(version)

    # -- generation ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        version: int | None = None,
    ) -> list[list[Completion]]:
        """Complete prompts in one batch; `result[i][j]` is response `j` of `n` to prompt `i`.

        `version` is the newest one unless given. Without `stop_ids` the model's own end tokens end a response. The same
        call gives the same responses, whatever was called before; another `seed` gives others.
        """
        driver = self._open()
        if isinstance(prompts, str):
            raise UserError("`prompts` is one text: pass a list of prompts")
        if n < 1:
            raise UserError(f"`n` must be at least 1, not {n}")
        chosen = self._version(version)
        settings = driver.sampling(sampling)
        submitted: list[int] = []
        try:
            for index, prompt in enumerate(prompts):
                try:
                    tokens = driver.encode_prompt(prompt)
                    for trajectory in range(index * n, (index + 1) * n):
                        request = Request(trajectory=trajectory, version=chosen, prompt=tokens, sampling=settings)
                        driver.submit(request)
                        submitted.append(trajectory)
                except RequestError as error:
                    raise type(error)(f"prompt {index}: {error}") from error
            driver.finish(submitted)
            found = [driver.completion(trajectory, chosen) for trajectory in submitted]
        finally:
            driver.drop(submitted)
        return [found[start : start + n] for start in range(0, len(found), n)]

    # -- sessions -----------------------------------------------------------------------------------------------

    def session(
        self, prompt: Prompt, sampling: Sampling | None = None, *, version: int | None = None, key: int | None = None
    ) -> EngineSession:
        """Begin a conversation of several turns, which keeps its KV between them.

        `max_tokens` of the settings counts everything after `prompt`: all turns, and what is said between them. The
        random numbers depend on `seed`, `key` and the position; two sessions that may meet on one engine need different
        keys. Unset: sessions are counted.
        """
        driver = self._open()
        number = self._next_key if key is None else key
        self._check_free(number)
        chosen = self._version(version)
        request = Request(
            trajectory=trajectory_of(number),
            version=chosen,
            prompt=driver.encode_prompt(prompt),
            sampling=driver.sampling(sampling),
            parks=True,
        )
        driver.submit(request)
        return self._begin(number, chosen)

    def import_session(self, data: bytes) -> EngineSession:
        """Continue a session that another engine has exported: nothing is computed again, and the tokens are the same.

        This engine must have the session's version, with the same weights.
        """
        driver = self._open()
        moved = driver.read(data)
        key, version = key_of(moved), moved.request.version
        self._check_free(key)
        driver.unpack(data)
        driver.adopt(moved.request)
        return self._begin(key, version)

    def _check_free(self, key: int) -> None:
        if key in self._sessions:
            raise UserError(f"the engine has a session with the key {key}: begin sessions with different keys")

    def _begin(self, key: int, version: int) -> EngineSession:
        session = EngineSession(self._open(), key, version, lambda ended: self._sessions.pop(ended, None))
        self._sessions[key] = session
        self._next_key = max(self._next_key, key + 1)
        return session

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters of tokens and blocks since the engine began."""
        return self._open().engine.stats

    def close(self) -> None:
        """End all sessions and free the weights and the KV cache. Closing twice is allowed."""
        for session in list(self._sessions.values()):
            session.close()
        self._driver = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._driver is None else f"versions={self.versions}"
        return f"Engine({self._name!r}, {state})"

    def _open(self) -> EngineDriver:
        if self._driver is None:
            raise UserError("the engine is closed: make another one")
        return self._driver

    def _version(self, version: int | None) -> int:
        versions = self.versions
        if version is None:
            if not versions:
                raise UserError("no version is loaded: call load_version first")
            return versions[-1]
        self._open().slot(version)  # refuses one that is not loaded
        return version


def _number(version: int) -> int:
    if version < 0:
        raise UserError(f"a version is a number from 0 on, not {version}")
    return version
