"""Loss scales: none, static and dynamic, each an immutable pytree of FP32 and int32 leaves."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxmp._dtypes import FLOAT32
from jaxmp._trees import cast_floating, dtype_of, is_inexact
from jaxmp.errors import LossScaleError

T = TypeVar("T")
Refill = Literal["growth", "clean"]

# 2**-126. Below it FP32 is subnormal, and devices may flush it to zero.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
# 2**128 - 2**104.
LARGEST_SCALE = float(np.finfo(np.float32).max)
# The reciprocal of a larger one is subnormal.
_LARGEST_DIVISOR = 2.0**126
_LARGEST_COUNT = int(np.iinfo(np.int32).max)


# ---------------------------------------------------------------------------
# What the three have in common
# ---------------------------------------------------------------------------


class LossScale(abc.ABC):
    """A loss scale: what `NoLossScale`, `StaticLossScale` and `DynamicLossScale` have in common.

    Every subclass is an immutable pytree. Its leaves are strong-typed arrays from the first step
    on, so a jitted step is traced once; its settings are plain Python numbers, static under jit.
    `==` compares settings and leaves.
    """

    # Names of the attributes that are leaves, and of those that are static.
    LEAVES: ClassVar[tuple[str, ...]] = ()
    STATIC: ClassVar[tuple[str, ...]] = ()

    scale_value: Any

    @property
    def loss_scale(self) -> jax.Array:
        """`scale_value`, under the name that jmp gives it."""
        return self.scale_value

    @property
    def at_floor(self) -> jax.Array:
        """Whether the scale can fall no further: a bool scalar array."""
        return jnp.array(False)

    @abc.abstractmethod
    def scale(self, tree: T) -> T:
        """Multiplies the floating and complex leaves of `tree` by the scale.

        Args:
          tree: any pytree; usually a loss. Its float16 and bfloat16 leaves come back in float32,
            where the product does not overflow; float64 and complex leaves keep their dtype. Ints,
            bools, PRNG keys, float0, FP8 arrays, strings and None are handed through.

        Returns:
          A tree of the same structure.
        """

    @abc.abstractmethod
    def unscale(self, tree: T) -> T:
        """Divides the floating and complex leaves of `tree` by the scale.

        In float32, and exact for a scale that is a power of two wherever the quotient is a normal
        number. For any other scale compiled code may differ from true division by one rounding:
        XLA multiplies by the reciprocal.

        Args:
          tree: any pytree; usually gradients. Leaves are treated as by `scale`.

        Returns:
          A tree of the same structure.
        """

    def adjust(self, grads_finite: Any) -> Self:
        """The loss scale for the next step.

        Args:
          grads_finite: whether every gradient of this step was finite, on every device: a bool,
            or a bool array of shape `()`.

        Returns:
          A loss scale of the same type and settings.

        Raises:
          LossScaleError: if `grads_finite` is not one bool.
        """
        return self._next(_one_bool(grads_finite))

    def fresh(self) -> Self:
        """An equal loss scale in new arrays: donating one leaves the other alive."""
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self)

    def _next(self, finite: jax.Array) -> Self:
        del finite
        return self

    def with_leaves(self, **attributes: Any) -> Self:
        """The same loss scale with other leaves, which are not checked and may be traced."""
        new = object.__new__(type(self))
        vars(new).update(vars(self), **attributes)
        return new

    # Pytree. Unflatten checks nothing: JAX passes placeholders through it.

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

    def __setattr__(self, name: str, value: Any) -> NoReturn:
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
# The three
# ---------------------------------------------------------------------------


@final
@jax.tree_util.register_pytree_with_keys_class
class NoLossScale(LossScale):
    """No scaling: the null object, so that one training step serves every precision.

    Example:
      >>> loss = jnp.float16(2.0)
      >>> NoLossScale().scale(loss) is loss
      True
    """

    @property
    def scale_value(self) -> jax.Array:
        """1.0: a float32 scalar array."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: T) -> T:
        """`tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """`tree` with its float16 and bfloat16 leaves in float32, as from every loss scale."""
        return cast_floating(tree, FLOAT32)


class _Scaling(LossScale):
    """A loss scale that has a scale."""

    scale_value: jax.Array

    @property
    def ceiling(self) -> float:
        """The largest scale that a step can reach."""
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
        """`_divide` for scales that may lie above 2**126.

        XLA replaces a division by a broadcast scalar with a product by its reciprocal. Above 2**126
        that is subnormal, and where subnormals are flushed every finite gradient would become 0.
        The barrier keeps XLA from joining two factors that it knows into that reciprocal.
        """
        large = lax.gt(self.scale_value, _float32(_LARGEST_DIVISOR))
        shrink = lax.optimization_barrier(lax.select(large, _float32(0.25), _float32(1.0)))
        divisor = lax.mul(self.scale_value, shrink)
        return lambda x: (x * shrink.astype(x.dtype)) / divisor.astype(x.dtype)


@final
@jax.tree_util.register_pytree_with_keys_class
class StaticLossScale(_Scaling):
    """A scale that never changes. It is a leaf: another value does not trace a step again.

    Args:
      scale_value: the scale: a positive number that is finite in FP32 and at least 2**-126, or a
        scalar array of one. A traced value is taken unchecked.

    Raises:
      LossScaleError: if `scale_value` is no such number.

    Example:
      >>> StaticLossScale(1024).unscale(jnp.float16(1.0))
      Array(0.00097656, dtype=float32)
    """

    LEAVES = ("scale_value",)

    def __init__(self, scale_value: Any) -> None:
        scale = _scale_argument("scale_value", scale_value)
        vars(self).update(scale_value=_leaf(scale, jnp.float32))


@final
@jax.tree_util.register_pytree_with_keys_class
class DynamicLossScale(_Scaling):
    """The largest scale that keeps gradients finite, found by trying.

    One step, in plain Python (`adjust` is the traced form, and agrees with it bit for bit)::

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

    The scale is never 0 and never infinite: without a `min_scale` the floor is 2**-126, and
    a growth that FP32 cannot hold is refused. Factors act in FP32.

    The idea is that of Micikevicius et al., "Mixed Precision Training" (2018, arXiv:1710.03740).
    `torch`, `deepspeed`, `megatron`, `keras` and `tensorflow` start from the numbers of one
    framework each and take every argument as an override. They go through that framework's own
    sequence of scales as long as it stays finite and at or above 2**-126: to the bit where the
    factors are powers of two, as all their defaults are, and within FP32's rounding elsewhere.

    Args:
      init_scale: the scale of the first step. Like every scale here a positive number, finite in
        FP32 and at least 2**-126, or a scalar array of one. A traced one is taken unchecked.
      growth_factor: what the scale is multiplied by when it grows; above 1.
      backoff_factor: what it is multiplied by after an overflow; between 0 and 1.
      growth_interval: clean steps in a row after which it grows.
      min_scale: the floor; None for 2**-126. Default 2**-14: with it the smallest scaled value
        that float16 holds, 2**-24, stands for a gradient of 2**-10.
      max_scale: the ceiling; None for none but FP32's own. Default 2**24, as in apex.
      hysteresis: the overflow, counting from the last refill, at which the scale first backs off;
        each further one backs off again. 1: at every overflow.
      hysteresis_refill: when the count starts anew: "growth" at each `growth_interval`,
        "clean" at each clean step (DeepSpeed's `consecutive_hysteresis`).
      first_growth_delay: clean steps that are not counted, at the start and after each overflow.

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
        init_scale: Any = 2.0**16,
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
        """The smallest scale that a step can reach."""
        return SMALLEST_SCALE if self.min_scale is None else self.min_scale

    @property
    def ceiling(self) -> float:
        return LARGEST_SCALE if self.max_scale is None else self.max_scale

    @property
    def at_floor(self) -> jax.Array:
        return self.scale_value <= self.floor

    def _next(self, finite: jax.Array) -> Self:
        counted = lax.select(self._counts(finite), lax.add(self.good_steps, _int32(1)), _int32(0))
        # Not equality: a count restored from a run with a longer interval must still grow.
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

    # A counter that the settings leave unused stands still and adds no operation to a program.

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

    # Presets: the numbers are in `_FRAMEWORKS`.

    @classmethod
    def torch(cls, init_scale: Any = 2.0**16, **overrides: Any) -> Self:
        """As `torch.amp.GradScaler`, and so Accelerate and Lightning: no bounds of its own.

        Args:
          init_scale: as for `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("torch", overrides))

    @classmethod
    def deepspeed(cls, init_scale: Any = 2.0**16, **overrides: Any) -> Self:
        """As DeepSpeed under ZeRO: interval 1000, floor 1, hysteresis 2, one step of delay.

        `DynamicLossScale.deepspeed(hysteresis_refill="clean")` is `consecutive_hysteresis`.

        Args:
          init_scale: as for `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("deepspeed", overrides))

    @classmethod
    def megatron(cls, init_scale: Any = 2.0**32, **overrides: Any) -> Self:
        """As Megatron-LM's `DynamicGradScaler`: interval 1000, floor 1, hysteresis 2.

        Args:
          init_scale: as for `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("megatron", overrides))

    @classmethod
    def keras(cls, init_scale: Any = 2.0**15, **overrides: Any) -> Self:
        """As Keras 3's `LossScaleOptimizer`: interval 2000, no bounds of its own.

        Args:
          init_scale: as for `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("keras", overrides))

    @classmethod
    def tensorflow(cls, init_scale: Any = 2.0**15, **overrides: Any) -> Self:
        """As TensorFlow's `DynamicLossScale`: interval 2000, floor 1.

        Args:
          init_scale: as for `DynamicLossScale`.
          **overrides: any other argument of `DynamicLossScale`.
        """
        return cls(init_scale, **_preset("tensorflow", overrides))


# What a framework sets besides the first scale. All of them double and halve.
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


def _preset(framework: str, overrides: dict[str, Any]) -> dict[str, Any]:
    doubling = {"growth_factor": 2.0, "backoff_factor": 0.5, "max_scale": None}
    return {**doubling, **_FRAMEWORKS[framework], **overrides}


# ---------------------------------------------------------------------------
# Whatever stands for a loss scale
# ---------------------------------------------------------------------------


def as_loss_scale(value: Any) -> LossScale:
    """Turns whatever stands for a loss scale into one.

    Args:
      value: a loss scale; None for no scaling; a number for a static one; or one of jmp's three
        loss scales, whose state is kept (jmp's `counter` becomes `good_steps`).

    Returns:
      The same object if it is a loss scale of jaxmp.

    Raises:
      LossScaleError: for anything else.

    Example:
      >>> as_loss_scale(None)
      NoLossScale()
    """
    if isinstance(value, LossScale):
        return value
    if value is None:
        return NoLossScale()
    if _is_number(value):
        return StaticLossScale(value)
    if (converted := _from_jmp(value)) is not None:
        return converted
    raise LossScaleError(
        f"{value!r} is not a loss scale. Allowed: None, a positive number, NoLossScale(), "
        "StaticLossScale(1024), DynamicLossScale(), or a loss scale of jmp; "
        "for example DynamicLossScale(init_scale=65536)."
    )


def _from_jmp(value: Any) -> LossScale | None:
    """One of jmp's loss scales, known by its class's name: jmp need not be installed."""
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


def _leaf(value: Any, dtype: Any) -> jax.Array:
    return jnp.array(value, dtype, copy=True)


def _int32(value: int) -> jax.Array:
    return lax.full((), value, jnp.int32)


def _float32(value: float) -> jax.Array:
    return lax.full((), value, jnp.float32)


def _same(a: Any, b: Any) -> bool:
    return a is b or bool(np.array_equal(a, b))


def _rescale(rescale: Callable[[jax.Array], jax.Array], leaf: Any) -> Any:
    """`rescale` on a floating leaf, in FP32 or wider, and on both parts of a complex one."""
    if isinstance(leaf, float) and dtype_of(leaf) is None:
        leaf = jnp.float32(leaf)
    if not is_inexact(leaf):
        return leaf
    wide = jnp.asarray(cast_floating(leaf, FLOAT32))
    if jnp.iscomplexobj(wide):
        return lax.complex(rescale(wide.real), rescale(wide.imag))
    return rescale(wide)


def _one_bool(value: Any) -> jax.Array:
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

# Argument -> a call in which it is right, shown by messages.
_RIGHT_CALL = {
    "scale_value": "StaticLossScale(1024)",
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


def _is_number(value: Any) -> bool:
    """Whether `value` is one real number, traced or not; a bool is none."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    kind = dtype_of(value) if _is_scalar(value) else None
    return kind is not None and any(jnp.issubdtype(kind, k) for k in (jnp.floating, jnp.integer))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) and value.shape == ()


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)


def _fp32(value: Any) -> float:
    """`value` rounded to FP32; NaN for whatever is not a concrete number."""
    if not _is_number(value) or _is_traced(value):
        return math.nan
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:
        return math.inf


def _scale_argument(name: str, value: Any) -> Any:
    """An FP32 scale as a float; a traced one as it is."""
    if _is_number(value) and _is_traced(value):
        return value
    return _bound_argument(name, value)


def _bound_argument(name: str, value: Any) -> float:
    number = _fp32(value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise _refusal(name, value, _SCALE)
    return number


def _factor_argument(name: str, value: Any, low: float, high: float) -> float:
    if not low < _fp32(value) < high:
        raise _refusal(name, value, f"a plain number that FP32 holds between {low} and {high}")
    return float(value)


def _count_argument(name: str, value: Any, least: int) -> int:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not least <= value <= _LARGEST_COUNT:
        raise _refusal(name, value, f"an int from {least} to 2**31 - 1")
    return int(value)


def _refill_argument(name: str, value: Any) -> Any:
    if not isinstance(value, str) or value not in get_args(Refill):
        raise _refusal(name, value, " or ".join(map(repr, get_args(Refill))))
    return value


def _refusal(name: str, value: Any, allowed: str) -> LossScaleError:
    right = _RIGHT_CALL[name]
    return LossScaleError(
        f"{right.partition('(')[0]}({name}={value!r}): {name} must be {allowed}; "
        f"for example {right}."
    )


def _check_order(low: float, init: Any, high: float) -> None:
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
