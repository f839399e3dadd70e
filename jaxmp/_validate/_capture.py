"""Evaluates a traced step, and returns the outputs of its modules as additional results.

A module is a name scope of the forward pass. Its output is the result of the last operation in its
scope that an operation outside of the scope reads in the forward pass. Modules in jitted functions,
rematerialized regions, loops, branches and `shard_map` are included:

- in a scan, the outputs of all iterations are joined; in a while loop, those of the last one count;
- a branch that was not taken has no outputs, and neither has a loop without iterations;
- in a `shard_map`, the outputs of all devices are joined.

Modules in other operations that contain functions, such as `lax.custom_linear_solve`,
`lax.platform_dependent` and callbacks, have no outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxmp._core._jaxprs import FORWARD, Path
from jaxmp._core._programs._interpreter import Frame, Interpreter, Place
from jaxmp._core._programs._outputs import ModuleOutputs, used_inside
from jaxmp._core._shardings import sampled
from jaxmp._core._typing import Array, PyTree

# Elements of an output that are returned: a regular subset, which suffices for its error.
SAMPLES = 65536


class Output(NamedTuple):
    """Output of a module.

    Args:
      values: at most `SAMPLES` elements as a float32 vector; zeros if the module did not run.
      is_computed: boolean scalar; False in a branch that was not taken.
    """

    values: Array
    is_computed: Array


Outputs = dict[Path, Output]


def with_outputs(fn: Callable[..., PyTree]) -> Callable[..., tuple[PyTree, Outputs]]:
    """Transforms `fn` so that it also returns the outputs of its modules.

    Args:
      fn: a function of pytrees of arrays that computes gradients.

    Returns:
      A function of the same arguments that returns `(result, outputs)`. `outputs` is a dict from
      the name scopes of a module to its `Output`, in the order of the forward pass.

    Example:
      >>> def loss(w, x):
      ...     with jax.named_scope("dense"):
      ...         y = x @ w
      ...     return y.sum()
      >>> _, outputs = with_outputs(jax.grad(loss))(jnp.ones((2, 3)), jnp.ones((4, 2)))
      >>> {scopes: output.values.shape for scopes, output in outputs.items()}
      {('dense',): (12,)}
    """

    def observed(*args: PyTree) -> tuple[PyTree, Outputs]:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        capture = _Capture()
        results = capture.run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results), capture.side

    return observed


class _Capture(Interpreter):
    """Interpreter that gathers the outputs of modules, by the scopes of the module.

    The state of a jaxpr has for each of its results True if the forward pass continues to use it.
    The other results are residuals of the backward pass. None: all are used.
    """

    has_side_results = True
    drops_derivatives = True

    def run(
        self, jaxpr: Jaxpr | ClosedJaxpr, args: Any, place: Place | None = None, state: Any = None
    ) -> list[Any]:
        return super().run(jaxpr, args, place, ModuleOutputs(jaxpr, place or Place(), state))

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        analysis = frame.state
        if frame.place.of(equation).phase == FORWARD:
            used = [var in analysis.consumers for var in equation.outvars]
            results = self.enter(equation, operands, frame, used_inside(equation, used))
        else:
            results = self.bound(equation, operands)
        for var, result in zip(equation.outvars, results, strict=True):
            for path in analysis.last.get(var, ()):
                self.side.pop(path, None)  # moves the module to its position in the forward pass
                self.side[path] = Output(sampled(result, SAMPLES), jnp.array(True))
        return results

    def joined(self, value: Output) -> Output:
        return Output(sampled(value.values, SAMPLES), jnp.any(value.is_computed))
