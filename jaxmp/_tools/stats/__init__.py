"""Statistics of the tensors of a training step, from a second program with the same inputs.

Read the modules in this order:

1. `_measure` measures one tensor.
2. `_with_stats` makes a program that runs the traced step again. `_programs._observe` finds its
   gradients, outputs and operands.
3. `_report` compares formats and loss scales.
"""

from jaxmp._tools.stats._report import StatsReport as StatsReport
from jaxmp._tools.stats._with_stats import TrainingStats as TrainingStats
from jaxmp._tools.stats._with_stats import with_stats as with_stats
