"""Measures the errors of the last layer and the loss against FP64, for each dtype of the logits.

    python benchmarks/loss_errors.py
    python benchmarks/loss_errors.py --out benchmarks/results/loss_errors_cpu.json

1,024 rows of 256 features in bfloat16, and an FP32 kernel of 8,192 classes, of which 40 are masked
by a bias of -inf. The reference multiplies the same bfloat16 operands in FP64. Logits are

    random     with a standard deviation of 0.6, as in the first step of a training
    peaked     with a standard deviation of 3; those of the labels are 8 to 20 larger
    large      with a standard deviation of 8; those of the labels are 20 to 40 larger

Errors are relative: of the loss, and norms of the differences of the gradients over the norms of
the gradients. The gradient of the logits is rounded to bfloat16 in each form, as an operand of the
matmuls of the backward pass.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import losses
from jaxmp._core import _compat
from result_file import parser_of, write_result

# XLA for CPU may otherwise omit the rounding of the logits.
EXACT = {"xla_allow_excess_precision": False}
ROWS, FEATURES, CLASSES, MASKED = 1024, 256, 8192, 40
# Name -> standard deviation of the logits, and the range of what is added to those of the labels.
LOGITS = {"random": (0.6, (0, 0)), "peaked": (3.0, (8, 20)), "large": (8.0, (20, 40))}


def linear(hidden, table, labels, bias, dtype, target):
    """Computes the loss in the form for a GPU, or for a CPU with its two passes over the logits."""
    with _compat.context(target=target):
        options = {"bias": bias, "transposed": True, "chunk": 256, "logits_dtype": dtype}
        return losses.linear_cross_entropy(hidden, table, labels, **options)


def stored(hidden, table, labels, bias):
    """Computes the loss of logits that are stored in bfloat16, as PyTorch does under autocast."""
    logits = hidden @ table.astype(hidden.dtype).T + bias.astype(hidden.dtype)[None]
    return losses.softmax_cross_entropy(logits, labels)


FORMS: dict[str, Callable[..., jax.Array]] = {
    "float32, two passes": functools.partial(linear, dtype=None, target="cpu"),
    "float32": functools.partial(linear, dtype=None, target="gpu"),
    "float16": functools.partial(linear, dtype="float16", target="gpu"),
    "bfloat16": functools.partial(linear, dtype="bfloat16", target="gpu"),
    "stored bfloat16": stored,
}


def draw(name: str) -> tuple[Any, ...]:
    """Returns hidden states, table, labels and bias whose logits have the named distribution."""
    deviation, peaks = LOGITS[name]
    rng = np.random.default_rng(0)
    table = rng.standard_normal((CLASSES, FEATURES))
    hidden = rng.standard_normal((ROWS, FEATURES)) * deviation / FEATURES**0.5
    labels = rng.integers(0, CLASSES - MASKED, ROWS)
    hidden += (rng.uniform(*peaks, ROWS) / FEATURES)[:, None] * table[labels]
    bias = jnp.where(jnp.arange(CLASSES) < CLASSES - MASKED, 0.0, -jnp.inf)
    floats = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(table, jnp.float32)
    return *floats, jnp.asarray(labels, jnp.int32), bias


def reference(hidden, table, labels, bias) -> tuple[float, np.ndarray, np.ndarray]:
    """Returns the loss and the gradients of hidden states and table in FP64."""
    operands = (np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (hidden, table))
    hidden, table = operands
    logits = hidden @ table.T + np.asarray(bias, np.float64)
    top = logits.max(1, keepdims=True)
    total = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    rows = np.arange(ROWS), np.asarray(labels)
    slope = np.exp(logits - total)
    slope[rows] -= 1
    slope /= ROWS
    return float((total[:, 0] - logits[rows]).mean()), slope @ table, slope.T @ hidden


def measure(name: str) -> dict[str, dict[str, float]]:
    """Returns form -> errors of the loss and of the two gradients."""
    args = draw(name)
    loss, *gradients = reference(*args)
    errors = {}
    for form, fn in FORMS.items():
        got, got_gradients = jax.jit(jax.value_and_grad(fn, (0, 1)), compiler_options=EXACT)(*args)
        row = {"loss": abs(float(got) - loss) / loss}
        for key, array, exact in zip(("hidden", "kernel"), got_gradients, gradients, strict=True):
            difference = np.asarray(array, np.float64) - exact
            row[key] = float(np.linalg.norm(difference) / np.linalg.norm(exact))
        errors[form] = row
    return errors


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rows = {name: measure(name) for name in LOGITS}
    print(f"{'logits':10}{'form':24}{'loss':>10}{'hidden':>10}{'kernel':>10}")
    for name, errors in rows.items():
        for form, row in errors.items():
            cells = "".join(f"{row[key]:10.1e}" for key in ("loss", "hidden", "kernel"))
            print(f"{name:10}{form:24}{cells}")
    write_result(options.out, rows=rows)


if __name__ == "__main__":
    main()
