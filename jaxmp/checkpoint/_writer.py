"""Complete steps of a run, the order in which they were saved, and the manager that saves them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shutil
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxmp._core import _compat
from jaxmp.checkpoint._handler import ITEM, SaveState, StateHandler
from jaxmp.checkpoint._manifest import has_manifest
from jaxmp.errors import CheckpointError

_log = logging.getLogger("jaxmp.checkpoint")
# Names in the directory of a run.
_LOCK = "jaxmp_writer"
_DELETED = "deleted_steps"
_BEFORE_ROLLBACK = "jaxmp_before_rollback"
# These versions refuse the threads of a save in the background as soon as the program ends, before
# any function that is registered for the exit is called (python/cpython#113964).
_BLOCKS = (3, 12) <= sys.version_info < (3, 12, 3)


def complete_steps(directory: epath.Path) -> list[int]:
    """Returns the complete steps in a directory in ascending order."""
    rows = ocp.path.step.standard_name_format().find_all(directory)
    return sorted(row.step for row in rows if row.path.is_dir())


def _log_incomplete(directory: epath.Path) -> None:
    """Names the steps whose save was interrupted, of which orbax deletes the files."""
    names = (re.match(r"(\d+)\.orbax-checkpoint-tmp", path.name) for path in directory.iterdir())
    if steps := sorted({int(name[1]) for name in names if name}):
        _log.warning(
            "The process that saved step %s in %s was killed before it was complete, for example "
            "by SIGTERM. Complete steps: %s.",
            ", ".join(map(str, steps)),
            directory,
            ", ".join(map(str, saved_order(directory, complete_steps(directory))[-5:])) or "none",
        )


def saved_order(directory: epath.Path, steps: Iterable[int]) -> list[int]:
    """Returns steps in the order in which they were saved, which does not depend on a clock.

    It is ascending, except that the steps before a rollback, which a file lists, come first.
    """
    path = directory / _BEFORE_ROLLBACK
    names = path.read_bytes().split() if path.exists() else []
    before = {int(name): place for place, name in enumerate(names) if name.isdigit()}
    return sorted(steps, key=lambda step: (before.get(step, len(before)), step))


def _append(directory: epath.Path, steps: list[int], step: int) -> None:
    """Makes a step the last in the order of saving, and warns if that is a rollback."""
    steps = saved_order(directory, steps)
    if saved_order(directory, [*steps, step])[-1] == step:
        return
    new = directory / f"{_BEFORE_ROLLBACK}.new"
    new.write_text(" ".join(map(str, steps)))
    new.replace(directory / _BEFORE_ROLLBACK)
    if steps and step < steps[-1]:
        warnings.warn(
            f"The run in {directory} was rolled back: step {step} is saved after step {steps[-1]}. "
            f"latest_step() becomes {step}, and `keep` deletes the steps saved before it first.",
            stacklevel=4,
        )


@contextlib.contextmanager
def explain_errors(directory: epath.Path, step: int) -> Iterator[None]:
    """Raises errors of a save with its directory and the complete steps, as CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        steps = saved_order(directory, complete_steps(directory))
        raise CheckpointError(
            f"Saving step {step} in {directory} failed: {str(error).partition(' [')[0]}. Complete "
            f"steps: {', '.join(map(str, steps[-5:])) or 'none'}. Save again, or elsewhere: "
            f"Checkpointer('DIRECTORY').save({step}, state, recipe=recipe)."
        ) from error


@dataclasses.dataclass(frozen=True)
class _LastSaved:
    """Policy of orbax: preserves the steps that were saved last, or all steps (keep=None)."""

    directory: epath.Path
    keep: int | None

    def should_preserve(self, checkpoints: Iterable[Any], *, context: object) -> list[bool]:
        """Returns True for each step to keep, and for all that jaxmp did not write."""
        paths = {row.step: self.directory / str(row.step) for row in checkpoints}
        # The step to save has no directory yet.
        own = [n for n, path in paths.items() if not path.exists() or has_manifest(path / ITEM)]
        kept = saved_order(self.directory, own)[-(self.keep or 0) :]
        return [step in kept or step not in own for step in paths]


class Writer(ocp.CheckpointManager):
    """Orbax's manager of a directory into which only this process, or its job, saves."""

    def __init__(self, directory: epath.Path, keep: int | None) -> None:
        self._started = -1
        self._unlock: Callable[[], object] = lambda: None
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(ITEM, SaveState, StateHandler())
        is_first = self._lock(directory)
        if is_first and jax.process_index() == 0:
            _log_incomplete(directory)
        super().__init__(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_LastSaved(directory, keep),
                # Directories of interrupted saves. Another object of this process may be saving.
                cleanup_tmp_directories=is_first,
                lightweight_initialize=True,
                # An interrupted deletion must not leave an incomplete step.
                todelete_subdir=_DELETED,
            ),
            handler_registry=registry,
        )
        _compat.call_at_exit(functools.partial(_finish, weakref.ref(self), os.getpid()))

    def _lock(self, directory: epath.Path) -> bool:
        """Locks the directory; returns False if another object of this process has locked it."""
        directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() > 0 or "://" in str(directory):
            return True
        path = Path(str(directory), _LOCK)
        file = _acquire_lock(path)
        if file is not None:
            self._unlock = weakref.finalize(self, _release_lock, path, file)
        return file is not None

    def write(self, step: int, state: SaveState) -> None:
        """Starts to write a step."""
        with explain_errors(self.directory, step):
            self._lock(self.directory)
            steps = complete_steps(self.directory)
            if sorted(self.all_steps()) != steps:
                # After an error the manager has already forgotten the steps to delete. The user or
                # another object may also have changed the directory.
                self.reload()
            if jax.process_index() == 0:
                _append(self.directory, steps, step)
            self._started = step
            self.save(step, args=ocp.args.Composite(**{ITEM: state}), force=True)
        while _BLOCKS and self.is_saving_in_progress():
            time.sleep(0.01)

    def wait_until_finished(self) -> None:
        """Waits until everything is on disk, and deletes what orbax has moved out of the way."""
        with explain_errors(self.directory, self._started):
            super().wait_until_finished()
        if jax.process_index() == 0:
            # Fails if another object of this process moves a step there; that one tries again.
            shutil.rmtree(self.directory / _DELETED, ignore_errors=True)

    def close(self) -> None:
        """Waits until everything is on disk, and releases the lock and all resources."""
        try:
            super().close()
        finally:
            self._unlock()


def _finish(reference: weakref.ref[Writer], process: int) -> None:
    """Finishes the save of a process that exits, except in its forked children."""
    if (writer := reference()) and process == os.getpid():
        try:
            writer.wait_until_finished()
        except BaseException as error:  # also an interrupt
            name = type(error).__name__
            print(
                f"{name} at exit, while step {writer._started} was saved: {error}", file=sys.stderr
            )


def check_directory(directory: epath.Path) -> None:
    """Refuses to write into a file, and below a name that orbax reads as a pattern: `lr=[0.1]`.

    Orbax collects the files of a step with glob. In a directory with such a name it finds none, or
    those of another directory, and reports success.

    Raises:
      CheckpointError: if it is a file, or its path contains `*`, `?` or `[`.
    """
    name = str(directory)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(
            f"{name!r} is a file. Save into the directory of a run, which has a subdirectory for "
            "each step."
        )
    plain = re.sub(r"[*?\[\]]", "_", name)
    if plain != name.replace("]", "_"):
        raise CheckpointError(
            f"{name!r} contains '*', '?' or '[', which orbax reads as a pattern, so the files of a "
            f"step would be lost. Save into another directory: Checkpointer({plain!r})."
        )


# ---------------------------------------------------------------------------
# Lock of a directory: one process, or one distributed job, saves into it at a time
# ---------------------------------------------------------------------------


# Distinguishes processes with the same number in containers with the same host name.
_STARTED = time.strftime("%Y-%m-%d %H:%M:%S")


def _acquire_lock(path: Path) -> IO[str] | None:
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
        return _acquire_lock(path)
    file.truncate(0)
    file.write(_this_process())
    file.flush()
    return file


def _release_lock(path: Path, file: IO[str]) -> None:
    """Releases a lock, except in a forked child of the process that acquired it."""
    with contextlib.suppress(OSError):
        if path.read_text() == _this_process():
            path.unlink()
    file.close()


def _this_process() -> str:
    return f"Process {os.getpid()} on {socket.gethostname()} (since {_STARTED})"
