"""Trains a small network for 1,000 steps with each optimizer of optax, with bfloat16 moments.

    python benchmarks/moment_optimizers.py

The list of optimizers is read from `optax._src.alias` and `optax.contrib`: every public function
whose required arguments are a learning rate, or those of `ARGUMENTS`. For each one, the result has
the states that jaxmp recognizes (the number of arrays in bfloat16 among the floating-point arrays),
those that a warning names, and the final loss with moments in FP32 and in bfloat16. A value that is
not finite with bfloat16 moments, and is finite without them, is an error.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax._src import alias

import jaxmp
from jaxmp.optim import moment_dtype
from result_file import parser_of, write_result

PARAMS = {"b": jnp.zeros(16), "w": jnp.linspace(-1, 1, 256).reshape(16, 16)}
X = jax.random.normal(jax.random.key(0), (32, 16))
# Optimizers with other required arguments than a learning rate, or whose default stalls.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "noisy_sgd": {"key": 0},
    "adafactor": {"min_dim_size_to_factor": 8},
    "lbfgs": {"linesearch": None},
    "polyak_sgd": {},
    "momo": {},
    "dog": {},
}
# Not optimizers: wrappers, parts of optimizers, and those that read more than one gradient.
OTHERS = {
    "differentially_private_aggregate",
    "dpsgd",
    "hutchinson_estimator_diag_hessian",
    "mechanize",
    "normalize",
    "optimistic_gradient_descent_v2",
    "privatize",
    "reduce_on_plateau",
    "sam",
    "schedule_free",
    "split_real_and_imaginary",
}


def optimizers() -> Iterator[tuple[str, optax.GradientTransformation]]:
    """Yields the optimizers that can be made from a learning rate, by name."""
    for prefix, module in (("", alias), ("contrib.", optax.contrib)):
        for name, make in sorted(vars(module).items()):
            is_part = name.startswith(("_", "scale_by", "schedule_free_eval")) or name in OTHERS
            if is_part or not inspect.isfunction(make):
                continue
            parameters = inspect.signature(make).parameters
            rate = {"learning_rate": 1e-3} if "learning_rate" in parameters else {}
            try:
                made = make(**rate, **ARGUMENTS.get(name, {}))
            except TypeError:
                continue
            if hasattr(made, "init") and hasattr(made, "update"):
                yield prefix + name, made


def loss_fn(params: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(X @ params["w"]) + params["b"] - 1) ** 2)


def train(tx: optax.GradientTransformation, steps: int = 100) -> tuple[Any, Any, jax.Array]:
    """Trains with a transformation of optax; returns its parameters, state and losses."""
    update = optax.with_extra_args_support(tx).update

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = update(
            grads, state, params, value=loss, grad=grads, value_fn=loss_fn, obj_fn=loss_fn
        )
        return (optax.apply_updates(params, updates), state), loss

    run = jax.jit(lambda start: jax.lax.scan(step, start, None, length=steps))
    (params, state), losses = run((PARAMS, tx.init(PARAMS)))
    return params, state, losses


def is_finite(params: Any, losses: jax.Array) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((params, losses)))


def measure(name: str, tx: optax.GradientTransformation, steps: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wide_params, _, expected = train(tx, steps)
        params, state, losses = train(moment_dtype(tx), steps)
    unknown = [str(w.message) for w in caught if w.category is jaxmp.errors.RecipeWarning]
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.dtype.kind in "fV"]
    return {
        "optimizer": name,
        "bfloat16": sum(leaf.dtype == jnp.bfloat16 for leaf in arrays),
        "arrays": len(arrays),
        "unknown": unknown[0].split("states ")[1].split(" of this")[0] if unknown else "",
        "loss_float32": float(expected[-1]),
        "loss_bfloat16": float(losses[-1]),
        "is_finite": is_finite(params, losses),
        "was_finite": is_finite(wide_params, expected),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    rows = []
    for name, tx in optimizers():
        try:
            rows.append(measure(name, tx, arguments.steps))
        except Exception as error:  # optimizers that require other arguments in `update`
            print(f"{name:36} not run: {type(error).__name__}: {str(error)[:80]}")
            continue
        row = rows[-1]
        states = row["unknown"] and f"unknown: {row['unknown']}"
        print(
            f"{name:36} {row['bfloat16']:2} of {row['arrays']:2} arrays, loss "
            f"{row['loss_float32']:.4f} -> {row['loss_bfloat16']:.4f} {states}",
            flush=True,
        )
    write_result(arguments.out, steps=arguments.steps, optimizers=rows)
    failed = [r["optimizer"] for r in rows if r["was_finite"] and not r["is_finite"]]
    known = sum(not row["unknown"] for row in rows)
    print(
        f"{len(rows)} optimizers: {known} recognized, {len(failed)} with values that are not finite"
    )
    if failed or any(math.isnan(row["loss_bfloat16"]) for row in rows if row["was_finite"]):
        raise SystemExit(f"Not finite: {failed}")


if __name__ == "__main__":
    main()
