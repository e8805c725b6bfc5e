"""The socket: bound before the model is loaded, listening when there is something to answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from bicl.errors import ConfigError

__all__ = ["bind", "start_listening"]


@contextmanager
def _told_plainly(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror or error}; "
            "choose others with --hostname and --port"
        ) from None


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is told before minutes of loading,
    and probes are refused until the server can answer them.

    Raises:
        ConfigError: the address cannot be had.
    """
    with _told_plainly(f"{hostname} port {port}"):
        # asyncio switches Nagle's algorithm off only for sockets that name TCP as their protocol;
        # with it every answer waits 40 ms for an acknowledgement.
        family, kind, protocol, _, address = socket.getaddrinfo(
            hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    return listener


def start_listening(listener: socket.socket) -> None:
    """Raises:
    ConfigError: another process listens there by now.
    """
    with _told_plainly(f"port {listener.getsockname()[1]}"):
        listener.listen()
