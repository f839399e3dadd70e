"""The report of `parity`. Its JSON has the fields of `ParityReport` after those of the schema."""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

from jaxmp._core._plain import JSONValue
from jaxmp._tools.report import _section, _views
from jaxmp._tools.validate import _metrics, _parity_search
from jaxmp.errors import ValidationError

_COLUMNS = ("positions", "0.999 to 1.002", "1 %", "5 %", "difference", "KL", "largest ratio")
# Other modules that differ, of which the text names at most so many.
_OTHERS = 3
_RATIO = (
    "Shares of the outputs whose ratio of serving and training is in 0.999 to 1.002, or differs by "
    "at most 1 % or 5 %; mean absolute difference; KL(serving || training); the ratio that is "
    "farthest from 1."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport(_views.Report):
    """Result of `jaxmp.parity`.

    Args:
      outputs: "log_probs", "logits" or "outputs".
      batches: number of compared batches.
      rows: the differences of all positions, and then those of ranges of positions.
      cause: the first operation that differs by more than rounding explains; None if there is none.
      searched: True if the programs were run one operation at a time, since their outputs differ.
      by_operations: mean absolute difference of these runs.

    Example:
      >>> report = jaxmp.parity(jnp.tanh, jnp.tanh, [jnp.ones((2, 4))], outputs="outputs")
      >>> report.cause, report.rows[0].band
      (None, 1.0)
    """

    _subject = "parity report"
    _title = "Parity of training and serving"
    _command = "pathlib.Path('parity.json').write_text(report.to_json())"
    _error = ValidationError
    _schema: ClassVar[dict[str, JSONValue]] = {"schema": "jaxmp.parity", "schema_version": 1}
    _summary = ()

    outputs: str
    batches: int
    rows: tuple[_metrics.ParityRow, ...]
    cause: _parity_search.ParityCause | None
    searched: bool
    by_operations: float

    def _sections(self, full: bool) -> list[_section.Section]:
        total = self.rows[0]
        cells = tuple(
            (
                row.positions,
                *(_section.share_text(x) for x in (row.band, row.within_1, row.within_5)),
                f"{row.difference:.3g}",
                f"{row.kl:.3g}" if self.outputs != _metrics.OUTPUTS else "",
                f"{row.largest:.5g}",
            )
            for row in (self.rows if full else (total, *self.rows[1::3]))
        )
        mood = "bad" if self.cause else "good" if total.band == 1 else "open"
        section = _section.Section(self._headline(), _RATIO, _COLUMNS, cells, mood=mood)
        return [section, *([self._cause(self.cause)] if self.cause else [])]

    def _headline(self) -> str:
        total = self.rows[0]
        count = f"{_section.share_text(total.band)} of {total.count:,} outputs"
        text = f"{count} have a ratio in 0.999 to 1.002"
        if self.cause is not None:
            return f"{text}; first difference: {_location(self.cause)}"
        if not self.searched:
            return text
        if self.by_operations < 0.1 * total.difference:
            return f"{text}; the difference is in the compiled code: the operations agree"
        return f"{text}; rounding and the order of sums explain the differences"

    def _cause(self, cause: _parity_search.ParityCause) -> _section.Section:
        shown, more = ", ".join(cause.others[:_OTHERS]), len(cause.others) - _OTHERS
        others = f" Others differ, too: {shown}{f' and {more} more' if more > 0 else ''}."
        result = (
            f"Run with this change, the mean absolute difference is {cause.after:.3g} instead of "
            f"{cause.before:.3g}."
        )
        parts = (*_section.fix_parts(cause.fix), (False, result))
        return _section.Section(
            "Cause",
            f"{_location(cause)} is the first operation whose results differ by more than rounding "
            f"explains, for equal operands. Training: {cause.train}. Serving: {cause.serve}. "
            f"{cause.text and f'Its line: {cause.text}'}{others if cause.others else ''}",
            fixes=(_section.Fix("Change", parts),),
        )


def _location(cause: _parity_search.ParityCause) -> str:
    where = f"{cause.operation} in {_section.module_text(cause.module)}"
    name = os.path.basename(cause.file)
    return f"{where} ({name}:{cause.line})" if name else where
