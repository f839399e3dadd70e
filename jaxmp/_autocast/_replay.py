"""Interpreter that runs a traced function with each operation in the dtype chosen for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxmp import _core, _programs
from jaxmp._autocast import _products, _resolve
from jaxmp._autocast._decide import Consumers, Environment, decide, why_not_fp8
from jaxmp._autocast._explain import IN_RULE, Recorder
from jaxmp._autocast._in_place import InPlace
from jaxmp._autocast._values import (
    Priority,
    Value,
    returned,
    scalar_of,
)
from jaxmp._core import _compat
from jaxmp._core._compat import AnyJaxpr, ClosedJaxpr, Jaxpr, JaxprEqn, Literal


class Autocast(InPlace):
    """Interpreter of one traced function, whose values are arrays with priorities.

    Args:
      rules: the policies and the op table.
      in_custom_vjp: True if the whole function was traced inside a rule of a `custom_vjp`. Then the
        tracebacks of all its equations contain that rule, and do not identify inner rules.
      record: collects the decisions for an explanation; None to collect none.
      lists_calls: True while `explain` lists the FP8 matmuls of each call of a function.
    """

    consequence = "it computes in the dtypes in which it was traced"

    def __init__(
        self,
        config: _resolve.AutocastConfig,
        in_custom_vjp: bool = False,
        record: Recorder | None = None,
        lists_calls: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.in_custom_vjp = in_custom_vjp
        self.record, self.lists_calls = record, lists_calls
        # Id of a jaxpr -> (the jaxpr, the consumers of its variables).
        self.consumers: dict[int, tuple[Any, Consumers]] = {}
        self.uses = _programs.Uses()
        # Id of a jaxpr -> (the jaxpr, the scopes of its equations).
        self.inside: dict[int, tuple[Any, dict[tuple[str, ...], None]]] = {}
        # Scopes of all equations, for `AutocastConfig.check_required`.
        self.seen: set[tuple[str, ...]] = set()
        # The last FP32 matmul inside a `custom_vjp`; and True if another matmul has fewer bits.
        self.fp32_matmul: JaxprEqn | None = None
        self.has_narrow = False
        # True if the function takes a gradient.
        self.has_backward = False

    def function(self, closed: ClosedJaxpr, args: list[Array], states: int = 0) -> list[Array]:
        """Runs the whole function.

        Args:
          closed: its jaxpr.
          args: arrays, one for each input variable.
          states: number of last results that keep their recorded dtypes.

        Returns:
          The results in their recorded dtypes, or in the output dtype of a rule for the root.

        Raises:
          RuleError: if a required rule matches no scope of the function.
        """
        jaxpr, _ = _compat.jaxpr_body(closed)
        named = self.config.output_dtype
        used = _programs.wide_results(jaxpr) if named is None else ()
        values = [Value(arg, Priority.ARGUMENT) for arg in args]
        outs = self.run(closed, values, _programs.Start(state=used))
        self.config.check_required(self.seen)
        named = [named] * (len(outs) - states) + [None] * states
        rows = zip(outs, [var.aval for var in jaxpr.outvars], named, strict=True)
        return [returned(out, aval, d or getattr(aval, "dtype", None)) for out, aval, d in rows]

    def constant(self, array: Any) -> Value:
        return Value(array, Priority.ARGUMENT)

    def literal(self, var: Literal) -> Value:
        if not hasattr(var.aval, "dtype"):
            return Value(var.val, Priority.CONSTANT)
        number = np.asarray(var.val, _programs.array_aval(var).dtype)
        return Value(number, Priority.CONSTANT, None if number.ndim else number)

    def run(
        self, jaxpr: AnyJaxpr, args: Sequence[Value], start: _programs.Start = _programs.PROGRAM
    ) -> list[Value]:
        """Runs one jaxpr; its results may have other dtypes than the recorded ones.

        Args:
          jaxpr, args, start: as in `Interpreter.run`. The state is the uses of its first results;
            the others have none.
        """
        body = _compat.jaxpr_body(jaxpr)[0]
        if id(body) not in self.consumers:
            self.consumers[id(body)] = body, Consumers(body, self.category)
        uses: tuple[_programs.Use, ...] = start.state or ()
        uses = (*uses, *(_programs.Use.NONE,) * len(body.outvars))[: len(body.outvars)]
        used = self.uses.facts(body, uses, start)
        env = Environment(self.category, self.consumers[id(body)][1], used)
        return super().run(jaxpr, args, start._replace(state=env))

    def equation(
        self, equation: JaxprEqn, operands: list[Value], frame: _programs.Frame
    ) -> list[Value]:
        place = frame.place.of(equation)
        scope_path = place.names
        self.seen.add(scope_path)
        self.has_backward |= place.phase == _programs.BACKWARD
        if place.phase == _programs.BACKWARD and self.config.scaling is not None:
            scope_path = (*scope_path, _resolve.IN_BACKWARD)
        if self.is_as_written(equation):
            return self.run_as_written(equation, frame.state, operands, scope_path)
        # FP8 dots have no rule for the derivatives that `custom_vmap` takes.
        is_own_vmap = equation.primitive.name == "custom_vmap_call" and self.config.scaling is None
        if is_own_vmap or equation.primitive.name in _programs.CONSTRUCTS:
            with contextlib.nullcontext() if self.record is None else self.record.inside(equation):
                return self.run_construct(equation, operands, frame.state, place)
        return self.run_equation(equation, operands, frame.state, scope_path)

    def is_as_written(self, equation: JaxprEqn) -> bool:
        """Returns True for equations of a `custom_vjp` rule, which run in their recorded dtypes.

        Differentiation replaces a `custom_vjp_call` by the equations of its rules. Within a loop,
        the forward pass may still contain the `custom_vjp_call`, which is opaque. The two passes
        must agree on the dtypes, so the equations of the rules are not cast either.
        """
        return not self.in_custom_vjp and _compat.is_in_custom_vjp(equation.source_info)

    def category(self, equation: JaxprEqn) -> str:
        """Returns the op-table category of an equation."""
        return "opaque" if self.is_as_written(equation) else self.config.category(equation)

    def run_construct(
        self, equation: JaxprEqn, values: list[Value], env: Environment, place: _programs.Location
    ) -> list[Value]:
        """Runs a call, loop, branch, or function with a custom derivative or `vmap`."""
        name, scope_path = equation.primitive.name, place.names
        if name == "custom_vjp_call":
            return self.run_as_written(equation, env, values, scope_path)
        inner, of_results = _programs.inners(equation)[-1], env.uses_of(equation)
        used, _ = self.uses.settled(inner, of_results, _programs.Start(place))
        start = _programs.Start(place, tuple(used))
        if name == "custom_vmap_call":
            return self.custom_vmap(equation, values, start)
        if name != "custom_jvp_call":
            return self.in_place(equation, values, env, start)
        if self.config.scaling is not None:
            # Reverse mode transposes matmuls of the rule; those in FP8 have no transpose.
            scope_path = (*scope_path, _resolve.IN_CUSTOM_JVP)
        of_rule = place._replace(names=(*scope_path, _resolve.IN_JVP_RULE))
        start = start._replace(place=place._replace(names=scope_path))
        return self.custom_jvp(equation, values, start, of_rule)

    def run_equation(
        self, equation: JaxprEqn, values: list[Value], env: Environment, scope_path: _programs.Path
    ) -> list[Value]:
        """Runs one equation, located at the scopes `scope_path`, as `decide` decides."""
        policy, in_fp8 = self.config.scope_policy(scope_path), None
        decision = decide(equation, values, env, policy)
        if policy.uses_fp8 and (decision.as_recorded or decision.result is not None):
            why = decision.reason if decision.as_recorded else why_not_fp8(env.use_of(equation))
            in_fp8 = _products.fp8_product(self.config, equation, values, scope_path, why)
        if self.record is not None:
            self.record.equation(equation, scope_path, decision, policy, in_fp8)
        if equation.primitive.name == "convert_element_type" and decision.dtype is None:
            kept = [value for value in values if value.castable]
            if kept:  # only its weak type changes, or the cast would round what decides
                return [dataclasses.replace(kept[0], priority=decision.priority)]
        if decision.as_recorded:
            self.check_known(equation)
            arrays = env.recorded(equation, values)
        elif decision.dtype is None or equation.primitive.name == "convert_element_type":
            arrays = [value.array for value in values]
        else:
            arrays = [env.cast(value, decision.dtype) for value in values]
        if decision.result is not None:
            self.has_narrow = True
            outs = [_products.multiply(equation, arrays, decision, policy, in_fp8)]
        else:
            outs = _programs.bind_all(equation, arrays)
        results = [Value(out, decision.priority) for out in outs]
        if decision.priority is Priority.CONSTANT and len(results) == 1:
            results = [dataclasses.replace(results[0], scalar=scalar_of(equation, values))]
        return results

    def run_as_written(
        self, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: _programs.Path
    ) -> list[Value]:
        """Runs an equation in its recorded dtypes, and records the matmuls inside."""
        for matmul in _products.matmuls_inside(equation):
            if {_programs.array_aval(var).dtype for var in matmul.invars[:2]} == {_core.FLOAT32}:
                self.fp32_matmul = matmul
            else:
                self.has_narrow = True
        if self.record is not None:
            self.record.as_recorded(equation, scope_path, IN_RULE)
        policy = self.config.scope_policy((*scope_path, _resolve.IN_CUSTOM_VJP))
        if policy.uses_fp8 and self.lists_calls:
            _products.explain_products_inside(self.config, equation, scope_path)
        return list(map(Value, _programs.bind_all(equation, env.recorded(equation, values))))

    def uncast_text(self, name: str) -> str:
        """Returns a warning of the function `name` if no matmul is cast; "" in `explain`."""
        matmul = self.fp32_matmul
        dtype = self.config.policies.default.compute_dtype
        if self.lists_calls or not _core.is_16bit(dtype) or self.has_narrow or matmul is None:
            return ""
        file, line = _programs.Lines().of([matmul])
        where, fix = "", f"Cast the arguments of that function: x.astype({dtype.name!r})."
        if file:
            where = f", as that in {os.path.basename(file)}, line {line},"
            fix = (
                "Solvers of diffrax are such functions. Apply the recipe inside, to the function "
                "that multiplies: y = jaxmp.autocast(fn, recipe)(params, x)."
            )
        return (
            f"No matmul of {name} runs in 16 bits: those inside a custom_vjp{where} run in the "
            f"float32 in which they were traced. {fix}"
        )

    # -- jaxprs inside equations ------------------------------------------------------------

    def key(self, jaxpr: Jaxpr, start: _programs.Start) -> Hashable:
        """Returns the policies of scopes, and uses of results, for which a jaxpr is traced."""
        # `Explanation.fp8` lists each location of a call, and `.autocast` counts each call, so
        # they do not share retraced jaxprs.
        place, uses = start
        call = object() if self.record is not None else place.names if self.lists_calls else None
        return self.scope_policies(jaxpr, place.names), call, place.phase, uses

    def scope_policies(
        self, jaxpr: AnyJaxpr, scope_path: _programs.Path
    ) -> tuple[_resolve.ScopePolicy, ...]:
        """Returns the resolved policy of each scope in a jaxpr that is called at `scope_path`.

        Layers that call the same function share one retraced jaxpr if these policies are equal.
        """
        if not self.config.by_path:
            return (self.config.scope_policy(scope_path),)
        inside = [(*scope_path, *inner) for inner in self.scope_paths(jaxpr)]
        # Recorded here, since a jaxpr from the cache is not run again at these scopes.
        self.seen.update(inside)
        return tuple(map(self.config.scope_policy, inside))

    def scope_paths(self, jaxpr: AnyJaxpr) -> dict[tuple[str, ...], None]:
        """Returns the ordered set of the scopes of a jaxpr's equations at any depth, and of ()."""
        body = _compat.jaxpr_body(jaxpr)[0]
        if id(body) not in self.inside:
            result: dict[tuple[str, ...], None] = {(): None}
            for equation in _programs.equations(body, inside=False):
                own = _programs.scope_names(str(equation.source_info.name_stack))
                result[own] = None
                for inner in _programs.sub_jaxprs(equation):
                    result |= {own + path: None for path in self.scope_paths(inner)}
            self.inside[id(body)] = body, result
        return self.inside[id(body)][1]
