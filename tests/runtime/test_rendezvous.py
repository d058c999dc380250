"""Only the processes of a run come through its door, each once."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from dora_rl.core.errors import RunError
from dora_rl.runtime.launch.ray.rendezvous import LOOPBACK, Hello, Rendezvous, connect


class Hall:
    """Whoever was let in."""

    def __init__(self) -> None:
        self.guests: dict[str, tuple[Hello, socket.socket]] = {}
        self.came = threading.Event()
        self.rendezvous = Rendezvous(self._connected)
        self.port = self.rendezvous.listen(LOOPBACK)

    def _connected(self, name: str, hello: Hello, link: socket.socket) -> None:
        self.guests[name] = (hello, link)
        self.came.set()


@pytest.fixture
def hall() -> Iterator[Hall]:
    hall = Hall()
    yield hall
    hall.rendezvous.close()
    for _, link in hall.guests.values():
        link.close()


def test_a_process_comes_in_once_under_its_name(hall: Hall) -> None:
    token = hall.rendezvous.expect("i0.1")
    link, clock_offset = connect(LOOPBACK, hall.port, token, "node")
    with link:
        assert hall.came.wait(300)
        hello, ours = hall.guests["i0.1"]
        assert hello.node == "node"
        assert clock_offset == 0  # the same machine has the same clock
        ours.sendall(b"frame")
        assert link.recv(5) == b"frame"
    with pytest.raises(RunError, match="did not accept"):
        connect(LOOPBACK, hall.port, token, "node")


@pytest.mark.parametrize("token", [b"", b"\0" * 32, b"x" * 31])
def test_who_has_no_token_stays_outside(hall: Hall, token: bytes) -> None:
    real = hall.rendezvous.expect("i0.1")
    for wrong in (token, real[:-1] + bytes([real[-1] ^ 1])):
        with pytest.raises(RunError, match="did not accept"):
            connect(LOOPBACK, hall.port, wrong, "node")
    assert not hall.guests


def test_a_token_that_is_forgotten_opens_nothing(hall: Hall) -> None:
    token = hall.rendezvous.expect("i0.1")
    hall.rendezvous.forget("i0.1")
    with pytest.raises(RunError):
        connect(LOOPBACK, hall.port, token, "node")


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"abc"]
)
def test_noise_is_shown_out_and_the_door_stays_open(hall: Hall, noise: bytes) -> None:
    with socket.create_connection((LOOPBACK, hall.port)) as stranger:
        stranger.sendall(noise)
        stranger.settimeout(20)
        with pytest.raises((ConnectionError, AssertionError)):
            assert stranger.recv(1), "closed"
    link, _ = connect(LOOPBACK, hall.port, hall.rendezvous.expect("i1.1"), "node")
    link.close()
    assert hall.came.wait(300)


def test_it_listens_on_the_loopback_alone(hall: Hall) -> None:
    addresses = {listener.getsockname()[0] for listener in hall.rendezvous._listeners.values()}
    assert addresses == {LOOPBACK}


def test_another_machine_has_another_clock(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora_rl.runtime.launch.ray.rendezvous.this_kernel", iter(["a", "b"]).__next__)
    before = time.monotonic_ns()
    link, clock_offset = connect(LOOPBACK, hall.port, hall.rendezvous.expect("i0.1"), "node")
    link.close()
    assert hall.came.wait(300), "its end of the link would be closed by nobody"
    assert 0 <= clock_offset <= time.monotonic_ns() - before
