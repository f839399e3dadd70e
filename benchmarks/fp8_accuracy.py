"""Measures the error of one linear layer in FP8 against FP64, as a signal-to-noise ratio in dB.

    python benchmarks/fp8_accuracy.py
    python benchmarks/fp8_accuracy.py --out benchmarks/results/fp8_accuracy_cpu.json

Rows are the output, the gradient of the input and that of the kernel, of normally distributed data
in FP32, and the output of data that scales of whole tensors are said to suffer from: Student's t
with 2.5 degrees of freedom, and channels of which two in 128 are 100 times as large. On a CPU,
operands are rounded to FP8 and multiplied in a wider dtype.
"""

import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import fp8
from result_file import parser_of, write_result

LINEAR = (((1,), (0,)), ((), ()))
SCALINGS = {
    "current": fp8.CurrentScaling(),
    "current, gradients in E4M3": fp8.CurrentScaling(dgrad="e4m3fn", wgrad="e4m3fn"),
    "rowwise": fp8.RowwiseScaling(),
    "mx": fp8.MXScaling(emulate=True),
    "mx, rounded down": fp8.MXScaling(rounding="down", emulate=True),
}
HARD_DATA = {
    "heavy-tailed": lambda rng: rng.standard_t(2.5, size=(256, 128)),
    "outlier channels": lambda rng: (
        rng.normal(size=(256, 128)) * np.where(np.arange(128) % 64, 1, 100)
    ),
}


def in_bfloat16(x: jax.Array, w: jax.Array, dims: Any) -> jax.Array:
    """Multiplies operands that are rounded to bfloat16, with a result in FP32."""
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


def decibels(exact: np.ndarray, result: jax.Array) -> float:
    """Returns the signal-to-noise ratio over all elements."""
    noise = exact - np.asarray(result, np.float64)
    return round(float(10 * np.log10(np.sum(exact**2) / np.sum(noise**2))), 1)


def measure(dot: Any, size: int) -> dict[str, float]:
    """Returns the ratios of a matmul and its gradients, for square operands of a size."""
    x, w, g = (jax.random.normal(jax.random.key(seed), (size, size)) for seed in range(3))
    y, backward = jax.vjp(jax.jit(lambda x, w: dot(x, w, LINEAR)), x, w)
    dx, dw = backward(g)
    x64, w64, g64 = (np.asarray(a, np.float64) for a in (x, w, g))
    ratios = {
        "output": decibels(x64 @ w64, y),
        "gradient of the input": decibels(g64 @ w64.T, dx),
        "gradient of the kernel": decibels(x64.T @ g64, dw),
    }
    kernel = jax.random.normal(jax.random.key(1), (128, 64))
    for name, make in HARD_DATA.items():
        data = jnp.asarray(make(np.random.default_rng(0)), jnp.float32)
        exact = np.asarray(data, np.float64) @ np.asarray(kernel, np.float64)
        ratios[name] = decibels(exact, dot(data, kernel, LINEAR))
    return ratios


def main() -> None:
    """Prints the ratios; with --out, also writes them as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", type=int, default=1024, help="of the normally distributed data")
    options = parser.parse_args()
    dots = {name: fp8.dot_general(scaling) for name, scaling in SCALINGS.items()}
    rows = {}
    for name, dot in {**dots, "bfloat16": in_bfloat16}.items():
        rows[name] = measure(dot, options.size)
        print(f"{name:28}", rows[name], flush=True)
    machine = platform.machine()
    write_result(options.out, machine=machine, size=options.size, decibels=rows)


if __name__ == "__main__":
    main()
