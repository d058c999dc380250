"""Packs requests of the built-in engine into a bundle, and unpacks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dora_rl.core.errors import BundleError
from dora_rl.engine.kv import KvCache
from dora_rl.engine.kv_transfer.format import Frame, KvBundle, MovedRequest
from dora_rl.engine.sequence import Sequence

if TYPE_CHECKING:
    from dora_rl.engine.kv_transfer.shared_memory import SegmentPool
    from dora_rl.engine.slots import EngineSlot


def pack(leaving: list[Sequence], parked: list[Sequence], cache: KvCache, segments: SegmentPool | None) -> KvBundle:
    """Make a bundle of flushed sequences; one copy moves the KV from the cache, or from the host, into the bundle."""
    moved, sizes = [], []
    for sequence in leaving:
        response = tuple(int(token) for token in sequence.response)
        request = msgspec.structs.replace(
            sequence.request, response=response, turn_start=sequence.turn_start, version=sequence.version
        )
        moved.append(
            MovedRequest(
                request=request,
                fingerprint=sequence.fingerprint,
                computed=sequence.computed,
                known=sequence.known,
                parked=sequence in parked,
                kv_shape=cache.shape,
            )
        )
        sizes.append(cache.shape.blocks(sequence.computed) * cache.shape.block_bytes)
    bundle, frames = KvBundle.lay_out(moved, sizes, segments)
    for sequence, frame in zip(leaving, frames, strict=True):
        blocks = cache.shape.blocks(sequence.computed)
        if not blocks:
            continue
        target = cache.read(frame.kv, blocks)
        if sequence.host is not None:
            cache.copy_all(sequence.host, target)
        else:
            cache.gather(sequence.blocks[:blocks], sequence.computed, target)
    return bundle


def unpack(frame: Frame, slot: EngineSlot, cache: KvCache, arrival: int, context: int) -> Sequence:
    """Return the sequence of a frame; its KV stays in the memory of the bundle."""
    if frame.error is not None:
        raise frame.error
    moved = frame.moved
    assert moved is not None
    request = moved.request
    name = f"trajectory {request.trajectory}"
    if slot.version != request.version or slot.fingerprint != moved.fingerprint:
        raise BundleError(
            f"{name} comes from version {request.version} ({moved.fingerprint[:12]}), "
            f"but slot {slot.index} serves {slot.version} ({slot.fingerprint[:12]})"
        )
    if moved.kv_shape != cache.shape:
        raise BundleError(
            f"{name} has KV of the shape {tuple(moved.kv_shape or ())}, but here it is {tuple(cache.shape)}"
        )
    blocks = cache.shape.blocks(moved.computed)
    length = len(request.prompt) + len(request.response)
    if len(frame.kv) != blocks * cache.shape.block_bytes or not 0 <= moved.computed < max(length, 1):
        raise BundleError(f"the bundle of {name} has {len(frame.kv):,} bytes of KV for {moved.computed} tokens")
    limit = request.length_limit(context)
    if length >= limit:
        raise BundleError(f"{name} does not fit: it has {length} tokens, and at most {limit} are allowed")
    if cache.shape.blocks(limit) > cache.count:
        raise BundleError(f"{name} may need {cache.shape.blocks(limit)} blocks, but there are {cache.count}")
    sequence = Sequence(request, slot.index, arrival, limit, slot.fingerprint)
    sequence.known = moved.known
    if blocks:
        sequence.computed = moved.computed
        sequence.host = cache.read(frame.kv, blocks)
    return sequence
