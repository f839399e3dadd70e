"""FP8 scalings: frozen settings that specify how the dots of a linear layer are quantized."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from jaxmp import _core
from jaxmp._core import DTypeLike
from jaxmp.errors import JaxmpError, PolicyError, RecipeError

# The three dots of a linear layer, and the operands of each.
GEMMS = {
    "fprop": ("input", "kernel"),
    "dgrad": ("output_grad", "kernel"),
    "wgrad": ("input", "output_grad"),
}
# Setting of a dot that is computed in the dtype of its operands.
HIGH = "high"

# Formats of NVIDIA's FP8 Tensor Cores (compute capability 8.9 and above; OCP 8-bit floating point
# specification).
_FORMATS = ("float8_e4m3fn", "float8_e5m2")

_E4M3 = ("e4m3fn", "e4m3fn")


# Elements that share a scale (OCP Microscaling Formats specification 1.0, section 5.2).
MX_BLOCK = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """Base class of the scalings, with their common settings; use a subclass."""

    # "current", "delayed", ...: the value of `scaling` in a recipe file.
    kind: ClassVar[str] = ""
    # True if the dots require a state, which earlier steps have written.
    is_stateful: ClassVar[bool] = False

    fprop: Any = _E4M3
    dgrad: Any = ("e5m2", "e4m3fn")
    wgrad: Any = ("e4m3fn", "e5m2")
    margin: int = 0
    power_of_two: bool = True
    fast_accumulation: tuple[str, ...] = ("fprop",)
    min_width: int | str = "auto"
    tokens: int = 8192
    emulate: bool = False

    def __post_init__(self) -> None:
        vars(self).update({gemm: _formats(self, gemm) for gemm in GEMMS})
        check_integer(self, "margin", low=0, high=64)
        check_integer(self, "tokens", low=1, high=2**40)
        width = self.min_width
        if width != "auto" and (isinstance(width, bool) or not isinstance(width, int) or width < 0):
            raise _bad(self, "min_width", "'auto' or an integer that is not negative", "2048")
        for name in ("power_of_two", "emulate", "calibrate"):
            if not isinstance(getattr(self, name, True), bool):
                raise _bad(self, name, "True or False", "True")
        vars(self).update(fast_accumulation=_gemm_names(self))

    @property
    def batch_note(self) -> str:
        """Dependence of results on the rest of the batch; "" if each row has a separate scale."""
        if self.kind not in ("current", "delayed"):
            return ""
        small = f"elements below about 2**{self.margin - 14} times the largest one"
        rounded = small if self.power_of_two else "all elements"
        return (
            f"{type(self).__name__} has one scale for a tensor, so that results can depend on the "
            "other examples of the batch and on later tokens: the largest element of a tensor "
            f"determines the rounding of {rounded}. RowwiseScaling() has one scale for each row."
        )

    def formats(self, gemm: str) -> tuple[Any, Any] | None:
        """Returns the FP8 dtypes of the operands of a dot.

        Args:
          gemm: "fprop", "dgrad" or "wgrad".

        Returns:
          A pair of dtypes in the order of `GEMMS[gemm]`; None if the dot does not use FP8.
        """
        names = getattr(self, gemm)
        if names == HIGH:
            return None
        return _core.canonical_dtype(names[0]), _core.canonical_dtype(names[1])


def _bad(scaling: Scaling, name: str, allowed: str, example: str) -> RecipeError:
    kind = type(scaling).__name__
    return RecipeError(
        f"{kind}({name}={getattr(scaling, name)!r}): {name} must be {allowed}; for example "
        f"{kind}({name}={example})."
    )


def check_integer(scaling: Scaling, name: str, low: int, high: int) -> None:
    """Checks that a setting is an integer from `low` to `high`.

    Raises:
      RecipeError: with the scaling, the setting and its range.
    """
    value = getattr(scaling, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(scaling, name, f"an integer from {low} to {high}", str(min(max(low, 1), high)))


def _check_choice(scaling: Scaling, name: str, allowed: tuple[str, str]) -> None:
    if getattr(scaling, name) not in allowed:
        raise _bad(scaling, name, " or ".join(map(repr, allowed)), repr(allowed[1]))


def _formats(scaling: Scaling, gemm: str) -> Any:
    """Returns the formats of a dot as short names such as `("e4m3fn", "e5m2")`, or `HIGH`."""
    setting = getattr(scaling, gemm)
    operands = " and ".join(GEMMS[gemm])
    allowed = (
        f"the formats of {operands}, of 'e4m3fn' and 'e5m2', not both 'e5m2' (cuBLAS has no such "
        f"product), or {HIGH!r}"
    )
    error = _bad(scaling, gemm, allowed, "('e4m3fn', 'e4m3fn')")
    if isinstance(setting, str) and setting == HIGH:
        return HIGH
    is_pair = isinstance(setting, (tuple, list)) and len(setting) == 2
    pair = tuple(setting) if is_pair else (setting, setting)
    try:
        dtypes = [_core.canonical_dtype(name) for name in pair]
    except PolicyError as unknown:
        raise error from unknown
    is_known = all(dtype.name in _FORMATS for dtype in dtypes)
    if not is_known or all(dtype.name == "float8_e5m2" for dtype in dtypes):
        raise error
    return tuple(dtype.name.removeprefix("float8_") for dtype in dtypes)


def _gemm_names(scaling: Scaling) -> tuple[str, ...]:
    setting: Any = scaling.fast_accumulation
    names = (setting,) if isinstance(setting, str) else setting
    if not isinstance(names, (tuple, list)) or any(item not in tuple(GEMMS) for item in names):
        allowed = f"a tuple of names among {', '.join(GEMMS)}"
        raise _bad(scaling, "fast_accumulation", allowed, "('fprop',)")
    return tuple(gemm for gemm in GEMMS if gemm in names)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(Scaling):
    """Per-tensor scaling: each scale comes from the tensor that it quantizes.

    The tensor contains all examples of a batch, so that results can depend on the other examples,
    and on later tokens; `power_of_two` limits this to the smallest elements.

    Args:
      fprop: formats of input and kernel in the forward dot: a pair of "e4m3fn" and "e5m2", one name
        for both, or "high" for a dot in the dtype of the operands.
      dgrad: formats of output gradient and kernel in the dot that computes the input's gradient.
      wgrad: formats of input and output gradient in the dot that computes the kernel's gradient.
      margin: scales are divided by `2**margin`.
      power_of_two: round scales down to powers of two, so that scaling is exact. If a large element
        of the tensor changes the scale, the other elements then keep their values, except those
        that are subnormal numbers in FP8. With False, a scale is `limit / amax`, and the values of
        all elements depend on the largest one.
      fast_accumulation: dots that may accumulate with the reduced precision of the Tensor Cores;
        the others accumulate in FP32. Default: the forward dot only, as in Transformer Engine
        (`use_split_accumulator`) and torchao.
      min_width: minimum number of input features and of output features of a layer that runs in
        FP8 on an accelerator, where a recipe decides for a whole model. "auto" uses the limits
        described in docs/fp8.md.
      tokens: number of rows of a layer's input for which min_width="auto" decides. It is a setting
        and not the size of the batch, so that the state and the numerics never depend on a batch;
        `jaxmp.explain` and `jaxmp.audit` compare it with a program.
      emulate: allow devices without FP8 matmuls. Operands are rounded to FP8 in the same way.

    Raises:
      RecipeError: with the setting, its allowed values and a valid call.

    Example:
      >>> CurrentScaling(wgrad="high").wgrad
      'high'
      >>> CurrentScaling(dgrad="e4m3fn").dgrad
      ('e4m3fn', 'e4m3fn')
    """

    kind: ClassVar[str] = "current"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Scaling):
    """Per-tensor scaling with the amaxes of earlier steps, which are stored in a state.

    The first step has no earlier amax and scales like `CurrentScaling`. The rules are those of
    Transformer Engine's `DelayedScaling`, except that a non-finite amax never enters the history.

    Args:
      amax_history_len: number of steps in the history.
      amax_compute: "max" of the history, or its "most_recent" entry.
      calibrate: if a history is empty, use the tensor's own amax. With False the scale is then 1,
        so that the cast never waits for an amax.
      fprop, dgrad, wgrad, margin, power_of_two, fast_accumulation, min_width, tokens, emulate: as
        in `CurrentScaling`.

    Raises:
      RecipeError: with the setting, its allowed values and a valid call.

    Example:
      >>> DelayedScaling(amax_history_len=16, amax_compute="most_recent").is_stateful
      True
    """

    kind: ClassVar[str] = "delayed"
    is_stateful: ClassVar[bool] = True

    amax_history_len: int = 1024
    amax_compute: str = "max"
    calibrate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "amax_history_len", low=1, high=2**20)
        _check_choice(self, "amax_compute", ("max", "most_recent"))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseScaling(Scaling):
    """Scaling with one scale per row of the first and per column of the second operand of a dot.

    Input, kernel and output gradient are quantized twice, once for each direction in which they are
    contracted, from the same high-precision tensor. Formats and powers of two are those of
    torchao's "rowwise" scaling: E4M3 throughout.

    Args:
      fprop, dgrad, wgrad, margin, power_of_two, fast_accumulation, min_width, tokens, emulate: as
        in `CurrentScaling`.

    Raises:
      RecipeError: with the setting, its allowed values and a valid call.

    Example:
      >>> RowwiseScaling().wgrad
      ('e4m3fn', 'e4m3fn')
    """

    kind: ClassVar[str] = "rowwise"

    dgrad: Any = _E4M3
    wgrad: Any = _E4M3


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class MXScaling(Scaling):
    """MXFP8 scaling for Blackwell GPUs: one power of two per 32 elements along the contracted axes.

    The format is that of the OCP Microscaling Formats specification 1.0 with scales in E8M0. The
    settings are those of Transformer Engine's `MXFP8BlockScaling`: E4M3 throughout. Each operand is
    quantized once for each direction in which it is contracted, from the same high-precision
    tensor. The dots are those of `jax.nn.scaled_matmul`, which runs on GPUs of compute capability
    10.0 and above; older GPUs and TPUs raise an error without `emulate=True`. A CPU multiplies the
    same values in bfloat16 if both operands are bfloat16, and otherwise in float32 or float64.

    Args:
      rounding: how the scale of a block follows from its amax. "up": the smallest power of two with
        which the block does not saturate, as in JAX, cuDNN and Transformer Engine. "down": the rule
        of the specification (section 6.3), `2**(floor(log2(amax)) - 8)` for E4M3, with which values
        from 448 to 512 times the scale saturate.
      fprop, dgrad, wgrad, min_width, tokens, emulate: as in `CurrentScaling`.
      margin, power_of_two: must be 0 and True, the only values that the format allows.
      fast_accumulation: has no effect.

    Raises:
      RecipeError: with the setting, its allowed values and a valid call.

    Example:
      >>> MXScaling().fprop, MXScaling(rounding="down").rounding
      (('e4m3fn', 'e4m3fn'), 'down')
    """

    kind: ClassVar[str] = "mx"

    dgrad: Any = _E4M3
    wgrad: Any = _E4M3
    rounding: str = "up"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self, "rounding", ("up", "down"))
        check_integer(self, "margin", low=0, high=0)
        if not self.power_of_two:
            raise _bad(self, "power_of_two", "True: scales are in E8M0", "True")


KINDS: dict[str, type[Scaling]] = {
    cls.kind: cls for cls in (CurrentScaling, DelayedScaling, RowwiseScaling, MXScaling)
}


# A scaling, its name, or None for the default.
ScalingLike: TypeAlias = Scaling | str | None


def as_scaling(scaling: ScalingLike) -> Scaling:
    """Converts the name of an FP8 scaling to the scaling; a scaling is returned unchanged.

    Args:
      scaling: a scaling; "current", "delayed", "rowwise" or "mx"; None: the default,
        `CurrentScaling()`.

    Raises:
      RecipeError: if `scaling` is not a scaling; the message quotes it.

    Example:
      >>> as_scaling("delayed") == DelayedScaling()
      True
    """
    if scaling is None:
        return CurrentScaling()
    if isinstance(scaling, Scaling) and type(scaling) in KINDS.values():
        return scaling
    if isinstance(scaling, str) and scaling in KINDS:
        return KINDS[scaling]()
    hint = _core.did_you_mean(scaling, KINDS)
    if isinstance(scaling, type) and scaling in KINDS.values():
        hint = f" Make an instance: fp8.{scaling.__name__}()."
    raise RecipeError(
        f"{scaling!r} is not an FP8 scaling.{hint} Allowed: {', '.join(map(repr, KINDS))}, or an "
        "object such as fp8.CurrentScaling()."
    )


def fp8_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the canonical dtype of an 8-bit float that has a sign and a mantissa.

    Raises:
      PolicyError: for any other dtype.
    """
    try:
        canonical = _core.canonical_dtype(dtype)
    except JaxmpError as error:
        raise PolicyError(f"{error} FP8 formats are e4m3fn, e5m2 and their variants.") from None
    if not _core.is_fp8(canonical) or canonical.name == "float8_e8m0fnu":
        raise PolicyError(
            f"{canonical.name} is not an FP8 format for quantization. Allowed: float8_e4m3fn, "
            "float8_e5m2 and their variants; for example quantize(x, scale, jnp.float8_e4m3fn)."
        )
    return canonical
