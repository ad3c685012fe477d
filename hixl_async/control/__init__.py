"""The control protocol: how two engines find, authenticate and talk to each other.

Read from the top; each uses only what stands above it::

    codec                  messages, frames, seals             pure
    process                who is at the other end             asks the kernel
    identity, secret       what we say, and how it is proved   pure
    rendezvous             the random Unix socket
    fields, refusal        reading and refusing strangers      pure
    handshake              who proves what, and when           pure: dialler_handshake, listener_handshake
    channel                sockets that carry messages         non-blocking, no loop
    waiting                waits for them                      here the loop begins
    connection             what a handshake results in
    door                   lets in no more than fit
    dialler                dials
    answer, listener       answer
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
from .process import Credentials
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
    "printable",
]
