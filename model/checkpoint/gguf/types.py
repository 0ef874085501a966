"""The types of tensors in GGUF files, as data: their numbers, names, and the bytes of a quantization block. It imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type whose rows are whole blocks of `block_elements` numbers in `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a whole number of blocks."""
        return num_elements // self.block_elements * self.block_bytes


_READ = "0 F32 1 4  1 F16 1 2  2 Q4_0 32 18  3 Q4_1 32 20  6 Q5_0 32 22  7 Q5_1 32 24  8 Q8_0 32 34"
_READ += "  12 Q4_K 256 144  13 Q5_K 256 176  14 Q6_K 256 210  30 BF16 1 2"
_OTHERS = "10 Q2_K  11 Q3_K  16 IQ2_XXS  17 IQ2_XS  18 IQ3_XXS  19 IQ1_S  20 IQ4_NL  21 IQ3_S  22 IQ2_S  23 IQ4_XS  24 I8  25 I16  26 I32"
_OTHERS += "  27 I64  28 F64  29 IQ1_M  34 TQ1_0  35 TQ2_0  39 MXFP4  40 NVFP4"
_ROWS = [row.split() for row in _READ.split("  ")]
BLOCK_TYPES = {int(number): BlockType(name, int(elements), int(size)) for number, name, elements, size in _ROWS}
"""The types that are read, by their number in the file."""
BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
OTHERS = {int(number): name for number, name in (row.split() for row in _OTHERS.split("  "))}
"""Names for messages of types that are not read."""
