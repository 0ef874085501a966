"""What every formulation shares: checks of shapes and masks, and a softmax that gives fully masked rows the value zero.

A mask is boolean (True: may be attended to) or additive (added to the logits; -inf hides). The shapes that occur are causal
[1, 1, n, m], padding [b, 1, 1, m] and full [b, h, n, m]; anything that broadcasts to [b, h, n, m] is taken.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """Boolean [1, 1, n, m]: query i is the key at position m - n + i, and sees that one and all before. Raises ValueError if n > m."""
    if num_queries > num_keys:
        raise ValueError(f"{num_queries} queries cannot be the last of {num_keys} keys")
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)[None, None]


def padding_mask(lengths_b: Tensor, num_keys: int) -> Tensor:
    """Boolean [b, 1, 1, m]: sequence i has its first `lengths_b[i]` keys, the rest are padding."""
    return (torch.arange(num_keys) < lengths_b[:, None])[:, None, None, :]


def attention_weights(logits_bhnm: Tensor, mask: Tensor | None) -> Tensor:
    """softmax over m of the masked logits; a row that may attend to nothing has weights zero. Raises ValueError for a mask that does
    not broadcast to the logits' shape.
    """
    if mask is None:
        return logits_bhnm.softmax(dim=-1)
    try:
        fits = torch.broadcast_shapes(mask.shape, logits_bhnm.shape) == logits_bhnm.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"a mask of shape {list(mask.shape)} does not broadcast to the logits' [b, h, n, m] = {list(logits_bhnm.shape)}")
    masked_bhnm = logits_bhnm.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits_bhnm + mask
    # softmax of a row of -inf is NaN; such a row has no keys, and an empty sum is zero.
    hidden_bhn1 = (masked_bhnm == -torch.inf).all(dim=-1, keepdim=True)
    return masked_bhnm.masked_fill(hidden_bhn1, 0.0).softmax(dim=-1).masked_fill(hidden_bhn1, 0.0)


def checked_dropout(dropout: float) -> float:
    """`dropout`. Raises ValueError where it is no probability below 1."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    return dropout


def dropped(weights: Tensor, dropout: float, training: bool) -> Tensor:
    """Attention dropout: a share of the weights set to zero, the rest scaled up, in training alone. Raises ValueError outside [0, 1)."""
    return F.dropout(weights, checked_dropout(dropout), training)


def head_size(model_size: int, num_heads: int) -> int:
    """model_size / num_heads. Raises ValueError naming both where that is no integer."""
    if num_heads < 1 or model_size % num_heads:
        raise ValueError(f"the model size {model_size} is not a multiple of the number of heads {num_heads}")
    return model_size // num_heads


def check_shape(name: str, tensor: Tensor, letters: str, **sizes: int) -> None:
    """Raises ValueError naming the tensor, the shape it should have and the one it has, where any axis in `sizes` differs."""
    expected = [sizes.get(letter) for letter in letters]
    found = list(tensor.shape)
    if len(found) != len(expected) or any(want is not None and want != have for want, have in zip(expected, found, strict=True)):
        wanted = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in zip(letters, expected, strict=True))
        raise ValueError(f"{name} must have shape [{wanted}], found {found}")
