"""The comparison: every answer once more, in one process, without batches, chunks, prefixes and transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.model import Llama, PagedCache, blocks_needed
from support.worker import BLOCK_TOKENS, kv_digests

from .model import BatchedLlama, sample
from .records import Part


def differences(model: Llama, prompt: list[int], answer: list[list[Any]], digests: list[str]) -> list[str]:
    """Return what is different if a prompt and its answer are computed at once.

    The logits of each token of the answer depend on the tokens before only. So one pass over all of them gives what a process
    gets that generates one after the other, as long as each is the likeliest one.

    :param answer: the tokens, each with the digest of its logits.
    :param digests: of the keys and values of each layer.
    """
    tokens = prompt + [token for token, _ in answer[:-1]]
    blocks = blocks_needed(len(tokens), BLOCK_TOKENS)
    alone = BatchedLlama(model, np.zeros(model.config.kv_shape(blocks, BLOCK_TOKENS), np.float32))
    (logits,) = alone.logits([Part(0, tokens, 0, range(blocks))], [len(prompt) - 1])
    expected = [sample(row) for row in logits]
    found = []
    if [token for token, _ in answer] != [each.token for each in expected]:
        found.append("tokens")
    if [bits for _, bits in answer] != [each.logits for each in expected]:
        found.append("logits")
    if digests != kv_digests(PagedCache(alone.memory, range(blocks)), len(tokens)):
        found.append("keys and values")
    return found
