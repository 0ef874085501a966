"""`python -m tests.triton.compile_kernels ARCHITECTURE:shapeSHAPExBYTES:WINDOW[:fp8]...
ARCHITECTURE:rowsBYTES... ARCHITECTURE:FORM... ARCHITECTURE:one_row...`: compiles kernels for GPUs
that need not be there.

Those of attention for a model of this shape of heads, with `fp8` over keys and values in float8;
what has a program for each row; with `int8` or `int4` the products of blocks. Prints a line of JSON
for each: shared memory in bytes, registers of a thread and the bytes that it spills, how often each
instruction stands in the code, and in each loop that multiplies matrices.
"""

import json
import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.devices.blocks import BLOCK, FORMATS
from model.devices.gpu import EXACT, block_products, launches, one_row, products, rows
from model.devices.gpu import draw as draws
from model.devices.gpu.attention import write
from model.devices.gpu.attention.backend import sizes_of, write_sizes_of
from model.devices.gpu.attention.chunks import attend
from model.devices.gpu.attention.configurations import (
    MANY_ROWS,
    Sizes,
    choose_chunks,
    choose_decode,
)
from model.devices.gpu.attention.decode import decode
from model.devices.gpu.attention.plan import TILE_FIELDS
from model.devices.gpu.drawing import DRAW_WARPS, FILTER_SIZE, FILTER_WARPS
from tests.triton import SHARED_KIB

MULTIPLIES = "mma.sync", "wgmma.mma_async", "tcgen05.mma", "fma.rn.f32"
LOADS = (
    "cp.async.c",
    "ld.global.L1::evict_first",
    "ld.global.v4.b32",
    "ld.global.b16",
    "ld.global.b32",
)
CONVERTS = (
    "cvt.rn.f32.u",
    "cvt.rn.f32.s",
    "cvt.rn.f16x2.e4m3x2",
    "cvt.rn.bf16x2.e4m3x2",
    "cvt.rn.satfinite.e4m3x2.f32",
    "cvt.bf16.f16",
)
INSTRUCTIONS = *MULTIPLIES, *LOADS, *CONVERTS
LATENT = {576: (512, 64)}
"""Keys of these many columns are latents with a tail."""
SHAPES = (16, 128), (48, 128), (71, 64), (8, 256), (4, 256), (8, 512), (16, 576), (128, 576)
"""Query heads and columns of a key."""
POINTERS = {
    f"{name}_ptr": "*i32" for name in ("tiles", "tokens", "positions", "offsets", "pages", "rows")
}
MULTIPLICATION = re.compile("|".join(map(re.escape, MULTIPLIES)))
NUMBERS = {2: "bf16", 4: "fp32"}
FLOAT8 = {"keys_ptr": "*fp8e4nv", "values_ptr": "*fp8e4nv"}
POINTERS |= {"partial_ptr": "*fp32", "peaks_ptr": "*fp32", "sums_ptr": "*fp32"}
POINTERS |= {
    f"{name}_ptr": "*i32" for name in ("settings", "parts", "counters", "results", "limits")
}
POINTERS |= {"drawn_ptr": "*i64", "shares_ptr": "*fp64"}
BLOCKS = POINTERS | {
    "numbers_ptr": "*u8",
    "scales_ptr": "*fp16",
    "minima_ptr": "*fp16",
    "ids_ptr": "*i64",
}
FLOATS = "factor", "epsilon", "offset", "scale"
WIDTHS = 2048, 2304
"""Inputs and outputs of the products: StarCoderBase-1B's."""
ONE_ROW_SHAPES = (2304, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (3072, 4544)
"""Outputs and inputs: StarCoderBase-1B's, and inputs that are no power of two."""
BLOCK_WIDTHS = 6144, 6400
"""Those of the products of blocks: granite-20b-code's."""
VOCABULARY = 50257


def compiled(
    kernel: Any,
    number: str,
    architecture: int,
    constants: dict[str, Any],
    options: dict[str, Any],
    pointers: dict[str, str] = POINTERS,
) -> dict[str, Any]:
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name, "*" + number)
            attributes[place,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
            attributes |= {(place,): [["tt.divisibility", 16]]} if name == "stride" else {}
    source = ASTSource(
        kernel,
        signature,
        constexprs={name: constants[name] for name in kernel.arg_names if name in constants},
        attrs=attributes,
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options=options | EXACT
    )
    ptx, cubin = made.asm["ptx"], made.asm["cubin"]
    counts = {instruction: ptx.count(instruction) for instruction in INSTRUCTIONS}
    told = {"kernel": kernel.__name__, "shared": made.metadata.shared, "cubin": len(cubin)}
    return told | registers(cubin) | {"counts": counts, "loops": loops(ptx)}


def registers(cubin: bytes) -> dict[str, int]:
    """Of a thread, and the bytes of its stack, which holds those that are spilled."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return {"registers": int(found[1]), "spilled": int(found[2])}


def loops(ptx: str) -> list[dict[str, int]]:
    """Of each innermost loop that multiplies: the barriers in it, and the copies to shared memory
    that it does not wait for.
    """
    lines = ptx.splitlines()
    labels = {
        line.split(":")[0].strip(): number
        for number, line in enumerate(lines)
        if line.startswith("$L")
    }
    spans = []
    for number, line in enumerate(lines):
        found = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if found and labels[found[1]] < number:
            spans.append((labels[found[1]], number))
    inner = [
        (a, b)
        for a, b in spans
        if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)
    ]
    bodies = ["\n".join(lines[a:b]) for a, b in inner]
    return [
        {"barriers": body.count("bar.sync"), "copies": len(re.findall(r"cp\.async\.c[ag]", body))}
        for body in bodies
        if len(MULTIPLICATION.findall(body)) > 1
    ]


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def compile_rows(architecture: int, size: int) -> None:
    """The kernels for rows and draws, over numbers of so many bytes."""
    number, (inputs, outputs) = NUMBERS[size], WIDTHS
    compile_join(architecture, number, outputs)
    compile_norms(architecture, number, inputs)
    compile_draws(architecture, number)


def compile_join(architecture: int, number: str, outputs: int) -> None:
    """The joining of a product's parts."""
    constants = {
        "OUTPUTS": outputs,
        "PARTS": 4,
        "ACTIVATION": "gelu",
        "BLOCK_Y": launches.JOINED_AT_ONCE,
    }
    tell(
        {"architecture": architecture}
        | compiled(products.join, number, architecture, constants, {}, POINTERS)
    )


def compile_one_row(architecture: int) -> None:
    """Products of one row, whole and in parts."""
    for outputs, inputs in ONE_ROW_SHAPES:
        outputs_O, inputs_I = one_row.piece_of(outputs, inputs)
        blocks = {"BLOCK_O": outputs_O, "BLOCK_I": inputs_I, "APART": inputs > inputs_I}
        constants = blocks | {"INPUTS": inputs, "OUTPUTS": outputs, "ACTIVATION": "gelu_tanh"}
        pointers = POINTERS | ({"y_ptr": "*fp32"} if inputs > inputs_I else {})
        found = compiled(
            one_row.one_row, "bf16", architecture, constants, {"num_warps": 4}, pointers
        )
        tell({"architecture": architecture} | found)


def compile_draws(architecture: int, number: str) -> None:
    """The draw of all rows, the one of adjusted rows, and what comes after that."""
    columns: dict[str, Any] = {"COLUMNS": VOCABULARY}
    num_parts = triton.next_power_of_2(triton.cdiv(VOCABULARY, draws.BLOCK.value))
    parts = {
        "DEPTH": WIDTHS[0],
        "PIECE": triton.next_power_of_2(triton.cdiv(WIDTHS[0], num_parts)),
        "NUM_PARTS": num_parts,
    }
    adjusted = POINTERS | {"logits_ptr": "*fp32", "likeliest_ptr": "*fp32"}
    unit = 2.0 ** (62 - VOCABULARY.bit_length())
    filters = columns | {"UNIT": unit, "SIZE": FILTER_SIZE}
    for kernel, constants, pointers, warps in (
        (draws.draw, columns | parts | {"rows_ptr": None}, POINTERS, DRAW_WARPS),
        (draws.draw, columns | parts | {"states_ptr": None}, adjusted, DRAW_WARPS),
        (draws.confine, filters, adjusted, FILTER_WARPS),
        (draws.confine, filters, POINTERS, FILTER_WARPS),
    ):
        tell(
            {"architecture": architecture}
            | compiled(kernel, number, architecture, constants, {"num_warps": warps}, pointers)
        )


def compile_norms(architecture: int, number: str, columns: int) -> None:
    """A branch that has a norm, as gemma3's; two branches and biases, as falcon's; a norm alone; of
    heads; a gate.
    """
    pointers = "branch_ptr", "branch_weight_ptr", "branch_bias_ptr", "other_ptr", "bias_ptr"
    sizes = {"COLUMNS": columns, "BLOCK": columns}
    for centred, present in (
        (False, ("branch_ptr", "branch_weight_ptr")),
        (True, ("branch_ptr", "other_ptr", "bias_ptr")),
        (False, ()),
    ):
        constants = (
            sizes | {"CENTRED": centred} | {name: None for name in pointers if name not in present}
        )
        tell(
            {"architecture": architecture}
            | compiled(rows.add_norm, number, architecture, constants, {})
        )
    constants = {
        "COLUMNS": 256,
        "BLOCK": 256,
        "CENTRED": False,
        "query_bias_ptr": None,
        "key_bias_ptr": None,
    }
    tell(
        {"architecture": architecture}
        | compiled(rows.norm_heads, number, architecture, constants, {"num_warps": 1})
    )
    gated = {"COLUMNS": columns, "BLOCK": 1024, "ACTIVATION": "gelu_tanh"}
    tell({"architecture": architecture} | compiled(rows.gate, number, architecture, gated, {}))


def compile_blocks(architecture: int, form: str) -> None:
    """Every tile, with and without parts; in float32; the joining of parts; the rows of a table and
    of a matrix.
    """
    inputs, outputs = BLOCK_WIDTHS
    absent = {} if form == "int4" else {"minima_ptr": None}
    stored = {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "ROWS": outputs,
        "BLOCKS": inputs // BLOCK,
        "UPCAST": False,
    } | absent
    tiles_of = {"bf16": block_products.TILES, "fp32": (block_products.FLOAT32_TILE,)}
    for number, tile, parts in (
        (number, tile, parts)
        for number, of_it in tiles_of.items()
        for tile in of_it
        for parts in (1, 4)
    ):
        constants = stored | {
            "PART": inputs // parts,
            "PARTS": parts,
            "BLOCK_T": tile.rows,
            "BLOCK_O": tile.outputs,
            "BLOCK_I": tile.inputs,
        }
        pointers = BLOCKS | ({"y_ptr": "*fp32"} if parts > 1 else {})
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = compiled(
            block_products.block_product, number, architecture, constants, options, pointers
        )
        tell({"rows": tile.rows, "number": number, "architecture": architecture} | made)
    compile_join(architecture, "bf16", outputs)
    for without_ids in ({}, {"ids_ptr": None}):
        constants = (
            stored
            | without_ids
            | {"BLOCK_N": block_products.OUTPUTS, "BLOCK_I": block_products.INPUTS}
        )
        tell(
            {"architecture": architecture}
            | compiled(block_products.dequantize, "bf16", architecture, constants, {}, BLOCKS)
        )


def wanted_sizes(architecture: int, heads: int, columns: int, size: int) -> Sizes:
    value_dim = 0 if columns in LATENT else columns
    return Sizes(heads, columns, value_dim, size, 64, SHARED_KIB[architecture] * 1024)


def compile_attention(architecture: int, shape: int, window: int, stored: bool, size: int) -> None:
    """The decode kernel for every class of rows, the kernel of long chunks, and the one that stores
    keys and values, with and without turning them.
    """
    heads, columns = SHAPES[shape]
    num_d, num_r = LATENT.get(columns, (columns, 0))
    wanted = wanted_sizes(architecture, heads, columns, size)
    numbers = 64 * (num_d + num_r + (0 if num_r else num_d)) * 4
    options: dict[str, Any] = {
        "PAGE": 64,
        "NUMBERS": numbers,
        "UPCAST": False,
        "VALUE_IN_KEY": num_r > 0,
    }
    pointers = POINTERS | (FLOAT8 if stored else {})
    told = {"shape": f"{heads}x{columns}", "window": window, "architecture": architecture}
    classes = {choose_decode(wanted, num_rows) for num_rows in (1, MANY_ROWS)}
    chunks = choose_chunks(wanted)
    assert chunks is not None
    # With a window beside chunks, else alone.
    alone: dict[str, Any] = {} if window else {"tokens_ptr": None}
    for kernel, configuration, others in (
        *((decode, each, alone) for each in classes),
        (attend, chunks, {"TILES": TILE_FIELDS}),
    ):
        sizes = sizes_of(heads, (num_d, num_r, num_d), configuration) | options | others
        sizes |= {"WINDOW": window, "GROUPS": configuration.warp_groups}
        found = compiled(
            kernel, NUMBERS[size], architecture, sizes, configuration.options, pointers
        )
        about = {"rows": configuration.rows, "groups": configuration.warp_groups, "size": size}
        tell(told | about | found)
    # Latents come turned; a layer that reads another's keys has queries alone.
    no_keys = dict.fromkeys(("k_ptr", "v_ptr"))
    for absent in ({"cosine_ptr": None, "sine_ptr": None}, *([] if num_r else [{}, no_keys])):
        sizes = write_sizes_of(heads, columns, num_d) | options | {"INTERLEAVED": False} | absent
        found = compiled(write.scatter, NUMBERS[size], architecture, sizes, {}, pointers)
        done = {"turns": "cosine_ptr" not in absent, "stores": "k_ptr" not in absent}
        tell(told | done | found)


def main() -> None:
    for wanted in sys.argv[1:]:
        plain = wanted.removesuffix(":fp8")
        architecture, line, *window = plain.split(":")
        if line in FORMATS:
            compile_blocks(int(architecture), line)
        elif line.startswith("rows"):
            compile_rows(int(architecture), int(line.removeprefix("rows")))
        elif line == "one_row":
            compile_one_row(int(architecture))
        else:
            shape, size = line.removeprefix("shape").split("x")
            stored = plain != wanted
            compile_attention(int(architecture), int(shape), int(window[0]), stored, int(size))


if __name__ == "__main__":
    main()
