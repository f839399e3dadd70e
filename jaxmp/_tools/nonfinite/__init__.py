"""Locates the first value of a training step that is not finite, and names its cause.

Read the modules in this order:

1. `_record` runs the step again and records which values are not finite.
2. `_walk` follows these values from the results back to their origin.
3. `_measure` measures the arguments of the step, and the operands of an operation.
4. `_causes` names the cause, and `_tools.fixes` writes the fix as code and tries it.
"""

from jaxmp._tools.nonfinite._locate import NonfiniteReport as NonfiniteReport
from jaxmp._tools.nonfinite._locate import locate_nonfinite as locate_nonfinite
