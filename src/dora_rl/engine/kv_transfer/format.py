"""Requests on the move: their state and their KV, in one piece of memory.

    file   "DORAKV1\\n", number of frames (u32), state (u32), then the frames, each starting at a multiple of 64
    frame  length of the header (u32), length of the KV (u64), digest (16 bytes), header (MessagePack), padding, KV

Invariants:
- a frame is one request, and stands alone: a damaged one costs only that request;
- the digest covers the header and, in bytes that leave the machine, the KV as well. In shared memory the KV is read
  where it was written, so there is nothing that a digest of it would guard;
- the state of shared memory is RELEASED once the importer needs it no more; its owner may then write there again;
- nothing in it is executed when it is read: plain data and numbers, no pickle.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Sequence as Many
from pathlib import Path
from typing import NamedTuple

import msgspec

from dora_rl.core.errors import BundleError
from dora_rl.core.types import Fingerprint, Record, TrajectoryId
from dora_rl.engine.kv import KvShape
from dora_rl.engine.kv_transfer.shared_memory import IN_USE, RELEASED, STATE, SegmentPool
from dora_rl.engine.requests import Request

MAGIC = b"DORAKV1\n"
_FILE = struct.Struct("<8sII")
_FRAME = struct.Struct("<IQ16s")
_ALIGNMENT = 64


class MovedRequest(Record, frozen=True, kw_only=True):
    """The state of a request, all but its KV."""

    request: Request
    """With the response so far."""
    fingerprint: Fingerprint
    """Of the weights that made its KV."""
    computed: int
    """Tokens whose KV comes along."""
    known: int
    parked: bool = False
    """It waits for its environment."""
    kv_shape: KvShape | None = None
    """None where no KV comes along, and the request is prefilled again."""
    kv_digest: bool = False
    """The frame's digest covers the KV too."""


class Frame(NamedTuple):
    """One request and where its KV lies in the bundle's memory; or what is wrong with it."""

    moved: MovedRequest | None
    kv: memoryview
    error: BundleError | None = None


class KvBundle:
    """Frames in memory: of this process, or shared by the processes of this machine under a name."""

    def __init__(self, memory: memoryview, path: Path | None = None) -> None:
        self.memory = memory
        self._path = path
        self._taken = False

    def __del__(self) -> None:
        # The last request that reads from here has let go of it.
        if self._taken and self._path is not None:
            self.memory[STATE] = RELEASED

    @classmethod
    def lay_out(
        cls, moved: Many[MovedRequest], kv_bytes: Many[int], segments: SegmentPool | None
    ) -> tuple[KvBundle, list[Frame]]:
        """A bundle with room for these requests; the caller writes the KV into the frames. Shared if in a segment."""
        headers = [msgspec.msgpack.encode(one) for one in moved]
        size = _pad(_FILE.size)
        starts = []
        for header, kv in zip(headers, kv_bytes, strict=True):
            starts.append(size)
            size += _pad(_FRAME.size + len(header)) + _pad(kv)
        bundle = cls(memoryview(bytearray(size))) if segments is None else cls(*segments.take(size))
        memory = bundle.memory
        _FILE.pack_into(memory, 0, MAGIC, len(headers), IN_USE)
        frames = []
        for one, header, kv, start in zip(moved, headers, kv_bytes, starts, strict=True):
            _FRAME.pack_into(memory, start, len(header), kv, _digest(header))
            memory[start + _FRAME.size : start + _FRAME.size + len(header)] = header
            body = start + _pad(_FRAME.size + len(header))
            frames.append(Frame(one, memory[body : body + kv]))
        return bundle, frames

    @classmethod
    def attach(cls, name: str) -> KvBundle:
        """The shared bundle of this name, mapped."""
        path = Path(name)
        try:
            with path.open("r+b") as file:
                owner = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise BundleError(f"the bundle '{name}' is gone: {error}") from error
        return cls(memoryview(owner), path)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> KvBundle:
        """A bundle that came as bytes."""
        # Tensors over it must be able to write, and to lie on their natural boundaries.
        return cls(memoryview(bytearray(data)))

    @property
    def name(self) -> str:
        """What another process of this machine attaches by."""
        assert self._path is not None, "only a shared bundle has a name"
        return str(self._path)

    @property
    def shared(self) -> bool:
        return self._path is not None

    def to_bytes(self) -> bytes:
        """The bundle for the wire: every frame's digest covers its KV."""
        frames = self.frames()
        moved = [msgspec.structs.replace(_sound(frame), kv_digest=True) for frame in frames]
        out, places = KvBundle.lay_out(moved, [len(frame.kv) for frame in frames], None)
        start = _pad(_FILE.size)
        for one, frame, place in zip(moved, frames, places, strict=True):
            place.kv[:] = frame.kv
            header = msgspec.msgpack.encode(one)
            _FRAME.pack_into(out.memory, start, len(header), len(frame.kv), _digest(header, frame.kv))
            start += _pad(_FRAME.size + len(header)) + _pad(len(frame.kv))
        return bytes(out.memory)

    def frames(self) -> list[Frame]:
        """All frames; a damaged one carries its error. A bundle whose frames can't even be told apart raises."""
        memory = self.memory
        if len(memory) < _FILE.size:
            raise BundleError("the bundle is cut off")
        magic, count, _ = _FILE.unpack_from(memory, 0)
        if magic != MAGIC:
            raise BundleError("this is not a bundle of requests")
        frames = []
        start = _pad(_FILE.size)
        for index in range(count):
            if start + _FRAME.size > len(memory):
                raise BundleError(f"the bundle is cut off before request {index + 1} of {count}")
            header_size, kv_size, digest = _FRAME.unpack_from(memory, start)
            body = start + _pad(_FRAME.size + header_size)
            if body + kv_size > len(memory):
                raise BundleError(f"the bundle is cut off in request {index + 1} of {count}")
            header = bytes(memory[start + _FRAME.size : start + _FRAME.size + header_size])
            frames.append(_frame(header, memory[body : body + kv_size], digest, index))
            start = body + _pad(kv_size)
        return frames

    def trajectories(self) -> tuple[TrajectoryId, ...]:
        """Who is in it, as far as it can be read."""
        return tuple(frame.moved.request.trajectory for frame in self.frames() if frame.moved is not None)

    def taken(self) -> None:
        """Imported, or given up: once nobody holds this object any more, its memory may be used again."""
        self._taken = True


def _frame(header: bytes, kv: memoryview, digest: bytes, index: int) -> Frame:
    try:
        moved = msgspec.msgpack.decode(header, type=MovedRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Frame(None, kv, BundleError(f"request {index + 1} of the bundle is damaged: {error}"))
    found = _digest(header, kv) if moved.kv_digest else _digest(header)
    if found != digest:
        name = f"trajectory {moved.request.trajectory}"
        return Frame(moved, kv, BundleError(f"the bundle of {name} is damaged: its digest does not match"))
    return Frame(moved, kv)


def _sound(frame: Frame) -> MovedRequest:
    if frame.error is not None:
        raise frame.error
    assert frame.moved is not None
    return frame.moved


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _pad(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
