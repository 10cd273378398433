"""The processes of a job wait for each other at the start; when one is lost, the others end.

Every process has a connection to process 0, at the port of the coordinator, which process 0 leaves
to JAX once all are connected. The kernel closes a connection when its process ends, and when the
host does not answer. A process that hangs is left to JAX's heartbeats.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

from moelib.core.errors import UserError

EXIT_CODE = 88  # Exit status of a process that ends because another one is lost.
_HELLO = b"moelib"  # Before the first message of a process, whose number is its index.
# Messages are a number and a text, filled up with zeros. The number is the index of a process that
# is lost, whose error the text is, or one of these:
_TEXT_BYTES = 600
_ALL_STARTED = 1 << 30
_FINISHED = 1 << 31  # From a process that ends as intended.

_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 4}  # 10 s for a host.
_CONNECT_SECONDS = 10.0
_FIRST_REPORT_SECONDS, _REPORT_SECONDS = 10.0, 30.0
_GRACE_SECONDS = 2.0  # For an error of this process that is on its way, too.

_Peers = dict[int, socket.socket]  # By index: all others for process 0, process 0 for the others.


@contextlib.contextmanager
def ended_with_others(
    address: str,
    num_processes: int,
    index: int,
    timeout_seconds: float,
    *,
    bind_address: str | None = None,
    setting: str = "address",
    description: str = "",
) -> Iterator[None]:
    """Waits for all processes of a job, runs the block, and ends this process with any other one.

    Lines on stderr name the processes that are missing. The block starts JAX's own service.

    Args:
        address: Address of process 0, as host:port.
        num_processes: Number of processes of the job.
        index: Index of this process.
        timeout_seconds: Time to wait for the others.
        bind_address: Address at which process 0 listens, by default `address`.
        setting: Setting of the address, for errors.
        description: Versions that must be equal in all processes, separated by commas.

    Raises:
        UserError: If a process has not started in time or has another description, or process 0
            cannot listen at the address.
    """
    wait = _Wait(f"Process {index} of {num_processes}", timeout_seconds)
    if index == 0:
        server = _server(bind_address or address, f"{setting}={address}", wait)
        peers = _accept(server, num_processes, description, wait)
    else:
        peers = {0: _connect(_host_and_port(address), index, description, wait)}
    job = _Job(index, num_processes, peers)
    for other, peer in list(peers.items()):
        _probe(peer)
        threading.Thread(target=job.watch, args=(other,), daemon=True).start()
    yield
    # Before what JAX has registered: after an error, that waits for the others.
    atexit.register(job.tell_how_this_one_ends)


class _Job:
    """The processes that this one is connected with."""

    def __init__(self, index: int, num_processes: int, peers: _Peers) -> None:
        self._index, self._num_processes, self._peers = index, num_processes, peers
        # JAX aborts the others, without a message of ours, when process 0 has ended.
        self._grace_seconds = _GRACE_SECONDS + (index == 0)
        self._first = threading.Lock()  # Taken at the first loss: others that end then follow it.
        self._follows = False  # Whether an error of this process follows from a loss.

    def _tell(self, number: int, text: bytes = b"") -> None:
        for peer in list(self._peers.values()):
            _send(peer, number, text)

    def watch(self, other: int) -> None:
        """Ends this process when another process, or one that it knows of, is lost."""
        lost, error = _receive(self._peers[other]) or (other, b"")
        if lost == _FINISHED or not self._first.acquire(blocking=False):
            return
        self._peers.pop(other)
        self._tell(lost, error)
        self._follows = not error
        if error:
            time.sleep(self._grace_seconds)
        if hasattr(sys, "last_exc"):  # This process has an error of its own, and ends.
            return
        reason = f" ({error.decode(errors='replace')})" if error else ""
        text = f"Process {lost} of {self._num_processes} is lost{reason}, and this one ends, too."
        print(f"{text} Start all of them again.", file=sys.stderr, flush=True)
        if not error:
            time.sleep(self._grace_seconds)
        os._exit(EXIT_CODE)

    def tell_how_this_one_ends(self) -> None:
        """Tells the others that this process is finished, or else its error, and ends it."""
        error = getattr(sys, "last_exc", None)
        if error is None:
            self._tell(_FINISHED)
            return
        self._first.acquire(blocking=False)
        self._tell(self._index, " ".join(f"{type(error).__name__}: {error}".split()).encode())
        if self._index == 0:
            time.sleep(self._grace_seconds)
        sys.stdout.flush()
        code = getattr(error, "exit_status", 2 if isinstance(error, OSError) else 1)
        os._exit(EXIT_CODE if self._follows else code)


class _Wait:
    """The time that a process waits for others, with reports."""

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self._name, self._timeout = name, timeout_seconds
        self._begin = time.monotonic()
        self._next_report = _FIRST_REPORT_SECONDS

    def go_on(self, reason: str) -> float:
        """Reports the reason if it is time to, and returns the seconds until the next report.

        Raises UserError if the time is over.
        """
        seconds = time.monotonic() - self._begin
        text = f"{self._name} has waited {seconds:.0f} s of {self._timeout:.0f}: {reason}."
        if seconds >= self._timeout:
            raise UserError(f"{text} Start all of them, or set --start_timeout_seconds.")
        if seconds >= self._next_report:
            print(text, file=sys.stderr, flush=True)
            self._next_report += _REPORT_SECONDS
        return max(min(self._next_report, self._timeout) - seconds, 0.01)


def _accept(server: socket.socket, num_processes: int, description: str, wait: _Wait) -> _Peers:
    """Returns connections from all other processes, once they are there."""
    peers: _Peers = {}
    descriptions = {}
    with server:
        while missing := [str(i) for i in range(1, num_processes) if i not in peers]:
            names = f"{'es' * (len(missing) > 1)} {', '.join(missing)}"
            server.settimeout(wait.go_on(f"no connection from process{names:.99}"))
            with contextlib.suppress(OSError):  # Time for a report, or a process that has gone.
                peer = server.accept()[0]
                peer.settimeout(_CONNECT_SECONDS)
                number, other = _receive(peer, _HELLO) or (0, b"")
                if 0 < number < num_processes:
                    peers[number], descriptions[number] = peer, other.decode(errors="replace")
    for number in sorted(peers):
        _check_equal(number, descriptions[number], description, peers)
    for peer in peers.values():
        _send(peer, _ALL_STARTED)
    return peers


def _check_equal(number: int, description: str, expected: str, peers: _Peers) -> None:
    """Raises UserError in all processes if the description of one differs from process 0's."""
    pairs = zip(description.split(", "), expected.split(", "), strict=False)
    for found, own in pairs:
        if found != own:
            text = f"Process {number} has {found}, process 0 {own}; install the same in both."
            for peer in peers.values():
                _send(peer, 0, text.encode())
            raise UserError(text)


def _server(address: str, setting: str, wait: _Wait) -> socket.socket:
    host, port = _host_and_port(address)
    while True:
        try:
            family = socket.getaddrinfo(host, port)[0][0]
            return socket.create_server((host, port), family=family)
        except socket.gaierror as error:  # Names of Kubernetes appear after their pods.
            time.sleep(min(wait.go_on(f"{host}: {error.strerror}"), 0.5))
        except OSError as error:
            raise UserError(
                f"{setting}: process 0 cannot listen there "
                f"({error.strerror}); set a free port of its own host."
            ) from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _connect(address: tuple[str, int], index: int, description: str, wait: _Wait) -> socket.socket:
    """Returns a connection to process 0, once all processes are there."""
    where = f"{address[0]}:{address[1]}"
    while True:
        seconds = wait.go_on(f"process 0 does not answer at {where}")
        try:
            peer = socket.create_connection(address, min(seconds, _CONNECT_SECONDS))
        except OSError:
            time.sleep(min(seconds, 0.5))
            continue
        peer.settimeout(_CONNECT_SECONDS)
        _send(peer, index, description.encode(), _HELLO)
        while True:
            reason = "processes are missing, which process 0 names, or another program has its port"
            peer.settimeout(wait.go_on(f"connected to {where}, but {reason}"))
            with contextlib.suppress(TimeoutError):
                number, text = _receive(peer) or (None, b"")
                if number == _ALL_STARTED:
                    return peer
                if text:
                    raise UserError(text.decode(errors="replace"))
                break  # Process 0 has ended, and may be started again.


def _send(peer: socket.socket, number: int, text: bytes = b"", prefix: bytes = b"") -> None:
    with contextlib.suppress(OSError):
        peer.sendall(prefix + number.to_bytes(4) + text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"))


def _receive(peer: socket.socket, prefix: bytes = b"") -> tuple[int, bytes] | None:
    """Returns the number and the text of a message, None if the connection has ended."""
    try:
        received = peer.recv(len(prefix) + 4 + _TEXT_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        if error.errno is None:  # Python's own timeout; the kernel's is of a host that is lost.
            raise
        return None
    if not received or not received.startswith(prefix):
        return None
    received = received[len(prefix) :]
    return int.from_bytes(received[:4]), received[4:].rstrip(b"\0")


def _probe(peer: socket.socket) -> None:
    """Lets the kernel close a connection whose host does not answer."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # Not all systems have them.
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
