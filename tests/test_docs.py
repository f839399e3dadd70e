"""Examples in docstrings run, and public functions document their arguments."""

import doctest
import importlib
import pkgutil
import re
import typing
from pathlib import Path

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from grids import EXPENSIVE

MODULES = ["jaxmp"] + [
    module.name
    for module in pkgutil.walk_packages(jaxmp.__path__, "jaxmp.")
    if not module.name.startswith("jaxmp.policies")
]
GLOBALS = {
    "Path": Path,
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "optax": optax,
    "flax": flax,
    "nn": nn,
    "nnx": nnx,
    "jaxmp": jaxmp,
}


def run_examples(test):
    failures = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    # JAX's default promotion, as in a user's session; optax requires it.
    with jax.numpy_dtype_promotion("standard"):
        runner.run(test, out=failures.append)
    return "".join(failures)


# Examples that train, or measure statistics of training.
TRAIN = {
    "jaxmp._tools.validate._run",
    "jaxmp._tools.validate._validate",
    "jaxmp._tools.stats._with_stats",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=EXPENSIVE) if n in TRAIN else n for n in MODULES]
)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    public = {
        key: getattr(jaxmp, key)
        for key in dir(jaxmp)
        if not key.startswith("_") and not hasattr(module, key)
    }
    for test in doctest.DocTestFinder(exclude_empty=True).find(
        module, name, extraglobs={**public, "x": jnp.ones((2, 3)), **GLOBALS}
    ):
        assert not run_examples(test)


def test_the_runner_can_fail():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert "Expected" in run_examples(test)


def is_function(value):
    """Returns True for functions, and False for classes and aliases of types."""
    return callable(value) and not isinstance(value, type) and typing.get_origin(value) is None


def public_functions():
    for name in sorted(dir(jaxmp)):
        value = getattr(jaxmp, name)
        if not name.startswith("_") and is_function(value):
            yield name, value
    for module in (jaxmp.optim, jaxmp.nnx, jaxmp.fp8, jaxmp.losses, jaxmp.functional):
        for name in sorted(getattr(module, "__all__", dir(module))):
            value = getattr(module, name)
            if not name.startswith("_") and is_function(value):
                yield f"{module.__name__}.{name}", value


# Public modules; the docstrings of exceptions describe when they are raised.
PUBLIC = ["checkpoint", "fp8", "functional", "losses", "nnx", "optim", "typing"]


@pytest.mark.parametrize("name", ["jaxmp", *(f"jaxmp.{module}" for module in PUBLIC)])
def test_public_objects_have_an_example(name):
    module = importlib.import_module(name)
    objects = {each: getattr(module, each) for each in module.__all__}
    assert objects
    for each, value in objects.items():
        raised = isinstance(value, type) and issubclass(value, BaseException)
        if not raised and (isinstance(value, type) or is_function(value)):
            assert ">>>" in (value.__doc__ or ""), f"{name}.{each} has no example"


@pytest.mark.parametrize(
    ("name", "function"), list(public_functions()), ids=lambda x: x if type(x) is str else ""
)
def test_public_functions_document_what_they_take_and_raise(name, function):
    doc = function.__doc__ or ""
    parameters = set(re.findall(r"\w+", " ".join(function.__annotations__))) - {"return"}
    assert doc, name
    for parameter in parameters:
        assert re.search(rf"\b{parameter}\b", doc), f"{name} does not document {parameter}"
