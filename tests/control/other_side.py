"""A dialling process, for tests: ``python other_side.py '{"port": ..., ...}'``; reports in JSON lines what happens to it.

It lives in a process of its own so that it can be another user, live in other namespaces, or be killed.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import socket
import sys
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def unshare(what: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what) != 0:
        say("impossible", why=os.strerror(ctypes.get_errno()))
        os._exit(0)


async def main(options: dict[str, Any]) -> None:
    # Import, and load codecs, now: the user that this process becomes may not be allowed to read the files.
    "".encode("idna")
    from hixl_async.control import Identity, dial, socket_io
    from hixl_async.errors import HixlError
    from hixl_async.types import Address

    if options.get("network"):
        # The TCP connection is made before, as if a router lay between the two namespaces.
        sock = socket.create_connection(("127.0.0.1", options["port"]))
        sock.setblocking(False)
        unshare(CLONE_NEWNET)

        async def connect_tcp(address: Address) -> socket.socket:
            return sock

        socket_io.connect_tcp = connect_tcp
    if options.get("user_namespace"):
        unshare(CLONE_NEWUSER)
    if "uid" in options:
        os.setgroups([])
        os.setresgid(*[options["uid"]] * 3)
        os.setresuid(*[options["uid"]] * 3)
    me = Identity("other side", "", os.urandom(16).hex(), "", ())
    secret = base64.b64decode(options["secret"]) if options.get("secret") else None
    try:
        connection = await dial(
            Address("127.0.0.1", options["port"]),
            me,
            secret=secret,
            unix_dir=options.get("unix_dir"),
            timeout=options.get("timeout", 20),
        )
    except HixlError as error:
        say("failed", kind=type(error).__name__, text=str(error))
        return
    say("connected", same_host=connection.same_host, fallback=connection.fallback, credentials=connection.credentials)
    lost = asyncio.get_running_loop().create_future()

    def on_message(kind: str, body: dict[str, Any], fds: list[int]) -> None:
        if kind == "bye":
            lost.set_result("bye")
            return
        if kind == "die":
            os.kill(os.getpid(), 9)
        say("message", kind=kind, body=body, contents=[os.pread(fd, 100, 0).decode() for fd in fds])
        mine = os.memfd_create("mine")
        os.write(mine, b"from the other side")
        connection.send("answer", body, [mine] if connection.same_host else [])
        for fd in (*fds, mine):
            os.close(fd)

    connection.start(on_message, lambda error: lost.set_result(str(error)))
    say("lost", why=str(await lost))
    await connection.aclose()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
