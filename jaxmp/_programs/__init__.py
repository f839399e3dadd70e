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
4. `_analysis` is for code that reads a program instead of running it: an index of one jaxpr, and
   facts of variables that are propagated forward or backward through constructs, and the outputs
   of modules.
5. `_observe` runs a program again, and measures the tensors of its modules. `_networks` tells those
   of two networks apart.

Other rooms import the package as a whole: the names below.
"""

# fmt: off
from jaxmp._programs._analysis import (
    Backward, Body, Forward, gradients_of, primitives, returned_arguments, with_returned,
)
from jaxmp._programs._bind import (
    MOVES, SCATTERS, bind, bind_all, bind_as_recorded, bind_in_fp32, is_narrow, is_narrow_dtype,
    rounded_to, runs_in_fp32, wide,
)
from jaxmp._programs._constructs import (
    BRANCHES, CALLS, CONSTRUCTS, CUSTOM_DERIVATIVES, LOOPS, OPAQUE_CALLS, REMATS, SHARD_MAPS,
    CustomJvp, Form, Inner, call_of, cond_of, custom_jvp_of, custom_vmap_of, form_of, inners,
    is_unknown, loop_of, parameters_with, shard_map_of, sub_jaxprs,
)
from jaxmp._programs._interpreter import (
    PROGRAM, Entry, Frame, Interpreter, Start, vary_as_here,
)
from jaxmp._programs._jaxprs import (
    AUTOCAST, BACKWARD, FORWARD, QUANTIZE, RECOMPUTE, Atom, Equation, Path, Traced, array_aval,
    as_jax_array, equations, equations_inside, is_literal, module_paths_of, phase_of, record,
    scope_names, trace, with_parameters, without_unused,
)
from jaxmp._programs._locations import (
    FULL_PRECISION, Lines, Location, Locations, call_site, module_of, root_of,
)
from jaxmp._programs._matmuls import (
    MATMULS, MX_MATMUL, Matmul, attention_flops, count_flops, is_inner_product, is_outer_product,
    kernel_matmuls, matmul_of, multiple_of, padded, terms_of, transposes_lhs, wide_matmul,
)
from jaxmp._programs._networks import networks_of
from jaxmp._programs._observe import (
    ACTIVATIONS, DOTS, GRADIENTS, OPERANDS, SCALES, Inside, Key, Observer, modules_of,
)
from jaxmp._programs._operations import (
    arithmetic_of, axes_of, batch_of, copied_shapes, count_of_keys, dimensions_of, dot_of,
    exponent_of, exported_of, iota_length, is_in_mesh, is_partial, is_unique, jit_of, label_of,
    mesh_axes_of, name_of, new_dtype_of, sharding_of_result, window_of,
)
from jaxmp._programs._static_values import Scope
from jaxmp._programs._solutions import SOLVERS
from jaxmp._programs._uses import (
    DECISIONS, EXACT, FEW_TERMS, SENSITIVE, Use, Uses, exact_uses, uses, why_wide, wide_results,
)
