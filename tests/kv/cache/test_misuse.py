"""Wrong calls, and peers that send nonsense."""

from __future__ import annotations

import copy
import gc
import warnings
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hixl_async as hx
from hixl_async import ProtocolError
from hixl_async.kv import BlockTable, Shard
from hixl_async.kv.cache import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, CacheManager, CacheTask
from hixl_async.kv.cache.keys import key_body, parse_key
from hixl_async.kv.cache.messages import Describe, End, Grant, Link, Pull, Push, Stop, Unlink, parse, service
from hixl_async.kv.cache.place import Place
from hixl_async.testing import engine_pair, until

from .conftest import Managers
from .shapes import LEFT, RIGHT, view


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheKey(1), "either req_id"),
        (lambda: CacheKey(1, 2, 0, 3), "either req_id"),
        (lambda: CacheKey(-1, 2), "cluster_id must be in"),
        (lambda: CacheKey(1, 1 << 64), "req_id must be in"),
        (lambda: CacheKey(1, ""), "printable string"),
        (lambda: CacheKey(1, "x" * 257), "printable string"),
        (lambda: CacheKey(1, 2.5), "whole number"),  # type: ignore[arg-type]
        (lambda: CacheKeyByIdAndIndex(1, -1), "cache_id must be in"),
        (lambda: BlocksCacheKey(1, "m"), "model_id must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_malformed_keys(make: Any, message: str) -> None:
    with pytest.raises(hx.InvalidArgumentError, match=message):
        make()


KEYS = [
    CacheKey(1, 2, 3),
    CacheKey(1, "r", 3),
    CacheKey(1, prefix_id=4),
    BlocksCacheKey(1, 2),
    CacheKeyByIdAndIndex(1, 2, 3),
]
PLACE = Place(BlockTable([5, 2, 9], 4), (5, 7))
MESSAGES = [
    Link(4),
    Unlink(),
    Describe(3),
    *(Pull(2, key, PLACE) for key in KEYS),
    Pull(1, KEYS[0], None),
    Push(3, KEYS[1], Place(BlockTable([1])), Shard(1, 2, [0, 3]), "r", (3,), True),
    Push(3, KEYS[1], None, Shard(0, 1, [0]), None, (), False),
    End(3, "why"),
    Stop(3, ""),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_survive_their_encoding(message: Any) -> None:
    assert parse(message.body(), 1).body() == message.body()
    assert type(parse(message.body(), 1)) is type(message)


def test_replies_survive_their_encoding() -> None:
    grant = Grant(3, PLACE, -1, 1 << 63, 10, (Shard(1, 2, [0, 3]),))
    assert Grant.parse(grant.body()).body() == grant.body()
    assert all(parse_key(key_body(key), 1) == key for key in KEYS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 65), 1 << 65) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*MESSAGES, Grant(3, PLACE, -1, 1 << 63, 10, ())]), st.data())
def test_changed_messages_are_refused_or_understood(message: Any, data: st.DataObject) -> None:
    body = copy.deepcopy(message.body())
    name = data.draw(st.sampled_from(sorted(body)))
    if isinstance(body[name], list) and body[name] and data.draw(st.booleans()):
        body[name][data.draw(st.integers(0, len(body[name]) - 1))] = data.draw(JSON)
    else:
        body[name] = data.draw(JSON)
    with suppress(ProtocolError, hx.InvalidArgumentError):
        Grant.parse(body) if isinstance(message, Grant) else parse(body, 1)


async def test_a_peer_that_sends_nonsense(managers: Managers, loop_errors: list[dict[str, Any]]) -> None:
    (peer,) = managers.left.links.values()
    for body in ({}, {"say": "dance"}, {"say": "pull"}, {"say": "pull", "hold": 0, "key": ["x"], "place": []}):
        with pytest.raises(hx.RemoteError):
            await peer.request(service("cache"), body)
    loop_errors.clear()
    pull = Pull(7, RIGHT, Place(BlockTable([1])))
    await peer.request(service("cache"), pull.body())
    with pytest.raises(hx.InvalidArgumentError, match="hold 7 is in use"):
        await peer.request(service("cache"), pull.body())
    with pytest.raises(hx.RangeError, match="block 16 does not exist"):
        await peer.request(service("cache"), Pull(8, RIGHT, Place(BlockTable([16]))).body())
    for _ in range(2):
        await peer.request(service("cache"), End(7, "").body())
    await peer.request(service("cache"), Stop(99, "").body())
    with pytest.raises(hx.TicketError, match="cache 9 of cluster 2 does not exist"):
        await peer.request(service("cache"), Describe(9).body())


async def test_keys_that_name_nothing_or_too_much(managers: Managers) -> None:
    left, right, source, target = managers
    with pytest.raises(hx.TicketError, match="not added yet"):
        await left.pull_blocks(BlocksCacheKey(2, 5), source, [0], [0])
    with pytest.raises(hx.InvalidArgumentError, match="names a whole cache; name its blocks"):
        await left.pull_blocks(RIGHT, source, None, [0])
    right.add_cache_key(CacheKey(2, 1), target, 4)
    with pytest.raises(hx.InvalidArgumentError, match="names its blocks; name no others"):
        await left.pull_blocks(CacheKey(2, 1), source, [0], [0])
    with pytest.raises(hx.InvalidArgumentError, match="exists already"):
        right.add_cache_key(CacheKey(2, 1), target, 5)
    with pytest.raises(hx.InvalidArgumentError, match="is of another cluster; this one is 2"):
        right.add_cache_key(CacheKey(1, 1), target, 5)
    with pytest.raises(hx.InvalidArgumentError, match="either batch_index"):
        right.add_cache_key(CacheKey(2, 2), target, 5, blocks=[5])
    with pytest.raises(hx.InvalidArgumentError, match="key must be a CacheKey"):
        right.add_cache_key(RIGHT, target, 5)  # type: ignore[arg-type]
    with pytest.raises(hx.RangeError, match="hold the tokens 0 to 4, not 0 to 5"):
        right.add_cache_key(CacheKey(2, 2), target, 5, tokens=5)
    with pytest.raises(hx.RangeError, match="block 16 does not exist"):
        right.allocate_cache(view(), cache_keys=[CacheKey(2, 100 + n) for n in range(17)])
    with pytest.raises(hx.TicketError):
        right.remove_cache_key(CacheKey(2, 100))
    right.remove_cache_key(CacheKey(2, 1))
    with pytest.raises(hx.TicketError, match="never added"):
        right.remove_cache_key(CacheKey(2, 1))


async def test_malformed_arguments(managers: Managers) -> None:
    left, _, source, _ = managers
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: left.pull_blocks("key", source, [0], [0]), hx.InvalidArgumentError, "the key must be"),
        (
            lambda: left.pull_blocks(BlocksCacheKey(9), source, [0], [0]),
            hx.InvalidArgumentError,
            "not linked with cluster 9",
        ),
        (lambda: left.pull_blocks(RIGHT, source, [0], [0, 0]), hx.InvalidArgumentError, "there twice"),
        (lambda: left.pull_blocks(RIGHT, source, [0], []), hx.InvalidArgumentError, "at least one"),
        (lambda: left.pull_blocks(RIGHT, source, 5, [0]), hx.InvalidArgumentError, "block ids or a"),
        (lambda: left.pull_blocks(RIGHT, source, ["x"], [0]), hx.InvalidArgumentError, "whole number"),
        (lambda: left.pull_blocks(RIGHT, source, [0], [16]), hx.RangeError, "block 16 does not exist"),
        (
            lambda: left.pull_blocks(RIGHT, source, [0], [0], tokens=5),
            hx.RangeError,
            "hold the tokens 0 to 4, not 0 to 5",
        ),
        (lambda: left.pull_blocks(RIGHT, source, [0], [0], tokens=(2, 2)), hx.RangeError, "at least one token"),
        (lambda: left.pull_blocks(RIGHT, source, [0], [0], tokens="ab"), hx.InvalidArgumentError, "whole number"),
        (lambda: left.pull_blocks(RIGHT, source, [0], [0], layers=[]), hx.InvalidArgumentError, "at least one"),
        (lambda: left.pull_blocks(RIGHT, source, [0], [0], layers=[1, 1]), hx.InvalidArgumentError, "different"),
        (lambda: left.pull_blocks(RIGHT, source, [0], [0], layers=[4]), hx.RangeError, "does not hold layer 4"),
        (lambda: left.pull_blocks(RIGHT, source, [0], [0], timeout=0), hx.InvalidArgumentError, "timeout"),
        (lambda: left.push_blocks(RIGHT, source, [0], [0], req_id=b"1"), hx.InvalidArgumentError, "req_id"),
        (lambda: left.allocate_cache("view"), hx.InvalidArgumentError, "view must be"),
        (lambda: left.allocate_cache(view(), access="all"), hx.InvalidArgumentError, "access must be"),
        (lambda: source.expect(1, layers=[9]), hx.RangeError, "does not hold layer 9"),
        (lambda: source.expect(1, timeout=-1), hx.InvalidArgumentError, "timeout"),
        (lambda: source.array(9, "k"), hx.RangeError, "does not hold layer 9"),
        (lambda: CacheManager(left.engine, 1), hx.InvalidArgumentError, "exists already"),
        (lambda: CacheManager("engine", 1), hx.InvalidArgumentError, "engine must be"),
        (lambda: CacheManager(left.engine, -1), hx.InvalidArgumentError, "cluster_id"),
        (lambda: copy.copy(left), TypeError, "neither pickled nor copied"),
        (lambda: CacheTask(), TypeError, "made by"),
        (lambda: left.aclose(timeout=-1), hx.InvalidArgumentError, "timeout"),
    ]
    for call, kind, message in calls:
        with pytest.raises(kind, match=message):
            call()
    assert len(source._store.holds) == 0
    with pytest.raises(hx.RangeError, match="tokens 0 to 4, and the peer's 0 to 8"):
        await left.pull_blocks(RIGHT, source, [0, 1], [0])
    source.expect(1)
    with pytest.raises(hx.InvalidArgumentError, match="expected already"):
        source.expect(1)


async def test_access(managers: Managers) -> None:
    left, right, source, _ = managers
    kept = {access: right.allocate_cache(view(), access=access) for access in ("none", "read", "write")}  # type: ignore[arg-type]
    granted = right.allocate_cache(view(), grant=lambda peer: "read" if peer.name == "left" else "none")
    keys = {name: CacheKeyByIdAndIndex(2, cache.cache_id) for name, cache in kept.items()}
    await left.pull_cache(keys["read"], source)
    await left.push_cache(keys["write"], source)
    await left.pull_cache(CacheKeyByIdAndIndex(2, granted.cache_id), source)
    for key, pulls in ((keys["none"], True), (keys["write"], True), (keys["none"], False), (keys["read"], False)):
        with pytest.raises(hx.AccessError, match="no right to"):
            await (left.pull_cache if pulls else left.push_cache)(key, source)
    with pytest.raises(hx.AccessError, match="no right to write"):
        await left.push_cache(CacheKeyByIdAndIndex(2, granted.cache_id), source)
    with pytest.raises(hx.AccessError, match="lets no peer write"):
        kept["read"].expect(1)


async def test_links(managers: Managers) -> None:
    left, right = managers.left, managers.right
    address = right.engine.address
    with pytest.raises(hx.InvalidArgumentError, match=f"cluster 2 is at {address}, not cluster 3"):
        await left.link_clusters({3: address})
    with pytest.raises(hx.InvalidArgumentError, match="this manager is cluster 1 itself"):
        await left.link_clusters({1: address})
    await left.link_clusters({2: address})  # again
    async with hx.Engine("127.0.0.1:0", name="other") as other, CacheManager(other, 2) as twin:
        with pytest.raises(hx.InvalidArgumentError, match="both sides of the link are cluster 2"):
            await twin.link_clusters({5: address})
        with pytest.raises(hx.InvalidArgumentError, match="cluster 2 is linked already, as peer 'right'"):
            await left.link_clusters({2: other.address})
        with pytest.raises(hx.InvalidArgumentError, match="cluster 2 is linked already"):
            await twin.link_clusters({1: left.engine.address})
    left.unlink_clusters([2])
    assert left.links == {}
    await until(lambda: not right.links)
    with pytest.raises(hx.InvalidArgumentError, match="not linked with cluster 2"):
        left.push_blocks(RIGHT, managers.source, [0], [0])
    with pytest.raises(hx.InvalidArgumentError, match="not linked with cluster 2"):
        left.unlink_clusters([2])
    await right.link_clusters({1: left.engine.address})
    assert not right.links[1].error
    await left.push_blocks(RIGHT, managers.source, [0], [0])
    await right.pull_blocks(LEFT, managers.target, [0], [0])


async def test_a_manager_that_is_lost_warns() -> None:
    async with engine_pair() as pair:
        manager = CacheManager(pair.left, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del manager
            gc.collect()
        assert [str(one.message) for one in caught if one.category is ResourceWarning] == [
            "<CacheManager cluster 1, mix, 0 caches, 0 links> was never closed; use 'async with CacheManager(...) as manager'"
        ]
