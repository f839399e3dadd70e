"""Interpreter that runs a traced function with each operation in the dtype chosen for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from jaxmp._autocast._consumers import (
    ARITHMETIC,
    Consumers,
    Effect,
    Effects,
    Magnified,
    is_identity,
)
from jaxmp._autocast._explain import IN_RULE, Recorder
from jaxmp._autocast._resolve import (
    IN_CUSTOM_JVP,
    IN_CUSTOM_VJP,
    IN_JVP_RULE,
    AutocastConfig,
    ScopePolicy,
    path_of,
    with_phase,
)
from jaxmp._autocast._values import (
    Environment,
    Priority,
    Value,
    common_dtype,
    in_recorded_dtypes,
    is_castable_aval,
    is_matmul,
    kernel_of,
    literal_value,
    outputs_of,
    scalar_of,
    to_aval,
    why_as_recorded,
    with_dtype,
    wrap,
)
from jaxmp._core._compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    is_in_custom_vjp,
    jaxpr_body,
    target,
)
from jaxmp._core._dtypes import FLOAT16, FLOAT32, is_16bit
from jaxmp._core._trees import cast, is_castable
from jaxmp._core._typing import Array, DTypeLike
from jaxmp._policies._device import matmul_precision
from jaxmp._policies._policy import Policy
from jaxmp._policies._resolve import narrow_reason, resolve_policy
from jaxmp._programs._bind import bind
from jaxmp._programs._constructs import CONSTRUCTS, sub_jaxprs
from jaxmp._programs._in_place import InPlace
from jaxmp._programs._interpreter import Frame, Place
from jaxmp._programs._jaxprs import Path, array_aval, equations, scope_names
from jaxmp._programs._matmuls import wide_product, widened_product
from jaxmp._programs._operations import Dot, arithmetic_of, dot_of
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._explain import Fp8Explanation as Fp8Explanation
from jaxmp.fp8._explain import decide_product, is_explained, note_unsupported
from jaxmp.fp8._explain import decisions as decisions
from jaxmp.fp8._explain import explanation_of as explanation_of
from jaxmp.fp8._explain import recorded as recorded
from jaxmp.fp8._explain import warn_if_unused as warn_if_unused


class Autocast(InPlace):
    """Interpreter of one traced function, whose values are arrays with priorities.

    Args:
      rules: the policies and the op table.
      in_custom_vjp: True if the whole function was traced inside a rule of a `custom_vjp`. Then the
        tracebacks of all its equations contain that rule, and do not identify inner rules.
      record: collects the decisions for an explanation; None to collect none.
    """

    consequence = "it computes in the dtypes in which it was traced"

    def __init__(
        self, config: AutocastConfig, in_custom_vjp: bool = False, record: Recorder | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.in_custom_vjp = in_custom_vjp
        self.record = record
        # Id of a jaxpr -> (the jaxpr, the consumers of its variables).
        self.consumers: dict[int, tuple[Any, Consumers]] = {}
        self.magnified = Magnified(self.category)
        # Id of a jaxpr -> (the jaxpr, the scopes of its equations).
        self.inside: dict[int, tuple[Any, dict[tuple[str, ...], None]]] = {}
        # Scopes of all equations, for `AutocastConfig.check_required`.
        self.seen: set[tuple[str, ...]] = set()

    def function(self, closed: ClosedJaxpr, args: list[Array]) -> list[Array]:
        """Runs the whole function.

        Args:
          closed: its jaxpr.
          args: arrays, one for each input variable.

        Returns:
          The results in their recorded dtypes, or in the output dtype of a rule for the root.

        Raises:
          RuleError: if a required rule matches no scope of the function.
        """
        jaxpr, _ = jaxpr_body(closed)
        outs = self.run(closed, [Value(arg, Priority.ARGUMENT) for arg in args])
        self.config.check_required(self.seen)
        rule = resolve_policy(self.config.policies, "").rule
        named = None if rule is None else rule.output_dtype
        recorded = [var.aval for var in jaxpr.outvars]
        return [
            cast(jnp.asarray(out.array), named or aval.dtype) if out.castable else out.array
            for out, aval in zip(outs, recorded, strict=True)
        ]

    def constant(self, array: Any) -> Value:
        return Value(array, Priority.ARGUMENT)

    def literal(self, var: Literal) -> Value:
        return literal_value(var)

    def run(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        args: Sequence[Value],
        place: Place | None = None,
        state: Effects | None = None,
    ) -> list[Value]:
        """Runs one jaxpr; its results may have other dtypes than the recorded ones.

        Args:
          jaxpr, args, place: as in `Interpreter.run`.
          state: effects of the rounding of its results; None if they are all bounded.
        """
        body = jaxpr_body(jaxpr)[0]
        if id(body) not in self.consumers:
            self.consumers[id(body)] = body, Consumers(body, self.category)
        env = Environment(self.consumers[id(body)][1], self.magnified.facts(body, state or ()))
        return super().run(jaxpr, args, place, env)

    def equation(self, equation: JaxprEqn, operands: list[Value], frame: Frame) -> list[Value]:
        stack = str(equation.source_info.name_stack)
        scope_path = frame.place.scopes + scope_names(stack)
        if self.config.scaling is not None:
            scope_path = with_phase(scope_path, stack)
        self.seen.add(scope_path)
        return self.run_equation(equation, operands, frame.state, scope_path)

    def is_as_written(self, equation: JaxprEqn) -> bool:
        """Returns True for equations of a `custom_vjp` rule, which run in their recorded dtypes.

        Differentiation replaces a `custom_vjp_call` by the equations of its rules. Within a loop,
        the forward pass may still contain the `custom_vjp_call`, which is opaque. The two passes
        must agree on the dtypes, so the equations of the rules are not cast either.
        """
        return not self.in_custom_vjp and is_in_custom_vjp(equation.source_info)

    def category(self, equation: JaxprEqn) -> str:
        """Returns the op-table category of an equation."""
        return "opaque" if self.is_as_written(equation) else self.config.category(equation)

    def run_equation(
        self, equation: JaxprEqn, values: list[Value], env: Environment, scope_path: Path
    ) -> list[Value]:
        """Runs one equation, located at the scopes `scope_path`, in the dtype of its category."""
        if self.is_as_written(equation):
            return self.run_as_written(equation, env, values, scope_path)
        name = equation.primitive.name
        if name in CONSTRUCTS:
            with contextlib.nullcontext() if self.record is None else self.record.inside(equation):
                if name == "custom_vjp_call":
                    return self.run_as_written(equation, env, values, scope_path)
                effects = env.effects_of(equation)
                if name != "custom_jvp_call":
                    return self.in_place(equation, values, env, Place(scope_path), effects)
                if self.config.scaling is not None:
                    # Reverse mode transposes matmuls of the rule; those in FP8 have no transpose.
                    scope_path = (*scope_path, IN_CUSTOM_JVP)
                of_rule = Place((*scope_path, IN_JVP_RULE))
                return self.custom_jvp(equation, values, Place(scope_path), effects, of_rule)
        effect = max(env.effects_of(equation), default=Effect.BOUNDED)
        if self.record is not None:
            self._explain(self.record, equation, values, scope_path, effect)
        floating = [value for value in values if value.castable]
        # Results of integer operations, such as a mask to multiply with, are weakly typed.
        priority = max((value.priority for value in floating), default=Priority.CONSTANT)
        if not floating:
            return wrap(equation, bind(equation, [v.array for v in values]), priority)
        if is_identity(equation):
            return values  # only its weak type changed
        if equation.primitive.name == "convert_element_type":
            return wrap(equation, bind(equation, [v.array for v in values]))
        policy = self.config.scope_policy(scope_path)
        category = self.category(equation)
        if category == "low":
            return self.run_matmul(equation, env, values, policy, scope_path, effect)
        if category == "opaque":
            self.check_known(equation)
            return wrap(
                equation, bind(equation, in_recorded_dtypes(equation, env, values)), priority
            )
        if category == "fp32" or policy.is_fp32 or self._leads_to_fp32(equation, env):
            arrays = [env.cast(value, FLOAT32) for value in values]
            return wrap(equation, bind(equation, arrays))
        if effect and priority is not Priority.CONSTANT:
            # Weakly typed, so that consumers that do not magnify the rounding compute in 16 bits.
            arrays = [env.cast(value, FLOAT32) for value in values]
            return wrap(equation, bind(equation, arrays), min(priority, Priority.NARROW))
        if category == "widest":
            dtype = common_dtype(values)
            return wrap(equation, bind(equation, [env.cast(v, dtype) for v in values]), priority)
        out = bind(equation, [v.array for v in values])
        if priority is Priority.CONSTANT and not equation.primitive.multiple_results:
            return [Value(out, priority, scalar_of(equation, values))]
        return wrap(equation, out, priority)

    def _leads_to_fp32(self, equation: JaxprEqn, env: Environment) -> bool:
        """Returns True for arithmetic whose result would be cast up again by all its consumers."""
        arithmetic = equation.primitive.name in ARITHMETIC
        return arithmetic and env.consumers.leads_to_fp32_only(equation.outvars[0])

    def _explain(
        self,
        record: Recorder,
        equation: JaxprEqn,
        values: list[Value],
        scope_path: Path,
        effect: Effect,
    ) -> None:
        policy = self.config.scope_policy(scope_path)
        in_fp8 = self._fp8_product(equation, values, policy, scope_path, "")
        record.equation(equation, values, scope_path, self.category(equation), in_fp8, effect)

    # -- matmuls ---------------------------------------------------------------------------

    def run_matmul(
        self,
        equation: JaxprEqn,
        env: Environment,
        values: list[Value],
        policy: ScopePolicy,
        scope_path: Path,
        effect: Effect,
    ) -> list[Value]:
        """Runs a matmul or convolution in the compute dtype or in FP8.

        FP32 operands with `precision=HIGHEST`, or of a matmul whose result a solver reads, keep
        their recorded dtypes. The dtype of the result is the first of these that applies:

        1. the `preferred_element_type`, if it differs from the recorded dtypes of the operands;
        2. FP32, if the recorded result is FP32 and only FP32 operations consume it;
        3. FP32 with the priority `NARROW`, if it is a linear layer with few outputs, or `effect`
           shows that a later operation magnifies the rounding;
        4. the output dtype of the deciding rule, if it is wider than the compute dtype;
        5. the compute dtype.
        """
        recorded = [array_aval(v).dtype for v in equation.invars if is_castable_aval(v.aval)]
        why = why_as_recorded(equation, effect)
        in_fp8 = self._fp8_product(equation, values, policy, scope_path, why)
        if why:
            return wrap(equation, bind(equation, in_recorded_dtypes(equation, env, values)))
        dtype, priority = policy.dtype, Priority.COMPUTED
        arrays = [env.cast(value, dtype) for value in values]
        options = arithmetic_of(equation)
        if options is None:
            return wrap(equation, bind(equation, arrays))
        preferred = options.result_dtype
        if preferred is not None and any(preferred != operand_dtype for operand_dtype in recorded):
            wide = preferred
        elif is_16bit(dtype) and self._is_fp32_only(equation, env, dtype):
            wide = FLOAT32
        elif IN_JVP_RULE in scope_path and all(map(is_16bit, recorded)):
            # A tangent of a wide matmul: its transpose must meet a cotangent in 16 bits.
            wide = None
        elif narrow_reason(policy.policy, outputs_of(equation, values)) or effect:
            wide, priority = FLOAT32, Priority.NARROW
        else:
            wide = policy.wide_output
        if in_fp8 is not None:
            out = in_fp8(
                *arrays,
                tuple(dot_of(equation)),
                options.precision,
                dtype if wide is None else wide,
                out_sharding=options.out_sharding,
            )
            return [Value(out, priority)]
        changes: dict[str, Any] = {"preferred_element_type": dtype}
        if not is_16bit(dtype) and options.precision is None:
            changes["precision"] = _precision(policy.policy)
        if wide is None or wide == dtype or len(arrays) != 2:
            return wrap(equation, bind(equation, arrays, **changes))

        is_refused = wide == FLOAT32 and target() == "cpu" and _multiplies_vectors(equation)

        def matmul(*operands: Array, preferred_element_type: DTypeLike = dtype) -> Array:
            product = lambda *arrays, **dtypes: bind(equation, list(arrays), **dtypes)
            if is_refused and preferred_element_type == FLOAT32:
                return widened_product(product, *operands)
            return product(*operands, preferred_element_type=preferred_element_type)

        lhs, rhs = arrays
        return [Value(wide_product(matmul, lhs, rhs, wide), priority)]

    def _fp8_product(
        self,
        equation: JaxprEqn,
        values: list[Value],
        policy: ScopePolicy,
        scope_path: Path,
        why: str,
    ) -> Callable[..., Any] | None:
        """Returns the `fp8.dot_general` that replaces a matmul; None if it does not run in FP8.

        `why` is the reason why it keeps its recorded dtypes, or "".
        """
        if not policy.uses_fp8:
            return None
        if not is_matmul(equation):
            note_unsupported(path_of(scope_path), f"FP8 has no {equation.primitive.name}")
            return None
        scaling, kernel = self.config.scaling, kernel_of(values)
        assert scaling is not None
        why = why or policy.exclusion_reason
        path, shapes = path_of(scope_path), (values[0].array.shape, values[1].array.shape)
        if not decide_product(scaling, path, shapes, dot_of(equation), kernel, why):
            return None
        return dot_general(scaling, kernel="rhs" if kernel else "lhs")

    def run_as_written(
        self, equation: JaxprEqn, env: Environment, values: list[Value], scope_path: Path
    ) -> list[Value]:
        """Runs an equation in its recorded dtypes, and records the matmuls inside."""
        if self.record is not None:
            self.record.as_recorded(equation, scope_path, IN_RULE)
        policy = self.config.scope_policy((*scope_path, IN_CUSTOM_VJP))
        if policy.uses_fp8 and is_explained():
            scaling = self.config.scaling
            assert scaling is not None
            inside = (each for inner in sub_jaxprs(equation) for each in equations(inner))
            path, why = path_of(scope_path), policy.exclusion_reason
            for each in filter(is_matmul, (equation, *inside)):
                lhs, rhs = (array_aval(var).shape for var in each.invars)
                decide_product(scaling, path, (lhs, rhs), dot_of(each), 1, why)
        return wrap(equation, bind(equation, in_recorded_dtypes(equation, env, values)))

    def _is_fp32_only(self, equation: JaxprEqn, env: Environment, dtype: np.dtype) -> bool:
        """Returns True if the recorded result is FP32 and only FP32 operations consume it.

        Rounding it to 16 bits would lose precision without benefit. In float16, arithmetic may lie
        in between, because a result beyond 65504 is infinite before a division makes it small.
        """
        var, consumers = equation.outvars[0], env.consumers
        is_only = consumers.is_fp32_only(var)
        if dtype == FLOAT16 and is_matmul(equation):
            is_only = is_only or consumers.leads_to_fp32_only(var)
        return array_aval(var).dtype == FLOAT32 and is_only

    # -- jaxprs inside equations ------------------------------------------------------------

    def key(self, jaxpr: Jaxpr, place: Place, state: Effects | None) -> Hashable:
        """Returns the policies of scopes, and effects, for which a jaxpr is traced again."""
        # `Explanation.fp8` lists each location of a call, and `.autocast` counts each call, so
        # they do not share retraced jaxprs.
        call = object() if self.record is not None else place if is_explained() else None
        return self.scope_policies(jaxpr, place.scopes), call, state if any(state or ()) else ()

    def aval(self, var: Any, value: Value) -> ShapedArray:
        return with_dtype(var.aval, value)

    def with_array(self, value: Value, array: Array) -> Value:
        return dataclasses.replace(value, array=array)

    def note(self, value: Value) -> tuple[Priority, bytes | None]:
        return value.priority, None if value.scalar is None else value.scalar.tobytes()

    def noted(self, array: Array, note: Any) -> Value:
        return Value(array) if note is None else Value(array, note[0])

    def array(self, value: Value) -> Any:
        return value.array

    def as_carry(self, value: Value, var: Any, outer: Environment) -> Value:
        return Value(to_aval(outer, value, var.aval))

    def as_result(self, value: Value, aval: ShapedArray) -> Value:
        is_cast = is_castable(value.array)
        return Value(cast(jnp.asarray(value.array), aval.dtype)) if is_cast else value

    def scope_policies(
        self, jaxpr: Jaxpr | ClosedJaxpr, scope_path: Path
    ) -> tuple[ScopePolicy, ...]:
        """Returns the resolved policy of each scope in a jaxpr that is called at `scope_path`.

        Layers that call the same function share one retraced jaxpr if these policies are equal.
        """
        if not self.config.by_path:
            return (self.config.scope_policy(scope_path),)
        inside = [(*scope_path, *inner) for inner in self.scope_paths(jaxpr)]
        # Recorded here, since a jaxpr from the cache is not run again at these scopes.
        self.seen.update(inside)
        return tuple(map(self.config.scope_policy, inside))

    def scope_paths(self, jaxpr: Jaxpr | ClosedJaxpr) -> dict[tuple[str, ...], None]:
        """Returns the ordered set of the scopes of a jaxpr's equations at any depth, and of ()."""
        body = jaxpr_body(jaxpr)[0]
        if id(body) not in self.inside:
            result: dict[tuple[str, ...], None] = {(): None}
            for equation in equations(body, inside=False):
                own = scope_names(str(equation.source_info.name_stack))
                result[own] = None
                for inner in sub_jaxprs(equation):
                    result |= {own + path: None for path in self.scope_paths(inner)}
            self.inside[id(body)] = body, result
        return self.inside[id(body)][1]


def _precision(policy: Policy) -> tuple[lax.Precision, ...] | None:
    name = matmul_precision(policy, None)
    return None if name is None else (lax.Precision(name),) * 2


def _multiplies_vectors(equation: JaxprEqn) -> bool:
    """Returns True for `jax.vmap(lambda x: w @ x)(xs)`.

    XLA's CPU compiler refuses it in 16 bits with an FP32 result if the vectors are such a product.
    """
    if not is_matmul(equation) or dot_of(equation) != Dot(((1,), (1,)), ((), ())):
        return False
    return all(array_aval(var).ndim == 2 for var in equation.invars)
