"""The functions that a fix may change, with the arguments that it casts.

A fix only contains code for functions of this table. For other functions, such as the user's, it
describes the change in words.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any, NamedTuple, TypeVar

Value = TypeVar("Value")


class Function(NamedTuple):
    """Function whose result depends on the dtype of its arrays.

    arrays: positions of the arguments that are cast.
    returns_arrays: False if a fix cannot cast the result back, because it consists of integers,
      indices or several arrays.
    is_tree: True if the arguments are pytrees.
    dtype: position of the parameter `dtype`; -1 if it is keyword-only, None without it.
    """

    arrays: tuple[int, ...] = (0,)
    returns_arrays: bool = True
    is_tree: bool = False
    dtype: int | None = None


# One array, of which each element or a sum is computed.
_ARRAY = Function()
_PAIR = Function((0, 1))
_INDICES = Function(returns_arrays=False)

_JAX_NN = (
    "softmax log_softmax logsumexp logmeanexp sigmoid log_sigmoid softplus silu swish gelu elu celu"
    " selu tanh mish squareplus standardize soft_sign sparse_plus log1mexp glu"
)
_LOSSES = (
    "softmax_cross_entropy softmax_cross_entropy_with_integer_labels sigmoid_binary_cross_entropy"
    " safe_softmax_cross_entropy poly_loss_cross_entropy sigmoid_focal_loss l2_loss squared_error"
    " huber_loss log_cosh hinge_loss cosine_similarity cosine_distance dice_loss binary_dice_loss"
    " kl_divergence_with_log_targets multiclass_generalized_dice_loss multiclass_hinge_loss"
    " ctc_loss ntxent perceptron_loss multiclass_perceptron_loss sparsemax_loss"
    " multiclass_sparsemax_loss ranking_softmax_loss smooth_labels triplet_margin_loss"
)
# Losses with the logarithm of their second argument.
_DIVERGENCES = {"kl_divergence convex_kl_divergence generalized_kl_divergence": Function((1, 0))}
_LIKE = "zeros_like ones_like empty_like"
_DENSITIES = ("norm", "uniform", "beta", "gamma", "t", "cauchy", "expon", "laplace", "logistic")
_OF_DENSITIES = ("logpdf", "pdf", "logcdf", "cdf", "logsf", "sf")
_RANDOM = "normal uniform gumbel exponential laplace logistic cauchy"


def _of_each(table: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Returns the value of each full name, of a module -> names, separated by blanks -> value."""
    return {
        f"{module}.{name}".lstrip("."): value
        for module, rows in table.items()
        for names, value in rows.items()
        for name in names.split()
    }


_TABLE: dict[str, dict[str, Function]] = {
    "jax.numpy": {
        "sum mean prod cumsum cumprod nansum nanmean nanprod nancumsum var std nanvar nanstd"
        " average exp exp2 expm1 log log1p log2 log10 sqrt cbrt square sin cos tan sinh cosh tanh"
        " arcsin arccos arctan arcsinh arccosh arctanh sinc median nanmedian quantile percentile"
        " nanquantile ptp cov corrcoef cumulative_sum cumulative_prod trapezoid abs absolute"
        " negative reciprocal max min amax amin clip diff gradient linalg.norm linalg.vector_norm"
        " linalg.matrix_norm linalg.det linalg.trace trace": _ARRAY,
        "polyval power float_power logaddexp logaddexp2 hypot arctan2 add subtract multiply divide"
        " true_divide matmul dot vdot inner outer tensordot maximum minimum remainder mod": _PAIR,
        "argmax argmin argsort digitize count_nonzero searchsorted sign": _INDICES,
        "einsum": Function((1, 2, 3, 4)),
        "interp where": Function((1,)),
        "zeros ones empty asarray array": Function((), dtype=1),
        f"full {_LIKE}": Function((), dtype=2),
        "arange linspace eye identity logspace": Function((), dtype=-1),
    },
    **{module: {_JAX_NN: _ARRAY} for module in ("jax.nn", "flax.linen", "flax.nnx")},
    "jax.lax": {
        "exp exp2 expm1 log log1p logistic sqrt rsqrt cbrt square sin cos tan tanh sinh cosh"
        " integer_pow erf erfc erf_inv lgamma digamma cumsum cumprod cumlogsumexp reduce_sum"
        " reduce_prod neg abs reciprocal": _ARRAY,
        "pow add sub mul div max min atan2 rem dot dot_general batch_matmul ragged_dot conv"
        " conv_general_dilated conv_with_general_padding conv_transpose": _PAIR,
        "psum pmean psum_scatter": Function(is_tree=True),
        "associative_scan": Function((1,), is_tree=True),
        "top_k approx_max_k argmax argmin sort": _INDICES,
        "full": Function((), dtype=2),
    },
    "jax.scipy.special": {
        "logsumexp erf erfc erfinv gammaln digamma xlogy xlog1py entr expit logit log_ndtr ndtr"
        " ndtri rel_entr kl_div logsumexp log_softmax softmax gamma betaln i0 i0e i1 i1e": _ARRAY,
    },
    "jax.scipy.stats": {
        " ".join(f"{name}.{function}" for name in _DENSITIES for function in _OF_DENSITIES): _ARRAY
    },
    "jax.ops": {"segment_sum segment_prod": _ARRAY},
    "jax.random": {
        _RANDOM: Function((), dtype=2),
        "bernoulli categorical": Function((1,), returns_arrays=False),
    },
    "optax": {
        _LOSSES: _ARRAY,
        **_DIVERGENCES,
        "safe_norm safe_root_mean_squares": _ARRAY,
        "global_norm": Function(is_tree=True),
    },
    "optax.losses": {_LOSSES: _ARRAY, **_DIVERGENCES},
    "optax.tree": {
        "norm sum vdot add": Function(is_tree=True),
        "zeros_like": Function((), is_tree=True, dtype=1),
    },
    "jax": {"tree.map tree_util.tree_map": Function((1,), is_tree=True)},
}
# Methods of arrays, which compute with the array before the dot.
METHODS: Mapping[str, Function] = _of_each(
    {
        "": {
            "sum mean prod cumsum cumprod var std dot max min clip trace ptp": _ARRAY,
            "argmax argmin argsort": _INDICES,
        },
        # Updates of indexed elements, such as `x.at[i].add(y)`.
        "at": {"add subtract multiply mul": _ARRAY},
    }
)
FUNCTIONS: Mapping[str, Function] = _of_each(_TABLE)
# Operation whose operand has a bound -> the functions that apply it to their first argument.
DOMAINS: Mapping[str, frozenset[str]] = {
    "log": frozenset({"log", "log1p", "log2", "log10"}),
    "root": frozenset({"sqrt", "rsqrt", "cbrt", "power", "pow"}),
    "exp": frozenset({"exp", "exp2", "expm1", "sinh", "cosh"}),
    "softmax": frozenset({"softmax", "log_softmax"}),
}
# Functions with a `preferred_element_type`, and the method of an array.
_LAX_MATMULS = (
    "dot dot_general ragged_dot batch_matmul conv conv_transpose conv_general_dilated"
    " conv_with_general_padding"
)
_MATMULS = {"matmul dot einsum tensordot inner vdot vecdot": _PAIR}
MATMULS = frozenset(("dot", *_of_each({"jax.numpy": _MATMULS, "jax.lax": {_LAX_MATMULS: _PAIR}})))
# Layers of Flax -> the argument of their constructor by which they return FP32 sums. The code uses
# `jax.tree_util.Partial`, because a user's file may not import `functools`.
_PREFERRED = "preferred_element_type=jnp.float32"
_DOT = f"dot_general=jax.tree_util.Partial(jax.lax.dot_general, {_PREFERRED})"
_CONV = f"conv_general_dilated=jax.tree_util.Partial(jax.lax.conv_general_dilated, {_PREFERRED})"
_LAYERS = {
    "flax.linen": {"Dense DenseGeneral": _DOT, "Conv": _CONV, "Einsum ConvTranspose": _PREFERRED},
    "flax.nnx": {"Linear LinearGeneral Einsum Conv ConvTranspose": _PREFERRED},
}
LAYERS: Mapping[str, str] = _of_each(_LAYERS)
EMBEDDINGS = frozenset(("flax.linen.Embed", "flax.nnx.Embed"))
# Loops -> the position of the first values of their carries.
LOOPS: Mapping[str, int] = {"jax.lax.scan": 1, "jax.lax.while_loop": 2, "jax.lax.fori_loop": 3}
# Constructors such as `jnp.float16(x)`.
DTYPES = frozenset(f"jax.numpy.{name}" for name in ("float16", "bfloat16", "float32"))
# Functions that return their first argument in the dtype of their second one.
CASTS = frozenset(("jax.numpy.asarray", "jax.numpy.array"))
# Usual names of modules, for files whose imports do not show them, such as `from x import *`.
COMMON_NAMES: Mapping[str, str] = {
    "jax": "jax",
    "jnp": "jax.numpy",
    "lax": "jax.lax",
    "nn": "jax.nn",
    "nnx": "flax.nnx",
    "jsp": "jax.scipy",
    "optax": "optax",
    "np": "numpy",
}


def arguments_of(node: ast.Call, name: str, row: Function) -> list[ast.expr]:
    """Returns the arguments of a call that are cast; none of a call such as `f(*arrays)`.

    Args:
      node: the call.
      name: full name of the function.
      row: its row of the table.
    """
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return []
    names = dict(enumerate(positional_names(_function_of(name))))
    passed = dict(enumerate(node.args)) | {k.arg: k.value for k in node.keywords}
    keys = (position if position in passed else names.get(position) for position in row.arrays)
    return [passed[key] for key in keys if key in passed]


def name_of_code(code: CodeType) -> str:
    """Returns the full name of the function of the table that has some code; "" if none has."""
    names = (name for name in FUNCTIONS if name.endswith(f".{code.co_name}"))
    code_of = lambda name: getattr(inspect.unwrap(_function_of(name)), "__code__", None)
    return next((name for name in names if code_of(name) is code), "")


def _function_of(name: str) -> Any:
    """Returns the function with a full name; None if it is not imported."""
    module, _, attributes = name.partition(".")
    function: Any = sys.modules.get(module)
    for attribute in attributes.split("."):
        function = getattr(function, attribute, None)
    return function


def positional_names(function: Any) -> list[str]:
    """Returns the names of a function's positional parameters; none if they are not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each.name for each in parameters if each.kind < each.VAR_POSITIONAL]
