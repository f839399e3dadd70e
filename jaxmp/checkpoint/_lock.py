"""Lock of a directory: one process, or one distributed job, saves into it at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import IO

from jaxmp.errors import CheckpointError

# Distinguishes processes with the same number in containers with the same host name.
_STARTED = time.strftime("%Y-%m-%d %H:%M:%S")


def acquire_lock(path: Path) -> IO[str] | None:
    """Locks a file until it is released, or until this process ends in any way.

    Returns:
      The file; None: this process has locked it already.

    Raises:
      CheckpointError: naming the process and the host that have locked it.
    """
    holder = path.read_text() if path.exists() else ""
    if holder == _this_process():
        return None
    file = path.open("a")
    try:
        import fcntl  # noqa: PLC0415 (absent on Windows)

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A child that survives this process must not keep the lock.
        os.register_at_fork(after_in_child=file.close)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"{holder or 'Another process'} saves into {path.parent}, and each would delete steps "
            "of the other. Stop it, or save into another directory. If it has ended, and the file "
            f"system has not noticed, remove its lock: os.remove({str(path)!r})."
        ) from None
    except (OSError, ImportError):
        pass  # a file system without locks, or Windows
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        file.close()  # The holder has removed it in the meantime.
        return acquire_lock(path)
    file.truncate(0)
    file.write(_this_process())
    file.flush()
    return file


def release_lock(path: Path, file: IO[str]) -> None:
    """Releases a lock, except in a forked child of the process that acquired it."""
    with contextlib.suppress(OSError):
        if path.read_text() == _this_process():
            path.unlink()
    file.close()


def _this_process() -> str:
    return f"Process {os.getpid()} on {socket.gethostname()} (since {_STARTED})"
