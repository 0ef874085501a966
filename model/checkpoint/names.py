"""The tensors of a checkpoint from which a decoder's parameters are made, as data, and the naming
that most families share.

It knows names and row counts; it knows nothing of files, tensors and torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from model.spec import Experts, Latent, ModelSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """The type of a checkpoint tensor by the name its format gives it, its shape, and its bytes in
    files.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a decoder parameter: the checkpoint tensor that holds them, and their number (None:
    all rows).
    """

    name: str
    rows: int | None = None
    transposed: bool = False
    """The checkpoint stores the matrix as [in, out]."""


Names = dict[str, tuple[Part, ...]]
"""Decoder parameter -> its parts, stacked by rows."""
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_branch_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_branch_norm": "post_feedforward_layernorm",
}
"""A layer's norms where branches have one too: decoder name -> checkpoint name."""


KINDS = "weight", "bias"


def renamed(modules: dict[str, str], bias: bool = False) -> Names:
    """Weights, with `bias` biases too, that have a checkpoint tensor of their own: decoder module
    -> checkpoint module.
    """
    return {
        f"{ours}.{kind}": (Part(f"{theirs}.{kind}"),)
        for ours, theirs in modules.items()
        for kind in KINDS[: 1 + bias]
    }


def stacked(
    ours: str, theirs: Mapping[str, int | None], bias: bool, transposed: bool = False
) -> Names:
    """A linear layer that stacks several of the checkpoint's: checkpoint module -> its rows, in the
    decoder's order. `transposed`: as in Part, of the weights.
    """
    return {
        f"{ours}.{kind}": tuple(
            Part(f"{name}.{kind}", rows, transposed and kind == "weight")
            for name, rows in theirs.items()
        )
        for kind in KINDS[: 1 + bias]
    }


def within(ours: str, theirs: str, names: Names) -> Names:
    """The names in a module, in the decoder and in the checkpoint -> the names in what these are
    in.
    """
    return {
        f"{ours}.{name}": tuple(
            Part(f"{theirs}.{part.name}", part.rows, part.transposed) for part in parts
        )
        for name, parts in names.items()
    }


def attention_names(spec: ModelSpec, layer: int) -> Names:
    """q_proj of a layer, where it stores keys and values k_proj and v_proj, and the norms of
    queries and keys.
    """
    width = spec.head_dim_of(layer)
    sizes = {"q_proj": spec.num_query_heads * width}
    if layer < spec.num_storing_layers:
        sizes |= {"k_proj": width, "v_proj": width}
    names = stacked("qkv", sizes, spec.qkv_bias)
    if spec.query_key_norm:
        names |= renamed({"query_norm": "q_norm"})
        if "k_proj" in sizes:
            names |= renamed({"key_norm": "k_norm"})
    return names


def latent_names(latent: Latent, bias: bool) -> Names:
    """The projections before a layer's latent attention under DeepSeek's names."""
    names = renamed({"latent_norm": "kv_a_layernorm", "key_value_up": "kv_b_proj"})
    biased = {"key_value_down": "kv_a_proj_with_mqa"}
    if latent.query_rank is None:
        names |= renamed({"query": "q_proj"})
    else:
        biased["query_down"] = "q_a_proj"
        names |= renamed({"query_norm": "q_a_layernorm", "query": "q_b_proj"})
    return names | renamed(biased, bias)


def gated_mlp_names(intermediate_size: int, bias: bool) -> Names:
    """gate_proj, up_proj and down_proj of an MLP."""
    sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
    return stacked("up", sizes, bias) | renamed({"down": "down_proj"}, bias)


def expert_names(experts: Experts) -> Names:
    """Router, experts and shared expert of a layer."""
    names = renamed({"router": "gate"})
    if experts.scoring == "sigmoid":
        names["choice_bias"] = (Part("gate.e_score_correction_bias"),)
    expert = gated_mlp_names(experts.intermediate_size, False)
    for number in range(experts.num_experts):
        names |= within(f"experts.{number}", f"experts.{number}", expert)
    if experts.shared_intermediate_size:
        shared = gated_mlp_names(experts.shared_intermediate_size, False)
        names |= within("shared", "shared_experts", shared)
    return names


def llama_names(spec: ModelSpec) -> Names:
    """Every parameter of a decoder with Llama's checkpoint layout."""
    norms, latent, experts = _FOUR_NORMS if spec.branch_norms else _NORMS, spec.latent, spec.experts
    names = renamed({"token_embedding": "model.embed_tokens", "final_norm": "model.norm"})
    for layer in range(spec.num_layers):
        attention = (
            attention_names(spec, layer) if latent is None else latent_names(latent, spec.qkv_bias)
        ) | renamed({"out": "o_proj"}, spec.out_bias)
        mlp = (
            gated_mlp_names(spec.intermediate_size_of(layer), spec.mlp_bias)
            if experts is None or layer < experts.first_layer
            else expert_names(experts)
        )
        block = renamed(norms) | within("attention", "self_attn", attention)
        block |= within("mlp", "mlp", mlp)
        names |= within(f"blocks.{layer}", f"model.layers.{layer}", block)
    return names
