"""Seeded defects, each with the tests that must catch it: proof that the suite guards behaviour.

    python tests/mutations.py                    applies every defect; runs the tests named for it
    python tests/mutations.py -k loss_scale      those whose name or file contains the text
    python tests/mutations.py --full 5           runs the whole fast suite against 5 random defects

A defect replaces one piece of source text in a temporary copy of the repository. The result is
"caught" if each named test fails, "survived" if one of them passes, and "no longer applies" if the
text does not occur exactly once. The exit status is 0 if all defects are caught.
`tests/test_mutations.py` checks that every defect still applies.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
CAUGHT, SURVIVED, STALE = "caught", "survived", "no longer applies"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One seeded defect.

    Attributes:
      name: short description of what goes wrong.
      file: path below the root of the repository.
      find: text that occurs exactly once in the file.
      replace: text that takes its place.
      tests: tests that must fail, as `file.py::function` below `tests/`.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str | None:
        """Returns the defective source text; None if `find` does not occur exactly once."""
        return source.replace(self.find, self.replace) if source.count(self.find) == 1 else None


def _parsed(file: str, text: str) -> list[Mutation]:
    """Returns the defects of one file of `DEFECTS`."""
    mutations = []
    for block in text.strip("\n").split("\n\n"):
        *_, tests = re.split(r"\n(?=test_\w+\.py::)", block, maxsplit=1)
        for name, diff in re.findall(r"^([^-+].*)((?:\n[-+].*)+)", block, re.MULTILINE):
            lines = diff.split("\n")
            find, replace = ("\n".join(x[2:] for x in lines if x[:1] == sign) for sign in "-+")
            mutations.append(Mutation(name, file, find, replace, tuple(tests.split("\n"))))
    return mutations


# ---------------------------------------------------------------------------
# Defects
# ---------------------------------------------------------------------------

# File -> its defects: the name, the text as in a diff (a part of a line suffices), and the tests.
# Defects without a blank line between them have the same tests, after the last one.
DEFECTS = {
    "examples/command_line.py": r"""
an example splits a batch unevenly
- if value % number:
+ if False:
test_examples.py::test_an_argument_that_is_not_allowed_is_one_sentence
""",
    "jaxmp/__init__.py": r"""
importing the package imports all losses
- from jaxmp import errors, fp8, functional, optim, typing
+ from jaxmp import errors, fp8, functional, losses, optim, typing
test_frame.py::test_import_loads_nothing_heavy
""",
    "jaxmp/_attention/_arguments.py": r"""
a causal query does not see its own position
- return keys <= queries
+ return keys < queries
a window is one position too wide
- (keys >= queries - left)
+ (keys >= queries - left - 1)
test_attention.py::test_results_and_gradients_against_fp64
""",
    "jaxmp/_attention/_blockwise.py": r"""
a window does not reach the last key of a block
- last_column >= rows - left
+ last_column > rows - left
test_attention.py::test_a_window_reaches_into_the_block_before

blocks of keys at the edge of a window are left out
- (last_column >= rows - left)
+ (columns >= rows - left)
test_attention.py::test_results_and_gradients_against_fp64
""",
    "jaxmp/_attention/_cudnn.py": r"""
the key that makes a length even is seen
-     if keys % 2 and not hides and not (settings.is_causal and queries <= keys):
+     if keys % 2 and not hides and not settings.is_causal:
test_attention_cudnn.py::test_padded_lengths_against_fp64

attention of odd lengths has no gradient on a GPU
- (_padded_in_training if is_odd else _kernel)
+ _kernel
test_attention_cudnn.py::test_a_subset_of_the_grid_lowers_forwards_and_backwards
""",
    "jaxmp/_attention/_plain.py": r"""
a query that sees no key attends to all
-     out = out if seeing is None else jnp.where(seeing, out, 0)
test_attention.py::test_a_query_that_sees_no_key_gives_zero_and_no_gradient

bias and mask decide separately whether a query sees a key
-         logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
-         seeing = logits.max(-1, keepdims=True) != -jnp.inf
+         seeing = logits.max(-1, keepdims=True) != -jnp.inf
+         logits = logits if mask is None else jnp.where(mask, logits, -1e30)
test_attention_cudnn.py::test_left_padding_by_a_bias_of_minus_infinity
""",
    "jaxmp/_autocast/__init__.py": r"""
autocast: a gradient inside of the function is not checked
- elif interpreter.has_backward:
+ elif False:
autocast: a loss that is scaled inside of the function gets the hint of an unscaled gradient
- _device._hints.note_scaled((args, kwargs))
+ pass
test_hints.py::test_gradients_around_and_inside_of_autocast_are_checked_too

a function whose matmuls are all in a custom_vjp gets no warning
-  or interpreter.uncast_text(name)
test_autocast.py::test_a_function_with_all_matmuls_in_a_custom_vjp_warns

autocast loses what a function writes to Flax objects
- return writing.write(out, values)
+ return out
test_nnx_gradients.py::test_autocast_writes_to_flax_objects_in_the_dtypes_of_the_function
""",
    "jaxmp/_autocast/_decide.py": r"""
products of data and solutions promote what follows
- Priority.NARROW if exact == Use.SOLUTION else Priority.COMPUTED
+ Priority.COMPUTED
test_autocast_linalg.py::test_what_follows_a_product_with_a_solution_runs_in_16_bits

strained coordinates count as rounded
- if not exact & ~(Use.ANGLE | Use.CHAINED):
+ if False:
test_autocast_magnified.py::test_coordinates_are_not_rounded_before_a_sine

autocast multiplies hidden layers before a sine in FP32
- exact &= ~Use.ANGLE
+ pass
test_autocast_magnified.py::test_hidden_layers_before_a_sine_run_in_16_bits

a narrow matmul under autocast promotes what its result meets
- Decision(dtype, Priority.NARROW, reason, _core.FLOAT32)
+ Decision(dtype, Priority.COMPUTED, reason, _core.FLOAT32)
test_fp32_outputs.py::test_autocast_does_not_promote_what_a_narrow_result_meets

autocast rounds where the program does, although a loss follows
- _programs.SENSITIVE & ~Use.RESULT
+ Use(0)
test_autocast_decisions.py::test_differences_of_probabilities_are_not_rounded

the gradient of a gather is summed in 16 bits
- name == "gather" and _core.is_16bit(values[0].dtype)
+ False
test_autocast_decisions.py::test_the_gradient_of_a_gather_is_a_sum_in_fp32

a float16 product is rounded on the way to a mean
- if dtype == _core.FLOAT16 and _values.is_matmul(equation):
+ if False:
test_autocast.py::test_a_float16_product_on_the_way_to_a_mean_does_not_overflow

a matmul that only FP32 operations read is rounded to 16 bits
- is_only = not read.otherwise
+ return False
test_autocast.py::test_a_product_that_only_fp32_operations_read_is_not_rounded

selected values of a loss are rounded
- return Use.LOSS in use and any(fixed) and any(computed)
+ return False
test_autocast_decisions.py::test_a_loss_selects_values_in_fp32
""",
    "jaxmp/_autocast/_in_place.py": r"""
the rule of a custom derivative does not know which values vary over devices
- return jax.make_jaxpr(run)(*avals, *itertools.compress(avals, moves)), moves_out
+ every = *avals, *itertools.compress(avals, moves)
+     shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in every]
+     return jax.make_jaxpr(run)(*shapes), moves_out
test_autocast.py::test_shard_map

a carried value is weakly typed in the body of a scan
- Value(outer.to_aval(operands[n], equation.invars[n].aval))
+ Value(outer.to_aval(operands[n], equation.invars[n].aval), Priority.ARGUMENT)
a carried value is weakly typed after a scan
- return Value(array) if note is None else
+ return Value(array, Priority.ARGUMENT) if note is None else
test_autocast.py::test_the_carry_of_a_scan_is_not_weakly_typed

a jaxpr that was traced for other operands is used again
- tuple(map(str, avals)), notes, self.key
+ tuple(map(str, avals)), self.key
test_autocast.py::test_a_shared_function_runs_for_the_priorities_of_its_operands

the carry of a loop takes the dtype of the loop body
- outs[:fixed] = map(_as_result, outs[:fixed], avals)
+ outs[:fixed] = outs[:fixed]
test_autocast.py::test_transformations
""",
    "jaxmp/_autocast/_replay.py": r"""
autocast does not see the 16-bit matmuls of a custom_vjp
- if {_programs.array_aval(var).dtype for var in matmul.invars[:2]} == {_core.FLOAT32}:
+ if True:
test_audit.py::test_the_fix_of_precision_highest_names_who_sets_it

a custom_vmap function stays in FP32 under autocast
- is_own_vmap = equation.primitive.name == "custom_vmap_call" and
+ is_own_vmap = False and
test_autocast.py::test_functions_with_their_own_vmap_and_their_rules_are_cast
""",
    "jaxmp/_autocast/_resolve.py": r"""
autocast does not explain why a function cannot read the values of arrays
- if not isinstance(error, jax.errors.UnexpectedTracerError):
+ if False:
test_autocast_linalg.py::test_a_function_that_reads_values_has_a_note

full_precision does not apply
- return _core.FLOAT32 if self.is_full_precision else self.policy.compute_dtype
+ return self.policy.compute_dtype
test_autocast.py::test_full_precision_holds_in_both_passes
""",
    "jaxmp/_core/_compat/_watch_jit.py": r"""
scripts: functions that are traced for their shapes count as called
- if _is_untraced() and not _abstract.get():
+ if _is_untraced():
scripts: a step has the name of a wrapper of Equinox
- source = next((f for f in inner if title_of(f) == name), None)
+ source = None
test_audit_script.py::test_a_step_has_the_name_and_line_of_the_function_of_the_user
""",
    "jaxmp/_core/_compat/__init__.py": r"""
a program that is lowered for several platforms is compared with the first alone
- context.module_context.platforms or ()
+ (context.module_context.platforms or ())[:1]
test_targets.py::test_exported_programs_are_for_the_chip
""",
    "jaxmp/_core/_messages.py": r"""
a result that a function in C keeps counts as dropped
-     return any(each.argval == name and
+     return any(
test_hints.py::test_functions_in_c_may_keep_a_result
""",
    "jaxmp/_core/_shardings.py": r"""
operations of a step are run again outside of the explicit mesh of its arguments
-     return contextlib.nullcontext() if is_set else jax.set_mesh(mesh)
+     return contextlib.nullcontext()
test_nonfinite.py::test_a_step_is_run_in_the_explicit_mesh_of_its_arguments
""",
    "jaxmp/_core/_targets.py": r"""
two chips of one compute capability share the programs of jit
- capability=chip.capability, chip=chip):
+ capability=chip.capability):
test_targets.py::test_a_second_chip_does_not_reuse_the_program_of_the_first

the clock does not tell two GPUs of one name apart
- return continues and has_memory and has_clock
+ return continues and has_memory
test_doctor.py::test_a_short_name_is_one_of_several_chips_until_memory_and_clock_tell_them_apart
""",
    "jaxmp/_core/_trees.py": r"""
reading a state takes nnx.Rngs for an optimizer
-  and not hasattr(node, "_no_name")
test_nnx.py::test_reading_an_optimizer_returns_fp32_parameters_and_draws_no_random_numbers

parameters of NumPy in float64 stay as they are
- return _canonical_float(dtype) if is_numpy else dtype
+ return dtype
test_policy.py::test_casts_convert_arrays_and_numbers_of_numpy

the finite check reads the gradients again beside the clipped norm
- lax.reduce_sum(lax.square(part), a
+ lax.reduce_sum(lax.abs(part), a
test_skipped_steps.py::test_a_gradient_whose_square_overflows_is_skipped
test_skipped_steps.py::test_the_check_is_part_of_the_clipped_norm

elements that are not finite are kept
- return select_leaf(jnp.isfinite(new), new, old) if is_new else new
+ return new
test_skipped_steps.py::test_batch_statistics_stay_finite_in_any_loop

the finite check concatenates sums of different dtypes
- cast(total, widest)
+ total
test_skipped_steps.py::test_gradients_in_fp32_and_fp64
""",
    "jaxmp/_core/_wide.py": r"""
the backward matmuls of a wide head run in FP32
- [product(d_lhs, rhs, *sizes)]
+ [product(d_lhs.astype(dtype), rhs.astype(dtype), preferred_element_type=dtype)]
test_models.py::test_every_product_has_the_operands_that_the_rules_say

autocast multiplies batches of vectors as XLA's CPU compiler refuses
- barrier = lax.optimization_barrier if _compat.target() == "cpu" else lambda array: array
+ barrier = lambda array: array
test_autocast_decisions.py::test_xla_compiles_wide_results_on_a_cpu

a scan converts the kernel of a matmul in front of its loop
- operands = lax.optimization_barrier(operands)
+ operands = tuple(operands)
test_autocast.py::test_kernels_with_a_batch_axis_in_a_scan_multiply_in_16_bits
""",
    "jaxmp/_flax/_casts.py": r"""
the FP32 result of a narrow layer promotes what it meets
- return _core.weakly_typed(result) if resolved.narrow else result
+ return result
an NNX layer with an FP32 result adds a rounded bias
- is_added = name == "bias" or (
+ is_added = (
test_fp32_outputs.py::test_a_head_returns_the_sums_of_its_matmul

arguments of a loss that is a method are cast
-         is_forward=is_named or is_of_flax,
+         is_forward=True,
test_methods.py::test_a_loss_that_is_a_method_receives_its_targets_in_float32
test_methods.py::test_an_agent_whose_step_is_a_method_trains

norms compute in 16 bits
-     upcast_dtype = _core.wide_dtype(compute_dtype)
+     upcast_dtype = compute_dtype
test_linen.py::test_norms_compute_in_fp32_and_hand_on_bf16

the carry of a recurrent cell is cast
-         carried = 0, "carry"
+         carried = ()
test_linen.py::test_a_cells_carry_is_not_rounded

modules round a decision that they pass on
-         if id(leaf) in unrounded:
-             return leaf
test_search.py::test_decisions_pass_through_modules

logits of a head with few outputs are rounded beside a 16-bit array
- if id(leaf) in unrounded:
+ if id(leaf) in unrounded and not resolved.narrow:
test_search.py::test_a_decision_that_strict_promotion_rounds_is_named_and_the_fix_works

policies keep the classes of modules
- of_class=weakref.ref(cls)
+ of_class=lambda: cls
test_leaks.py::test_a_class_dies_as_without_policies

a Linen call copies objects of NNX among its arguments
- return isinstance(value, _OPAQUE)
+ return False
test_linen.py::test_only_floating_arrays_are_cast
""",
    "jaxmp/_flax/_fp8_layers.py": r"""
a layer that rests in a phase keeps its FP8 state
-             return _state.rest(out, self.state())
+             return out
test_phases.py::test_the_first_scale_after_a_bf16_phase_is_that_of_the_tensor
""",
    "jaxmp/_flax/_labels.py": r"""
modules cast an argument that is compared
- not has_literal
+ False
modules cast an argument that decides something
-             layers |= set() if is_16bit else {label}
+             pass
test_inputs.py::test_what_decides_something_is_not_rounded_under_any_name

modules round the FP32 sums of a layer of the user's own class
- is_reached = aval.dtype == _core.FLOAT32 and not self._is_strict
+ is_reached = False
test_search.py::test_modules_pass_the_fp32_results_of_own_layers_to_a_decision
""",
    "jaxmp/_flax/_linen_fields.py": r"""
the backward pass of a last einsum multiplies FP32
-     is_replaced = traits.embedding or traits.layer is nn.Einsum
+     is_replaced = traits.embedding
test_search.py::test_the_gradient_of_a_last_layer_multiplies_16_bits

a perturbation in FP32 promotes activations
-     return cast_like(out, value)
+     return out
test_linen.py::test_a_perturbation_in_fp32_does_not_promote

the steps of an nn.RNN do not share the FP8 states of its cell
- union_filters(module.variable_broadcast, OVERWRITE)
+ module.variable_broadcast
test_fp8_models.py::test_the_state_of_a_layer_that_runs_in_each_step
""",
    "jaxmp/_flax/_linen_interceptor.py": r"""
a Linen model writes NaN into its batch statistics
- _core.keep_finite(new, before[name])
+ new
test_skipped_steps.py::test_batch_statistics_stay_finite_in_any_loop

the forward function of an nn.custom_vjp loses its policies without a word
- if is_primal and any(_compat.trace_of(leaf) for leaf in jax.tree.leaves(args)):
+ if False:
test_linen_transforms.py::test_a_forward_function_that_runs_after_the_model_is_not_silent

a forward pass of a mixin is not cast without a word
- if not issubclass(base, nn.Module) and not hasattr(vars(base)[name], "nowrap"):
+ if False:
test_linen_transforms.py::test_a_forward_pass_that_no_module_defines_is_said
""",
    "jaxmp/_flax/_linen_model.py": r"""
a wrapped class keeps the class of its author
- key = weakref.ref(cls), policies, origin
+ key = cls, policies, origin
test_leaks.py::test_a_class_dies_as_without_policies
""",
    "jaxmp/_flax/_method_call.py": r"""
an operation that refuses 16 bits in other words has no note
- input must be|float16 is not supported
+ input must be
test_boundary.py::test_an_operation_without_a_16_bit_form_is_named_and_the_fixes_work

the note on a loop carry does not name layers with few outputs
- unless you write Rule({subtree!r}, fp32_outputs_below=0)
+ unless you write Rule({subtree!r}, fp32_outputs_below=64)
test_fp32_outputs.py::test_the_note_on_a_carry_of_few_outputs_has_the_fix

the call of a module by its own loss is not cast
- is_in_forward = self.caller is not None and self.caller.is_forward
+ is_in_forward = self.caller is not None
test_methods.py::test_the_call_of_a_module_by_its_own_loss_is_a_forward_pass

the cast at a module boundary overflows
- new = _core.saturating_cast(leaf, dtype)
+ new = _core.cast(leaf, dtype)
test_boundary.py::test_rows_that_a_finite_mask_hides_stay_finite

keep_inputs is ignored
- if key in method.kept or key in method.carried:
+ if key in method.carried:
test_inputs.py::test_kept_arguments_are_not_cast_however_they_are_passed
""",
    "jaxmp/_flax/_missing_precision.py": r"""
modules with weights that no FP8 dot multiplies are not reported
-         _explain.note_unsupported(
+         print(
test_fp8_batch.py::test_delayed_scaling_warns_too
test_fp8_batch.py::test_nnx_models_without_fp8_warn_once

weights without matmuls, and layers that were traced before, count as not in FP8
-     if set(_programs.MATMULS).isdisjoint(
+     if False and set().isdisjoint(
test_fp8_batch.py::test_weights_that_are_not_multiplied_do_not_warn
test_fp8_batch.py::test_weights_that_are_not_multiplied_in_nnx_do_not_warn
""",
    "jaxmp/_flax/_nnx_gradients.py": r"""
gradients of NNX write NaN into variables
-             for write in writes:
+             for write in ():
test_nnx.py::test_statistics_of_accumulated_gradients_are_restored
""",
    "jaxmp/_flax/_nnx_optimizer.py": r"""
a skipped step of an NNX optimizer keeps what the forward pass wrote
- undo(write, others, applied)
+ undo(write, others, applied | True)
test_nnx.py::test_it_trains_and_a_skipped_step_restores_everything_but_random_state

an NNX average reads the rounded parameters
-         if optimizer is not None:
+         if optimizer is None:
test_average.py::test_nnx_averages_are_those_of_the_masters
""",
    "jaxmp/_flax/_nnx_subclass.py": r"""
an NNX model writes NaN into its batch statistics
- variable.set_raw_value(_core.keep_finite(after, before))
+ pass
test_skipped_steps.py::test_batch_statistics_stay_finite_in_any_loop

methods such as training steps read parameters in 16 bits
- is_entered = under_policy.is_forward and not is_active
+ is_entered = not is_active
test_methods.py::test_a_method_that_multiplies_by_its_own_parameters_is_reported

a norm of weights writes them in another dtype
- object.__setattr__(module, "dtype", kernel.dtype)
+ pass
test_nnx_policies.py::test_weights_that_a_norm_writes_keep_their_dtype
""",
    "jaxmp/_flax/_search.py": r"""
an argument of a Fourier transform is cast, which JAX refuses
-             if casts and (is_tangent or lacks_16bit_form(error)):
+             if False:
test_boundary.py::test_an_operation_without_a_16_bit_form_is_named_and_the_fixes_work

an argument is in FP32 beside 16 bits under strict promotion
- may_meet = reached.meets or not
+ may_meet = not
test_inputs.py::test_an_argument_that_must_be_narrow_is_cast

the search traces a teacher in a loss that does not differentiate it
- _compat.assigned(_hints.traced, None)
+ _compat.assigned(_hints.traced, _hints.traced.get())
test_hints.py::test_the_teacher_of_a_student_in_float16_is_not_named

a layer is a decision although its results feed other layers
-     if use & ~_OF_NORM == _programs.Use.RESULT:
+     if _programs.Use.RESULT in use:
a result that the model divides by its norm is rounded
- if use & ~_OF_NORM ==
+ if use ==
test_search.py::test_decisions_keep_their_sums_and_their_neighbours_are_rounded

a call that chooses another head has the decisions of the first one
-     is_choice = isinstance(number, int) and abs(number) < _MAX_CHOICE
+     is_choice = False
test_search.py::test_numbers_fields_functions_and_attributes_choose_a_head

a rule for a class is judged by a call that does not enter all modules
- if not each.module_type or above <= called.keys()]
+ ]
test_linen.py::test_a_rule_may_match_a_module_that_a_call_does_not_enter

a model that cannot be traced is not reported
-             messages.append(self._failure)
test_search.py::test_a_model_that_cannot_be_traced_is_reported_with_its_fix

a search keeps the classes of modules in the caches of JAX
-         labeling.modules.clear()
-         return labels
+         return labels
test_leaks.py::test_a_class_dies_as_without_policies
""",
    "jaxmp/_flax/_shardings.py": r"""
an array that is an attribute of an NNX module cannot be differentiated
- if not isinstance(variable, nnx.Variable):
+ if False:
test_nnx_gradients.py::test_an_array_that_is_an_attribute_is_differentiated
""",
    "jaxmp/_flax/_train_state.py": r"""
replace stores NaN in batch statistics
- updates[_core.BATCH_STATS] = _core.keep_finite(new, old)
+ pass
test_train_state.py::test_replaced_statistics_stay_finite

a skipped step keeps the new batch statistics
-             mutables = _core.select(applied, mutables, {n: getattr(self, n) for n in mutables})
test_train_state.py::test_a_skipped_step_changes_only_scale_and_counters

a skipped step keeps the new FP8 history
-             overwritten = _overwritten.select(applied, overwritten, old_overwritten)
test_train_state.py::test_overwritten_state_is_assigned_and_reverted_on_a_skip

a skipped step counts as a step
- if applied is None else applied.astype(jnp.int32)
+ if applied is None else jnp.ones((), jnp.int32)
test_train_state.py::test_a_skipped_step_changes_only_scale_and_counters

flax.serialization restores masters that were rounded
-     _check_stored(state, *map(_described, (state, new)))
test_train_state.py::test_flax_serialization_restores_what_it_wrote_without_casts
""",
    "jaxmp/_gradients/_dynamic_loss_scale.py": r"""
the scale grows one step late
- grows = lax.ge(counted, int32(self.growth_interval))
+ grows = lax.gt(counted, int32(self.growth_interval))
an overflow does not restart the count of finite steps
- lax.add(self.good_steps, int32(1)), int32(0))
+ lax.add(self.good_steps, int32(1)), self.good_steps)
test_loss_scale_presets.py::test_worked_traces

the scale grows beyond its maximum
-         return lax.clamp(float32(self.floor), scale, float32(self.ceiling))
+         return lax.max(float32(self.floor), scale)
test_loss_scale.py::test_the_traced_step_is_the_documented_one_bit_for_bit

every overflow backs off, whatever the hysteresis
- backs_off = ~finite & lax.le(hysteresis, int32(1)) if has_hysteresis else ~finite
+ backs_off = ~finite
test_loss_scale_presets.py::test_deepspeed

a scale of Flax grows one step too early
- growth_interval=value.growth_interval + 1,
+ growth_interval=value.growth_interval,
test_loss_scale.py::test_a_scale_of_jmp_or_flax_continues_with_the_same_values
""",
    "jaxmp/_gradients/_evaluate.py": r"""
gradients of the parts of a weight are averaged
- axis for axis in axes if axis not in summed_over)
+ axes)
test_gradients.py::test_gradients_of_gathered_parts_are_sums_over_devices_already

the state of delayed scaling is divided by the loss scale
- grads = tuple(_overwritten.map_params(unscale, tree) for tree in sums.grads)
+ grads = tuple(jax.tree.map(unscale, tree) for tree in sums.grads)
test_fp8_state.py::test_microbatches

gradients are unscaled by the next, halved scale
- options.loss_scale.with_leaves(scale_value=poisoned).unscale
+ options.loss_scale.with_leaves(scale_value=poisoned / 2).unscale
test_gradients.py::test_power_of_two_scales_change_no_bit_in_fp32

a loss that is not finite leaves its gradients finite
-     poisoned = lax.select(finite, jnp.broadcast_to(scale, loss.shape), nan)
+     poisoned, finite = jnp.broadcast_to(scale, loss.shape), jnp.array(True)
test_gradients.py::test_a_bad_loss_with_finite_gradients_poisons_the_gradients

a 16-bit loss causes no warning
-     if _core.is_16bit(array.dtype):
+     if False:
test_gradients.py::test_a_rounded_loss_warns_once_at_the_line_of_the_user

the weight of a loss is ignored
-     weight = lax.stop_gradient(_scalar(loss[1], "weight"))
+     weight = jnp.ones_like(lax.stop_gradient(_scalar(loss[1], "weight")))
test_gradients.py::test_sum_and_weight_average_over_all_microbatches

gradients of microbatches are summed instead of averaged
-         return full if sums.weight is None else full / sums.weight.astype(full.dtype)
+         return full
test_gradients.py::test_microbatches_give_the_whole_batch_gradient

gradients of microbatches are accumulated in their own 16 bits
- dtype = options.accumulate_dtype if _core.is_castable(leaf) else leaf.dtype
+ dtype = leaf.dtype
test_gradients.py::test_sixteen_bit_gradients_are_accumulated_in_fp32

all microbatches use the same random numbers
- lambda key: jax.random.fold_in(key, index), args[i]
+ lambda key: key, args[i]
test_gradients.py::test_aux_is_stacked_and_keys_are_folded

gradients of reduced parameters are summed in each microbatch
- if (delays := any(map(reduced_axes, leaves))) else evaluate
+ if (delays := False) else evaluate
test_reduced_parameters.py::test_gradients_of_reduced_parameters_are_summed_after_the_loop

a bad loss of a microbatch on explicit axes leaves its gradients finite
- total = unscaled(jax.tree.map(summed, total), options)
+ total = jax.tree.map(summed, total)
test_reduced_parameters.py::test_a_bad_loss_of_one_microbatch_poisons_all_gradients

a bad loss of one device poisons its copy of a summed gradient only
- return lax.psum(loss, tuple(axes)) if axes else loss
+ return loss
test_gradients.py::test_shard_map_returns_gradients_that_jax_sums_over_devices
test_gradients.py::test_one_bad_device_poisons_the_gradients_that_jax_sums

gradients are summed over devices instead of averaged
- combine = lax.pmean if sums.weight is None else lax.psum
+ combine = lax.psum
test_gradients.py::test_vmap_averages_once

microbatches of rows on explicit axes lose their sharding
- out_sharding=_sharding_of_parts(leaf)
+ out_sharding=None
test_gradients.py::test_microbatches_of_sharded_rows_have_the_gradients_of_the_batch
""",
    "jaxmp/_gradients/_fp32/__init__.py": r"""
a scalar parameter in 16 bits causes a warning of a rounded loss
- if body.maker(body.source_of(var, _CASTS)) is not None:
+ if True:
test_gradients.py::test_scalar_parameters_in_16_bits_are_no_rounded_loss

a loss in 16 bits that a model casts to FP32 causes no warning
- elif name in _CASTS or name == "add":
+ elif name == "add":
test_gradients.py::test_a_rounded_loss_warns_once_at_the_line_of_the_user
""",
    "jaxmp/_gradients/_fp32/_derivatives.py": r"""
gradients of kernels are written in the order of the gradient of the result
-     operands.sort(key=lambda operand: max(operand[-1], default=-1))
test_fp32_gradients.py::test_gradients_of_kernels_end_with_the_last_axis_of_the_kernel

the gradient of an FP32 array that meets a 16-bit weight is rounded
- = jnp.promote_types(other.dtype, low.dtype)
+ = low.dtype
test_fp32_gradients.py::test_a_16_bit_weight_multiplies_an_array_of_another_dtype

convolutions on one device have FP32 results, which a GPU computes in TF32
-     if mesh.size <= 1 or s
+     if mesh.size == 1 or s
test_fp32_gradients.py::test_a_convolution_on_one_device_is_not_computed_in_tf32

weight gradients keep the dtype of their matmul
-     chosen = (asked & possible) - narrow
+     chosen = set()
test_fp32_gradients.py::test_gradients_are_summed_in_fp32

weight gradients of dots are rounded to 16 bits
- d_carrier = transposed_dot(equation, side, other, cotangent, _core.FLOAT32)
+ d_carrier = transposed_dot(equation, side, other, cotangent, low.dtype).astype(_core.FLOAT32)
test_fp32_gradients.py::test_kernel_gradients_are_no_bfloat16_numbers

gradients of convolutions are summed over devices in 16 bits
- return lambda *pair: in_parts(*pair).sum(0)
+ return lambda *pair: in_parts(*pair).astype(jnp.float16).sum(0).astype(jnp.float32)
each device receives the whole gradient of a convolution
- out_specs=PartitionSpec(axes),
+ out_specs=PartitionSpec(),
test_fp32_gradients.py::test_a_convolution_casts_its_gradient_to_fp32_before_the_sum_over_devices

products of weights are summed over devices in 16 bits
-     if equation.primitive.name not in MATMULS or any(map(jnp.iscomplexobj, operands)):
+     if True:
test_fp32_gradients.py::test_products_of_weights_are_accumulated_in_fp32

the backward pass of a ragged matmul reads the sizes of groups from another trace
-         other, low, rest = saved
+         other, low, _ = saved
test_fp32_gradients.py::test_gradients_are_summed_in_fp32

weights that a function with its own derivative computes are activations
- layouts, list(copies), are_weights(operands))
+ layouts, list(copies), False)
test_fp32_gradients.py::test_gradients_of_computed_weights_are_summed_in_fp32
""",
    "jaxmp/_gradients/_fp32/_interpreter.py": r"""
gradients of biases are summed in 16 bits
- (name, Copy): _move for name in MOVES}
+ (name, Copy): _move for name in MOVES - {"broadcast_in_dim"}}
test_fp32_gradients.py::test_gradients_are_summed_in_fp32

gradients of functions of weights are rounded to 16 bits
- (name, Copy): _apply for name in _FUNCTIONS}
+ (name, Copy): _apply for name in _FUNCTIONS - {"tanh"}}
test_gradients.py::test_one_device_sums_float16_gradients_in_the_range_of_several
""",
    "jaxmp/_gradients/_fp32/_layout.py": r"""
split weights are gathered before they are cast
-     if name in ELEMENTWISE and not others:
+     if name in ELEMENTWISE - {"convert_element_type"} and not others:
test_gathers.py::test_weights_are_gathered_in_the_dtype_of_the_matmul

gathered weights are never kept for the backward pass
-         if mark is not None and not mark.again
+         if False
test_gathers.py::test_gathered_weights_can_be_kept
""",
    "jaxmp/_gradients/_fp32/_values.py": r"""
the second derivative of a loss does not pass through 16-bit copies of weights
-     return Copy(lax.convert_element_type(detached(array), dtype), array, layout)
+     return Copy(lax.convert_element_type(lax.stop_gradient(array), dtype), array, layout)
test_gradients.py::test_gradients_in_a_loss_are_differentiated_again

copies that are read as other arrays have no gradient
-     return low, _zero_tangent(low) if is_zero else tangent.astype(low.dtype)
+     return low, _zero_tangent(low)
test_fp32_gradients.py::test_gradients_are_summed_in_fp32
""",
    "jaxmp/_gradients/_hints.py": r"""
forces in a scaled loss get the hint of an unscaled gradient
- if loss is not None and loss.is_scaled:
+ if False:
forces in a loss that is scaled by hand get the hint of an unscaled gradient
- traces.isdisjoint(_tracing.outer_traces(t))
+ (len(traces) == 1) == traces.isdisjoint(_tracing.outer_traces(t))
test_hints.py::test_forces_in_a_scaled_loss_have_no_hint

a recipe that was not applied is not said
-     if any(_core.bits(dtype) <= 16
+     if not any(_core.bits(dtype) <= 16
test_hints.py::test_each_training_whose_parts_do_not_fit_has_a_hint

a teacher in float16 must have a loss scale
- if not traces_of(inputs) <= loss.outer:
+ if True:
test_hints.py::test_the_teacher_of_a_student_in_float16_is_not_named
""",
    "jaxmp/_gradients/_loss_scale.py": r"""
the minimum scale is lost when a loss scale is flattened
-         vars(new).update(zip((*cls.STATIC, "_mark"), static, strict=True))
+         vars(new).update(zip((*cls.STATIC, "_mark"), static, strict=True))
+         if "min_scale" in vars(new):
+             vars(new).update(min_scale=None)
test_loss_scale.py::test_copies_are_equal_and_bit_identical

gradients are unscaled in 16 bits
-     wide = jnp.asarray(_core.cast_floating(leaf, _core.FLOAT32))
+     wide = jnp.asarray(leaf)
test_loss_scale.py::test_float16_gradients_are_unscaled_in_fp32

a loss that was scaled by hand counts as not scaled
-         note_scaled(tree)
test_hints.py::test_a_loss_that_is_scaled_by_hand_does_not_warn
""",
    "jaxmp/_gradients/_parts.py": r"""
a parameter that devices share is a part of a weight
- summed & _compat.varying_axes(x), params, axes)
+ summed, params, axes)
a product is a part of a weight where JAX does not track devices
- _SummedAxes(_MOVES).run
+ _SummedAxes(_MOVES | _PRODUCTS).run
test_gradients.py::test_a_scale_that_devices_share_is_no_part_although_its_rows_are_gathered
""",
    "jaxmp/_gradients/_value_and_grad.py": r"""
labels in another argument than the inputs are not split, without an error
-     if is_batch and batch == [1]:
+     if is_batch:
a target network is split into microbatches
- is_copy = any(rows.values()) and
+ is_copy = False and
test_gradients.py::test_a_batch_that_is_not_certain_is_refused_with_the_arguments_to_name
""",
    "jaxmp/_policies/_device.py": r"""
float16 on a TPU is accepted
- if _compat.target() == "tpu":
+ if _compat.target() == "TPU":
test_device.py::test_fp16_on_a_tpu_warns_and_names_bf16

a model in float16 is differentiated without a loss scale
-     if not mark.is_checked and computes_in(policies, _core.FLOAT16):
+     if mark.is_checked and computes_in(policies, _core.FLOAT16):
test_hints.py::test_each_training_whose_parts_do_not_fit_has_a_hint

a recipe that computes in FP32 counts as not applied
-         loss.mark.is_applied = True
+         pass
test_hints.py::test_a_recipe_that_computes_all_matmuls_in_float32_is_applied
""",
    "jaxmp/_policies/_load.py": r"""
the rules of an extended file precede those of the file
- merged, own.rules + base.rules
+ merged, base.rules + own.rules
test_recipes.py::test_extends_puts_own_rules_first_and_replaces_scalars
""",
    "jaxmp/_policies/_loss_scale_table.py": r"""
a recipe in float16 has no loss scale
- return "dynamic" if _core.FLOAT16 in
+ return "none" if _core.FLOAT16 in
test_recipes.py::test_float16_anywhere_asks_for_a_dynamic_loss_scale
""",
    "jaxmp/_policies/_recipe.py": r"""
a phase begins one step late
- bisect.bisect_right(_load.first_steps
+ bisect.bisect_left(_load.first_steps
test_phases.py::test_a_phase_has_the_keys_of_the_recipe_and_its_own
""",
    "jaxmp/_policies/_required.py": r"""
a required rule that matches nothing is accepted
-             raise _no_match_error(rule, paths)
+             continue
test_rules.py::test_a_required_rule_that_matches_nothing_is_refused
""",
    "jaxmp/_policies/_resolve.py": r"""
copies of a policy map are of its base class
-         return _restored, (type(self), self.default
+         return _restored, (Policies, self.default
test_rules.py::test_copies_are_equal_and_hash_alike

the last matching rule decides instead of the first
- in zip(policies.rules, policies._policies, strict=True):
+ in list(zip(policies.rules, policies._policies, strict=True))[::-1]:
test_rules.py::test_the_first_rule_decides_alone

the output dtype of the root module is ignored
- policy.output_dtype if names_output or not path else own_dtype
+ policy.output_dtype if names_output else own_dtype
test_linen.py::test_root_output_and_named_outputs_alone_leave_the_compute_dtype

a head with an FP32 output rounds its sums to 16 bits
- wide_output=policy.output_dtype if is_wide else _core.FLOAT32 if returns_fp32 else None
+ wide_output=_core.FLOAT32 if returns_fp32 else None
test_linen.py::test_a_wider_output_is_emitted_by_the_product_itself
test_nnx_policies.py::test_a_wide_output_keeps_the_sums_of_16_bit_products
""",
    "jaxmp/_policies/_rules.py": r"""
a rule by position selects one layer too many at the end
- (self.layers or 0) - (self.last or 0))
+ (self.layers or 0) - (self.last or 0) - 1)
test_rules.py::test_a_rule_selects_the_first_and_last_layers

a rule in FP32 keeps FP8 matmuls
- return dataclasses.replace(policy, matmul="default")
+ return policy
test_rules.py::test_a_rule_for_fp32_is_no_rule_for_fp8
""",
    "jaxmp/_policies/_schema.py": r"""
an unknown key of a TOML file is accepted
-             raise _unknown_key(setting, kind)
+             continue
test_recipes.py::test_a_refusal_names_the_location_and_shows_a_fix_that_loads
""",
    "jaxmp/_programs/_analysis.py": r"""
statistics: values of the forward pass that the backward pass moves are gradients
- elif any(flags) or not cotangents or all(var.aval.size == 1 for var in each.invars):
+ else:
statistics: all results of a barrier are gradients
- if each.primitive.name == "optimization_barrier":
+ if False:
test_statistics.py::test_the_errors_of_a_format_are_those_of_a_step_in_it

autocast forgets the uses of what a loop carries
- new[n] = self._joined(known[n], args[argument])
+ new[n] = known[n]
test_autocast_decisions.py::test_a_decision_in_the_next_iteration

an array that a loop returns is another one
- if n is not None and n >= first and result >= len(inner.carried):
+ if False:
test_fp32_gradients.py::test_weights_that_a_scan_returns_are_not_copied

facts do not return to the start of a loop
- new[argument] = self.join(args[argument], results[n])
+ pass
a while loop always runs
- [args[n] for n in inner.carried] if inner.may_be_skipped else results
+ results
test_programs.py::test_facts_pass_through_constructs_in_both_directions
""",
    "jaxmp/_programs/_bind.py": r"""
emulation: subnormal numbers are rounded like normal ones
- lax.select(is_subnormal, lax.mul(steps, step), rounded)
+ rounded
emulation: a number beyond the range is finite
- lax.gt(lax.abs(rounded), np.float32(info.max))
+ lax.gt(lax.abs(rounded), np.float32(np.inf))
test_statistics.py::test_numbers_are_rounded_as_numpy_casts_them
""",
    "jaxmp/_programs/_constructs.py": r"""
locate: a reversed scan runs forwards
- -1 if equation.params["reverse"] else 1
+ 1
test_nonfinite.py::test_the_iteration_of_a_reversed_scan_is_found

calls of `Traced` objects are not entered
- "closed_call", "eval_jaxpr", "jit"
+ "closed_call", "jit"
test_autocast.py::test_the_call_of_a_traced_object_is_entered
test_fp32_gradients.py::test_gradients_are_summed_in_fp32
""",
    "jaxmp/_programs/_solutions.py": r"""
products of data and solutions are rounded
- if stack and facts & {_SOLUTION, _GAIN}:
+ if stack and facts == {_SOLUTION}:
test_autocast_linalg.py::test_a_product_with_a_solution_is_fp32

the product with a gain, `p @ inv(w)`, is rounded
- facts & {_SOLUTION, _GAIN}
+ facts & {_SOLUTION}
the innovation of a filter is rounded
- *({None} if name == "sub" else ())}
+ *()}
test_audit_plants.py::test_a_matrix_that_is_factorized_and_a_router_may_be_fp32

what a matmul computes for the product with a solution is rounded
- self.found |= {stack, *facts}
+ self.found |= {stack}
test_autocast_linalg.py::test_a_product_with_a_solution_is_fp32

the layer in front of a product with a solution is rounded
- own = {fact for var, fact in pairs if fact or array_aval(var).size == size}
+ own = facts
test_autocast_linalg.py::test_the_layer_in_front_of_a_product_with_a_solution_is_fp32

solutions that the user rounds are multiplied in FP32
- results = [None if is_rounded else result] * count
+ results = [result] * count
products with the Q of QR run in FP32
- if name in _ORTHOGONAL:
+ if False:
test_autocast_linalg.py::test_what_follows_a_product_with_a_solution_runs_in_16_bits
""",
    "jaxmp/_programs/_distances.py": r"""
autocast rounds the operands of distances
- if both <= norms}
+ if False}
autocast does not see the norms of a distance below a square
- square=sources[0], norms=terms[0].roots
+ square=sources[0]
test_autocast_magnified.py::test_the_matmul_of_distances_and_its_gradients_are_fp32
""",
    "jaxmp/_programs/_interpreter.py": r"""
a scan that runs again loses its direction
- "reverse": loop.step < 0
+ "reverse": False
test_programs.py::test_running_a_construct_again_changes_nothing
test_validate_capture.py::test_outputs_of_a_reversed_scan
test_fp32_gradients.py::test_a_reversed_scan_of_layers_runs_backwards

while loops of a vmap change the elements that ended
- if condition.jaxpr.outvars[0].aval.ndim:
+ if False:
test_programs.py::test_side_results_leave_constructs

while loops: only the last iteration is recorded
- at = lax.min(n, jnp.int32(count - 1))
+ at = jnp.int32(count - 1)
test_nonfinite.py::test_a_planted_fault_is_named_and_its_fix_removes_it

a recomputation that runs again is merged with the forward pass
- self.run(call.jaxpr, call.separated(args), start)
+ self.run(call.jaxpr, args, start)
test_programs.py::test_running_a_construct_again_changes_nothing

an unknown operation with a jaxpr is not reported
- if self.consequence and name not in self.unknown and _constructs.is_unknown(equation):
+ if False:
test_programs.py::test_an_unknown_operation_with_a_jaxpr_is_reported_once
test_programs.py::test_each_client_names_the_consequence
""",
    "jaxmp/_programs/_jaxprs.py": r"""
references stay references
-     return closed if are_inside else _tracing.discharged(closed)
+     return closed
test_programs.py::test_references_become_values
test_audit.py::test_a_running_sum_in_a_scan
test_nonfinite.py::test_values_are_followed_through_a_reference

flags of JAX hide functions from autocast
-         with _tracing.with_default_flags():
+         if True:
test_programs.py::test_flags_of_jax_do_not_change_what_is_traced

references become values inside of functions with a derivative of their own
-     return closed if are_inside else _tracing.discharged(closed)
+     return _tracing.discharged(closed)
test_programs.py::test_references_become_values
""",
    "jaxmp/_programs/_locations.py": r"""
modules below a method of the root have its class in their paths
- {_jaxprs.without_methods(p[:1]) for p in names
+ {p[:1] for p in names
test_audit.py::test_modules_below_methods_of_the_root_have_the_paths_of_rules

autocast multiplies in FP32 wherever the helper of a distance multiplies
- return tuple(_calls(equation))
+ return tuple(_calls(equation))[:1]
test_autocast_magnified.py::test_only_the_matmul_of_a_distance_is_fp32
""",
    "jaxmp/_programs/_matmuls.py": r"""
a product of one term rounds positions
- terms_of(equation) == 1
+ not dot_of(equation).contracted[0]
test_autocast.py::test_an_outer_product_keeps_positions

the gradient of a convolution in groups divides by the groups twice
- params.get("lhs_dilation") or (1,)
+ (params["batch_group_count"], *params["lhs_dilation"])
test_audit.py::test_flops_of_convolutions_and_their_gradients

the branches of an inner condition add up
- inside = [max(inside, key=Counter.total)]
+ inside = list(inside)
test_audit.py::test_flops_of_control_flow_and_groups

a transposed last layer multiplies as XLA's CPU compiler refuses
- if dtypes and _compat.target() == "cpu":
+ if False:
test_autocast_decisions.py::test_xla_compiles_wide_results_on_a_cpu
test_search.py::test_xla_compiles_a_transposed_last_layer_on_a_cpu

the FLOPs of causal attention are not halved
- queries * keys // (2 if is_causal else 1)
+ queries * keys
test_audit.py::test_flops_of_fused_attention_follow_the_mask
""",
    "jaxmp/_programs/_observe.py": r"""
statistics: operands of kernels are not measured
- (*DOTS, *_KERNELS)
+ MATMULS
test_statistics.py::test_operands_of_kernels_are_measured

statistics: all arguments of a function in the backward pass are gradients
- flags.append(is_carry or self.is_cotangent(var))
+ flags.append(phase == _jaxprs.BACKWARD)
test_statistics.py::test_the_errors_of_a_format_are_those_of_a_step_in_it

statistics: recomputed operands are counted again
- if place.phase == _jaxprs.FORWARD or inside.is_cotangent(var):
+ if place.phase != _jaxprs.BACKWARD or inside.is_cotangent(var):
test_statistics.py::test_a_scan_has_a_row_for_each_layer
""",
    "jaxmp/_programs/_operations.py": r"""
the kernel's gradient of a transposed convolution is estimated to read no transposed operands
- copies if is_transposed else copies[:1] if is_padded else []
+ copies[:1] if is_padded else []
test_memory.py::test_transposed_convolutions_write_their_operand_with_zeros
""",
    "jaxmp/_programs/_static_values.py": r"""
a known value ignores the parameters of its operation
- bind_all(self.equation, operands, **changes)
+ [self.equation.primitive.bind(*operands)]
test_masks.py::test_values_that_follow_from_shapes_are_those_of_jax
""",
    "jaxmp/_programs/_uses.py": r"""
one of several terms of each example is rounded
- result.ndim <= int(equation.primitive.name in _LINEAR)
+ result.ndim == 0
test_search.py::test_decisions_keep_their_sums_and_their_neighbours_are_rounded

autocast rounds a sigmoid before its logarithm
-             used[0] |= _MAGNIFIED
+             pass
test_autocast_magnified.py::test_a_logarithm_magnifies_without_a_loss

autocast rounds coordinates before their sine
-             used[0] |= _ANGLE
+             pass
test_autocast_magnified.py::test_coordinates_are_not_rounded_before_a_sine

autocast multiplies wide layers before a sine in FP32
- Use.ANGLE if _is_of_point(equation)
+ Use.ANGLE if True
test_autocast_magnified.py::test_hidden_layers_before_a_sine_run_in_16_bits

autocast forgets what a jitted function does with its operands
- if name in CONSTRUCTS or name in OPAQUE_CALLS:
+ if name in OPAQUE_CALLS:
test_autocast_decisions.py::test_a_decision_in_the_next_iteration

autocast takes attention for a decision
- use & _SUMMED and not use & _PRODUCT
+ use & _SUMMED
test_autocast_decisions.py::test_its_healthy_neighbours_stay_in_16_bits

a sum of a gradient makes the exponential of a softplus a softmax
- of_mul = _PRODUCT | _SUMMED if name == "mul"
+ of_mul = _PRODUCT if name == "mul"
test_audit_fixes.py::test_parameters_that_enter_an_exponential_are_read_in_fp32

autocast rounds the covariance of a Kalman filter
- return [_of_factor(equation, n) | passed for n in range(count)]
+ return [_of_factor(equation, n) for n in range(count)]
autocast keeps a network in front of a filter in FP32
- passed = _CHAINED if is_chained else _NONE
+ passed = use & (_CHAINED | _SOLVED)
test_autocast_linalg.py::test_a_filter_computes_its_covariance_in_fp32

autocast rounds the operands of the gradients of a factorized matmul
-             if use and phase_of(
+             if False and phase_of(
test_autocast_magnified.py::test_ill_conditioned_matmuls_and_their_gradients_are_fp32

a sum that a function with its own derivative reads is that of a softmax
-         if name in CONSTRUCTS or
+         if name.startswith("custom_"):
+             return [_MAGNIFIED] * count
+         if name in CONSTRUCTS or
test_audit.py::test_a_sum_of_exponentials_is_a_softmax_only_if_a_quotient_follows
""",
    "jaxmp/_tools/audit/_audit.py": r"""
an audit reads the first phase of a recipe for all
-         report = audit_one(phase)
+         report = audit_one(recipe.split_phases()[0])
test_phases.py::test_the_audit_reads_each_phase
""",
    "jaxmp/_tools/audit/_auditor.py": r"""
a float16 number makes fixes name a recipe of float16
- counts[_core.FLOAT16] > counts[_core.BFLOAT16]
+ counts[_core.FLOAT16] > 0
test_audit_steps.py::test_fixes_name_the_recipe_of_most_values

a learned temperature counts as a loss scale
- (op, scales - others)
+ (op, scales)
test_audit_steps.py::test_a_loss_scale_in_the_state

the weight of a loss that grows with the steps counts as a loss scale
- if dtype not in _checks.FLOATS)
+ if False)
test_audit_plants.py::test_loss_scales_that_are_computed_from_an_integer

the audit reports the gradients of an inner gradient of a vector
- elif op.is_differentiated_again and call in self.matmul_calls:
+ elif False:
test_audit.py::test_second_derivatives_of_a_vector

the rule of a fix contains scopes that are no modules
- return modules if self.modules else path
+ return path
test_audit_fixes.py::test_a_rule_of_a_fix_names_all_modules_without_other_scopes
test_audit_fixes.py::test_parameters_that_enter_an_exponential_are_read_in_fp32

the audit reports matmuls that the compiler removes
- is_checked = is_run and contracts and is_float
+ is_checked = contracts and is_float
test_audit_steps.py::test_the_forward_pass_of_an_initialization_is_not_checked

the audit reports the gradients of an outer product
- contracts = matmul.contracts and not is_gradient
+ contracts = matmul.contracts
test_autocast.py::test_an_outer_product_keeps_positions

the audit reports the gradients of an outer product at the line of a matmul
- not matmul.contracts or self.matmul_calls.get(call, False)
+ not matmul.contracts and self.matmul_calls.get(call, True)
test_autocast.py::test_an_outer_product_at_the_line_of_a_matmul_is_right

the audit is silent about an operation of a later JAX that contains a program
- elif _programs.is_unknown(op.equation):
+ elif False:
test_audit.py::test_an_unknown_operation_with_a_jaxpr_is_not_inspected

the audit ignores full_precision
-         if _programs.FULL_PRECISION in names:
-             return frozenset({_core.FLOAT32})
test_audit.py::test_full_precision_is_allowed
""",
    "jaxmp/_tools/audit/_check_compiled.py": r"""
the fix of a mapped step that donates nothing compiles it again
- _programs.Form.SHARDS in forms and not numbers
+ False
test_audit_compiled.py::test_state_that_is_not_donated_is_a_note
""",
    "jaxmp/_tools/audit/_check_random.py": r"""
the audit compares random numbers with the constant as it was rounded
- return low, next(floats, value)
+ return low, value
the audit is silent about equal keys that are drawn
- is_only_key = _programs.count_of_keys(op.equation) == 1
+ is_only_key = False
the audit reports the sign of a random number
- if is_sign or not _core.is_16bit(draw.op.dtype):
+ if not _core.is_16bit(draw.op.dtype):
the audit is silent about a random number that is rounded after it was drawn
- draw = Draw(op, draw.values)
+ pass
the audit warns of a dropout rate of zero
- draw.report(op, text, _checks.NOTE)
+ draw.report(op, text, "warning")
test_audit_plants.py::test_outcomes_of_random_numbers

the audit reports the logarithm of a probability that is bounded away from 0 and 1
- new = label.ends if None in rows else
+ new = label.ends if True else
test_audit_plants.py::test_probabilities_without_a_logarithm_may_be_rounded
""",
    "jaxmp/_tools/audit/_check_float16.py": r"""
the audit lets the square of a vector overflow in float16
- squares = [_square(op)] if is_square and _float16_operands(op) else []
+ squares = []
test_audit_plants.py::test_the_range_of_float16

a division by a loss scale that is a constant is silent
- += [scale] * (scale >= _LEAST_SCALE)
+ += []
test_audit_plants.py::test_a_loss_scale_that_is_a_constant

a division by the loss scale in float16 is silent
-             elif _is_float16(op):
+             elif False:
test_audit_plants.py::test_gradients_and_their_scale

the gradient of a bias with one element counts as a norm
- if maker is not None and not maker.is_backward:
+ if maker is not None:
test_audit_plants.py::test_the_gradient_of_a_bias_with_one_element_is_no_norm_of_scaled_gradients

the audit lets integer sums overflow in float16
- if largest > _LARGEST:
+ if False:
test_audit_plants.py::test_defects_in_parts_of_programs

the copy of a float16 gradient counts as a rounded one
- [*dtypes] == [_core.FLOAT16, _core.FLOAT16, _core.FLOAT32]
+ [*dtypes][:2] == [_core.FLOAT16, _core.FLOAT16]
test_audit.py::test_a_copied_gradient_is_not_rounded

the audit ignores an epsilon that is 0 in float16
- return LostEpsilon(op, message, fix) if is_zero else None
+ return None
test_audit_plants.py::test_the_range_of_float16

the code of a quotient has the line of its epsilon
- fix.replace("Compute", f"At {op.where}, compute")
+ fix
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before
""",
    "jaxmp/_tools/audit/_check_integers.py": r"""
the audit ignores coordinates that a matmul reads in 16 bits
- if _programs.Use.ANGLE not in _programs.exact_uses(op.equation, op.use):
+ if True:
test_audit_fixes.py::test_the_fix_of_coordinates_that_are_multiplied_in_16_bits

the audit takes every integer for a small one
- if is_exact or integers.bound <= limit:
+ if is_exact or integers.bound >= 0:
the audit takes the least of several bounds of integers
- return max(labels, key=lambda
+ return min(labels, key=lambda
the audit reports powers of two, which are exact in 16 bits
- if is_exact or integers.bound <= limit:
+ if integers.bound <= limit:
test_audit_plants.py::test_integers_in_16_bits

indices in 16 bits are not reported
- shape, default=0) > limit
+ shape, default=0) > 2**30
test_audit_fixes.py::test_the_fix_of_a_step_is_its_own_code

the audit does not see the squares of a rounded array before arccosh
- square integer_pow reduce_sum
+ square
the audit does not know the phase of a complex exponential
- if e.primitive.name == "mul" for v in e.invars]
+ if e.primitive.name == "div" for v in e.invars]
test_audit_plants.py::test_defects_in_parts_of_programs
""",
    "jaxmp/_tools/audit/_check_losses.py": r"""
the logarithm of one minus a rounded probability is silent
- singular = (0, 1) if op.name in ("log", "log2") else (0,)
+ singular = (1,)
test_audit_plants.py::test_probabilities_without_a_logarithm_may_be_rounded

a pinball loss has no difference
- is_multiple = is_choice or op.name in ("max", "min")
+ is_multiple = False
test_audit_plants.py::test_defects_in_parts_of_programs

the sum inside of a softmax is a cast of the user
-  and not op.is_within("/jax/_src/nn/"):
+ :
test_audit.py::test_the_sum_inside_of_a_softmax_is_no_cast_of_the_user

the audit is silent about a matrix that the user rounds and factorizes
- if _programs.Use.SOLVED in op.use:
+ if False:
the audit is silent about rounded log-probabilities that are compared
-     if _programs.Use.ORDER in op.use:
+     if False:
the audit is silent about a rounded matrix that is factorized
- _programs.Use.SOLVED | _programs.Use.CHAINED: _SOLVED_READS
+ _programs.Use.NONE: _SOLVED_READS
test_audit_plants.py::test_defects_in_parts_of_programs

the audit reports matmuls inside of a loss that computes in 16 bits
- finding.op.line in losses
+ False
test_audit.py::test_the_matmuls_of_a_library_are_those_of_its_call

the audit reports a maximum or a mean that a model subtracts as if a loss did
- is_made_of |= other in
+ is_made_of |= op in
test_fp32_outputs.py::test_differences_of_one_result_are_not_reported

the audit does not know a softplus that a loss writes itself
- exponential.name == "exp"
+ exponential.name == "tanh"
test_audit_plants.py::test_differences_within_a_rounded_result

the audit takes the parts of a rotation for differences of a loss
- is_summand = any(
+ is_summand = True or any(
the audit reports a result from which its own mean is subtracted
- if not is_made_of or _are_slices(
+ if True or _are_slices(
test_fp32_outputs.py::test_differences_of_one_result_are_not_reported

probabilities that the user rounds before a difference are not reported
- op.mark(UserCast(
+ repr(UserCast(
test_audit_plants.py::test_values_that_are_rounded_before_a_difference

the sums of a product of weights are a cast of the user
- dtype is not None and with_sums(
+ False and with_sums(
test_audit_fixes.py::test_the_codes_of_a_fix_are_those_that_work

the audit is silent about rounded logits of a softmax
- _programs.Use.SOFTMAX: _SOFTMAX_READS
+ _programs.Use.NONE: _SOFTMAX_READS
test_audit_plants.py::test_a_planted_defect_is_found_at_its_line_and_its_fix_removes_it

differences of an L1 loss in 16 bits are not reported
- if e.primitive.name == "sub"
+ if e.primitive.name == "add"
test_audit_fixes.py::test_the_fix_of_a_step_is_its_own_code

the audit does not see differences within a rounded result
- gather split broadcast_in_dim
+ gather split
test_audit_plants.py::test_differences_within_a_rounded_result
""",
    "jaxmp/_tools/audit/_check_matmuls.py": r"""
the fix of an FP32 matmul names a precision that the line does not set
- function, context = _jax_function(op), "jax.default_matmul_precision('highest')"
+ return "Remove precision=HIGHEST"
FP32 matmuls of a library's own choice are reported
- return is_of_jax or _checks
+ return _checks
test_audit.py::test_the_fix_of_precision_highest_names_who_sets_it

a fix rounds a log-sum-exp before it is subtracted
- if op.name == "sub" and op.labels(
+ if False and op.labels(
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before

a finding names its own line as that of its promotion
- is_here = label.op.line == op.line
+ is_here = False
test_audit_promotions.py::test_the_matmuls_of_a_promotion_have_its_fix

FP32 matmuls of a layer of Flax count as JAX's own choice
- for code in own.called if
+ for code in op.codes if
test_audit.py::test_the_fix_of_precision_highest_names_who_sets_it

the number of labels in a loss is a width
- if not sizes or _has_sizes_of_data(op):
+ if not sizes:
test_audit.py::test_the_matmuls_of_a_library_are_those_of_its_call

the axis of vmap is a width
- if _is_mapped(op) else
+ if False else
test_audit.py::test_the_batch_is_no_width

the audit advises the autocast that a custom_vjp ignores
- elif any(map(is_custom_vjp, op.enclosing)) and
+ elif False and
test_audit_fixes.py::test_the_fix_of_a_function_in_a_custom_vjp_does_not_repeat_what_is_applied

a matmul of a forward rule has the fix of another one
- if is_rule or is_forward_rule:
+ if is_rule:
test_audit_fixes.py::test_the_fix_of_a_backward_rule_names_the_operand

the derivatives of a solver are reported
- if is_exact or is_collected or
+ if is_exact or
test_audit.py::test_a_solver_and_its_derivatives_are_fp32_by_design

the audit reports the promotion of an FP32 innovation
- if not is_wide or not op.is_forward or _is_fp32_by_design(op, matmul):
+ if not is_wide or not op.is_forward:
test_audit_plants.py::test_a_matrix_that_is_factorized_and_a_router_may_be_fp32

the audit reports matmuls that a rule wants in FP32
- elif _core.FLOAT32 not in allowed and (allowed or is_wide):
+ elif allowed or is_wide:
test_audit.py::test_a_rule_that_wants_fp32_makes_it_right

the audit reports the gradient of a router
-  or origins == {None}
test_audit_plants.py::test_a_matrix_that_is_factorized_and_a_router_may_be_fp32

the audit reports the matmul that selects values of a loss
-  or _is_selection(op)
test_audit_plants.py::test_a_loss_may_select_log_probabilities_in_fp32
""",
    "jaxmp/_tools/audit/_check_ops.py": r"""
a division by a rounded variance is silent
- op.audit.report(OnePass, op.operands[1:], f
+ op.audit.report(OnePass, (), f
test_audit_plants.py::test_defects_in_parts_of_programs

the root in the derivative of an arc function is that of a variance
- is_other = op.name == "rsqrt" and not is_derivative
+ is_other = op.name == "rsqrt"
test_audit.py::test_the_root_in_a_derivative_is_no_norm

a parameter that is stored in 16 bits may enter an exponential
- half_of([*op.operands, *op.equation.outvars])
+ half_of(op.equation.outvars)
the rule for a parameter of an exponential leaves it stored in 16 bits
- dtypes = "p=f32," * is_stored + "c=f32"
+ dtypes = "c=f32"
a parameter that is rounded before its softplus is not found
-     return RoundedParameter(op, "a parameter is rounded to 16 bits", fix) if fix
+     return RoundedParameter(op, "a parameter is rounded to 16 bits", fix) if False
test_audit_fixes.py::test_parameters_that_enter_an_exponential_are_read_in_fp32

the audit is silent about a softmax in 16 bits
- if role == "softmax":
+ if role == "nothing":
test_audit.py::test_a_half_softmax

each sum of exponentials is a softmax
- return "softmax" if is_divided
+ return "softmax" if sums
test_audit.py::test_a_sum_of_exponentials_is_a_softmax_only_if_a_quotient_follows

the count of a segment's largest elements is a sum
-     if op.name == "scatter-add":
+     if False:
test_audit_fixes.py::test_the_fixes_of_sums_of_segments

the derivative of a tanh is a power that overflows
- REDUCTIONS | _core.named("rsqrt one_minus_square")
+ REDUCTIONS | _core.named("rsqrt")
the fix of a power rounds its result to float16 again
- fix = _origins.fix_operation(op, back)
+ fix = _origins.fix_operation(op, dtype.name)
test_audit.py::test_powers_overflow_in_float16_alone

a scalar parameter with an FP32 master is a loss
- x.has_gradient or traced.variables
+ traced.variables
test_audit.py::test_a_scalar_parameter_is_no_loss
""",
    "jaxmp/_tools/audit/_check_sharding.py": r"""
the fix of a gather does not split the copy
- PartitionSpec({spec})
+ PartitionSpec()
test_audit_sharding.py::test_the_fix_of_a_gather_is_the_constraint_of_the_program
""",
    "jaxmp/_tools/audit/_check_speed.py": r"""
the fix of a lookup casts the rows, not the table
- fix = fix_wide(sentence, label.op, [0], dtype.name)
+ fix = fix_wide(sentence, label.op, [], dtype.name)
test_audit_plants.py::test_a_table_that_is_larger_than_its_lookups_is_not_cast

the audit takes the parts of matmuls that XLA merged for those of the model
- else ("slice", "split")
+ else ("slice", "split", "dot_general")
test_audit_speed.py::test_a_matmul_each_has_no_note_even_if_xla_merges_the_matmuls

the audit advises against a recomputation whose results do not fit the memory
- has_matmul and size <= free
+ has_matmul
test_audit_speed.py::test_recomputation_without_a_note

the audit forgets that each chunk of a loss adds to the gradient of the kernel
- (8 * chunks + 2
+ (2
test_audit_speed.py::test_chunks_cost_bytes
""",
    "jaxmp/_tools/audit/_check_carried.py": r"""
the audit takes a measurement for state that a step reads
- or n in _NONE.union(*parameters)
+ or True
the audit takes a value that is NaN for one step for state
- >= _BATCH | {n} and
+ >= _BATCH and
the audit does not see that a step keeps its parameters
- if is_choice and operands[0] >= _TEST:
+ if False:
the audit takes a saturating cast for a choice of old values
- not (operands[1] & operands[2]) >= _BATCH
+ True
test_audit_steps.py::test_statistics_that_a_skipped_step_does_not_keep
""",
    "jaxmp/_tools/audit/_check_state.py": r"""
the audit reports perturbations of parameters in FP32
- is_parameter and From(update.number, update.factor) in rounded
+ is_parameter
test_audit_steps.py::test_16_bit_parameters_that_are_perturbed

the fix of a loss scale names a train state that is not there
- return traced.gradients_with(leaves[0]) if leaves else ""
+ return ""
test_audit.py::test_the_fix_of_an_unused_loss_scale_runs_in_a_loop_of_optax

the audit fails at a loop with numbers among its differences
- any(v in pair for v in operands)
+ not set(operands).isdisjoint(pair)
test_audit.py::test_a_loop_that_subtracts_an_expression_of_numbers

the audit takes a scalar parameter, a summand of the loss, for state
- is_scalar &= not update.op.location.differentiated
+ pass
test_audit_fixes.py::test_scalar_parameters_are_no_losses_and_no_state

the audit ignores 16-bit state that is not updated with gradients
- not (update.has_gradient or self.is_average(update))
+ False
test_audit_plants.py::test_state_of_a_training_step

an average beside packed masters is taken for a moment
- (bool(update.others & trained) or is_beside_packed)
+ bool(update.others & trained)
the audit overlooks averages of the parameters before the update
- trained = masters.union(n for n in stored if
+ trained = masters.union(n for n in stored if not
test_audit_steps.py::test_averages_beside_masters_are_reported_and_the_fix_is_clean

an input of a model has the fix of a parameter
- name not in _OF_FLAX and roles[number] != _roles.INPUT
+ name not in _OF_FLAX
test_audit_fixes.py::test_an_input_is_no_parameter
""",
    "jaxmp/_tools/audit/_carries.py": r"""
the sums of a beam search are not found
- reduce_max reduce_min top_k")
+ reduce_max reduce_min")
test_audit_plants.py::test_linear_recurrences

a sum into a part of a carry is not found
- _SUMS = _core.named("add add_any sub scatter-add scatter-sub")
+ _SUMS = _core.named("add add_any sub")
test_audit_plants.py::test_defects_in_parts_of_programs

the audit takes the gates of a recurrent layer for a decayed sum
-     if not all(rows):
-         return False
+     rows = [row or Linear() for row in rows]
test_audit_plants.py::test_linear_recurrences

rows that iterations of a loop read count as the whole array
- return (shares[0] or 0.0) + (written if is_varied else 1.0)
+ return 1.0
one row that all iterations read counts as other rows
- (written if is_varied else 1.0)
+ written
test_audit.py::test_the_gradient_of_a_row_that_an_iteration_reads
""",
    "jaxmp/_tools/audit/_check_sums.py": r"""
the fix of a carry changes code for a cast of the backward pass
- if not _dataflow.is_forward(cast):
+ if False:
test_audit_fixes.py::test_the_fix_of_a_step_is_its_own_code

all terms of a scatter with known indices count as one sum
- if indices is not None and indices.size:
+ if False:
the sums of the elements of a batch count as one
- if axis not in batch
+ if True
test_audit.py::test_the_terms_of_known_indices_are_counted

the audit calls an exact count a rounded sum
-         is_other = linear.factor != 1 or _is_exact_count(op, carry, linear.addition)
+         is_other = linear.factor != 1
test_audit_plants.py::test_defects_in_parts_of_programs

the audit takes a solver's small steps for a residual stream
- return steps if depends else []
+ return []
test_audit.py::test_small_steps_of_a_solver_are_lost_in_16_bits

the audit estimates a loop as if it added in chunks
-     if not in_chunks:
+     if False:
test_audit.py::test_the_estimate_of_a_sum_holds

the gradient of a lookup is estimated by the number of indices
-         return math.ceil(equation.invars[2].aval.size / max(operand.size, 1))
+         return math.prod(equation.invars[1].aval.shape[:-1])
test_audit.py::test_the_gradient_of_a_lookup_depends_on_the_rows_of_the_table
""",
    "jaxmp/_tools/audit/_compile.py": r"""
the arguments of a jitted shard_map count as copies on each device
- sharding if isinstance(sharding, NamedSharding) else inside.get(n)
+ sharding if isinstance(sharding, NamedSharding) else None
test_memory.py::test_the_arrays_in_a_shard_map_are_parts
""",
    "jaxmp/_tools/audit/_checks.py": r"""
defects are lost at casts to values that vary over devices
- reduce_precision pvary"
+ reduce_precision"
test_audit_plants.py::test_casts_to_varying_values_hide_no_defect
""",
    "jaxmp/_tools/audit/_dataflow.py": r"""
the audit takes the weight of a term of a loss for a loss scale
- not (is_gradient(var) and dtype_of(var) in FLOATS)
+ True
test_audit_steps.py::test_a_scale_multiplies_the_whole_loss

the audit loses the norm of scaled gradients that vary over devices
- convert_element_type reshard pvary"
+ convert_element_type reshard"
test_audit_plants.py::test_casts_to_varying_values_hide_no_defect

operations other than matmuls are products of a power iteration
- products = [each for each in here if each.primitive.name == op.name]
+ products = list(here)
test_audit_steps.py::test_a_callback_without_results_beside_a_product_with_a_vector

the audit knows under vmap only loss scales that are powers of two
- is_scalar = is_scalar or any(map(math.isnan, sizes))
+ pass
test_audit_plants.py::test_a_gradient_inside_of_a_loss_has_its_own_scale

the audit ignores the loss scale in a division of gradients
- return known[0] - known[1]
+ return known[0]
test_audit_plants.py::test_gradients_and_their_scale

a power iteration is reported
- other is matrix and (
+ other is None and (
two heads of one layer are a power iteration
- is_near(each.outvars[0], vector) or
+ each is not op.equation or
test_audit.py::test_a_power_iteration_is_fp32_by_design
""",
    "jaxmp/_tools/audit/_hlo.py": r"""
programs of TPUs end at a kernel whose attributes contain a line break
- _CONTINUED.sub("", text)
+ text
test_plan.py::test_kernels_of_tpus_are_read
test_hlo.py::test_line_breaks_in_attributes_do_not_end_a_computation
""",
    "jaxmp/_tools/audit/_hlo_collectives.py": r"""
the audit confuses the axes of a mesh
- along != along[:, :1]
+ along == along[:, :1]
test_hlo.py::test_replica_groups_are_mesh_axes
""",
    "jaxmp/_tools/audit/_hlo_matmuls.py": r"""
matmuls of asynchronous calls count again for their start
- inside is None or step.instruction.opcode not in _FUSIONS
+ inside is None
test_hlo.py::test_matmuls_of_asynchronous_calls_count_once
""",
    "jaxmp/_tools/audit/_labels.py": r"""
the FP32 result of a factorization was promoted
- ).union(_programs.MATMULS, _programs.SOLVERS)
+ ).union(_programs.MATMULS)
test_audit.py::test_the_fp32_result_of_a_factorization_is_no_promotion

each result of a barrier has the labels of all operands
- if name == "optimization_barrier":
+ if name == "":
test_audit.py::test_a_barrier_of_two_arrays_mixes_no_labels
""",
    "jaxmp/_tools/audit/_make_report.py": r"""
the rule of a fix selects modules without the finding
- path in paths or _patterns.compile_pattern(pattern).fullmatch(path) is None
+ True
test_audit_fixes.py::test_a_rule_of_a_fix_names_all_modules_without_other_scopes

the fix of a wide operand in words asks for FP32
- remedy = "Cast the wide arrays that this line reads to 16 bits."
+ pass
the fix in words of a rounded result rounds it again
- remedy = " ".join(sentence.rstrip(":.") + "." for sentence in sentences)
+ remedy = "Cast the arrays that this line reads to FP32, and its results back."
test_audit_fixes.py::test_a_rejected_fix_names_the_dtype_without_code

the report names bf16 for a GPU without bfloat16
- "bf16" if "bfloat16" in chip.native else "fp16"
+ "bf16"
test_targets.py::test_the_report_says_why_it_is_not_compiled_and_which_recipe_fits

the audit takes each matmul that is added to parameters for an update
- (False, _Sources(sums),
+ (False, _Sources(),
test_audit_plants.py::test_updates_without_gradients_are_not_the_models

the audit takes an evaluation after the update for the optimizer
- if not sources.isdisjoint(f.of_updates)
+ if f.of_updates
test_audit_plants.py::test_errors_before_the_gradient_and_after_the_update_are_of_the_function_alone
""",
    "jaxmp/_tools/audit/_origins.py": r"""
a fix rounds the result of a loss to 16 bits
- if function.startswith("optax."):
+ if False:
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before

a fix casts a value after it was rounded
- _at_origins(_rounded_by(op, through), op, own
+ _at_origins([], op, own
test_audit_fixes.py::test_the_fix_of_a_step_is_its_own_code

the fix of a schedule rounds the cosine to 16 bits again
-     return not (meets_16_bits and is_cast)
+     return False
test_audit_fixes.py::test_fixes_of_operations_remove_the_rounding

the fix of a matmul leaves the operand without a cast in FP32
- here += [] if is_promoted else [index]
+ here += [] if is_promoted or cast is None else [index]
test_audit_steps.py::test_the_fix_of_a_matmul_casts_both_operands

a fix changes a cast of all parameters
- (_is_shared(origin) and not is_whole) or not _dataflow.is_forward(origin.equation)
+ not _dataflow.is_forward(origin.equation)
test_audit_fixes.py::test_a_cast_of_all_parameters_is_not_replaced

a fix changes code for a cast of the backward pass
- (_is_shared(origin) and not is_whole) or not _dataflow.is_forward(origin.equation)
+ _is_shared(origin) and not is_whole
test_audit_fixes.py::test_the_fix_of_a_step_is_its_own_code

a fix does not change a norm of arrays of several shapes
-  and not is_whole
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before

the fix of a root casts a variance that was rounded
- return max(sizes) > sizes[0] and any(map(_is_rounding, inside))
+ return False
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before
""",
    "jaxmp/_tools/audit/_report.py": r"""
an audit approves an FP32 training that has no recipe
-     if not errors and report.flops and
+     if errors and report.flops and
test_audit_report.py::test_a_program_in_fp32_without_a_recipe_is_not_approved
""",
    "jaxmp/_tools/audit/_rows.py": r"""
a baseline allows another line of the same module
- return self.check, self.module, self.text or self.message
+ return self.check, self.module
test_audit.py::test_a_baseline_compares_findings_and_not_counts
""",
    "jaxmp/_tools/audit/_trace.py": r"""
gradients under other names make parameters of all inputs
- is_named if any(is_named) else [shape
+ is_named if is_named else [shape
test_memory.py::test_gradients_under_other_names_tell_the_parameters

an input with the shape of a result is taken for a parameter
- known = {(_name(path), aval.shape)
+ known = {("", aval.shape)
test_audit_fixes.py::test_an_input_is_no_parameter
""",
    "jaxmp/_tools/cli/_app.py": r"""
two options that exclude each other are accepted
- if len(passed) > 1:
+ if False:
test_cli.py::test_a_mistake_is_one_message
""",
    "jaxmp/_tools/cli/_arguments.py": r"""
the option --share leaves another share in the environment
- os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)
+
test_memory.py::test_a_share_on_the_command_line_replaces_that_of_the_environment

a file is imported by a name that is that of another module
- is_apart = is_apart or is_library or "." in name
+ is_apart = False
test_cli_inputs.py::test_a_file_is_loaded_by_its_path

the neighbours of a file come after those of the current directory
- sys.path.insert(len(sys.path) if is_library else 0, folder)
+ sys.path.append(folder)
test_cli_inputs.py::test_a_file_imports_its_neighbours_first
""",
    "jaxmp/_tools/cli/_outputs.py": r"""
the output of a command is tried only after its work
- _try_output(file, path)
+ pass
test_cli_inputs.py::test_a_bad_input_is_one_message_and_overwrites_nothing

a result of the command replaces its input
- if path in used:
+ if used.get(path, "an input") != "an input":
test_cli_inputs.py::test_results_do_not_replace_inputs_or_each_other

a result of the command replaces a file of somebody else
- isinstance(first, dict) and set(_KEYS[command].split()) <= first.keys()
+ isinstance(first, dict)
an empty module is replaced
- return not path.endswith(".py")
+ return True
a page of another command is replaced
- return is_page and f"<title>{_TITLES[command]}</title>" in text
+ return is_page
test_cli_inputs.py::test_results_replace_earlier_ones_alone

a link to itself is replaced by a file
-  or os.path.islink(path)
test_cli_inputs.py::test_a_bad_input_is_one_message_and_overwrites_nothing
""",
    "jaxmp/_tools/cli/_script.py": r"""
a script ends at the first of its steps
- is_whole and not self._missed()
+ is_whole
test_audit_script.py::test_every_step_that_is_called_is_audited_and_others_are_named

a script runs on after its step has failed
-         if failed:
-             self.finish()
test_audit_script.py::test_a_script_runs_until_its_step_has_failed
""",
    "jaxmp/_tools/fixes/_domains.py": r"""
a quotient by sums of other rows becomes a softmax
- others == ["keepdims=True"] or
+ others in ([], ["keepdims=True"]) or
test_nonfinite.py::test_steps_that_overflow_become_one_function

the fix of a where replaces the operand of the branch that is used
- (old in _with_values(branch, values) for
+ (old in ast.unparse(branch) for
test_nonfinite.py::test_the_operand_of_an_earlier_line_is_replaced_where_it_is_discarded
""",
    "jaxmp/_tools/fixes/_functions.py": r"""
a function under another name has a fix in words alone
- if code_of(name) is code), "")
+ if False), "")
test_audit_fixes.py::test_functions_are_known_by_their_code

the fix of an einsum casts its keyword arguments
- if each.kind < each.VAR_POSITIONAL]
+ if each.name]
test_audit_steps.py::test_the_fix_of_a_matmul_casts_both_operands

an update of indexed elements has a fix in words alone
- "at": {"add subtract
+ "at": {"subtract
test_audit_fixes.py::test_the_fixes_of_sums_of_segments
""",
    "jaxmp/_tools/fixes/_rewrite.py": r"""
the code that scales queries leaves the scale of the logits
- return later.replaced_by(code) if is_whole else code
+ return code
the first value of a carry is not known if it is a number
- if position is None:
+ if True:
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before

the cases of a choice are exchanged in its fix
- return [condition, if_false, if_true]
+ return [condition, if_true, if_false]
test_audit_promotions.py::test_the_fix_of_a_promotion_by_a_choice_casts_the_wide_case

the fix of `jnp.astype(x, d)` loses its array
- [*call.args[: count - 1], parsed(
+ [parsed(
test_audit_steps.py::test_the_fix_of_a_matmul_casts_both_operands
test_audit_steps.py::test_the_fix_of_a_function_of_a_cast

a fix casts the narrow operand
- new = {operands[index]: change(operands[index])
+ new = {operands[1 - index]: change(operands[1 - index])
test_audit_fixes.py::test_the_fix_of_two_dtypes_casts_the_wide_operand

the fix of a carry does not reach its constants
- node = Changed(widened).visit(expression.copy())
+ node = expression.copy()
test_audit_fixes.py::test_fixes_of_operations_remove_the_rounding
""",
    "jaxmp/_tools/fixes/_source.py": r"""
functions without a frame are not known by another name
- for name in (code, _aliases(text).get(code.rpartition(".")[2], "")):
+ for name in (code,):
test_audit_fixes.py::test_functions_are_known_by_their_code

the fix of a logarithm calls a layer twice
- return is_once and all(
+ return is_once or all(
test_nonfinite.py::test_steps_that_overflow_become_one_function

the fix of an augmented assignment assigns twice
- text.removeprefix(assigned)
+ text
test_audit_fixes.py::test_the_codes_of_a_fix_are_those_that_work

the fix of a method on its own line has no code
- before.endswith(b".")
+ False
the fix of an augmented assignment has no code
- case [ast.AugAssign(target, operator, value)]:
+ case [ast.AugAssign(target, operator, value)] if not code:
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before

a fix names `jax.numpy` as jnp in every file
- names = [name for name, module in imports.items() if module == "jax.numpy"]
+ names = []
test_audit_fixes.py::test_a_fix_has_the_name_that_the_file_imports
""",
    "jaxmp/_tools/fixes/_trial.py": r"""
a part of a fix never becomes FP32, too
- edits = frozenset(_with_parts(edit, following) for edit in edits)
+ pass
the trial of all fixes leaves out those inside of other expressions
- elif edit.old in outer[-1].code:
+ elif False:
a finding that the code of another one removes has no code
- (row := next(others_fix, None))
+ (row := None)
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before

a fix that follows from another has no line
- if code in where and not lines[n].startswith(("At ", "    ")):
+ if False:
test_audit_fixes.py::test_the_fix_of_a_cast_to_fp32_names_the_expression

a fix that fails is printed
-         return FixTrial(FAILS)
+         return FixTrial(WORKS)
test_audit_fixes.py::test_code_that_does_not_run_is_not_printed

the fix of a carry does not run without the others
- _MOST_TRIALS and not runs(used):
+ _MOST_TRIALS and False:
test_audit_fixes.py::test_a_fix_that_requires_another_one_contains_it

the closures of functions are not patched
- objects = gc.get_referrers(vars(builtins))
+ objects = []
test_audit_fixes.py::test_fixes_are_tried_in_closures_and_methods

a fix never leaves operands rounded that other operations read
- for e in group if e.alone
+ for e in group if False
test_audit_fixes.py::test_fixes_of_values_that_are_rounded_before
test_audit_fixes.py::test_the_fix_of_two_dtypes_casts_the_wide_operand
""",
    "jaxmp/_tools/memory/__init__.py": r"""
an array on one device is estimated to stay there
- own if isinstance(own, NamedSharding) else asked.get(n)
+ own or asked.get(n)
test_memory.py::test_packed_types_and_shardings_of_jit_count_as_in_the_program

64-bit arrays of NumPy count whole in an estimate
- ShardedArgument(var.aval,
+ ShardedArgument(leaf.value,
test_memory.py::test_state_is_exact
""",
    "jaxmp/_tools/memory/_liveness.py": r"""
all recomputed arrays are estimated to exist at once
- if is_library or len(results) != 1 or name.startswith(_KERNELS):
+ if name not in _VIEWS:
test_memory.py::test_recomputed_arrays_do_not_all_exist_at_once

two elements of 4 bits are estimated to occupy two bytes
- jax.dtypes.itemsize_bits(dtype) if is_number else 8
+ 8
test_memory.py::test_packed_types_and_shardings_of_jit_count_as_in_the_program

all gradients are estimated to exist until the last update
- waiting[max((first.get(array, 0) for array in reads), default=0)] |= reads
+ waiting[len(self._kernels) - 1] |= reads
test_memory.py::test_a_gradient_exists_until_its_update_unless_the_norm_of_all_is_needed

tensor parallelism does not divide arrays that begin as zeros
- self._passed.get(shape, _NO_AXES) if axes is None else axes
+ axes or _NO_AXES
test_memory.py::test_loops_reshapes_and_constraints_pass_the_axes_too

gradients are divided along the batch before they are summed
- self._size(var.aval, each, not is_whole)
+ self._size(var.aval, each)
test_memory.py::test_gradients_are_whole_before_they_are_summed_over_the_batch

an unrolled loop is estimated as one kernel
- if inside and inside[0].is_unrolled:
+ if inside and inside[0].times == 1:
test_memory.py::test_an_unrolled_loop_is_a_program_of_its_iterations

matmuls are estimated to read their operands without zeros
- if operands[1].name != "rev":
+ if False:
test_memory.py::test_transposed_convolutions_write_their_operand_with_zeros
test_memory.py::test_matmuls_read_zeros_and_products_with_vectors_no_operands

each reader is estimated to compute a tanh again
- array.name in _LONG or read
+ read
test_memory.py::test_a_long_operation_is_computed_once

each reader is estimated to compute a sum of arrays again
- or read > _LARGER * array.bytes
+ or False
test_memory.py::test_sums_are_written_and_their_terms_freed_in_a_network_without_gradients

operands are estimated to be freed before the kernel that reads them
- kernel.reads.union(kernel.writes)
+ set(kernel.writes)
test_memory.py::test_operands_and_results_of_a_kernel_exist_at_once

sorted rows of several devices are estimated as divided
- if self._batch > 1 and "ragged_dot_general" in names:
+ if False:
test_memory.py::test_matmuls_pass_the_axes_of_tensor_parallelism

the orders of two passes through one network are estimated to be that of the program
- int(late**0.8 * self._peak(results) ** 0.2)
+ late
test_memory.py::test_residuals_and_remat

zeros into which an array is scattered are estimated to exist beside its sum
- if name in ("add", "add_any") and operand.is_scattered:
+ if False:
test_memory.py::test_scattered_gradients_of_a_similarity_matrix_are_one_array

loops are estimated to read transposed arguments in place
- if name == "transpose" and operands[0] in self._arguments:
+ if False:
matmuls are estimated to copy transposed arguments
- if reads and not (is_matmul and operand.name == "transpose"):
+ if reads:
test_memory.py::test_loops_and_no_matmuls_read_copies_of_transposed_arguments
""",
    "jaxmp/_tools/nonfinite/_causes.py": r"""
locate: a run in FP32 does not change the cause
- if not e.walk.is_overflow(e.origin) or not e.overflows_in_fp32:
+ if True:
test_nonfinite.py::test_divergence_in_fp32_has_no_other_cause

locate: a run in FP32 does not show that the precision is the cause
- return self.has_lost_constant or self.in_fp32()[0].is_finite(self.operation)
+ return self.has_lost_constant
locate: a constant that is 0 in 16 bits is not named
- return any(any(map(is_zero, op.operands)) and
+ return any(False and
locate: the sum of exponentials that underflow is that of a masked row
- exp is not None and INFINITE in (
+ exp is not None and None not in (
test_nonfinite.py::test_operands_that_16_bits_round_are_the_cause
""",
    "jaxmp/_tools/nonfinite/_locate.py": r"""
locate: a state that no step has written comes from an earlier step
- is_first = _measure.is_first_step(self.traced)
+ is_first = False
test_audit_script.py::test_a_state_that_no_step_has_written_comes_from_its_initialization

locate: gradients that the optimizer checks do not count
- is_check = lambda op: op.name == "is_finite" and not op.location.differentiated
+ is_check = lambda op: False
locate: the search for a loss scale goes in the wrong direction
- low, high = (middle, high) if passes(middle) else (low, middle)
+ low, high = (low, middle) if passes(middle) else (middle, high)
test_nonfinite.py::test_the_largest_passing_scale_is_exact

a step whose arguments are shapes counts as finite
-     _measure.check_usable(traced)
+     return NonfiniteReport(reproduced=False)
test_nonfinite.py::test_shapes_are_refused
""",
    "jaxmp/_tools/nonfinite/_measure.py": r"""
locate: a loss scale below the minimum is suggested
- minimum = max(minimum or 0.0, _SMALLEST_SCALE)
+ minimum = _SMALLEST_SCALE
test_nonfinite.py::test_no_scale_below_the_minimum_is_suggested

locate: the loss scale of a skipped step is that of the state
- skipped = value / factor
+ skipped = value
test_nonfinite.py::test_a_skipped_step_is_reproduced_from_the_returned_state
""",
    "jaxmp/_tools/nonfinite/_record.py": r"""
locate: all values of a step stay in memory
- del frame.values[var]
+ pass
test_nonfinite.py::test_values_are_deleted_after_their_last_reader

locate: the iterations of a reversed scan are in another order
- column[n] = lax.expand_dims(row, (0,))
+ column[::loop.step][n] = lax.expand_dims(row, (0,))
test_nonfinite.py::test_iterations_that_run_alone_are_those_of_a_compiled_loop

locate: traces of jitted functions keep the lines of the located step
- codes = lax.select(chosen, codes, lax.full_like(codes, ZERO))
+ codes = jnp.where(chosen, codes, jnp.int8(ZERO))
test_nonfinite.py::test_locating_leaves_the_lines_of_other_programs

locate: a literal of a select has a shape
- shape = np.shape(case)
+ shape = case.shape
test_nonfinite.py::test_a_select_between_a_scalar_and_a_literal
""",
    "jaxmp/_tools/nonfinite/_walk.py": r"""
locate: a NaN of the program has no line
- made = [v for v in nan if not self.is_constant(v)]
+ made = nan
test_nonfinite.py::test_nan_of_the_program_has_a_line

locate: gradients that are all zero count as healthy
-         return codes == {_record.ZERO}
+         return False
test_nonfinite.py::test_a_step_whose_gradients_are_all_zero_is_named

locate: the carry of a loop comes from the next iteration
- before = at[-1] - inner.step
+ before = at[-1] + inner.step
locate: derivatives belong to the forward pass
- is_residual = self.via is not None and not self.source.op.is_backward
+ is_residual = False
test_nonfinite.py::test_a_planted_fault_is_named_and_its_fix_removes_it
""",
    "jaxmp/_tools/plan/_bound.py": r"""
an interval ignores that the matmuls are narrow
- factors["narrow"] ** (width < _WIDE)
+ 1
test_plan.py::test_intervals_come_from_the_measured_ratios

plan: the roofline adds the times of FLOPs that overlap with those of bytes
- max(computing, memory)
+ (computing + memory)
test_plan.py::test_a_kernel_takes_the_larger_of_the_times_of_flops_and_of_bytes

plan: hosts of the user do not divide the devices
- chip = chip._replace(domain=devices // hosts)
+ pass
test_plan.py::test_hosts_and_links_are_those_of_the_user
""",
    "jaxmp/_tools/plan/_programs.py": r"""
a plan has no cost of measured tokens on a chip without a compiler
- devices = count_devices(step, args)
+ devices = 0
test_plan.py::test_command

plan: a program with an unknown operation does not fit
- fits = estimate.fits if estimate.unknown else bool(estimate.fits)
+ fits = bool(estimate.fits)
test_memory.py::test_an_unknown_operation_with_a_jaxpr_is_a_warning

plan: a program of unknown devices costs nothing
- and rate and row.devices:
+ and rate:
test_plan.py::test_prices_give_the_cost_of_a_billion_tokens

plan: a program that does not follow its recipe is recommended
- if f.check in warned), ""),
+ if False), ""),
test_plan.py::test_a_recipe_that_a_chip_lacks_is_named

plan: the search for the largest batch stops at a batch that is not next to the limit
- last - first == 1
+ last - first <= 2
test_plan.py::test_the_search_finds_what_trying_each_batch_finds
""",
    "jaxmp/_tools/plan/_report.py": r"""
plan: FP32 is compared with 16 bits as its reference
- check *= own not in ("fp32", reference)
+ check *= own != reference
plan: a recipe is recommended for a gain within the error of the roofline
- max(best.interval, default=_value(best))
+ _value(best)
test_plan.py::test_the_recommendation_names_bytes_and_formats

plan: a recipe is recommended although jaxmp warns of its program
- if row.fits and not row.lacking and not row.warning]
+ if row.fits and not row.lacking]
test_plan.py::test_a_program_without_a_loss_scale_is_not_recommended

plan: a remark is repeated for each program
- remarks.setdefault(remark, [])
+ remarks.setdefault(remark + '.' * len(remarks), [])
test_plan.py::test_equal_remarks_are_one_row_and_a_chip_without_a_program_comes_first
""",
    "jaxmp/_tools/stats/_measure.py": r"""
statistics: half of the smallest number does not round to zero
- int(zero.view(np.uint32))
+ int(zero.view(np.uint32)) - 1
test_statistics.py::test_fractions_are_those_of_numpy
""",
    "jaxmp/_tools/stats/_report.py": r"""
statistics: the suggested loss scale may overflow
- if not over and underflow < MAX_LOST
+ if underflow < MAX_LOST
test_statistics.py::test_the_suggested_scale_is_confirmed_by_all_powers_of_two

statistics: the loss scale of the step is not taken out of its gradients
- 127 - shift + power
+ 127 + power
statistics: magnitudes of gradients contain the loss scale
- scale if is_scaled else 1.0
+ 1.0
test_statistics.py::test_the_scale_of_the_step_is_taken_out
""",
    "jaxmp/_tools/stats/_with_stats.py": r"""
the emulation of a format rounds the logits of a head
- if var in ends and (flag or not self._is_compared(var))
+ if var in ends
test_statistics.py::test_the_logits_of_a_head_are_not_rounded

a head takes other matmuls of its scope out of FP8
-             self._compared and (place.names, _programs.call_site(equation)) in self._compared
+             place.names in {names for names, _ in self._compared}
test_statistics.py::test_a_head_leaves_other_matmuls_of_its_scope_in_fp8

the emulation of FP8 has heads in FP8
- self._compared.add((place.names, _programs.call_site(equation)))
+ pass
test_statistics.py::test_the_logits_of_a_head_are_not_rounded

statistics: networks with the same modules share rows
- observer.measure, observer.networks = measure, self.networks
+ observer.measure = measure
test_statistics.py::test_networks_with_the_same_modules_have_rows_of_their_own

statistics: gradients in float16 have no loss scale
- self.scale if is_cotangent and self.name == FLOAT16 else
test_statistics.py::test_the_errors_of_a_format_are_those_of_a_step_in_it
""",
    "jaxmp/_tools/validate/_budget.py": r"""
a metric of an unknown direction is read as a loss
-     return MIN if _plain(metric) in LOWER else TWO_SIDED
+     return MIN
test_validate.py::test_a_score_of_an_unknown_direction_fails_in_both_directions

a small training loss is compared by its ratio
-     elif last < SMALL_LOSS * first:
+     elif last < 0 * first:
test_validate.py::test_near_zero_training_losses_do_not_decide
""",
    "jaxmp/_tools/validate/_compare.py": r"""
a higher accuracy counts as worse
-     sign = -1.0 if metric.direction == _rows.MAX else 1.0
+     sign = 1.0
test_validate.py::test_a_small_loss_is_judged_by_accuracy_and_absolute_loss

a candidate passes if its mean is within the budget, whatever the interval
-     is_inside = interval.high <= budget and (
+     is_inside = interval.mean <= budget and (
test_validate.py::test_power_agrees_with_simulation

an outlier passes
-     return interval.outlier > OUTLIER_SHARE * budget
+     return False
test_validate.py::test_an_outlier_from_four_seeds_on_does_not_pass

a candidate is compared with the reference of another seed
-     for first, second in zip(reference, candidate, strict=True):
+     for first, second in zip(reference, candidate[::-1], strict=True):
test_validate.py::test_a_planted_difference_is_detected_through_the_spread_of_seeds

validate passes a candidate without an interval
- is_certain = math.isfinite(interval.deviation) and not has_outlier(interval, budget)
+ is_certain = not has_outlier(interval, budget)
test_validate.py::test_an_outlier_from_four_seeds_on_does_not_pass
""",
    "jaxmp/_tools/validate/_driver.py": r"""
a resumed validation takes the runs of another program
- (record.initial_checksum, record.program) == (initial, traced)
+ record.initial_checksum == initial
test_validate.py::test_only_runs_of_the_same_program_are_taken

the programs of all seeds are kept in memory
- known if is_first else dict(known)
+ known
test_validate.py::test_states_of_few_seeds_are_in_memory_at_once
""",
    "jaxmp/_tools/validate/_parity_search.py": r"""
the change of the serving program is not run before it is printed
- _walk.walk(self.changed.closed, self.changed.arrays, changes)
+ _walk.walk(self.changed.closed, self.changed.arrays)
test_parity.py::test_weights_that_were_rounded_before
""",
    "jaxmp/_tools/validate/_parity.py": r"""
roundings explain what a comparison did not see
- if not self.searched or self.unknown:
+ if not self.searched:
test_programs.py::test_each_client_names_the_consequence
""",
    "jaxmp/_tools/validate/_probe.py": r"""
validate: networks with the same modules share rows
- name_of) if paths else {}
+ name_of) if False else {}
test_validate_capture.py::test_a_teacher_with_the_modules_of_its_student_has_outputs_of_its_own

another learning rate of Adam is taken for clipping
- error=min(error, 1.0), factor=factor)
-         return
+ error=min(error, 1.0), factor=factor)
test_validate_trials.py::test_another_learning_rate_of_adam

a change of a subnormal float16 value counts as none
- _programs.rounded_to(z.astype(jnp.float32), z.dtype)
+ jax.lax.reduce_precision(z.astype(jnp.float32), 5, 10)
test_validate_trials.py::test_changes_of_subnormal_float16_values_are_measured

an average in 16 bits may change in a single element
-     limit = lambda path: _STALLED if dtypes[path] in ("bfloat16", "float16") else 1.0
+     limit = lambda path: 1.0
test_validate_trials.py::test_a_leaf_of_the_state_that_does_not_change
""",
    "jaxmp/_tools/validate/_train.py": r"""
a validation trains all steps in the first phase
- return phases[max(start for start in phases if start <= step)]
+ return phases[min(start for start in phases if start <= step)]
test_phases.py::test_validate_trains_the_phases_as_a_loop_does
""",
    "jaxmp/_tools/validate/_trials.py": r"""
emulated operations do not round
- mode == ROUNDED, _programs.rounded_to(x, dtype), w
+ mode == ROUNDED, x, w
test_validate_trials.py::test_emulated_roundings_are_those_of_the_step

no source line rounds alone
-         modes[number] = ROUNDED
+         modes[number] = EXACT
test_validate_causes.py::test_an_error_in_the_update_is_located
""",
    "jaxmp/_tools/validate/_walk.py": r"""
a program that is run by operations does not round
- in _programs.MOVES else _programs.rounded_to(x, change.dtype or dtype)
+ in _programs.MOVES else x
test_parity.py::test_a_walk_rounds_as_the_program

rounding explains no difference of 16-bit results
- _HALF = 0.5
+ _HALF = 0.0
test_parity.py::test_the_criterion_accepts_last_bits_and_finds_roundings
""",
    "jaxmp/checkpoint/_checkpointer.py": r"""
the checksums of files are not compared when a checkpoint is restored
- if verify:
+ if not verify:
test_checkpoint.py::test_damage_to_any_file_is_refused_by_its_name

a migration is advised that would be refused
- plan, advice = None, str(refusal)
+ plan, advice = None, "restore(state, recipe=recipe, migrate=True)"
test_checkpoint.py::test_another_model_or_optimizer_is_refused

an error of a save in the background does not reach latest_step
-         self.wait()
-         return _writer.complete_steps
+         return _writer.complete_steps
test_checkpoint.py::test_a_full_disk_is_said_by_the_next_call
""",
    "jaxmp/checkpoint/_description.py": r"""
scalars of an optimizer must be finite
-         or (leaf.role == _roles.OTHER and leaf.shape and leaf.shape in shapes)
+         or leaf.role == _roles.OTHER
test_checkpoint.py::test_scalars_of_optimizers_may_be_infinite

parameters and averages are distinguished by the order of their names
- list(filter(test, roots)) or roots
+ roots[:1]
test_checkpoint.py::test_averages_are_migrated_exactly_or_refused
test_checkpoint.py::test_a_tie_does_not_fail_a_save_and_a_migration_names_both_candidates
""",
    "jaxmp/checkpoint/_foreign.py": r"""
PRNG keys that orbax wrote are not read
- return (value.shape, value.dtype) == (stored.shape, stored.dtype)
+ return False
test_checkpoint.py::test_an_nnx_run_with_a_text_goes_on_under_a_recipe
""",
    "jaxmp/checkpoint/_handler.py": r"""
a checkpoint with NaN becomes complete
-         if bad and not self.allow_nonfinite:
+         if bad and self.allow_nonfinite:
test_checkpoint.py::test_a_step_that_is_not_finite_replaces_no_other

64 bits become 32 bits when they are restored
- jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
+ jax.dtypes.canonicalize_dtype(leaf.dtype) is None
test_checkpoint.py::test_arrays_of_64_bits_are_not_narrowed
""",
    "jaxmp/checkpoint/_plan.py": r"""
a cast between formats of FP8 is exact
- old.nmant <= new.nmant and old.maxexp <= new.maxexp
+ old.bits <= new.bits
test_checkpoint.py::test_a_cast_between_formats_of_fp8_is_lossy
""",
    "jaxmp/checkpoint/_settle.py": r"""
parameters alone are those of any copy
- fits & trained or fits or trained
+ fits or trained
test_checkpoint.py::test_parameters_are_restored_without_the_rest
""",
    "jaxmp/checkpoint/_writer.py": r"""
after a rollback the highest steps are kept
- key=lambda step: (before.get(step, len(before)), step)
+ key=lambda step: step
test_checkpoint.py::test_the_steps_that_were_saved_last_are_kept

directories that jaxmp did not write are deleted
- [n for n, path in paths.items() if not path.exists() or has_manifest(path / ITEM)]
+ list(paths)
test_checkpoint.py::test_directories_that_jaxmp_did_not_write_are_kept

a save is not finished when the program ends
- and process == os.getpid():
+ and process != os.getpid():
test_checkpoint.py::test_a_step_is_completed_when_the_program_ends

a process saves into a directory that another one has locked
- fcntl.LOCK_EX | fcntl.LOCK_NB
+ fcntl.LOCK_UN | fcntl.LOCK_NB
test_checkpoint.py::test_the_lock_of_a_killed_process_is_replaced
""",
    "jaxmp/errors.py": r"""
an error contains a whole model
-         if omitted > _FIRST and
+         if omitted > 10**9 and
test_errors.py::test_no_error_contains_a_whole_model
""",
    "jaxmp/fp8/_checkpoint.py": r"""
quantized kernels are not saved
- (_AMAX, _KERNEL) if kernels else (_AMAX,)
+ (_AMAX,)
test_fp8_checkpoint.py::test_kernels_are_quantized_once_if_they_are_saved

the backward pass measures the operands of the forward pass again
- if name in saved:
+ if False:
test_fp8_checkpoint.py::test_amaxes_are_saved
""",
    "jaxmp/fp8/_dot_general.py": r"""
a gradient without that of the FP8 states is silent
- if operands[call.kernel] and state is not None and not state[AGE]:
+ if False:
test_fp8_nnx.py::test_a_split_model_requires_the_gradient_of_its_states
test_fp8_models.py::test_no_transformation_hides_a_gradient_without_that_of_the_states

the factor of the scales is rounded to bfloat16
-     narrow = narrow if on_gpu else _core.FLOAT32
+
test_fp8_dot_general.py::test_results_are_matmuls_of_rounded_operands_that_are_rounded_once
""",
    "jaxmp/fp8/_explain.py": r"""
FP8 is decided on without the tokens of a step
- > _added_seconds(k, n, scaling.tokens)
+ > _added_seconds(k, n, 8192)
test_fp8_einsum.py::test_eligible_layers

FP8 is decided on by symbolic rows
- if not isinstance(tokens, int) or min(k, n, tokens) < 1:
+ if min(k, n, tokens) < 1:
test_search.py::test_symbolic_shapes
""",
    "jaxmp/fp8/_operands.py": r"""
the margin enlarges the scale
- limit * 2.0**-margin
+ limit * 2.0**margin
test_fp8_quantize.py::test_scales_follow_the_rule

partial maxima of symbolic rows are counted
- if not isinstance(rows, int):
+ if not size:
test_fp8_state.py::test_the_largest_of_partial_maxima_is_the_amax

an infinity saturates and is hidden
- convert_element_type(clipped - x * np.array(-0.0, wide), dtype)
+ convert_element_type(clipped, dtype)
test_fp8_quantize.py::test_what_is_not_finite_stays_so

a scan reads an array of constants for each operand that it quantizes
- convert_element_type(clipped - x * np.array(-0.0, wide), dtype)
+ select(lax.is_finite(x), clipped.astype(dtype), jnp.full(x.shape, jnp.nan, dtype))
test_fp8_quantize.py::test_a_scan_reads_no_array_of_constants

values beyond the range of FP8 become NaN
-     clipped = lax.clamp(np.array(-limit, wide), scaled, np.array(limit, wide))
+     clipped = scaled
test_fp8_quantize.py::test_what_is_too_large_saturates
""",
    "jaxmp/fp8/_overwritten.py": r"""
FP8 states are converted in the order of addresses
- dict(zip(arrays, to_fm32(list(arrays.values())), strict=True))
+ to_fm32(arrays)
test_fp8_state.py::test_equal_steps_are_equal_programs_as_caches_of_compilers_require
""",
    "jaxmp/fp8/_scaling.py": r"""
the scales of FP8 are not powers of two by default
-     power_of_two: bool = True
+     power_of_two: bool = False
test_fp8_batch.py::test_other_rows_of_a_matmul_and_of_its_input_gradient
""",
    "jaxmp/fp8/_state.py": r"""
amaxes of several runs of a layer are averaged, not combined by max
- divided[name] = jnp.where(is_newest, state[name], state[name] / uses[..., None])
+ divided[name] = state[name] / uses[..., None]
test_fp8_state.py::test_shared_layers_whose_gradients_are_added_up

an amax that is not finite enters the history
- jnp.where(lax.is_finite(latest), grown, history)
+ grown
test_fp8_state.py::test_states_follow_the_rule
""",
    "jaxmp/fp8/_step_state.py": r"""
layers exchange their new FP8 states
- (is_used, maxima) in zip(indices, parts, strict=True):
+ (is_used, maxima) in zip(indices[::-1], parts, strict=True):
the newest entry of an amax history is lost
-     grown = jnp.where(is_first, latest[..., None], older)
+     grown = jnp.where(is_first, history, older)
test_fp8_state.py::test_states_of_a_model_are_updated_as_each_layer_updates_its_own
""",
    "jaxmp/losses/_arguments.py": r"""
the weights of rows do not enter the mean
- jnp.asarray(math.prod(rows), wide) if factors is None else jnp.sum(factors)
+ jnp.asarray(math.prod(rows), wide)
test_losses.py::test_reductions
""",
    "jaxmp/losses/_linear.py": r"""
padded classes have a part in the loss
- logits.shape[1] > layer.classes
+ logits.shape[1] > 2 * layer.classes
test_losses.py::test_padded_classes_have_no_part_in_the_loss

a chunk of symbolic rows is counted
- if not isinstance(rows, int):
+ if chunk == 1:
test_losses.py::test_symbolic_rows

float16 logits are stored without the factor that extends their range
- factor = np.array(2.0**-8, wide)
+ factor = np.array(1.0, wide)
test_losses.py::test_forms_of_stored_logits_agree_beyond_the_range_of_float16

chunks of the loss ignore the memory of the chip
- (_core.target_memory() or math.inf) / 16
+ math.inf
test_losses.py::test_chunks_follow_the_memory_of_the_chip

a loss multiplies several labels as XLA's CPU compiler refuses
- if left == 0 and lhs.dtype != out and _compat.target() == "cpu":
+ if False:
test_losses.py::test_several_labels_of_the_same_states_in_16_bits_without_jit
""",
    "jaxmp/losses/_softmax.py": r"""
label smoothing is missing from the gradient
-         targets = targets * (1 - terms.label_smoothing) + rows.share
+         targets = targets * (1 - terms.label_smoothing)
test_losses.py::test_losses_and_gradients_are_those_of_fp64

sums of exponentials are joined without the difference of their maxima
- exp + its_exp * factor)
+ exp + its_exp)
the logit of a label is that of the first class of its group
- hit = jnp.where(labels % group == index, parts[index], hit)
+ hit = parts[0]
test_losses.py::test_one_pass_over_the_logits_has_the_sums_of_two
""",
    "jaxmp/optim/_apply.py": r"""
a skipped step moves the count of a schedule around the optimizer
-             return _core.select(applied, n, o)
+             return n
test_optim.py::test_state_around_the_guard_is_restored_on_a_skip
""",
    "jaxmp/optim/_assign.py": r"""
FP32 values that replace parameters are rounded to 16 bits
-             if not _core.is_16bit(by_path[path].dtype):
+             if False:
test_replaced_params.py::test_replaced_parameters_are_the_new_masters
""",
    "jaxmp/optim/_average.py": r"""
an average is multiplied in the dtype of the parameters
- (lax.convert_element_type(array, dtype) for array in (old, new))
+ (lax.convert_element_type(array, new.dtype) for array in (old, new))
test_average.py::test_averages_of_rounded_arrays_converge_and_those_of_optax_do_not
""",
    "jaxmp/optim/_find.py": r"""
plain loops train other groups of parameters outside of the guard
-         is_group = isinstance(part, optax.MaskedState) and bool(part.inner_state)
+         is_group = False
plain loops may have momentum behind the guard
- is_link and _keeps_or_hides(part)
+ i in fronts and _keeps_or_hides(part)
plain loops may have a transformation that hides overflows in front
-     if is_link and guards[0]:
+     if False:
test_optim.py::test_wrappers_in_a_plain_loop_train_right_or_are_named
""",
    "jaxmp/optim/_layout.py": r"""
the layout of a placeholder stays empty
-                 vars(layout).update(vars(source))
+                 return True
test_optim.py::test_optax_maps_over_the_states_that_are_like_the_parameters
""",
    "jaxmp/optim/_master.py": r"""
the new master is not written
- return emitted, new, over
+ return emitted, stored, over
test_optim.py::test_plain_optax_loop_lands_on_the_cast_master

parameters that the user replaces are reverted
- jnp.where(bits == kept, master, value)
+ jnp.where(bits == bits, master, value)
test_replaced_params.py::test_replaced_parameters_are_the_new_masters
""",
    "jaxmp/optim/_moments.py": r"""
second moments in bfloat16 are rounded to nearest
- if rounding == NEAREST or
+ if rounding or
test_moments.py::test_second_moments_neither_stall_nor_drift

no warning names moments in a plain dict
- yield owner or f"state{path}"
+ yield from [owner] * bool(owner)
test_moments.py::test_a_warning_names_states_that_stay_in_fp32

the random bits of moments do not depend on the array
- (number + 1) * 0x9E3779B9
+ 0x9E3779B9
test_moments.py::test_rounded_second_moments_have_no_bias_and_uncorrelated_errors
""",
    "jaxmp/optim/_roles.py": r"""
roles: a parameter named like the state of FP8 layers is taken for it
-         is_fp8 = name in _overwritten.names_of_state(node)
+         is_fp8 = name.startswith(_overwritten.PREFIX)
test_roles.py::test_names_of_parameters_do_not_determine_their_role
""",
    "jaxmp/optim/_rounding.py": r"""
the packed remainder has no sign
- jnp.where(is_zero, high, high + remainder.astype(jnp.int32))
+ jnp.where(is_zero, high, high + jnp.abs(remainder.astype(jnp.int32)))
test_storage.py::test_packed_gives_back_every_edge_pattern

a parameter with a packed master that is set to zero keeps its remainder
- jnp.where(is_zero, high, high + remainder.astype(jnp.int32))
+ high + remainder.astype(jnp.int32)
test_replaced_params.py::test_replaced_parameters_are_the_new_masters

packed parameters are truncated instead of rounded
- high = lax.shift_right_logical(bits + _HALF_ULP,
+ high = lax.shift_right_logical(bits,
test_storage.py::test_packed_gives_back_every_edge_pattern

stochastic rounding always rounds towards zero
- (bits + (noise & dropped))
+ (bits + (noise & dropped) * np.uint32(0))
test_optim.py::test_stochastic_rounding_is_unbiased_and_lands_on_neighbours

stochastic rounding overflows before rounding to nearest does
- jnp.where(jnp.abs(value) <= largest, rounded, value)
+ jnp.where(jnp.isfinite(value), rounded, value)
test_optim.py::test_stochastic_rounding_overflows_where_rounding_to_nearest_does
""",
    "jaxmp/optim/_shardings.py": r"""
large arrays beside the parameters are replicated without a warning
-         if not is_alike and size <= max(_SMALL, _SHARE * owned):
+         if not is_alike:
test_sharding.py::test_large_arrays_that_are_replicated_cause_a_warning

moments are replicated
-         if param is None or np.shape(leaf) != shapes[param][1]:
+         if param is None or names != shapes[param][0]:
test_sharding.py::test_parameters_masters_and_moments_share_their_bytes

moments are split along the last free dimension instead of the first
- in enumerate(zip(spec, shape, strict=True)):
+ in list(enumerate(zip(spec, shape, strict=True)))[::-1]:
moments are split over an axis that already splits their parameter
-     if axis in _core.axis_names(spec):
+     if axis in spec[1:]:
test_sharding.py::test_moments_are_split_along_the_first_free_dimension

an average beside a train state is placed as its parameters
-         return not is_beside, len(names)
+         return False, len(names)
test_sharding.py::test_averages_beside_a_train_state_are_split_like_moments
""",
    "jaxmp/optim/_losses.py": r"""
a line search differentiates without the loss scale, and each device searches alone
-     if is_plain or settings.is_noted:
+     if True:
test_optim_optax.py::test_line_searches_differentiate_with_the_loss_scale
test_optim_optax.py::test_devices_agree_on_a_line_search

an overflow of the optimizer's own derivative remains in its state
- jnp.isfinite(b) | ~jnp.isfinite(a)
+ b == b
test_optim_optax.py::test_a_step_whose_hessian_overflows_is_skipped
""",
    "jaxmp/optim/_skip.py": r"""
devices that have parts of the parameters decide alone about shared counters
- (params, state.stats.total))
+ params)
test_skipped_steps.py::test_parts_of_parameters_on_each_device_share_the_counters

the code for a field of the inner state fails where several have the name
- call = "get" if len(values) == 1 else "get_all_with_path"
+ call = "get"
test_optim.py::test_optax_reads_and_sets_fields_of_the_inner_state

steps whose gradients are all zero are not counted in a row
- lax.select(is_zero, state.stats.zero_gradients + 1, jnp.int32(0))
+ lax.select(is_zero, jnp.int32(1), jnp.int32(0))
test_skipped_steps.py::test_gradients_that_are_all_zero_are_counted_and_named

in programs for a GPU, counters read the flag of zero gradients as that of applied steps
- return applied != 0, first, is_zero != 0
+ return is_zero != 0, first, applied != 0
test_skipped_steps.py::test_programs_for_a_gpu_count_the_same

a train state applies steps whose overflow a transformation hides
-         if state.settings.is_noted:
+         if False:
test_optim.py::test_wrappers_in_a_train_state_train_right_or_are_refused

a device can skip the step of a parameter that all devices share
-         _check_devices_agree(first, (params, state.stats.total))
test_skipped_steps.py::test_devices_that_could_skip_alone_are_an_error_and_its_fix_runs

a skip by selection keeps the new optimizer state
- _core.select_leaf, applied), new_state, old_state)
+ _core.select_leaf, applied), new_state, new_state)
test_optim.py::test_a_nonfinite_gradient_changes_only_scale_and_counters

one device skips a step that the others apply
-         first = _compat.smallest(first, axes)
+         first = first
test_skipped_steps.py::test_devices_agree_on_the_leaf

consecutive skips are counted across applied steps
- consecutive=lax.select(applied, zero, self.consecutive + 1)
+ consecutive=lax.select(applied, self.consecutive, self.consecutive + 1)
test_optim.py::test_counters

the inner optimizer receives 16-bit gradients
- full = _core.cast_floating(self.updates, _core.FLOAT32)
+ full = self.updates
test_optim.py::test_sixteen_bit_gradients_reach_the_inner_transformation_in_fp32

a skipped step emits zeros in the shapes of the gradients
- not self.same_structure or any(jnp.shape(g) != jnp.shape(p) for g, p in pairs)
+ not self.same_structure
test_optim_optax.py::test_gradients_of_single_examples_are_averaged_by_the_optimizer

a state whose first update adds leaves cannot skip a step
-         return jax.tree.map_with_path(
+         return state or jax.tree.map_with_path(
test_optim_optax.py::test_leaves_that_the_first_update_adds_to_the_state_are_kept
""",
}

MUTATIONS = [each for file, text in DEFECTS.items() for each in _parsed(file, text)]


# ---------------------------------------------------------------------------
# Runner
# ---------------------------------------------------------------------------

# Files and folders that no test reads.
_UNREAD = shutil.ignore_patterns("__pycache__", ".[!c]*", "build", "dist", "demo_out", "venv*")


def judge(mutation: Mutation, root: Path = ROOT, *, full: bool = False) -> tuple[str, str]:
    """Applies a defect to a copy of the repository and runs its tests there.

    Args:
      mutation: the defect.
      root: the repository, which is not changed.
      full: True to run the whole fast suite until one test fails, instead of the named tests.

    Returns:
      The verdict, and the tests that failed, or that should have failed.

    Raises:
      RuntimeError: if pytest could not run the tests.
    """
    with tempfile.TemporaryDirectory(prefix="jaxmp-mutation-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(root, copy, ignore=_UNREAD)
        file = copy / mutation.file
        defective = mutation.applied(file.read_text("utf-8")) if file.exists() else None
        if defective is None:
            return STALE, mutation.find
        file.write_text(defective, "utf-8")
        # One failure decides if there is one test, or the whole suite, which alone needs plugins.
        selected = ["-m", "not slow and not expensive"]
        selected += ["-x"] * (full or len(mutation.tests) == 1)
        if full:
            # That file checks that each defect can be applied, which fails once one has been.
            selected += ["--ignore=tests/test_mutations.py", "-n", "auto", "--dist", "worksteal"]
        else:
            selected += [f"tests/{name}" for name in mutation.tests]
        status, output = _run_pytest(copy, selected, plugins=full)
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.MULTILINE)
    if status not in (0, 1) and not failed:
        raise RuntimeError(f"pytest could not run {mutation.tests} of {mutation.name!r}:\n{output}")
    if full:
        return (CAUGHT, ", ".join(failed)) if failed else (SURVIVED, "all tests")
    passed = [name for name in mutation.tests if not _is_among(name, failed)]
    return (SURVIVED, ", ".join(passed)) if passed else (CAUGHT, ", ".join(mutation.tests))


def _run_pytest(folder: Path, arguments: list[str], *, plugins: bool) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if not plugins:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        command + arguments, cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def _is_among(test: str, failed: list[str]) -> bool:
    """Returns True if a case of `test` is among the failed ones, or the import of its file."""
    file = test.partition("::")[0]
    return any(name == file or re.split(r"[\[ ]", name)[0] == test for name in failed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-k", default="", help="only defects whose name or file contains this text")
    parser.add_argument("--full", type=int, metavar="N", help="whole suite, N random defects")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="defects at a time")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if options.k in m.name or options.k in m.file]
    full = options.full is not None
    if full:
        chosen = random.Random(options.seed).sample(chosen, min(options.full, len(chosen)))
    verdicts = []
    # The whole suite has workers of its own.
    with ThreadPoolExecutor(1 if full else options.jobs) as pool:
        judged = pool.map(lambda mutation: judge(mutation, full=full), chosen)
        for mutation, (verdict, tests) in zip(chosen, judged, strict=True):
            verdicts.append(verdict)
            print(f"{verdict:18} {mutation.name}  [{tests}]", flush=True)
    print(", ".join(f"{verdicts.count(v)} {v}" for v in (CAUGHT, SURVIVED, STALE)))
    return int(verdicts.count(CAUGHT) < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
