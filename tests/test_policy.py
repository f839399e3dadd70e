"""Policies: all notations, and compatibility with `jmp.Policy`."""

import copy
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmp
from jaxmp._core._dtypes import DTYPE_NAMES, canonical_dtype, short_name
from jaxmp._policies._policy import MATMUL_PRECISIONS, Policy, get_policy
from jaxmp.errors import JaxmpError, PolicyError

F32, BF16, F16 = (np.dtype(name) for name in ("float32", ml_dtypes.bfloat16, "float16"))

dtypes = st.sampled_from(sorted(set(DTYPE_NAMES.values()), key=str))
policies = st.builds(
    Policy,
    dtypes,
    dtypes,
    dtypes,
    matmul=st.sampled_from(MATMUL_PRECISIONS),
    fp32_outputs_below=st.integers(0, 64),
)


def fields(policy):
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


# ---------------------------------------------------------------------------
# Spelling
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("p=f32,c=bf16,o=f32", (F32, BF16, F32)),
        ("params=float32,compute=bfloat16,output=float32", (F32, BF16, F32)),
        ("param_dtype=f32,compute_dtype=bf16,output_dtype=f32", (F32, BF16, F32)),
        (" p = f32 , c = fp16 ", (F32, F16, F16)),
        ("P=F32,C=BF16", (F32, BF16, BF16)),
    ],
)
def test_spellings(text, expected):
    assert fields(get_policy(text)) == expected


@pytest.mark.parametrize("text", ["p=f32,c=f16,o=f32", "c=bf16", "o=f16", "p=bf16", "p=bf16,o=f32"])
def test_a_missing_key_follows_jmp(text):
    theirs = jmp.get_policy(text)
    assert fields(get_policy(text)) == tuple(np.dtype(dtype) for dtype in fields(theirs))


@pytest.mark.parametrize("name, dtype", sorted(DTYPE_NAMES.items()))
def test_every_dtype_name_is_a_policy_of_three(name, dtype):
    if name in jaxmp.list_recipes():
        with pytest.raises(PolicyError, match=f"load_recipe.'{name}'.*{dtype.name!r} for all"):
            get_policy(name)
    else:
        assert fields(get_policy(name)) == (dtype, dtype, dtype)
    assert fields(get_policy(f"p=f32,c={name}")) == (F32, dtype, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16])
def test_a_dtype_is_a_policy(dtype):
    assert fields(get_policy(dtype)) == (BF16, BF16, BF16)


@given(policies)
def test_copies_and_texts_are_equal_and_hash_alike(policy):
    texts = get_policy(str(policy)), eval(repr(policy), {"Policy": get_policy})
    copies = pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)
    for other in (*texts, *copies, get_policy(dataclasses.asdict(policy))):
        assert other == policy and hash(other) == hash(policy)


@given(dtypes)
def test_short_names_read_back(dtype):
    assert canonical_dtype(short_name(dtype)) == dtype


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad, words",
    [
        ("p=f32,c=bf61", ["'bf61'", "'p=f32,c=bf61'", "Did you mean 'bf16'?"]),
        ("p=f32,q=bf16", ["Unknown key 'q'", "'p=f32,q=bf16'"]),
        ("p=f32,compue=bf16", ["Did you mean 'compute'?"]),
        ("p=f32,param_dtype=bf16", ["sets param_dtype twice"]),
        ("p=f32,,c=bf16", ["'' at column 7 of 'p=f32,,c=bf16'"]),
        ("p=f32;c=bf16", ["column 1"]),
        ("p=f32,c=", ["'c=' at column 7"]),
        ("=f32", ["column 1"]),
        ("bflaot16", ["Unknown policy 'bflaot16'", "Did you mean 'bfloat16'?"]),
        ("", ["Unknown policy ''"]),
        ("p=f32,matmul=tf23", ["'tf23'", "Did you mean 'tf32'?"]),
        ("p=f32,matmul=f8", ["'f8'", "Did you mean 'fp8'?"]),
        ("p=f32,fp32_outputs_below=-1", ["fp32_outputs_below='-1'", "nonnegative integer"]),
        ("p=f32,fp32_outputs_below=few", ["nonnegative integer", "fp32_outputs_below=16"]),
        ("int8", ["Integer format 'int8'"]),
        ("p=f32,c=uint4", ["Integer format 'uint4'", "'p=f32,c=uint4'"]),
        (np.complex64, ["'complex64'"]),
        (np.bool_, ["'bool'"]),
        (None, ["None is not a dtype"]),
        (1.5, ["1.5 is not a dtype"]),
        ({"p": {}}, ["{'p': {}}"]),
        ({"p": "f32", "policy": "bf16"}, ["Unknown key 'policy'"]),
        ({"p": "f32", "matmul": 3}, ["matmul precision 3"]),
    ],
)
def test_errors_quote_their_input_and_suggest_what_is_taken(bad, words):
    with pytest.raises(PolicyError) as error:
        get_policy(bad)
    message = str(error.value)
    for word in words:
        assert word in message
    examples = [text for text in re.findall(r"'(p=[^']*)'", message) if text != bad]
    assert all(map(get_policy, examples))
    if wrong := re.search(r"Unknown [a-z ]+ '([^']*)'", message):
        assert examples
    if suggestion := re.search(r"Did you mean '([^']*)'", message):
        assert get_policy(bad.replace(wrong[1], suggestion[1]))


def test_errors_are_value_errors():
    with pytest.raises(ValueError):
        get_policy("p=f99")
    assert issubclass(PolicyError, JaxmpError)


# ---------------------------------------------------------------------------
# Casting
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "longdouble", ">f8"])
def test_casts_convert_arrays_and_numbers_of_numpy(dtype):
    for value in (np.ones(2, dtype), np.ones((), dtype)[()]):
        assert get_policy("p=f32,c=bf16,o=f32").cast_to_compute(value).dtype == BF16
    with jax.enable_x64(True):
        wide = np.ones(2, np.float64)
        assert get_policy("p=f32,c=bf16,o=f32").cast_to_compute(wide) is wide


def test_casts_touch_floating_arrays_only(getkey):
    tree = {
        "f32": jnp.ones(2),
        "bf16": jnp.ones(2, jnp.bfloat16),
        "numpy": np.ones(2, np.float32),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
        "int": jnp.arange(2),
        "bool": jnp.array([True]),
        "complex": jnp.ones(1, jnp.complex64),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": getkey(),
        "number": 1.5,
        "text": "text",
        "none": None,
    }
    cast = get_policy("p=f32,c=f16,o=f32").cast_to_compute(tree)
    moved = {"f32", "bf16", "numpy", "shape"}
    assert {name for name in moved if cast[name].dtype == F16} == moved
    for name in tree.keys() - moved:
        assert cast[name] is tree[name], name


def test_each_cast_uses_its_own_dtype():
    policy = Policy("f32", "bf16", "f16")
    array = jnp.ones(2)
    assert policy.cast_to_param(array) is array
    assert policy.cast_to_compute(array).dtype == BF16
    assert policy.cast_to_output(array).dtype == F16
    assert policy.with_output_dtype("f32") == Policy("f32", "bf16", "f32")


# ---------------------------------------------------------------------------
# Compatibility with jmp
# ---------------------------------------------------------------------------


def test_it_has_all_that_a_jmp_policy_has():
    ours, theirs = Policy("f32", "bf16", "f32"), jmp.get_policy("p=f32,c=bf16,o=f32")
    public = [name for name in dir(theirs) if not name.startswith("_")]
    assert public and all(hasattr(ours, name) for name in public)
    assert jmp.get_policy(str(ours)) == theirs
    assert get_policy(str(theirs)) == ours


@given(st.sampled_from(["f32", "bf16", "f16"]), st.sampled_from(["f32", "bf16", "f16"]))
def test_it_casts_as_a_jmp_policy_does(param, compute):
    text = f"p={param},c={compute},o={param}"
    tree = {"w": jnp.ones(2), "n": jnp.arange(2)}
    for name in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        ours = getattr(get_policy(text), name)(tree)
        theirs = getattr(jmp.get_policy(text), name)(tree)
        assert jax.tree.map(lambda x: x.dtype, ours) == jax.tree.map(lambda x: x.dtype, theirs)


# ---------------------------------------------------------------------------
# Under jit
# ---------------------------------------------------------------------------


def test_equal_policies_do_not_trace_again():
    compute, x = jax.jit(lambda policy, x: policy.cast_to_compute(x)), jnp.ones(2)
    as_dict = {"p": jnp.float32, "c": "bfloat16"}
    for same in ("p=f32,c=bf16", as_dict, Policy("f32", "bf16", "bf16")):
        assert compute(get_policy(same), x).dtype == BF16
    assert compute._cache_size() <= 1
    assert compute(get_policy("p=f32,c=f16"), x).dtype == F16


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_policy("bfloat16").param_dtype = F32
