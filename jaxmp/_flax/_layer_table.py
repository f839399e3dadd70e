"""Table of layer classes: the properties of a class that do not depend on the policy.

`_linen_fields` and `_nnx_layers` contain the rows of Flax's own classes. Users add rows with
`jaxmp.register_layer`.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._attention._layer import attention_under_policy
from jaxmp._flax._fp8_layers import (
    LayerDot,
    LayerEinsum,
    Promotion,
    quantizes_float32_kernels,
    wide_operator,
)
from jaxmp.errors import CompositionError

if TYPE_CHECKING:
    from jaxmp._flax._casts import ModulePolicy


def author_class(cls: type) -> Any:
    """Returns the class that the author wrote, of a class that `wrap` may have made from it."""
    return getattr(cls, "_jaxmp_class", cls)


def is_flax(value: object) -> bool:
    """Returns True for a class or function that Flax defines."""
    return getattr(value, "__module__", "").partition(".")[0] == "flax"


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


class DotAttribute(NamedTuple):
    """Attribute through which jaxmp replaces the dot of a layer.

    Attributes:
      name: of the attribute; a dataclass field in Linen.
      function: the default value; it may also be None. For an attribute that is a dtype, None.
      fp8: the class of its replacement under `matmul = "fp8"`; None: the dot never runs in FP8.
    """

    name: str
    function: Callable[..., Any] | None
    fp8: type[LayerDot] | type[LayerEinsum] | None


DOT_GENERAL = DotAttribute("dot_general", lax.dot_general, LayerDot)
EINSUM_OP = DotAttribute("einsum_op", jnp.einsum, LayerEinsum)
CONV = DotAttribute("conv_general_dilated", lax.conv_general_dilated, None)
PREFERRED = DotAttribute("preferred_element_type", None, None)

# (module, shape of its kernel) -> (axes that a transformation stacked, inputs, outputs). An unknown
# number of inputs or outputs is 0.
KernelSizes = Callable[[Any, tuple[int, ...]], tuple[tuple[int, ...], int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTraits:
    """Row of a table of layer classes: properties of a class that do not depend on the policy.

    Subclasses inherit a row. The name of an attribute, which is a dataclass field in Linen, is ""
    if the class has no such attribute.
    """

    # The class of Flax that has the row, or a base class of a registered class. A policy replaces a
    # method only if it is the one of this class.
    layer: type = object
    # The class that a user registered, which may die.
    registered: weakref.ref[type] | None = None
    # Inputs, statistics, scale and bias are FP32; the result is returned in the compute dtype.
    is_norm: bool = False
    # Parameters are read in FP32: norms, and wrappers that normalize the weights of a layer.
    upcasts_params: bool = False
    # The class casts its parameters itself. Subclasses do not inherit this.
    casts_params: bool = False
    # Carries of recurrent layers keep their dtypes.
    is_cell: bool = False
    is_rnn: bool = False
    # The attribute that a policy sets to the compute dtype. For Flax's own classes it follows from
    # their signatures.
    dtype: str = ""
    # The parameter that the dot multiplies by. A dot with a wider result adds the other parameters
    # in the dtype of that result.
    kernel: str = ""
    dot: DotAttribute | None = None
    # The attribute with the number of outputs of a linear layer, or a sequence of them.
    outputs: str = ""
    # NNX: the sizes of the kernel, from which the FP8 state is created.
    kernel_sizes: KernelSizes | None = None
    attention_fn: str = ""
    # Linen: collections, NNX: attributes, that attention reads in the compute dtype.
    caches: tuple[str, ...] = ()
    # The parameter whose rows `__call__` looks up. The rows are cast, and not the whole table.
    embedding: str = ""

    @property
    def is_convolution(self) -> bool:
        """True for the convolutions of Flax, and their subclasses."""
        return self.dot is CONV or self.layer.__name__ == "ConvTranspose"


# ---------------------------------------------------------------------------
# Attributes
# ---------------------------------------------------------------------------


def layer_changes(
    attributes: Mapping[str, Any],
    module_policy: ModulePolicy,
    promote_dtype: Callable[..., Any],
    attention: Callable[..., Any],
    *,
    is_default: bool,
) -> dict[str, Any]:
    """Returns the attributes of a layer that its policy replaces.

    Args:
      attributes: those of the layer, with the values that its author chose.
      module_policy: its policy.
      promote_dtype, attention: Flax's functions that promote operands, and that compute attention.
      is_default: the author has not chosen another dot.
    """
    traits, resolved, changes = module_policy.traits, module_policy.resolved, dict[str, Any]()
    if traits.dtype in attributes:
        changes[traits.dtype] = module_policy.field_dtype
    if (name := traits.attention_fn) in attributes:
        own, path = attributes[name], resolved.path
        changes[name] = attention_under_policy(own, attention, resolved.policy, path)
    dot, wide = traits.dot, resolved.wide_output
    promote = attributes.get("promote_dtype", promote_dtype)
    # An author who replaced Flax's promotion of the operands has chosen their dtypes. A clone, such
    # as `nn.remat` makes, has the promotion of its original.
    promotes = promote is promote_dtype or isinstance(promote, Promotion)
    if dot is None or not promotes or attributes.get(f"{dot.name}_cls") is not None:
        return changes
    if attributes.get(PREFERRED.name) is not None:
        wide = None
    keeps_kernel, scaling = False, resolved.scaling or resolved.resting
    if scaling is not None and dot.fp8 is not None and is_default:
        is_resting = resolved.resting is not None
        changes[dot.name] = dot.fp8(scaling, wide, resolved.path, is_resting=is_resting)
        keeps_kernel = quantizes_float32_kernels(resolved.scaling)
    elif wide is not None and dot.function is not None and is_default:
        changes[dot.name] = wide_operator(dot.function, wide)
    elif wide is not None and PREFERRED.name in attributes:
        changes[PREFERRED.name] = wide
    else:
        return changes
    if (wide is not None or keeps_kernel) and "promote_dtype" in attributes:
        changes["promote_dtype"] = Promotion(wide, keeps_kernel)
    return changes


# ---------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------


FUNCTION = "jaxmp.register_layer"


class LayerTable:
    """The rows of one framework.

    A row never changes once its class, or a subclass, has been used under a policy: compiled
    functions and wrapped models depend on it.

    Args:
      module_class: `flax.linen.Module` or `flax.nnx.Module`.
      rows: class -> traits, for Flax's own classes.
      flax_dtype: returns the name of the `dtype` attribute that Flax defines for a class, or "".
      check_attribute: raises an error if a class cannot have an attribute of this name.
    """

    def __init__(
        self,
        module_class: type,
        rows: Mapping[type, LayerTraits],
        flax_dtype: Callable[[type], str],
        check_attribute: Callable[[type, str, str], None] = lambda *_: None,
    ) -> None:
        self._module_class = module_class
        # Users' classes die with what the table knows of them.
        self._rows: weakref.WeakKeyDictionary[type, LayerTraits] = weakref.WeakKeyDictionary(
            {cls: dataclasses.replace(row, layer=cls) for cls, row in rows.items()}
        )
        self._flax_dtype, self._check_attribute = flax_dtype, check_attribute
        # The traits of all classes that have been used under a policy.
        self._used: weakref.WeakKeyDictionary[type, LayerTraits] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def traits(self, cls: type) -> LayerTraits:
        """Returns the traits of a class, or of the class that a wrapped class was made from."""
        if (known := self._used.get(cls)) is not None:
            return known
        with self._lock:
            author = author_class(cls)
            row = self._first_row(author.__mro__)
            traits = self._used[cls] = dataclasses.replace(
                row,
                dtype=row.dtype or self._flax_dtype(author),
                casts_params=row.casts_params and row.layer is author,
            )
        return traits

    def outputs(self, module: Any, parent: object) -> int | None:
        """Returns the number of outputs of a linear layer; None for other modules.

        It is None, too, for the projections of an attention layer, `parent`: few outputs do not
        make them the last layer of a model, and the cache of a decoder has the compute dtype.
        """
        name = self.traits(type(module)).outputs
        if not name or self.traits(type(parent)).attention_fn:
            return None
        return int(np.prod(getattr(module, name)))

    def _first_row(self, bases: tuple[type, ...]) -> LayerTraits:
        return next((self._rows[base] for base in bases if base in self._rows), LayerTraits())

    def register(self, cls: type, *, norm: bool | None, **names: str | None) -> None:
        """Adds a row. Arguments that are None keep the value of the row of a base class.

        Args:
          cls: a user's class.
          norm: value of `is_norm` and `upcasts_params`.
          **names: `dtype`, `kernel` and `attention_fn`, as in `LayerTraits`; `dot_general` and
            `einsum`: name of the attribute with a function like `jax.lax.dot_general`, or like
            `jax.numpy.einsum`.

        Raises:
          CompositionError: if an argument is wrong, the class has another row, or it has been used
            under a policy.
        """
        self._check_class(cls)
        changes: dict[str, Any] = {key: name for key, name in names.items() if name is not None}
        for argument, name in changes.items():
            self._check_name(cls, argument, name)
        kinds = {"dot_general": DOT_GENERAL, "einsum": EINSUM_OP}
        dots = [kinds[each]._replace(name=changes.pop(each)) for each in kinds if each in changes]
        changes |= {"dot": dots[0]} if dots else {}
        changes |= {} if norm is None else {"is_norm": norm, "upcasts_params": norm}
        with self._lock:
            inherited = dataclasses.replace(self._first_row(cls.__mro__[1:]), casts_params=False)
            row = dataclasses.replace(inherited, **changes, registered=weakref.ref(cls))
            self._check_combination(cls, changes, row, both=len(dots) > 1)
            if self._rows.get(cls) == row:
                return
            self._check_unused(cls)
            self._rows[cls] = row

    # -- checks ---------------------------------------------------------------------------------

    def _check_class(self, cls: object) -> None:
        if not isinstance(cls, type) or not issubclass(cls, self._module_class):
            raise CompositionError(
                f"{FUNCTION} received {cls!r}. Pass a subclass of flax.linen.Module or "
                f"flax.nnx.Module, and not an object: {FUNCTION}(MyLayer, ...)."
            )
        if hasattr(cls, "_jaxmp_class"):
            raise CompositionError(
                f"{FUNCTION} received the class of a wrapped model. Register the class itself: "
                f"{FUNCTION}({cls.__name__}, ...)."
            )

    def _check_name(self, cls: type, argument: str, name: object) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise CompositionError(
                f"{FUNCTION}({cls.__name__}, {argument}={name!r}): {argument} must be the "
                f"name of an attribute, for example {argument}={argument!r}."
            )
        self._check_attribute(cls, argument, name)

    def _check_combination(
        self, cls: type, changes: dict[str, Any], row: LayerTraits, both: bool
    ) -> None:
        if not changes or both or (row.is_norm and row.dot is not None):
            raise CompositionError(
                f"{FUNCTION}({cls.__name__}): pass at least one property, and at most one of norm "
                "(which computes in FP32), dot_general and einsum; for example norm=True, or "
                "kernel='kernel', dot_general='dot_general'."
            )
        if row.dot is not None and not row.kernel:
            raise CompositionError(
                f"{FUNCTION}({cls.__name__}): the name of the parameter that "
                f"{row.dot.name!r} multiplies by is missing. Pass it too, for example "
                "kernel='kernel'."
            )

    def _check_unused(self, cls: type) -> None:
        if cls in self._rows:
            raise CompositionError(
                f"{FUNCTION}: {cls.__module__}.{cls.__qualname__} has a row with other "
                "values already. Register a class once; to change the row of a class of Flax, "
                "register a subclass of it."
            )
        users = [used for used in self._used if issubclass(used, cls)]
        if users:
            raise CompositionError(
                f"{FUNCTION}: {users[0].__module__}.{users[0].__qualname__} has been used "
                "under a policy already, and compiled functions depend on it. Register "
                f"{cls.__name__} directly below its definition, before a model is wrapped."
            )
