"""Strict settings for all tests, and shared fixtures.

Implicit dtype promotion and implicit rank promotion raise errors, there is more than one CPU
device, and warnings are errors (see pyproject.toml). JAX's check for leaked tracers disables its
trace caches and makes the tests five times slower. Only tests of code that stores objects while
tracing (the adapters, the train step) use it: `@pytest.mark.usefixtures("check_leaks")`. If Flax,
optax or JAX violates one of these settings, the test relaxes it locally and names the library.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jaxmp", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("jaxmp")


@pytest.fixture
def getkey():
    """Returns a function that returns a new PRNG key at each call, the same ones in every run."""
    key = jax.random.key(0)

    def split():
        nonlocal key
        key, fresh = jax.random.split(key)
        return fresh

    return split


@pytest.fixture
def check_leaks():
    """Makes leaked tracers errors in the tests that use this fixture."""
    with jax.checking_leaks():
        yield
