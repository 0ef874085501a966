"""`python -m tests.triton.compile_kernels ARCHITECTURE:LINE:WINDOW[:fp8]...`: compiles the kernels as these lines of the table ship them,
for GPUs that need not be there; with `fp8` over keys, values and weights in float8. Prints a line of JSON for each: shared memory in
bytes, and how often each instruction stands in the code.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.backends.triton import kernels, product, write
from model.backends.triton.backend import EXACT, JOINED_AT_ONCE, sizes_of
from model.backends.triton.configurations import TABLE

INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "cp.async.c", "fma.rn.f32")
INSTRUCTIONS += ("cvt.rn.f16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2.f32", "cvt.bf16.f16")
LATENT = {576: (512, 64)}
"""Keys of these many columns are latents with a tail."""
POINTERS = {"spans_ptr": "*i32", "tiles_ptr": "*i32", "tables_ptr": "*i32", "slots_ptr": "*i32"}
FLOAT8 = {"keys_ptr": "*fp8e4nv", "values_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"}
POINTERS |= {"scale_ptr": "*fp32", "partial_ptr": "*fp32", "peaks_ptr": "*fp32", "sums_ptr": "*fp32"}


def compiled(
    kernel: Any, number: str, architecture: int, constants: dict[str, Any], options: dict[str, Any], pointers: dict[str, str]
) -> dict[str, Any]:
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name], attributes[(place,)] = pointers.get(name, "*" + number), [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "factor" else "i32"
    source = ASTSource(
        kernel, signature, constexprs={name: constants[name] for name in kernel.arg_names if name in constants}, attrs=attributes
    )
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options | EXACT)
    counts = {instruction: made.asm["ptx"].count(instruction) for instruction in INSTRUCTIONS}
    return {"kernel": kernel.__name__, "shared": made.metadata.shared, "counts": counts, "cubin": len(made.asm["cubin"])}


def main() -> None:
    for wanted in sys.argv[1:]:
        *numbers, stored = wanted.split(":") if wanted.endswith(":fp8") else (*wanted.split(":"), "")
        architecture, line, window = map(int, numbers)
        most_heads, columns, size, configuration = TABLE[line]
        num_d, num_r = LATENT.get(columns, (columns, 0))
        constants = sizes_of(min(most_heads, 128), num_d, num_r, num_d, configuration) | {"BLOCK_C": JOINED_AT_ONCE, "WINDOW": window}
        constants |= {"PAGE": 64, "VALUE_IN_KEY": num_r > 0, "UPCAST": False, "KEY_DIM": columns, "VALUE_DIM": num_d}
        constants |= {"BLOCK_KEY": triton.next_power_of_2(columns), "BLOCK_VALUE": num_d}
        tile = product.TILES[size]
        cut = {kernels.attend: {"num_warps": configuration.warps, "num_stages": configuration.stages}}
        cut |= {product.scaled_product: {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}}
        also = (product.scaled_product,) if stored else ()
        for kernel in (kernels.attend,) if window else (kernels.attend, kernels.join, write.scatter, *also):
            needed = constants | ({"INPUTS": 2048, "OUTPUTS": 2304} | tile if kernel is product.scaled_product else {})
            pointers = POINTERS | (FLOAT8 if stored else {})
            found = compiled(kernel, {2: "bf16", 4: "fp32"}[size], architecture, needed, cut.get(kernel, {}), pointers)
            print(json.dumps({"line": line, "window": window, "architecture": architecture} | found), flush=True)


if __name__ == "__main__":
    main()
