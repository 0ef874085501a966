"""ModelSpec: what a decoder is, as data.

A family module turns a checkpoint's config.json into one of these; the decoder is built from it and
from nothing else. Invariant: there is exactly one key/value head. It knows no file names, no
tensors and no torch.
"""

from dataclasses import dataclass


class OptionError(ValueError):
    """Options that contradict each other, the data or the hardware; the message names them."""


class CheckpointError(Exception):
    """A checkpoint folder that cannot be served; the message names the file and key, what was
    expected and what was found.
    """


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021): pair i of the rotated columns turns by position *
    inverse_frequencies[i] radians.
    """

    inverse_frequencies: tuple[float, ...]
    """0 for a pair that does not turn."""
    scale: float = 1.0
    """Multiplies cosine and sine (YaRN, Peng et al. 2023, section 3.4)."""
    interleaved: bool = False
    """Pairs are columns (0, 1), (2, 3), ...; otherwise column i and the one half the width after
    it."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Absorbed, it is
    multi-query attention: one key of `rank` + `rotary_dim` columns, of which the first `rank` are
    the value.
    """

    rank: int
    query_rank: int | None
    """None: queries are projected directly."""
    plain_dim: int
    """Columns of a query head that carry no position."""
    rotary_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Columns of a query head."""
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in every layer from `first_layer` on (DeepSeekMoE, arXiv 2401.06066;
    V3's routing, 2412.19437).
    """

    first_layer: int
    num_experts: int
    num_chosen: int
    intermediate_size: int
    shared_intermediate_size: int
    """The size of the MLP that every token passes; 0 if there is none."""
    scoring: str
    """softmax, or sigmoid with a bias that affects only which experts are chosen."""
    num_groups: int
    num_chosen_groups: int
    normalised: bool
    """The chosen experts' weights are divided by their sum."""
    scale: float


@dataclass(frozen=True, slots=True)
class PooledLayer:
    """A linear layer that a text's pooled state passes; `name` is the checkpoint's module."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    activation: str = "none"
    """none or tanh."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a model makes of a text in place of a next token: one vector."""

    over: str
    """The state that passes the layers: the mean of all tokens' (`mean`) or the last token's
    (`last`)."""
    layers: tuple[PooledLayer, ...] = ()
    labels: tuple[str, ...] = ()
    """What the vector's numbers are logits of; empty where the vector is an embedding."""
    scores: str = ""
    """What makes probabilities of these logits: softmax, sigmoid or none."""

    def size(self, hidden_size: int) -> int:
        """Numbers of the vector."""
        return self.layers[-1].outputs if self.layers else hidden_size


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions and switches of one decoder. Sizes are counts of elements. The defaults are
    GPT-2's block.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_query_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_epsilon: float
    activation: str
    attention_scale: float
    tied_embeddings: bool
    end_token_ids: tuple[int, ...] = ()
    norm: str = "layer_norm"
    """layer_norm, or rms_norm (Zhang and Sennrich 2019)."""
    norm_offset: float = 0.0
    """Added to the weights of an RMS norm: 1 if the checkpoint stores weights minus 1."""
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    gated_mlp: bool = False
    """activation(x W_gate) * (x W_up) instead of activation(x W_up) (Shazeer 2020, arXiv
    2002.05202)."""
    parallel: bool = False
    """Attention and MLP read the same state and are added together (GPT-J); else one after the
    other."""
    shared_norm: bool = False
    """In a parallel block, the MLP reads the output of the attention's norm."""
    branch_norms: bool = False
    """The outputs of attention and MLP are normalised before they are added."""
    query_key_norm: bool = False
    """Each query head and the key are normalised before they are rotated."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    rotary: Rotary | None = None
    """None: learned positions, added to the embedding."""
    window_rotary: Rotary | None = None
    """The rotary embedding of layers with a window, if it differs."""
    windows: tuple[int | None, ...] = ()
    """For each layer the number of keys a token attends to, its own included; None, or an empty
    tuple, is no limit."""
    wide_head_dim: int | None = None
    """Columns of a head in layers without a window, if others have `head_dim`."""
    value_norm: bool = False
    """The value is normalised, by an RMS norm without weights."""
    kv_sources: tuple[int, ...] = ()
    """For each layer the one whose keys and values it reads; an empty tuple: each has its own. Own
    ones come first: no layer after one that reads another's has its own."""
    intermediate_sizes: tuple[int, ...] = ()
    """For each layer, if not all have `intermediate_size`."""
    layer_input_size: int = 0
    """Columns that every layer is given of each token, which depend on its id and its embedding
    alone; 0: none."""
    layer_input_vocab_size: int = 0
    """Rows of the table of these."""
    layer_scale: bool = False
    """The residual stream is multiplied by a number of its own after each layer."""
    logit_cap: float | None = None
    """Logits z become cap * tanh(z / cap)."""
    backbone_size: int = 0
    """Hidden size of another model for which this one drafts tokens: its input are that model's
    embeddings and states, and all its layers read that model's keys and values."""
    latent: Latent | None = None
    experts: Experts | None = None
    pooling: Pooling | None = None
    bidirectional: bool = False
    """A token attends to those after it as to those before it; a window counts both ways."""
    num_unread_layers: int = 0
    """Layers after the last that a checkpoint may hold and that are not read: they predict further
    tokens."""

    @property
    def is_whole(self) -> bool:
        """Whether all tokens of a text have to be computed in one step."""
        return self.bidirectional or (self.pooling is not None and self.pooling.over == "mean")

    def window(self, layer: int) -> int | None:
        """The number of keys a token attends to in this layer, its own included; None is no
        limit.
        """
        return self.windows[layer] if self.windows else None

    def head_dim_of(self, layer: int) -> int:
        """Columns of a query head of this layer."""
        wide = self.wide_head_dim
        return self.head_dim if wide is None or self.window(layer) is not None else wide

    def intermediate_size_of(self, layer: int) -> int:
        """Columns within the MLP of this layer."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    @property
    def num_storing_layers(self) -> int:
        """Layers, the first ones, that have keys and values of their own. Of a token whose logits
        are not wanted nothing else is computed.
        """
        if self.backbone_size:
            return 0
        return len(set(self.kv_sources)) if self.kv_sources else self.num_layers

    def kv_columns_of(self, layer: int) -> tuple[int, int, bool]:
        """Columns of a cached key and of a value of this layer, and whether the value is the first
        columns of the key and takes no memory of its own.
        """
        if self.latent is not None:
            return self.latent.rank + self.latent.rotary_dim, self.latent.rank, True
        return self.head_dim_of(layer), self.head_dim_of(layer), False

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes over all layers, as long as it is within every
        layer's window. With latent attention the value lies in the key.
        """
        kept = map(self.kv_columns_of, range(self.num_storing_layers))
        return itemsize * sum(key + (0 if in_key else value) for key, value, in_key in kept)

    def contexts(self, most: int = 0) -> list[int]:
        """Context lengths for tables: powers of two from 512 up to the longest, and that one;
        `most`, or the model's maximum.
        """
        most = most or self.max_positions
        return [*(2**k for k in range(9, most.bit_length()) if 2**k < most), most]

    def multi_head_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that the same token would occupy with a key and a value for every query head."""
        latent = self.latent
        numbers = (
            sum(2 * self.head_dim_of(layer) for layer in range(self.num_storing_layers))
            if latent is None
            else self.num_layers * (latent.head_dim + latent.value_dim)
        )
        return self.num_query_heads * numbers * itemsize
