"""Skip conditions of tests that cross-compile, for a GPU by XLA's compiler or for a TPU."""

import importlib.util

import pytest


def has_compiler():
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    except ModuleNotFoundError:
        return False


needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason='XLA\'s GPU compiler is not installed: pip install -e ".[aot]"'
)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='libtpu is not installed: pip install "jaxmp[tpu-aot]"',
)
