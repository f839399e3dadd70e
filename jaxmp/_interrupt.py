"""Ends the `jaxmp` command in one line if Ctrl-C is pressed while Python imports or leaves it.

`jaxmp/__init__.py` imports this module first, because Python imports the package before the module
`jaxmp.__main__`. In other programs it does nothing.
"""

import inspect
import os
import signal


def is_command() -> bool:
    """Returns True if this process runs `python -m jaxmp` or the script that pip installs."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:  # not CPython
        return False
    # The script imports `jaxmp.__main__`. `python -m` starts in the function
    # `runpy._run_module_as_main`.
    is_script = "jaxmp.__main__" in frame.f_code.co_names
    is_module = frame.f_globals.get("__name__") == "runpy"
    return is_script or (is_module and frame.f_locals.get("mod_name") == "jaxmp")


def exit_at_once() -> None:
    """Makes Ctrl-C end this process at once, unless its parent switched Ctrl-C off."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, so that files are closed."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if is_command():
    exit_at_once()
