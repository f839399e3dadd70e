"""Progress bars on standard error."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

# Called with the name of a run or program before it starts, and after each step.
OnRun = Callable[[str], None]
OnStep = Callable[[], None]


@contextlib.contextmanager
def busy(description: str, enabled: bool | None = None) -> Iterator[None]:
    """Shows during a block what is done; `enabled` is as in `progress_bar`."""
    with progress_bar(None, enabled) as (on_run, _):
        on_run(description)
        yield


@contextlib.contextmanager
def progress_bar(total: int | None, enabled: bool | None) -> Iterator[tuple[OnRun, OnStep]]:
    """Shows a progress bar during a block, if rich is installed.

    Args:
      total: number of steps of the whole bar; None if it is not known.
      enabled: None to show it if standard error is a terminal.
    """
    is_enabled = sys.stderr.isatty() if enabled is None else enabled
    if not is_enabled or importlib.util.find_spec("rich") is None:
        yield (lambda name: None), (lambda: None)
        return
    rich = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    name = rich.TextColumn("{task.description}", markup=False)
    columns = name, rich.BarColumn(), rich.TimeRemainingColumn()
    with rich.Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)
        yield (
            lambda name: progress.update(task, description=name),
            lambda: progress.advance(task),
        )
