"""Recipes: shipped recipes, user files, all errors, and the class Recipe."""

import copy
import dataclasses
import os
import pickle
import re
import tomllib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

from jaxmp import DynamicLossScale, NoLossScale, Policy, PolicyMap, Recipe, Rule, StaticLossScale
from jaxmp._policies._load import as_policy_map
from jaxmp._policies._op_table import CATEGORIES
from jaxmp._policies._policy import get_policy, summarized
from jaxmp._policies._recipe import list_recipes, load_recipe
from jaxmp._policies._replace import RecipeChanges
from jaxmp._policies._resolve import resolve_policy
from jaxmp._policies._schema import RULE, TABLES, TOP
from jaxmp._programs._jaxprs import equations
from jaxmp.errors import JaxmpError, PolicyError, RecipeError
from jaxmp.fp8._scaling import KINDS
from processes import run_python
from sources import ROOT, code_of, text_of

ALL = list_recipes()
# Policies that the documentation promises. A new recipe does not need a row: its file is the only
# place that specifies it.
POLICIES = {
    "bf16": "p=f32,c=bf16,o=f32",
    "bf16_params": "p=bf16,c=bf16,o=f32",
    "fp16": "p=f32,c=f16,o=f32",
    "fp16_params": "p=f16,c=f16,o=f32",
    "fp32": "p=f32,c=f32,o=f32,matmul=highest",
    "tf32": "p=f32,c=f32,o=f32,matmul=tf32",
    "fp8": "p=f32,c=bf16,o=f32,matmul=fp8",
    "fp8_delayed": "p=f32,c=bf16,o=f32,matmul=fp8",
    "fp8_rowwise": "p=f32,c=bf16,o=f32,matmul=fp8",
}


def fixed_file(text, message):
    """Returns a file in which the fix of a message replaces the faulty line, or a faulty table."""
    fix, line = code_of(message), re.search(r"line (\d+)", message)
    if fix.startswith("["):
        return f'extends = "bf16"\n{fix}'
    lines = text.split("\n")
    index = int(line[1]) - 1 if line else 0
    return "\n".join([*lines[:index], fix, *lines[index + (line is not None) :]])


# ---------------------------------------------------------------------------
# Shipped
# ---------------------------------------------------------------------------


def test_the_list_is_what_is_shipped():
    assert list_recipes() == sorted(path.stem for path in (ROOT / "policies").glob("*.toml"))
    assert set(POLICIES) <= set(list_recipes())


@pytest.mark.parametrize("name", POLICIES)
def test_shipped_policies(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert str(summarized(recipe.policies.default)) == POLICIES[name]
    half = recipe.policies.default.compute_dtype.itemsize == 2
    assert recipe.policies.default.fp32_outputs_below == (16 if half else 0)
    assert ("t" in recipe.policies.default.keep_inputs) == half
    assert recipe.master == recipe.skip == "auto"
    assert recipe.accumulate_dtype == recipe.reduce_dtype == "float32"
    scale = DynamicLossScale() if name.startswith("fp16") else NoLossScale()
    assert recipe.loss_scale == scale


@pytest.mark.parametrize("name", ALL)
def test_shipped_rules_may_match_nothing_and_say_why(name):
    recipe = load_recipe(name)
    assert all(rule.why and not rule.required for rule in recipe.policies.rules)
    assert "\n" not in recipe.summary and recipe.summary


@pytest.mark.parametrize("name", ["bf16", "bf16_params", "fp16", "fp16_params"])
def test_half_recipes_keep_heads_and_routers(name):
    policies = load_recipe(name).policies
    half = policies.default.compute_dtype
    for head in ("lm_head", "decoder/lm_head", "logits"):
        assert resolve_policy(policies, head).rule.output_dtype == np.float32
        assert policies.resolve(head).compute_dtype == half
    for router in ("router", "block_3/moe/router", "moe/router/dense"):
        assert policies.resolve(router).compute_dtype == np.float32
    for other in ("gate", "mlp/gate", "mlp/gate_proj", "head", "router_mlp", ""):
        assert resolve_policy(policies, other).rule is None


def test_scaling_without_products_in_fp8_is_a_contradiction(write):
    with pytest.raises(RecipeError, match=r'(?s)line 3.*neither.*nor a rule.*matmul = "fp8"'):
        load_recipe(write('extends = "bf16"\n[fp8]\nscaling = "rowwise"\n'))
    text = 'extends = "bf16"\n[policy]\nmatmul = "fp8"\n[fp8]\nscaling = "rowwise"\n'
    assert load_recipe(write(text)).fp8.kind == "rowwise"
    # The scaling of the base recipe does not prevent leaving FP8.
    recipe = load_recipe(write('extends = "fp8_rowwise"\n[policy]\nmatmul = "default"\n'))
    assert recipe.fp8 is None
    assert load_recipe(write(recipe.to_toml())).policies == recipe.policies
    with pytest.raises(RecipeError, match=r"fp8='rowwise'.*no policy or rule of 'bf16' sets"):
        load_recipe("bf16").replace(fp8="rowwise")


OUTSIDE = ["lm_head", "decoder/logits", "head", "mlp_head", "to_logits", "lm_head_proj", "readout"]
OUTSIDE += ["vit/classifier", "token_embedding", "patch_embed/proj", "stem/conv"]
OUTSIDE += ["input_projection"]


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "fp8_rowwise"])
def test_fp8_recipes_keep_heads_embeddings_and_routers_out(name):
    policies = load_recipe(name).policies
    for outside in OUTSIDE:
        assert policies.resolve(outside).matmul == "default", outside
        assert policies.resolve(outside).compute_dtype.name == "bfloat16"
    for router in ("router", "block_3/moe/router", "moe/router/dense", "moe_router"):
        assert policies.resolve(router).matmul == "default"
        assert policies.resolve(router).compute_dtype == np.float32
    for inside in ("block_0/mlp_up", "attention/query", "headroom", "router_mlp", "stemmed"):
        assert policies.resolve(inside).matmul == "fp8", inside


def test_each_shipped_file_is_commented():
    for name in ALL:
        lines = text_of(f"policies/{name}.toml").splitlines()
        assert lines[0].startswith("# ")
        assert sum(line.startswith("#") for line in lines) * 2 >= sum("=" in line for line in lines)


@pytest.mark.parametrize("page", ["policies/README.md", "docs/recipes.md"])
def test_the_tables_of_recipes_are_complete(page):
    """A new recipe needs a row in the first table of both pages."""
    table = re.search(r"^\| recipe \|.*?(?=\n\n)", text_of(page), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \|", table[0], re.MULTILINE)
    assert sorted(rows) == ALL, f"add a row for the recipe to {page}"


def test_examples_of_the_readme_load(write):
    blocks = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert blocks and all(load_recipe(write(block)) for block in blocks)


# ---------------------------------------------------------------------------
# Names, paths and strings
# ---------------------------------------------------------------------------


def test_a_name_never_reads_the_file_system(write):
    write("not toml", "bf16")
    write("not toml", "mine")
    assert load_recipe("bf16").policies.rules
    with pytest.raises(RecipeError, match="'mine' is not a recipe"):
        load_recipe("mine")


@pytest.mark.parametrize(
    "policies",
    [
        PolicyMap(POLICIES["bf16"]),
        Policy("f32", "bf16", "f32"),
        jmp.get_policy("p=f32,c=bf16,o=f32"),
        {"p": "f32", "compute_dtype": jnp.bfloat16, "output": np.float32},
        "p=f32,c=bf16,o=f32",
        load_recipe("p=f32,c=bf16,o=f32"),
    ],
)
def test_everything_that_names_policies_is_a_recipe(policies):
    assert as_policy_map(policies) == PolicyMap(POLICIES["bf16"])
    recipe = load_recipe(policies)
    assert recipe.policies == PolicyMap(POLICIES["bf16"])
    assert recipe == load_recipe("p=f32,c=bf16,o=f32")
    assert recipe.loss_scale == NoLossScale() and recipe.master == "auto"


# String -> default policy of `policies=`, `load_recipe` and `PolicyMap`, and result of `get_policy`
# (None for an error), as in the table of docs/recipes.md.
STRINGS = [
    ("bf16", "p=f32,c=bf16,o=f32", None),
    ("BF16 ", "p=f32,c=bf16,o=f32", None),
    ("fp16", "p=f32,c=f16,o=f32", None),
    ("bf16_params", "p=bf16,c=bf16,o=f32", None),
    ("fp8", "p=f32,c=bf16,o=f32,matmul=fp8", None),
    *((name, *["p=bf16,c=bf16,o=bf16"] * 2) for name in ("bfloat16",)),
    *((name, *["p=f16,c=f16,o=f16"] * 2) for name in ("float16", "f16", "half")),
    *((name, *["p=f32,c=f32,o=f32"] * 2) for name in ("float32", "f32", "full")),
    ("p=f32,c=bf16,o=f32", *["p=f32,c=bf16,o=f32"] * 2),
    *((name, *["p=f32,c=bf16,o=bf16"] * 2) for name in ("compute=bf16", "p=f32,c=bf16")),
]


@pytest.mark.parametrize(("text", "as_recipe", "as_policy"), STRINGS)
def test_a_string_has_one_meaning(text, as_recipe, as_policy):
    rule, name = Rule("a", "o=bf16"), text.strip().lower()
    recipe = load_recipe(text)
    policies = PolicyMap(text, [rule])
    for policy_map in (recipe.policies, as_policy_map(text), policies, PolicyMap(recipe)):
        # A module without such arguments does not list the `keep_inputs` of the recipe.
        policy = policy_map.resolve("dense")
        assert policy.keep_inputs == () and str(summarized(policy)) == as_recipe
    assert policies.rules == (rule, *recipe.policies.rules)
    assert PolicyMap(text) == recipe.policies == PolicyMap(recipe.policies)
    assert as_policy_map(text) == load_recipe(name).policies
    assert PolicyMap(recipe, [rule]) == policies == pickle.loads(pickle.dumps(policies))
    assert dataclasses.replace(policies, rules=(rule,)).rules == (rule,)
    if as_policy is None:
        with pytest.raises(PolicyError, match=f"load_recipe.'{name}'.*policies.default"):
            get_policy(text)
    else:
        assert str(get_policy(text)) == as_policy


def test_a_map_reads_a_recipe_file(write):
    policies = PolicyMap(write('extends = "fp8"\n[fp8]\nscaling = "rowwise"'), [Rule("a", "c=f32")])
    assert policies.fp8.kind == "rowwise" and policies.default.matmul == "fp8"
    assert PolicyMap(policies, fp8=load_recipe("fp8_delayed").fp8).fp8.is_stateful


def test_maps_and_recipes_pass_through():
    policies, recipe = PolicyMap("bf16", [Rule("a", "c=f32")]), load_recipe("bf16")
    assert as_policy_map(policies) is policies
    assert as_policy_map(recipe) is recipe.policies and load_recipe(recipe) is recipe


@pytest.mark.parametrize(
    "policies, scaled",
    [
        ("p=f32,c=f16,o=f32", True),
        ("p=f32,c=f32,o=f16", True),
        (jnp.float16, True),
        (PolicyMap("p=f32,c=bf16", [Rule("a", "c=f16")]), True),
        ("p=f32,c=bf16,o=f32", False),
        (jnp.float32, False),
    ],
)
def test_float16_anywhere_asks_for_a_dynamic_loss_scale(policies, scaled):
    assert load_recipe(policies).loss_scale == (DynamicLossScale() if scaled else NoLossScale())


def test_a_path_object_is_a_file(write):
    assert load_recipe(Path(write('extends = "bf16"'))).policies == load_recipe("bf16").policies
    with pytest.raises(RecipeError, match=r"does not end in \.toml") as error:
        load_recipe(Path("my.yaml"))
    assert "load_recipe('my.toml')" in str(error.value)


@pytest.mark.parametrize(
    "name, words",
    [
        ("  ", "'  ' is an empty name"),
        ("bf61", "Did you mean 'bf16'?"),
        ("fp16-params", "Did you mean 'fp16_params'?"),
        ("../policies/bf16", "'../policies/bf16' is not a recipe"),
        ("my.yaml", "a path that ends in .toml"),
        ("\0", r"'\x00' is not a recipe"),
        ("missing.toml", "There is no file 'missing.toml'"),
        ("\0.toml", r"'\x00.toml'"),
        ("\ud800.toml", r"'\ud800.toml'"),
        ("x" * 300 + ".toml", "cannot be read"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_quoted_with_one_that_can(name, words):
    with pytest.raises(RecipeError) as error:
        load_recipe(name)
    message = str(error.value)
    assert words in message and repr(name) in message
    assert load_recipe(
        *re.findall(r"^    load_recipe\('(.*)'\)$", message, re.MULTILINE)
    ) == load_recipe("bf16")


@pytest.mark.parametrize("bad", ["p=f32,c=bf61", "int8", "c=int8", None, 3.5])
def test_a_bad_policy_is_a_policy_error(bad):
    with pytest.raises(PolicyError, match=re.escape(repr(bad))):
        load_recipe(bad)


@pytest.mark.parametrize("policies", ["f8_e4m3fn", "p=f32,c=f8_e5m2,o=f32", "o=f4_e2m1fn"])
def test_formats_below_16_bits_are_refused(policies):
    with pytest.raises(PolicyError, match="16 bits"):
        load_recipe(policies)
    with pytest.raises(PolicyError, match="16 bits"):
        load_recipe(PolicyMap("bf16", [Rule("a", get_policy(policies))]))


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def test_former_keys_of_old_checkpoints(write):
    former = "[policy]\nc = 'bf16'\nrespect_explicit = false\ncast_float64 = false"
    assert load_recipe(write(former)).policies == load_recipe("c=bf16").policies
    with pytest.raises(RecipeError, match="unknown key 'cast_float64'"):
        load_recipe(write("[policy]\ncast_float64 = true"))


def test_a_file_says_everything(write):
    recipe = load_recipe(
        write("""
name = "mine"
summary = "all of it"
[policy]
p = "bf16"                   # short forms are read too
compute_dtype = "float16"
output_dtype = "f32"
matmul = "tf32"
keep_inputs = ["t", "x"]
fp32_outputs_below = 4
[loss_scale]
kind = "dynamic"
preset = "megatron"
init_scale = 1024
min_scale = "none"
hysteresis_refill = "clean"
[optimizer]
master = "packed"
skip = "cond"
[gradients]
accumulate_dtype = "bf16"
reduce_dtype = "float64"
[[rules]]
path = "a/**"
c = "f32"
keep_inputs = []
why = "because"
[[rules]]
module_type = "Norm"
required = false
matmul = "highest"
""")
    )
    assert (recipe.name, recipe.summary) == ("mine", "all of it")
    assert str(recipe.policies.default) == (
        "p=bf16,c=f16,o=f32,matmul=tf32,keep_inputs=t+x,fp32_outputs_below=4"
    )
    assert recipe.policies.rules == (
        Rule("a/**", "c=f32", why="because", keep_inputs=()),
        Rule(module_type="Norm", required=False, matmul="highest"),
    )
    assert recipe.loss_scale == DynamicLossScale.preset(
        "megatron", init_scale=1024, min_scale=None, hysteresis_refill="clean"
    )
    assert (recipe.master, recipe.skip) == ("packed", "cond")
    assert (recipe.accumulate_dtype, recipe.reduce_dtype) == ("bfloat16", "float64")


def test_a_missing_dtype_follows_jmp(write):
    recipe = load_recipe(write('[policy]\ncompute_dtype = "bf16"'))
    assert recipe.policies.default == get_policy("c=bf16")
    assert recipe.name == "my"


def test_extends_puts_own_rules_first_and_replaces_scalars(write):
    rule = '[[rules]]\npath = "lm_head"\nc = "f32"'
    recipe = load_recipe(write(f'extends = "bf16"\n[policy]\noutput_dtype = "bf16"\n{rule}'))
    base = load_recipe("bf16")
    assert recipe.policies.default == base.policies.default.with_output_dtype("bf16")
    assert recipe.policies.rules == (Rule("lm_head", "c=f32"), *base.policies.rules)
    assert recipe.policies.resolve("lm_head").compute_dtype == np.float32
    assert (recipe.name, recipe.summary) == ("my", "extends bf16")


def test_extends_a_file_beside_it(write, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    write('extends = "../base.toml"\n[optimizer]\nskip = "cond"', "sub/top.toml")
    write('extends = "fp16"\n[optimizer]\nmaster = "none"\nskip = "select"', "base.toml")
    recipe = load_recipe("sub/top.toml")
    assert (recipe.name, recipe.skip, recipe.master) == ("top", "cond", "none")
    monkeypatch.chdir("/")
    assert load_recipe(tmp_path / "sub" / "top.toml") == recipe


@pytest.mark.parametrize(
    "table, expected",
    [
        ("init_scale = 8", DynamicLossScale(8)),
        ('kind = "none"', NoLossScale()),
        ('kind = "static"\nvalue = 8', StaticLossScale(8)),
        ('preset = "torch"', DynamicLossScale.preset("torch")),
        ('kind = "dynamic"', DynamicLossScale()),
        ('max_scale = "none"', DynamicLossScale(max_scale=None)),
    ],
)
def test_extends_a_loss_scale(write, table, expected):
    assert load_recipe(write(f'extends = "fp16"\n[loss_scale]\n{table}')).loss_scale == expected


def test_an_automatic_loss_scale_follows_the_dtypes_of_the_extending_file(write):
    text = 'extends = "bf16"\n[policy]\ncompute_dtype = "float16"'
    assert load_recipe(write(text)).loss_scale == DynamicLossScale()
    assert load_recipe(write(text + '\n[loss_scale]\nkind = "none"')).loss_scale == NoLossScale()


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_cycle_is_refused(write, names):
    for name, following in zip(names, names[1:] + names[:1], strict=True):
        write(f'extends = "{following}.toml"', f"{name}.toml")
    with pytest.raises(RecipeError, match=r"'a\.toml' extends itself: ") as error:
        load_recipe("a.toml")
    assert str(error.value).startswith("'a.toml', line 1, column 1, key 'extends': ")
    assert load_recipe(write(code_of(str(error.value))))


def test_a_cycle_through_a_link_is_refused(write):
    write('extends = "link.toml"', "a.toml")
    os.symlink("a.toml", "link.toml")
    with pytest.raises(RecipeError, match="extends itself"):
        load_recipe("a.toml")


def test_the_same_base_twice_is_no_cycle(write):
    write('extends = "bf16"', "base.toml")
    write('extends = "./base.toml"', "left.toml")
    assert load_recipe(write('extends = "left.toml"')) == load_recipe("my.toml")


def test_an_error_in_a_base_names_both_files(write):
    write('[policy]\nmatmul = "tf23"', "base.toml")
    with pytest.raises(
        RecipeError,
        match=r"^'my.toml', line 1, column 1, key 'extends': 'base.toml', line 2, column 1, key",
    ):
        load_recipe(write('extends = "base.toml"'))


def test_line_ends_and_byte_order_marks_are_read(write):
    Path("my.toml").write_bytes(b'\xef\xbb\xbfextends = "bf16"\r\n[optimizer]\r\nskip = "cond"\r\n')
    assert load_recipe("my.toml").skip == "cond"


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------

REFUSED = {
    # Keys.
    'extends = "bf16"\nsummery = 1': ["line 2, column 1, key 'summery'", "mean 'summary'?"],
    "[polcy]\n": ["line 1, column 2, key 'polcy'", "Did you mean 'policy'?"],
    'compute_dtype = "bf16"': ["line 1, column 1", "'compute_dtype' is a key of [policy]"],
    'compute = "bf16"': ["'compute' is a key of [policy]", 'compute_dtype = "bf16"'],
    'master = "packed"': ["line 1", "'master' is a key of [optimizer]"],
    '[policy]\n  compute = "bf16"\n  c = "f16"': ["line 3, column 3, key 'policy.c'", "twice"],
    '[policy]\ncomputedtype = "bf16"': ["line 2", "Did you mean 'compute_dtype'?"],
    '[policy]\n"a b" = 1': ["line 2, column 1, key 'policy.a b'", "unknown key 'a b'"],
    'extends = "bf16"\n[[rules]]\npath = "a"\nc = "f32"\n[[rules]]\npth = "b"\nc = "f32"': [
        "line 6, column 1, rule 2, key 'pth'", "Did you mean 'path'?",
    ],
    "[policy]\nmatmul.x = 1": ["line 2", "{'x': 1} is not allowed"],
    # Types.
    'policy = "bf16"': ["line 1, column 1, key 'policy'", '"bf16" is not a table'],
    "extends = 3": ["key 'extends': 3 is not allowed", "the name of a recipe"],
    "[policy]\nparam_dtype = 32": ["line 2, column 1, key 'policy.param_dtype': 32"],
    'extends = "bf16"\n[gradients]\nregather = "yes"': ['"yes" is not allowed', "true or false"],
    "[policy]\nfp32_outputs_below = -1": ["-1 is not allowed", "a nonnegative integer"],
    "[policy]\nmatmul = 2020-01-01": ["datetime.date(2020, 1, 1) is not allowed"],
    'extends = "bf16"\nrules = 3': ["line 2, column 1, key 'rules'", "[[rules]]"],
    'extends = "bf16"\n[rules]\npath = "a"': ["key 'rules'", "[[rules]]"],
    'extends = "bf16"\n[[rules]]\npath = "a"\nc = "f32"\nrequired = 1': ["key 'required': 1"],
    'extends = "bf16"\nname = ""': ['key \'name\': "" is not allowed'],
    'extends = "bf16"\nsummary = "two\\nlines"': ["key 'summary'", "one line"],
    # Values.
    '[policy]\nmatmul = "tf23"': ['"tf23" is not allowed', "Did you mean 'tf32'?"],
    '[policy]\n# c\ncompute_dtype = "bf61"': ["line 3", "'bf61'", "Did you mean 'bf16'?"],
    '[policy]\ncompute_dtype = "int8"': ["Integer format 'int8'"],
    '[policy]\ncompute_dtype = "fp8_e5m2"': ["key 'policy.compute_dtype'", "too narrow"],
    'extends = "bf16"\n[[rules]]\npath = "a"\nc = "e4m3fn"': ["rule 1, key 'c'", "too narrow"],
    'extends = "bf16"\n[gradients]\nreduce_dtype = "e5m2"': ["float8_e5m2 is too narrow"],
    'extends = "bf16"\n[optimizer]\nmaster = "fp23"': ['"fp23"', "Did you mean 'fp32'?"],
    'extends = "bf61"': ["'bf61' is not an installed recipe. Did you mean 'bf16'?"],
    'extends = "p=f32"': ["'p=f32' is not an installed recipe"],
    'extends = "none.toml"': ["line 1, column 1, key 'extends': There is no file 'none.toml'"],
    'extends = "\\u0000.toml"': ["key 'extends': ", r"'\x00.toml'"],
    "": ["'my.toml' specifies no precision"],
    "[policy]": ["specifies no precision"],
    'summary = "x"': ["specifies no precision"],
    # Rules.
    'extends = "bf16"\n[[rules]]\nc = "f32"': ["line 2, column 3, rule 1", "requires a path"],
    'extends = "bf16"\n[[rules]]\npath = "a"': ["rule 1: ", "sets no field"],
    'extends = "bf16"\n[[rules]]\nmodule_type = "A"\np = "bf16"': ["sets param_dtype by"],
    'extends = "bf16"\n[[rules]]\nc = "f32"\npath = "a//b"': ["line 4, column 1, rule 1, key"],
    'extends = "bf16"\n[[rules]]\nc = "f32"\npath = "re:("': ["not a valid regular expression"],
    # Loss scales.
    'extends = "bf16"\n[loss_scale]\nkind = "none"\ninit_scale = 8': [
        "line 4, column 1, key 'loss_scale.init_scale'", 'requires kind = "dynamic"',
    ],
    'extends = "bf16"\n[loss_scale]\nvalue = 8': ["line 3", 'value = 8.0 requires'],
    'extends = "fp16"\n[loss_scale]\nvalue = 8': ["line 3", 'requires kind = "static"'],
    'extends = "fp16"\n[loss_scale]\nkind = "static"': ["line 3", "requires a value"],
    'extends = "fp16"\n[loss_scale]\nkind = "static"\nvalue = 8\nmin_scale = "none"': [
        "line 5", 'min_scale = "none" requires kind = "dynamic"',
    ],
    'extends = "fp16"\n[loss_scale]\nkind = "static"\npreset = "torch"\nvalue = 8': ["line 4"],
    'extends = "fp16"\n[loss_scale]\ninit_scale = -1': ["line 3", "init_scale = -1.0 is not"],
    'extends = "fp16"\n[loss_scale]\ninit_scale = inf': ["inf is not allowed"],
    'extends = "fp16"\n[loss_scale]\ninit_scale = nan': ["nan is not allowed"],
    'extends = "fp16"\n[loss_scale]\ninit_scale = true': ["true is not allowed"],
    'extends = "fp16"\n[loss_scale]\nbackoff_factor = 2': ["key 'loss_scale.backoff_factor'"],
    'extends = "fp16"\n[loss_scale]\ngrowth_factor = 1': ["key 'loss_scale.growth_factor'"],
    'extends = "fp16"\n[loss_scale]\ngrowth_interval = 0': ["key 'loss_scale.growth_interval'"],
    'extends = "fp16"\n[loss_scale]\ngrowth_interval = 2.0': ["2.0 is not allowed", "an integer"],
    'extends = "fp16"\n[loss_scale]\nmin_scale = 1e9': ["min_scale <= init_scale <= max_scale"],
    'extends = "fp16"\n[loss_scale]\npreset = "pytorch"': ["Did you mean 'torch'?"],
    'value = 3\n[loss_scale]\nkind = "static"': ["'value' is a key of [loss_scale]"],
    # Contradictions.
    'extends = "fp16_params"\n[optimizer]\nmaster = "packed"': [
        "line 3, column 1, key 'optimizer.master'", "default policy stores parameters in float16",
    ],
    'extends = "bf16"\n[optimizer]\nmaster = "packed"\n[[rules]]\npath = "a"\np = "f16"': ["Rule("],
    'extends = "fp16"\n[optimizer]\nskip = "none"': ["line 3", "overflows regularly"],
    # Syntax.
    "[policy]\ncompute_dtype = bf16": ["line 2, column 17", "'compute_dtype = bf16'"],
    "[policy]\ncompute_dtype: bf16": ["line 2", "'compute_dtype: bf16'"],
    "[gradients]\nregather = True": ["line 2", "lower case for true"],
    "[policy": ["line 1", "'[policy'"],
    "[[rules]\npath = 3": ["line 1", "'[[rules]'"],
    'extends = "bf16': ["line 1", "Unterminated"],
    "what?": ["line 1", "'what?'"],
    '[policy]\nmatmul = "tf32"\nmatmul = "default"': [
        "line 3, column 19: Cannot overwrite a value", "appears twice; delete one of the two.",
    ],
    "[policy]\n[optimizer]\n[policy]": ["Cannot declare", "appears twice; delete one of the two."],
}  # fmt: skip


@pytest.mark.parametrize("text, words", REFUSED.items())
def test_a_refusal_names_the_location_and_shows_a_fix_that_loads(write, text, words):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(text))
    message = str(error.value)
    assert message.startswith("'my.toml'")
    for word in words:
        assert word in message
    if "Move it there" in message or "elete one of the two" in message:
        tomllib.loads(code_of(message))
    elif code_of(message) == "load_recipe('bf16')":
        assert load_recipe("bf16")
    else:
        assert load_recipe(write(fixed_file(text, message)))


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 10000, "a = " + "9" * 5000, "[policy]\nmatmul = 0x" + "f" * 5000]
)
def test_hostile_numbers_and_nesting_are_refused(write, text):
    with pytest.raises(RecipeError, match=r"^'my\.toml'"):
        load_recipe(write(text))


@pytest.mark.parametrize(
    ("encoding", "words"),
    [("latin-1", "line 2, column 15: byte 0xe9"), ("utf-16", "line 1, column 1: byte 0xff")],
)
def test_a_file_that_is_not_utf8_is_refused(write, encoding, words):
    Path("my.toml").write_bytes('extends = "bf16"\nsummary = "caf\u00e9"\n'.encode(encoding))
    with pytest.raises(RecipeError, match=f"{words} is not UTF-8.*Save the file as UTF-8"):
        load_recipe("my.toml")


def test_what_is_no_regular_file_is_refused(write):
    for make in (os.mkdir, os.mkfifo):
        make(f"{make.__name__}.toml")
        with pytest.raises(RecipeError, match=rf"There is no file '{make.__name__}\.toml'"):
            load_recipe(f"{make.__name__}.toml")


def test_a_file_names_no_python_object(write):
    text = 'extends = "bf16"\n[[rules]]\nmodule_type = "os.system"\nc = "f32"'
    assert load_recipe(write(text)).policies.rules[0].module_type == "os.system"


# ---------------------------------------------------------------------------
# The class Recipe
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALL, "p=f32,c=bf16,o=f32", "half"])
def test_copies_and_files_are_equal_and_hash_alike(write, name):
    recipe = load_recipe(name)
    copies = pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)
    for other in (load_recipe(name), *copies, load_recipe(write(recipe.to_toml(), "other.toml"))):
        assert other == recipe and hash(other) == hash(recipe)
    assert recipe != recipe.replace(name="other")


def test_a_recipe_is_static_and_holds_no_array():
    recipe = load_recipe("fp16")
    assert jax.tree.leaves(recipe) == []
    compute = jax.jit(lambda recipe, x: recipe.policies.default.cast_to_compute(x))
    for _ in range(2):
        assert compute(load_recipe("fp16"), jnp.ones(2)).dtype == jnp.float16
    assert compute._cache_size() <= 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = ""


def test_each_access_builds_a_fresh_loss_scale():
    recipe = load_recipe("fp16")
    first, second = jax.tree.leaves(recipe.loss_scale), jax.tree.leaves(recipe.loss_scale)
    assert first and all(a is not b for a, b in zip(first, second, strict=True))
    donated = jax.jit(lambda scale: scale.adjust(True), donate_argnums=0)
    for _ in range(2):
        donated(recipe.loss_scale)


def test_loading_touches_no_device(monkeypatch):
    code = (
        "import jax\n"
        "from jaxmp._policies._recipe import load_recipe\n"
        "recipe = load_recipe('fp16').replace(loss_scale={'init_scale': 8.0})\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # refused once a backend is set up
        "print(jax.device_count(), recipe.loss_scale.scale_value)"
    )
    monkeypatch.setenv("XLA_FLAGS", "")
    assert run_python(code).split() == ["3", "8.0"]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"policies": "p=f32,c=f16"}, {"loss_scale": DynamicLossScale()}),
        ({"policies": "p=f32,c=f16", "loss_scale": "none"}, {"loss_scale": NoLossScale()}),
        ({"loss_scale": 128.0}, {"loss_scale": StaticLossScale(128.0)}),
        ({"loss_scale": DynamicLossScale(8)}, {"loss_scale": DynamicLossScale(8)}),
        ({"loss_scale": {"preset": "torch"}}, {"loss_scale": DynamicLossScale.preset("torch")}),
        ({"master": "none", "skip": "cond"}, {"master": "none", "skip": "cond"}),
        ({"reduce_dtype": jnp.bfloat16}, {"reduce_dtype": "bfloat16"}),
        ({"name": "mine", "summary": "my own"}, {"name": "mine", "summary": "my own"}),
        ({}, {"name": "bf16", "loss_scale": NoLossScale()}),
    ],
)
def test_replace(changes, expected):
    recipe = load_recipe("bf16").replace(**changes)
    assert {key: getattr(recipe, key) for key in expected} == expected


def test_replace_keeps_a_loss_scale_that_was_chosen():
    recipe = load_recipe("fp16").replace(loss_scale=8.0).replace(policies="bf16")
    assert recipe.loss_scale == StaticLossScale(8.0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mastr": "fp32"}, "Did you mean 'master'?"),
        ({"extends": "bf16"}, "no argument 'extends'"),
        ({"master": "fp23"}, "replace(master='fp23')"),
        ({"skip": 3}, "replace(skip=3)"),
        ({"accumulate_dtype": "e5m2"}, "too narrow"),
        ({"name": "two\nlines"}, r"replace(name='two\nlines')"),
    ],
)
def test_a_refused_replacement_names_one_that_is_taken(changes, words):
    with pytest.raises(RecipeError) as error:
        load_recipe("bf16").replace(**changes)
    assert words in str(error.value)
    fix = re.search(r"example (recipe\.replace\(.*\))\.$", str(error.value))[1]
    assert eval(fix, {"recipe": load_recipe("bf16")})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"policies": "half", "master": "packed"}, "stores parameters in float16"),
        ({"loss_scale": {"kind": "static"}}, "requires a value"),
        ({"loss_scale": {"kind": "none", "init_scale": 8}}, 'requires kind = "dynamic"'),
        ({"loss_scale": {"init_scal": 8}}, "Did you mean 'init_scale'"),
        ({"loss_scale": {"init_scale": -8}}, "init_scale = -8.0 is not allowed"),
        ({"loss_scale": object()}, "is not a loss scale"),
        ({"policies": "p=f32,c=f16", "skip": "none"}, "overflows regularly"),
        ({"policies": "nothing"}, "'nothing' is not a recipe or a policy"),
    ],
)
def test_contradictions_in_python_are_refused(changes, words):
    with pytest.raises(JaxmpError, match=words):
        load_recipe("bf16").replace(**changes)


# ---------------------------------------------------------------------------
# Effects of a recipe
# ---------------------------------------------------------------------------


def test_cast_params_goes_by_path():
    params = {"dense": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}, "step": jnp.arange(2)}
    recipe = load_recipe("bf16").replace(
        policies=PolicyMap("p=bf16", [Rule("dense:bias", "p=f32")])
    )
    statistics = {"mean": jnp.ones(2)}
    both = recipe.cast_params({"params": params, "batch_stats": statistics})
    for cast in (recipe.cast_params(params), both["params"]):
        assert cast["dense"]["kernel"].dtype == jnp.bfloat16
        assert cast["dense"]["bias"] is params["dense"]["bias"]
        assert cast["step"] is params["step"]
    assert both["batch_stats"]["mean"] is statistics["mean"]


@pytest.mark.parametrize("name", ALL)
def test_wrap_applies_the_policies(getkey, name):
    recipe = load_recipe(name)
    model, x = nn.Dense(16), jnp.ones((2, 4))
    wrapped = recipe.wrap(model)
    variables = wrapped.init(getkey(), x)
    assert variables["params"]["kernel"].dtype == jnp.float32
    assert wrapped.apply(variables, x).dtype == recipe.policies.default.output_dtype
    program = equations(jax.make_jaxpr(wrapped.apply)(variables, x))
    dots = [e for e in program if e.primitive.name == "dot_general"]
    dtypes = {var.aval.dtype for eqn in dots for var in eqn.invars}
    assert dtypes == {recipe.policies.default.compute_dtype}
    assert model == nn.Dense(16)


@pytest.mark.parametrize(
    "model, words",
    [
        (nn.Dense, "Make an instance: Dense(...)"),
        (lambda x: x, "function is not a Flax module"),
        (None, "NoneType is not a Flax module"),
    ],
)
def test_wrap_refuses_what_is_no_model(model, words):
    with pytest.raises(JaxmpError) as error:
        load_recipe("bf16").wrap(model)
    assert words in str(error.value)
    fix = re.search(r"for example (recipe\.wrap\(.*\))\. For models", str(error.value))[1]
    assert isinstance(eval(fix, {"recipe": load_recipe("bf16"), "nn": nn}), nn.Module)


@pytest.mark.parametrize("name", ALL)
def test_optimizer_trains(name):
    recipe = load_recipe(name)
    tx = recipe.optimizer(optax.sgd(0.5))
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    stored = recipe.cast_params(params)
    updates, _ = tx.update({"w": jnp.ones(2)}, state, stored)
    with jax.numpy_dtype_promotion("standard"):  # optax adds FP32 updates to 16-bit parameters
        assert optax.apply_updates(stored, updates)["w"].tolist() == [0.5, 0.5]


# ---------------------------------------------------------------------------
# policies/README.md
# ---------------------------------------------------------------------------

README = text_of("policies/README.md")


def documented_keys(text, heading):
    """Returns the keys in the first column of the tables below a heading."""
    section = re.search(rf"^### {re.escape(heading)}.*?(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\|([^|]*)\|", section[0], re.MULTILINE) if section else []
    return {key for cell in cells for key in re.findall(r'`"?([^`"]+)"?`', cell)}


def undocumented(text):
    """Returns `(table, key)` for each key of the schema that `text` does not contain."""
    tables = {**TABLES, "ops": dict.fromkeys(CATEGORIES)}
    keys = {f"`[{table}]`": list(fields) for table, fields in tables.items()}
    keys["At the top"] = list(TOP)
    keys["`[[rules]]`"] = [key for key in RULE if key not in TABLES["policy"]]
    return [
        (heading, key)
        for heading, names in keys.items()
        for key in names
        if key not in documented_keys(text, heading)
    ]


def test_the_readme_documents_every_key():
    assert undocumented(README) == [] and documented_keys(README, "`[fp8]`") == set(TABLES["fp8"])
    assert "the keys of `[policy]`" in README  # [[rules]] has these keys too
    for key in {*TABLES["optimizer"], *TABLES["gradients"]}:
        assert key in RecipeChanges.__annotations__ and f"\n      {key}:" in Recipe.__doc__
        assert f"`{key}`" in Recipe.replace.__doc__


def test_the_test_of_the_readme_can_fail():
    assert undocumented(README.replace("| `margin` |", "| margin |")) == [("`[fp8]`", "margin")]
    without_table = README.replace("### `[fp8]`", "### fp8")
    assert ("`[fp8]`", "scaling") in undocumented(without_table)


def test_the_readme_gives_the_defaults_of_fp8():
    section = README.split("### `[fp8]`")[1].split("###")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", section, re.MULTILINE))
    # The defaults of these keys depend on the scaling, as their rows document.
    defaults = {name: text for name, text in rows.items() if name not in ("dgrad", "wgrad")}
    assert len(defaults) == len(TABLES["fp8"]) - 2
    read = tomllib.loads("\n".join(f"{key} = {text.strip('`')}" for key, text in defaults.items()))
    for cls in KINDS.values():
        known = {"scaling": "current", **vars(cls())}
        documented = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in read.items()
            if key in known
        }
        assert documented == {key: known[key] for key in documented}
