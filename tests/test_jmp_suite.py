"""The tests of jmp, run against the policies and loss scales of jaxmp."""

import dataclasses
import importlib
import pathlib
import types
import unittest
import warnings

import jax
import jax.numpy as jnp
import jmp
import pytest

import jaxmp
from jaxmp._gradients._dynamic_loss_scale import as_loss_scale

# Tests of jmp whose property jaxmp does not have, with the reason.
DIFFERENCES = {
    "test_no_op_loss_scale": "gradients are returned in FP32, in a new tree",
    "test_static_empty_trees_StaticLossScale": "the scale 0 is refused",
    "test_dynamic_loss_scale_explicit_min_loss_scale2": "the minimum scale 0 is refused",
    "test_get_policy_almost_dtype": "the message about an unknown dtype has other words",
    "test_str3": "float32 is printed as f32, and not as full",
    "test_str4": "float32 is printed as f32, and not as full",
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """A loss scale of jaxmp with the attributes of one of jmp."""

    ours: jaxmp.StaticLossScale | jaxmp.DynamicLossScale

    @classmethod
    def of(cls, theirs):
        return lambda *args, **kwargs: cls(as_loss_scale(theirs(*args, **kwargs)))

    loss_scale = property(lambda self: self.ours.scale_value)
    counter = property(lambda self: self.ours.good_steps)
    period = property(lambda self: self.ours.growth_interval)
    factor = property(lambda self: self.ours.growth_factor)
    scale = property(lambda self: self.ours.scale)
    unscale = property(lambda self: self.ours.unscale)

    def adjust(self, finite):
        return Scale(self.ours.adjust(finite))


jax.tree_util.register_pytree_node(
    # jmp's leaves are the scale and the count; hysteresis and delay are not used.
    Scale,
    lambda s: (jax.tree.leaves(s.ours)[:2], s.ours),
    lambda ours, leaves: Scale(
        ours.with_leaves(**dict(zip(ours.LEAVES[:2], leaves, strict=False)))
    ),
)


def cast_to(dtype):
    return jaxmp.Policy(dtype, dtype, dtype).cast_to_compute


OURS = {
    "loss_scale": types.SimpleNamespace(
        NoOpLossScale=Scale.of(jmp.NoOpLossScale),
        StaticLossScale=Scale.of(jmp.StaticLossScale),
        DynamicLossScale=Scale.of(jmp.DynamicLossScale),
        all_finite=jaxmp._core._trees.all_finite,
        select_tree=jmp.select_tree,  # `jaxmp.TrainState` selects by itself
    ),
    "policy": types.SimpleNamespace(
        Policy=jaxmp.Policy,
        get_policy=jaxmp.get_policy,
        half_dtype=lambda: jnp.float16,
        cast_to_half=cast_to("float16"),
        cast_to_full=cast_to("float32"),
        dtype_to_names=importlib.import_module("jmp._src.policy").dtype_to_names,
    ),
}


def failures(name):
    """Returns name -> traceback of the failed tests of jmp's file, and the number of all tests."""
    path = pathlib.Path(jmp.__file__).parent / "_src" / f"{name}_test.py"
    if not path.exists():
        pytest.skip("this installation of jmp has no tests")
    source = path.read_text().replace(f"from jmp._src import {name} as jmp\n", "")
    module = types.ModuleType(f"jmp_{name}_test")
    vars(module)["jmp"] = OURS[name]
    exec(compile(source, str(path), "exec"), vars(module))
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    failed = [*result.failures, *result.errors]
    return {case._testMethodName: text for case, text in failed}, result.testsRun


@pytest.mark.slow
def test_the_tests_of_jmp_pass_except_for_the_listed_differences():
    failed, count = {}, 0
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy casts 3**100 to FP32
        for name in OURS:
            more, tests = failures(name)
            failed, count = failed | more, count + tests
    assert count > 80
    assert failed.keys() == DIFFERENCES.keys(), "\n".join(failed.values())
