"""Op table: the operations that run in the compute dtype of a policy, and those that stay in FP32.

`DEFAULT_OPS` contains the default rows, and an `OpTable` adds the edits of a run. Both autocast and
the audit use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxmp._core._messages import nearest
from jaxmp._policies._op_rows import CATEGORIES as CATEGORIES
from jaxmp._policies._op_rows import DEFAULT_OPS as DEFAULT_OPS
from jaxmp._policies._op_rows import OpRule as OpRule
from jaxmp.errors import OpError


@dataclasses.dataclass(frozen=True)
class OpTable:
    """Category of each operation: the default rows with edits. Frozen and hashable.

    Args:
      edits: operation -> category, as a mapping or as pairs. Entries equal to the default are
        dropped, so that tables with the same effect compare equal.
      added: rows for user-defined primitives.

    Raises:
      OpError: if an operation is unknown, or cannot have the category.

    torch.autocast also has lists of operations, which cannot be edited; those of TensorFlow's
    auto_mixed_precision are edited by environment variables. The rows of jaxmp differ from both,
    and each contains a reason.

    Example:
      >>> table = OpTable({"exp": "low"})
      >>> table.category("exp"), table.category("dot_general"), table.category("my_kernel")
      ('low', 'low', 'opaque')
      >>> table.differs()
      {'exp': 'low'}
      >>> table.replace({"exp": "fp32"}) == OpTable()
      True
    """

    edits: Mapping[str, str] | Iterable[tuple[str, str]] = ()
    added: tuple[OpRule, ...] = ()
    _rows: Mapping[str, OpRule] = dataclasses.field(init=False, repr=False, compare=False)
    _category: Mapping[str, str] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = _with_added(self.added)
        edits = dict(self.edits)
        for name, category in edits.items():
            _row(rows, name).check(category)
        kept = {name: edits[name] for name in sorted(edits) if edits[name] != rows[name].category}
        object.__setattr__(self, "edits", tuple(kept.items()))
        object.__setattr__(self, "added", tuple(self.added))
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_category", {n: op.category for n, op in rows.items()} | kept)

    def category(self, name: str) -> str:
        """Returns the category of a primitive; "opaque" without a row."""
        return self._category.get(name, "opaque")

    def op(self, name: str) -> OpRule:
        """Returns the default row or the added row of an operation.

        Raises:
          OpError: if it is not in the table; the message lists similar names.
        """
        return _row(self._rows, name)

    def replace(self, edits: Mapping[str, str] | OpTable) -> OpTable:
        """Returns a table with further edits.

        Args:
          edits: operation -> category, or a table, whose edits and added rows are adopted.

        Raises:
          OpError: if an operation is unknown, or cannot have the category.
        """
        if isinstance(edits, OpTable):
            known = {op.name for op in self.added if op in edits.added}
            added = self.added + tuple(op for op in edits.added if op.name not in known)
            return OpTable({**dict(self.edits), **dict(edits.edits)}, added)
        if not isinstance(edits, Mapping):
            raise OpError(
                f"{edits!r} is not a table of operations. Pass a mapping from operation to "
                "category, or an OpTable. For example OpTable().replace({'exp': 'low'})."
            )
        return OpTable({**dict(self.edits), **edits}, self.added)

    def differs(self) -> dict[str, str]:
        """Returns operation -> category for edits, sorted by name, followed by added rows."""
        return dict(self.edits) | {op.name: self._category[op.name] for op in self.added}

    def names(self, category: str) -> tuple[str, ...]:
        """Returns the sorted names of the operations in a category.

        Example:
          >>> OpTable().names("low")
          ('conv_general_dilated', 'dot_general', 'ragged_dot_general')
        """
        return tuple(sorted(name for name, other in self._category.items() if other == category))

    def __iter__(self) -> Iterator[OpRule]:
        """Iterates over the default and the added rows, sorted by name."""
        return iter(sorted(self._rows.values(), key=lambda op: op.name))

    def __reduce__(self) -> tuple[type[OpTable], tuple[Any, ...]]:
        return OpTable, (self.edits, self.added)

    def __repr__(self) -> str:
        added = f", added={self.added!r}" if self.added else ""
        return f"OpTable({dict(self.edits)!r}{added})" if self.edits or added else "OpTable()"


def _with_added(added: tuple[OpRule, ...]) -> Mapping[str, OpRule]:
    rows = dict(DEFAULT_OPS)
    for op in added:
        if op.name in rows:
            raise OpError(
                f"{op.name!r} has a row already: {rows[op.name].category}, because "
                f"{rows[op.name].reason}. Edit it, such as OpTable({{'exp': 'low'}}), or rename "
                "your primitive."
            )
        rows[op.name] = op
    return rows


def _row(rows: Mapping[str, OpRule], name: str) -> OpRule:
    if name in rows:
        return rows[name]
    close = nearest(str(name), rows)
    hint = f" Nearest: {', '.join(map(repr, close))}." if close else ""
    raise OpError(
        f"{name!r} is not an operation of the table.{hint} Write names as a jaxpr prints them "
        "(jax.make_jaxpr(fn)(x)), such as OpTable({'exp': 'low'}); a matmul is 'dot_general', and "
        "a softmax consists of 'exp', 'reduce_sum' and 'div'. Your own primitives require a row: "
        f"OpTable(added=[OpRule({str(name)!r}, 'low', 'why')])."
    )
