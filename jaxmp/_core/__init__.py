"""Foundations without policies: JAX versions, dtypes, trees, messages, and the table of chips.

Other rooms import it as a whole: the names below, and `_compat`, whose names depend on the versions
of JAX and Flax.
"""

# fmt: off
from jaxmp._core._dtypes import (
    BFLOAT16, CASTABLE, DTYPE_NAMES, FLOAT16, FLOAT32, FLOAT64, FLOATS_16BIT, bits, canonical_dtype,
    floating_array, is_16bit, is_fp8, short_name, sum_dtype, wide_dtype,
)
from jaxmp._core._explanation import ExplanationRow, ExplanationSection, to_text
from jaxmp._core._messages import (
    Mark, did_you_mean, install_command, missing_dependency, nearest, user_line, warn_if_dropped,
    warn_user,
)
from jaxmp._core._plain import JSONValue, from_plain, named, to_plain
from jaxmp._core._shardings import (
    as_parts, axis_names, check_tree, flattened, in_mesh_of, in_mesh_of_type, moved_to_mesh_of,
    sampled, shardings_by_path,
)
from jaxmp._core._targets import (
    BFLOAT16_MATMULS, FP8_MATMULS, FUSED_ATTENTION, LARGE_ATTENTION_HEADS, MX_MATMULS, TENSOR_CORES,
    Capability, Target, TargetLike, capability_text, default_target, differences, get_target,
    is_between, possible_targets, share_variable, target_memory, targets, unsupported_gpu,
    usable_share, with_links,
)
from jaxmp._core._trees import (
    BATCH_STATS, PARAMS, HiddenKey, Path, all_finite, are_alike, as_tuple, canonical, cast,
    cast_floating, check_squares, clamped_cast, copied, dtype_of, has_collections, has_fields,
    in_one_program, is_castable, is_float, is_inexact, is_integer, is_key, keep_finite,
    leaves_with_path, map_with_path, owned, parameter_path, path_names, rule_names, saturating_cast,
    select, select_leaf, strip_collection,
)
from jaxmp._core._typing import Array, ArrayLike, AxisNames, DTypeLike, PyTree, RichRenderable
from jaxmp._core._wide import (
    WIDENED_MATMUL, as_weak, strongly_typed, weakly_typed, wide_product,
    widened_product,
)
