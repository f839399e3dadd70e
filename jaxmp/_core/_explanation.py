"""Base classes of the sections of an explanation."""

# Annotations are evaluated here, so that `typing.get_type_hints` works on the generated
# `__init__` of subclasses in other modules.
import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar


class ExplanationRow(abc.ABC):
    """Row of an explanation. Subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def cells(self) -> tuple[str, ...]:
        """Returns the row's text in each column of the printed table."""


RowT = TypeVar("RowT", bound=ExplanationRow)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplanationSection(abc.ABC, Generic[RowT]):
    """Section of an explanation: typed rows and a summary.

    `str()` formats the summary, the rows as a table, and the notes.

    Attributes:
      rows: one object for each module, matmul, layer or obstacle, with named fields.
      notes: remarks on the rows, such as incomplete counts.
    """

    # Header of the printed table.
    columns: ClassVar[tuple[str, ...]]
    # Maximum number of printed rows; None: no maximum.
    max_printed_rows: ClassVar[int | None] = None

    rows: tuple[RowT, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """The result in one or two sentences."""

    def __str__(self) -> str:
        printed = self.rows[: self.max_printed_rows]
        lines = [self.summary]
        if printed:
            lines += _table([self.columns, *(row.cells() for row in printed)])
        if len(printed) < len(self.rows):
            lines.append(f"and {len(self.rows) - len(printed)} more in .rows")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary and all fields; `to_text` converts those that are not JSON."""
        return {"summary": self.summary, **_fields(self)}


def _table(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def to_text(value: object) -> dict[str, Any] | str:
    """Returns a row as a dict of its fields; policies, rules and dtypes as strings."""
    return _fields(value) if isinstance(value, ExplanationRow) else str(value)
