"""`python -m tests.triton.compile_kernels ARCHITECTURE:LINE:WINDOW[:fp8]... ARCHITECTURE:productLINE[:fp8]...`: compiles the kernels as
these lines of attention's table, or of the products', ship them, for GPUs that need not be there; with `fp8` over keys, values and weights
in float8. Prints a line of JSON for each: shared memory in bytes, and how often each instruction stands in the code.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.devices.gpu import EXACT, products, rows, tiles
from model.devices.gpu import draw as noise
from model.devices.gpu.attention import kernels, write
from model.devices.gpu.attention.backend import JOINED_AT_ONCE, sizes_of, write_sizes_of
from model.devices.gpu.attention.configurations import TABLE

INSTRUCTIONS: tuple[str, ...] = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "cp.async.c", "fma.rn.f32")
INSTRUCTIONS += ("cvt.rn.f16x2.e4m3x2", "cvt.rn.bf16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2.f32", "cvt.bf16.f16")
LATENT = {576: (512, 64)}
"""Keys of these many columns are latents with a tail."""
POINTERS = {"spans_ptr": "*i32", "tiles_ptr": "*i32", "tables_ptr": "*i32", "slots_ptr": "*i32"}
FLOAT8 = {"keys_ptr": "*fp8e4nv", "values_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"}
POINTERS |= {"scale_ptr": "*fp32", "partial_ptr": "*fp32", "peaks_ptr": "*fp32", "sums_ptr": "*fp32"}
POINTERS |= {"logits_ptr": "*fp32", "normalisers_ptr": "*fp32", "largest_ptr": "*fp32", "tokens_ptr": "*i64"}
POINTERS |= {
    "rows_ptr": "*i64",
    "draws_ptr": "*i64",
    "settings_ptr": "*fp64",
    "noise_ptr": "*fp64",
    "scores_ptr": "*fp64",
    "winners_ptr": "*i64",
}
FLOATS = "factor", "epsilon", "offset"
WIDTHS = 2048, 2304
"""Inputs and outputs of the products: StarCoderBase-1B's."""


def compiled(
    kernel: Any, number: str, architecture: int, constants: dict[str, Any], options: dict[str, Any], pointers: dict[str, str] = POINTERS
) -> dict[str, Any]:
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name], attributes[(place,)] = pointers.get(name, "*" + number), [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    source = ASTSource(
        kernel, signature, constexprs={name: constants[name] for name in kernel.arg_names if name in constants}, attrs=attributes
    )
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options | EXACT)
    counts = {instruction: made.asm["ptx"].count(instruction) for instruction in INSTRUCTIONS}
    return {"kernel": kernel.__name__, "shared": made.metadata.shared, "counts": counts, "cubin": len(made.asm["cubin"])}


def tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def compile_products(architecture: int, line: int, stored: bool) -> None:
    """Plain, gated, and with weights that lie the other way round; and the kernels for rows and draws. Weights in float8 have scales."""
    _, size, tile = tiles.TABLE[line]
    number, (inputs, outputs) = {2: "bf16", 4: "fp32"}[size], WIDTHS
    sizes: dict[str, Any] = {"GROUPS": 1, "INPUTS": inputs, "OUTPUTS": outputs, "STEP_G": 2 * inputs * outputs, "UPCAST": False}
    sizes |= {"BLOCK_T": tile.rows, "BLOCK_O": tile.columns, "BLOCK_I": tile.depth} | ({} if stored else {"scale_ptr": None})
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    # A router's weights are of 16 bits under rows in float32.
    pointers = POINTERS | (FLOAT8 if stored else {"weight_ptr": "*bf16"})
    for gated, steps in ((False, (inputs, 1)), (True, (inputs, 1)), (False, (1, outputs))):
        constants = sizes | {"ACTIVATION": "gelu", "GATED": gated, "STEP_O": steps[0], "STEP_I": steps[1]}
        tell({"line": line, "architecture": architecture} | compiled(products.product, number, architecture, constants, options, pointers))
    constants = {"COLUMNS": inputs, "BLOCK": inputs, "CENTRED": True}
    tell({"architecture": architecture} | compiled(rows.normalise, number, architecture, constants, {}))
    constants = {"COLUMNS": 50257, "BLOCK": 4096}
    tell({"architecture": architecture} | compiled(rows.summarise, number, architecture, constants, {}))
    for kernel in (noise.exponential_noise, noise.gumbel_max):
        tell({"architecture": architecture} | compiled(kernel, number, architecture, {"BLOCK_B": noise.BLOCK}, {}))


def compile_attention(architecture: int, line: int, window: int, stored: bool) -> None:
    """With a window only what differs."""
    most_heads, columns, size, configuration = TABLE[line]
    num_d, num_r = LATENT.get(columns, (columns, 0))
    constants = sizes_of(min(most_heads, 128), num_d, num_r, num_d, configuration) | {"BLOCK_C": JOINED_AT_ONCE, "WINDOW": window}
    constants |= {"PAGE": 64, "VALUE_IN_KEY": num_r > 0, "UPCAST": False}
    constants |= write_sizes_of(min(most_heads, 128), columns, num_d) | {"INTERLEAVED": False}
    pointers = POINTERS | (FLOAT8 if stored else {})
    made: list[tuple[Any, dict[str, Any]]] = [(kernels.attend, {}), (write.scatter, {"cosine_ptr": None, "sine_ptr": None})]
    made += [] if num_r else [(write.scatter, {})]  # Latents come turned.
    made += [] if window else [(kernels.join, {})]
    for kernel, absent in made:
        options = configuration.options if kernel is kernels.attend else {}
        found = compiled(kernel, {2: "bf16", 4: "fp32"}[size], architecture, constants | absent, options, pointers)
        tell({"line": line, "turns": not absent, "window": window, "architecture": architecture} | found)


def main() -> None:
    for wanted in sys.argv[1:]:
        plain = wanted.removesuffix(":fp8")
        architecture, line, *window = plain.split(":")
        if line.startswith("product"):
            compile_products(int(architecture), int(line.removeprefix("product")), plain != wanted)
        else:
            compile_attention(int(architecture), int(line), int(window[0]), plain != wanted)


if __name__ == "__main__":
    main()
