"""How the ranks of the trainer find each other and receive the same messages.

    rank 0 --RanksAddress--> supervisor --JoinRanks--> other ranks --> one process group

Invariants:
- only rank 0 receives messages from the supervisor; it broadcasts them, so that all ranks do the same in the same
  order, however messages happened to be merged;
- only rank 0 reports;
- messages between ranks are plain data and use a process group of their own in host memory.
"""

from __future__ import annotations

import logging
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
from dora_rl.trainer.rank_group import RankGroup, join_from_store

logger = logging.getLogger(__name__)

_MESSAGE_TIMEOUT = timedelta(days=7)
"""For the next message: the supervisor has deadlines for everything that may hang, and ends all ranks together."""
_LOOPBACK = "127.0.0.1"


def join(start: m.StartWorker, channel: Channel[m.ToWorker], device: str, address: str) -> RankGroup:
    """Join the rank group of the trainer; a single rank trains alone."""
    if start.ranks == 1:
        return RankGroup()
    if address == _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if start.rank:
        channel.send(m.WorkerReady())
        store = _join_store(_wait_for_address(channel), start.ranks)
    else:
        # The socket is bound to this one address; by itself the store would listen on all addresses.
        listener = socket.create_server((address, 0))
        port = int(listener.getsockname()[1])
        store = TCPStore(
            address, port, start.ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        channel.send(m.RanksAddress(address=address, port=port))
    rank_group = join_from_store(device, store, start.rank, start.ranks)
    logger.info("joined the rank group as rank %d of %d", start.rank, start.ranks)
    return rank_group


class MessageBroadcast:
    """Broadcasts the messages of rank 0 to all ranks."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._decoder = msgspec.msgpack.Decoder(list[m.ToWorker])
        self._group: Any = None
        if rank_group.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=_MESSAGE_TIMEOUT)

    @property
    def is_source(self) -> bool:
        """Whether this is rank 0, which receives the supervisor's messages and reports."""
        return self._rank_group.rank == 0

    def share(self, messages: list[m.ToWorker]) -> list[m.ToWorker]:
        """The messages of rank 0, on every rank."""
        if self._rank_group.size == 1:
            return messages
        body = msgspec.msgpack.encode(messages) if self.is_source else b""
        size = torch.tensor([len(body)])
        dist.broadcast(size, 0, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.is_source:
            data[:] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        return messages if self.is_source else self._decoder.decode(data.numpy().tobytes())


class NullChannel:
    """The outgoing channel of a rank that does not report."""

    closed = False

    def send(self, message: msgspec.Struct) -> None:
        """Discard the message: rank 0 sends the same one."""


def _wait_for_address(channel: Channel[m.ToWorker]) -> m.JoinRanks:
    while not channel.closed:
        channel.wait(60.0)
        for message in channel.receive():
            if isinstance(message, m.JoinRanks):
                return message
    raise EOFError("the supervisor is gone")


def _join_store(message: m.JoinRanks, ranks: int) -> Any:
    return TCPStore(message.address, message.port, ranks, is_master=False)
