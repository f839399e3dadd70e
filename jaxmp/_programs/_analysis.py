"""Analyses of traced programs: facts about variables, and which equations make and read them.

Use these instead of a loop over the equations of a jaxpr:

* `equations(jaxpr)` of `_jaxprs` yields all equations, at any depth or of one jaxpr alone,
  `equations_inside(equation)` those in the jaxprs of an equation, and `primitives(jaxpr)` returns
  their names, for questions such as "does it contain a matmul?";
* `Body(jaxpr)` answers questions within one jaxpr: who makes a variable, who reads it, what it is
  computed from (`depends_on`), and what is computed from it (`dependents`);
* a subclass of `Forward` computes a *fact* of each variable from those of the operands, and a
  subclass of `Backward` from those of the results. A fact is any value that can be compared. Both
  enter the jaxprs of constructs, join the facts of branches, and repeat loops until the facts of
  the carry remain the same.

Example, the dtypes from which values were cast::

    class Origins(Forward):
        def equation(self, equation, operands, frame):
            if equation.primitive.name == "convert_element_type":
                return [equation.invars[0].aval.dtype]
            return self.enter(equation, operands, frame)  # facts of the jaxprs inside

    results = Origins().run(jaxpr, [None] * len(jaxpr.invars))
    facts = Origins().frame(jaxpr, [None] * len(jaxpr.invars)).values  # variable -> fact

Such an analysis visits each equation once, and those in a loop several times. `frame.place` and
`frame.state` are as in `Interpreter`: the scopes of the equation that contains the jaxpr, and
anything that `enter` receives as `state`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxmp._core import _compat
from jaxmp._core._compat import AnyJaxpr, JaxprEqn
from jaxmp._programs._constructs import Form, Inner, form_of, inners
from jaxmp._programs._interpreter import PROGRAM, Frame, Interpreter, Start
from jaxmp._programs._jaxprs import BACKWARD, FORWARD, Atom, Equation, Path, equations, is_literal
from jaxmp._programs._locations import FULL_PRECISION, Location


def primitives(jaxpr: AnyJaxpr) -> set[str]:
    """Returns the names of all operations in a jaxpr at any depth."""
    return {equation.primitive.name for equation in equations(jaxpr)}


class Body:
    """A jaxpr with an index of the producer and the consumers of each variable.

    Args:
      jaxpr: open or closed.
    """

    def __init__(self, jaxpr: AnyJaxpr) -> None:
        self.jaxpr = _compat.jaxpr_body(jaxpr)[0]

    @functools.cached_property
    def consumers(self) -> dict[Any, list[Any]]:
        """Variable -> the equations that read it, and None if the jaxpr returns it."""
        consumers: dict[Any, list[Any]] = {}
        read = [(var, each) for each in self.jaxpr.eqns for var in each.invars]
        for var, reader in (*read, *((var, None) for var in self.jaxpr.outvars)):
            if not is_literal(var):
                consumers.setdefault(var, []).append(reader)
        return consumers

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        """Variable -> the index of the equation that computes it."""
        return {var: n for n, equation in enumerate(self.jaxpr.eqns) for var in equation.outvars}

    def readers(self, var: Atom) -> list[Equation]:
        """Returns the equations that read a variable."""
        return [reader for reader in self.consumers.get(var, ()) if reader is not None]

    def maker(self, var: Atom) -> Any:
        """Returns the equation that computes a variable; None for an argument or a constant."""
        number = None if is_literal(var) else self.positions.get(var)
        return None if number is None else self.jaxpr.eqns[number]

    def maker_through(self, var: Atom, names: frozenset[str]) -> Any:
        """Returns the first maker of a value that is none of the named primitives."""
        return self.maker(self.source_of(var, names))

    def source_of(self, var: Atom, names: frozenset[str]) -> Atom:
        """Returns the value that `var` is made from by the named primitives alone."""
        maker = self.maker(var)
        while maker is not None and maker.primitive.name in names:
            var = maker.invars[0]
            maker = self.maker(var)
        return var

    def depends_on(self, result: Atom, source: Atom) -> bool:
        """Returns True if a value is computed from another one, or is the same one."""
        known, first = set[Any](), self.positions.get(source, -1)
        waiting = [result]
        while waiting and source not in known:
            var = waiting.pop()
            if is_literal(var) or var in known:
                continue
            known.add(var)
            # What was computed before the source does not depend on it.
            number = self.positions.get(var, -1)
            waiting += self.jaxpr.eqns[number].invars if number > first else ()
        return source in known

    def dependents(self, variables: Iterable[Atom]) -> set[Any]:
        """Returns the variables that are computed from some variables, and these.

        Args:
          variables: the variables; literals are left out.
        """
        dependents = {var for var in variables if not is_literal(var)}
        for equation in self.jaxpr.eqns:
            read = (var for var in equation.invars if not is_literal(var))
            if not dependents.isdisjoint(read):
                dependents.update(equation.outvars)
        return dependents


def gradients_of(body: Any, phases: Sequence[str], outer: str) -> set[Atom]:
    """Returns the variables that the backward pass makes, and code outside of it reads.

    Args:
      body: a jaxpr.
      phases: the phase of each of its equations.
      outer: the phase of the equation that contains it.
    """
    own = list(equations(body, inside=False))
    phase_of = dict(zip(map(id, own), phases, strict=True)) | {id(None): outer}
    made = {var for each in own if phase_of[id(each)] == BACKWARD for var in each.outvars}
    readers = Body(body).consumers if made else {}
    is_outside = lambda reader: phase_of[id(reader)] == FORWARD
    return {var for var in made if any(map(is_outside, readers.get(var, ())))}


def cotangents_of(body: Any, phases: Sequence[str], arguments: Iterable[Atom]) -> set[Atom]:
    """Returns the variables that are gradients in the backward pass.

    A backward pass also moves, casts and recomputes values of the forward pass. It begins with an
    operation on scalars, such as the loss scale, or in a function of its own with any operation.

    Args:
      body: a jaxpr.
      phases: the phase of each of its equations.
      arguments: the arguments of the jaxpr that are gradients.
    """
    cotangents = set(arguments)
    for each, phase in zip(equations(body, inside=False), phases, strict=True):
        flags = [not is_literal(var) and var in cotangents for var in each.invars]
        if phase != BACKWARD:
            continue
        if each.primitive.name == "optimization_barrier":
            cotangents.update(itertools.compress(each.outvars, flags))
        elif any(flags) or not cotangents or all(var.aval.size == 1 for var in each.invars):
            cotangents.update(each.outvars)
    return cotangents


class Forward(Interpreter):
    """Facts of variables, from the arguments of a program to its results.

    It is an interpreter whose values are facts. A client overrides `equation`, which returns the
    facts of the results for those of the operands, and may override the other methods.
    """

    # Fact of a constant, and of a result of which nothing is known.
    nothing: Any = None

    def constant(self, array: Any) -> Any:
        return self.nothing

    def join(self, first: Any, second: Any) -> Any:
        """Returns the fact of a value that is one of two: of two branches, or of a carry.

        For a loop to end, joining a fact again and again must lead to one that stays the same.
        """
        return first if first == second else self.nothing

    def context(self, equation: JaxprEqn) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def bound(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        return [self.nothing] * len(equation.outvars)

    def enter(
        self, equation: JaxprEqn, operands: list[Any], frame: Frame, state: Any = None
    ) -> list[Any]:
        """Returns the facts of the results of a construct; `nothing` for other equations."""
        known: dict[int, Any] = {}
        for inner in inners(equation):
            facts = self._facts_inside(inner, operands, Start(frame.place.of(equation), state))
            for n, fact in enumerate(facts):
                if inner.results[n] is not None:
                    known[n] = self.join(known[n], fact) if n in known else fact
        return [known.get(n, self.nothing) for n in range(len(equation.outvars))]

    def _facts_inside(self, inner: Inner, operands: list[Any], start: Start) -> list[Any]:
        args = [self.nothing if n is None else operands[n] for n in inner.indices]
        while True:
            results = self.run(inner.jaxpr, args, start)
            new = list(args)
            for n, argument in enumerate(inner.carried):
                new[argument] = self.join(args[argument], results[n])
            if new == args:
                break
            args = new
        return [args[n] for n in inner.carried] if inner.may_be_skipped else results


# Constructs whose results may be their operands. The derivative of others may be another one.
_RETURNING = {Form.CALL, Form.REMAT, Form.SCAN}


class _Returned(Forward):
    """For each variable, the index of the argument that it is; None if it is computed."""

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        return with_returned(equation, operands, self.bound(equation, operands))


def returned_arguments(jaxpr: AnyJaxpr) -> list[int | None]:
    """Returns for each result the index of the argument that it is; None if it is computed."""
    body, _ = _compat.jaxpr_body(jaxpr)
    return _Returned().run(body, range(len(body.invars)))


def with_returned(equation: JaxprEqn, operands: list[Any], results: list[Any]) -> list[Any]:
    """Returns the results of an operation; those that are operands are the operands themselves.

    Calls may return operands, and scans the arrays of which they return all rows.
    """
    if form_of(equation) not in _RETURNING:
        return results
    (inner,) = inners(equation)
    args = [None if n is None else operands[n] for n in inner.indices]
    first = inner.carried.stop if inner.form is Form.SCAN else 0
    for result, n in enumerate(returned_arguments(inner.jaxpr)):
        if n is not None and n >= first and result >= len(inner.carried):
            results[result] = args[n]
    return results


class Backward:
    """Facts of variables, from the results of a program to its arguments.

    A fact summarizes what becomes of a value. A client overrides `equation`, which returns the
    facts of the operands for those of the results, and `join`.
    """

    # Fact of a variable that nothing reads.
    nothing: Any = None

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        """Returns the facts of the operands of an equation."""
        return self.enter(equation, results, frame)

    def join(self, first: Any, second: Any) -> Any:
        """Returns the fact of a value that is read twice; `nothing` never occurs here.

        For a loop to end, joining a fact again and again must lead to one that stays the same.
        """
        raise NotImplementedError

    def run(self, jaxpr: AnyJaxpr, results: Sequence[Any], start: Start = PROGRAM) -> list[Any]:
        """Returns the facts of the arguments of a jaxpr, for those of its results."""
        facts = self.facts(jaxpr, results, start)
        return [facts.get(var, self.nothing) for var in _compat.jaxpr_body(jaxpr)[0].invars]

    def facts(
        self, jaxpr: AnyJaxpr, results: Sequence[Any], start: Start = PROGRAM
    ) -> dict[Any, Any]:
        """Returns variable -> fact for one jaxpr, without the jaxprs inside."""
        body, _ = _compat.jaxpr_body(jaxpr)
        facts: dict[Any, Any] = {}
        frame = Frame(*start, facts)
        self._add(facts, body.outvars, results)
        for frame.index, equation in reversed([*enumerate(body.eqns)]):
            known = [facts.get(var, self.nothing) for var in equation.outvars]
            self._add(facts, equation.invars, self.equation(equation, known, frame))
        return facts

    def enter(
        self, equation: JaxprEqn, results: list[Any], frame: Frame, state: Any = None
    ) -> list[Any]:
        """Returns the facts of the operands of a construct; `nothing` for other equations."""
        operands = [self.nothing] * len(equation.invars)
        for inner in inners(equation):
            facts = self._facts_inside(inner, results, Start(frame.place.of(equation), state))
            for n, fact in zip(inner.indices, facts, strict=True):
                if n is not None:
                    operands[n] = self._joined(operands[n], fact)
        return operands

    def settled(
        self, inner: Inner, results: Sequence[Any], start: Start
    ) -> tuple[list[Any], list[Any]]:
        """Returns the facts of the results and arguments of a jaxpr inside, for its equation's."""
        known = [self.nothing if var is None else results[n] for n, var in enumerate(inner.results)]
        while True:
            args = self.run(inner.jaxpr, known, start)
            new = list(known)
            for n, argument in enumerate(inner.carried):
                new[n] = self._joined(known[n], args[argument])
            if new == known:
                return known, args
            known = new

    def _facts_inside(self, inner: Inner, results: list[Any], start: Start) -> list[Any]:
        known, args = self.settled(inner, results, start)
        if inner.may_be_skipped:
            args[inner.carried.start : inner.carried.stop] = known[: len(inner.carried)]
        return args

    def _joined(self, first: Any, second: Any) -> Any:
        if self.nothing in (first, second):
            return second if first == self.nothing else first
        return self.join(first, second)

    def _add(self, facts: dict[Any, Any], variables: Sequence[Any], new: Sequence[Any]) -> None:
        for var, fact in zip(variables, new, strict=True):
            if not is_literal(var) and fact != self.nothing:
                facts[var] = self._joined(facts.get(var, self.nothing), fact)


# ---------------------------------------------------------------------------
# Outputs of modules
# ---------------------------------------------------------------------------


class ModuleOutputs:
    """Consumers in the forward pass, and outputs of modules, of one jaxpr.

    Args:
      jaxpr, place: the jaxpr and its location.
      used: for each result, True if the forward pass uses it; None: all are used.
      network_of: returns the name of an equation's network, where several have the same modules.
    """

    def __init__(
        self,
        jaxpr: AnyJaxpr,
        place: Location,
        used: Sequence[bool] | None,
        network_of: Callable[[JaxprEqn], str] = lambda equation: "",
    ) -> None:
        body, _ = _compat.jaxpr_body(jaxpr)
        located = [(each, place.of(each)) for each in equations(body, inside=False)]
        self._forward = [
            (each, (network_of(each), *at.names)) for each, at in located if at.phase == FORWARD
        ]
        read = [(var, path) for each, path in self._forward for var in each.invars]
        used = [True] * len(body.outvars) if used is None else used
        returned = [(var, None) for var, is_used in zip(body.outvars, used, strict=True) if is_used]
        # Variable -> networks and scopes of its forward consumers; None if the jaxpr returns it.
        self.consumers: dict[Atom, list[Path | None]] = {}
        for var, path in (*read, *returned):
            if not is_literal(var):
                self.consumers.setdefault(var, []).append(path)
        self.last = self._last_outputs(len(place.names))

    def _last_outputs(self, outer: int) -> dict[Atom, list[Path]]:
        """Returns variable -> paths of the modules of which it is the output.

        Args:
          outer: number of scopes of the equation that contains the jaxpr.
        """
        last: dict[Path, Atom] = {}
        for equation, path in self._forward:
            for var in filter(_is_activation, equation.outvars):
                for length in range(outer + 2, len(path) + 1):
                    module = path[:length]
                    readers = self.consumers.get(var, ())
                    if any(each is None or each[:length] != module for each in readers):
                        last[module] = var
        variables: dict[Atom, list[Path]] = {}
        for module, var in sorted(last.items(), key=lambda item: -len(item[0])):
            if FULL_PRECISION not in module:
                variables.setdefault(var, []).append(module[1:])
        return variables

    def used_inside(self, equation: JaxprEqn, phase: str) -> list[bool] | None:
        """Returns which results of the jaxpr of an equation are used; None in a backward pass."""
        if phase != FORWARD:
            return None
        carried = sum(len(inner.carried) for inner in inners(equation))
        return [n < carried or var in self.consumers for n, var in enumerate(equation.outvars)]


def _is_activation(var: Atom) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and var.aval.ndim > 0
