"""The tensors of a GGUF checkpoint under Hugging Face's names, and the changes that llama.cpp's
converter made to them.

Invariant: every tensor of the checkpoint is named by what is returned, under its own name where it
has no other, so that one that is not known can be refused. It reads no weights and imports no
torch.
"""

import re
from dataclasses import dataclass

from model.checkpoint.config import Config
from model.checkpoint.files import Stored
from model.checkpoint.gguf.config import EMBEDS, FREQUENCIES, SECOND_NORM, architecture_of
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.gguf.types import BY_NAME, table
from model.spec import CheckpointError


@dataclass(frozen=True, slots=True)
class Source:
    """The tensor in the file that holds a checkpoint tensor's values."""

    stored: Stored
    head_rows: int = 1
    """Rows of a head whose rotated pairs lie side by side in the file and are to be put into two
    halves; 1: rows as they are.
    """
    addend: float = 0.0
    """Number that is to be added to each value."""


_LLAMA = table("""
    attn_norm input_layernorm  attn_q self_attn.q_proj  attn_k self_attn.k_proj
    attn_v self_attn.v_proj  attn_output self_attn.o_proj  ffn_norm post_attention_layernorm
    ffn_gate mlp.gate_proj  ffn_up mlp.up_proj  ffn_down mlp.down_proj
""")
_GEMMA3 = _LLAMA | table("""
    attn_q_norm self_attn.q_norm                  attn_k_norm self_attn.k_norm
    post_attention_norm post_attention_layernorm  ffn_norm pre_feedforward_layernorm
    post_ffw_norm post_feedforward_layernorm
""")
_GEMMA4 = _GEMMA3 | table("""
    inp_gate per_layer_input_gate  proj per_layer_projection  post_norm post_per_layer_input_norm
    layer_output_scale layer_scalar
""")
_STARCODER = table("""
    attn_norm ln_1  attn_qkv attn.c_attn  attn_output attn.c_proj  ffn_norm ln_2
    ffn_up mlp.c_fc  ffn_down mlp.c_proj
""")
_FALCON = table("""
    attn_norm input_layernorm     attn_qkv self_attention.query_key_value
    attn_norm_2 ln_attn           attn_output self_attention.dense
    ffn_up mlp.dense_h_to_4h      ffn_down mlp.dense_4h_to_h
""")
_OUTER_LLAMA = table("token_embd model.embed_tokens  output_norm model.norm  output lm_head")
_OUTER_EMBEDDING = _OUTER_LLAMA | table("dense_2 2_Dense.linear  dense_3 3_Dense.linear")
_OUTER_GEMMA4 = _OUTER_LLAMA | table("""
    per_layer_token_embd model.embed_tokens_per_layer
    per_layer_model_proj model.per_layer_model_projection
    per_layer_proj_norm model.per_layer_projection_norm
""")
_OUTER_GPT = table("""
    token_embd transformer.wte  position_embd transformer.wpe  output_norm transformer.ln_f
    output lm_head
""")
_OUTER_FALCON = _OUTER_GPT | {"token_embd": "transformer.word_embeddings"}
_TABLES = {
    "falcon": (_OUTER_FALCON, "transformer.h", _FALCON),
    "gemma": (_OUTER_LLAMA, "model.layers", _LLAMA),
    EMBEDS: (_OUTER_EMBEDDING, "model.layers", _GEMMA3),
    "gemma3": (_OUTER_LLAMA, "model.layers", _GEMMA3),
    "gemma4": (_OUTER_GEMMA4, "model.layers", _GEMMA4),
    "llama": (_OUTER_LLAMA, "model.layers", _LLAMA),
    "starcoder": (_OUTER_GPT, "transformer.h", _STARCODER),
}
"""Architecture -> modules outside the layers, the layers' prefix, modules of a layer."""
_IN_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)")
_ROTATED = re.compile(r"\.[qk]_proj\.(weight|bias)$")


def sources(gguf: GGUFFile, config: Config) -> dict[str, Source]:
    """Hugging Face's tensor names -> where their values are. `config`: the checkpoint's
    config.json. Raises CheckpointError for tensors whose rows could not be read so.
    """
    architecture = architecture_of(gguf)
    found: dict[str, Source] = {}
    for name, stored in gguf.entries.items():
        if name == FREQUENCIES and architecture in ("llama", "gemma4"):
            continue  # Read with the config.
        theirs = _their_name(gguf, architecture, name)
        if theirs in found:
            both = f"tensors {found[theirs].stored.name} and {name} both are {theirs}"
            raise CheckpointError(f"{stored.path}: {both}")
        if len(stored.shape) == 1 and BY_NAME[stored.dtype].block_elements > 1:
            kind = f"is a vector of type {stored.dtype}, expected F32, F16 or BF16"
            raise CheckpointError(f"{stored.path}: {name} {kind}")
        rotated = architecture == "llama" and _ROTATED.search(theirs) is not None
        rows = config.columns("head_dim") if rotated else 1
        if rotated and (rows % 2 or stored.shape[0] % rows):
            expected = f"expected heads of {rows} rows, an even number"
            raise CheckpointError(f"{stored.path}: {name} has {stored.shape[0]} rows, {expected}")
        is_norm = architecture in ("gemma", "gemma3", EMBEDS) and name.endswith("norm.weight")
        found[theirs] = Source(stored, rows, -1.0 if is_norm else 0.0)
    return found


def _their_name(gguf: GGUFFile, architecture: str, name: str) -> str:
    """The checkpoint's name of a tensor; its own where it has none."""
    outer, prefix, modules = _TABLES[architecture]
    if architecture == "falcon" and SECOND_NORM in gguf.entries:
        modules = modules | {"attn_norm": "ln_mlp"}
    module, _, kind = name.rpartition(".")
    layer = _IN_LAYER.fullmatch(module)
    if kind in ("weight", "bias") and layer and layer[2] in modules:
        if modules[layer[2]] == "layer_scalar":  # A number, and no module with a weight.
            return f"{prefix}.{layer[1]}.layer_scalar"
        return f"{prefix}.{layer[1]}.{modules[layer[2]]}.{kind}"
    return f"{outer[module]}.{kind}" if module in outer and kind in ("weight", "bias") else name
