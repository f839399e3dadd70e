"""Runs traced programs again: the one interpreter of jaxprs, and its readers of equations.

Read the modules in this order:

1. `_constructs` lists the equations that contain jaxprs, such as loops, branches and calls, each
   with its form, and reads their parameters. No other list of them exists in the package: another
   loop is a line of `_FORMS`, and its record. `inners` returns the jaxprs of any construct with
   their operands and results, for code that follows values through it. `_operations` reads the
   parameters of other operations, such as matmuls and reductions.
2. `_bind` runs one equation again, with other operands, and in FP32.
3. `_interpreter` runs a jaxpr: a loop over its equations, and one rule per construct. A client is a
   subclass that changes the values of variables, or single equations.
4. `_in_place` keeps constructs as equations, and traces the jaxprs inside again.
5. `_analysis` is for code that reads a program instead of running it: an index of one jaxpr, and
   facts of variables that are propagated forward or backward through constructs, and the outputs
   of modules.
6. `_observe` runs a program again, and measures the tensors of its modules.
"""

# fmt: off
from jaxmp._programs._analysis import Backward, Body, Forward, primitives
from jaxmp._programs._bind import SCATTERS, bind
from jaxmp._programs._constructs import (
    BRANCHES, CALLS, CONSTRUCTS, CUSTOM_DERIVATIVES, LOOPS, REMATS, Form, call_of, form_of, inners,
    scan_of, sub_jaxprs,
)
from jaxmp._programs._in_place import InPlace
from jaxmp._programs._interpreter import Entry, Frame, Interpreter, Place
from jaxmp._programs._jaxprs import (
    AUTOCAST, BACKWARD, FORWARD, QUANTIZE, Path, Traced, array_aval, equations, is_literal,
    module_paths_of, phase_of, scope_names, trace, without_unused,
)
from jaxmp._programs._locations import FULL_PRECISION, Lines
from jaxmp._programs._matmuls import MATMULS, count_flops, is_outer_product, matmul_of
from jaxmp._programs._operations import (
    Dot, arithmetic_of, dimensions_of, dot_of, is_partial, is_unique, label_of, name_of,
    new_dtype_of, sharding_of_result,
)
from jaxmp._programs._uses import EXACT, SENSITIVE, Use, Uses, wide_results
