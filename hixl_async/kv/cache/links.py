"""The clusters that a manager is linked with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import InvalidArgumentError, PeerDownError
from ...types import PeerState
from ..fields import field
from .context import ManagerContext
from .messages import Link, Unlink, service

if TYPE_CHECKING:
    from ...engine.peer import Peer

__all__ = ["Links"]


class Links:
    """The peers of a manager by the ids of their clusters.

    :param context: the context of the manager.
    """

    def __init__(self, context: ManagerContext) -> None:
        self._context = context
        self.peers: dict[int, Peer] = {}

    def peer(self, cluster: int) -> Peer:
        """Return the peer that is a cluster.

        :raises InvalidArgumentError: if there is no link with it.
        :raises PeerDownError: if the peer is down.
        """
        if cluster not in self.peers:
            raise InvalidArgumentError(
                f"{self._context} is not linked with cluster {cluster}; await manager.link_clusters()"
            )
        peer = self.peers[cluster]
        if peer.state is not PeerState.UP:
            raise PeerDownError(f"cluster {cluster} is down: {peer.error or 'it is leaving'}", peer=peer.name)
        return peer

    async def link(self, cluster: int, address: Any, timeout: float) -> None:
        """Connect to an address, and link with the cluster that is there.

        :raises InvalidArgumentError: if another cluster is there.
        :raises HixlError: like ``engine.connect`` and ``peer.request``.
        """
        if cluster == self._context.cluster:
            raise InvalidArgumentError(f"this manager is cluster {cluster} itself")
        peer = await self._context.engine.connect(address, timeout=timeout)
        reply = await peer.request(service(self._context.name), Link(self._context.cluster).body(), timeout=timeout)
        if (found := field(reply, "cluster", int)) != cluster:
            raise InvalidArgumentError(f"cluster {found} is at {address}, not cluster {cluster}")
        self._add(cluster, peer)

    def on_link(self, peer: Peer, message: Link) -> dict[str, Any]:
        """Link with the cluster that asks for it, and return the reply.

        :raises InvalidArgumentError: if that cluster is linked already as another peer.
        """
        if message.cluster == self._context.cluster:
            raise InvalidArgumentError(f"both sides of the link are cluster {message.cluster}")
        self._add(message.cluster, peer)
        return {"cluster": self._context.cluster}

    def _add(self, cluster: int, peer: Peer) -> None:
        known = self.peers.get(cluster)
        if known is not None and known.state is PeerState.UP:
            if known.identity.incarnation != peer.identity.incarnation:
                raise InvalidArgumentError(f"cluster {cluster} is linked already, as peer {known.name!r}")
            return  # two connections with one engine
        self.peers[cluster] = peer

    def unlink(self, cluster: int) -> None:
        """Forget a link, and tell the peer.

        :raises InvalidArgumentError: if there is none.
        :raises BusyError: if too many messages wait to be sent to the peer, which then does not learn of it.
        """
        if cluster not in self.peers:
            raise InvalidArgumentError(f"{self._context} is not linked with cluster {cluster}")
        peer = self.peers.pop(cluster)
        if peer.state is PeerState.UP:
            peer.post(service(self._context.name), Unlink().body())

    def on_unlink(self, peer: Peer) -> None:
        """Forget the links with a peer."""
        for cluster in [cluster for cluster, known in self.peers.items() if known is peer]:
            del self.peers[cluster]
