"""Pytest plugin that wraps every outermost Flax module of a test with a recipe.

    python -m pytest -p wrap_outermost --wrap fp32 --outcomes outcomes.json FILES

Tests are not edited. The plugin wraps modules at the point where a user would:

- Linen: a module that is not part of another one is wrapped by `recipe.wrap` when the
  test calls `apply`, `init`, `bind`, `tabulate` or another of `LINEN_METHODS`, or passes it to the
  function `nn.apply`, `nn.init`, `nn.init_with_output` or `nn.tabulate`.
- NNX: a module is wrapped by `recipe.wrap` as soon as it is constructed, so the test
  uses the wrapped module. A module that another module constructs belongs to that module. A module
  that a test constructs and passes to another one has a separate policy, as it would for a user.
- Bridges: policies do not apply across bridges; jaxmp raises an error that requests a policy on the
  other side. The Linen module in a `ToNNX`, and the module that the class in a `ToLinen`
  constructs, are wrapped too. An `nnx.bridge.Module`, for which jaxmp raises an error, is not
  wrapped; NNX modules that it creates are wrapped.

Without `--wrap`, the plugin only records outcomes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import pytest
from flax import nnx

import jaxmp
from jaxmp._core._compat import current_context

LINEN_METHODS = ("apply", "init", "init_with_output", "lazy_init", "bind", "tabulate")
LINEN_METHODS += ("module_paths",)
# Functions of `flax.linen` with the position of the module among their arguments.
LINEN_FUNCTIONS = {"apply": 1, "init": 1, "init_with_output": 1, "tabulate": 0}


# ---------------------------------------------------------------------------
# Wrapping
# ---------------------------------------------------------------------------


class _Depth(threading.local):
    """Number of patched functions that the thread is executing."""

    def __init__(self) -> None:
        self.value = 0


@contextlib.contextmanager
def _one_deeper(depth: _Depth) -> Iterator[None]:
    depth.value += 1
    try:
        yield
    finally:
        depth.value -= 1


class Wrapper:
    """Wraps outermost modules with `recipe` while it is installed; `count` is their number."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.count = 0
        self.depth = _Depth()

    def install(self) -> None:
        self._patch_methods(nn.Module)
        linen_module: Any = nn.Module
        inherited = linen_module.__init_subclass__
        linen_module.__init_subclass__ = classmethod(self._subclassing(inherited))
        for name, position in LINEN_FUNCTIONS.items():
            setattr(nn, name, self._linen_function(getattr(nn, name), position))
        for metaclass in (type(nnx.Module), type(nnx.bridge.Module)):
            metaclass.__call__ = self._nnx_construction(metaclass.__call__)
        nnx.bridge.ToNNX.__init__ = self._to_nnx(nnx.bridge.ToNNX.__init__)
        nnx.bridge.ToLinen.__init__ = self._to_linen(nnx.bridge.ToLinen.__init__)

    def _is_outermost(self) -> bool:
        return self.depth.value == 0 and current_context().policies is None

    def _wrap_linen(self, module: nn.Module) -> nn.Module:
        # A module with a scope is part of a model, and uses the policies of that model.
        if module.scope is not None or hasattr(type(module), "_jaxmp_class"):
            return module
        self.count += 1
        return jaxmp.load_recipe(self.recipe).wrap(module)

    def _patch_methods(self, cls: type) -> None:
        for name in LINEN_METHODS:
            if name in vars(cls):
                setattr(cls, name, self._linen_method(name, vars(cls)[name]))

    def _subclassing(self, inherited: Any) -> Callable[..., None]:
        def wrapped(cls: type, **options: Any) -> None:
            inherited.__func__(cls, **options)
            # A class in a test may override `init`; a class created by jaxmp is already wrapped.
            if "_jaxmp_class" not in vars(cls):
                self._patch_methods(cls)

        return wrapped

    def _linen_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # If the method is called on a class, the first argument is not a module.
            if not self._is_outermost() or not isinstance(module, nn.Module):
                return method(module, *args, **kwargs)
            model = self._wrap_linen(module)
            with _one_deeper(self.depth):
                return getattr(model, name)(*args, **kwargs)

        return wrapped

    def _linen_function(self, function: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._is_outermost() and len(args) > position:
                module = self._wrap_linen(args[position])
                args = (*args[:position], module, *args[position + 1 :])
            return function(*args, **kwargs)

        return wrapped

    def _nnx_construction(self, construct: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
            outermost = self._is_outermost()
            with _one_deeper(self.depth):
                module = construct(cls, *args, **kwargs)
            if not outermost or isinstance(module, nnx.bridge.Module):
                return module
            self.count += 1
            return jaxmp.load_recipe(self.recipe).wrap(module)

        return wrapped

    def _to_nnx(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapped(bridge: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(module, nn.Module):
                module = self._wrap_linen(module)
            init(bridge, module, *args, **kwargs)

        return wrapped

    def _to_linen(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapped(bridge: Any, nnx_class: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(nnx_class, type):
                nnx_class = Policied(nnx_class, self.recipe)
            init(bridge, nnx_class, *args, **kwargs)

        return wrapped


@dataclasses.dataclass(frozen=True)
class Policied:
    """Constructor of an NNX class under a recipe; equal for equal classes and recipes."""

    cls: type
    recipe: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return jaxmp.load_recipe(self.recipe).wrap(self.cls(*args, **kwargs))


# ---------------------------------------------------------------------------
# The plugin
# ---------------------------------------------------------------------------


class Outcomes:
    """Writes the outcome, the number of wrapped modules and the error of each test."""

    def __init__(self, path: Path, wrapper: Wrapper | None) -> None:
        self.path, self.wrapper = path, wrapper
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "error": ""})
        if report.when == "teardown" and self.wrapper is not None:
            test["wrapped"], self.wrapper.count = self.wrapper.count, 0
        # One failed part, or subtest, makes the test fail.
        if report.outcome != "passed" and test["outcome"] != "failed":
            test["outcome"] = report.outcome
            crash = getattr(report.longrepr, "reprcrash", None)
            test["error"] = crash.message if crash else str(report.longrepr)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.tests, indent=1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wrap", default="", help="the recipe of every outermost module")
    parser.addoption("--outcomes", type=Path, help="the JSON file to write")


def pytest_configure(config: pytest.Config) -> None:
    recipe, path = config.getoption("--wrap"), config.getoption("--outcomes")
    wrapper = Wrapper(recipe) if recipe else None
    if wrapper is not None:
        wrapper.install()
        # The pytest configuration of Flax turns warnings into errors; these concern the recipe.
        config.addinivalue_line("filterwarnings", "ignore::jaxmp.errors.RecipeWarning")
    if path is not None:
        config.pluginmanager.register(Outcomes(path, wrapper))
