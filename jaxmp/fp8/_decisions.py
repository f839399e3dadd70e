"""Which products of a model run in FP8, and the record of what was decided."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxmp import _compat
from jaxmp.errors import CompositionError
from jaxmp.fp8._eligible import why_not
from jaxmp.fp8._recipes import Scaling


class LayerDecision(NamedTuple):
    """Whether one linear layer runs in FP8, and why not."""

    # The module's path.
    path: str
    # Inputs and outputs of the layer; 0 where they cannot be told.
    k: int
    n: int
    # "" for layers in FP8.
    why_not: str


_record: contextvars.ContextVar[list[LayerDecision] | None] = contextvars.ContextVar(
    "jaxmp_fp8_record", default=None
)


def explain(
    fn: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> tuple[LayerDecision, ...]:
    """Which linear layers run in FP8, of those for which a recipe says `matmul = "fp8"`.

    Layers that a rule keeps out are not among them. Nothing is computed.

    Args:
      fn: calls a policied Flax model, or was made by `jaxmp.autocast`: the function that you would
        jit, not the jitted one, whose trace JAX may have kept.
      *args, **kwargs: what it is called with: arrays, or their shapes.
      target: "gpu" to decide as for an NVIDIA GPU, "cpu"; None: the device that is there.

    Returns:
      A row for each layer, in the order in which they are called; under `autocast`, for each
      product that is traced, by the name scopes around it.

    Example:
      >>> model = jaxmp.linen.apply_policy(nn.Dense(10), "p=f32,c=bf16,matmul=fp8")
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 32)))
      >>> explain(model.apply, variables, jnp.ones((2, 32)))[0].why_not
      'N = 10 is no multiple of 16'
    """
    rows: list[LayerDecision] = []
    token = _record.set(rows)
    try:
        # Another function each time: JAX keeps the traces of those that it has seen.
        fresh = lambda *args, **kwargs: fn(*args, **kwargs)
        if target is None:
            jax.eval_shape(fresh, *args, **kwargs)
        else:
            with _compat.context(target=target):
                jax.eval_shape(fresh, *args, **kwargs)
    finally:
        _record.reset(token)
    return tuple(rows)


def is_recording() -> bool:
    """Whether `explain` is looking."""
    return _record.get() is not None


def decide(scaling: Scaling, path: str, k: int, n: int, why: str = "") -> bool:
    """Whether a layer runs in FP8; on record.

    Args:
      scaling: of the policies.
      path: of the layer's module, or of the scopes around a product.
      k, n: the layer's inputs and outputs; 0 where they cannot be told.
      why: what keeps it out, whatever its sizes.

    Raises:
      CompositionError: on a GPU without FP8 products, unless the scaling says `emulate=True`.
    """
    target = _compat.target()
    if target == "gpu" and not scaling.emulate:
        _check_device(path)
    why = why or why_not(max(k, 1), max(n, 1), scaling, "cpu" if scaling.emulate else target)
    rows = _record.get()
    if rows is not None:
        rows.append(LayerDecision(path, k, n, why))
    return not why


def decide_product(
    scaling: Scaling,
    path: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    params: Mapping[str, Any],
    kernel: int,
    why: str = "",
) -> bool:
    """Whether a `dot_general` of a traced function runs in FP8; on record.

    Args:
      scaling: of the policies.
      path: the scopes around the product.
      shapes: of the operands.
      params: of the equation.
      kernel: 0 or 1, which operand counts as the kernel.
      why: what keeps it out, whatever its sizes.

    Raises:
      CompositionError: as `decide`.
    """
    contract, batch = params["dimension_numbers"]
    sizes = lambda axes: math.prod(shapes[kernel][axis] for axis in axes)
    k, many = sizes(contract[kernel]), sizes(batch[kernel])
    n = math.prod(shapes[kernel]) // max(k * many, 1)
    if batch[kernel]:
        why = why or "batch dimensions: two activations, as in attention, or a kernel for each"
    if params.get("out_sharding") is not None:
        why = why or "its author gave it an out_sharding"
    return decide(scaling, path, k, n, why)


def _check_device(path: str) -> None:
    """Refuses a GPU without FP8 products (before compute capability 8.9), here or compiled for."""
    context = _compat.current_context()
    if context.target is None:
        device = jax.devices()[0]
        parts = str(getattr(device, "compute_capability", "") or "").split(".")
        capability = tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
        card = device.device_kind
    else:
        capability, card = context.capability or (), "the card that is compiled for"
    if len(capability) == 2 and capability < (8, 9):
        major, minor = capability
        raise CompositionError(
            f'matmul = "fp8" for {path!r}: {card} (compute capability {major}.{minor}) has no FP8 '
            'products, which begin with 8.9. Use the recipe without it, such as "bf16"; to round '
            "as FP8 does and multiply in 16 bits, write\n"
            "    [fp8]\n    emulate = true"
        )
