"""Splash attention: results in Pallas' interpreter, the choice, and programs compiled for TPUs."""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
import test_attention
from grids import EXPENSIVE, fast_cases
from jaxmp import _attention as attention
from jaxmp import dot_product_attention
from jaxmp._attention._arguments import arguments
from jaxmp._attention._splash import splash_attention
from jaxmp._core._compat import context
from jaxmp.errors import AttentionError
from test_attention import inputs

INTERPRETED = functools.partial(splash_attention, interpret=True)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture
def tpu(monkeypatch):
    """Compiles for a TPU, with kernels that run in Pallas' interpreter."""
    monkeypatch.setitem(attention._RUN, "splash", INTERPRETED)
    attention._compiled.cache_clear()
    with context(target="tpu"):
        yield
    attention._compiled.cache_clear()


def lengths(*values):
    return jnp.array(values, jnp.int32)


# ---------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "heads", "sizes", "options"),
    [
        # Padded positions, grouped heads, and queries that see no key.
        (
            (200, 200),
            (4, 2),
            (16, 16),
            {
                "is_causal": True,
                "key_value_seq_lengths": lengths(0, 77),
                "query_seq_lengths": lengths(200, 50),
            },
        ),
        ((128, 300), (2, 1), (16, 8), {"local_window_size": (30, 60)}),
        pytest.param((300, 200), (4, 4), (64, 64), {"is_causal": True}, marks=EXPENSIVE),
        pytest.param((200, 300), (3, 1), (32, 48), {"scale": 0.3}, marks=EXPENSIVE),
        pytest.param((640, 640), (2, 1), (64, 64), {"local_window_size": (50, 0)}, marks=EXPENSIVE),
    ],
    ids=["lengths", "window", "causal", "sizes", "blocks"],
)
@fast_cases("window")
def test_results_and_gradients_against_fp64(monkeypatch, positions, heads, sizes, options):
    monkeypatch.setattr(test_attention, "IMPLEMENTATIONS", {"splash": INTERPRETED})
    operands = inputs(*positions, *heads, *sizes, dtype=jnp.bfloat16)
    with test_attention.standard():  # the reference is written as users write it
        test_attention.check_errors(arguments(*operands, **options))


@EXPENSIVE
def test_transformations_and_explicit_axes(tpu):
    query, key, value = inputs(130, 130, 2, 2, 8, 8, jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))

    def loss(query, key, value):
        attend = lambda x: dot_product_attention(x, key, value, is_causal=True)
        return jnp.square(jax.checkpoint(attend)(query).astype(jnp.float32)).sum()

    gradients = jax.grad(loss, (0, 1, 2))
    expected = jax.jit(gradients)(query, key, value)
    stacked = [jnp.stack([x, 2 * x]) for x in (query, key, value)]
    of_both = jax.jit(jax.vmap(gradients))(*stacked)
    # Without a split, each device computes the whole.
    for spec in (PartitionSpec("data"), PartitionSpec(None, None, "data"), PartitionSpec()):
        place = lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            compiled = jax.jit(gradients).lower(*map(place, (query, key, value))).compile()
            sharded = compiled(*map(place, (query, key, value)))
        assert "all-gather" not in compiled.as_text()
        assert ("all-reduce" in compiled.as_text()) == (not len(spec))
        for mine, batched, want in zip(sharded, of_both, expected, strict=True):
            assert PartitionSpec(*mine.sharding.spec[: len(spec)]) == spec
            np.testing.assert_array_equal(mine, want)
            np.testing.assert_array_equal(batched[0], want)


# ---------------------------------------------------------------------------
# Choice
# ---------------------------------------------------------------------------

LONG = shape(2, 2048, 8, 64)


def test_a_tpu_takes_splash(tpu):
    for options in (
        {},
        {"is_causal": True},
        {"local_window_size": (16, 16)},
        {"key_value_seq_lengths": shape(2, dtype=jnp.int32)},
    ):
        choice = jaxmp.explain(jaxmp.dot_product_attention)(LONG, LONG, LONG, **options).attention[
            0
        ]
        assert (choice.implementation, choice.notes) == ("splash", ()), str(choice)
    odd = jaxmp.explain(jaxmp.dot_product_attention)(
        shape(2, 1000, 8, 80), shape(2, 1000, 2, 80), shape(2, 1000, 2, 80)
    ).attention[0]
    assert odd.implementation == "splash" and len(odd.notes) == 2
    assert "0.1118" in odd.notes[0] and "1000 positions are padded to 1024" in odd.notes[1]


@pytest.mark.parametrize(
    ("query", "options", "blockers"),
    [
        (shape(2, 2048, 8, 64, dtype=jnp.float32), {}, ["policy"]),
        (shape(2, 2048, 8, 64, dtype=jnp.float16), {}, ["policy"]),
        (shape(2, 64, 8, 64), {}, ["query", "key"]),
        (shape(2, 2048, 8, 264), {}, ["query", "value"]),
        (LONG, {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, ["dropout_rate"]),
        (LONG, {"return_residual": True}, ["return_residual"]),
        (LONG, {"bias": shape(2048, 2048)}, ["bias"]),
        (LONG, {"mask": shape(1, 1, 1, 2048, dtype=bool)}, ["mask"]),
    ],
)
def test_what_splash_cannot_serve_is_named_and_refused(tpu, query, options, blockers):
    choice = jaxmp.explain(jaxmp.dot_product_attention)(query, query, query, **options).attention[0]
    assert [row.argument for row in choice.rows] == blockers and all(r.change for r in choice.rows)
    assert choice.implementation == ("xla" if query.shape[1] == 64 else "blockwise")
    with pytest.raises(AttentionError, match=rf"does not support this call:\n  {blockers[0]}: "):
        jaxmp.explain(jaxmp.dot_product_attention)(
            query, query, query, implementation="splash", **options
        ).attention[0]


def test_queries_beyond_the_window_are_named(tpu):
    choice = jaxmp.explain(jaxmp.dot_product_attention)(
        LONG, *[shape(2, 1024, 8, 64)] * 2, local_window_size=(100, 100)
    ).attention[0]
    assert "queries from 1124 on see no key" in choice.rows[0].reason


def test_meshes_that_xla_would_have_to_partition_are_named(tpu):
    query = inputs(128, 128, 2, 2, 8, 8, jnp.bfloat16)[0]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    choices = []

    @jax.jit
    def attend(query):
        choices.append(jaxmp.explain(jaxmp.dot_product_attention)(query, query, query).attention[0])
        return query

    attend(jax.device_put(query, NamedSharding(mesh, PartitionSpec("data"))))
    for check_vma in (True, False):
        specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
        jax.shard_map(attend, mesh=mesh, check_vma=check_vma, **specs)(query)
    automatic, varying, manual = choices
    assert "AxisType.Explicit" in automatic.rows[0].change
    assert "check_vma=False" in varying.rows[0].change
    assert manual.implementation == "splash"


def test_other_devices_refuse_it():
    with pytest.raises(AttentionError, match=r"compiled for cpu\. Compile the program for a TPU"):
        jaxmp.explain(jaxmp.dot_product_attention)(
            LONG, LONG, LONG, implementation="splash"
        ).attention[0]


def test_a_recipe_uses_it_and_the_audit_sees_a_fused_kernel(tpu):
    layer = nn.MultiHeadDotProductAttention(2, attention_fn=jaxmp.attention_fn(is_causal=True))
    model = jaxmp.load_recipe("bf16").wrap(layer)
    x = jnp.ones((1, 128, 16))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = lambda params: model.apply(params, x).sum()
    report = jaxmp.audit(jax.grad(loss), params, recipe="bf16")
    assert not [f for f in report.findings if f.check == "unfused_attention"], str(report)
    assert "splash_mha_fwd" in str(jax.make_jaxpr(jax.grad(loss))(params))


# ---------------------------------------------------------------------------
# Programs for TPUs
# ---------------------------------------------------------------------------

COMPILE = """
    import os
    import sys

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from jaxmp import dot_product_attention
    from jaxmp._core._compat import context

    def loss(query, key, value):
        attend = jax.checkpoint(lambda *x: dot_product_attention(*x, is_causal=True))
        return attend(query, key, value).astype(jnp.float32).sum()

    devices = np.array(topologies.get_topology_desc(f"{sys.argv[1]}:2x2", platform="tpu").devices)
    for count in (1, 4):
        mesh = Mesh(devices[:count], ("data",), axis_types=(AxisType.Explicit,))
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        shape = lambda heads: jax.ShapeDtypeStruct((4, 1000, heads, 64), jnp.bfloat16)
        of = lambda heads: shape(heads).update(sharding=sharding)
        with context(target="tpu"), jax.set_mesh(mesh):
            traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(of(8), of(2), of(2))
            text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
        calls = [line for line in text.splitlines() if '"tpu_custom_call"' in line]
        kernels = [name for line in calls for name in ("_fwd", "_dkv", "_dq") if name in line]
        communicates = any(name in text for name in ("all-gather", "all-reduce", "all-to-all"))
        print("kernels", count, len(calls), sorted(set(kernels)), communicates)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install libtpu"
)
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_programs_for_tpus_contain_the_kernels(chip):
    # In a process of its own, because libtpu allows one process, and prints.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE), chip],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
        cwd=Path(jaxmp.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("kernels")]
    # Only the recomputed forward kernel is left, because nothing reads the result of the first.
    names = "['_dkv', '_dq', '_fwd'] False"
    assert lines == [f"kernels {count} 3 {names}" for count in (1, 4)], done.stderr[-2000:]
