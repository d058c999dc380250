"""Packs requests that were withdrawn from vLLM into a bundle, with their KV if vLLM had it, and checks arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from dora_rl.core.errors import BundleError
from dora_rl.core.types import Fingerprint, Version
from dora_rl.engine.kv_transfer.format import Frame, KvBundle, MovedRequest

if TYPE_CHECKING:
    from dora_rl.engine.kv_transfer.shared_memory import SegmentPool
    from dora_rl.engine.vllm.connector import Kv, Transit
    from dora_rl.engine.vllm.sequence import VllmSequence


def pack(
    leaving: Mapping[VllmSequence, Kv | None],
    parked: set[VllmSequence],
    transit: Transit | None,
    segments: SegmentPool | None,
) -> KvBundle:
    """Make a bundle of sequences that were withdrawn from vLLM."""
    moved, sizes = [], []
    for sequence, kv in leaving.items():
        moved.append(
            MovedRequest(
                request=msgspec.structs.replace(
                    sequence.request, response=tuple(sequence.response), turn_start=sequence.turn_start
                ),
                fingerprint=sequence.fingerprint,
                computed=0 if kv is None else kv.tokens,
                known=max(sequence.known, len(sequence.tokens) - 1 if sequence.computed else 0),
                parked=sequence in parked,
                kv_shape=None if kv is None or transit is None else transit.shape(),
            )
        )
        sizes.append(0 if kv is None else kv.blocks.nbytes)
    bundle, frames = KvBundle.lay_out(moved, sizes, segments)
    for kv, frame in zip(leaving.values(), frames, strict=True):
        if kv is not None and transit is not None:
            transit.read(frame.kv, kv.blocks.shape[1]).copy_(kv.blocks)
    return bundle


def check_frame(frame: Frame, version: Version | None, fingerprint: Fingerprint) -> MovedRequest:
    """Return the request of a frame; refuse a damaged one and one that was sampled by other weights."""
    if frame.error is not None:
        raise frame.error
    moved = frame.moved
    assert moved is not None
    request = moved.request
    if version != request.version or fingerprint != moved.fingerprint:
        raise BundleError(
            f"trajectory {request.trajectory} comes from version {request.version} ({moved.fingerprint[:12]}), "
            f"but the slot serves {version} ({fingerprint[:12]})"
        )
    return moved


def imported_kv(moved: MovedRequest, frame: Frame, transit: Transit | None) -> Kv | None:
    """Return the KV in a frame, or None if it can't be used here."""
    if transit is None or moved.kv_shape is None or not moved.computed or moved.kv_shape != transit.shape():
        return None
    from dora_rl.engine.vllm.connector import Kv

    blocks = moved.kv_shape.blocks(moved.computed)
    size = transit.caches[0][0].nbytes * len(transit.caches)
    length = len(moved.request.prompt) + len(moved.request.response)
    if len(frame.kv) != blocks * size or moved.computed >= length:
        raise BundleError(
            f"the bundle of trajectory {moved.request.trajectory} has {len(frame.kv):,} bytes of KV for "
            f"{moved.computed} tokens"
        )
    return Kv(transit.read(frame.kv, blocks), moved.computed)
