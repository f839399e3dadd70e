"""Runs a traced step again, and measures the tensors of its modules.

A module is a name scope; `_analysis` determines its outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmp import _core
from jaxmp._core import Array, _compat
from jaxmp._core._compat import AnyJaxpr, JaxprEqn
from jaxmp._programs import _analysis, _jaxprs, _locations, _operations
from jaxmp._programs._constructs import inners
from jaxmp._programs._interpreter import PROGRAM, Frame, Interpreter, Start

GRADIENTS, ACTIVATIONS, OPERANDS, SCALES = "gradients", "activations", "operands", "fp8_scales"
DOTS = ("dot_general", "conv_general_dilated")
# Kernels of Pallas and cuDNN, which no interpreter enters.
_ATTENTION = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
_KERNELS = ("pallas_call", *_ATTENTION)


class Key(NamedTuple):
    """Key of a tensor.

    kind: such as "gradients".
    path: name scopes of its module.
    label: its role in the module, or its type.
    shape: its shape.
    at: position in the program, which distinguishes tensors that are equal in the fields before.
    """

    kind: str
    path: _jaxprs.Path
    label: str
    shape: tuple[int, ...]
    at: tuple[Any, ...]


def modules_of(paths: Iterable[_jaxprs.Path]) -> Iterator[str]:
    """Yields the path of the module of each tensor, for their name scopes."""
    paths = list(paths)
    root = _locations.root_of({path[:n]: None for path in paths for n in range(len(path) + 1)})
    return (_locations.module_of(path, root) for path in paths)


class _Outer(NamedTuple):
    """State with which a jaxpr is run.

    at: for each enclosing equation, its index, and the identity of the jaxpr that contains it.
    used: for each result, True if the forward pass uses it; None: all are used.
    cotangents: for each argument, True if the backward pass made it.
    """

    at: tuple[Any, ...] = ()
    used: Sequence[bool] | None = None
    cotangents: Sequence[bool] = ()


class _Inside:
    """Run of one jaxpr."""

    def __init__(self, jaxpr: AnyJaxpr, place: _locations.Location, outer: _Outer) -> None:
        body, _ = _compat.jaxpr_body(jaxpr)
        self.at = (*outer.at, id(body))
        self.outputs = _analysis.ModuleOutputs(jaxpr, place, outer.used)
        self.cotangents: set[_jaxprs.Atom] = set(itertools.compress(body.invars, outer.cotangents))
        phases = [place.of(each).phase for each in _jaxprs.equations(body, inside=False)]
        self.gradients = _analysis.gradients_of(body, phases, place.phase)
        # Variable -> its measurement.
        self.measured: dict[_jaxprs.Atom, Any] = {}

    def is_cotangent(self, var: _jaxprs.Atom) -> bool:
        """Returns True if the backward pass made a variable."""
        return not _jaxprs.is_literal(var) and var in self.cotangents


class Observer(Interpreter):
    """Interpreter that measures tensors; its side results are the measurements by `Key`."""

    consequence = "the tensors inside of it are not measured"
    has_side_results = True
    drops_derivatives = True
    # Measures a tensor; an array that the program quantizes also with the reciprocal of its scale
    # and the format.
    measure: Callable[..., Any]
    # True for a client that reads only the outputs of modules.
    only_outputs = False

    def run(self, jaxpr: Any, args: Sequence[Any], start: Start = PROGRAM) -> list[Any]:
        inside = _Inside(jaxpr, start.place, start.state or _Outer())
        return super().run(jaxpr, args, start._replace(state=inside))

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        inside, place, name = frame.state, frame.place.of(equation), equation.primitive.name
        at = (*inside.at, frame.index)
        if self.only_outputs and place.phase != _jaxprs.FORWARD:
            return self.bound(equation, operands)
        called = _operations.name_of(equation)
        role = called.removeprefix(_jaxprs.QUANTIZE) if _jaxprs.QUANTIZE in called else ""
        # A scan over layers moves the constants of its body to calls without operands.
        if role and operands and not self.only_outputs:
            results = self.bound(equation, operands)
            if place.phase != _jaxprs.RECOMPUTE:
                self._quantized(operands[0], results, Key(OPERANDS, place.names, role, (), at))
            return results
        if name in (*DOTS, *_KERNELS) and not self.only_outputs:
            for n, (var, x) in enumerate(zip(equation.invars, operands, strict=True)):
                label = ("lhs", "rhs")[n] if name in DOTS else f"operand_{n}"
                label = label if place.phase == _jaxprs.FORWARD else "output_grad"
                # Operands of a matmul that is computed again are left out.
                if place.phase == _jaxprs.FORWARD or inside.is_cotangent(var):
                    self._measure(inside, OPERANDS, (place.names, label), var, x, at)
        flags = []
        for inner in inners(equation)[-1:]:
            for n, var in enumerate(inner.operands):
                is_carry = place.phase == _jaxprs.BACKWARD and n in inner.carried
                flags.append(is_carry or inside.is_cotangent(var))
        used = inside.outputs.used_inside(equation, place.phase)
        results = self.enter(equation, operands, frame, _Outer(at, used, flags))
        if place.phase == _jaxprs.BACKWARD:
            inside.cotangents.update(equation.outvars)
        for var, x in zip(equation.outvars, results, strict=True):
            for path in inside.outputs.last.get(var, ()):
                self._measure(inside, ACTIVATIONS, (path, ""), var, x, at)
            if var in inside.gradients and not self.only_outputs:
                self._measure(inside, GRADIENTS, (place.names, ""), var, x, at)
        return results

    def _measure(
        self, inside: Any, kind: str, name: Any, var: _jaxprs.Atom, x: Any, at: Any
    ) -> None:
        # FP8 operands have been measured before their quantization.
        if (
            _jaxprs.is_literal(var)
            or not jnp.issubdtype(x.dtype, jnp.floating)
            or _core.is_fp8(x.dtype)
        ):
            return
        if var not in inside.measured:
            inside.measured[var] = self.measure(x)
        self.side[Key(kind, name[0], name[1], x.shape, (*at, name[1]))] = inside.measured[var]

    def _quantized(self, x: Array, results: list[Array], key: Key) -> None:
        """Measures an operand with the scales of its FP8 copies, and these scales."""
        for n, (values, factor) in enumerate(itertools.pairwise(results)):
            if not _core.is_fp8(values.dtype) or factor.dtype != jnp.float32:
                continue
            key = key._replace(at=(*key.at, n))
            self.side[key._replace(kind=SCALES)] = self.measure(factor)
            # The scales of blocks do not broadcast.
            pairs = zip(factor.shape, x.shape, strict=False)
            fits = factor.ndim in (0, x.ndim) and all(size in (1, full) for size, full in pairs)
            self.side[key] = self.measure(x, factor, values.dtype) if fits else self.measure(x)
