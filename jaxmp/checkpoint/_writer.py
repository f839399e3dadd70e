"""Complete steps of a run, the order in which they were saved, and the manager that saves them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shutil
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxmp._core._compat import call_at_exit
from jaxmp.checkpoint._handler import ITEM, SaveState, StateHandler
from jaxmp.checkpoint._lock import acquire_lock, release_lock
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
    if not directory.exists():
        return []
    # Orbax renames a directory to its final name when it is complete. Object stores cannot rename,
    # so there it writes a file at the end.
    is_store = "://" in str(directory)
    return sorted(
        int(path.name)
        for path in directory.iterdir()
        if re.fullmatch(r"\d+", path.name)
        and (not is_store or (path / "commit_success.txt").exists())
    )


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
    """Policy of orbax that preserves the steps that were saved last; keep=None: all steps."""

    directory: epath.Path
    keep: int | None

    def should_preserve(self, checkpoints: Iterable[Any], *, context: object) -> list[bool]:
        """Returns True for each step to keep."""
        steps = saved_order(self.directory, (row.step for row in checkpoints))
        return [row.step in steps[-(self.keep or 0) :] for row in checkpoints]


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
        call_at_exit(functools.partial(_finish, weakref.ref(self), os.getpid()))

    def _lock(self, directory: epath.Path) -> bool:
        """Locks the directory; returns False if another object of this process has locked it."""
        directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() > 0 or "://" in str(directory):
            return True
        path = Path(str(directory), _LOCK)
        file = acquire_lock(path)
        if file is not None:
            self._unlock = weakref.finalize(self, release_lock, path, file)
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
