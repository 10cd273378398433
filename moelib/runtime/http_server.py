"""HTTP servers of this process: for this machine only by default, with safe headers."""

import base64
import contextlib
import hashlib
import ipaddress
import logging
import socket
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moelib.core.errors import UserError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1", "::1"
_SECONDS_TO_END = 0.1


def page_policy(page: bytes) -> str:
    """Returns a policy by which a browser runs the script and style of a page, and no others."""
    hashes = {}
    for tag in (b"script", b"style"):
        content = page.split(b"<%s>" % tag)[1].split(b"</%s>" % tag)[0]
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        hashes[tag] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {hashes[b'script']}; style-src {hashes[b'style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Server(ThreadingHTTPServer):
    """Answers requests from threads of this process."""

    daemon_threads = True
    request_queue_size = 256  # Connections that wait to be accepted.

    def __init__(self, title: str, handler: type["Handler"], port: int, host: str | None) -> None:
        """Binds the port.

        Args:
            title: Name of the server in messages.
            handler: Class that answers requests.
            port: Port; 0 for any free one.
            host: Address to bind; None for 127.0.0.1.

        Raises:
            UserError: If the port cannot be bound.
        """
        self.title, self.host = title, host or LOOPBACK[0]
        self.address_family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            super().__init__((self.host, port), handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} of {self.host} cannot be used for {title} ({error}); set another "
                "port, or 0 for any free one."
            ) from error
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"http://{name}:{self.server_address[1]}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_local(self.host)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of a request, unless the client has gone away."""
        del request, client_address
        if not isinstance(error := sys.exception(), OSError):
            logger.warning("A request for %s failed: %r.", self.title, error)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serves during the body, and yields the address."""
        arguments = {"name": self.title, "args": (_SECONDS_TO_END,), "daemon": True}
        with self:
            threading.Thread(target=self.serve_forever, **arguments).start()
            try:
                yield self.url
            finally:
                self.shutdown()


def is_local(host: str) -> bool:
    """Returns whether an address is one of this machine alone."""
    return host in (*LOOPBACK, "localhost")


def check_address(host: str | None, port: int, api_key: str | None) -> None:
    """Raises UserError if a model cannot be served at an address, before the model is loaded.

    Args:
        host: Address to bind; None for 127.0.0.1.
        port: Port; 0 for any free one.
        api_key: Key that clients must send; required for addresses that others reach.
    """
    if not is_local(host or "localhost") and not api_key:
        raise UserError(
            f"host={host!r}: other machines reach this address; set api_key (--api_key_file, or "
            "the environment variable MOELIB_API_KEY) to a secret that clients must send."
        )
    Server("the model", Handler, port, host).server_close()


class Handler(BaseHTTPRequestHandler):
    """The base of classes that answer requests."""

    server: Any  # A Server.
    server_version, sys_version = "moelib", ""
    timeout = 30.0  # Seconds that a client may take to send its request.
    policy = "default-src 'none'"  # What a browser may do with the answers.

    def is_own_host(self) -> bool:
        """Returns whether the request is for this server, not for a name that was bound to it.

        A page of another site, whose name an attacker lets point here, could read answers.
        """
        with contextlib.suppress(ValueError):
            host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if host == "localhost":
                return True
            names = self.server.host, self.server.server_name, socket.gethostname()
            if self.server.host not in LOOPBACK and host in map(str.lower, names):
                return True
            return bool(ipaddress.ip_address(host))
        return False

    def send(self, content: bytes, kind: str, status: int = 200, **headers: str) -> None:
        """Sends a whole answer."""
        self.begin(kind, status, **{"Content-Length": str(len(content)), **headers})
        if self.command != "HEAD":
            self.wfile.write(content)

    def begin(self, kind: str, status: int = 200, **headers: str) -> None:
        """Sends the headers of an answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def end_headers(self) -> None:
        """Adds the headers of every answer."""
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", self.policy)
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs a request for debugging only."""
        logger.debug(format, *args)
