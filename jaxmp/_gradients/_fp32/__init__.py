"""Weight gradients in FP32 for functions that compute in 16 bits.

A 16-bit matmul accumulates a weight gradient in FP32 and rounds it to 16 bits, whatever the dtype
of the parameter is; the cast to FP32 comes later (jax#34330). Under `jit` with sharded arrays, XLA
also adds the partial gradients of the devices in 16 bits, before that cast (jax#27496).

`with_fp32_gradients` runs a traced loss function again and follows the parameters through it. A
16-bit copy of a parameter is represented by two arrays: the copy, through which no gradient passes,
and an FP32 array of the same shape, the *carrier*, which only carries the gradient. Operations that
move data are applied to both. A matmul with a copy computes the gradient of the copy with an FP32
result, and passes it to the carrier. No result depends on the values of carriers, so XLA removes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmp import _core, _programs
from jaxmp._core import PyTree, _compat
from jaxmp._gradients._fp32._derivatives import is_16bit_aval
from jaxmp._gradients._fp32._interpreter import run
from jaxmp._gradients._hints import warn_of_rounded_loss

_READS_VALUES = (
    "The loss function reads the values of arrays, as `if` and float() do, so that it cannot be "
    "traced. The gradients of its 16-bit matmuls are rounded to 16 bits. Call value_and_grad in a "
    "function under jax.jit, and use jnp.where or jax.lax.cond instead of `if`."
)


def is_on_several_devices(*trees: PyTree) -> bool:
    """Returns True if an array of the trees is on a mesh of more than one device.

    The mesh of an array is known while a function is traced, and its sharding is not (unless the
    axes of the mesh are explicit).
    """
    arrays = (leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array))
    meshes = (getattr(jax.typeof(array).sharding, "mesh", None) for array in arrays)
    return any(getattr(mesh, "size", 1) > 1 for mesh in meshes)


def with_fp32_gradients(
    fn: Callable[..., PyTree],
    inputs: tuple[PyTree, ...],
    dtypes: Set[object],
    *,
    regather: bool,
    returns_inputs: bool,
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Returns a function equal to `fn` whose gradients are computed in FP32, and its inputs.

    Args:
      fn: function of the inputs, whose first result is the loss.
      inputs: pytrees of parameters. Leaves that are not floating-point arrays, such as FP8
        state, are differentiated as they are.
      dtypes: dtypes of the parameters whose gradients are computed in FP32. Others are
        differentiated as they are.
      regather: gather weights again in the backward pass, instead of keeping them.
      returns_inputs: `fn` returns arrays that it receives, perhaps from loops, as the Variables of
        NNX. They are then the inputs themselves, and XLA does not copy them in each iteration.

    Returns:
      The function, which traces `fn` for the dtypes of `inputs`, and the inputs to call it with:
      those of `dtypes` are converted to FP32, and so are their gradients.
    """
    as_arrays = lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    leaves, structure = jax.tree.flatten(jax.tree.map(as_arrays, inputs))
    is_param = [_core.dtype_of(leaf) in dtypes for leaf in leaves]
    is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    if not any(is_param) and not (returns_inputs and is_traced):
        return fn, inputs
    try:
        traced = _programs.trace(fn, structure.unflatten(leaves), {})
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        if is_traced:
            raise
        _core.warn_user(_READS_VALUES)
        return fn, inputs
    closed = traced.closed
    if (dtype := _rounded_dtype(closed, closed.jaxpr.outvars[0])) is not None:
        warn_of_rounded_loss(dtype)
    if not _computes_in_16_bits(closed):
        is_param = [False] * len(leaves)

    def fn_in_fp32(*inputs: PyTree) -> PyTree:
        arrays = run(closed, jax.tree.leaves(inputs), is_param, regather=regather)
        return traced.results(list(map(_programs.as_jax_array, arrays)))

    in_fp32 = [
        leaf.astype(_core.FLOAT32) if param else leaf
        for leaf, param in zip(leaves, is_param, strict=True)
    ]
    return fn_in_fp32, structure.unflatten(in_fp32)


def _rounded_dtype(jaxpr: _compat.AnyJaxpr, loss: _programs.Atom) -> np.dtype | None:
    """Returns the 16-bit dtype of a computed scalar from which casts, sums and factors make a loss.

    None if there is no such scalar. Parameters and constants in 16 bits are not computed.
    """
    body, pending, seen = _programs.Body(jaxpr), [loss], set[_programs.Atom]()
    while pending:
        var = pending.pop()
        maker = body.maker(var)
        if maker is None or var in seen:
            continue
        seen.add(var)
        name = maker.primitive.name
        if is_16bit_aval(var.aval) and var.aval.size == 1:
            if body.maker(body.source_of(var, _CASTS)) is not None:
                return var.aval.dtype
        elif name in _programs.CALLS:
            inner = _programs.inners(maker)[0]
            result = inner.jaxpr.outvars[maker.outvars.index(var)]
            if (dtype := _rounded_dtype(inner.jaxpr, result)) is not None:
                return dtype
        elif name in _CASTS or name == "add":
            pending += maker.invars
        elif name in ("mul", "div"):
            operands = [each for each in maker.invars if not _programs.is_literal(each)]
            pending += operands * (len(operands) == 1)
    return None


_CASTS = _core.named("convert_element_type")


def _computes_in_16_bits(closed: _compat.ClosedJaxpr) -> bool:
    return any(
        is_16bit_aval(var.aval)
        for equation in _programs.equations(closed)
        for var in (*equation.invars, *equation.outvars)
    )
