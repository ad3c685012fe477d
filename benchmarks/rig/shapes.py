"""The KV caches of public models, as one of several ranks holds them."""

from __future__ import annotations

from dataclasses import dataclass

from hixl_async.kv import Group

__all__ = ["SHAPES", "Shape"]


@dataclass(frozen=True)
class Shape:
    """One model's cache, of 2-byte elements, and the cost of prefilling a token."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    #: Parameters that are used for a token, in billions.
    active: float
    #: True for a latent instead of keys and values; every rank holds all of it.
    latent: bool = False

    def group(self, ranks: int) -> Group:
        """Return what one of `ranks` holds, as a group of its own.

        A latent of 512 + 64 elements counts as two halves of 288: the same bytes, in as many runs.
        """
        if self.latent:
            return Group.attention(self.layers, 1, self.head_dim // 2, "bfloat16")
        return Group.attention(self.layers, max(1, self.kv_heads // ranks), self.head_dim, "bfloat16")

    def layer_seconds(self, tokens: int, ranks: int, flops: float) -> float:
        """Return the seconds that `ranks` devices of `flops` each take for a layer of a prompt, two operations a parameter."""
        return 2e9 * self.active * tokens / (ranks * flops) / self.layers


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("SmolLM2-135M", 30, 3, 64, 0.135),
        Shape("Llama-3-8B", 32, 8, 128, 8),
        Shape("Llama-3-70B", 80, 8, 128, 70),
        Shape("Qwen3-235B-A22B", 94, 4, 128, 22),
        Shape("DeepSeek-V3", 61, 1, 576, 37, latent=True),
    )
}
