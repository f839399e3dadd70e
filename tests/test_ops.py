"""The op table: a row for every primitive, executable categories, and checked changes."""

import copy
import dataclasses
import functools
import inspect
import pickle
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.sharding import PartitionSpec as P

from grids import EXPENSIVE
from jaxmp._policies._load import PolicyMap, as_op_table
from jaxmp._policies._op_table import ANY, CATEGORIES, DEFAULT_OPS, JOINT, OpRule, OpTable
from jaxmp._policies._recipe import list_recipes, load_recipe
from jaxmp.errors import JaxmpError, OpError, RecipeError
from processes import run_python
from programs import trace
from sources import code_of, text_of

BF16, F16, F32 = (np.dtype(name) for name in ("bfloat16", "float16", "float32"))

# ---------------------------------------------------------------------------
# Every primitive has a row
# ---------------------------------------------------------------------------

# Prints "name module" for each primitive that a module of JAX defines or re-exports.
COLLECT = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import jax, jax._src, jax.extend.core, jax.experimental.sparse, jax.experimental.pallas
for found in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
    try:
        importlib.import_module(found.name)
    except (ImportError, AttributeError):  # needs an optional package, or a TPU
        pass
for name, module in list(sys.modules.items()):
    for value in vars(module).values() if name.startswith("jax") and module else ():
        if isinstance(value, jax.extend.core.Primitive):
            print(value.name, name)
"""
# Kernel languages: their primitives occur only inside kernels. The calls of kernels occur in other
# jaxprs.
KERNEL = re.compile(r"jax\.experimental\.(pallas|mosaic)|jax\._src\.(pallas|thunky|mosaic)|.*thunk")
KERNEL_CALLS = {"pallas_call", "mpmd_map", "core_map", "mosaic_gpu_p"}


@pytest.fixture(scope="module")
def found():
    """Returns the primitives that a jaxpr of the installed JAX can contain."""
    pairs = [line.split() for line in run_python(COLLECT).splitlines()]
    every = {name for name, _ in pairs}
    return {name for name, module in pairs if not KERNEL.match(module)} | KERNEL_CALLS & every


def test_every_primitive_of_the_installed_jax_has_a_row(found):
    assert found <= set(DEFAULT_OPS) and len(found) > 280


def test_the_public_list_of_primitives_is_found(found):
    public = {value.name for name, value in vars(primitives).items() if name.endswith("_p")}
    assert public <= found and len(public) > 150


# Rows for supported versions of JAX other than the installed one.
ELSEWHERE = {
    *("box_get", "box_set", "call", "closed_call", "core_map", "log_extend", "log_read", "new_box"),
    *("new_log", "pbroadcast_done", "pbroadcast_start", "psum_start", "reduced_vary_cast_p"),
    *("shard_alike", "unreduced_psum_start", "unreduced_reduce_scatter_start"),
    *("vary_unreduced_cast_p", "log2", "one_minus_square", "pbroadcast_dynamic", "polynomial"),
    *("program_order", "reduced_vary_cast", "relayout", "unreduced_pmax", "unreduced_pmin"),
    *("vary_unreduced_cast", "with_memory_space_constraint", "xla_metadata_call"),
}


def test_every_row_is_a_primitive(found):
    assert set(DEFAULT_OPS) - found <= ELSEWHERE
    assert set(DEFAULT_OPS) >= ELSEWHERE


# ---------------------------------------------------------------------------
# Contents of rows
# ---------------------------------------------------------------------------


def test_rows_are_well_formed():
    for name, op in DEFAULT_OPS.items():
        assert name == op.name and op.category in CATEGORIES
        assert op.category in op.allowed
        assert op.allowed in (ANY, JOINT, (op.category,))
        assert len(op.reason) > 15 and "\n" not in op.reason and not op.reason.endswith(".")
        # A bare TOML key.
        assert re.fullmatch(r"[A-Za-z0-9_-]+", name)


def test_a_reason_belongs_to_one_category():
    places = {(op.reason, op.category) for op in DEFAULT_OPS.values()}
    reasons = {reason for reason, _ in places}
    assert len(places) == len(reasons) > 70


def test_what_is_inside_stays_there():
    inside = OpTable().names("inside")
    assert {"jit", "scan", "while", "cond", "remat2", "custom_jvp_call", "shard_map"} <= set(inside)
    assert all(DEFAULT_OPS[name].allowed == ("inside",) for name in inside)


@pytest.mark.parametrize(
    ("category", "names"),
    [
        ("low", "dot_general conv_general_dilated ragged_dot_general"),
        ("fp32", "exp exp2 log log1p pow rsqrt integer_pow reduce_sum reduce_prod cumsum"),
        ("fp32", "cumlogsumexp erf_inv sin cos scatter-add square tan lgamma"),
        ("widest", "add sub mul div add_any max min select_n concatenate clamp eq lt pad"),
        ("follow", "transpose reshape gather neg tanh logistic reduce_max argmax sort slice"),
        ("opaque", "psum all_gather pvary fft cholesky bitcast_convert_type pallas_call and"),
        ("opaque", "convert_element_type pure_callback ffi_call random_bits iota nextafter"),
        ("opaque", "custom_vjp_call a_primitive_that_nobody_has_seen"),
    ],
)
def test_categories(category, names):
    assert {OpTable().category(name) for name in names.split()} == {category}


def half(dtype, operation, *values):
    """Returns the result of an operation on operands rounded to 16 bits, rounded again."""
    return float(operation(*(np.asarray(value, dtype) for value in values)))


def test_the_numbers_in_the_reasons_are_true():
    with np.errstate(over="ignore"):
        assert half(BF16, np.add, 256, 1) == 256 and half(BF16, np.add, 255, 1) == 256
        assert half(F16, np.add, 2048, 1) == 2048 and half(F16, np.add, 2047, 1) == 2048
        assert half(F16, np.exp, 11.1) == np.inf and half(F16, np.exp, 11.08) < np.inf
        assert 1 / (1 + np.exp(11.09)) < 1.6e-5
        assert half(F16, np.exp2, 16) == np.inf and half(F16, np.exp2, 15.99) < np.inf
        assert half(F16, np.cosh, 11.8) == np.inf and half(F16, np.cosh, 11.75) < np.inf
        assert half(F16, np.square, 256) == np.inf and half(F16, np.square, 255.8) < np.inf
        assert np.prod(np.full(16, 2, F16), dtype=F16) == np.inf
        assert np.prod(np.full(15, 2, F16), dtype=F16) == 2**15
    below_one = np.nextafter(np.asarray(1, BF16), np.asarray(0, BF16))
    assert below_one == 1 - 2**-8 and np.arccos(float(below_one)) == pytest.approx(0.09, abs=0.005)
    assert step(1000, BF16) == 4 > np.pi
    assert step(100, BF16) / 2 == 0.25
    assert step(5, BF16) == pytest.approx(0.03, abs=0.002)
    assert jnp.finfo(F16).smallest_normal > 1e-6
    # Significant bits: of a product twice those of its operands, and FP32 has 24.
    assert all(2 * (jnp.finfo(dtype).nmant + 1) <= 24 for dtype in (BF16, F16))


def step(value, dtype):
    """Returns the distance from the value nearest to `value` to the next one."""
    value = np.asarray(value, dtype)
    return float(np.nextafter(value, np.asarray(np.inf, dtype))) - float(value)


# ---------------------------------------------------------------------------
# Execution of each category
# ---------------------------------------------------------------------------


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID")


def total(x):
    return lax.reduce_sum(x, (0,))  # jnp.sum accumulates 16-bit values in FP32


def product(x):
    return lax.reduce_prod(x, (0,))


def examples(x, y):
    """Returns a call of every operation that may be moved; x and y are vectors in [0.2, 0.8]."""
    one, index = x[0], jnp.array([[1], [1], [2]])
    updates = y[:3]
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    scatters = (lax.scatter, lax.scatter_add, lax.scatter_sub, lax.scatter_mul)
    pairs = (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.pow, lax.atan2, lax.max, lax.min)
    tests = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
    unary = (
        *(lax.exp, lax.exp2, lax.expm1, lax.log, lax.log1p, lax.rsqrt, lax.sin, lax.cos, lax.tan),
        *(lax.sinh, lax.cosh, lax.asin, lax.acos, lax.asinh, lax.atanh, lax.erf_inv, lax.lgamma),
        *(lax.digamma, lax.bessel_i0e, lax.bessel_i1e, lax.cumsum, lax.cumprod, lax.cumlogsumexp),
        *(lax.cummax, lax.cummin, lax.square, lax.abs, lax.neg, lax.sign, lax.floor, lax.ceil),
        *(lax.round, lax.is_finite, lax.sqrt, lax.cbrt, lax.tanh, lax.logistic, lax.erf, lax.erfc),
        *(lax.atan, jnp.max, jnp.min, lax.stop_gradient, lax.sort, jnp.copy),
        *(total, product, jnp.argmax, jnp.argmin, pooled, jax.grad(lambda x: total(pooled(x)))),
    )
    newer = [getattr(lax, name) for name in ("log2", "one_minus_square") if hasattr(lax, name)]
    newer += [lambda x: lax.polynomial(x, [y[0], y[1]])] if hasattr(lax, "polynomial") else []
    return (
        [function(x) for function in (*unary, *newer)],
        [function(x, y) for function in (*pairs, *tests, lax.igamma, lax.igammac, lax.dot)],
        [lax.acosh(1 + x), x**3, lax.zeta(2 + x, y), lax.polygamma(jnp.ones_like(x), y)],
        [jax.grad(lambda a: lax.igamma(a, one))(one), lax.betainc(x, y, one + jnp.zeros_like(x))],
        [scatter(x, index, updates, numbers) for scatter in scatters],
        [lax.scatter_min(x, index, updates, numbers), lax.scatter_max(x, index, updates, numbers)],
        [lax.ragged_dot(x.reshape(4, 2), y.reshape(1, 2, 4), jnp.array([4]))],
        [lax.conv(x.reshape(1, 1, 8), y[:3].reshape(1, 1, 3), (1,), "SAME")],
        [lax.clamp(y, x, y), lax.select(x < y, x, y), lax.concatenate([x, y], 0)],
        [lax.stack([x, y]), lax.pad(x, one, [(1, 1, 0)]), lax.dynamic_update_slice(x, y[:2], (1,))],
        [lax.reduce_window(x, np.zeros((), x.dtype)[()], lax.add, (2,), (2,), "VALID")],
        [-lax.reduce_window(-x, jnp.inf, lax.min, (2,), (2,), "VALID")],
        [jax.jvp(pooled, (x,), (y,)), jax.grad(lambda x: jnp.sin(x) * x)(one)],
        [lax.top_k(x, 2), lax.approx_max_k(x, 2), lax.sort((x, y), num_keys=1), lax.rev(x, (0,))],
        [x.reshape(2, 4).T, lax.broadcast(x, (2,)), lax.squeeze(x.reshape(8, 1), (1,))],
        [lax.tile(x, (2,)), x[1:3], lax.dynamic_slice(x, (1,), (2,)), x[jnp.array([1, 1])]],
        [lax.split(x, (4, 4)), lax.unstack(x.reshape(2, 4)), checkpoint_name(x, "x")],
        [lax.optimization_barrier((x, y)), jax.device_put(x, jax.devices()[0])],
    )


def exchange(x):
    """Returns results that are equal on all devices, and results of each device."""
    shared = [lax.psum(x, "i"), lax.pmax(x, "i"), lax.pmin(x, "i")]
    own = [lax.all_gather(x, "i"), lax.ppermute(x, "i", [(0, 1)]), lax.all_to_all(x, "i", 0, 0)]
    return shared, [
        *own,
        lax.psum_scatter(x, "i", tiled=True),
        lax.pcast(shared[0], "i", to="varying"),
    ]


def calls(x, y):
    """Returns all example calls; collectives run on four devices."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    map_shards = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"))
    checked = map_shards(exchange, out_specs=(P(), P("i")))
    unchecked = map_shards(lambda x: lax.psum(x, "i"), out_specs=P(), check_vma=False)
    return examples(x, y), checked(jnp.tile(x, 2)), unchecked(jnp.tile(x, 2))


# No public function of JAX creates these, or only with another kind of mesh.
NOT_MADE = {
    *("eq_to", "le_to", "lt_to", "broadcast_to", "dce_sink", "xla_metadata_value", "zeros_like"),
    *("tie", "layout_constraint", "reshard"),
    *("relayout", "shard_alike", "sharding_constraint", "pbroadcast", "pbroadcast_dynamic"),
    *("ragged_all_to_all", "unreduced_pmax", "unreduced_pmin"),
    *("all_gather_invariant", "all_gather_reduced", "preduced", "reduced_vary_cast"),
    *("reduced_vary_cast_p", "vary_unreduced_cast", "vary_unreduced_cast_p"),
    *("unreduced_psum", "unreduced_reduce_scatter"),
}


def operands(dtype):
    return np.linspace(0.2, 0.8, 8).astype(dtype), np.linspace(0.75, 0.3, 8).astype(dtype)


MOVABLE = {name for name, op in DEFAULT_OPS.items() if len(op.allowed) > 1}


def is_floating(variable):
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def test_every_operation_that_may_be_moved_has_an_example():
    made = {equation.primitive.name for equation in trace(calls, *operands(F32))}
    assert MOVABLE - made <= NOT_MADE | ELSEWHERE
    assert not made & NOT_MADE


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_what_may_be_moved_runs_in_each_dtype_that_a_policy_names(dtype):
    """Operations that JAX cannot run in these dtypes must not be movable to "low" or "fp32"."""
    for equation in trace(calls, *operands(dtype)):
        if equation.primitive.name in MOVABLE:
            variables = filter(is_floating, [*equation.invars, *equation.outvars])
            assert {variable.aval.dtype for variable in variables} <= {dtype}, equation
    assert "func.func public @main" in jax.jit(calls).lower(*operands(dtype)).as_text()


@EXPENSIVE
def test_what_may_be_moved_compiles_in_float16():
    arrays = jax.tree.leaves(jax.jit(calls)(*operands(F16)))
    assert all(np.all(np.isfinite(np.asarray(array, np.float64))) for array in arrays)


# JAX takes operands of two dtypes, but multiplies in the wider: the 16-bit product is lost.
PRODUCTS = {"dot_general", "ragged_dot_general"}
# JAX does not check their operands before compilation.
UNCHECKED = {"select_and_scatter_add", "select_and_gather_add"}


def mixes(equation):
    """Returns True if JAX accepts operands of different dtypes."""
    floating = [variable for variable in equation.invars if is_floating(variable)]
    values = [
        jax.ShapeDtypeStruct(v.aval.shape, BF16 if v is floating[1] else v.aval.dtype)
        for v in equation.invars
    ]
    try:
        jax.eval_shape(lambda *a: equation.primitive.bind(*a, **equation.params), *values)
    except (TypeError, AssertionError):
        return False
    return True


def test_operands_that_must_share_a_dtype_are_known():
    """A row may be "follow" only if JAX accepts operands of two dtypes."""
    seen = {}
    for equation in trace(examples, *operands(F32)):
        name = equation.primitive.name
        distinct = {id(variable) for variable in equation.invars if is_floating(variable)}
        if name in MOVABLE - PRODUCTS - UNCHECKED and len(distinct) > 1:
            seen.setdefault(name, set()).add(mixes(equation))
    for name, taken in seen.items():
        assert taken == {DEFAULT_OPS[name].allowed == ANY}, name
    assert {"add", "select_n", "sort", "optimization_barrier", "scatter-add"} <= set(seen)
    assert all(DEFAULT_OPS[name].allowed == JOINT for name in PRODUCTS | UNCHECKED)


# ---------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------


def test_an_edit_moves_one_operation():
    table = OpTable({"exp": "low"})
    assert table.category("exp") == "low" and table.category("log") == "fp32"
    assert table.differs() == {"exp": "low"} and OpTable().differs() == {}
    assert table.op("exp") == DEFAULT_OPS["exp"]
    assert "exp" in table.names("low") and "exp" not in table.names("fp32")
    assert sum(len(table.names(category)) for category in CATEGORIES) == len(list(table))


def test_tables_that_decide_alike_are_equal():
    table = OpTable({"log": "low", "exp": "fp32", "add": "fp32"})
    same = OpTable((("add", "fp32"),)).replace({"log": "low"})
    assert table == same and hash(table) == hash(same) and repr(table) == repr(same)
    assert table != OpTable() and table.replace({"log": "fp32", "add": "widest"}) == OpTable()
    assert eval(repr(table), {"OpTable": OpTable}) == table
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.edits = ()


def test_copies_are_equal_and_small():
    own = OpRule("my_kernel", "low", "reads bfloat16 tiles")
    table = OpTable({"exp": "low"}, [own])
    for other in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert other == table and hash(other) == hash(table)
        assert other.category("my_kernel") == "low"
    assert eval(repr(table), {"OpTable": OpTable, "OpRule": OpRule}) == table
    assert len(pickle.dumps(table)) < 1000


def test_a_table_is_laid_over_another():
    own = OpRule("my_kernel", "low", "reads bfloat16 tiles")
    base, over = OpTable({"exp": "low", "log": "low"}), OpTable({"log": "follow"}, [own])
    both = base.replace(over)
    assert both.differs() == {"exp": "low", "log": "follow", "my_kernel": "low"}
    assert both.replace(over) == both
    assert both.replace({"my_kernel": "opaque"}).category("my_kernel") == "opaque"


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"softmax": "low"}, "a softmax consists of 'exp', 'reduce_sum' and 'div'"),
        ({"scatter_add": "low"}, "Nearest: 'scatter-add'"),
        ({"logistik": "low"}, "Nearest: 'logistic'"),
        (
            {"my_kernel": "low"},
            "Your own primitives require a row: OpTable(added=[OpRule('my_kernel'",
        ),
        ({"": "low"}, "'' is not an operation"),
        ({3: "low"}, "3 is not an operation"),
        ({"exp": "lo"}, "this category does not exist. Did you mean 'low'?"),
        ({"exp": "LOW"}, "'exp' cannot be 'LOW'"),
        ({"exp": None}, "'exp' cannot be None"),
        ({"exp": ["low"]}, "'exp' cannot be ['low']"),
        ({"exp": "inside"}, "it does not contain a program"),
        ({"add": "follow"}, "its operands must share a dtype"),
        ({"dot_general": "follow"}, "its operands must share a dtype"),
        ({"scan": "low"}, "it is always 'inside' (a loop,"),
        ({"fft": "fp32"}, "it is always 'opaque' (complex values, or a routine"),
        ({"pure_callback": "low"}, "it is always 'opaque' (a kernel, foreign code"),
    ],
)
def test_an_edit_that_cannot_be_is_refused_with_one_that_can(edits, words):
    with pytest.raises(OpError) as error:
        OpTable(edits)
    message = str(error.value)
    assert words in message and repr(next(iter(edits))) in message
    shown = re.findall(r"OpTable\((?:\{.*?\}|added=\[.*?\]\))?\)?", message)
    tables = [eval(text, {"OpTable": OpTable, "OpRule": OpRule}) for text in shown]
    assert tables and all(table.differs() for table in tables)
    assert isinstance(error.value, JaxmpError)


def test_a_row_of_ones_own():
    table = OpTable(added=[OpRule("my_kernel", "low", "reads bfloat16 tiles")])
    assert table.category("my_kernel") == "low"
    assert table.differs() == {"my_kernel": "low"}
    with pytest.raises(OpError, match=r"'exp' has a row already: fp32, because an argument's"):
        OpTable(added=[OpRule("exp", "low", "reads bfloat16 tiles")])
    with pytest.raises(OpError, match=r"'my_kernel' has no reason. Explain why it is low") as error:
        OpRule("my_kernel", "low", " ")
    assert eval(
        str(error.value).partition("such as ")[2].removesuffix("."), {"OpRule": OpRule}
    ).reason
    with pytest.raises(OpError, match=r"'my_kernel' cannot be 'hi'"):
        OpRule("my_kernel", "hi", "reads bfloat16 tiles")


# ---------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_keep_the_default_table(name):
    recipe = load_recipe(name)
    assert recipe.ops == OpTable() and "[ops]" not in recipe.to_toml()


def test_a_file_moves_operations(write):
    recipe = load_recipe(write('extends = "bf16"\n[ops]\nexp = "low"\nscatter-add = "widest"'))
    assert recipe.ops == OpTable({"exp": "low", "scatter-add": "widest"})
    assert recipe != load_recipe("bf16") and recipe.policies == load_recipe("bf16").policies
    again = load_recipe(write(recipe.to_toml(), "again.toml"))
    assert again == recipe and hash(again) == hash(recipe)
    assert tomllib.loads(recipe.to_toml())["ops"] == {"exp": "low", "scatter-add": "widest"}


def test_every_default_can_be_written_out(write):
    lines = [f'{op.name} = "{op.category}"' for op in OpTable()]
    assert load_recipe(write("\n".join(['extends = "bf16"', "[ops]", *lines]))).ops == OpTable()


def test_a_file_keeps_the_rows_of_the_one_that_it_extends(write):
    write('extends = "fp16"\n[ops]\nexp = "low"\nlog = "follow"', "base.toml")
    recipe = load_recipe(write('extends = "base.toml"\n[ops]\nlog = "fp32"\nsin = "follow"'))
    assert recipe.ops.differs() == {"exp": "low", "sin": "follow"}


REFUSED = {
    '[ops]\nsoftmax = "low"': [
        "line 3, column 1, key 'ops.softmax'",
        "a softmax consists of 'exp'",
    ],
    '[ops]\nscatter_add = "low"': ["key 'ops.scatter_add'", "Nearest: 'scatter-add'"],
    '[ops]\n"my kernel" = "low"': ["line 3, column 1, key 'ops.my kernel'"],
    '[ops]\n  exp = "lo"': ["line 3, column 3, key 'ops.exp'", "Did you mean 'low'?"],
    "[ops]\nexp = 16": ["key 'ops.exp': 16 is not allowed", 'one of "low", "fp32"'],
    '[ops]\nexp.low = "low"': ["key 'ops.exp", "is not allowed"],
    '[ops]\nexp = "inside"': ["it does not contain a program"],
    '[ops]\nadd = "follow"': ["its operands must share a dtype"],
    '[ops]\nscan = "low"': ["line 3, column 1, key 'ops.scan'", "always 'inside'"],
    'ops = "low"': ["key 'ops'", "is not a table"],
    'exp = "low"': ["line 2, column 1, key 'exp'", "'exp' is a key of [ops]"],
}


@pytest.mark.parametrize("text, words", REFUSED.items())
def test_a_refusal_names_the_location_and_shows_a_fix_that_loads(write, text, words):
    text = f'extends = "bf16"\n{text}'
    with pytest.raises(RecipeError) as error:
        load_recipe(write(text))
    message = str(error.value)
    assert message.startswith("'my.toml', line ")
    assert all(word in message for word in words), message
    assert len(message) < 1000  # names the nearest operation, and not all of them
    line = int(re.search(r"line (\d+)", message)[1])
    assert load_recipe(write("\n".join([*text.split("\n")[: line - 1], code_of(message)])))


def test_replace(write):
    recipe = load_recipe("bf16").replace(ops={"exp": "low"})
    assert recipe.ops == OpTable({"exp": "low"})
    assert recipe.replace(ops={"log": "low"}).ops == OpTable({"exp": "low", "log": "low"})
    assert recipe.replace(ops=OpTable({"log": "low"})).ops == OpTable({"log": "low"})
    assert recipe.replace(master="none").ops == recipe.ops
    assert load_recipe("fp16").replace(ops={"exp": "low"}).ops == recipe.ops
    assert load_recipe(write(recipe.to_toml())).ops == recipe.ops
    with pytest.raises(OpError, match="'softmax' is not an operation"):
        recipe.replace(ops={"softmax": "low"})
    with pytest.raises(OpError, match="is not a table of operations"):
        recipe.replace(ops="low")


def test_a_row_of_ones_own_is_no_part_of_a_recipe():
    own = OpTable(added=[OpRule("my_kernel", "low", "reads bfloat16 tiles")])
    with pytest.raises(
        RecipeError, match="can only change the categories of JAX's operations"
    ) as error:
        load_recipe("bf16").replace(ops=own)
    call = str(error.value).splitlines()[-1].strip()
    given = eval(
        call,
        {"OpTable": OpTable, "OpRule": OpRule, "fn": None, "recipe": None, "autocast": dict_of},
    )
    assert given["ops"] == own


def dict_of(*_, **arguments):
    return arguments


def test_the_table_of_whatever_names_policies(write):
    name = write('extends = "bf16"\n[ops]\nexp = "low"')
    edited = OpTable({"exp": "low"})
    assert as_op_table(name) == as_op_table(load_recipe(name)) == edited
    for policies in ("bf16", "p=f32,c=bf16", PolicyMap("bf16"), load_recipe(name).policies):
        assert as_op_table(policies) == OpTable()


# ---------------------------------------------------------------------------
# Printed output
# ---------------------------------------------------------------------------


@pytest.fixture
def show(command, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    def show(*arguments, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        status, out, _ = command("show", *arguments)
        assert status == 0
        return out

    return show


@pytest.mark.parametrize("columns", [100, 60])
def test_show_prints_the_whole_table(show, write, columns):
    printed = show(write('extends = "bf16"\n[ops]\nexp = "low"'), "--ops", columns=columns)
    assert max(map(len, printed.splitlines())) <= columns
    text = " ".join(printed.split())
    for op in OpTable():
        changed = "changed from fp32: " if op.name == "exp" else ""
        assert f"{op.name} {changed}{op.reason}" in text
    low, fp32 = text.index(f"low: {CATEGORIES['low']}"), text.index(f"fp32: {CATEGORIES['fp32']}")
    assert low < text.index("exp changed from fp32") < fp32


def test_the_documents_describe_every_category():
    readme = text_of("policies/README.md")
    section = readme.partition("### `[ops]`")[2].partition("\n## ")[0]
    rows = re.findall(r'^\| `"(\w+)"` \| .* \| (.*) \|$', section, re.MULTILINE)
    assert [category for category, _ in rows] == list(CATEGORIES)
    for category, named in rows:
        for name in re.findall(r"`([^`]+)`", named):
            assert DEFAULT_OPS[name].category == category


def test_public_names_document_themselves():
    for thing in (OpRule, OpTable, OpTable.replace, OpTable.op, OpTable.category, as_op_table):
        assert inspect.getdoc(thing)
    parameters = [field.name for field in dataclasses.fields(OpRule)] + ["edits", "added"]
    assert all(f"{name}:" in OpRule.__doc__ + OpTable.__doc__ for name in parameters)
