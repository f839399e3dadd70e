"""Progress bars on standard error."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Called with the name of a run or program before it starts, and after each step.
OnRun = Callable[[str], None]
OnStep = Callable[[], None]


@contextlib.contextmanager
def progress_bar(total: int | None, enabled: bool | None) -> Iterator[tuple[OnRun, OnStep]]:
    """Shows a progress bar during a block, if rich is installed.

    Args:
      total: number of steps of the whole bar; None if it is not known.
      enabled: None to show it if standard error is a terminal.
    """
    is_enabled = sys.stderr.isatty() if enabled is None else enabled
    progress = _load() if is_enabled else None
    if progress is None:
        yield (lambda name: None), (lambda: None)
        return
    with progress:
        task = progress.add_task("", total=total)
        yield (
            lambda name: progress.update(task, description=name),
            lambda: progress.advance(task),
        )


def _load() -> Any:
    """Returns a progress bar of rich; None if rich is not installed."""
    try:
        module = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(stderr=True)
    except ModuleNotFoundError:
        return None
    name = module.TextColumn("{task.description}", markup=False)
    return module.Progress(name, module.BarColumn(), module.TimeRemainingColumn(), console=console)
