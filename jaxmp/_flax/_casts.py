"""What a policy does at the boundary of one module, whatever its framework."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core._dtypes import FLOAT32, FLOAT64, bits, is_16bit
from jaxmp._core._trees import canonical, cast, is_castable, saturating_cast
from jaxmp._core._wide_dot import wide_product
from jaxmp._policies._inputs import NOTHING_KEPT, Kept, kept_inputs
from jaxmp._policies._policy import Policy
from jaxmp._policies._rules import PolicyMap

# ---------------------------------------------------------------------------
# Plans: what one policy does to one module
# ---------------------------------------------------------------------------


class Facts(NamedTuple):
    """What is true of a module class under every policy."""

    takes_dtype: bool  # its `dtype` was defined by Flax, not by a user
    norm: bool
    upcasts_params: bool
    casts_params: bool  # itself
    cell: bool
    rnn: bool
    attention: bool


class Plan(NamedTuple):
    """What is done with one module: at its boundary, and inside."""

    policy: Policy
    facts: Facts
    output: np.dtype
    # Whether the output dtype was asked for: the root's, or named by the deciding rule.
    asks_output: bool
    # Where the deciding rule asks for an output wider than the compute dtype: that output dtype.
    wide: np.dtype | None
    param_dtype: Callable[[str], np.dtype]
    cls: type

    def kept(self, method: str) -> Kept:
        """The arguments of a method that are not cast."""
        names = self.policy.keep_inputs
        return kept_inputs(self.cls, method, names) if names else NOTHING_KEPT

    @property
    def input_dtype(self) -> np.dtype:
        """Norms take their statistics in FP32."""
        return upcast(self.policy) if self.facts.norm else self.policy.compute_dtype

    @property
    def field_dtype(self) -> np.dtype:
        """What the `dtype` that Flax gave the module is set to."""
        return upcast(self.policy) if self.facts.upcasts_params else self.policy.compute_dtype


def make_plan(
    policies: PolicyMap, path: tuple[str, ...], cls: type, ancestors: tuple[type, ...], facts: Facts
) -> Plan:
    """The plan for the module of class `cls` at `path`, below modules of classes `ancestors`."""
    name = "/".join(path)
    policy = policies.resolve(name, cls, ancestors)
    rule = policies.deciding_rule(name, cls, ancestors)
    named = rule is not None and rule.output_dtype is not None
    asks = named or not path
    wide = named and bits(policy.output_dtype) > bits(policy.compute_dtype)

    def param_dtype(param: str) -> np.dtype:
        if facts.upcasts_params:
            return upcast(policy)
        return policies.resolve(f"{name}:{param}", cls, ancestors).compute_dtype

    return Plan(
        policy=policy,
        facts=facts,
        output=policy.output_dtype if asks else policy.compute_dtype,
        asks_output=asks,
        wide=policy.output_dtype if wide else None,
        param_dtype=param_dtype,
        cls=cls,
    )


def upcast(policy: Policy) -> np.dtype:
    """FP32 where a policy computes in 16 bits."""
    return FLOAT32 if is_16bit(policy.compute_dtype) else policy.compute_dtype


# ---------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def cast_tree(
    tree: Any,
    dtype: Any,
    cast_float64: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
    cast_leaf: Callable[[Any, Any], Any] = saturating_cast,
) -> Any:
    """Casts the floating arrays of arguments or results; a finite number stays finite.

    A module among them is not an array. Parameters and cotangents are cast by `cast_floating`.
    """

    def cast_arrays(leaf: Any) -> Any:
        if not isinstance(leaf, _ARRAYS):
            return leaf
        leaf = canonical(leaf) if leaf.dtype == FLOAT64 else leaf
        return cast_leaf(leaf, dtype) if is_castable(leaf, cast_float64) else leaf

    return jax.tree.map(cast_arrays, tree, is_leaf=is_leaf)


_COMPLEX = frozenset(map(np.dtype, ("complex64", "complex128")))


def is_complex(dtype: Any) -> bool:
    """Whether a dtype, or None, is complex."""
    return dtype is not None and np.dtype(dtype) in _COMPLEX


def keeps_dtype(operands: Any, cast_float64: bool, is_leaf: Any = None) -> bool:
    """Whether a Flax layer with these operands computes in its author's dtype.

    Its policy's dtype would drop an imaginary part, or the precision of a float64 that is kept.
    """
    kept = _COMPLEX if cast_float64 else _COMPLEX | {FLOAT64}
    leaves = jax.tree.leaves(operands, is_leaf=is_leaf)
    return any(isinstance(leaf, _ARRAYS) and canonical(leaf).dtype in kept for leaf in leaves)


def cast_like(tree: Any, like: Any, cast_float64: bool = False) -> Any:
    """`tree` in the dtypes of `like` where both have one structure and shapes; else as it is."""
    leaves, structure = jax.tree.flatten(tree)
    models, model_structure = jax.tree.flatten(like)
    if structure != model_structure or list(map(jnp.shape, leaves)) != list(map(jnp.shape, models)):
        return tree
    pairs = zip(leaves, models, strict=True)
    castable = functools.partial(is_castable, cast_float64=cast_float64)
    return structure.unflatten(
        saturating_cast(leaf, model.dtype) if castable(leaf) and castable(model) else leaf
        for leaf, model in pairs
    )


def cast_inputs(
    plan: Plan, method: str, args: Any, kwargs: Any, is_leaf: Any = None
) -> tuple[Any, Any]:
    """Arguments in the dtype that the module computes with; recurrent carries as they came."""
    skipped, name = 0, ""
    if plan.facts.cell and method == "__call__":
        skipped, name = 1, "carry"
    elif plan.facts.rnn:
        name = "initial_carry"
    cast_in = functools.partial(
        cast_tree,
        dtype=plan.input_dtype,
        cast_float64=plan.policy.cast_float64,
        is_leaf=is_leaf,
        cast_leaf=_cast_input,
    )
    kept = plan.kept(method)
    return tuple(
        value if index < skipped or index in kept.positions else cast_in(value)
        for index, value in enumerate(args)
    ), {
        key: value if key == name or key in kept.names else cast_in(value)
        for key, value in kwargs.items()
    }


def _cast_input(leaf: Any, dtype: Any) -> Any:
    """Casts an argument, except what `jit` makes of a Python number: it has no dtype of its own."""
    is_number = jnp.ndim(leaf) == 0 and getattr(leaf, "weak_type", False)
    return leaf if is_number else saturating_cast(leaf, dtype)


def ignores_dtype(plan: Plan) -> bool:
    """Whether a module that returns float32 does not compute as its policy says.

    Norms, layers of Flax and modules that are asked for a wide output return it on purpose.
    """
    facts = plan.facts
    expected = facts.norm or facts.takes_dtype or plan.wide is not None
    return is_16bit(plan.policy.compute_dtype) and not expected


def cast_outputs(plan: Plan, out: Any, is_leaf: Any = None) -> Any:
    """Results in the dtype that the module passes on.

    The output of a norm is at most its scale times the root of its width, which bfloat16 holds:
    there the cast of every residual block stays a single operation.
    """
    bounded = plan.facts.norm and jnp.finfo(plan.output).maxexp >= 128
    cast_leaf = cast if bounded else saturating_cast
    return cast_tree(out, plan.output, plan.policy.cast_float64, is_leaf, cast_leaf)


def split_carry(
    facts: Facts, module: Any, method: str, out: Any, args: Any, kwargs: Any, scanned: bool = False
) -> tuple[Any, Callable[[Any], Any]]:
    """What of `out` is handed on, and how the carry, in its incoming dtypes, is put back.

    A loop needs its carry to keep its dtypes; a recurrent state is kept as precise as it came.
    `scanned`: the module is the body of a scan.
    """
    if type(out) is not tuple or len(out) != 2:
        return out, lambda handed_on: handed_on
    if scanned or (facts.cell and method == "__call__"):
        incoming = args[0] if args else kwargs.get("carry")
        carry = cast_like(out[0], incoming)
        return out[1], lambda handed_on: (carry, handed_on)
    if facts.rnn and _returns_carry(module, kwargs):
        return out[1], lambda handed_on: (out[0], handed_on)
    return out, lambda handed_on: handed_on


def _returns_carry(module: Any, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("return_carry")
    return module.return_carry if asked is None else asked


def written_back(value: Any, read: Any, stored: Any) -> Any:
    """Returns what `stored`, which was read as `read`, becomes when `value` is written.

    Elements that did not change meanwhile keep the precision that `read` does not have.
    """
    if not is_castable(value, True):
        return value
    wide = cast(value, stored.dtype)
    if value.dtype != read.dtype or value.shape != read.shape:
        return wide
    return jnp.where(value == read, stored, wide)


# ---------------------------------------------------------------------------
# Errors of JAX that come from a policy
# ---------------------------------------------------------------------------

_NOTE = "jaxmp: "


def explain_mismatch(
    error: Exception, plan: Plan, path: tuple[str, ...], cls: type, arguments: Mapping[str, Any]
) -> None:
    """Adds a note to an error of JAX in which the 16 bits of a policy meet FP32.

    The note names the module, what it was given in FP32 and the fix.

    Args:
      error: what a method of the module raised.
      plan, path, cls: those of the module.
      arguments: name -> value of what the method received.
    """
    compute, text = plan.policy.compute_dtype, str(error)
    names_both = compute.name in text and "float32" in text
    noted = any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))
    if not (is_16bit(compute) and names_both) or noted:
        return
    name = "/".join(path)
    where = f"the module {name!r}" if path else "the root module"
    lines = [
        f"{_NOTE}this happened in {cls.__name__}, {where}, which computes in {compute} under its "
        f"policy ({plan.policy}); another array is float32."
    ]
    if "carry" in text:
        lines.append(
            "Create the initial carry of the loop in the dtype of what the loop computes: "
            "jnp.zeros(shape, x.dtype), not jnp.zeros(shape)."
        )
    wide = _float32_names(arguments)
    if wide:
        lines.append(
            f"Its arguments hold float32 arrays that are not cast: {', '.join(wide)}. Create them "
            f"in the compute dtype: jnp.zeros(shape, jnp.{compute})."
        )
    rule = f"Rule({f'{name}/**' if path else '**'!r}, 'c=f32')"
    lines.append(f"Or compute this module in float32: {rule}.")
    error.add_note(" ".join(lines))


def _float32_names(arguments: Mapping[str, Any]) -> list[str]:
    """The float32 arrays in arguments, such as `cache[0].k_cache`; at most three."""
    names = [
        name + jax.tree_util.keystr(key_path)
        for name, value in arguments.items()
        for key_path, leaf in jax.tree.leaves_with_path(value)
        if getattr(leaf, "dtype", None) == FLOAT32
    ]
    return names[:3] + ["..."] * (len(names) > 3)


def named_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"args[{index}]": arg for index, arg in enumerate(args)}, **kwargs}


# ---------------------------------------------------------------------------
# Precision of FP32 products
# ---------------------------------------------------------------------------

_PRECISIONS = {"highest": "highest", "tf32": "tensorfloat32"}


def matmul_precision(policy: Policy, default: str | None) -> str | None:
    """What `jax.default_matmul_precision` is set to under a policy."""
    return _PRECISIONS.get(policy.matmul, default)


@contextlib.contextmanager
def precision_scope(precision: str | None, outer: str | None) -> Iterator[None]:
    """Runs a block at `precision`; `outer` is what is set already."""
    if precision == outer:
        yield
    else:
        with jax.default_matmul_precision(precision):
            yield


# ---------------------------------------------------------------------------
# Wide outputs: 16-bit operands, FP32 result
# ---------------------------------------------------------------------------


@functools.cache
def wide_operator(product: Callable[..., Any], wide: np.dtype) -> Callable[..., jax.Array]:
    """`product` that emits `wide`; one object per dtype, so that equal modules stay equal."""

    def operator(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> jax.Array:
        def bound(lhs: Any, rhs: Any, preferred_element_type: Any = None) -> jax.Array:
            return product(lhs, rhs, *args, **kwargs, preferred_element_type=preferred_element_type)

        return wide_product(bound, lhs, rhs, wide)

    return operator
