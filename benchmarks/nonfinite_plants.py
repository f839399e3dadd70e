"""Locates 36 faults that make a function's results not finite, and runs each printed fix.

    python benchmarks/nonfinite_plants.py
    python benchmarks/nonfinite_plants.py --out benchmarks/results/nonfinite_plants.json

The faults are of kinds that tests/planted_nonfinite.py does not have: ends of the domain of a
function, derivatives at zero, overflows of a format, empty masks, singular matrices, a layer of a
model, and a loop. A comment "planted" marks the line that must be reported. Where code
is printed, it replaces the expression that the report names, and the changed function is run. On
the arguments of the fault, it must be finite at that place. On arguments between 0.1 and 0.9, its
results must be those of the original function but for rounding, both in FP64 (functions of 16-bit
arrays: in their own dtypes, within the rounding of these). The difference is NaN if the original
function is not finite for these arguments, either.
The exit status is 1 if a line is wrong, or if printed code does not run, is not finite at its
place, or changes other values.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax import nn as jnn
from jax.scipy import special

import jaxmp
from fixes import distance, is_target, numbers
from result_file import parser_of, table, write_result

F16, F32 = jnp.float16, jnp.float32
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
_COLUMNS = ("fault", "line", "cause", "form", "trial", "finite", "difference")
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def mean_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: fn(*args).mean())


# ---------------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------------


def arccos_of_one() -> Made:
    return mean_gradient(lambda a: jnp.arccos(a)), (jnp.ones(4),)  # planted


def arcsin_of_ten() -> Made:
    return (lambda a: jnp.arcsin(a)), (jnp.full(4, 10.0),)  # planted


def logit_of_one() -> Made:
    return (lambda a: special.logit(a)), (jnp.array([1.0, 0.5]),)  # planted


def erfinv_of_one() -> Made:
    return (lambda a: special.erfinv(a)), (jnp.array([1.0, 0.5]),)  # planted


def gammaln_of_zero() -> Made:
    return mean_gradient(lambda a: special.gammaln(a)), (jnp.zeros(2),)  # planted


def log_of_a_probability() -> Made:
    return (lambda a: jnp.sum(a * jnp.log(a))), (jnp.array([0.0, 1.0]),)  # planted


def log1p_of_minus_one() -> Made:
    return (lambda a: jnp.log1p(-a)), (jnp.array([1.0, 0.5]),)  # planted


def log2_of_a_count() -> Made:
    return (lambda a: jnp.log2(a)), (jnp.array([0.0, 8.0]),)  # planted


def log_of_a_sigmoid() -> Made:
    return (lambda a: jnp.log(jnn.sigmoid(a))), (jnp.full(4, -200.0),)  # planted


def gradient_of_an_entropy() -> Made:
    def entropy(a):
        return -jnp.sum(jnn.softmax(a) * jnp.log(jnn.softmax(a)))  # planted

    return jax.grad(entropy), (jnp.array([0.0, 200.0]),)


def logsumexp_by_hand() -> Made:
    return (lambda a: jnp.log(jnp.sum(jnp.exp(a)))), (jnp.full(4, 100.0),)  # planted


def softplus_by_hand() -> Made:
    return (lambda a: jnp.log(1 + jnp.exp(a))), (jnp.full(4, 100.0),)  # planted


def softmax_by_hand() -> Made:
    return (lambda a: jnp.exp(a) / jnp.sum(jnp.exp(a))), (jnp.full(4, 100.0),)  # planted


def fractional_power() -> Made:
    return mean_gradient(lambda a: a**0.3), (jnp.zeros(4),)  # planted


def power_of_a_negative() -> Made:
    return (lambda a: a**0.5), (-jnp.ones(4),)  # planted


def cosine_similarity() -> Made:
    def cosine(a):
        return jnp.dot(a, jnp.ones(4)) / jnp.linalg.norm(a)  # planted

    return jax.grad(cosine), (jnp.zeros(4),)


def deviation_of_a_constant() -> Made:
    return mean_gradient(lambda a: jnp.std(a)), (jnp.ones(4),)  # planted


def distances_of_pairs() -> Made:
    def distances(a):
        return jnp.linalg.norm(a[:, None] - a[None], axis=-1)  # planted

    return mean_gradient(distances), (jnp.asarray(X),)


def root_of_a_difference() -> Made:
    def spread(a):
        return jnp.sqrt(jnp.mean(a**2) - jnp.mean(a) ** 2 - 1e-3)  # planted

    return spread, (jnp.full(4, 1e3),)


def quotient_behind_a_where() -> Made:
    return mean_gradient(lambda a: jnp.where(a > 0, 1 / a, 0)), (jnp.zeros(4),)  # planted


def root_behind_a_where() -> Made:
    return mean_gradient(lambda a: jnp.where(a > 0, jnp.sqrt(a), 0)), (jnp.zeros(4),)  # planted


def angle_at_the_origin() -> Made:
    return mean_gradient(lambda a: jnp.arctan2(a, a)), (jnp.zeros(2),)  # planted


def divergence_of_distributions() -> Made:
    def divergence(p, q):
        return jnp.sum(p * jnp.log(p / q))  # planted

    return divergence, (jnp.array([0.5, 0.5]), jnp.array([0.0, 1.0]))


def mean_under_an_empty_mask() -> Made:
    def mean(a, mask):
        return jnp.sum(a * mask) / jnp.sum(mask)  # planted

    return mean, (jnp.ones(4), jnp.zeros(4))


def softmax_under_a_full_mask() -> Made:
    def attend(a):
        return jnn.softmax(jnp.where(a > 0.5, a, -jnp.inf))  # planted

    return attend, (jnp.zeros(4),)


def exponential_in_16_bits() -> Made:
    return (lambda a: jnp.exp(a)), (jnp.full(4, 12.0, F16),)  # planted


def square_in_16_bits() -> Made:
    return (lambda a: jnp.square(a)), (jnp.full(4, 300.0, F16),)  # planted


def running_sum_in_16_bits() -> Made:
    return (lambda a: jnp.cumsum(a)), (jnp.full(100, 1000.0, F16),)  # planted


def cast_to_16_bits() -> Made:
    return (lambda a: a.astype(F16)), (jnp.full(4, 1e6),)  # planted


def matmul_in_16_bits() -> Made:
    return (lambda a: a @ a.T), (jnp.full((4, 4), 200.0, F16),)  # planted


def factor_of_an_indefinite_matrix() -> Made:
    return (lambda a: jnp.linalg.cholesky(a)), (-jnp.eye(4),)  # planted


def inverse_of_a_singular_matrix() -> Made:
    return (lambda a: jnp.linalg.inv(a)), (jnp.ones((4, 4)),)  # planted


def growth_in_a_loop() -> Made:
    def grow(a):
        def body(carry, _):
            return carry * 1e5, None  # planted

        return lax.scan(body, a, None, length=20)[0]

    return grow, (jnp.ones(4),)


class Normalized(nn.Module):
    """A layer whose outputs are divided by their norm."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.Dense(8)(x)
        return y / jnp.linalg.norm(y, axis=-1, keepdims=True)  # planted: norms_of_outputs


def norms_of_outputs() -> Made:
    model = Normalized()
    params = model.init(jax.random.key(0), jnp.ones((8, 16)))
    # A row of the batch is padding.
    return jax.grad(lambda p, x: model.apply(p, x).mean()), (params, jnp.asarray(X).at[3].set(0))


def labels_without_a_class() -> Made:
    def loss(params, x, counts):
        weights = 1 / counts  # planted
        logits = x @ params
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.argmax(logits, -1))
        return (losses * weights[jnp.argmax(logits, -1)]).mean()

    return jax.grad(loss), (jnp.ones((16, 4)), jnp.asarray(X), jnp.array([0.0, 3.0, 2.0, 1.0]))


def return_to_go() -> Made:
    def normalized(rewards):
        returns = lax.associative_scan(jnp.add, rewards, reverse=True)
        return (returns - returns.mean()) / returns.std()  # planted

    return normalized, (jnp.zeros(6),)


FAULTS: tuple[Callable[[], Made], ...] = (
    *(arccos_of_one, arcsin_of_ten, logit_of_one, erfinv_of_one, gammaln_of_zero),
    *(log_of_a_probability, log1p_of_minus_one, log2_of_a_count, log_of_a_sigmoid),
    *(gradient_of_an_entropy, logsumexp_by_hand, softplus_by_hand, softmax_by_hand),
    *(fractional_power, power_of_a_negative, cosine_similarity, deviation_of_a_constant),
    *(distances_of_pairs, root_of_a_difference, quotient_behind_a_where, root_behind_a_where),
    *(angle_at_the_origin, divergence_of_distributions, mean_under_an_empty_mask),
    *(softmax_under_a_full_mask, exponential_in_16_bits, square_in_16_bits),
    *(running_sum_in_16_bits, cast_to_16_bits, matmul_in_16_bits),
    *(factor_of_an_indefinite_matrix, inverse_of_a_singular_matrix, growth_in_a_loop),
    *(norms_of_outputs, labels_without_a_class, return_to_go),
)


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


def row_of(make: Callable[[], Made]) -> dict[str, Any]:
    """Returns the row of one fault."""
    fn, args = make()
    report = jaxmp.locate_nonfinite(fn, *args)
    name = make.__name__
    row: dict[str, Any] = dict.fromkeys(_COLUMNS, "")
    is_there = report.line == planted_line(make)
    row |= {"fault": name, "line": "right" if is_there else f"{report.line}", "cause": report.cause}
    code = [line.strip() for line in report.fix.splitlines() if line.startswith("    ")]
    row |= {"form": "code" if code else "words", "trial": report.trial}
    if not code:
        return row
    try:
        new, new_args = changed(name, report, code[0])()
        after = jaxmp.locate_nonfinite(new, *new_args, try_fixes=False)
        is_left = after.reproduced and (after.line, after.cause) == (report.line, report.cause)
        row |= {"finite": "no" if is_left else "yes"}
        return row | {"difference": f"{difference(fn, new, args):.1g}"}
    except Exception as error:
        return row | {"finite": f"{type(error).__name__}: {str(error)[:80]}"}


def planted_line(make: Callable[[], Made]) -> int:
    """Returns the number of the line of a fault."""
    named = f"# planted: {make.__name__}"
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    elsewhere = [number for number, line in enumerate(source, 1) if line.endswith(named)]
    lines, first = inspect.getsourcelines(make)
    here = [first + n for n, line in enumerate(lines) if line.rstrip().endswith("# planted")]
    return (elsewhere or here)[0]


def changed(name: str, report: Any, code: str) -> Callable[[], Made]:
    """Returns the maker of a fault in this module, in which code replaces an expression."""
    source = Path(__file__).read_text(encoding="utf-8")
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.expr)]
    own = [n for n in nodes if n.lineno == report.line and not is_target(n)]
    node = next(n for n in own if ast.unparse(n) == report.expression)
    lines = source.splitlines()
    line = lines[report.line - 1]
    lines[report.line - 1] = f"{line[: node.col_offset]}({code}){line[node.end_col_offset :]}"
    namespace: dict[str, Any] = {"__name__": "changed", "__file__": __file__}
    exec(compile("\n".join(lines), f"{name}_changed.py", "exec"), namespace)
    return namespace[name]


def difference(fn: Any, new: Any, args: tuple[Any, ...]) -> float:
    """Returns by how much two functions differ on other arguments, relative to the results.

    NaN if the results of `fn` are not finite for these arguments, either.
    """
    rng = np.random.default_rng(1)
    leaves = jax.tree.leaves(args)
    is_wide = all(leaf.dtype == F32 for leaf in leaves)
    with jax.enable_x64(is_wide):
        draw = lambda leaf: jnp.asarray(
            rng.uniform(0.1, 0.9, leaf.shape), np.float64 if is_wide else leaf.dtype
        )
        inputs = jax.tree.map(draw, args)
        results = numbers(fn(*inputs))
        is_finite = all(np.isfinite(array).all() for array in results)
        return distance(numbers(new(*inputs)), results) if is_finite else math.nan


def is_wrong(row: dict[str, Any]) -> bool:
    """Returns True for a wrong line, and for code that does not work."""
    if row["line"] != "right":
        return True
    # float16 has 11 bits.
    return row["form"] == "code" and (row["finite"] != "yes" or float(row["difference"]) > 2**-10)


def main() -> int:
    options = parser_of(__doc__).parse_args()
    rows = [row_of(make) for make in FAULTS]
    print(table(_COLUMNS, ([str(row[name]) for name in _COLUMNS] for row in rows)))
    wrong = [row["fault"] for row in rows if is_wrong(row)]
    codes = [row for row in rows if row["form"] == "code"]
    not_tried = sum(row["trial"] == "not tried" for row in codes)
    summary = (
        f"{len(rows)} faults: {sum(row['line'] == 'right' for row in rows)} lines are right;"
        f" {len(codes)} fixes are code, of which {not_tried} were not tried, and"
        f" {len(rows) - len(codes)} are words; {len(wrong)} do not work."
    )
    print(summary)
    write_result(options.out, summary=summary, rows=rows)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
