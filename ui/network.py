"""Where the app listens: addresses, names and the socket. Imports nothing heavy, so that a bad port shows at once."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from engine.errors import ConfigError

ANY_ADDRESS = ("0.0.0.0", "::")


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes any free one. Raises `ConfigError`, one sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"--host {host} is no address of this machine.") from None
    opened = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # A port whose last connections are still winding down counts as free; on Windows it would mean sharing.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        # Two sockets may be bound to one port until one of them listens.
        opened.listen(128)
    except PermissionError:
        opened.close()
        raise ConfigError(f"Port {port} may not be used without special rights; choose one with --port.") from None
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--host {host} is no address of this machine.") from None
        raise ConfigError(f"Port {port} is in use by another program; choose one with --port.") from None
    return opened


def url_of(opened: socket.socket) -> str:
    """What to open in a browser on this machine."""
    host, port = opened.getsockname()[:2]
    if host in ANY_ADDRESS:
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def own_names(host: str) -> tuple[str, ...]:
    """Names by which other machines may ask for this one: its own, and the one it was told to listen on."""
    name = socket.gethostname()
    return (host, name, f"{name}.local")
