"""Precision of FP32 matmuls under a policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jaxmp._policies._policy import Policy

_PRECISIONS = {"highest": "highest", "tf32": "tensorfloat32"}


def matmul_precision(policy: Policy, default: str | None) -> str | None:
    """Returns the value of `jax.default_matmul_precision` under a policy.

    Args:
      policy: the policy.
      default: the value for `matmul = "default"` and `"fp8"`.
    """
    return _PRECISIONS.get(policy.matmul, default)


@contextlib.contextmanager
def precision_scope(precision: str | None, outer: str | None) -> Iterator[None]:
    """Runs a block with a matmul precision.

    Args:
      precision: the value of `jax.default_matmul_precision` in the block.
      outer: the present value; if it is equal, the block runs unchanged.
    """
    if precision == outer:
        yield
    else:
        with jax.default_matmul_precision(precision):
            yield
