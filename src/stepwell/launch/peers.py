"""Every rank learns at once when another one dies or fails, and which; without any launcher.

Rank 0 runs a hub, and every rank (0 too) keeps one TCP connection to it. The kernel closes the
connections of a process that dies, however it dies, and TCP's keepalive finds machines that vanish:
a connection that ends without a farewell is a death. The hub tells the first cause to all. A rank
whose training waits for the dead one in a collective (on NCCL: for ever) is ended by its watching
thread. Ranks that live but do not come to a collective are found by its time limit.

No torch until a watch begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

from stepwell.launch.environ import num_restarts
from stepwell.types import Interrupted, RankMissing, StepwellError

# How long a rank's own work may take to end by itself once another rank is known to be missing.
GRACE_S = 5.0
# How long a rank that fails waits to hear that another one was the cause.
CAUSE_S = 2.0
# After the first rank that lost contact: how much later others may notice.
SILENCE_S = 3.0
# How long an ending rank takes to reach the hub, if it has not yet.
CONNECT_S = 1.0
JOIN_S = 600.0
# Of the rank where the hub is, by one that lost contact before it found the hub.
UNREACHED = "rank 0 is missing: its watch was never reached"
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


@contextlib.contextmanager
def watched(environ: Mapping[str, str], grace_s: float = GRACE_S) -> Iterator[None]:
    """Around the work of a rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); does nothing for a
    single process.

    Raises RankMissing, which names the rank, for an error that another rank's end has caused. If
    this rank's work does not end within grace_s after that, the process exits with its exit code.
    """
    if int(environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in environ:
        yield
        return
    import torch.distributed  # noqa: F401 - not by two threads at once

    watch = Watch(environ, grace_s)
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        watch.leave()
        raise
    except StepwellError as error:
        watch.leave(str(error))
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        cause = watch.cause(lost_contact(error))
        watch.leave(text)
        if cause is None:
            raise
        raise RankMissing(f"{cause}; the same command goes on from the last checkpoint") from error
    else:
        watch.leave()


def lost_contact(error: Exception) -> Literal["late", "closed"] | None:
    """Whether an error is another rank's not coming to a collective in time, or its end."""
    text = str(error).lower()
    if any(words in text for words in ("timed out", "timeout", "deadline exceeded")):
        return "late"
    closed = ("connection closed", "connection reset", "broken pipe", "connection refused", "nccl")
    return "closed" if any(words in text for words in closed) else None


class Watch:
    """One rank's side: `verdict` is the hub's word on the first rank that died or failed."""

    def __init__(self, environ: Mapping[str, str], grace_s: float) -> None:
        self.rank, self.world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        self.grace_s = grace_s
        self.verdict: str | None = None
        self._judged, self._left = threading.Event(), threading.Event()
        self._connected, self._ended = threading.Event(), threading.Event()
        self._answered = threading.Event()
        self._hub: socket.socket | None = None
        self._farewell = ""
        threading.Thread(target=self._run, args=(dict(environ),), daemon=True).start()

    def cause(self, lost: str | None) -> str | None:
        """What is known of other ranks, when this one has failed. lost: see `lost_contact`."""
        if lost:
            self._connected.wait(CONNECT_S)
            self._say(lost=lost)
        self._judged.wait(CAUSE_S + (SILENCE_S if lost else 0))
        if self.verdict is None and lost == "closed" and not self._connected.is_set():
            return UNREACHED
        if self.verdict is None and lost == "late" and not self._answered.is_set():
            return silence({0})  # where the hub is
        return self.verdict

    def leave(self, failure: str | None = None) -> None:
        """Says farewell, so that the end of this process is no death."""
        self._connected.wait(CONNECT_S)
        self._farewell = failure or ""
        self._left.set()
        self._say(left=self._farewell)
        if self._connected.is_set():
            self._ended.wait(CONNECT_S)

    def _say(self, **message: Any) -> None:
        if self._hub is not None:
            with contextlib.suppress(OSError):
                self._hub.sendall(line_of(message))

    def _run(self, environ: dict[str, str]) -> None:
        try:
            self._hub = self._connect(environ)
        except (OSError, RuntimeError) as error:
            if not self._left.is_set():
                _tell(
                    f"rank {self.rank} cannot reach rank 0's watch ({error}); if a rank dies, only "
                    "the time limit of collectives will tell"
                )
            return
        if self._left.is_set():
            self._say(left=self._farewell)
        self._connected.set()
        bye = False
        for message in messages(self._hub):
            if "verdict" in message and not self._left.is_set():
                self._judge(message["verdict"])
            bye = bye or "bye" in message
            if "heard" in message:
                self._answered.set()
        if not bye and not self._left.is_set():
            self._judge(death(0))
        self._ended.set()

    def _connect(self, environ: dict[str, str]) -> socket.socket:
        """Finds the hub through the store that torch.distributed uses too."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        limit = timedelta(seconds=JOIN_S)
        _wait_for(host, port)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        key = f"stepwell/watch/{num_restarts(environ)}"
        if self.rank == 0:
            listener, address = _listen(host, port)
            token = secrets.token_hex(16)
            hub = threading.Thread(target=Hub(listener, token, self.world).run, daemon=True)
            hub.start()
            store.set(key, json.dumps([*address, token]))
        name, hub_port, token = json.loads(store.get(key))
        hub = socket.create_connection((name, hub_port), timeout=JOIN_S)
        hub.settimeout(None)
        _keep_alive(hub)
        hub.sendall(line_of({"token": token, "rank": self.rank}))
        return hub

    def _judge(self, verdict: str) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self._judged.set()
            threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        """Ends a process whose work hangs in a collective, where no exception reaches it."""
        if not self._left.wait(self.grace_s):
            _tell(f"{self.verdict}; the same command goes on from the last checkpoint")
            os._exit(RankMissing.exit_code)


class Hub:
    """Rank 0's side. It ends when every rank has left."""

    def __init__(self, listener: socket.socket, token: str, world: int) -> None:
        self.listener, self.token, self.world = listener, token, world
        self.selector = selectors.DefaultSelector()
        self.ranks: dict[socket.socket, int] = {}
        self.rest: dict[socket.socket, bytes] = {}
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.deadline: float | None = None
        self.verdict: str | None = None

    def run(self) -> None:
        self.selector.register(self.listener, selectors.EVENT_READ)
        while len(self.left) < self.world:
            limit = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            for key, _ in self.selector.select(limit):
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.deadline = None
                self._silent()
        for connection in list(self.rest):
            self._drop(connection)
        self.listener.close()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        _keep_alive(connection)
        self.selector.register(connection, selectors.EVENT_READ)
        self.rest[connection] = b""

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        *lines, self.rest[connection] = (self.rest[connection] + data).split(b"\n")
        for line in lines:
            if not self._hear(connection, line):
                return
        if not data:
            rank = self.ranks.get(connection)
            self._drop(connection)
            if rank is not None and rank not in self.left:
                self.left.add(rank)
                self._judge(death(rank))

    def _hear(self, connection: socket.socket, line: bytes) -> bool:
        """Whether the connection stays."""
        message, rank = parsed(line), self.ranks.get(connection)
        if rank is None:
            if message.get("token") != self.token:
                self._drop(connection)  # a stranger
                return False
            self.ranks[connection] = int(message["rank"])
            if self.verdict is not None:
                self._send(connection, verdict=self.verdict)
        elif "lost" in message:
            self.lost[rank] = str(message["lost"])
            self._send(connection, heard=True)
            if self.deadline is None:
                self.deadline = time.monotonic() + SILENCE_S
        elif "left" in message:
            self.left.add(rank)
            if message["left"]:
                self._judge(f"rank {rank} failed ({message['left']})")
            if rank == 0:
                for other in self.ranks:
                    self._send(other, bye=True)
            self._drop(connection)
            return False
        return True

    def _silent(self) -> None:
        """Ranks have lost contact, but no connection to here has ended: who was it?"""
        present = set(self.ranks.values()) | self.left
        if absent := set(range(self.world)) - present:
            self._judge(f"{named(absent)} missing: never seen by rank 0")
        elif "late" in self.lost.values() and (silent := present - self.left - set(self.lost)):
            self._judge(silence(silent))

    def _judge(self, verdict: str) -> None:
        if self.verdict is None:
            self.verdict = verdict
            for connection in self.ranks:
                self._send(connection, verdict=verdict)

    def _send(self, connection: socket.socket, **message: Any) -> None:
        with contextlib.suppress(OSError):  # its end is read next
            connection.sendall(line_of(message))

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.ranks.pop(connection, None)
        self.rest.pop(connection, None)
        connection.close()


def named(ranks: set[int]) -> str:
    numbers = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def death(rank: int) -> str:
    return f"{named({rank})} missing: its process ended without a word, or its machine is gone"


def silence(ranks: set[int]) -> str:
    it, its = ("it", "its") if len(ranks) == 1 else ("they", "their")
    return (
        f"{named(ranks)} not answering: {it} came to no collective within {its} time limit, which "
        "--rank-timeout sets"
    )


def line_of(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def parsed(line: bytes) -> dict[str, Any]:
    """An empty message for what is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Until the connection ends."""
    with contextlib.suppress(OSError), connection.makefile("rb") as file:
        for line in file:
            yield parsed(line)


def _listen(host: str, port: int) -> tuple[socket.socket, tuple[str, int]]:
    """A listening socket, and the address by which the other ranks reach it: that of the network
    which leads to MASTER_ADDR."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    # Some machines know their own name as a loopback address, which is of no use to others.
    named = own.startswith("127.") and host not in ("localhost", "127.0.0.1")
    listener = socket.create_server(("" if named else own, 0), family=family, backlog=1024)
    return listener, (host if named else own, listener.getsockname()[1])


def _wait_for(host: str, port: int) -> None:
    """Until the store listens: its own client waits longer and longer between its attempts."""
    end = time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection((host, port), timeout=JOIN_S).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _tell(text: str) -> None:
    sys.stderr.write(f"stepwell: {text}\n")
    sys.stderr.flush()
