"""Which linear layers gain by FP8, where a recipe decides for a whole model."""

from __future__ import annotations

from typing import Any

from jaxmp.errors import JaxmpError
from jaxmp.fp8._recipes import MX_BLOCK, Scaling, as_recipe

# cuBLAS multiplies FP8 where rows are multiples of 16 bytes (cuBLASLt, "Narrow precision data
# types usage"). XLA would pad other sizes, in a copy of the operand.
MULTIPLE = 16


def why_not(k: int, n: int, recipe: Any = None, target: str = "cpu") -> str:
    """Why a linear layer does not run in FP8 under a recipe; "" if it does.

    Sizes must be multiples of 16, with `MXScaling` of its blocks of 32. On an accelerator a layer
    must also be wide enough to win back the passes that quantise it. By default
    (`min_width="auto"`) the limits are those of torchao's `auto_filter_for_recipe`, chosen for an
    H100: with one scale per tensor no layer of K <= 4096 and N <= 1024; with rowwise scales none of
    N <= 2048, of K <= 1024, or of N <= 4096 and K <= 2048. `MXScaling`, for which no limits were
    published, has those of rowwise scales, which round each operand twice as it does. A number as
    `min_width` asks for K and N of at least as much. `fp8.dot_general` itself quantises always.

    Args:
      k: what the forward product sums over: the layer's inputs.
      n: the layer's outputs.
      recipe: a recipe of `jaxmp.fp8`, or its name.
      target: "cpu", where widths do not matter, "gpu" or "tpu".

    Returns:
      A clause such as "N = 10 is no multiple of 16", or "".

    Raises:
      RecipeError: if `recipe` is none.
      JaxmpError: if a size is no positive integer.

    Example:
      >>> why_not(4096, 10)
      'N = 10 is no multiple of 16'
      >>> why_not(1024, 1024), why_not(1024, 1024, target="gpu")
      ('', 'K = 1024 <= 4096 and N = 1024 <= 1024: too narrow to gain')
    """
    recipe = as_recipe(recipe)
    for name, size in (("k", k), ("n", n)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise JaxmpError(f"{name}={size!r} must be a positive integer; for example 4096.")
    multiple = MX_BLOCK if recipe.kind == "mx" else MULTIPLE
    odd = [f"{name} = {size}" for name, size in (("K", k), ("N", n)) if size % multiple]
    if odd:
        return f"{' and '.join(odd)} {'is' if len(odd) == 1 else 'are'} no multiple of {multiple}"
    return "" if target == "cpu" else _too_narrow(k, n, recipe)


def _too_narrow(k: int, n: int, recipe: Scaling) -> str:
    if isinstance(recipe.min_width, int):
        narrow = min(k, n) < recipe.min_width
        return f"K = {k} or N = {n} is below min_width = {recipe.min_width}" if narrow else ""
    limits = _ROWWISE if recipe.kind in ("rowwise", "mx") else _PER_TENSOR
    for most_k, most_n in limits:
        if (most_k is None or k <= most_k) and (most_n is None or n <= most_n):
            of_k = [f"K = {k} <= {most_k}"] if most_k else []
            of_n = [f"N = {n} <= {most_n}"] if most_n else []
            return f"{' and '.join(of_k + of_n)}: too narrow to gain"
    return ""


# (largest K, largest N) of layers that stay as they are; None: any.
_PER_TENSOR = ((4096, 1024),)
_ROWWISE = ((None, 2048), (1024, None), (2048, 4096))
