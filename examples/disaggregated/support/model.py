"""The Llama forward pass in numpy, over paged key/value memory that belongs to the caller.

For every token, each layer computes a key and a value, which all later tokens attend to. They are kept, and
for a request that moves from a prefill to a decode process, they are what must move. So here the *caller*
provides the memory they are kept in, a pool of blocks that may be shared or registered with a transfer
engine, and :meth:`Llama.forward` calls ``on_layer(i)`` as soon as layer ``i``'s keys and values are there:
before that layer's attention and MLP run. A transfer that starts then overlaps the rest of the computation.

The same tokens give bit-identical logits whichever blocks hold the keys and values, and in whichever
process, provided that the prompt is cut into the same chunks, the memory has the same dtype, and BLAS runs
one thread in each process (set ``OPENBLAS_NUM_THREADS=1`` before numpy is first imported).

The architecture is that of `Llama 2 <https://arxiv.org/abs/2307.09288>`_: RMSNorm, rotary positions,
grouped-query attention and a SwiGLU MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .weights import Config, Weights

Array = npt.NDArray[np.float32]
Rotations = npt.NDArray[np.complex64]
KvMemory = npt.NDArray[np.floating[Any]]

OnLayer = Callable[[int], None]
"""Called with a layer's number, in the thread that computes."""

# Scores are made for so many queries at a time: enough to keep the matrix products large, few enough that a
# long prompt needs neither a square of scores nor much work on keys that the causal mask then hides.
_ROWS_AT_ONCE = 64


class Segment(NamedTuple):
    """A run of bytes in K/V memory."""

    offset: int
    """From the first byte of the memory."""
    length: int


class PagedCache:
    """One sequence's keys and values, in blocks of a pool.

    :param memory: the pool, float32 or float16, of shape (layers, 2, blocks, block_tokens, kv_heads,
        head_dim), see :meth:`weights.Config.kv_shape`; index 0 of the second axis is for keys, 1 for
        values. It is used in place.
    :param table: the numbers of this sequence's blocks: token ``t`` lies in block number
        ``table[t // block_tokens]``.
    :raises ValueError: if the memory has another shape or dtype, if its blocks aren't contiguous, or if the
        table names a block twice or one that isn't there.
    """

    def __init__(self, memory: KvMemory, table: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        if memory.ndim != 6 or memory.shape[1] != 2:
            raise ValueError(
                "K/V memory must have the shape (layers, 2, blocks, block_tokens, kv_heads, head_dim), "
                f"not {memory.shape}"
            )
        if memory.dtype not in (np.float32, np.float16):
            raise ValueError(f"K/V memory must be float32 or float16, not {memory.dtype}")
        if not memory[0, 0, 0].flags.c_contiguous or min(memory.strides) < 0:
            raise ValueError("every block of the K/V memory must be contiguous, and no axis reversed")
        blocks = np.asarray(table, dtype=np.intp).reshape(-1)
        if np.unique(blocks).size != blocks.size:
            raise ValueError("the block table names a block twice")
        if blocks.size and (blocks.min() < 0 or blocks.max() >= memory.shape[2]):
            raise ValueError(f"the block table names a block outside of the pool's 0..{memory.shape[2] - 1}")
        self.memory = memory
        self.table = blocks
        self.block_tokens: int = memory.shape[3]

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks can hold."""
        return int(self.table.size) * self.block_tokens

    def write(self, layer: int, start: int, keys: Array, values: Array) -> None:
        """Put the keys and values of tokens ``start, start + 1, ...`` into their blocks.

        :param keys: (tokens, kv_heads, head_dim), as ``values``.
        :raises ValueError: if the blocks are too few.
        """
        positions = np.arange(start, start + len(keys))
        self._require(start + len(keys))
        blocks = self.table[positions // self.block_tokens]
        rows = positions % self.block_tokens
        self.memory[layer, 0, blocks, rows] = keys
        self.memory[layer, 1, blocks, rows] = values

    def read(self, layer: int, tokens: int) -> tuple[Array, Array]:
        """Return the keys and values of the first ``tokens`` tokens, each (tokens, kv_heads, head_dim).

        They are copies in token order. Their layout doesn't depend on the table, so neither do the products
        that BLAS makes of them, to the last bit.

        :raises ValueError: if the blocks are too few.
        """
        self._require(tokens)
        return self._gather(self.memory[layer, 0], tokens), self._gather(self.memory[layer, 1], tokens)

    def segments(self, layer: int, tokens: int) -> list[Segment]:
        """Return where the keys, then the values, of the first ``tokens`` tokens lie: one segment per block.

        Two caches of equal shape and dtype give lists that match one to one, whatever their tables; the
        last segment of either half ends with the last token.

        :raises ValueError: if the blocks are too few.
        """
        self._require(tokens)
        layer_stride, half_stride, block_stride, token_stride = self.memory.strides[:4]
        return [
            Segment(
                offset=layer * layer_stride + half * half_stride + int(block) * block_stride,
                length=min(tokens - first, self.block_tokens) * token_stride,
            )
            for half in (0, 1)
            for first, block in zip(range(0, tokens, self.block_tokens), self.table, strict=False)
        ]

    def _gather(self, pool: KvMemory, tokens: int) -> Array:
        blocks = self.table[: blocks_needed(tokens, self.block_tokens)]
        in_order = pool.take(blocks, axis=0).reshape(-1, *pool.shape[2:])
        return in_order[:tokens].astype(np.float32, copy=False)

    def _require(self, tokens: int) -> None:
        if tokens > self.capacity:
            raise ValueError(f"{tokens} tokens don't fit in {self.table.size} blocks of {self.block_tokens}")


def blocks_needed(tokens: int, block_tokens: int) -> int:
    """Return how many blocks of ``block_tokens`` tokens hold ``tokens`` tokens."""
    return -(-tokens // block_tokens)


class Llama:
    """The model. It holds no state besides the weights, so several caches may be used in turn."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.rotations = rotations(config.context_length, config.head_dim, config.rope_base)

    def forward(
        self,
        tokens: Sequence[int],
        cache: PagedCache,
        *,
        start: int = 0,
        on_layer: OnLayer | None = None,
        on_layer_done: OnLayer | None = None,
    ) -> Array:
        """Run ``tokens`` at positions ``start, start + 1, ...``.

        :param cache: holds the keys and values of the ``start`` tokens before; those of ``tokens`` are added.
        :param on_layer: called when a layer's keys and values are in the cache, before its attention and MLP.
        :param on_layer_done: called when all of a layer is computed.
        :return: the logits (vocabulary,) of the token that comes next.
        :raises ValueError: if there are no tokens, an id is not in the vocabulary, the cache's blocks are
            too few, or the model's context is too short.
        """
        config, weights = self.config, self.weights
        ids = np.asarray(tokens, dtype=np.intp)
        end = start + len(ids)
        self._check(ids, end, cache)
        rotation = self.rotations[start:end]
        hidden: Array = weights.embedding[ids]
        for number, layer in enumerate(weights.layers):
            normed = rms_norm(hidden, layer.attention_norm, config.norm_epsilon)
            queries = rotate(_by_head(normed @ layer.query.T, config.heads), rotation)
            keys = rotate(_by_head(normed @ layer.key.T, config.kv_heads), rotation)
            values = _by_head(normed @ layer.value.T, config.kv_heads)
            cache.write(number, start, keys, values)
            if on_layer:
                on_layer(number)
            attended = attention(queries, *cache.read(number, end))
            hidden += attended.reshape(len(ids), -1) @ layer.output.T
            normed = rms_norm(hidden, layer.mlp_norm, config.norm_epsilon)
            hidden += (silu(normed @ layer.gate.T) * (normed @ layer.up.T)) @ layer.down.T
            if on_layer_done:
                on_layer_done(number)
        last = rms_norm(hidden[-1], weights.final_norm, config.norm_epsilon)
        logits: Array = weights.unembedding @ last
        return logits

    def _check(self, ids: npt.NDArray[np.intp], end: int, cache: PagedCache) -> None:
        config = self.config
        if not ids.size:
            raise ValueError("there are no tokens to run")
        if ids.min() < 0 or ids.max() >= config.vocabulary_size:
            raise ValueError(f"token ids must be within 0..{config.vocabulary_size - 1}")
        if end > config.context_length:
            raise ValueError(f"{end} tokens are more than the model's context of {config.context_length}")
        blocks, block_tokens = cache.memory.shape[2:4]
        if cache.memory.shape != config.kv_shape(blocks, block_tokens):
            raise ValueError(
                f"K/V memory of shape {cache.memory.shape} is not of this model, "
                f"which needs {config.kv_shape(blocks, block_tokens)}"
            )
        if end > cache.capacity:
            raise ValueError(f"{end} tokens don't fit in {cache.table.size} blocks of {block_tokens}")


def generate(
    model: Llama,
    prompt: Sequence[int],
    cache: PagedCache,
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    on_layer: OnLayer | None = None,
    on_layer_done: OnLayer | None = None,
) -> Iterator[tuple[int, Array]]:
    """Prefill ``prompt``, then yield the likeliest next token and its logits (vocabulary,), repeatedly.

    Ends after ``max_tokens`` tokens or with a token of ``stop``, which still is yielded.

    :param on_layer: called during the prefill, see :meth:`Llama.forward`; likewise ``on_layer_done``.
    :raises ValueError: if the prompt or the cache doesn't suit the model, see :meth:`Llama.forward`.
    """
    if max_tokens < 1:
        return
    logits = model.forward(prompt, cache, on_layer=on_layer, on_layer_done=on_layer_done)
    token = int(logits.argmax())
    yield token, logits
    if token not in stop:
        yield from decode(model, token, cache, start=len(prompt), max_tokens=max_tokens - 1, stop=stop)


def decode(
    model: Llama,
    token: int,
    cache: PagedCache,
    *,
    start: int,
    max_tokens: int,
    stop: Collection[int] = (),
) -> Iterator[tuple[int, Array]]:
    """Go on from ``token`` at position ``start``, as a decode process does once it has the cache.

    Yields as :func:`generate` does, beginning with the token that comes after ``token``.

    :param cache: holds the keys and values of the ``start`` tokens before ``token``.
    :raises ValueError: if the cache's blocks or the model's context are too few for the next token.
    """
    for position in range(start, start + max_tokens):
        logits = model.forward([token], cache, start=position)
        token = int(logits.argmax())
        yield token, logits
        if token in stop:
            return


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Scale each row of ``x`` (..., size) to a root mean square of 1, each column by ``weight`` (size,).

    :source: https://arxiv.org/abs/1910.07467, equation 4.
    """
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return normed


def rotations(positions: int, head_dim: int, base: float) -> Rotations:
    """Return how each pair of a head turns at each position: complex (positions, head_dim / 2).

    Pair ``i`` turns by ``base ** (-2 i / head_dim)`` radians per position.

    :source: https://arxiv.org/abs/2104.09864, section 3.2.2.
    """
    # In float32, as the model was trained and as its other implementations compute.
    frequency = np.float32(base) ** (-np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    angle = np.arange(positions, dtype=np.float32)[:, np.newaxis] * frequency
    turned: Rotations = np.cos(angle) + np.complex64(1j) * np.sin(angle)
    return turned


def rotate(heads: Array, rotation: Rotations) -> Array:
    """Embed positions: turn ``heads`` (tokens, heads, head_dim) by ``rotation`` (tokens, head_dim / 2).

    Elements 2i and 2i+1 of a head are the two coordinates of pair i, as in the paper. (Hugging Face's
    weights pair i with i + head_dim / 2 instead; in the GGUF the rows of the query and key matrices
    were reordered accordingly.)
    """
    pairs: Rotations = heads.view(np.complex64)
    return (pairs * rotation[:, np.newaxis]).view(np.float32)


def silu(x: Array) -> Array:
    """``x * sigmoid(x)``, elementwise."""
    with np.errstate(over="ignore"):  # exp may reach infinity, and 1 / infinity is the 0 that is wanted
        activated: Array = x / (1 + np.exp(-x))
    return activated


def attention(queries: Array, keys: Array, values: Array) -> Array:
    """Causal grouped-query attention of the last tokens of a sequence to all up to themselves.

    :param queries: (tokens, heads, head_dim), of the last ``tokens`` positions.
    :param keys: (positions, kv_heads, head_dim), as ``values``.
    :return: (tokens, heads, head_dim): for each query, the mean of the values weighted by
        ``softmax(query . key / sqrt(head_dim))``.
    :source: https://arxiv.org/abs/1706.03762, section 3.2.1, and https://arxiv.org/abs/2305.13245 for the
        groups.
    """
    before = len(keys) - len(queries)
    output = np.empty_like(queries)
    for first in range(0, len(queries), _ROWS_AT_ONCE):
        rows = queries[first : first + _ROWS_AT_ONCE]
        visible = before + first + len(rows)
        output[first : first + len(rows)] = _attend(rows, keys[:visible], values[:visible])
    return output


def _attend(queries: Array, keys: Array, values: Array) -> Array:
    tokens, heads, head_dim = queries.shape
    positions, kv_heads, _ = keys.shape
    group = heads // kv_heads
    # One matrix product per K/V head, with the queries of all tokens and of all heads of its group as rows.
    scaled = queries * np.float32(head_dim**-0.5)
    rows = scaled.reshape(tokens, kv_heads, group, head_dim).swapaxes(0, 1).reshape(kv_heads, -1, head_dim)
    scores = rows @ keys.transpose(1, 2, 0)
    if tokens > 1:
        own = scores.reshape(kv_heads, tokens, group, positions)[..., positions - tokens :]
        own += np.triu(np.full((tokens, tokens), -np.inf, np.float32), k=1)[:, np.newaxis]
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    mean = weights @ values.swapaxes(0, 1) / weights.sum(axis=-1, keepdims=True)
    by_token: Array = mean.reshape(kv_heads, tokens, group, head_dim).swapaxes(0, 1)
    return by_token.reshape(tokens, heads, head_dim)


def _by_head(x: Array, heads: int) -> Array:
    return x.reshape(len(x), heads, -1)
