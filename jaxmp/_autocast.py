"""autocast: runs a traced function again, each operation in the dtype that suits it.

The rules per operation stand in the op table; here is how they are carried out:

* a value that no operation has computed yet (an argument, a constant, what is merely reshaped from
  one) has no say in the dtype of a sum: it is cast to that of the other operand. Otherwise every
  bias would turn its layer's result into FP32;
* neither has a scalar beside an array, as in torch;
* what only FP32 operations read is not rounded on the way to them: in `exp(x - max)` and
  `sum((x - y) * z)` the arithmetic between is FP32 too;
* one cast per value and target dtype in each jaxpr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun

from jaxmp._boundary import matmul_precision
from jaxmp._compat import jaxpr_body, jaxpr_like, scan_counts
from jaxmp._dtypes import FLOAT32, bits, is_half
from jaxmp._jaxprs import (
    AUTOCAST,
    BACKWARD,
    equations,
    is_literal,
    module_paths_of,
    phase_of,
    scope_names,
    sub_jaxprs,
)
from jaxmp._ops import OpTable
from jaxmp._policy import Policy
from jaxmp._products import wide_product
from jaxmp._recipe_data import as_op_table, as_policy_map
from jaxmp._rules import PolicyMap, check_module_dtypes
from jaxmp._trees import cast, is_castable
from jaxmp.errors import CompositionError, PolicyError, RuleError
from jaxmp.fp8._decisions import decide_product, is_recording
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._recipes import Scaling, as_recipe

_FULL_PRECISION = "jaxmp_full_precision"
# Scopes that keep products out of FP8 -> why.
_NOT_FP8 = {
    "jaxmp_backward": (
        "a product of the backward pass, whose gradient cannot be told from its other operand: "
        "write jax.grad(autocast(f)), not autocast(jax.grad(f))"
    ),
    "jaxmp_custom_jvp": "inside a custom_jvp, whose rule must stay linear",
    "jaxmp_custom_vjp": "inside a custom_vjp, which runs as its author wrote it",
}
_MARKS = {_FULL_PRECISION, *_NOT_FP8}


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """What is traced in this block computes in FP32 under `autocast`, whatever the policies say.

    It is a name scope, so it holds in the backward pass too, and costs nothing without `autocast`.

    Example:
      >>> def f(x):
      ...     with full_precision():
      ...         return x @ x.T
      >>> autocast(f, "p=f32,c=bf16,o=f32")(jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    with jax.named_scope(_FULL_PRECISION):
        yield


def autocast(fn: Callable[..., Any], policies: Any, *, ops: Any = None) -> Callable[..., Any]:
    """`fn` with each operation in the dtype that suits it; the results keep their dtypes.

    Matrix products and convolutions run in the compute dtype of the module they belong to, sums,
    exponentials and their like in FP32, the rest in what reaches it. This needs no Flax: any JAX
    function will do, and code that asks for a dtype by name is reached too. Composes with `jit`,
    `grad`, `vmap`, `scan`, `checkpoint` and `shard_map`, in any order.

    Where the policies say `matmul = "fp8"`, each `dot_general` without batch dimensions becomes
    `fp8.dot_general`: three products in FP8 under `jax.grad(autocast(fn, ...))`. Of its operands
    the kernel is the one that nothing has computed, such as an argument; the second where that
    tells nothing. `fp8.explain` lists the products, and why some stay in 16 bits.

    Args:
      fn: a pure function of arrays, in pytrees; arguments that are no arrays are handed through.
      policies: a recipe's name, a policy string, a `Policy`, a `PolicyMap` or a `Recipe`. Rules
        match the path of name scopes, such as Flax modules leave. `param_dtype` says nothing here.
      ops: changes to the recipe's op table, such as `{"exp": "low"}`; None: none.

    Returns:
      A function of the same arguments. Its results have the dtypes that `fn` gives them, or the
      output dtype of a rule for the root, `Rule("", "o=bf16")`.

    Raises:
      RuleError: if a required rule names a module type, which a traced function does not know; from
        the returned function, if a required rule matches none of the scopes of `fn`.
      PolicyError: if `fn` is no function; if a policy names a float8 dtype, or makes no sense.
      CompositionError: if FP8 products are to be scaled with a state, as by `fp8.DelayedScaling`;
        from the returned function, on a GPU without FP8 products.
      OpError: if `ops` names an operation or a category that does not exist.

    The idea of one list of operations per dtype is that of torch.autocast and TensorFlow's
    auto_mixed_precision; the lists are jaxmp's own.

    Example:
      >>> def loss(w, x):
      ...     return jnp.log(jnp.exp(x @ w).sum())
      >>> half = autocast(loss, "p=f32,c=bf16,o=f32")
      >>> half(jnp.ones((3, 4)), jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    if not callable(fn):
        raise PolicyError(
            f"autocast got {fn!r} where a function is wanted. Give the function first and the "
            "policies after it: autocast(loss_fn, 'bf16')."
        )
    table = as_op_table(policies).replace({} if ops is None else ops)
    rules = _Rules(as_policy_map(policies), table)

    @functools.wraps(fn)
    def autocast_fn(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        traced = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]
        static_out: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for index, array in zip(traced, arrays, strict=True):
                filled[index] = array
            args, kwargs = structure.unflatten(filled)
            out, static_out["structure"] = jax.tree.flatten(fn(*args, **kwargs))
            static_out["leaves"] = [None if _is_array(leaf) else leaf for leaf in out]
            return [leaf for leaf in out if _is_array(leaf)]

        arrays = [leaves[index] for index in traced]
        outs = iter(_Interpreter(rules).function(jax.make_jaxpr(flat)(*arrays), arrays))
        out = [next(outs) if leaf is None else leaf for leaf in static_out["leaves"]]
        return static_out["structure"].unflatten(out)

    return autocast_fn


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufcV"
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


# ---------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------


class _Standing(enum.IntEnum):
    """Whether a value's dtype has a say in that of a result."""

    CONSTANT = 0  # made of literals and integers alone
    NEUTRAL = 1  # an argument, or merely reshaped from one
    COMPUTED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    array: Any
    standing: _Standing = _Standing.COMPUTED
    # Of a constant whose entries are all one number: that number, of no dimensions.
    scalar: np.ndarray | None = None

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def castable(self) -> bool:
        return is_castable(self.array)


def _to_half(value: _Value, dtype: Any) -> Any:
    """A cast in which a finite constant stays finite: the FP32 minimum that stands for a mask."""
    array = value.array
    if value.standing is not _Standing.CONSTANT or not is_half(dtype):
        return cast(array, dtype)
    largest = float(jnp.finfo(dtype).max)
    if value.scalar is not None:
        number = float(value.scalar)
        clipped = min(max(number, -largest), largest) if math.isfinite(number) else number
        half = np.asarray(clipped, dtype)
        return lax.full(array.shape, half, dtype) if array.ndim else half
    wide = array.dtype.type(largest)
    clipped = lax.clamp(-wide, array, wide)
    return cast(lax.select(lax.is_finite(array), clipped, array), dtype)


class _Scope:
    """The variables of one jaxpr, and the casts that were made of them."""

    def __init__(self, jaxpr: Any, consts: Any, args: list[_Value], readers: _Readers) -> None:
        self.values = {
            var: _Value(const, _Standing.NEUTRAL)
            for var, const in zip(jaxpr.constvars, consts, strict=True)
        }
        self.values |= zip(jaxpr.invars[-len(args) :] if args else (), args, strict=True)
        self.casts: dict[tuple[int, Any], Any] = {}
        self.readers = readers

    def read(self, var: Any) -> _Value:
        return _literal(var) if is_literal(var) else self.values[var]

    def cast(self, value: _Value, dtype: Any) -> Any:
        """The array of a value in `dtype`; anything but a floating array as it is."""
        if not value.castable or value.dtype == dtype:
            return value.array
        key = id(value.array), np.dtype(dtype)
        if key not in self.casts:
            # The value is kept beside its cast, so that its id stays its own. The scope tells an
            # audit that this is no promotion that nobody asked for.
            with jax.named_scope(AUTOCAST):
                self.casts[key] = value.array, _to_half(value, dtype)
        return self.casts[key][1]


def _literal(var: Any) -> _Value:
    if not hasattr(var.aval, "dtype"):
        return _Value(var.val, _Standing.CONSTANT)
    number = np.asarray(var.val, var.aval.dtype)
    return _Value(number, _Standing.CONSTANT, None if number.ndim else number)


# What an operation on one constant makes of its only number.
_OF_SCALAR: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(
        ("broadcast_in_dim", "copy", "reshape", "squeeze", "stop_gradient", "transpose"),
        lambda number: number,
    ),
    "neg": lambda number: np.asarray(-number),
    "sqrt": lambda number: np.asarray(np.sqrt(number) if number >= 0 else np.nan, number.dtype),
}


def _scalar_of(equation: Any, values: list[_Value]) -> np.ndarray | None:
    number = values[0].scalar
    if number is None or number.dtype != FLOAT32:
        return None
    function = _OF_SCALAR.get(equation.primitive.name)
    return None if function is None else function(number)


# Arithmetic of several operands: its result is rounded to its dtype.
_ARITHMETIC = frozenset(("add", "add_any", "sub", "mul", "div", "rem", "atan2"))
# These follow what reaches them, and round; what else follows is exact.
_BOUNDED = frozenset(("tanh", "atan", "erf", "erfc", "logistic", "sqrt", "cbrt"))


def _made_in_fp32(jaxpr: Any, kinds: list[str]) -> set[Any]:
    """Arrays that FP32 operations of a jaxpr make, and what follows from them."""
    made: set[Any] = set()
    for equation, kind in zip(jaxpr.eqns, kinds, strict=True):
        follows = kind in ("widest", "follow") and any(
            var in made for var in equation.invars if not is_literal(var)
        )
        if kind == "fp32" or follows:
            made.update(v for v in equation.outvars if getattr(v.aval, "ndim", 0))
    return made


class _Readers:
    """What of one jaxpr is read by FP32 operations alone."""

    def __init__(self, jaxpr: Any, category: Callable[[Any], str]) -> None:
        kinds = list(map(category, jaxpr.eqns))
        wide = _made_in_fp32(jaxpr, kinds)
        # Variables that something else reads; those that anything does.
        self.also: set[Any] = {var for var in jaxpr.outvars if not is_literal(var)}
        # The same where arithmetic and moves are what their own readers are.
        self.also_later = set(self.also)
        self.read: set[Any] = set(self.also)
        for equation, kind in zip(reversed(jaxpr.eqns), reversed(kinds), strict=True):
            operands = [var for var in equation.invars if not is_literal(var)]
            later = kind == "fp32" or (
                kind in ("widest", "follow")
                and equation.primitive.name not in _BOUNDED
                and all(map(self.only_fp32_later, equation.outvars))
            )
            # An operand that was made in FP32 lifts the others.
            later = later or (kind == "widest" and any(var in wide for var in operands))
            self.read.update(operands)
            if kind != "fp32":
                self.also.update(operands)
            if not later:
                self.also_later.update(operands)

    def only_fp32(self, var: Any) -> bool:
        """Whether a variable is an operand of FP32 operations, and of no other."""
        return var in self.read and var not in self.also

    def only_fp32_later(self, var: Any) -> bool:
        """Whether it ends in FP32 operations alone, whatever lies between."""
        return var in self.read and var not in self.also_later


# ---------------------------------------------------------------------------
# The interpreter
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Region:
    """What holds for one equation by the place it comes from."""

    policy: Policy
    full: bool
    # Where the deciding rule asks for an output wider than the compute dtype: that dtype.
    wide: np.dtype | None
    # Whether products run in FP8; and what keeps them from it all the same.
    fp8: bool
    why_not_fp8: str

    @property
    def dtype(self) -> np.dtype:
        return FLOAT32 if self.full else self.policy.compute_dtype


class _Rules:
    """Policies and op table, and the region of every path that was asked for."""

    def __init__(self, policies: PolicyMap, ops: OpTable) -> None:
        check_module_dtypes(policies)
        for rule in policies.rules:
            if rule.module_type is not None and rule.required:
                raise RuleError(
                    f"{rule!r}: autocast sees name scopes and no module types. Name the module by "
                    "its path, or let the rule match nothing: required=False."
                )
        # How FP8 products are scaled; None where there are none.
        self.fp8: Scaling | None = (
            _stateless(as_recipe(policies.fp8)) if policies.names_fp8 else None
        )
        self.policies, self.ops = policies, ops
        self.by_path = bool(policies.rules)
        self._regions: dict[tuple[str, ...], _Region] = {}
        self._categories: dict[str, str] = {}

    def category(self, equation: Any) -> str:
        """What the op table says of an equation; a jaxpr within was traced for its dtypes."""
        name = equation.primitive.name
        if name == "dot_general" and not equation.params["dimension_numbers"][0][0]:
            return "widest"  # an outer product: nothing is summed, and positions keep their digits
        if name == "mul" and equation.invars[0] is equation.invars[1]:
            name = "square"
        if name == "scatter" and equation.params["update_jaxpr"] is not None:
            return "opaque"  # `x.at[i].apply(f)`: f was traced for its dtypes
        found = self._categories.get(name)
        if found is None:
            held = name not in _SCATTERS and sub_jaxprs(equation)
            found = "opaque" if held else self.ops.category(name)
            self._categories[name] = found
        return found

    def check_required(self, seen: set[tuple[str, ...]]) -> None:
        """Refuses required rules that match none of the scopes that a function has."""
        paths = {path for names in seen for path in module_paths_of(_without_marks(names))}
        parts = [path.split("/") for path in paths]
        known = {"/".join(names[:length]) for names in parts for length in range(len(names) + 1)}
        modules = [rule for rule in self.policies.rules if not rule.addresses_parameter]
        try:
            self.policies.check_required(known, modules)
        except RuleError as error:
            raise RuleError(
                f"{error} autocast goes by name scopes: Linen modules leave them, NNX modules do "
                "under jaxmp.nnx.apply_policy(model, 'f32'), any other code does in a block "
                "`with jax.named_scope(...):`."
            ) from None

    def region(self, names: tuple[str, ...]) -> _Region:
        """What holds below the scopes `names`."""
        found = self._regions.get(names)
        if found is None:
            found = self._regions[names] = self._find_region(names)
        return found

    def _find_region(self, names: tuple[str, ...]) -> _Region:
        paths = module_paths_of(_without_marks(names))
        rules = ((path, self.policies.deciding_rule(path)) for path in paths)
        path, rule = next(((p, r) for p, r in rules if r is not None), (paths[0], None))
        policy = self.policies.resolve(path)
        asked = rule is not None and path != "" and rule.output_dtype is not None
        wide = asked and bits(policy.output_dtype) > bits(policy.compute_dtype)
        full = _FULL_PRECISION in names
        fp8 = policy.matmul == "fp8" and not full
        why_not = next((_NOT_FP8[name] for name in names if name in _NOT_FP8), "") if fp8 else ""
        return _Region(policy, full, policy.output_dtype if wide else None, fp8, why_not)


def _stateless(scaling: Scaling) -> Scaling:
    if scaling.is_stateful:
        name = type(scaling).__name__
        raise CompositionError(
            f"{name} keeps a state for each product, and a traced function has no place for one. "
            "Scale by the tensors themselves: autocast(fn, recipe.replace(fp8='current')), or "
            "PolicyMap(..., fp8=fp8.CurrentScaling()). Or give the function "
            f"fp8.dot_general(fp8.{name}()) where it multiplies, and a state."
        )
    return scaling


def _without_marks(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _MARKS)


class _Interpreter:
    """Runs one function again."""

    def __init__(self, rules: _Rules) -> None:
        self.rules = rules
        # Sub-jaxprs that were run before with the same dtypes; JAX shares equal ones.
        self.inner: dict[Any, tuple[Any, tuple[Any, list[_Standing]]]] = {}
        # Who reads what in each jaxpr, by its id; the jaxpr is kept beside it, and so its id.
        self.readers: dict[int, tuple[Any, _Readers]] = {}
        # Likewise the scopes in each.
        self.inside: dict[int, tuple[Any, dict[tuple[str, ...], None]]] = {}
        self.seen: set[tuple[str, ...]] = set()

    def function(self, closed: Any, args: list[Any]) -> list[Any]:
        """A whole function: results in their recorded dtypes, or in that of a rule for the root."""
        jaxpr, consts = jaxpr_body(closed)
        outs = self.run(closed, consts, [_Value(arg, _Standing.NEUTRAL) for arg in args], ())
        self.rules.check_required(self.seen)
        rule = self.rules.policies.deciding_rule("")
        named = None if rule is None else rule.output_dtype
        recorded = [var.aval for var in jaxpr.outvars]
        return [
            cast(jnp.asarray(out.array), named or aval.dtype) if out.castable else out.array
            for out, aval in zip(outs, recorded, strict=True)
        ]

    def run(
        self, jaxpr: Any, consts: Any, args: list[_Value], outer: tuple[str, ...]
    ) -> list[_Value]:
        """The results of one jaxpr, in whatever dtypes they come out."""
        body = jaxpr_body(jaxpr)[0]
        if id(body) not in self.readers:
            self.readers[id(body)] = body, _Readers(body, self.rules.category)
        scope = _Scope(body, consts, args, self.readers[id(body)][1])
        for equation in body.eqns:
            stack = str(equation.source_info.name_stack)
            names = outer + scope_names(stack)
            if self.rules.fp8 is not None:
                names = _with_phase(names, stack)
            self.seen.add(names)
            with _as_recorded(equation):
                outs = self.equation(equation, scope, names)
            scope.values |= zip(equation.outvars, outs, strict=True)
        return [scope.read(var) for var in body.outvars]

    def equation(self, equation: Any, scope: _Scope, names: tuple[str, ...]) -> list[_Value]:
        values = list(map(scope.read, equation.invars))
        special = _INSIDE.get(equation.primitive.name)
        if special is not None:
            return special(self, equation, scope, values, names)
        floating = [value for value in values if value.castable]
        # What is made of integers has no say: a mask that is multiplied with, say.
        standing = max((value.standing for value in floating), default=_Standing.CONSTANT)
        if not floating:
            return _wrap(equation, _bind(equation, [v.array for v in values]), standing)
        if equation.primitive.name == "convert_element_type":
            if equation.invars[0].aval.dtype == equation.params["new_dtype"]:
                return values  # only its weak type changed
            return _wrap(equation, _bind(equation, [v.array for v in values]))
        region = self.rules.region(names)
        category = self.rules.category(equation)
        if category == "low":
            return _wrap(equation, self.low(equation, scope, values, region, names))
        if category == "opaque":
            return _wrap(equation, _bind(equation, _recorded(equation, scope, values)), standing)
        if category == "fp32" or _is_full(region) or self._leads_to_fp32(equation, scope):
            arrays = [scope.cast(value, FLOAT32) for value in values]
            return _wrap(equation, _bind(equation, arrays))
        if category == "widest":
            dtype = _common(values)
            return _wrap(
                equation, _bind(equation, [scope.cast(v, dtype) for v in values]), standing
            )
        out = _bind(equation, [v.array for v in values])
        if standing is _Standing.CONSTANT and not equation.primitive.multiple_results:
            return [_Value(out, standing, _scalar_of(equation, values))]
        return _wrap(equation, out, standing)

    def _leads_to_fp32(self, equation: Any, scope: _Scope) -> bool:
        """Whether a result in 16 bits would be cast up again by all that read it."""
        arithmetic = equation.primitive.name in _ARITHMETIC
        return arithmetic and scope.readers.only_fp32_later(equation.outvars[0])

    # -- products ---------------------------------------------------------------------------

    def low(
        self,
        equation: Any,
        scope: _Scope,
        values: list[_Value],
        region: _Region,
        names: tuple[str, ...],
    ) -> Any:
        """An operation in the compute dtype, or in FP8, unless its author asked for more."""
        params = equation.params
        recorded = [v.aval.dtype for v in equation.invars if _is_castable_aval(v.aval)]
        highest = _asks_for_highest(params) and not is_half(recorded[0])
        in_fp8 = self._fp8_product(equation, values, region, names, highest)
        if highest:
            return _bind(equation, _recorded(equation, scope, values))
        dtype = region.dtype
        arrays = [scope.cast(value, dtype) for value in values]
        if "preferred_element_type" not in params:
            return _bind(equation, arrays)
        asked = params["preferred_element_type"]
        if asked is not None and any(asked != one for one in recorded):
            wide = asked
        elif is_half(dtype) and self._only_fp32_reads(equation, scope):
            wide = FLOAT32
        else:
            wide = region.wide
        if in_fp8 is not None:
            numbers, precision = params["dimension_numbers"], params["precision"]
            return in_fp8(*arrays, numbers, precision, dtype if wide is None else wide)
        changes = {"preferred_element_type": dtype}
        if not is_half(dtype) and "precision" in params and params["precision"] is None:
            changes["precision"] = _precision(region.policy)
        if wide is None or wide == dtype or len(arrays) != 2:
            return _bind(equation, arrays, **changes)

        def product(lhs: Any, rhs: Any, preferred_element_type: Any = dtype) -> Any:
            return _bind(equation, [lhs, rhs], preferred_element_type=preferred_element_type)

        lhs, rhs = arrays
        return wide_product(product, lhs, rhs, wide)

    def _fp8_product(
        self,
        equation: Any,
        values: list[_Value],
        region: _Region,
        names: tuple[str, ...],
        highest: bool,
    ) -> Callable[..., Any] | None:
        """What takes the place of a product that runs in FP8."""
        if not region.fp8 or not _is_product(equation):
            return None
        assert self.rules.fp8 is not None
        computed = [value.standing is _Standing.COMPUTED for value in values]
        kernel = 0 if computed == [False, True] else 1
        why = "its author asks for precision=HIGHEST" if highest else region.why_not_fp8
        path, shapes = _path(names), (values[0].array.shape, values[1].array.shape)
        if not decide_product(self.rules.fp8, path, shapes, equation.params, kernel, why):
            return None
        return dot_general(self.rules.fp8, kernel="rhs" if kernel else "lhs")

    def _record_opaque(self, equation: Any, names: tuple[str, ...]) -> None:
        """Puts the products inside an equation that is left alone on record."""
        region = self.rules.region((*names, "jaxmp_custom_vjp"))
        if not region.fp8 or not is_recording():
            return
        assert self.rules.fp8 is not None
        for product in (each for inner in sub_jaxprs(equation) for each in equations(inner)):
            if _is_product(product):
                shapes = tuple(var.aval.shape for var in product.invars)
                path, params = _path(names), product.params
                decide_product(self.rules.fp8, path, shapes, params, 1, region.why_not_fp8)

    def _only_fp32_reads(self, equation: Any, scope: _Scope) -> bool:
        """Whether an FP32 result would be cast to 16 bits and back for nothing."""
        var = equation.outvars[0]
        return var.aval.dtype == FLOAT32 and scope.readers.only_fp32(var)

    # -- jaxprs inside equations ------------------------------------------------------------

    def regions(self, jaxpr: Any, names: tuple[str, ...]) -> tuple[_Region, ...]:
        """What holds at each scope of a jaxpr below `names`: all that the way there says to it.

        A function that several layers call stays one function where the same holds for them.
        """
        if not self.rules.by_path:
            return (self.rules.region(names),)
        inside = [(*names, *scope) for scope in self.scopes(jaxpr)]
        # A jaxpr that is not run again has been seen at this place too.
        self.seen.update(inside)
        return tuple(map(self.rules.region, inside))

    def scopes(self, jaxpr: Any) -> dict[tuple[str, ...], None]:
        """The scopes of a jaxpr's equations at any depth, each once; () is always one."""
        body = jaxpr_body(jaxpr)[0]
        if id(body) not in self.inside:
            found: dict[tuple[str, ...], None] = {(): None}
            for equation in body.eqns:
                own = scope_names(str(equation.source_info.name_stack))
                found[own] = None
                for inner in sub_jaxprs(equation):
                    found |= {own + scope: None for scope in self.scopes(inner)}
            self.inside[id(body)] = body, found
        return self.inside[id(body)][1]

    def retraced(
        self,
        jaxpr: Any,
        values: list[_Value],
        names: tuple[str, ...],
        outputs: Callable[[list[Any], list[Any]], list[Any]] | None = None,
    ) -> tuple[Any, list[_Standing]]:
        """A sub-jaxpr for operands in the dtypes they have now, and the standing of each result.

        `outputs(arrays, recorded avals)` has the last word on the dtypes of the results.
        """
        body, consts = jaxpr_body(jaxpr)
        avals = [_with_dtype(var.aval, v) for var, v in zip(body.invars, values, strict=True)]
        flags = [(v.standing, None if v.scalar is None else v.scalar.tobytes()) for v in values]
        # A record of FP8 products has a row for each call.
        place = names if is_recording() else None
        key = id(jaxpr), tuple(map(str, avals)), tuple(flags), self.regions(body, names), place
        if key not in self.inner:
            standings: list[_Standing] = []

            def run(*arrays: Any) -> list[Any]:
                pairs = zip(arrays, values, strict=True)
                args = [_Value(array, v.standing, v.scalar) for array, v in pairs]
                outs = self.run(jaxpr, consts, args, names)
                standings[:] = [out.standing for out in outs]
                results = [out.array for out in outs]
                return outputs(results, [var.aval for var in body.outvars]) if outputs else results

            # The jaxpr is kept beside what was made of it, so that its id stays its own.
            self.inner[key] = jaxpr, (jaxpr_like(jax.make_jaxpr(run)(*avals), jaxpr), standings)
        return self.inner[key][1]


def _with_phase(names: tuple[str, ...], stack: str) -> tuple[str, ...]:
    """Scopes with a mark in a backward pass, and without in what that computes again."""
    outside = tuple(name for name in names if name != "jaxmp_backward")
    before = BACKWARD if outside != names else ""
    return (*outside, "jaxmp_backward") if phase_of(stack, before) == BACKWARD else outside


def _path(names: tuple[str, ...]) -> str:
    return "/".join(_without_marks(names))


def _is_product(equation: Any) -> bool:
    """Whether an equation is a `dot_general` that sums over something, of operands to cast."""
    return (
        equation.primitive.name == "dot_general"
        and bool(equation.params["dimension_numbers"][0][0])
        and all(_is_castable_aval(var.aval) for var in equation.invars)
    )


def _is_full(region: _Region) -> bool:
    """Whether everything in a region computes in FP32."""
    return not is_half(region.dtype)


def _wrap(equation: Any, outs: Any, standing: _Standing = _Standing.COMPUTED) -> list[_Value]:
    outs = outs if equation.primitive.multiple_results else [outs]
    return [_Value(out, standing) for out in outs]


# These hold a jaxpr of two scalars, in the recorded dtype: JAX's own function makes it anew.
_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}
_OF_SCATTER = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")


def _bind(equation: Any, arrays: list[Any], **changes: Any) -> Any:
    primitive, params = equation.primitive, {**equation.params, **changes}
    scatter = _SCATTERS.get(primitive.name)
    if scatter is not None and arrays[0].dtype != equation.invars[0].aval.dtype:
        return scatter(*arrays, **{name: params[name] for name in _OF_SCATTER})
    if hasattr(primitive, "get_bind_params"):
        params = primitive.get_bind_params(params)
    return primitive.bind(*arrays, **params)


@contextlib.contextmanager
def _as_recorded(equation: Any) -> Iterator[None]:
    """Source line, name scopes, mesh and the like of the equation that is run again."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), equation.ctx.manager:
        yield


def _recorded(equation: Any, scope: _Scope, values: list[_Value]) -> list[Any]:
    pairs = zip(equation.invars, values, strict=True)
    return [_to_aval(scope, value, var.aval) for var, value in pairs]


def _to_aval(scope: _Scope, value: _Value, aval: Any) -> Any:
    return scope.cast(value, aval.dtype) if _is_castable_aval(aval) else value.array


def _with_dtype(aval: Any, value: _Value) -> Any:
    """The type of a sub-jaxpr's operand, in the dtype that reaches it now."""
    return aval.update(dtype=value.dtype) if _is_castable_aval(aval) else aval


def _is_castable_aval(aval: Any) -> bool:
    return hasattr(aval, "dtype") and hasattr(aval, "shape") and is_castable(aval)


def _widest(values: list[_Value]) -> np.dtype:
    """Of 16 and 32-bit dtypes; FP32 holds what float16 and bfloat16 hold."""
    dtypes = {np.dtype(value.dtype) for value in values}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def _common(values: list[_Value]) -> Any:
    """The dtype in which operands meet."""
    floating = [value for value in values if value.castable]
    voting = [value for value in floating if value.standing is _Standing.COMPUTED]
    arrays = [value for value in voting if jnp.ndim(value.array) > 0]
    if not arrays and any(jnp.ndim(value.array) > 0 for value in floating):
        arrays = [value for value in floating if jnp.ndim(value.array) > 0]
    return _widest(arrays or voting or floating)


def _asks_for_highest(params: Any) -> bool:
    precision = params.get("precision")
    precision = precision if isinstance(precision, tuple) else (precision,)
    return lax.Precision.HIGHEST in precision


def _precision(policy: Policy) -> Any:
    name = matmul_precision(policy, None)
    return None if name is None else (lax.Precision(name),) * 2


# ---------------------------------------------------------------------------
# Control flow, calls, custom derivatives
# ---------------------------------------------------------------------------


def _call(
    self: _Interpreter, equation: Any, scope: _Scope, values: list[_Value], names: Any
) -> list[_Value]:
    """jit, checkpoint and their like: the same equation around the jaxpr that was run again."""
    jaxpr, standings = self.retraced(equation.params["jaxpr"], values, names)
    outs = equation.primitive.bind(
        *(v.array for v in values), **{**equation.params, "jaxpr": jaxpr}
    )
    return [_Value(*pair) for pair in zip(outs, standings, strict=True)]


def _scan(
    self: _Interpreter, equation: Any, scope: _Scope, values: list[_Value], names: Any
) -> list[_Value]:
    """The carry keeps its dtypes; constants and what is scanned over come as they are."""
    params = equation.params
    consts, carried = scan_counts(params)
    carry = slice(consts, consts + carried)
    avals = [var.aval for var in equation.invars]
    values[carry] = [
        _Value(_to_aval(scope, value, aval))
        for value, aval in zip(values[carry], avals[carry], strict=True)
    ]

    def outputs(outs: list[Any], recorded: list[Any]) -> list[Any]:
        return _cast_all(outs[:carried], recorded[:carried]) + outs[carried:]

    jaxpr, standings = self.retraced(params["jaxpr"], values, names, outputs)
    outs = equation.primitive.bind(*(v.array for v in values), **{**params, "jaxpr": jaxpr})
    standings = [_Standing.COMPUTED] * carried + standings[carried:]
    return [_Value(*pair) for pair in zip(outs, standings, strict=True)]


def _while(
    self: _Interpreter, equation: Any, scope: _Scope, values: list[_Value], names: Any
) -> list[_Value]:
    """The state keeps its dtypes."""
    params = equation.params
    cond, body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    avals = [var.aval for var in equation.invars]
    values[body:] = [
        _Value(_to_aval(scope, value, aval))
        for value, aval in zip(values[body:], avals[body:], strict=True)
    ]
    tested, _ = self.retraced(params["cond_jaxpr"], values[:cond] + values[body:], names)
    looped, _ = self.retraced(params["body_jaxpr"], values[cond:], names, _cast_all)
    changes = {"cond_jaxpr": tested, "body_jaxpr": looped}
    outs = equation.primitive.bind(*(v.array for v in values), **{**params, **changes})
    return [_Value(out) for out in outs]


def _cond(
    self: _Interpreter, equation: Any, scope: _Scope, values: list[_Value], names: Any
) -> list[_Value]:
    """Branches must agree on the dtypes of their results: on the recorded ones."""
    branches = tuple(
        self.retraced(branch, values[1:], names, _cast_all)[0]
        for branch in equation.params["branches"]
    )
    outs = equation.primitive.bind(
        *(v.array for v in values), **{**equation.params, "branches": branches}
    )
    return [_Value(out) for out in outs]


def _cast_all(outs: list[Any], recorded: list[Any]) -> list[Any]:
    return [
        cast(jnp.asarray(out), aval.dtype) if is_castable(out) else out
        for out, aval in zip(outs, recorded, strict=True)
    ]


def _custom_jvp(
    self: _Interpreter, equation: Any, scope: _Scope, values: list[_Value], names: Any
) -> list[_Value]:
    """The function and its rule, both in the dtypes that reach them."""
    params = equation.params
    if self.rules.fp8 is not None:
        # The rule's products are transposed, which an FP8 product cannot be.
        names = (*names, "jaxmp_custom_jvp")
    jaxpr, standings = self.retraced(params["call_jaxpr"], values, names)
    avals = [var.aval for var in equation.invars]
    outs_avals = [var.aval for var in jaxpr_body(jaxpr)[0].outvars]
    rule = equation.primitive.get_bind_params(params)["subfuns"][1]
    call = jax.custom_jvp(jaxpr_as_fun(jaxpr))

    @call.defjvp
    def call_jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        recorded = _rule_jaxpr(rule, avals)
        args = [_Value(array, v.standing) for array, v in zip(primals, values, strict=True)]
        args += [_Value(t) for t, aval in zip(tangents, avals, strict=True) if _moves(aval)]
        outs = self.run(recorded, jaxpr_body(recorded)[1], args, names)
        arrays = _cast_all([out.array for out in outs], [*outs_avals, *outs_avals])
        return arrays[: len(outs_avals)], arrays[len(outs_avals) :]

    outs = call(*(value.array for value in values))
    return [_Value(*pair) for pair in zip(outs, standings, strict=True)]


def _rule_jaxpr(rule: Any, avals: list[Any]) -> Any:
    """A `custom_jvp` rule, traced in the recorded dtypes: primals, tangents -> the same."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    def run(*arrays: Any) -> list[Any]:
        given = iter(arrays[len(avals) :])
        tangents = [
            next(given) if _moves(aval) else SymbolicZero(aval.to_tangent_aval()) for aval in avals
        ]
        return [_instantiate(out) for out in rule.call_wrapped(*arrays[: len(avals)], *tangents)]

    return jax.make_jaxpr(run)(*shapes, *(shape for shape in shapes if _moves(shape)))


def _moves(aval: Any) -> bool:
    """Whether there are derivatives with respect to a value."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _instantiate(out: Any) -> Any:
    aval: Any = out.aval if isinstance(out, SymbolicZero) else None
    return out if aval is None else jnp.zeros(aval.shape, aval.dtype)


def _as_its_author_wrote(
    self: _Interpreter, equation: Any, scope: _Scope, values: list[_Value], names: Any
) -> list[_Value]:
    """Operands in their recorded dtypes, and nothing inside is changed."""
    self._record_opaque(equation, names)
    return _wrap(equation, _bind(equation, _recorded(equation, scope, values)))


def _shard_map(
    self: _Interpreter, equation: Any, scope: _Scope, values: list[_Value], names: Any
) -> list[_Value]:
    params = equation.params
    consts = jaxpr_body(params["jaxpr"])[1]
    standings: list[_Standing] = []

    def shard(*arrays: Any) -> tuple[Any, ...]:
        pairs = zip(arrays, values, strict=True)
        args = [_Value(array, value.standing) for array, value in pairs]
        outs = self.run(params["jaxpr"], consts, args, names)
        standings[:] = [out.standing for out in outs]
        return tuple(out.array for out in outs)

    outs = jax.shard_map(
        shard,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )(*(value.array for value in values))
    return [_Value(*pair) for pair in zip(outs, standings, strict=True)]


_INSIDE: dict[str, Callable[..., list[_Value]]] = {
    "jit": _call,
    "pjit": _call,
    "remat2": _call,
    "checkpoint": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _as_its_author_wrote,
    "shard_map": _shard_map,
}
