"""An advisory lock that one process holds while it uses a database; it vanishes with the process, however that ends."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from sessions.errors import StoreError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

IN_USE_MESSAGE = "Another running KVScope uses these sessions; close it or choose another data folder."


class FileLock:
    """Exclusive lock on `path`, taken at once or refused with a `StoreError`. The empty file stays behind on purpose:

    removing it would let one process lock the old file while another locks a new one of the same name.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError("The data folder can't be written; check that it exists and its permissions.") from error
        try:
            _lock(self._fd)
        except OSError as error:
            os.close(self._fd)
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise StoreError(IN_USE_MESSAGE) from error
            raise StoreError("The data folder's file system does not support locks; choose another one.") from error

    def release(self) -> None:
        """Give the lock up. May be called more than once."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock(fd: int) -> None:
    if sys.platform == "win32":
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        # flock, not lockf: a second open in the same process must be refused too, and closing it must not unlock.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
