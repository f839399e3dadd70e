"""A suite hostile to silent promotion.

Strict here means: no implicit dtype promotion, no implicit rank promotion, more than one device,
warnings are errors (in pyproject.toml). JAX's check for leaked tracers switches its trace caches
off and makes the suite five times slower, so tests of code that holds on to objects while tracing
(the adapters, the train step) ask for it: `@pytest.mark.usefixtures("check_leaks")`. Where Flax,
optax or JAX themselves break one of these, the test that meets it relaxes it locally and says who
breaks it.
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
    """A source of fresh PRNG keys, seeded alike in every run."""
    key = jax.random.key(0)

    def split():
        nonlocal key
        key, fresh = jax.random.split(key)
        return fresh

    return split


@pytest.fixture
def check_leaks():
    """Leaked tracers are errors in the test that asks for this."""
    with jax.checking_leaks():
        yield
