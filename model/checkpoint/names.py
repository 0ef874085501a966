"""The tensors of a checkpoint from which a decoder's parameters are made, as data, and the naming
that most families share.

It knows names and row counts; it knows nothing of files, tensors and torch.
"""

from dataclasses import dataclass

from model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """The type of a checkpoint tensor by the name its format gives it, its shape, and its place in
    its file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
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


def stacked(ours: str, theirs: dict[str, int], bias: bool) -> Names:
    """A linear layer that stacks several of the checkpoint's: checkpoint module -> its rows, in the
    decoder's order.
    """
    return {
        f"{ours}.{kind}": tuple(Part(f"{name}.{kind}", rows) for name, rows in theirs.items())
        for kind in KINDS[: 1 + bias]
    }


def outer_names(spec: ModelSpec) -> Names:
    """Embedding, final norm and head under Llama's names."""
    modules = {"token_embedding": "model.embed_tokens", "final_norm": "model.norm"}
    if not spec.tied_embeddings:
        modules["head"] = "lm_head"
    return renamed(modules)


def attention_names(spec: ModelSpec, ours: str, theirs: str, layer: int) -> Names:
    """q_proj of a layer, where it stores keys and values k_proj and v_proj, and the norms of
    queries and keys.
    """
    width = spec.head_dim_of(layer)
    sizes = {"q_proj": spec.num_query_heads * width}
    if layer < spec.num_storing_layers:
        sizes |= {"k_proj": width, "v_proj": width}
    names = stacked(
        f"{ours}.qkv", {f"{theirs}.{name}": rows for name, rows in sizes.items()}, spec.qkv_bias
    )
    if spec.query_key_norm:
        names |= renamed({f"{ours}.query_norm": f"{theirs}.q_norm"})
        if "k_proj" in sizes:
            names |= renamed({f"{ours}.key_norm": f"{theirs}.k_norm"})
    return names


def latent_names(spec: ModelSpec, ours: str, theirs: str, layer: int) -> Names:
    """The projections before a layer's latent attention under DeepSeek's names."""
    assert spec.latent is not None
    names = renamed(
        {
            f"{ours}.latent_norm": f"{theirs}.kv_a_layernorm",
            f"{ours}.key_value_up": f"{theirs}.kv_b_proj",
        }
    )
    biased = {f"{ours}.key_value_down": f"{theirs}.kv_a_proj_with_mqa"}
    if spec.latent.query_rank is None:
        names |= renamed({f"{ours}.query": f"{theirs}.q_proj"})
    else:
        biased[f"{ours}.query_down"] = f"{theirs}.q_a_proj"
        names |= renamed(
            {f"{ours}.query_norm": f"{theirs}.q_a_layernorm", f"{ours}.query": f"{theirs}.q_b_proj"}
        )
    return names | renamed(biased, spec.qkv_bias)


def gated_mlp_names(ours: str, theirs: str, intermediate_size: int, bias: bool) -> Names:
    """gate_proj, up_proj and down_proj of an MLP."""
    names = stacked(
        f"{ours}.up",
        {f"{theirs}.{name}": intermediate_size for name in ("gate_proj", "up_proj")},
        bias,
    )
    return names | renamed({f"{ours}.down": f"{theirs}.down_proj"}, bias)


def expert_names(spec: ModelSpec, ours: str, theirs: str) -> Names:
    """Router, experts and shared expert of a layer."""
    experts = spec.experts
    assert experts is not None
    names = renamed({f"{ours}.router": f"{theirs}.gate"})
    if experts.scoring == "sigmoid":
        names[f"{ours}.choice_bias"] = (Part(f"{theirs}.gate.e_score_correction_bias"),)
    for number in range(experts.num_experts):
        names |= gated_mlp_names(
            f"{ours}.experts.{number}",
            f"{theirs}.experts.{number}",
            experts.intermediate_size,
            False,
        )
    if experts.shared_intermediate_size:
        names |= gated_mlp_names(
            f"{ours}.shared", f"{theirs}.shared_experts", experts.shared_intermediate_size, False
        )
    return names


def llama_names(spec: ModelSpec) -> Names:
    """Every parameter of a decoder with Llama's checkpoint layout."""
    norms = _FOUR_NORMS if spec.branch_norms else _NORMS
    attention = attention_names if spec.latent is None else latent_names
    names = outer_names(spec)
    for layer in range(spec.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        names |= renamed({f"{ours}.{norm}": f"{theirs}.{name}" for norm, name in norms.items()})
        names |= attention(spec, f"{ours}.attention", f"{theirs}.self_attn", layer)
        names |= renamed({f"{ours}.attention.out": f"{theirs}.self_attn.o_proj"}, spec.out_bias)
        if spec.experts is not None and layer >= spec.experts.first_layer:
            names |= expert_names(spec, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            names |= gated_mlp_names(
                f"{ours}.mlp", f"{theirs}.mlp", spec.intermediate_size_of(layer), spec.mlp_bias
            )
    return names
