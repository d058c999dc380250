"""Only the workers of a run can connect to its supervisor, each once."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from dora_rl.core.errors import RunError
from dora_rl.runtime.launch.ray.rendezvous import LOOPBACK, Hello, Rendezvous, connect


class Server:
    """A rendezvous and the workers that have connected."""

    def __init__(self) -> None:
        self.workers: dict[str, tuple[Hello, socket.socket]] = {}
        self.connected = threading.Event()
        self.rendezvous = Rendezvous(self._connected)
        self.port = self.rendezvous.listen(LOOPBACK)

    def _connected(self, name: str, hello: Hello, link: socket.socket) -> None:
        self.workers[name] = (hello, link)
        self.connected.set()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.rendezvous.close()
    for _, link in server.workers.values():
        link.close()


def test_a_worker_connects_once_under_its_name(server: Server) -> None:
    token = server.rendezvous.expect("i0.1")
    link, clock_offset = connect(LOOPBACK, server.port, token, "node")
    with link:
        assert server.connected.wait(300)
        hello, ours = server.workers["i0.1"]
        assert hello.node == "node"
        assert clock_offset == 0  # the same machine has the same clock
        ours.sendall(b"frame")
        assert link.recv(5) == b"frame"
    with pytest.raises(RunError, match="did not accept"):
        connect(LOOPBACK, server.port, token, "node")


@pytest.mark.parametrize("token", [b"", b"\0" * 32, b"x" * 31])
def test_a_wrong_token_is_refused(server: Server, token: bytes) -> None:
    real = server.rendezvous.expect("i0.1")
    for wrong in (token, real[:-1] + bytes([real[-1] ^ 1])):
        with pytest.raises(RunError, match="did not accept"):
            connect(LOOPBACK, server.port, wrong, "node")
    assert not server.workers


def test_a_forgotten_token_is_refused(server: Server) -> None:
    token = server.rendezvous.expect("i0.1")
    server.rendezvous.forget("i0.1")
    with pytest.raises(RunError):
        connect(LOOPBACK, server.port, token, "node")


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"abc"]
)
def test_noise_is_refused_and_workers_can_still_connect(server: Server, noise: bytes) -> None:
    with socket.create_connection((LOOPBACK, server.port)) as client:
        client.sendall(noise)
        client.settimeout(20)
        with pytest.raises((ConnectionError, AssertionError)):
            assert client.recv(1), "closed"
    link, _ = connect(LOOPBACK, server.port, server.rendezvous.expect("i1.1"), "node")
    link.close()
    assert server.connected.wait(300)


def test_it_listens_on_the_loopback_address_only(server: Server) -> None:
    addresses = {listener.getsockname()[0] for listener in server.rendezvous._listeners.values()}
    assert addresses == {LOOPBACK}


def test_another_machine_has_another_clock(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora_rl.runtime.launch.ray.rendezvous.this_kernel", iter(["a", "b"]).__next__)
    before = time.monotonic_ns()
    link, clock_offset = connect(LOOPBACK, server.port, server.rendezvous.expect("i0.1"), "node")
    link.close()
    assert server.connected.wait(300), "otherwise its end of the link would stay open"
    assert 0 <= clock_offset <= time.monotonic_ns() - before
