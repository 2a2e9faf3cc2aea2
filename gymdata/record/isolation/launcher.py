"""Starts a command in a network namespace of its own: ``python launcher.py FD PORT COMMAND…``.

In it there is loopback and nothing else. A socket that listens there on PORT is sent over the socket FD, so that whoever
accepts on it is all that the command can reach. Imports nothing but Python's own modules: it runs once per attempt.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41


def main(words: list[str]) -> None:
    """Ends with 126 and the reason where there is no namespace, with 127 where the command cannot be run."""
    user, group = os.getuid(), os.getgid()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEWUSER | _NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            fcntl.ioctl(probe, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP_AND_RUNNING))
        with socket.create_server(("127.0.0.1", int(words[1]))) as listening, socket.socket(fileno=int(words[0])) as to:
            socket.send_fds(to, [b"+"], [listening.fileno()])
    except (OSError, AttributeError) as error:
        sys.exit(_failed(126, f"no network namespace: {error}"))
    try:
        os.execvp(words[2], words[2:])
    except OSError as error:
        sys.exit(_failed(127, f"{words[2]}: cannot be run: {error.strerror}"))


def _failed(code: int, text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return code


if __name__ == "__main__":
    main(sys.argv[1:])
