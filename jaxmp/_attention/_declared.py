"""Attention masks whose structure a policy declares, and the arrays that they describe.

A declaration replaces the mask that a model passes to an attention layer: the kernel receives the
structure, and of the array nothing but the lengths of padded sequences. An array whose elements are
known is compared with the declaration. A traced array is marked in the program (`mark`), so that
`audit` can compare it later.

Shape suffixes: B batch or 1, N heads or 1, T query positions, S key positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxmp._attention._arguments import sees
from jaxmp._policies._toml import literal
from jaxmp.errors import AttentionError


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The structure of an attention mask, as a policy declares it.

    Args:
      mask: "causal", "padding", "causal+padding" or "full".
      window: positions to the left and right of a query that the mask shows; None: all of them.
      path: path of the attention layer, for messages.
    """

    mask: str
    window: tuple[int, int] | None = None
    path: str = dataclasses.field(default="", compare=False)

    @property
    def is_causal(self) -> bool:
        return self.mask.startswith("causal")

    @property
    def is_padded(self) -> bool:
        return self.mask.endswith("padding")

    @property
    def is_square(self) -> bool:
        """True if it relates query t to key t, so that queries and keys must be equally many."""
        return self.is_causal or self.window is not None

    def settings(self) -> dict[str, Any]:
        """Returns the keys of [attention], or of a rule, that declare it."""
        if self.window is None:
            return {"mask": self.mask}
        left, right = self.window
        is_short = self.is_causal or left == right
        return {"mask": self.mask, "window": left if is_short else (left, right)}

    def __str__(self) -> str:
        return ", ".join(f"{key} = {literal(value)}" for key, value in self.settings().items())


# ---------------------------------------------------------------------------
# Lengths of padded sequences
# ---------------------------------------------------------------------------


def sequence_lengths(mask: jax.Array | np.ndarray, declared: Declaration) -> tuple[Any, Any]:
    """Returns the numbers of unpadded queries and keys of each sequence, `[B]` each.

    Reads one row and one column of the mask, or its diagonal, where these determine the lengths.

    Args:
      mask: bool `[B, N, T, S]`, of JAX or NumPy; its first head determines the lengths.
      declared: a structure with padding.
    """
    rows = mask[:, 0]
    if declared.is_causal:
        # Only padding hides element (t, t).
        keys = rows.reshape(rows.shape[0], -1)[:, :: rows.shape[2] + 1]
    else:
        keys = rows[:, 0] if declared.window is None else rows.any(1)
    queries = rows[:, :, 0] if declared.window is None else rows.any(2)
    return queries.sum(-1), keys.sum(-1)


# ---------------------------------------------------------------------------
# Comparison of an array with a declaration
# ---------------------------------------------------------------------------


def first_mismatch(mask: np.ndarray, declared: Declaration) -> tuple[int, ...] | None:
    """Returns the first position (b, n, t, s) at which a mask contradicts its declaration, if any.

    Args:
      mask: bool `[B, N, T, S]`.
      declared: the structure that it should have.
    """
    _, _, queries, keys = mask.shape
    if declared.is_square and queries != keys:
        return (0, 0, 0, min(queries, keys))
    different = mask != _expected(mask, declared)
    if not different.any():
        return None
    return tuple(map(int, np.unravel_index(different.argmax(), different.shape)))


def _expected(mask: np.ndarray, declared: Declaration) -> np.ndarray:
    """Returns the declared mask with the lengths of `mask`; it broadcasts to `[B, N, T, S]`."""
    _, _, queries, keys = mask.shape
    rows = np.arange(queries, dtype=np.int32)[:, None]
    columns = np.arange(keys, dtype=np.int32)[None, :]
    seen = np.ones((1, 1, queries, keys), bool)
    if declared.is_square:
        seen = seen & sees(declared.window, rows, columns)
    if declared.is_padded:
        lengths = sequence_lengths(mask, declared)
        of_queries, of_keys = (length[:, None, None, None] for length in lengths)
        seen = seen & (rows < of_queries) & (columns < of_keys)
    return seen


def structure_of(mask: np.ndarray) -> Declaration | None:
    """Returns the declaration that describes a mask `[B, N, T, S]` exactly, or None."""
    _, _, queries, keys = mask.shape
    windows = [None]
    if queries == keys:
        # The last query sees nothing to its right, and the first nothing to its left.
        left = int(mask[0, 0, -1].sum()) - 1
        right = int(mask[0, 0, 0].sum()) - 1
        windows += [(left, 0), (left, right)] if min(left, right) >= 0 else []
    for window in windows:
        for name in ("full", "causal", "padding", "causal+padding"):
            candidate = Declaration(name, window)
            if window is not None and candidate.is_causal != (window[1] == 0):
                continue
            if first_mismatch(mask, candidate) is None:
                return candidate
    return None


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


def check_known(mask: np.ndarray, declared: Declaration) -> None:
    """Compares a mask `[B, N, T, S]` whose elements are known with its declaration.

    Raises:
      AttentionError: with the layer, the declaration, the first difference and the fix.
    """
    position = first_mismatch(mask, declared)
    if position is None:
        return
    batch, head, query, key = position
    shown = bool(mask[position])
    does, declares = ("shows", "hides") if shown else ("hides", "shows")
    actual = structure_of(mask)
    name = "" if actual is None else f" The mask is {str(actual).removeprefix('mask = ')}."
    raise AttentionError(
        f"{_layer(declared)} declares {declared}, and contradicts its mask: for query {query} "
        f"(sequence {batch}, head {head}) the mask {does} key {key}, which the declaration "
        f"{declares}.{name} {rule_fix(declared.path, actual or Declaration('array'))}"
    )


def refuse_lengths(declared: Declaration, queries: int, keys: int) -> AttentionError:
    """Returns the error for different numbers of queries and keys in a causal structure."""
    return AttentionError(
        f"{_layer(declared)} declares {declared}, which relates query t to key t, and attends from "
        f"{queries} queries to {keys} keys. {rule_fix(declared.path, Declaration('padding'))}"
    )


def refuse_missing(declared: Declaration) -> AttentionError:
    """Returns the error for a declared structure that hides keys, without a mask of the model."""
    return AttentionError(
        f"{_layer(declared)} declares {declared}, and is called without a mask, so that each query "
        "sees every key. A declaration describes the mask that the model passes: pass one, such as "
        f"mask=nn.make_causal_mask(tokens). {rule_fix(declared.path, Declaration('full'))}"
    )


def declaration_code(actual: Declaration, path: str | None) -> tuple[str, list[str]]:
    """Returns Python code, and lines of TOML, that declare a mask.

    Args:
      actual: the structure of the mask.
      path: path of the layer; None: all attention layers of the recipe.
    """
    settings = actual.settings()
    code = lambda value: f'"{value}"' if isinstance(value, str) else str(value)
    python = ", ".join(f"{key}={code(value)}" for key, value in settings.items())
    toml = [f"{key} = {literal(value)}" for key, value in settings.items()]
    if path is None:
        return f"recipe = recipe.replace({python})", ["[attention]", *toml]
    return f'jaxmp.Rule("{path}", {python})', ["[[rules]]", f'path = "{path}"', *toml]


def rule_fix(path: str, actual: Declaration) -> str:
    """Returns the rule that declares the structure of a mask."""
    rule, toml = declaration_code(actual, path)
    lines = "".join(f"\n    {line}" for line in toml)
    return f"Declare its structure by a rule, {rule}, or in the recipe file:{lines}"


def _layer(declared: Declaration) -> str:
    return f"The attention layer {declared.path!r}" if declared.path else "The attention layer"


# ---------------------------------------------------------------------------
# Marks in a traced program
# ---------------------------------------------------------------------------

# Prefix of the name of a jitted function whose second operand is a declared mask.
MASK_MARK = "jaxmp_mask"


def mark(query: jax.Array, mask: jax.Array, declared: Declaration) -> jax.Array:
    """Returns the query, and records in the program that `mask`, `[B, N, T, S]`, is declared.

    JAX removes unused values from loops and rematerialized functions, and would remove the record.
    The result is therefore a selection between the query and the mask by a constant. XLA removes
    this selection, and with it the array.
    """
    window = "" if declared.window is None else "_{}_{}".format(*declared.window)
    return _marker(f"{MASK_MARK}_{declared.mask}{window}")(query, mask)


def declaration_of(name: str) -> Declaration | None:
    """Returns the declaration in the name of a jitted function; None for other functions."""
    if not name.startswith(f"{MASK_MARK}_"):
        return None
    mask, *window = name.removeprefix(f"{MASK_MARK}_").split("_")
    return Declaration(mask, (int(window[0]), int(window[1])) if window else None)


# One function object for each name, so that JAX finds its earlier trace.
@functools.cache
def _marker(name: str) -> Callable[..., Any]:
    def declare(query: jax.Array, mask: jax.Array) -> jax.Array:
        unused = lax.slice(mask, (0,) * mask.ndim, (1,) * mask.ndim).reshape(())
        unused = lax.full_like(query, 0) + unused.astype(query.dtype)
        return lax.select(np.True_, query, unused)

    declare.__name__ = name
    return jax.jit(declare)
