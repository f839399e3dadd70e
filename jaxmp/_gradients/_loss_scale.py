"""Base class of loss scales, an immutable pytree with FP32 and int32 leaves, and its arguments."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

import jaxmp
from jaxmp import _core
from jaxmp._core import Array, Mark, PyTree
from jaxmp._gradients._hints import note_scaled
from jaxmp.errors import LossScaleError

Refill = Literal["growth", "clean"]

# FP32 numbers below, and the reciprocals of those above, are subnormal, and devices may flush them
# to zero.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126
_LARGEST_COUNT = int(np.iinfo(np.int32).max)

_SCALE = "a number from 2**-126 to 2**126"


def new_leaf(value: ArrayLike, dtype: DTypeLike) -> jax.Array:
    return jnp.array(value, dtype, copy=True)


def int32(value: int) -> jax.Array:
    return lax.full((), value, jnp.int32)


def float32(value: float) -> jax.Array:
    return lax.full((), value, jnp.float32)


def is_equal(a: ArrayLike, b: ArrayLike) -> bool:
    return a is b or bool(np.array_equal(a, b))


def rescale_leaf(rescale: Callable[[jax.Array], jax.Array], leaf: PyTree) -> PyTree:
    """Applies `rescale` in FP32 or wider to a floating leaf, or to both parts of a complex one."""
    if isinstance(leaf, float) and _core.dtype_of(leaf) is None:
        leaf = jnp.float32(leaf)
    if not _core.is_inexact(leaf):
        return leaf
    wide = jnp.asarray(_core.cast_floating(leaf, _core.FLOAT32))
    if jnp.iscomplexobj(wide):
        return lax.complex(rescale(wide.real), rescale(wide.imag))
    return rescale(wide)


T = TypeVar("T")


class LossScale(abc.ABC):
    """Base class of `NoLossScale`, `StaticLossScale` and `DynamicLossScale`.

    Every subclass is an immutable pytree. Its leaves are strongly typed arrays from the first step
    on, so that a jitted step is traced only once. Its settings are plain Python numbers, static
    under jit. `==` compares settings and leaves.
    """

    # Names of the attributes that are leaves, and of those that are static.
    LEAVES: ClassVar[tuple[str, ...]] = ()
    STATIC: ClassVar[tuple[str, ...]] = ()

    scale_value: Any
    # Static; that of the optimizer whose state contains the loss scale.
    _mark = Mark()

    @property
    def at_floor(self) -> jax.Array:
        """True if the scale has reached its minimum: a bool scalar array."""
        return jnp.array(False)

    @abc.abstractmethod
    def scale(self, tree: T) -> T:
        """Multiplies the floating and complex leaves of `tree` by the scale.

        Args:
          tree: any pytree; usually a loss. float16 and bfloat16 leaves are returned in float32,
            where the product does not overflow; float64 and complex leaves keep their dtype.
            Integers, bools, PRNG keys, float0, FP8 arrays, strings and None are returned unchanged.

        Returns:
          A tree of the same structure.
        """

    @abc.abstractmethod
    def unscale(self, tree: T) -> T:
        """Divides the floating and complex leaves of `tree` by the scale.

        The division is in float32 (float64 for float64). It is exact if the scale is a power of two
        and the quotient is a normal number. For any other scale, compiled code may differ from true
        division by one rounding, because XLA multiplies by the reciprocal.

        Args:
          tree: any pytree; usually gradients. Leaves are treated as in `scale`.

        Returns:
          A tree of the same structure.
        """

    def adjust(self, grads_finite: bool | jax.Array) -> Self:
        """Returns the loss scale for the next step.

        Args:
          grads_finite: True if all gradients of this step were finite on all devices: a bool, or a
            bool array of shape `()`.

        Returns:
          A loss scale of the same type and settings.

        Raises:
          LossScaleError: if `grads_finite` is not a single bool.
        """
        return self._next(check_bool(grads_finite))

    def fresh(self) -> Self:
        """Returns an equal loss scale with new arrays: donating one leaves the other valid."""
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self)

    def _next(self, finite: jax.Array) -> Self:
        del finite
        return self

    def with_leaves(self, **attributes: Array | Mark) -> Self:
        """Returns this loss scale with other leaves, which are not checked and may be traced."""
        new = object.__new__(type(self))
        vars(new).update(vars(self), **attributes)
        return new

    # Pytree. Unflattening does not validate, because JAX passes placeholder objects through it.

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        keyed = [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in self.LEAVES]
        return tuple(keyed), tuple(getattr(self, n) for n in (*self.STATIC, "_mark"))

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> Self:
        new = object.__new__(cls)
        vars(new).update(zip(cls.LEAVES, leaves, strict=True))
        vars(new).update(zip((*cls.STATIC, "_mark"), static, strict=True))
        return new

    # Value semantics.

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._refuse_change(name, "set")

    def __delattr__(self, name: str) -> NoReturn:
        self._refuse_change(name, "deleted")

    def _refuse_change(self, name: str, change: str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} is immutable, so {name} cannot be {change}. Take the next one "
            "from loss_scale = loss_scale.adjust(grads_finite), or build a new one."
        )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = jax.tree.flatten(self), jax.tree.flatten(other)
        return mine[1] == theirs[1] and all(map(is_equal, mine[0], theirs[0]))

    # Arrays are not hashable.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in self.LEAVES]
        shown += [f"{name}={getattr(self, name)!r}" for name in self.STATIC]
        return f"{type(self).__name__}({', '.join(shown)})"


@final
@jax.tree_util.register_pytree_with_keys_class
class NoLossScale(LossScale):
    """Null loss scale, with which one training step works for every precision.

    Example:
      >>> loss = jnp.float16(2.0)
      >>> NoLossScale().scale(loss) is loss
      True
    """

    @property
    def scale_value(self) -> jax.Array:
        """1.0 as a float32 scalar array."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Casts the float16 and bfloat16 leaves of `tree` to float32, as every loss scale does."""
        return _core.cast_floating(tree, _core.FLOAT32)


class Scaling(LossScale):
    """Base class of loss scales other than `NoLossScale`."""

    scale_value: jax.Array

    def scale(self, tree: T) -> T:
        note_scaled(tree)
        multiply = lambda x: x * self.scale_value.astype(x.dtype)
        return jax.tree.map(functools.partial(rescale_leaf, multiply), tree)

    def unscale(self, tree: T) -> T:
        divide = lambda x: x / self.scale_value.astype(x.dtype)
        return jax.tree.map(functools.partial(rescale_leaf, divide), tree)


@final
@jax.tree_util.register_pytree_with_keys_class
class StaticLossScale(Scaling):
    """Loss scale that never changes.

    The scale is a leaf, so that a jitted step is not traced again for another value.

    Args:
      loss_scale: the scale: a number from 2**-126 to 2**126, or a scalar array of such a number.
        Traced values are not checked.

    Raises:
      LossScaleError: if `loss_scale` is not such a number.

    Example:
      >>> StaticLossScale(1024).unscale(jnp.float16(1.0))
      Array(0.00097656, dtype=float32)
    """

    LEAVES = ("scale_value",)

    def __init__(self, loss_scale: ArrayLike) -> None:
        scale = check_scale("loss_scale", loss_scale)
        vars(self).update(scale_value=new_leaf(scale, jnp.float32))

    def __repr__(self) -> str:
        return f"StaticLossScale(loss_scale={self.scale_value})"


def differentiable(fn: Callable[..., PyTree], **options: Any) -> Callable[..., PyTree]:
    """Returns a loss whose derivatives `value_and_grad` computes, for code that differentiates it.

    Args:
      fn: function that returns a scalar loss; its first argument is differentiated.
      **options: keyword arguments of `value_and_grad`, such as `loss_scale`.
    """

    @functools.wraps(fn)
    def loss_fn(params: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        run = jaxmp.value_and_grad(lambda params: fn(params, *args, **kwargs), **options)
        loss_of = jax.custom_jvp(lambda params: run(params)[0])

        @loss_of.defjvp
        def jvp(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[jax.Array, jax.Array]:
            loss, grads = run(*primals)
            terms = jax.tree.map(lambda g, t: (g * t.astype(g.dtype)).sum(), grads, tangents[0])
            return loss, jax.tree.reduce(jnp.add, terms).real

        return loss_of(params)

    return loss_fn


# ---------------------------------------------------------------------------
# Checks of arguments
# ---------------------------------------------------------------------------


def is_number(value: object) -> bool:
    """Returns True if `value` is a single real number, traced or not, and not a bool."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    kind = _core.dtype_of(value) if _is_scalar(value) else None
    return kind is not None and any(jnp.issubdtype(kind, k) for k in (jnp.floating, jnp.integer))


def _is_scalar(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.shape == ()


def _fp32(value: Any) -> float:
    """Rounds `value` to FP32; returns NaN if it is not a concrete number."""
    if not is_number(value) or isinstance(value, Tracer):
        return math.nan
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:
        return math.inf


def check_scale(name: str, value: ArrayLike) -> float | jax.Array:
    """Returns a scale as an FP32 number; a traced scale is returned unchanged."""
    if is_number(value) and isinstance(value, Tracer):
        return value
    return check_bound(name, value)


def check_bound(name: str, value: object) -> float:
    number = _fp32(value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise _refusal(name, value, _SCALE, 65536.0)
    return number


def check_factor(name: str, value: float, low: float, high: float) -> float:
    if not low < _fp32(value) < high:
        allowed = f"a number between {low} and {high} after rounding to FP32"
        raise _refusal(name, value, allowed, (low + min(high, low + 2)) / 2)
    return float(value)


def check_count(name: str, value: int, least: int) -> int:
    if not _core.is_integer(value, least) or value > _LARGEST_COUNT:
        raise _refusal(name, value, f"an int from {least} to 2**31 - 1", least + 1)
    return int(value)


def check_refill(name: str, value: Refill) -> Refill:
    if not isinstance(value, str) or value not in get_args(Refill):
        raise _refusal(name, value, " or ".join(map(repr, get_args(Refill))), "clean")
    return value


def _refusal(name: str, value: object, allowed: str, example: object) -> LossScaleError:
    cls = "StaticLossScale" if name == "loss_scale" else "DynamicLossScale"
    return LossScaleError(
        f"{cls}({name}={value!r}): {name} must be {allowed}; for example {cls}({name}={example!r})."
    )


def check_order(low: float, init: float | jax.Array, high: float) -> None:
    inside = () if isinstance(init, Tracer) else (init,)
    values = [low, *inside, high]
    if values == sorted(values):
        return
    start = "".join(f"init_scale={value!r}, " for value in inside)
    raise LossScaleError(
        f"DynamicLossScale({start}min_scale={low!r}, max_scale={high!r}): "
        "the condition is min_scale <= init_scale <= max_scale; for example "
        f"DynamicLossScale({start}min_scale={min(values)!r}, max_scale={max(values)!r})."
    )


def check_bool(value: object) -> jax.Array:
    if isinstance(value, bool) or (_is_scalar(value) and _core.dtype_of(value) == np.bool_):
        return jnp.asarray(value)
    raise LossScaleError(
        f"adjust(grads_finite={value!r}): grads_finite must be a single bool, or a bool array of "
        "shape (). Reduce flags with loss_scale.adjust(jnp.all(flags)); convert a 0/1 number to "
        "a bool with loss_scale.adjust(number != 0); batched loss scales need jax.vmap."
    )
