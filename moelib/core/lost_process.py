"""A lost process of a job: the others end, too, and print a line with its index.

Every process has a connection to process 0. The kernel closes it when the process ends, and when
its host does not answer. A process that hangs is left to JAX's heartbeats.
"""

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time

import jax

from moelib.core.processes import gather_json

logger = logging.getLogger(__name__)

EXIT_CODE = 88  # Exit status of a process that ends because another one is lost.
_FINISHED = 1 << 31  # Sent by a process that ends as intended; otherwise the index of the lost one.
_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 4}  # 10 s for a host.
_CONNECT_SECONDS = 10.0
_GRACE_SECONDS = 2.0  # For an error of this process that is on its way, too.


def end_with_lost_process(host: str) -> None:
    """From now on, ends this process when another one is lost; all processes must call it.

    Args:
        host: Name or address of process 0's host.
    """
    index, num_processes = jax.process_index(), jax.process_count()
    server = socket.create_server((host, 0)) if index == 0 else None
    port = gather_json(server.getsockname()[1] if server else None)[0]
    peers: dict[int, socket.socket] = {}

    def tell(number: int) -> None:
        for peer in peers.values():
            with contextlib.suppress(OSError):
                peer.sendall(number.to_bytes(4))

    def watch(other: int) -> None:
        try:
            received = peers[other].recv(4, socket.MSG_WAITALL)
        except OSError:
            received = b""
        lost = int.from_bytes(received) if received else other
        if lost != _FINISHED:
            text = f"Process {lost} of {num_processes} is lost, and this one ends, too."
            print(f"{text} Start all of them again.", file=sys.stderr, flush=True)
            tell(lost)
            time.sleep(_GRACE_SECONDS)
            os._exit(EXIT_CODE)

    try:
        if server is None:
            peers[0] = socket.create_connection((host, port), _CONNECT_SECONDS)
            peers[0].sendall(index.to_bytes(4))
        else:
            _accept(server, num_processes - 1, peers)
    except OSError as error:
        logger.warning("The processes cannot connect to port %d of %s: %s.", port, host, error)
        tell(_FINISHED)
        return
    for other, peer in peers.items():
        _probe(peer)
        threading.Thread(target=watch, args=(other,), daemon=True).start()
    # After an error, Python would wait for the others.
    atexit.register(lambda: tell(index if hasattr(sys, "last_exc") else _FINISHED))


def _accept(server: socket.socket, number: int, peers: dict[int, socket.socket]) -> None:
    with server:
        server.settimeout(_CONNECT_SECONDS)
        while len(peers) < number:
            peer = server.accept()[0]
            peer.settimeout(_CONNECT_SECONDS)
            peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL))] = peer


def _probe(peer: socket.socket) -> None:
    """Lets the kernel close a connection whose host does not answer."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # Not all systems have them.
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
