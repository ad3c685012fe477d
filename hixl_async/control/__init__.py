"""The control protocol: how two engines find, authenticate and talk to each other.

Read from the top; each module imports only those above it::

    codec            messages, frames, seals                         pure
    scheduler        one time budget in each pass of the loop
    process          the process at the other end                    asks the kernel
    identity         names, and the secret that proves them          pure
    rendezvous       the random Unix socket
    channel          sockets that carry messages                     non-blocking, no loop
    incoming         messages of the other side, checked             pure
    handshake        the proofs of both sides, as state machines     pure
    socket_io        waiting for sockets during a handshake          uses the loop, as do all below
    connection       the result of a handshake
    limits           connections of one process, user or host
    accept_limiter   a limit on handshakes in progress
    dialler          the side that connects
    listener         the side that accepts
"""

from .channel import MAX_DESCRIPTORS, close_descriptors
from .codec import ESTABLISHED_LIMIT
from .connection import Connection
from .dialler import dial
from .handshake import PROTOCOL_VERSION
from .identity import Identity
from .incoming import Incoming, binary_text, printable
from .limits import ConnectionLimits
from .listener import Listener
from .process import Credentials, has_ended, is_ending
from .scheduler import FairScheduler

__all__ = [
    "ESTABLISHED_LIMIT",
    "MAX_DESCRIPTORS",
    "PROTOCOL_VERSION",
    "Connection",
    "ConnectionLimits",
    "Credentials",
    "FairScheduler",
    "Identity",
    "Incoming",
    "Listener",
    "binary_text",
    "close_descriptors",
    "dial",
    "has_ended",
    "is_ending",
    "printable",
]
