"""Loss scales (none, static, dynamic): immutable pytrees with FP32 and int32 leaves."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import (
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Protocol,
    Self,
    TypeAlias,
    TypedDict,
    TypeGuard,
    TypeVar,
    Unpack,
    cast,
    final,
    get_args,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._trees import cast_floating, dtype_of, is_inexact
from jaxmp._core._typing import Array, PyTree
from jaxmp.errors import LossScaleError

T = TypeVar("T")
Refill = Literal["growth", "clean"]

# 2**-126. Smaller FP32 numbers are subnormal, and devices may flush them to zero.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
# 2**128 - 2**104.
LARGEST_SCALE = float(np.finfo(np.float32).max)
# The reciprocals of larger numbers are subnormal.
_LARGEST_DIVISOR = 2.0**126
_LARGEST_COUNT = int(np.iinfo(np.int32).max)


# ---------------------------------------------------------------------------
# Base class
# ---------------------------------------------------------------------------


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

    @property
    def loss_scale(self) -> jax.Array:
        """Alias of `scale_value` under the name that jmp uses."""
        return self.scale_value

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
        return self._next(_one_bool(grads_finite))

    def fresh(self) -> Self:
        """Returns an equal loss scale with new arrays: donating one leaves the other valid."""
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self)

    def _next(self, finite: jax.Array) -> Self:
        del finite
        return self

    def with_leaves(self, **attributes: Array) -> Self:
        """Returns this loss scale with other leaves, which are not checked and may be traced."""
        new = object.__new__(type(self))
        vars(new).update(vars(self), **attributes)
        return new

    # Pytree. Unflattening does not validate, because JAX passes placeholder objects through it.

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        keyed = [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in self.LEAVES]
        return tuple(keyed), tuple(getattr(self, n) for n in self.STATIC)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> Self:
        new = object.__new__(cls)
        vars(new).update(zip(cls.LEAVES, leaves, strict=True))
        vars(new).update(zip(cls.STATIC, static, strict=True))
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
        return mine[1] == theirs[1] and all(map(_same, mine[0], theirs[0]))

    # Arrays are not hashable.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in self.LEAVES]
        shown += [f"{name}={getattr(self, name)!r}" for name in self.STATIC]
        return f"{type(self).__name__}({', '.join(shown)})"


# ---------------------------------------------------------------------------
# Loss scales
# ---------------------------------------------------------------------------


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
        return cast_floating(tree, FLOAT32)


class _Scaling(LossScale):
    """Base class of loss scales other than `NoLossScale`."""

    scale_value: jax.Array

    @property
    def ceiling(self) -> float:
        """Largest scale that a step can reach."""
        return LARGEST_SCALE

    def scale(self, tree: T) -> T:
        return jax.tree.map(lambda leaf: _rescale(self._multiply, leaf), tree)

    def unscale(self, tree: T) -> T:
        divide = self._divide if self.ceiling <= _LARGEST_DIVISOR else self._divider_by_large()
        return jax.tree.map(lambda leaf: _rescale(divide, leaf), tree)

    def _multiply(self, x: jax.Array) -> jax.Array:
        return x * self.scale_value.astype(x.dtype)

    def _divide(self, x: jax.Array) -> jax.Array:
        return x / self.scale_value.astype(x.dtype)

    def _divider_by_large(self) -> Callable[[jax.Array], jax.Array]:
        """Returns `_divide` for scales that may exceed 2**126.

        XLA replaces a division by a broadcast scalar with a product by its reciprocal. Above 2**126
        the reciprocal is subnormal, and if subnormals are flushed, every finite gradient would
        become 0. The barrier prevents XLA from combining two known factors into that reciprocal.
        """
        large = lax.gt(self.scale_value, _float32(_LARGEST_DIVISOR))
        shrink = lax.optimization_barrier(lax.select(large, _float32(0.25), _float32(1.0)))
        divisor = lax.mul(self.scale_value, shrink)
        return lambda x: (x * shrink.astype(x.dtype)) / divisor.astype(x.dtype)


@final
@jax.tree_util.register_pytree_with_keys_class
class StaticLossScale(_Scaling):
    """Loss scale that never changes.

    The scale is a leaf, so that a jitted step is not traced again for another value.

    Args:
      loss_scale: the scale: a positive number that is finite in FP32 and at least 2**-126, or a
        scalar array of such a number. Traced values are not checked.

    Raises:
      LossScaleError: if `loss_scale` is not such a number.

    Example:
      >>> StaticLossScale(1024).unscale(jnp.float16(1.0))
      Array(0.00097656, dtype=float32)
    """

    LEAVES = ("scale_value",)

    def __init__(self, loss_scale: ArrayLike) -> None:
        scale = _scale_argument("loss_scale", loss_scale)
        vars(self).update(scale_value=_leaf(scale, jnp.float32))

    def __repr__(self) -> str:
        return f"StaticLossScale(loss_scale={self.scale_value})"


class _Settings(TypedDict, total=False):
    """Settings of `DynamicLossScale` that its presets accept."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    hysteresis_refill: Refill
    first_growth_delay: int


@final
@jax.tree_util.register_pytree_with_keys_class
class DynamicLossScale(_Scaling):
    """Loss scale that grows after a number of finite steps and backs off after an overflow.

    It thereby finds the largest scale that keeps gradients finite. One step, in plain Python
    (`adjust` is the traced form, and agrees with it bit for bit)::

        if grads_finite:
            if hysteresis_refill == "clean":
                hysteresis_left = hysteresis
            if growth_delay_left > 0:
                growth_delay_left -= 1
            else:
                good_steps += 1
                if good_steps == growth_interval:
                    good_steps = 0
                    hysteresis_left = hysteresis
                    grown = scale * growth_factor
                    if isfinite(grown):
                        scale = min(grown, max_scale)
        else:
            good_steps = 0
            growth_delay_left = first_growth_delay
            if hysteresis_left > 1:
                hysteresis_left -= 1
            else:
                scale = max(scale * backoff_factor, min_scale)

    The scale is never 0 and never infinite: without `min_scale` its minimum is 2**-126, and it does
    not grow beyond the range of FP32. Factors are applied in FP32.

    The method is that of Micikevicius et al., "Mixed Precision Training" (2018, arXiv:1710.03740).
    `torch`, `deepspeed`, `megatron`, `keras` and `tensorflow` create loss scales with the settings
    of these frameworks; every argument can be overridden. They have the same sequence of scales as
    the framework while it stays finite and at or above 2**-126: bit for bit if the factors are
    powers of two, as in all defaults, and otherwise up to the rounding of FP32.

    Args:
      init_scale: scale of the first step. Like all scales here, it is a positive number, finite in
        FP32 and at least 2**-126, or a scalar array of such a number. Traced values are not
        checked.
      growth_factor: factor by which the scale grows; above 1.
      backoff_factor: factor by which the scale changes after an overflow; between 0 and 1.
      growth_interval: number of consecutive finite steps after which the scale grows.
      min_scale: minimum scale; None for 2**-126. Default 2**-14, with which the smallest positive
        float16 number, 2**-24, represents a gradient of 2**-10.
      max_scale: maximum scale; None for the largest FP32 number. Default 2**24, as in apex.
      hysteresis: number of overflows since the last refill at which the scale backs off for the
        first time; each further overflow backs off again. 1: at every overflow.
      hysteresis_refill: event at which the count of overflows restarts: "growth" at each
        `growth_interval`, "clean" at each finite step (DeepSpeed's `consecutive_hysteresis`).
      first_growth_delay: number of finite steps that do not count towards `growth_interval`, at
        the start and after each overflow.

    Raises:
      LossScaleError: if an argument is out of its range, or not
        `min_scale <= init_scale <= max_scale`.

    Example:
      >>> loss_scale = DynamicLossScale(1024, growth_interval=2)
      >>> loss_scale = loss_scale.adjust(True).adjust(True)
      >>> float(loss_scale.scale_value), float(loss_scale.adjust(False).scale_value)
      (2048.0, 1024.0)
    """

    LEAVES = ("scale_value", "good_steps", "hysteresis_left", "growth_delay_left")
    STATIC = (
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "min_scale",
        "max_scale",
        "hysteresis",
        "hysteresis_refill",
        "first_growth_delay",
    )

    good_steps: jax.Array
    hysteresis_left: jax.Array
    growth_delay_left: jax.Array
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    hysteresis_refill: Refill
    first_growth_delay: int

    def __init__(
        self,
        init_scale: ArrayLike = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float | None = 2.0**-14,
        max_scale: float | None = 2.0**24,
        hysteresis: int = 1,
        hysteresis_refill: Refill = "growth",
        first_growth_delay: int = 0,
    ) -> None:
        vars(self).update(
            growth_factor=_factor_argument("growth_factor", growth_factor, 1.0, math.inf),
            backoff_factor=_factor_argument("backoff_factor", backoff_factor, 0.0, 1.0),
            growth_interval=_count_argument("growth_interval", growth_interval, 1),
            min_scale=None if min_scale is None else _bound_argument("min_scale", min_scale),
            max_scale=None if max_scale is None else _bound_argument("max_scale", max_scale),
            hysteresis=_count_argument("hysteresis", hysteresis, 1),
            hysteresis_refill=_refill_argument("hysteresis_refill", hysteresis_refill),
            first_growth_delay=_count_argument("first_growth_delay", first_growth_delay, 0),
        )
        scale = _scale_argument("init_scale", init_scale)
        _check_order(self.floor, scale, self.ceiling)
        vars(self).update(
            scale_value=_leaf(scale, jnp.float32),
            good_steps=_leaf(0, jnp.int32),
            hysteresis_left=_leaf(self.hysteresis, jnp.int32),
            growth_delay_left=_leaf(self.first_growth_delay, jnp.int32),
        )

    @property
    def floor(self) -> float:
        """Smallest scale that a step can reach."""
        return SMALLEST_SCALE if self.min_scale is None else self.min_scale

    @property
    def ceiling(self) -> float:
        return LARGEST_SCALE if self.max_scale is None else self.max_scale

    @property
    def at_floor(self) -> jax.Array:
        return self.scale_value <= self.floor

    def _next(self, finite: jax.Array) -> Self:
        counted = lax.select(self._counts(finite), lax.add(self.good_steps, _int32(1)), _int32(0))
        # `>=` rather than `==`: a count restored from a run with a longer interval must still grow.
        grows = lax.ge(counted, _int32(self.growth_interval))
        fallen = lax.select(self._backs_off(finite), self._backed_off(), self.scale_value)
        return self.with_leaves(
            scale_value=lax.select(grows, self._grown(), fallen),
            good_steps=lax.select(grows, _int32(0), counted),
            hysteresis_left=self._next_hysteresis(finite, grows),
            growth_delay_left=self._next_delay(finite),
        )

    def _grown(self) -> jax.Array:
        grown = lax.mul(self.scale_value, _float32(self.growth_factor))
        capped = lax.min(grown, _float32(self.ceiling))
        return lax.select(lax.is_finite(grown), capped, self.scale_value)

    def _backed_off(self) -> jax.Array:
        fallen = lax.mul(self.scale_value, _float32(self.backoff_factor))
        return lax.max(fallen, _float32(self.floor))

    # A counter that the settings do not use stays constant and adds no operation to the program.

    def _counts(self, finite: jax.Array) -> jax.Array:
        if self.first_growth_delay == 0:
            return finite
        return finite & lax.eq(self.growth_delay_left, _int32(0))

    def _next_delay(self, finite: jax.Array) -> jax.Array:
        if self.first_growth_delay == 0:
            return self.growth_delay_left
        one_less = lax.max(lax.sub(self.growth_delay_left, _int32(1)), _int32(0))
        return lax.select(finite, one_less, _int32(self.first_growth_delay))

    def _backs_off(self, finite: jax.Array) -> jax.Array:
        if self.hysteresis == 1:
            return ~finite
        return ~finite & lax.le(self.hysteresis_left, _int32(1))

    def _next_hysteresis(self, finite: jax.Array, grows: jax.Array) -> jax.Array:
        if self.hysteresis == 1:
            return self.hysteresis_left
        one_less = lax.max(lax.sub(self.hysteresis_left, _int32(1)), _int32(1))
        left = lax.select(finite, self.hysteresis_left, one_less)
        refills = finite if self.hysteresis_refill == "clean" else grows
        return lax.select(refills, _int32(self.hysteresis), left)

    # Presets, with the settings in `_FRAMEWORKS`.

    @classmethod
    def torch(cls, init_scale: ArrayLike = 2.0**16, **overrides: Unpack[_Settings]) -> Self:
        """Creates the loss scale of `torch.amp.GradScaler`, Accelerate and Lightning: no bounds.

        Args:
          init_scale: as in `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("torch", overrides))

    @classmethod
    def deepspeed(cls, init_scale: ArrayLike = 2.0**16, **overrides: Unpack[_Settings]) -> Self:
        """Creates DeepSpeed's loss scale under ZeRO: interval 1000, minimum 1, hysteresis 2.

        One finite step is not counted, at the start and after each overflow.
        `DynamicLossScale.deepspeed(hysteresis_refill="clean")` is `consecutive_hysteresis`.

        Args:
          init_scale: as in `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("deepspeed", overrides))

    @classmethod
    def megatron(cls, init_scale: ArrayLike = 2.0**32, **overrides: Unpack[_Settings]) -> Self:
        """Creates Megatron-LM's `DynamicGradScaler`: interval 1000, minimum 1, hysteresis 2.

        Args:
          init_scale: as in `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("megatron", overrides))

    @classmethod
    def keras(cls, init_scale: ArrayLike = 2.0**15, **overrides: Unpack[_Settings]) -> Self:
        """Creates the loss scale of Keras 3's `LossScaleOptimizer`: interval 2000, no bounds.

        Args:
          init_scale: as in `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("keras", overrides))

    @classmethod
    def tensorflow(cls, init_scale: ArrayLike = 2.0**15, **overrides: Unpack[_Settings]) -> Self:
        """Creates TensorFlow's `DynamicLossScale`: interval 2000, minimum 1.

        Args:
          init_scale: as in `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("tensorflow", overrides))


# Settings of each framework besides the initial scale. All use the factors 2 and 0.5.
_FRAMEWORKS: dict[str, dict[str, Any]] = {
    "torch": {"growth_interval": 2000, "min_scale": None},
    "deepspeed": {
        "growth_interval": 1000,
        "min_scale": 1.0,
        "hysteresis": 2,
        "hysteresis_refill": "growth",
        "first_growth_delay": 1,
    },
    "megatron": {
        "growth_interval": 1000,
        "min_scale": 1.0,
        "hysteresis": 2,
        "hysteresis_refill": "growth",
    },
    "keras": {"growth_interval": 2000, "min_scale": None},
    "tensorflow": {"growth_interval": 2000, "min_scale": 1.0},
}


def _preset(framework: str, overrides: _Settings) -> dict[str, Any]:
    doubling = {"growth_factor": 2.0, "backoff_factor": 0.5, "max_scale": None}
    return {**doubling, **_FRAMEWORKS[framework], **overrides}


# ---------------------------------------------------------------------------
# Conversion
# ---------------------------------------------------------------------------


class JmpLossScale(Protocol):
    """Loss scale of jmp, or of another library with the same attribute."""

    @property
    def loss_scale(self) -> Any: ...


# Values that `as_loss_scale` accepts.
LossScaleLike: TypeAlias = LossScale | JmpLossScale | ArrayLike | None


def as_loss_scale(value: LossScaleLike) -> LossScale:
    """Converts a value to a loss scale.

    Args:
      value: a loss scale; None for no scaling; a number for a static loss scale; or one of jmp's
        three loss scales, with its state (jmp's `counter` becomes `good_steps`).

    Returns:
      The loss scale; `value` itself if it is a loss scale of jaxmp.

    Raises:
      LossScaleError: for any other value.

    Example:
      >>> as_loss_scale(None)
      NoLossScale()
    """
    if isinstance(value, LossScale):
        return value
    if value is None:
        return NoLossScale()
    if _is_number(value):
        return StaticLossScale(cast(ArrayLike, value))
    if (converted := _from_jmp(value)) is not None:
        return converted
    raise LossScaleError(
        f"{value!r} is not a loss scale. Allowed: None, a positive number, NoLossScale(), "
        "StaticLossScale(1024), DynamicLossScale(), or a loss scale of jmp; "
        "for example DynamicLossScale(init_scale=65536)."
    )


def _from_jmp(value: Any) -> LossScale | None:
    """Converts a jmp loss scale, recognized by its class name, as jmp need not be installed."""
    names = {base.__name__ for base in type(value).__mro__}
    if "NoOpLossScale" in names:
        return NoLossScale()
    if "StaticLossScale" in names and hasattr(value, "loss_scale"):
        return StaticLossScale(value.loss_scale)
    if "DynamicLossScale" in names and hasattr(value, "min_loss_scale"):
        return _from_jmp_dynamic(value)
    return None


def _from_jmp_dynamic(value: Any) -> DynamicLossScale:
    converted = DynamicLossScale(
        value.loss_scale,
        growth_factor=value.factor,
        backoff_factor=1 / value.factor,
        growth_interval=value.period,
        min_scale=value.min_loss_scale,
        max_scale=None,
    )
    return converted.with_leaves(good_steps=_leaf(value.counter, jnp.int32))


# ---------------------------------------------------------------------------
# Leaves
# ---------------------------------------------------------------------------


def _leaf(value: ArrayLike, dtype: DTypeLike) -> jax.Array:
    return jnp.array(value, dtype, copy=True)


def _int32(value: int) -> jax.Array:
    return lax.full((), value, jnp.int32)


def _float32(value: float) -> jax.Array:
    return lax.full((), value, jnp.float32)


def _same(a: ArrayLike, b: ArrayLike) -> bool:
    return a is b or bool(np.array_equal(a, b))


def _rescale(rescale: Callable[[jax.Array], jax.Array], leaf: PyTree) -> PyTree:
    """Applies `rescale` in FP32 or wider to a floating leaf, or to both parts of a complex one."""
    if isinstance(leaf, float) and dtype_of(leaf) is None:
        leaf = jnp.float32(leaf)
    if not is_inexact(leaf):
        return leaf
    wide = jnp.asarray(cast_floating(leaf, FLOAT32))
    if jnp.iscomplexobj(wide):
        return lax.complex(rescale(wide.real), rescale(wide.imag))
    return rescale(wide)


def _one_bool(value: object) -> jax.Array:
    if isinstance(value, bool) or (_is_scalar(value) and dtype_of(value) == np.bool_):
        return jnp.asarray(value)
    raise LossScaleError(
        f"adjust(grads_finite={value!r}): grads_finite must be one bool, or a bool array of "
        "shape (). Reduce flags with loss_scale.adjust(jnp.all(flags)); turn a 0/1 number into "
        "a bool with loss_scale.adjust(number != 0); batched loss scales need jax.vmap."
    )


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------

_SCALE = "a positive number, finite in FP32 and at least 2**-126"

# Argument -> a valid call, shown in error messages.
_RIGHT_CALL = {
    "loss_scale": "StaticLossScale(1024)",
    "init_scale": "DynamicLossScale(init_scale=65536)",
    "growth_factor": "DynamicLossScale(growth_factor=2.0)",
    "backoff_factor": "DynamicLossScale(backoff_factor=0.5)",
    "growth_interval": "DynamicLossScale(growth_interval=2000)",
    "min_scale": "DynamicLossScale(min_scale=2**-14)",
    "max_scale": "DynamicLossScale(max_scale=2**24)",
    "hysteresis": "DynamicLossScale(hysteresis=2)",
    "hysteresis_refill": "DynamicLossScale(hysteresis_refill='clean')",
    "first_growth_delay": "DynamicLossScale(first_growth_delay=1)",
}


def _is_number(value: object) -> bool:
    """Returns True if `value` is a single real number, traced or not, and not a bool."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    kind = dtype_of(value) if _is_scalar(value) else None
    return kind is not None and any(jnp.issubdtype(kind, k) for k in (jnp.floating, jnp.integer))


def _is_scalar(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.shape == ()


def _is_traced(value: object) -> TypeGuard[Tracer]:
    return isinstance(value, Tracer)


def _fp32(value: Any) -> float:
    """Rounds `value` to FP32; returns NaN if it is not a concrete number."""
    if not _is_number(value) or _is_traced(value):
        return math.nan
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:
        return math.inf


def _scale_argument(name: str, value: ArrayLike) -> float | jax.Array:
    """Returns a scale as an FP32 number; a traced scale is returned unchanged."""
    if _is_number(value) and _is_traced(value):
        return value
    return _bound_argument(name, value)


def _bound_argument(name: str, value: object) -> float:
    number = _fp32(value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise _refusal(name, value, _SCALE)
    return number


def _factor_argument(name: str, value: float, low: float, high: float) -> float:
    if not low < _fp32(value) < high:
        raise _refusal(name, value, f"a plain number that FP32 holds between {low} and {high}")
    return float(value)


def _count_argument(name: str, value: int, least: int) -> int:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not least <= value <= _LARGEST_COUNT:
        raise _refusal(name, value, f"an int from {least} to 2**31 - 1")
    return int(value)


def _refill_argument(name: str, value: Refill) -> Refill:
    if not isinstance(value, str) or value not in get_args(Refill):
        raise _refusal(name, value, " or ".join(map(repr, get_args(Refill))))
    return value


def _refusal(name: str, value: object, allowed: str) -> LossScaleError:
    right = _RIGHT_CALL[name]
    return LossScaleError(
        f"{right.partition('(')[0]}({name}={value!r}): {name} must be {allowed}; "
        f"for example {right}."
    )


def _check_order(low: float, init: float | jax.Array, high: float) -> None:
    inside = () if _is_traced(init) else (init,)
    if [low, *inside, high] == sorted([low, *inside, high]):
        return
    start = "".join(f"init_scale={value!r}, " for value in inside)
    widest = (low, *inside, high)
    raise LossScaleError(
        f"DynamicLossScale({start}min_scale={low!r}, max_scale={high!r}): "
        "min_scale <= init_scale <= max_scale must hold; for example "
        f"DynamicLossScale({start}min_scale={min(widest)!r}, max_scale={max(widest)!r})."
    )
