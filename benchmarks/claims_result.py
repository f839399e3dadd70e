"""Result of a row of `claims.py`."""

import dataclasses

NOT_MEASURED = "not measured here"


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of a row: a sentence, and the table that it is derived from."""

    finding: str
    evidence: str  # where the figures come from, or NOT_MEASURED
    columns: list[str] = dataclasses.field(default_factory=list)
    table: list[list[str]] = dataclasses.field(default_factory=list)
