"""cuDNN attention of odd lengths: values against FP64 by a stand-in, and programs for an H200."""

import dataclasses
import functools
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import attention_grid
import jaxmp
from attention_grid import (
    GRID,
    LAYERS,
    PROGRAMS,
    Case,
    cases,
    h200,
    kernels,
    lower,
    lower_layer,
)
from grids import EXPENSIVE, pairwise
from jaxmp._attention._arguments import arguments
from jaxmp._attention._cudnn import cudnn_attention
from jaxmp._attention._plain import xla_attention
from sources import results_of
from test_attention import (
    EXTRAS,
    IMPLEMENTATIONS,
    STATED,
    check_errors,
    drawn,
    inputs,
    oracle,
    results,
    standard,
)

PAIR = {"fmhaSoftmax": 1, "fmhaSoftmaxBackward": 1}


# ---------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch):
    """Replaces cuDNN's kernel by JAX's plain attention in FP32; returns the lengths of all calls.

    As in JAX, it has no gradient for odd lengths. Results of queries beyond their length are NaN,
    because cuDNN does not define them.
    """
    seen = []
    plain = jax.nn.dot_product_attention

    def attend(*, implementation, query, key, query_seq_lengths=None, **given):
        assert implementation == "cudnn"
        lengths = query.shape[1], key.shape[1]
        given |= {"query": query, "key": key, "query_seq_lengths": query_seq_lengths}
        arrays = {name: array for name, array in given.items() if isinstance(array, jax.Array)}
        static = {name: value for name, value in given.items() if name not in arrays}

        def compute(arrays):
            # XLA has no float16 matmuls on a CPU that accumulate in FP32.
            is_float = lambda array: jnp.issubdtype(array.dtype, jnp.floating)
            wide = lambda array: array.astype(jnp.float32) if is_float(array) else array
            out = plain(**jax.tree.map(wide, arrays), **static, implementation="xla")
            out = out.astype(query.dtype)
            if query_seq_lengths is None:
                return out
            rows = jnp.arange(lengths[0])[None, :, None, None]
            beyond = rows >= arrays["query_seq_lengths"][:, None, None, None]
            return jnp.where(beyond, jnp.nan, out)

        def forward(arrays):
            if lengths[0] % 2 or lengths[1] % 2:
                raise NotImplementedError(f"Unsupported sequence length {lengths}")
            seen.append(("training", *lengths))
            return jax.vjp(compute, arrays)

        @jax.custom_vjp
        def differentiable(arrays):
            seen.append(("inference", *lengths))
            return compute(arrays)

        differentiable.defvjp(forward, lambda pull, d_out: pull(d_out))
        return differentiable(arrays)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return seen


LENGTHS = [(17, 15), (15, 40), (40, 17), (1, 7)]
# The kernel has no windows to the right.
CASES = pairwise(
    [s for s in STATED if s.get("local_window_size", (0, 0))[1] == 0],
    LENGTHS,
    EXTRAS,
    ["bfloat16", "float16"],
    [1, 2],
)
# Without arrays: lengths hide the added key, also under a causal mask of more queries than keys.
FAST = {0, 5, 16}


@pytest.mark.parametrize(
    ("stated", "lengths", "extras", "dtype", "groups"),
    [
        pytest.param(*case, marks=() if number in FAST else EXPENSIVE)
        for number, case in enumerate(CASES)
    ],
)
def test_padded_lengths_against_fp64(stand_in, stated, lengths, extras, dtype, groups):
    bias, mask, uneven = extras
    options = dict(bias=bias, mask=mask, stated=stated, uneven=uneven)
    with standard():
        call = drawn(lengths, 2 * groups, groups, dtype, (8, 4), seed=0, **options)
        if call.bias is not None:
            call = dataclasses.replace(call, bias=call.bias.astype(dtype))
        check_errors(call, {"cudnn": cudnn_attention})
    queries, keys = lengths
    assert ("training", queries + queries % 2, keys + keys % 2) in stand_in


def test_a_forward_pass_is_not_padded(stand_in):
    call = drawn((17, 15), 2, 1, "bfloat16", (8, 8), 0, None, None, {}, 0)
    with standard():
        want = np.asarray(xla_attention(call), "float32")
        np.testing.assert_allclose(np.asarray(cudnn_attention(call), "float32"), want, atol=0.02)
    assert stand_in == [("inference", 17, 15)]


ALL = {**IMPLEMENTATIONS, "cudnn": cudnn_attention}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("how", ["causal", "mask"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_left_padding_by_a_bias_of_minus_infinity(stand_in, name, how, dtype):
    """The mask hides the keys that have a finite bias, and the bias those that the mask shows."""
    hidden = (jnp.arange(9) < 4)[None, None, None, :] & (jnp.arange(2) == 1)[:, None, None, None]
    options: Any = {"is_causal": True} if how == "causal" else {"mask": jnp.tri(9, dtype=bool)}
    call = arguments(
        *inputs(9, 9, dtype=dtype), jnp.where(hidden, -jnp.inf, 0).astype(dtype), **options
    )
    with standard():
        found = results(ALL[name], call, jnp.ones_like(call.query))
    for result, want in zip(found, oracle(call, np.ones(call.query.shape)), strict=True):
        # The terms of sums over nine positions, and results, are rounded to bfloat16.
        eps = float(jnp.finfo(jnp.bfloat16).eps)
        np.testing.assert_allclose(result, want, rtol=2 * eps, atol=9 * eps)
    out, d_query, *_ = found
    assert not out[1, :4].any() and not d_query[1, :4].any() and out[1, 4].any()


# ---------------------------------------------------------------------------
# Programs for an H200
# ---------------------------------------------------------------------------


@functools.cache
def subset():
    """Returns cases of the grid in which every pair of values occurs."""
    return [Case(*values) for values in pairwise(*GRID)]


def test_a_subset_of_the_grid_lowers_forwards_and_backwards():
    with h200():
        rows = {case: lower(case) for case in subset()[::3]}
    assert not [f"{case}: {row}" for case, row in rows.items() if row.startswith("FAILED")]
    assert {row.split(":")[0] for row in rows.values()} >= {"cudnn", "xla"}


@EXPENSIVE
def test_the_rest_of_the_subset_and_the_programs_lower():
    rest = [case for number, case in enumerate(subset()) if number % 3]
    with h200():
        rows = {case: lower(case) for case in [*rest, *PROGRAMS.values()]}
    assert not [f"{case}: {row}" for case, row in rows.items() if row.startswith("FAILED")]
    assert all(rows[case].startswith("cudnn") for case in PROGRAMS.values())


@EXPENSIVE
@pytest.mark.parametrize("layer", pairwise(*LAYERS), ids=str)
@pytest.mark.filterwarnings("ignore:The policies of:jaxmp.errors.RecipeWarning")
def test_layers_of_odd_lengths_train_with_the_kernel(layer):
    with h200(), standard():
        assert lower_layer(*layer).startswith("cudnn")


def test_a_case_that_lowers_to_another_kernel_fails(monkeypatch):
    monkeypatch.setattr(attention_grid, "kernels", lambda *_: Counter(fmhaSoftmax=1))
    with h200():
        assert lower(Case((128, 128))).startswith("FAILED")


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0.1"])
def test_the_committed_grid_has_no_failure(version):
    report = results_of(f"attention_grid_jax_{version}_h200")
    assert report["failures"] == [] and list(report["cases"]) == list(map(str, cases()))
    assert not [row for row in report["cases"].values() if row.startswith("FAILED")]
    assert list(report["programs"]) == list(PROGRAMS) and len(report["layers"]) == len(
        list(itertools.product(*LAYERS))
    )


def test_reasons_and_notes_of_odd_lengths():
    shapes = lambda length: jax.ShapeDtypeStruct((2, length, 8, 64), jnp.bfloat16)
    with h200():
        notes = (
            jaxmp.explain(jaxmp.dot_product_attention)(shapes(64), shapes(77), shapes(77))
            .attention[0]
            .notes
        )
        single = jaxmp.explain(jaxmp.dot_product_attention)(
            shapes(1), shapes(77), shapes(77), mask=jax.ShapeDtypeStruct((2, 1, 1, 77), bool)
        ).attention[0]
    assert len(notes) == 1 and "77 positions are padded to 78 in training" in notes[0]
    (blocker,) = single.rows
    assert single.implementation == "xla" and blocker.argument == "mask"
    assert "padding a single query would double its work" in blocker.reason


def gradients(query, key, value):
    # JAX 0.10.2 cannot map the kernel over a gradient of its result that is a constant.
    loss = lambda *args: (jaxmp.dot_product_attention(*args).astype(jnp.float32) ** 2).sum()
    return jax.grad(loss, (0, 1, 2))(query, key, value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_odd_lengths_on_several_devices(kind):
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    place = lambda length, *spec: jax.ShapeDtypeStruct(
        (4, length, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    key = place(77, None, None, "model")
    with h200():
        shapes = jax.eval_shape(gradients, place(64, "data", None, "model"), key, key)
        assert [leaf.shape[1] for leaf in shapes] == [64, 77, 77]


def test_odd_lengths_under_vmap_scan_and_remat():
    array = jax.ShapeDtypeStruct((3, 2, 197, 4, 64), jnp.bfloat16)

    def mapped(query, key):
        return jax.vmap(gradients, (0, None, None))(query, key[0], key[0])

    def scanned(queries):
        body = jax.checkpoint(lambda q, k: (q + jaxmp.dot_product_attention(q, k, k), None))
        return jax.lax.scan(body, queries[0], queries)[0].astype(jnp.float32).sum()

    with h200():
        assert kernels(mapped, array, array) == PAIR
        found = kernels(jax.grad(scanned), array)
    assert found["fmhaSoftmaxBackward"] == 1 and found["fmhaSoftmax"] >= 1
