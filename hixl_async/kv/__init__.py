"""KV caches: the flat public surface of ``hixl_async.kv``.

======================  ==================================================================================
`Layout`                shapes and bytes of a paged cache
`Pool`                  a pool of blocks in one region, reserved all or nothing
`Blocks`                reserved blocks: a ticket and a stream as a target, ``blocks[i]`` as a source
`LayerStream`           the consumer's side: layers as they land
`PushStream`            the producer's side: ``push`` from any thread
`Ticket`                the right to fill blocks, which `Blocks` grant and a producer uses once
`Outcome`, `Verdict`    the end of a stream
`Part`, `Group`         what a model keeps per token
`Shard`, `View`         what one rank holds of it, and where
`senders`, `Plan`       which rank sends what, and the copies
`capacity`              the memory that a model's sequences need
======================  ==================================================================================
"""

from .blocks import Blocks, LayerBlocks, Reservation
from .capacity import Capacity, capacity
from .layout import Layout
from .plan import BlockTable, Plan
from .pool import Pool, PoolStatistics
from .protocol import Outcome, Ticket, Verdict
from .push import PushStream
from .reshard import Share, senders
from .shapes import Group, Part, Place, Shard, Strides, View
from .stream import LayerStream

__all__ = [
    "BlockTable",
    "Blocks",
    "Capacity",
    "Group",
    "LayerBlocks",
    "LayerStream",
    "Layout",
    "Outcome",
    "Part",
    "Place",
    "Plan",
    "Pool",
    "PoolStatistics",
    "PushStream",
    "Reservation",
    "Shard",
    "Share",
    "Strides",
    "Ticket",
    "Verdict",
    "View",
    "capacity",
    "senders",
]
