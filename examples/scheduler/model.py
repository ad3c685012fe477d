"""The demo's model for many sequences at once, so that what a token gets does not depend on the others.

A matrix product of BLAS may round a row differently if there are more rows, or the row is at another place among them. Here
all products have shapes that depend on nothing but a token's position, and all sums run along one token's own numbers. So
the logits of a token, and its keys and values, are the same to the last bit in a batch of any composition, in any chunk of a
prompt, and behind any prefix that was computed before. BLAS must run one thread (`OPENBLAS_NUM_THREADS=1`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.model import Array, KvMemory, Llama, PagedCache, rms_norm, rotate, silu
from support.worker import digest

from .records import OnLayer, Part, Sample

#: The rows of every product with weights; missing ones are zeros.
ROWS = 16


class BatchedLlama:
    """The model over a pool's memory.

    :param model: the model of the demo.
    :param memory: the keys and values, see `PagedCache`.
    """

    def __init__(self, model: Llama, memory: KvMemory) -> None:
        self.model = model
        self.memory = memory

    def step(self, parts: Sequence[Part], on_layer: OnLayer | None = None) -> list[Sample]:
        """Compute parts of different sequences, and return the likeliest next token of each."""
        logits = self.logits(parts, [len(part.tokens) - 1 for part in parts], on_layer)
        return [sample(rows[0]) for rows in logits]

    def logits(self, parts: Sequence[Part], wanted: Sequence[int], on_layer: OnLayer | None = None) -> list[Array]:
        """Compute parts of different sequences, and return for each part the logits of its tokens from `wanted` on."""
        config, weights = self.model.config, self.model.weights
        spans, after = [], 0
        for part in parts:
            spans.append(slice(after, after := after + len(part.tokens)))
        positions = np.concatenate([np.arange(part.start, part.start + len(part.tokens)) for part in parts])
        rotation = self.model.rotations[positions]
        caches = [PagedCache(self.memory, part.table) for part in parts]
        hidden: Array = weights.embedding[[token for part in parts for token in part.tokens]]
        for number, layer in enumerate(weights.layers):
            normed = rms_norm(hidden, layer.attention_norm, config.norm_epsilon)
            queries = rotate(_by_head(multiply(normed, layer.query), config.heads), rotation)
            keys = rotate(_by_head(multiply(normed, layer.key), config.kv_heads), rotation)
            values = _by_head(multiply(normed, layer.value), config.kv_heads)
            for part, span, cache in zip(parts, spans, caches, strict=True):
                cache.write(number, part.start, keys[span], values[span])
            if on_layer:
                on_layer(number)
            attended = np.empty_like(queries)
            for part, span, cache in zip(parts, spans, caches, strict=True):
                attended[span] = attend(queries[span], part.start, cache, number)
            hidden += multiply(attended.reshape(len(hidden), -1), layer.output)
            normed = rms_norm(hidden, layer.mlp_norm, config.norm_epsilon)
            hidden += multiply(silu(multiply(normed, layer.gate)) * multiply(normed, layer.up), layer.down)
        ends = [hidden[span][first:] for span, first in zip(spans, wanted, strict=True)]
        last = rms_norm(np.concatenate(ends), weights.final_norm, config.norm_epsilon)
        return np.split(multiply(last, weights.unembedding), np.cumsum([len(rows) for rows in ends])[:-1])


def sample(logits: Array) -> Sample:
    """Return the likeliest token."""
    return Sample(int(logits.argmax()), digest(logits))


def multiply(x: Array, weights: Array) -> Array:
    """Return ``x @ weights.T`` for `x` (rows, in) and `weights` (out, in), with each row's result independent of the others.

    The rows are the columns of the right operand: then BLAS computes all `ROWS` of them alike, wherever they are.
    """
    tiles = np.zeros((-(-len(x) // ROWS), ROWS, x.shape[1]), np.float32)
    tiles.reshape(-1, x.shape[1])[: len(x)] = x
    product = np.ascontiguousarray((weights @ tiles.swapaxes(1, 2)).swapaxes(1, 2))
    return product.reshape(-1, len(weights))[: len(x)]


def attend(queries: Array, start: int, cache: PagedCache, layer: int) -> Array:
    """Return the attention of tokens at `start`, `start + 1`, ... to all up to themselves.

    A token looks at whole blocks, up to the end of its own one, where it gives the tokens behind it the weight 0.

    :param queries: (tokens, heads, head_dim).
    """
    end, size = start + len(queries), cache.block_tokens
    blocks = cache.table[: -(-end // size)]
    keys, values = (
        np.ascontiguousarray(part.take(blocks, axis=0).reshape(-1, *part.shape[2:]).swapaxes(0, 1))
        for part in cache.memory[layer]
    )
    values[:, end:] = 0  # they may be anything, but 0 times infinity is not 0
    output = np.empty_like(queries)
    for first in range(start // size * size, end, size):
        rows = slice(max(first, start) - start, min(first + size, end) - start)
        positions = np.arange(start, end)[rows]
        visible = first + size
        output[rows] = _attend(queries[rows], positions, keys[:, :visible], values[:, :visible])
    return output


def _attend(queries: Array, positions: np.ndarray, keys: Array, values: Array) -> Array:
    """A product for each token and head of keys: (queries of the head, head_dim) with (head_dim, visible)."""
    tokens, _, head_dim = queries.shape
    scaled = (queries * np.float32(head_dim**-0.5)).reshape(tokens, len(keys), -1, head_dim)
    scores = scaled @ keys.swapaxes(1, 2)
    hidden = np.arange(keys.shape[1]) > positions[:, np.newaxis]
    scores = np.where(hidden[:, np.newaxis, np.newaxis], np.float32(-np.inf), scores)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    mean: Array = weights @ values / weights.sum(axis=-1, keepdims=True)
    return mean.reshape(queries.shape)


def _by_head(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1)
