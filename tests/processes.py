"""Starts Python processes, such as those of a distributed run on this machine."""

import os
import socket
import subprocess
import sys

from sources import ROOT


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start(arguments, **variables):
    """Starts Python with variables of a cluster and without those of the cluster it runs on."""
    paths = (str(ROOT), str(ROOT / "examples"), str(ROOT / "tests"))
    known = ("SLURM_", "OMPI_", "KUBERNETES_", "TPU_", "JAX_COORDINATOR")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    path = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), *paths)))
    environment = {**inherited, **variables, "PYTHONPATH": path}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, stdout=pipe, stderr=pipe, text=True
    )


def run_script(*arguments, path=ROOT, cwd=None, **variables):
    """Runs Python on the CPU, and returns the completed process, which imports jaxmp from `path`.

    It compiles programs as the tests do, without the optimizations of XLA.

    Args:
      **variables: changes of the environment; a variable of value `None` is not set.
    """
    changes = {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu", **variables}
    environment = {k: v for k, v in {**os.environ, **changes}.items() if v is not None}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def run_python(code, *arguments, **options):
    """Runs `code` in a new interpreter, as `run_script` does; returns its output."""
    done = run_script("-c", code, *arguments, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def wait(processes):
    """Waits until all processes have succeeded, and returns the text that each has printed."""
    try:
        outputs = [process.communicate(timeout=900) for process in processes]
    finally:
        stop(processes)
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [printed for printed, _ in outputs]


def results(processes):
    """Waits for processes and returns the last line that each has printed."""
    return [printed.splitlines()[-1] for printed in wait(processes)]


def stop(processes):
    """Kills the processes that still run, and closes the pipes of all."""
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
