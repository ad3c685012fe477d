"""A tiny model with random weights. It talks nonsense at once, which is enough to test the way there."""

from __future__ import annotations

import numpy as np

from .tokenizer import Vocabulary, byte_alphabet
from .weights import Array, Checkpoint, Config, Weights

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|never|>")

CONFIG = Config(
    layers=6,
    hidden_size=96,
    mlp_size=192,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vocabulary_size=256 + len(_SPECIAL),
    context_length=4096,
    rope_base=10_000.0,
    norm_epsilon=1e-5,
    end_token=256 + len(_SPECIAL) - 1,
)


def load(seed: int = 0) -> Checkpoint:
    """Return the same model for the same seed, in every process."""
    return Checkpoint(CONFIG, Weights.from_tensors(_tensors(np.random.default_rng(seed))), _vocabulary())


def _vocabulary() -> Vocabulary:
    """One token for each byte, and the special ones of a chat."""
    alphabet = byte_alphabet()
    special = frozenset(range(256, CONFIG.vocabulary_size))
    return Vocabulary(tokens=(*(alphabet[byte] for byte in range(256)), *_SPECIAL), merges=(), special=special)


def _tensors(numbers: np.random.Generator) -> dict[str, Array]:
    def matrix(rows: int, columns: int) -> Array:
        return numbers.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    hidden, kv = CONFIG.hidden_size, CONFIG.kv_heads * CONFIG.head_dim
    norm = np.ones(hidden, np.float32)
    tensors = {"token_embd.weight": matrix(CONFIG.vocabulary_size, hidden), "output_norm.weight": norm}
    for layer in range(CONFIG.layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm,
            f"blk.{layer}.attn_q.weight": matrix(hidden, hidden),
            f"blk.{layer}.attn_k.weight": matrix(kv, hidden),
            f"blk.{layer}.attn_v.weight": matrix(kv, hidden),
            f"blk.{layer}.attn_output.weight": matrix(hidden, hidden),
            f"blk.{layer}.ffn_norm.weight": norm,
            f"blk.{layer}.ffn_gate.weight": matrix(CONFIG.mlp_size, hidden),
            f"blk.{layer}.ffn_up.weight": matrix(CONFIG.mlp_size, hidden),
            f"blk.{layer}.ffn_down.weight": matrix(hidden, CONFIG.mlp_size),
        }
    return tensors
