"""The control protocol: how two engines find, authenticate and talk to each other.

::

    codec       messages and frames              pure
    handshake   who proves what, and when        pure
    process     who is at the other end          asks the kernel
    rendezvous  the random Unix socket
    channel     sockets that carry messages      non-blocking, no loop
    waiting     waits for sockets                the loop begins here
    connection  what a handshake results in
    door        lets in no more than fit
    dialler, answer, listener                    the two sides of a handshake
"""

from .channel import MAX_DESCRIPTORS
from .codec import ESTABLISHED_LIMIT
from .connection import Connection
from .dialler import dial
from .handshake import PROTOCOL_VERSION, Identity
from .listener import Listener
from .process import Credentials

__all__ = [
    "ESTABLISHED_LIMIT",
    "MAX_DESCRIPTORS",
    "PROTOCOL_VERSION",
    "Connection",
    "Credentials",
    "Identity",
    "Listener",
    "dial",
]
