"""The HLO parser: types, operands, loops, fusions and source lines of optimized programs."""
# ruff: noqa: E501  (lines are as XLA prints them)

import pytest

from jaxmp._tools.audit._hlo import Program, Shape
from jaxmp._tools.audit._hlo_collectives import mesh_axes
from jaxmp._tools.audit._hlo_matmuls import DataFlow, matmul_of_instruction, parts

TEXT = r"""HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {2}: (0, {}, must-alias) }, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

FileNames
1 "/code/a \"b\".py"
2 "/lib/flax/linen.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=9 column=4 end_column=8}
2 {file_name_id=2 function_name_id=1 line=30 end_line=30 column=4 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused_computation (p0: bf16[4,8]) -> bf16[4,8] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  ROOT %neg.1 = bf16[4,8]{1,0} negate(%p0), metadata={op_name="jit(step)/jvp(Net)/lin/neg" stack_frame_id=2}
}

%body (t: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %t = (s32[], /*index=1*/bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%t), index=1
  %fusion.1 = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(step)/it\'s"}
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%x, %fusion.1)
}

%cond (t.1: (s32[], bf16[4,8])) -> pred[] {
  ROOT %t.1 = pred[] constant(true)
}

ENTRY %main (a.1: (s32[], bf16[4,8]), b.1: f32[4,8]) -> (f32[4,8], f32[], f8e4m3fn[2,<=3]) {
  %a.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  %b.1 = f32[4,8]{1,0:T(8,128)} parameter(1), sharding={replicated}
  %c.1 = f32[2]{0} constant({1, 2})
  %loop = (s32[], bf16[4,8]{1,0}) while(%a.1), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"},"s":"}"}
  %d = f32[4,8]{1,0} dot(%b.1, f32[8,8]{1,0} %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, operand_precision={highest,highest}, metadata={source_file="/x.py" source_line=3}
  ROOT %r = (f32[4,8]{1,0}, f32[], f8e4m3fn[2,3]{1,0}) tuple(%d, %c.1, %b.1)
}
"""


@pytest.fixture(scope="module")
def program():
    return Program(TEXT)


def test_line_breaks_in_attributes_do_not_end_a_computation(program):
    attributes = (
        'frontend_attributes={kernel_metadata={\n"block": "{8}"\n}}, metadata={op_name="f"}'
    )
    broken = Program(TEXT.replace("parameter(0)\n  %x", f"parameter(0), {attributes}\n  %x"))
    names = lambda p: {name: list(c.instructions) for name, c in p.computations.items()}
    assert names(broken) == names(program)
    assert broken.computations["body"].instructions["t"].op_name == "f"


def test_computations_and_instructions(program):
    assert list(program.computations) == ["fused_computation", "body", "cond", "main"]
    assert program.entry.name == "main" and program.entry.root.name == "r"
    dot = program.entry.instructions["d"]
    assert (dot.opcode, dot.operands) == ("dot", ("b.1", "w"))
    assert dot.numbers("lhs_contracting_dims") == (1,) and dot.numbers("absent") == ()
    assert dot.attribute("operand_precision") == "highest,highest"
    assert program.entry.instructions["c.1"].operands == ()


def test_types_with_tuples_comments_and_layouts(program):
    assert program.computations["body"].instructions["t"].shapes == (
        Shape("s32", ()),
        Shape("bf16", (4, 8)),
    )
    assert program.entry.parameters[1].shapes == (Shape("f32", (4, 8)),)
    assert [shape.dtype for shape in program.entry.root.shapes] == [
        "float32",
        "float32",
        "float8_e4m3fn",
    ]


@pytest.mark.parametrize(
    ("type", "dtype", "size"),
    [
        ("pred", "bool", 6),
        ("s4", "int4", 3),
        ("u8", "uint8", 6),
        ("f8e5m2", "float8_e5m2", 6),
        ("f4e2m1fn", "float4_e2m1fn", 3),
        ("bf16", "bfloat16", 12),
        ("c64", "complex64", 48),
    ],
)
def test_dtypes_and_bytes(type, dtype, size):
    shape = Shape(type, (2, 3))
    assert (shape.dtype, shape.bytes) == (dtype, size)


def test_loops_run_as_often_as_xla_knows(program):
    times = {step.instruction.name: step.times for step in program.steps()}
    assert times["loop"] == 1 and times["fusion.1"] == 5
    # The instructions inside of a fusion are not separate steps.
    assert "neg.1" not in times
    fusion = program.computations["body"].instructions["fusion.1"]
    assert program.inside(fusion).root.opcode == "negate"


def test_donated_arguments(program):
    assert program.aliased == {0: 1, 2: 0}
    assert Program("HloModule m\n\nENTRY %e () -> f32[] {\n}\n").aliased == {}


def test_names_and_lines(program):
    inner = program.computations["fused_computation"].root
    assert inner.op_name == "jit(step)/jvp(Net)/lin/neg"
    assert program.frames(inner) == [("/lib/flax/linen.py", 30), (r"/code/a \"b\".py", 7)]
    assert program.computations["body"].instructions["fusion.1"].op_name == "jit(step)/it's"
    # Older versions of XLA write the line directly.
    assert program.frames(program.entry.instructions["d"]) == [("/x.py", 3)]
    assert program.frames(program.entry.instructions["loop"]) == []


ASYNC = r"""HloModule jit_step

%called (p: f32[4,8], w: f32[8,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[4,8]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[4,8], b: f32[8,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %start = ((f32[4,8]{1,0}, f32[8,8]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%a, %b), calls=%called
  ROOT %done = f32[4,8]{1,0} async-done(%start), calls=%called
}
"""


def test_matmuls_of_asynchronous_calls_count_once():
    program = Program(ASYNC)
    flow = DataFlow(program)
    kernels = [(step, part) for step in program.steps() for part in parts(program, step)]
    matmuls = [matmul for pair in kernels if (matmul := matmul_of_instruction(flow, *pair))]
    assert [matmul.flops for matmul in matmuls] == [2 * 4 * 8 * 8]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("mesh['data'=4,'model'=2] {'data'}", ("data",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("model",)),
        ("mesh['axis_0'=8] {'axis_0'}", ("data", "model")),
        ("[4,2]<=[8]", ("model",)),
        ("[2,4]<=[4,2]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "model")),
        ("{{0,2,4,6},{1,3,5,7}}", ("data",)),
        ("{}", ("data", "model")),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("data", "model")),
        # Two of the four devices along an axis, and groups of which one is not known.
        ("mesh['data'=4,'model'=2] {'data':(2)2}", ("data",)),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0'}", ("data",)),
        ("{{0,1,2},{3,4}}", ()),
    ],
)
def test_replica_groups_are_mesh_axes(groups, axes):
    text = f"""
ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add
}}
"""
    sum_of = Program(text).entry.root
    assert mesh_axes(sum_of, {"data": 4, "model": 2}) == axes
