"""Base class of loss scales: an immutable pytree with FP32 and int32 leaves."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp

from jaxmp._core._typing import Array
from jaxmp._loss_scale._arguments import check_bool
from jaxmp._loss_scale._leaves import is_equal

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
        return self._next(check_bool(grads_finite))

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
        return mine[1] == theirs[1] and all(map(is_equal, mine[0], theirs[0]))

    # Arrays are not hashable.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in self.LEAVES]
        shown += [f"{name}={getattr(self, name)!r}" for name in self.STATIC]
        return f"{type(self).__name__}({', '.join(shown)})"
