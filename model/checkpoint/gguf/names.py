"""The tensors of a GGUF checkpoint under Hugging Face's names: which rows hold them, and what llama.cpp's converter did to them.

Invariant: every tensor of the checkpoint is named by what is returned, under its own name where it has no other, so that one that is not
known can be refused. It reads no weights and imports no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from model.checkpoint.gguf.config import ROTARY_FACTORS, SCALED
from model.checkpoint.gguf.header import MAX_TENSORS
from model.checkpoint.gguf.split import GGUF
from model.checkpoint.gguf.types import BY_NAME
from model.spec import CheckpointError


@dataclass(frozen=True, slots=True)
class Source:
    """Where the values of a checkpoint tensor are found."""

    tensor: str
    """In the file. Its rows are those of all axes but the innermost together."""
    shape: tuple[int, ...]
    """Of the checkpoint tensor, as Hugging Face has it."""
    first_row: int = 0
    pair_rows: int = 0
    """Rows of a head whose rotated pairs lie side by side in the file and are to be put into two halves; 0: rows as they are."""
    addend: float = 0.0
    """What is to be added to each number."""
    values: str = ""
    """Of latent attention split by llama.cpp: the tensor of the values' rows [head, value, rank]; `tensor` is then [head, rank, key]."""


def _table(text: str) -> dict[str, str]:
    """Module in the file -> module in the checkpoint, two words each."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


_LLAMA = _table("""
    attn_norm input_layernorm  attn_q self_attn.q_proj  attn_k self_attn.k_proj  attn_v self_attn.v_proj  attn_output self_attn.o_proj
    ffn_norm post_attention_layernorm  ffn_gate mlp.gate_proj  ffn_up mlp.up_proj  ffn_down mlp.down_proj
""")
_GEMMA3 = _LLAMA | _table("""
    attn_q_norm self_attn.q_norm  attn_k_norm self_attn.k_norm  post_attention_norm post_attention_layernorm
    ffn_norm pre_feedforward_layernorm  post_ffw_norm post_feedforward_layernorm
""")
_LATENT = _LLAMA | _table("""
    attn_q_a self_attn.q_a_proj  attn_q_a_norm self_attn.q_a_layernorm  attn_q_b self_attn.q_b_proj
    attn_kv_a_mqa self_attn.kv_a_proj_with_mqa  attn_kv_a_norm self_attn.kv_a_layernorm  attn_kv_b self_attn.kv_b_proj
    ffn_gate_inp mlp.gate  ffn_gate_shexp mlp.shared_experts.gate_proj  ffn_up_shexp mlp.shared_experts.up_proj
    ffn_down_shexp mlp.shared_experts.down_proj
""")
_STARCODER = _table("attn_norm ln_1  attn_qkv attn.c_attn  attn_output attn.c_proj  ffn_norm ln_2  ffn_up mlp.c_fc  ffn_down mlp.c_proj")
_FALCON = _table("""
    attn_norm input_layernorm  attn_qkv self_attention.query_key_value  attn_output self_attention.dense
    ffn_up mlp.dense_h_to_4h  ffn_down mlp.dense_4h_to_h
""")
_FALCON_2 = _FALCON | _table("attn_norm ln_mlp  attn_norm_2 ln_attn")
_OUTER_LLAMA = _table("token_embd model.embed_tokens  output_norm model.norm  output lm_head")
_OUTER_GPT = _table("token_embd transformer.wte  position_embd transformer.wpe  output_norm transformer.ln_f  output lm_head")
_OUTER_FALCON = _table("token_embd transformer.word_embeddings  output_norm transformer.ln_f  output lm_head")
_TABLES = {
    "deepseek2": (_OUTER_LLAMA, "model.layers", _LATENT),
    "falcon": (_OUTER_FALCON, "transformer.h", _FALCON),
    "gemma": (_OUTER_LLAMA, "model.layers", _LLAMA),
    "gemma3": (_OUTER_LLAMA, "model.layers", _GEMMA3),
    "llama": (_OUTER_LLAMA, "model.layers", _LLAMA),
    "minicpm3": (_OUTER_LLAMA, "model.layers", _LATENT),
    "starcoder": (_OUTER_GPT, "transformer.h", _STARCODER),
}
"""Architecture -> modules outside the layers, the layers' prefix, modules of a layer."""
_ROTATED = ("attn_q", "attn_k")
_EXPERTS = _table("ffn_gate_exps gate_proj  ffn_up_exps up_proj  ffn_down_exps down_proj  ffn_gate_up_exps gate_proj,up_proj")
"""Tensors [expert, rows, columns] -> the matrices whose rows follow each other in each expert."""
_IN_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")


def sources(gguf: GGUF, head_dim: int) -> dict[str, Source]:
    """Hugging Face's tensor names -> where their values are. `head_dim`: the width of a head. Raises CheckpointError for more tensors than
    any checkpoint has.
    """
    architecture = str(gguf.metadata.get("general.architecture"))
    found: dict[str, Source] = {}
    _check_layouts(gguf, architecture, head_dim)
    for name in gguf.tensors:
        if name in ROTARY_FACTORS and architecture in SCALED:
            continue  # Read with the config.
        for theirs, source in _named(gguf, architecture, name, head_dim):
            if theirs in found:
                raise CheckpointError(f"{gguf.path}: tensors {found[theirs].tensor} and {name} both are {theirs}")
            found[theirs] = source
            if len(found) > MAX_TENSORS:
                raise CheckpointError(f"{gguf.path}: {name} has so many experts that there are more than {MAX_TENSORS} tensors")
    return found


def _check_layouts(gguf: GGUF, architecture: str, head_dim: int) -> None:
    """Raises CheckpointError for tensors whose rows could not be read as `Source` says."""
    for name, file in gguf.tensors.items():
        entry, match = file.entries[name], _IN_LAYER.fullmatch(name)
        if len(entry.shape) == 1 and BY_NAME[entry.dtype].block_elements > 1:
            raise CheckpointError(f"{file.path}: {name} is a vector of type {entry.dtype}, expected F32, F16 or BF16")
        if architecture == "llama" and match is not None and match[2] in _ROTATED and (head_dim % 2 or entry.shape[0] % head_dim):
            raise CheckpointError(f"{file.path}: {name} has {entry.shape[0]} rows, expected heads of {head_dim} rows, an even number")


def _named(gguf: GGUF, architecture: str, name: str, head_dim: int) -> Iterator[tuple[str, Source]]:
    """The checkpoint tensors whose values a tensor of the file holds."""
    outer, prefix, modules = _TABLES[architecture]
    shape = gguf.tensors[name].entries[name].shape
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        yield f"{outer[module]}.{kind}" if module in outer and kind in ("weight", "bias") else name, _plain(architecture, name, shape)
        return
    layer, module, kind = f"{prefix}.{match[1]}", match[2], match[3]
    if architecture == "falcon" and f"blk.{match[1]}.attn_norm_2.weight" in gguf.tensors:
        modules = _FALCON_2
    if module in modules:
        rows = head_dim if architecture == "llama" and module in _ROTATED else 0
        yield f"{layer}.{modules[module]}.{kind}", _plain(architecture, name, shape, rows)
    elif architecture != "deepseek2":
        yield name, Source(name, shape)
    elif module == "exp_probs_b":
        yield f"{layer}.mlp.gate.e_score_correction_bias", Source(name, shape)
    elif module in _EXPERTS and len(shape) == 3 and shape[1] % (1 + _EXPERTS[module].count(",")) == 0:
        yield from _experts(name, shape, f"{layer}.mlp.experts", _EXPERTS[module].split(","))
    elif module == "attn_k_b":
        yield f"{layer}.self_attn.kv_b_proj.weight", _rejoined(gguf, name)
    elif module != "attn_v_b" or name.replace("attn_v_b", "attn_k_b") not in gguf.tensors:
        yield name, Source(name, shape)


def _plain(architecture: str, name: str, shape: tuple[int, ...], pair_rows: int = 0) -> Source:
    is_norm = name.endswith("norm.weight") and architecture in ("gemma", "gemma3")
    return Source(name, shape, pair_rows=pair_rows, addend=-1.0 if is_norm else 0.0)


def _experts(name: str, shape: tuple[int, ...], prefix: str, matrices: list[str]) -> Iterator[tuple[str, Source]]:
    num_experts, all_rows, columns = shape
    rows = all_rows // len(matrices)
    for expert in range(num_experts):
        for place, matrix in enumerate(matrices):
            yield f"{prefix}.{expert}.{matrix}.weight", Source(name, (rows, columns), expert * all_rows + place * rows)


def _rejoined(gguf: GGUF, keys: str) -> Source:
    """The projection that llama.cpp splits into keys, transposed, and values."""
    values = keys.replace("attn_k_b", "attn_v_b")
    shapes = [gguf.tensors[name].entries[name].shape if name in gguf.tensors else () for name in (keys, values)]
    if any(len(shape) != 3 for shape in shapes) or shapes[0][0] != shapes[1][0] or shapes[0][1] != shapes[1][2]:
        raise CheckpointError(f"{gguf.path}: {keys} and {values} have shapes {shapes}, expected [heads, rank, key], [heads, value, rank]")
    (heads, rank, key_dim), (_, value_dim, _) = shapes
    return Source(keys, (heads * (key_dim + value_dim), rank), values=values)
