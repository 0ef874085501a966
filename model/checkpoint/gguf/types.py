"""The types of tensors in GGUF files, as data: their numbers, names, and the bytes of a
quantization block. It imports no torch.
"""

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


def table(text: str) -> dict[str, str]:
    """Key -> value, a word each, in the order of the text."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


OTHERS = table("""
10 Q2_K 11 Q3_K 16 IQ2_XXS 17 IQ2_XS 18 IQ3_XXS 19 IQ1_S 20 IQ4_NL 21 IQ3_S 22 IQ2_S 23 IQ4_XS 24 I8
25 I16 26 I32 27 I64 28 F64 29 IQ1_M 34 TQ1_0 35 TQ2_0 39 MXFP4 40 NVFP4
""")
"""Number -> name, for messages, of the types that are not read."""
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
"""The types that are read, by their number in the file."""
BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
