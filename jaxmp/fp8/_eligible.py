"""Checks the sizes of linear layers for FP8, where a recipe decides for a whole model."""

from __future__ import annotations

from jaxmp.fp8._scaling import MX_BLOCK, Scaling

# cuBLAS requires the rows of FP8 operands to be multiples of 16 bytes (cuBLASLt, "Narrow precision
# data types usage"). XLA would pad other sizes, in a copy of the operand.
MULTIPLE = 16


def explain_exclusion(k: int, n: int, scaling: Scaling, target: str) -> str:
    """Returns the reason why a linear layer does not run in FP8, or "" if it does.

    K and N must be multiples of 16, or with `MXScaling` of its block size 32. On an accelerator, a
    layer must also be wide enough for FP8 to save more time than the quantization costs. By default
    (`min_width="auto"`) the limits are those of torchao's `auto_filter_for_recipe`, chosen for an
    H100. With per-tensor scales, layers with K <= 4096 and N <= 1024 are too
    narrow. With rowwise scales, these are layers with N <= 2048, with K <= 1024, or with N <= 4096
    and K <= 2048. No limits were published for `MXScaling`, which uses those of rowwise scales,
    because both quantize each operand twice. An integer `min_width` is a minimum of both K and N.
    `fp8.dot_general` itself applies no limits and always quantizes.

    Args:
      k: K, the contracted size of the forward dot: the input features of the layer.
      n: N, the output features of the layer.
      scaling: the scaling.
      target: "cpu", where widths do not matter, "gpu" or "tpu".

    Returns:
      A clause such as "N = 10 is not a multiple of 16", or "".
    """
    multiple = MX_BLOCK if scaling.kind == "mx" else MULTIPLE
    odd = [f"{name} = {size}" for name, size in (("K", k), ("N", n)) if size % multiple]
    if odd:
        relation = "is not a multiple" if len(odd) == 1 else "are not multiples"
        return f"{' and '.join(odd)} {relation} of {multiple}"
    return "" if target == "cpu" else _too_narrow(k, n, scaling)


def _too_narrow(k: int, n: int, scaling: Scaling) -> str:
    if isinstance(scaling.min_width, int):
        narrow = min(k, n) < scaling.min_width
        return f"K = {k} or N = {n} is below min_width = {scaling.min_width}" if narrow else ""
    limits = _ROWWISE if scaling.kind in ("rowwise", "mx") else _PER_TENSOR
    for most_k, most_n in limits:
        if (most_k is None or k <= most_k) and (most_n is None or n <= most_n):
            of_k = [f"K = {k} <= {most_k}"] if most_k else []
            of_n = [f"N = {n} <= {most_n}"] if most_n else []
            return f"{' and '.join(of_k + of_n)}: too narrow to gain"
    return ""


# (largest K, largest N) of layers that are too narrow for FP8; None: any size.
_PER_TENSOR = ((4096, 1024),)
_ROWWISE = ((None, 2048), (1024, None), (2048, 4096))
