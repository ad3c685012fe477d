"""The descriptions of a pool's views, which the two sides of a stream exchange.  Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import InvalidArgumentError, ProtocolError
from .fields import canonical, field, parse_shard, shard_body
from .shapes import Group, Part, Place, Strides, View

__all__ = ["describe", "describe_groups", "differences", "fingerprint", "parse_groups", "parse_views"]


def describe_groups(groups: Iterable[Group]) -> list[Any]:
    """Return groups as JSON-safe lists."""
    return [
        [
            list(group.layers),
            group.window,
            [[part.name, part.heads, part.dim, part.dtype, part.replicated] for part in group.parts],
        ]
        for group in groups
    ]


def parse_groups(body: Any) -> list[Group]:
    """Return the groups that a peer describes.

    :raises ProtocolError: if the description is malformed.
    """
    try:
        return [Group(_numbers(layers), map(_parse_part, parts), window=window) for layers, window, parts in body]
    except (InvalidArgumentError, TypeError, ValueError) as error:
        raise ProtocolError(f"a peer's description of its KV cache is malformed: {error}") from None


def _parse_part(body: Any) -> Part:
    name, heads, dim, dtype, replicated = body
    _numbers([heads, dim])
    return Part(name, heads, dim, dtype, replicated=replicated)


def describe(views: Iterable[View]) -> list[dict[str, Any]]:
    """Return views as JSON-safe dicts."""
    return [
        {
            "group": describe_groups([view.group])[0],
            "shard": shard_body(view.shard),
            "blocks": view.blocks,
            "block_tokens": view.block_tokens,
            "places": [[number for place in view.places[layer] for number in place] for layer in view.shard.layers],
            "strides": [list(strides) for strides in view.strides],
        }
        for view in views
    ]


def parse_views(body: Any) -> tuple[View, ...]:
    """Return the views that a peer describes.

    :raises ProtocolError: if the description is malformed.
    """
    if not isinstance(body, list) or not body or not all(isinstance(view, dict) for view in body):
        raise ProtocolError("a peer's description of its KV cache is not a list of views")
    try:
        return tuple(_parse_view(view) for view in body)
    except (InvalidArgumentError, TypeError, ValueError) as error:
        raise ProtocolError(f"a peer's description of its KV cache is malformed: {error}") from None


def _parse_view(body: Any) -> View:
    (group,) = parse_groups([field(body, "group", list)])
    shard = parse_shard(field(body, "shard", list))
    places = {
        layer: [Place(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
        for layer, flat in zip(shard.layers, map(_numbers, field(body, "places", list)), strict=True)
    }
    strides = [Strides(*_numbers(numbers)) for numbers in field(body, "strides", list)]
    blocks, block_tokens = _numbers([body.get("blocks"), body.get("block_tokens")])
    return View(group, shard, blocks, block_tokens, places, strides)


def _numbers(items: Any) -> list[int]:
    if not isinstance(items, list) or any(type(item) is not int or not 0 <= item < 1 << 62 for item in items):
        raise ProtocolError("a peer's description of its KV cache has a number out of range")
    return items


def fingerprint(description: Sequence[Any]) -> str:
    """Return a hash of 16 hexadecimal digits, equal for equal descriptions in every process and on every host."""
    return hashlib.sha256(canonical(description)).hexdigest()[:16]


def differences(sources: Sequence[Group], targets: Sequence[Group]) -> list[str]:
    """Return what keeps a cache of some groups from streaming to another's, in words; an empty list if nothing does."""
    if len(sources) != len(targets):
        return [f"the source has {len(sources)} groups of layers and the target {len(targets)}"]
    return [found for source, target in zip(sources, targets, strict=True) for found in source.differences(target)]
