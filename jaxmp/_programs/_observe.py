"""Runs a traced step again, and measures the tensors of its modules.

A module is a name scope; `_analysis` determines its outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
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
    network: that of the module, where several have the same modules; otherwise "".
    """

    kind: str
    path: _jaxprs.Path
    label: str
    shape: tuple[int, ...]
    at: tuple[Any, ...]
    network: str = ""


def modules_of(paths: Iterable[_jaxprs.Path]) -> Iterator[str]:
    """Yields the path of the module of each tensor, for their name scopes."""
    paths = list(paths)
    root = _locations.root_of({path[:n]: None for path in paths for n in range(len(path) + 1)})
    return (_locations.module_of(path, root) for path in paths)


class _Outer(NamedTuple):
    """State with which a jaxpr is run.

    at: for each enclosing equation, its index, and the identity of the jaxpr that contains it.
    used: for each result, True if the forward pass uses it; None: all are used.
    cotangents: for each argument, True if it is a gradient in the backward pass.
    """

    at: tuple[Any, ...] = ()
    used: Sequence[bool] | None = None
    cotangents: Sequence[bool] = ()


class Inside:
    """Run of one jaxpr.

    Args:
      jaxpr: the jaxpr.
      start: its location; the state is that which `entered` returned for the equation around it.
      network_of: as that of `ModuleOutputs`.
    """

    def __init__(
        self,
        jaxpr: AnyJaxpr,
        start: Start,
        network_of: Callable[[JaxprEqn], str] = lambda equation: "",
    ) -> None:
        body, _ = _compat.jaxpr_body(jaxpr)
        place, outer = start.place, start.state or _Outer()
        self.at = (*outer.at, id(body))
        self.outputs = _analysis.ModuleOutputs(jaxpr, place, outer.used, network_of)
        phases = [place.of(each).phase for each in _jaxprs.equations(body, inside=False)]
        self.gradients = _analysis.gradients_of(body, phases, place.phase)
        cotangents = itertools.compress(body.invars, outer.cotangents)
        self.cotangents = _analysis.cotangents_of(body, phases, cotangents)
        # Variable -> its measurement.
        self.measured: dict[_jaxprs.Atom, Any] = {}

    def is_cotangent(self, var: _jaxprs.Atom) -> bool:
        """Returns True if a variable is a gradient in the backward pass."""
        return not _jaxprs.is_literal(var) and var in self.cotangents

    def entered(self, equation: JaxprEqn, phase: str, index: int = 0) -> _Outer:
        """Returns the state of the jaxprs inside of an equation."""
        flags = []
        for inner in inners(equation)[-1:]:
            for n, var in enumerate(inner.operands):
                is_carry = phase == _jaxprs.BACKWARD and n in inner.carried
                flags.append(is_carry or self.is_cotangent(var))
        return _Outer((*self.at, index), self.outputs.used_inside(equation, phase), flags)


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
    # Calls of models -> their network, where several have the same modules.
    networks: Mapping[Any, str] = MappingProxyType({})

    def network_of(self, equation: JaxprEqn) -> str:
        """Returns the network of an equation, where several have the same modules."""
        return self.networks.get(_locations.model_call(equation), "") if self.networks else ""

    def run(self, jaxpr: Any, args: Sequence[Any], start: Start = PROGRAM) -> list[Any]:
        inside = Inside(jaxpr, start, self.network_of)
        return super().run(jaxpr, args, start._replace(state=inside))

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        inside, place, name = frame.state, frame.place.of(equation), equation.primitive.name
        at = (*inside.at, frame.index)
        own = Key("", place.names, "", (), at, self.network_of(equation))
        if self.only_outputs and place.phase != _jaxprs.FORWARD:
            return self.bound(equation, operands)
        called = _operations.name_of(equation)
        role = called.removeprefix(_jaxprs.QUANTIZE) if _jaxprs.QUANTIZE in called else ""
        # A scan over layers moves the constants of its body to calls without operands.
        if role and operands and not self.only_outputs:
            results = self.bound(equation, operands)
            if place.phase != _jaxprs.RECOMPUTE:
                self._quantized(operands[0], results, own._replace(kind=OPERANDS, label=role))
            return results
        if name in (*DOTS, *_KERNELS) and not self.only_outputs:
            for n, (var, x) in enumerate(zip(equation.invars, operands, strict=True)):
                label = ("lhs", "rhs")[n] if name in DOTS else f"operand_{n}"
                label = label if place.phase == _jaxprs.FORWARD else "output_grad"
                # Operands of a matmul that is computed again are left out.
                if place.phase == _jaxprs.FORWARD or inside.is_cotangent(var):
                    self._measure(inside, own._replace(kind=OPERANDS, label=label), var, x)
        entered = inside.entered(equation, place.phase, frame.index)
        results = self.enter(equation, operands, frame, entered)
        for var, x in zip(equation.outvars, results, strict=True):
            for path in inside.outputs.last.get(var, ()):
                self._measure(inside, own._replace(kind=ACTIVATIONS, path=path), var, x)
            if var in inside.gradients and not self.only_outputs:
                self._measure(inside, own._replace(kind=GRADIENTS), var, x)
        return results

    def _measure(self, inside: Any, key: Key, var: _jaxprs.Atom, x: Any) -> None:
        # FP8 operands have been measured before their quantization.
        if (
            _jaxprs.is_literal(var)
            or not jnp.issubdtype(x.dtype, jnp.floating)
            or _core.is_fp8(x.dtype)
        ):
            return
        if var not in inside.measured:
            inside.measured[var] = self.measure(x)
        key = key._replace(shape=x.shape, at=(*key.at, key.label))
        self.side[key] = inside.measured[var]

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
