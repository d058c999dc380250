"""The format of a bundle: requests that move, with their state and KV, in contiguous memory.

    file   "DORAKV1\\n", number of frames (u32), state (u32), then the frames, each starting at a multiple of 64
    frame  length of the header (u32), length of the KV (u64), digest (16 bytes), header (MessagePack), padding, KV

Invariants:
- a frame is one request and is independent of the others: a damaged frame affects only that request;
- the digest covers the header and, in bytes that leave the machine, the KV as well. KV in shared memory is read where
  it was written, so a digest of it would guard against nothing;
- the state of shared memory is RELEASED once the importer no longer needs it; then its owner may write to it again;
- reading executes nothing: the format is plain data and numbers, no pickle.
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
    """The state of a request without its KV."""

    request: Request
    """The request, with the response so far."""
    fingerprint: Fingerprint
    """Fingerprint of the weights that computed the KV."""
    computed: int
    """Tokens whose KV is in the frame."""
    known: int
    """Tokens whose KV existed once; computing one of them again counts as re-prefill."""
    parked: bool = False
    """The request waits for its environment."""
    kv_shape: KvShape | None = None
    """None: the frame has no KV, and the request is prefilled again."""
    kv_digest: bool = False
    """The digest of the frame covers the KV too."""


class Frame(NamedTuple):
    """One request and its KV in the bundle's memory, or an error if the frame is damaged."""

    moved: MovedRequest | None
    kv: memoryview
    error: BundleError | None = None


class KvBundle:
    """Frames in the memory of this process, or in named memory that the processes of this machine share."""

    def __init__(self, memory: memoryview, path: Path | None = None) -> None:
        self.memory = memory
        self._path = path
        self._released = False

    def __del__(self) -> None:
        # No request reads from this memory any more.
        if self._released and self._path is not None:
            self.memory[STATE] = RELEASED

    @classmethod
    def lay_out(
        cls, moved: Many[MovedRequest], kv_bytes: Many[int], segments: SegmentPool | None
    ) -> tuple[KvBundle, list[Frame]]:
        """Make a bundle for these requests, in a shared segment if given; the caller writes the KV into the frames."""
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
        """Map the shared bundle of this name."""
        path = Path(name)
        try:
            with path.open("r+b") as file:
                owner = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise BundleError(f"the bundle '{name}' is gone: {error}") from error
        return cls(memoryview(owner), path)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> KvBundle:
        """Make a bundle from bytes."""
        # Tensors over the memory need it to be writable and aligned.
        return cls(memoryview(bytearray(data)))

    @property
    def name(self) -> str:
        """The name by which another process of this machine attaches."""
        assert self._path is not None, "only a shared bundle has a name"
        return str(self._path)

    @property
    def shared(self) -> bool:
        """Whether the bundle is in shared memory."""
        return self._path is not None

    def to_bytes(self) -> bytes:
        """Return the bundle as bytes for the wire, where the digest of every frame covers its KV."""
        frames = self.frames()
        moved = [msgspec.structs.replace(_intact(frame), kv_digest=True) for frame in frames]
        out, targets = KvBundle.lay_out(moved, [len(frame.kv) for frame in frames], None)
        start = _pad(_FILE.size)
        for one, frame, target in zip(moved, frames, targets, strict=True):
            target.kv[:] = frame.kv
            header = msgspec.msgpack.encode(one)
            _FRAME.pack_into(out.memory, start, len(header), len(frame.kv), _digest(header, frame.kv))
            start += _pad(_FRAME.size + len(header)) + _pad(len(frame.kv))
        return bytes(out.memory)

    def frames(self) -> list[Frame]:
        """Return all frames; a damaged one carries its error. A bundle whose frames can't be separated raises."""
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
        """Return the trajectories in the bundle, as far as it is readable."""
        return tuple(frame.moved.request.trajectory for frame in self.frames() if frame.moved is not None)

    def release(self) -> None:
        """Let the owner use the memory again, once nothing refers to this object any more."""
        self._released = True


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


def _intact(frame: Frame) -> MovedRequest:
    if frame.error is not None:
        raise frame.error
    assert frame.moved is not None
    return frame.moved


def _digest(*buffers: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _pad(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
