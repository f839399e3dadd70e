"""`jaxmp.estimate_memory`: state, temporary arrays, shards, and the command."""

import functools
import json
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gpt
import jaxmp
from gpu_compiler import needs_compiler
from jaxmp._programs import _constructs
from jaxmp._tools.memory import ERRORS, STATE
from jaxmp.errors import AuditError, MissingDependencyError, TargetError
from jaxmp.typing import MemoryEstimate
from sources import results_of

pytestmark = pytest.mark.usefixtures("standard_promotion")

MODEL = gpt.GPT(layers=2, width=128, heads=2, vocabulary=512, max_length=128)


def size_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("recipe", ["bf16", "bf16_params", "fp16", "fp8_delayed"])
def test_state_is_exact(recipe):
    step, state, tokens = gpt.make_step(recipe, MODEL, 4)
    estimate = jaxmp.estimate_memory(step, state, tokens)
    parameters = state.params["params"]
    assert estimate.kinds["parameters"] == size_of(parameters)
    assert estimate.arguments == size_of((state, tokens))
    masters = 4 * sum(leaf.size for leaf in jax.tree.leaves(parameters))
    assert estimate.kinds.get("masters", 0) == masters * (recipe == "bf16_params")
    assert 2 * masters <= estimate.kinds["moments"] <= 2.01 * masters
    assert (estimate.kinds.get("FP8 state", 0) > 0) == (recipe == "fp8_delayed")
    # The donated state is overwritten.
    assert estimate.kinds.get("results", 0) <= 4
    # Without x64, the program receives integers of 32 bits.
    ids = np.ones(tokens.shape, np.int64)
    assert jaxmp.estimate_memory(step, state, ids).kinds == estimate.kinds


def test_nnx_has_the_same_state():
    linen, nnx = (make("bf16_params", MODEL, 4) for make in (gpt.make_step, gpt.make_nnx_step))
    one, other = (jaxmp.estimate_memory(*made) for made in (linen, nnx))
    assert one.kinds["parameters"] == other.kinds["parameters"]
    assert one.kinds["masters"] == other.kinds["masters"]


def squares(params, x):
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x)


PARAMS = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
ROWS = jax.ShapeDtypeStruct((8192, 256), jnp.float32)


def temporary(fn, *args):
    return jaxmp.estimate_memory(fn, *args or (PARAMS, ROWS), exact=False).temporary


MESH = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
ON_ROWS = NamedSharding(MESH, P("data"))


def test_gradients_under_other_names_tell_the_parameters():
    def step(params, x):
        grads = jax.grad(lambda params: jnp.sum(jnp.tanh(x @ params["w"])))(params)
        return {"dw": grads["w"]}

    params = {"w": PARAMS[0]}
    assert jaxmp.estimate_memory(step, params, ROWS).kinds["inputs"] == size_of(ROWS)


def test_residuals_and_remat():
    array = size_of(ROWS)
    saved = jaxmp.estimate_memory(jax.grad(squares), PARAMS, ROWS)
    # The results of tanh remain for the backward pass, and its cotangent is one more.
    assert 8 * array <= saved.temporary <= 11 * array
    assert saved.kinds["results"] == saved.kinds["parameters"]

    layer = lambda x, weight: jnp.tanh(jnp.tanh(x @ weight) @ weight)
    loss = lambda f: lambda params, x: jnp.sum(functools.reduce(f, params, x))
    with_remat, without = (temporary(jax.grad(loss(f))) for f in (jax.checkpoint(layer), layer))
    assert with_remat < 0.75 * without
    assert temporary(squares) <= 3 * array
    # Two passes through one network may overlap.
    passes = lambda params, x: [jax.grad(squares)(params, y) for y in (x, 2 * x)]
    assert 1.2 * saved.temporary < temporary(passes) < 1.5 * saved.temporary


def test_recomputed_arrays_do_not_all_exist_at_once():
    rows = size_of(ROWS)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def loss(params, x):
        for weight in params:
            x = jax.nn.gelu(x @ weight)
        return jnp.sum(x)

    estimate = jaxmp.estimate_memory(jax.grad(loss), PARAMS, ROWS)
    # The results of 8 matmuls are kept; of those of gelu, most are computed again one at a time.
    assert 8 * rows <= estimate.temporary <= 12 * rows


def test_a_gradient_exists_until_its_update_unless_the_norm_of_all_is_needed():
    """XLA needs 73 MB for weights of 4,096 x 4,096 and 8 rows, and 541 MB with clipping."""
    rows = ShapeDtypeStruct((8, 256), jnp.float32)

    def required(tx):
        def step(params, x):
            updates, _ = tx.update(jax.grad(squares)(params, x), tx.init(params), params)
            return optax.apply_updates(params, updates)

        return temporary(step, PARAMS, rows)

    gradient = size_of(PARAMS[0])
    assert gradient <= required(optax.sgd(0.1)) <= 2 * gradient
    clipped = required(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    assert 8 * gradient <= clipped <= 9 * gradient


def test_masked_attention_of_flax_has_an_estimate():
    """The derivative of the mask, an integer array, has a dtype without bytes."""
    model = jaxmp.load_recipe("bf16").wrap(nn.MultiHeadDotProductAttention(4))
    x, tokens = ShapeDtypeStruct((2, 16, 32), jnp.float32), ShapeDtypeStruct((2, 16), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = lambda params, x, t: model.apply(params, x, mask=nn.make_causal_mask(t)).sum()
    step = jax.value_and_grad(loss)
    estimate = jaxmp.estimate_memory(step, params, x, tokens, target="a100", exact=False)
    assert estimate.kinds["parameters"] == size_of(params)
    assert estimate.kinds["inputs"] == size_of((x, tokens)) and estimate.temporary > 0


def test_shards_are_counted_on_one_device():
    shard = lambda leaf: on_mesh({"data": 4}, leaf.shape, "data")
    whole = jaxmp.estimate_memory(jax.grad(squares), PARAMS, ROWS)
    quarter = jaxmp.estimate_memory(jax.grad(squares), [*map(shard, PARAMS)], shard(ROWS))
    assert {kind: 4 * size for kind, size in quarter.kinds.items()} == whole.kinds


def test_packed_types_and_shardings_of_jit_count_as_in_the_program():
    step = lambda packed, x: x.sum(0) * packed.astype(jnp.float32)
    step = jax.jit(step, in_shardings=(None, ON_ROWS))
    # The array is on one device, and JAX divides it.
    estimate = jaxmp.estimate_memory(step, jnp.zeros(64, jnp.int4), jnp.ones((8, 64)), exact=False)
    assert estimate.arguments == 64 // 2 + 4 * 8 * 64 // 2


def perceptrons(params, x):
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.sum(jnp.square(x))


def scanned_perceptrons(params, x):
    x, _ = jax.lax.scan(lambda x, pair: (x + jnp.tanh(x @ pair[0]) @ pair[1], None), x, params)
    return jnp.sum(jnp.square(x))


def on_mesh(sizes, shape, *spec, dtype=jnp.float32):
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    return ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def test_matmuls_pass_the_axes_of_tensor_parallelism():
    def estimate(batch, *sizes, spec=("model",)):
        place = functools.partial(on_mesh, dict(zip(("data", "model"), sizes, strict=True)))
        up, down = place((64, 1024), None, *spec), place((1024, 64), *spec)
        x = place((batch, 64), "data")
        return jaxmp.estimate_memory(jax.grad(perceptrons), [(up, down)] * 4, x, exact=False)

    whole, half, quarter, both = (
        estimate(8192, *sizes).temporary for sizes in ((1, 1), (1, 2), (1, 4), (2, 4))
    )
    # Arrays of hidden units are divided, and those of 64 features are not: 1 / 16 of the others.
    assert whole / 2 < half < 0.56 * whole and whole / 4 < quarter < 0.31 * whole
    assert both == pytest.approx(quarter / 2, rel=0.02)
    # With FSDP along the same axis as the batch, no axis is passed.
    fsdp = estimate(8192, 4, 1, spec=("data",))
    assert fsdp.temporary < whole / 3 and fsdp.least < fsdp.most <= 2 * fsdp.least + 2**25
    # Without a constraint, XLA may divide the rows otherwise.
    assert fsdp.unknown == ("arrays without sharding constraints",)
    # It gathers rows that it sorts by their groups.
    groups, place = jnp.array([4096, 4096]), functools.partial(on_mesh, {"data": 4})
    grouped = jax.grad(lambda w, x: jax.lax.ragged_dot(x, w, groups).sum())
    w, x = place((2, 64, 64), None), place((8192, 64), "data")
    unknown = jaxmp.estimate_memory(grouped, w, x, exact=False).unknown
    assert unknown == ("ragged_dot on several devices",)


def test_loops_reshapes_and_constraints_pass_the_axes_too():
    place = functools.partial(on_mesh, {"data": 1, "model": 4})
    params = (place((4, 64, 1024), None, None, "model"), place((4, 1024, 64), None, "model"))
    x = place((8192, 64), "data")
    whole = jax.tree.map(lambda leaf: ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    loops = [temporary(jax.grad(scanned_perceptrons), *args) for args in (whole, (params, x))]
    assert loops[1] < 0.35 * loops[0]

    def heads(up, x, sharding=None):
        y = jnp.exp(x @ up).reshape(8, 1024, 16, 64).transpose(0, 2, 1, 3)
        if sharding is not None:
            y = jax.lax.with_sharding_constraint(y, sharding)
        logits = jnp.einsum("bhtf,bhsf->bhts", y, y)
        # The scatter-add of the derivative is into zeros.
        first = jnp.zeros((8, 16, 1024, 1), int)
        return jnp.take_along_axis(jax.nn.softmax(logits), first, 3).sum()

    up = place((64, 1024), None, "model")
    undivided = ShapeDtypeStruct(up.shape, up.dtype), whole[1]
    parts, all_of_it = (temporary(jax.grad(heads), *args) for args in ((up, x), undivided))
    assert parts < 0.3 * all_of_it
    sharded = lambda *spec: functools.partial(
        heads, sharding=NamedSharding(x.sharding.mesh, P(*spec))
    )
    assert temporary(jax.grad(sharded()), up, x) > 0.8 * all_of_it
    assert temporary(jax.grad(sharded("data", P.UNCONSTRAINED)), up, x) == parts
    assert not jaxmp.estimate_memory(sharded("data"), place((64, 1024), "data"), x).unknown


def test_gradients_are_whole_before_they_are_summed_over_the_batch():
    place = functools.partial(on_mesh, {"data": 4, "model": 2})
    x = place((64, 1024), "data")

    def estimate(loss, params):
        step = lambda params, x: jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))
        return jaxmp.estimate_memory(step, params, x, exact=False).temporary

    def pairs(*spec):
        return [(place((1024, 4096), *spec), place((4096, 1024), *spec[::-1]))] * 2

    # The batch is small: most of the memory are gradients, each of half of a weight.
    gradient = 4 * 1024 * 4096 // 2
    split, whole = (estimate(perceptrons, pairs(axis, "model")) for axis in ("data", None))
    assert split == whole >= gradient
    stacked = [place((2, 1024, 4096), None, "data", "model"), place((2, 4096, 1024), None, "model")]
    assert estimate(scanned_perceptrons, tuple(stacked)) >= 4 * gradient


def test_the_arrays_in_a_shard_map_are_parts():
    step = jax.grad(squares)
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(step, mesh=MESH, check_vma=False, **specs)
    x = ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=ON_ROWS)
    part = ShapeDtypeStruct((ROWS.shape[0] // 2, ROWS.shape[1]), ROWS.dtype)
    params = [ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(MESH, P())) for w in PARAMS]
    estimate = jaxmp.estimate_memory(mapped, params, x, exact=False)
    assert estimate.temporary == jaxmp.estimate_memory(step, PARAMS, part, exact=False).temporary
    # Without shardings of the arguments, those of the `shard_map` divide them.
    for function in (mapped, jax.jit(mapped)):
        unplaced = jaxmp.estimate_memory(function, PARAMS, ROWS, exact=False)
        assert (unplaced.kinds, unplaced.most) == (estimate.kinds, estimate.most)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_an_unrolled_loop_is_a_program_of_its_iterations(length, reverse):
    def looped(params, x):
        def layer(x, n):
            return n * jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]), jnp.sin(x)

        scales = jnp.arange(1.0, length + 1)
        x, saved = jax.lax.scan(layer, x, scales, reverse=reverse, unroll=length)
        return jnp.sum(x) + jnp.sum(scales[:, None, None] * saved)

    def plain(params, x):
        total = 0.0
        for n in range(length)[:: -1 if reverse else 1]:
            total += (n + 1) * jnp.sum(jnp.sin(x))
            x = (n + 1) * jnp.tanh(jnp.tanh(x @ params[0]) @ params[1])
        return jnp.sum(x) + total

    loop, other = (jaxmp.estimate_memory(jax.grad(f), PARAMS, ROWS) for f in (looped, plain))
    assert loop.temporary == pytest.approx(other.temporary, rel=0.05)


def test_operands_and_results_of_a_kernel_exist_at_once():
    def forward(params, x):
        return jnp.tanh(x @ params[0]) @ params[1]

    # The matmul's result, and the tanh of it.
    assert jaxmp.estimate_memory(forward, PARAMS, ROWS).temporary == 2 * size_of(ROWS)
    step = lambda x: jnp.sort(jnp.cumsum(x, 1).astype(jnp.bfloat16))
    assert jaxmp.estimate_memory(step, ROWS).temporary == 1.5 * size_of(ROWS)


def test_transposed_convolutions_write_their_operand_with_zeros():
    x = ShapeDtypeStruct((2, 16, 16, 64), jnp.float32)
    kernel, up = (ShapeDtypeStruct(shape, x.dtype) for shape in ((4, 4, 8, 64), (2, 32, 32, 8)))

    def upsample(kernel, x, reverse):
        kernel = kernel if reverse else jnp.swapaxes(kernel, 2, 3)
        options = {"strides": (2, 2), "padding": "SAME", "transpose_kernel": reverse}
        return jnp.sum(jnp.sin(jax.lax.conv_transpose(jnp.abs(x), kernel, **options)))

    required = lambda fn, reverse: temporary(functools.partial(fn, reverse=reverse), kernel, x)
    assert required(upsample, reverse=False) == 4 * 2 * 35 * 35 * 64 + size_of(up)
    # XLA calls cuDNN's gradient of a convolution instead.
    assert required(upsample, reverse=True) == size_of([x, kernel, up])
    # The gradient of the kernel reads transposed operands: in 3-D, also of the one with zeros.
    assert required(jax.grad(upsample), reverse=True) == size_of([x, x, up])
    volumes = (ShapeDtypeStruct(s, x.dtype) for s in ((4, 4, 4, 64, 8), (2, 8, 8, 8, 64)))
    network = nn.ConvTranspose(8, (4, 4, 4), strides=(2, 2, 2), use_bias=False)
    loss = lambda kernel, x: jnp.sum(network.apply({"params": {"kernel": kernel}}, x) ** 2)
    zeros = 4 * 2 * 19**3 * 64
    assert 2 * zeros < temporary(jax.grad(loss), *volumes) < 2.3 * zeros


def test_matmuls_read_zeros_and_products_with_vectors_no_operands():
    array = lambda *shape: ShapeDtypeStruct(shape, jnp.float32)
    step = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, (2, 2), ((0, 1), (1, 1)))
    # Zeros at one end of the rows.
    assert temporary(step, array(2, 8, 32, 32), array(8, 8, 3, 3)) == 4 * 2 * 8 * 33 * 34
    # The rows of 4 groups, and the transposed ones.
    sizes = ShapeDtypeStruct((4,), jnp.int32)
    assert temporary(jax.lax.ragged_dot, ROWS, array(4, 256, 8), sizes) == 2 * 4 * size_of(ROWS)
    step = lambda x: jnp.einsum("bkf,bk->bf", jax.nn.one_hot(x.astype(int), 1024), x)
    assert temporary(step, array(256, 8)) == 0


@pytest.mark.parametrize(("function", "arrays"), [(jnp.tanh, 2), (jnp.exp, 1)])
def test_a_long_operation_is_computed_once(function, arrays):
    def forward(params, x):
        y = function(x)
        return (y + 1) @ params[0], (2 * y) @ params[1]

    # The operands of both matmuls may exist at once.
    assert arrays <= temporary(forward) / size_of(ROWS) < arrays + 0.2


def test_sums_are_written_and_their_terms_freed_in_a_network_without_gradients():
    def teacher(params, x):
        for weight in params:
            x = x + (x / jnp.sum(x, 1, keepdims=True)) @ weight
        return jnp.sum(x)

    # A sum, a term, and the operand of the matmul.
    assert jaxmp.estimate_memory(teacher, PARAMS, ROWS).temporary <= 3.1 * size_of(ROWS)


def test_scattered_gradients_of_a_similarity_matrix_are_one_array():
    """So they are in the program that XLA compiles: two matrices exist at once."""

    def contrastive(x):
        logits, labels = x @ x.T, jnp.arange(x.shape[0])
        loss = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(loss(logits, labels) + loss(logits.T, labels))

    estimate = jaxmp.estimate_memory(jax.grad(contrastive), ROWS)
    assert 2 <= estimate.temporary / (4 * ROWS.shape[0] ** 2) <= 2.5


def test_loops_and_no_matmuls_read_copies_of_transposed_arguments():
    rows = lambda x: jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros(256), x)[0]
    x = ShapeDtypeStruct(ROWS.shape[::-1], ROWS.dtype)
    pairs = (rows, ROWS), (lambda x: rows(x.T), x), (lambda x: x.T @ jnp.ones((256, 256)), x)
    sizes = [jaxmp.estimate_memory(f, y).temporary // size_of(ROWS) for f, y in pairs]
    assert sizes == [0, 1, 0]


def test_it_says_whether_the_step_fits():
    params = {"w": jax.ShapeDtypeStruct((50_000, 50_000), jnp.float32)}
    grads = jax.grad(lambda p, x: jnp.sum(x @ p["w"]))
    step = lambda params, x: jax.tree.map(jnp.subtract, params, grads(params, x))
    x = jax.ShapeDtypeStruct((8, 50_000), jnp.float32)
    step = jax.jit(step, donate_argnums=0)
    estimate = functools.partial(jaxmp.estimate_memory, step, params, x, exact=False)
    small, large = (estimate(target=name) for name in ("l4", "b200"))
    assert (small.fits, large.fits) == (False, True)
    assert large.usable == int(0.75 * large.memory)
    assert "does not fit in l4" in str(small)
    between = {"like": "h200", "memory": (large.least + large.most) / 2 / 0.75}
    unsure = estimate(target=between)
    assert unsure.fits is None and "may fit in the described chip" in str(unsure)
    assert jaxmp.estimate_memory(step, params, x).fits is None
    tpu = jaxmp.estimate_memory(step, params, x, target="v5p")
    assert tpu.usable == tpu.memory
    with pytest.raises(TargetError, match="exact=True, target='h200'"):
        jaxmp.estimate_memory(step, params, x, exact=True)
    with pytest.raises(TargetError, match=r"for 'v100': .* leave out exact=True"):
        jaxmp.estimate_memory(step, params, x, target="v100", exact=True)


def test_a_wrong_share_and_a_cache_that_is_a_file_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "run.py"
    file.touch()
    never = lambda *args: pytest.fail("the step is not traced")
    with pytest.raises(NotADirectoryError, match="Name a folder: cache="):
        jaxmp.plan(never, recipes=["fp16"], targets=["v100"], cache=file)
    with pytest.raises(NotADirectoryError, match="Name a folder: cache="):
        jaxmp.estimate_memory(never, PARAMS, ROWS, exact=False, cache=file)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home directory
    assert jaxmp.estimate_memory(jax.grad(squares), PARAMS, ROWS).total
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "95")
    with pytest.raises(TargetError, match="is not a share of the memory"):
        jaxmp.estimate_memory(never, PARAMS, ROWS)
    with pytest.raises(TargetError, match="is not a share of the memory"):
        jaxmp.plan(never, recipes=["bf16"], targets=["v100"])


def test_a_share_on_the_command_line_replaces_that_of_the_environment(command, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    status, _, _ = command("memory", "no_model:make", "--share", "0.9")
    # JAX raises if both are set.
    assert status == 2 and "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"


def test_an_unknown_operation_with_a_jaxpr_is_a_warning(monkeypatch):
    monkeypatch.setattr(_constructs, "_KNOWN", _constructs._KNOWN - {"custom_jvp_call"})
    with pytest.warns(jaxmp.errors.RecipeWarning, match="the memory of the operations inside"):
        jaxmp.estimate_memory(lambda x: jax.nn.relu(x), ROWS, exact=False)
        report = jaxmp.plan(lambda recipe: (jax.nn.relu, ROWS), recipes=["fp16"], targets=["v100"])
    assert report.rows[0].fits is None and "not known what fits" in report.choices[0].reason


def test_command(command, write, tmp_path):
    file = write(
        "import jax, jax.numpy as jnp, numpy as np\n"
        "def make_step(recipe):\n"
        "    step = lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w)\n"
        "    return step, jax.ShapeDtypeStruct((8, 8), jnp.float32), np.ones((2, 8))\n",
        "run_memory.py",
    )
    options = ["--recipe", "bf16", "--target", "h200", "--json", "memory.json"]
    code, out, _ = command("memory", f"{file}:make_step", *options)
    assert code == 0 and "fits in h200" in out
    data = json.loads((tmp_path / "memory.json").read_text())
    assert data["kinds"]["parameters"] == 256
    assert MemoryEstimate.from_json(json.dumps(data)).total == data["total"]


@needs_compiler
@pytest.mark.expensive
@pytest.mark.parametrize("recipe", ["bf16", "bf16_params"])
def test_the_compiler_answers(recipe, tmp_path, monkeypatch):
    # In smaller batches, most of the temporary memory is the workspace of cuBLAS, 32 MiB.
    made = gpt.make_step(recipe, MODEL, 256)
    compiled = jaxmp.estimate_memory(*made, target="h200", cache=tmp_path)
    estimate = jaxmp.estimate_memory(*made, target="h200", exact=False)
    assert compiled.compiler.startswith("jaxlib") and not compiled.reason
    assert not estimate.compiler and estimate.reason == "exact=False (--estimate)"
    for kind in STATE:
        assert compiled.kinds.get(kind, 0) == pytest.approx(estimate.kinds.get(kind, 0), rel=0.01)
    assert compiled.least == compiled.most == compiled.total
    assert estimate.least <= compiled.total <= estimate.most
    assert MemoryEstimate.from_json(compiled.to_json()) == compiled

    # A second call compiles nothing.
    def compile_again(self, *args, **kwargs):
        raise AssertionError("the program is in the cache")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_again)
    assert jaxmp.estimate_memory(*made, target="h200", cache=tmp_path) == compiled


@needs_compiler
def test_a_step_that_cannot_be_compiled_is_estimated_with_the_reason():
    def step(params, x):
        jax.debug.print("{}", x.sum())
        return jax.grad(squares)(params, x)

    estimate = jaxmp.estimate_memory(step, PARAMS, ROWS, target="h200")
    assert "calls Python on the host" in estimate.reason and estimate.least < estimate.most
    with pytest.raises(AuditError, match="calls Python on the host"):
        jaxmp.estimate_memory(step, PARAMS, ROWS, target="h200", exact=True)


def test_without_the_compiler_the_reason_is_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None)
    estimate = jaxmp.estimate_memory(jax.grad(squares), PARAMS, ROWS, target="h200")
    assert 'pip install "jaxmp[aot]"' in estimate.reason
    with pytest.raises(MissingDependencyError, match="aot"):
        jaxmp.estimate_memory(jax.grad(squares), PARAMS, ROWS, target="h200", exact=True)


def test_programs_of_tpus_are_compiled_on_request():
    estimate = jaxmp.estimate_memory(jax.grad(squares), PARAMS, ROWS, target="v5e")
    assert "exact=True (--exact)" in estimate.reason and not estimate.compiler


def test_ranges_come_from_the_recorded_programs():
    rows = results_of("memory_estimates_h200")["rows"]
    for row in rows:
        # The state has one counter more than when most rows were compiled.
        assert row["state"] == pytest.approx(row["xla_kinds"], abs=4, rel=0)
    for name, error in ERRORS.items():
        own = [row for row in rows if (row["devices"] == 1) == (name == "one")]
        ratios = [row["xla_temporary"] / row["temporary"] for row in own]
        inside = sum(error["low"] <= ratio <= error["high"] for ratio in ratios)
        assert (len(own), inside) == (error["programs"], error["inside"])
        assert inside >= 0.9 * len(own)
        for row in own:
            state = sum(row["state"].values())
            least, most = (state + error[key] * row["temporary"] for key in ("low", "high"))
            assert most <= {"one": 1.6, "several": 2.0}[name] * least
