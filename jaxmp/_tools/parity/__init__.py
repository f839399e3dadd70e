"""Parity: the outputs of a program that trains compared with those of a program that serves.

`_walk` runs programs one operation at a time, `_align` contains the criterion, `_search` finds the
cause, and `_metrics` has the compared quantities.
"""

from __future__ import annotations

from jaxmp._tools.parity._metrics import ParityRow as ParityRow
from jaxmp._tools.parity._parity import assert_parity as assert_parity
from jaxmp._tools.parity._parity import parity as parity
from jaxmp._tools.parity._report import ParityReport as ParityReport
from jaxmp._tools.parity._search import ParityCause as ParityCause
