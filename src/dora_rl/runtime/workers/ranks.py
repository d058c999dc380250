"""The processes that train together, as they meet and as they hear the same.

    rank 0 --Meeting--> supervisor --Meet--> other ranks --> one process group

Invariants:
- rank 0 alone hears the supervisor; what it hears it hands on, so that all ranks do the same in the same order, however
  messages happened to be merged;
- rank 0 alone reports;
- messages between ranks are plain data, over a group of their own in host memory.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel
from dora_rl.trainer.rank_group import RankGroup, meet

_PATIENCE = timedelta(days=7)
"""For the next message: the supervisor has deadlines for all that may hang, and ends the ranks together."""
_LOOPBACK = "127.0.0.1"


def gather(start: m.StartWorker, channel: Channel[m.ToWorker], device: str, address: str) -> RankGroup:
    """Join the rank group of the trainer; a single rank trains alone."""
    if start.ranks == 1:
        return RankGroup()
    if address == _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if start.rank:
        channel.send(m.WorkerReady())
        store = _join_store(_wait_for_meeting(channel), start.ranks)
    else:
        # Bound to the one address: the store would listen on all.
        listener = socket.create_server((address, 0))
        port = int(listener.getsockname()[1])
        store = TCPStore(
            address, port, start.ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        channel.send(m.RanksAddress(address=address, port=port))
    return meet(device, store, start.rank, start.ranks)


class MessageBroadcast:
    """What a rank hears."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._decoder = msgspec.msgpack.Decoder(list[m.ToWorker])
        self._group: Any = None
        if rank_group.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def alone(self) -> bool:
        """The supervisor speaks to this rank."""
        return self._rank_group.rank == 0

    def share(self, messages: list[m.ToWorker]) -> list[m.ToWorker]:
        """The messages of rank 0, on every rank."""
        if self._rank_group.size == 1:
            return messages
        body = msgspec.msgpack.encode(messages) if self.alone else b""
        size = torch.tensor([len(body)])
        dist.broadcast(size, 0, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.alone:
            data[:] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        return messages if self.alone else self._decoder.decode(data.numpy().tobytes())


class NullChannel:
    """The channel of a rank that does not report."""

    closed = False

    def send(self, message: msgspec.Struct) -> None:
        """Rank 0 says it."""


def _wait_for_meeting(channel: Channel[m.ToWorker]) -> m.JoinRanks:
    while not channel.closed:
        channel.wait(60.0)
        for message in channel.receive():
            if isinstance(message, m.JoinRanks):
                return message
    raise EOFError("the supervisor is gone")


def _join_store(meeting: m.JoinRanks, ranks: int) -> Any:
    return TCPStore(meeting.address, meeting.port, ranks, is_master=False)
