"""FP8 recipes: frozen settings of how the three products of a linear layer are quantised."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from jaxmp._dtypes import canonical_dtype, is_fp8
from jaxmp.errors import JaxmpError, PolicyError, RecipeError, did_you_mean

# The products of one linear layer, and the operands of each.
GEMMS = {
    "fprop": ("input", "kernel"),
    "dgrad": ("output_grad", "kernel"),
    "wgrad": ("input", "output_grad"),
}
# In the place of formats: the product is computed in its operands' own dtype.
HIGH = "high"

# What NVIDIA's Tensor Cores multiply (Hopper and later; OCP 8-bit floating point specification).
_FORMATS = ("float8_e4m3fn", "float8_e5m2")

_E4M3 = ("e4m3fn", "e4m3fn")

# Numbers that share a scale (OCP Microscaling Formats specification 1.0, section 5.2).
MX_BLOCK = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """What all recipes share; use one of `CurrentScaling`, `DelayedScaling` and their kin."""

    # "current", "delayed", ...: the name in a recipe file.
    kind: ClassVar[str] = ""

    fprop: Any = _E4M3
    dgrad: Any = ("e5m2", "e4m3fn")
    wgrad: Any = ("e4m3fn", "e5m2")
    margin: int = 0
    power_of_two: bool = False
    fast_accumulation: tuple[str, ...] = ("fprop",)
    min_width: int | str = "auto"
    emulate: bool = False

    def __post_init__(self) -> None:
        set_field = lambda name, value: object.__setattr__(self, name, value)
        for gemm in GEMMS:
            set_field(gemm, _formats(self, gemm))
        check_count(self, "margin", low=0, high=64)
        width = self.min_width
        if width != "auto" and (isinstance(width, bool) or not isinstance(width, int) or width < 0):
            raise _bad(self, "min_width", "'auto' or an integer that is not negative", "2048")
        for name in ("power_of_two", "emulate"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(self, name, "True or False", "True")
        set_field("fast_accumulation", _gemm_names(self, "fast_accumulation"))

    @property
    def is_stateful(self) -> bool:
        """Whether the scales come from earlier steps, so that a state goes along."""
        return False

    def formats(self, gemm: str) -> tuple[Any, Any] | None:
        """The dtypes of the operands of "fprop", "dgrad" or "wgrad"; None: no FP8 there.

        Returns:
          A pair of dtypes in the order of `GEMMS`.
        """
        names = getattr(self, gemm)
        return None if names == HIGH else (canonical_dtype(names[0]), canonical_dtype(names[1]))


def _bad(recipe: Scaling, name: str, allowed: str, example: str) -> RecipeError:
    kind = type(recipe).__name__
    return RecipeError(
        f"{kind}({name}={getattr(recipe, name)!r}): {name} must be {allowed}; for example "
        f"{kind}({name}={example})."
    )


def check_count(recipe: Scaling, name: str, low: int, high: int) -> None:
    """Refuses what is no integer in `low .. high`.

    Raises:
      RecipeError: naming the recipe, the setting and its range.
    """
    value = getattr(recipe, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _bad(recipe, name, f"an integer from {low} to {high}", str(min(max(low, 1), high)))


def _formats(recipe: Scaling, gemm: str) -> Any:
    """Two short names such as `("e4m3fn", "e5m2")`, or `HIGH`."""
    given = getattr(recipe, gemm)
    operands = " and ".join(GEMMS[gemm])
    allowed = (
        f"the formats of {operands}, of 'e4m3fn' and 'e5m2', not both 'e5m2' (cuBLAS has no such "
        f"product), or {HIGH!r}"
    )
    error = _bad(recipe, gemm, allowed, "('e4m3fn', 'e4m3fn')")
    if isinstance(given, str) and given == HIGH:
        return HIGH
    pair = (given, given) if isinstance(given, str) or not _is_pair(given) else tuple(given)
    try:
        dtypes = [canonical_dtype(name) for name in pair]
    except PolicyError as unknown:
        raise error from unknown
    if any(dtype.name not in _FORMATS for dtype in dtypes):
        raise error
    if all(dtype.name == "float8_e5m2" for dtype in dtypes):
        raise error
    return tuple(dtype.name.removeprefix("float8_") for dtype in dtypes)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _gemm_names(recipe: Scaling, name: str) -> tuple[str, ...]:
    given = getattr(recipe, name)
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, (tuple, list)) or any(one not in tuple(GEMMS) for one in names):
        raise _bad(recipe, name, f"a tuple of names among {', '.join(GEMMS)}", "('fprop',)")
    return tuple(gemm for gemm in GEMMS if gemm in names)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(Scaling):
    """Per-tensor scales from the very tensor that is quantised, just in time. Has no state.

    Args:
      fprop: formats of input and kernel in the forward product: a pair of "e4m3fn" and "e5m2", one
        name for both, or "high" for a product in the operands' own dtype.
      dgrad: formats of output gradient and kernel in the product that gives the input's gradient.
      wgrad: formats of input and output gradient in the product that gives the kernel's gradient.
      margin: scales are divided by `2**margin`.
      power_of_two: round scales down to powers of two, so that scaling itself is exact.
      fast_accumulation: products whose sums may be kept in the Tensor Cores' own fewer bits; the
        others are added up in FP32. By default the forward product only, as in Transformer Engine
        (`use_split_accumulator`) and torchao.
      min_width: where a recipe decides for a whole model, the narrowest layers that run in FP8 on
        an accelerator: see `why_not`. "auto", or the least number of inputs and of outputs.
      emulate: a device without FP8 products is allowed, and the numbers are rounded all the same.

    Raises:
      RecipeError: naming the setting, what it may be, and a call that works.

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
    """Per-tensor scales from the maxima of earlier steps, which travel in a state.

    The first step has no earlier one and is scaled as by `CurrentScaling`. The rules are those of
    Transformer Engine's `DelayedScaling`, but what is not finite never enters the history.

    Args:
      amax_history_len: how many steps the history keeps.
      amax_compute: "max" of the history, or its "most_recent" entry.
      interval: the scales are set anew every `interval` steps; the history grows at each.
      calibrate: where a history is empty, scale by the tensor's own maximum; False: by 1, so that
        the cast never waits for a maximum.
      fprop, dgrad, wgrad, margin, power_of_two, fast_accumulation, min_width, emulate: as in
        `CurrentScaling`.

    Raises:
      RecipeError: naming the setting, what it may be, and a call that works.

    Example:
      >>> DelayedScaling(amax_history_len=16, amax_compute="most_recent").is_stateful
      True
    """

    kind: ClassVar[str] = "delayed"

    amax_history_len: int = 1024
    amax_compute: str = "max"
    interval: int = 1
    calibrate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.calibrate, bool):
            raise _bad(self, "calibrate", "True or False", "True")
        check_count(self, "amax_history_len", low=1, high=2**20)
        check_count(self, "interval", low=1, high=2**20)
        if self.amax_compute not in ("max", "most_recent"):
            raise _bad(self, "amax_compute", "'max' or 'most_recent'", "'max'")

    @property
    def is_stateful(self) -> bool:
        return True


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseScaling(Scaling):
    """One scale for each row of the first and each column of the second operand of a product.

    Input and kernel are quantised twice, once along each of the directions in which they are summed
    over, from the same high-precision numbers. Formats and powers of two are those of torchao's
    "rowwise" recipe: E4M3 throughout.

    Args:
      fprop, dgrad, wgrad, margin, power_of_two, fast_accumulation, min_width, emulate: as in
        `CurrentScaling`.

    Raises:
      RecipeError: naming the setting, what it may be, and a call that works.

    Example:
      >>> RowwiseScaling().wgrad
      ('e4m3fn', 'e4m3fn')
    """

    kind: ClassVar[str] = "rowwise"

    dgrad: Any = _E4M3
    wgrad: Any = _E4M3
    power_of_two: bool = True


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaling(Scaling):
    """One scale per 1 x 128 numbers of activations and gradients, and per 128 x 128 of kernels.

    The recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2): E4M3 throughout. XLA has no product
    with such scales: the numbers are rounded to FP8 and multiplied in the operands' own dtype. So
    it is good for the study of numerics, and refused on an accelerator without `emulate=True`.

    Args:
      block: the size of a block, in numbers along each of its long sides.
      fprop, dgrad, wgrad, margin, power_of_two, fast_accumulation, min_width, emulate: as in
        `CurrentScaling`.

    Raises:
      RecipeError: naming the setting, what it may be, and a call that works.

    Example:
      >>> BlockScaling(emulate=True).block
      128
    """

    kind: ClassVar[str] = "block"

    dgrad: Any = _E4M3
    wgrad: Any = _E4M3
    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "block", low=1, high=2**16)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class MXScaling(Scaling):
    """MXFP8: one power of two per 32 numbers along what a product sums over. For Blackwell cards.

    The block format of the OCP Microscaling Formats specification 1.0, with scales in E8M0, and the
    recipe of Transformer Engine's `MXFP8BlockScaling`: E4M3 throughout. Each operand is quantised
    once for each of the directions in which it is summed over, from the same high-precision
    numbers. The products are those of `jax.nn.scaled_matmul`, which run on GPUs of compute
    capability 10.0 and above; older ones, and TPUs, are refused without `emulate=True`. A CPU
    multiplies the same numbers in the operands' own dtype.

    Args:
      rounding: how the scale of a block follows from its largest magnitude. "up": the least power
        of two that lets it fit, so that nothing saturates; this is what JAX, cuDNN and Transformer
        Engine do. "down": the specification's own rule (section 6.3), `2**(floor(log2(amax)) - 8)`
        for E4M3, by which numbers from 448 to 512 times the scale saturate.
      fprop, dgrad, wgrad, min_width, emulate: as in `CurrentScaling`.
      margin, power_of_two: 0 and True: the format has no others.
      fast_accumulation: has no effect.

    Raises:
      RecipeError: naming the setting, what it may be, and a call that works.

    Example:
      >>> MXScaling().fprop, MXScaling(rounding="down").rounding
      (('e4m3fn', 'e4m3fn'), 'down')
    """

    kind: ClassVar[str] = "mx"

    dgrad: Any = _E4M3
    wgrad: Any = _E4M3
    power_of_two: bool = True
    rounding: str = "up"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("up", "down"):
            raise _bad(self, "rounding", "'up' or 'down'", "'up'")
        check_count(self, "margin", low=0, high=0)
        if not self.power_of_two:
            raise _bad(self, "power_of_two", "True: scales are in E8M0", "True")


KINDS: dict[str, type[Scaling]] = {
    cls.kind: cls
    for cls in (CurrentScaling, DelayedScaling, RowwiseScaling, BlockScaling, MXScaling)
}


def as_recipe(recipe: Any) -> Scaling:
    """A recipe, or the one that a name stands for.

    Args:
      recipe: a recipe object; "current", "delayed", "rowwise", "block" or "mx"; None: the default,
        which is `CurrentScaling()`.

    Raises:
      RecipeError: quoting what was given.

    Example:
      >>> as_recipe("delayed") == DelayedScaling()
      True
    """
    if recipe is None:
        return CurrentScaling()
    if type(recipe) in KINDS.values():
        return recipe
    if isinstance(recipe, str) and recipe in KINDS:
        return KINDS[recipe]()
    hint = did_you_mean(recipe, KINDS) if isinstance(recipe, str) else ""
    if isinstance(recipe, type) and recipe in KINDS.values():
        hint = f" Make an instance: fp8.{recipe.__name__}()."
    raise RecipeError(
        f"{recipe!r} is no FP8 recipe.{hint} Allowed: {', '.join(map(repr, KINDS))}, or an object "
        "such as fp8.CurrentScaling()."
    )


def fp8_dtype(dtype: Any) -> Any:
    """The canonical dtype of an 8-bit float that has a sign and a mantissa.

    Raises:
      PolicyError: for any other dtype.
    """
    try:
        canonical = canonical_dtype(dtype)
    except JaxmpError as error:
        raise PolicyError(f"{error} FP8 formats are e4m3fn and e5m2 and their kin.") from None
    if not is_fp8(canonical) or canonical.name == "float8_e8m0fnu":
        raise PolicyError(
            f"{canonical.name} is not an FP8 format to quantise to. Allowed: float8_e4m3fn, "
            "float8_e5m2 and their kin; for example quantize(x, scale, jnp.float8_e4m3fn)."
        )
    return canonical
