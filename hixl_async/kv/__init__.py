"""KV caches: the flat public surface of ``hixl_async.kv``.

======================  ==================================================================================
`Part`, `Group`         what a model keeps per token
`Shard`, `View`         what one rank holds of it, and where
`Pool`                  a pool of blocks, reserved all or nothing
`Blocks`                references to reserved blocks: the target of a stream, or the source of pushes
`LayerStream`           the consumer's side: layers as they land
`PushStream`            the producer's side: ``push`` from any thread
`Offer`                 blocks that other pools read: ``publish`` from any thread
`Ticket`                the right to fill or read blocks, which a stream or an offer issues
`Outcome`, `Verdict`    the end of a stream
`shards`, `senders`     the shards of a model, and which of them sends what
`Plan`                  the copies between two views
`capacity`              the memory that a model's sequences need
======================  ==================================================================================
"""

from .blocks import Blocks
from .capacity import Capacity, capacity
from .lender import PoolStatistics
from .offer import Offer
from .outcome import Outcome, Verdict
from .plan import BlockTable, Piece, Plan
from .pool import Pool
from .push import PushStream
from .reservation import Reservation
from .reshard import Share, senders, shards
from .shapes import Group, Part, Place, Shard, Strides, View
from .stream import LayerStream
from .ticket import Slice, Ticket

__all__ = [
    "BlockTable",
    "Blocks",
    "Capacity",
    "Group",
    "LayerStream",
    "Offer",
    "Outcome",
    "Part",
    "Piece",
    "Place",
    "Plan",
    "Pool",
    "PoolStatistics",
    "PushStream",
    "Reservation",
    "Shard",
    "Share",
    "Slice",
    "Strides",
    "Ticket",
    "Verdict",
    "View",
    "capacity",
    "senders",
    "shards",
]
