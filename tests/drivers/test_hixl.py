"""What is special about the HIXL driver: each habit of HIXL that it hides, on the simulated library.

What it must do as any driver is test_conformance.py with ``--driver=hixl:comm``, ``:cs`` and ``:fab``.
"""

from __future__ import annotations

import ctypes as c
import importlib
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vtable as vt
from conftest import World, hixlsim
from vtable import MAY_READ, MAY_WRITE, READ, WRITE

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hixl_async" / "drivers" / "hixl"
MIB = 1 << 20
BACKENDS = ("comm", "cs", "fab")
LOST = 3  # Word::LOST of hixl.hpp
QUIET = {"LATENCY_US": 0, "JITTER_US": 0, "GBPS": 0, "ORDER": "fifo", "FAULTS": "", "SEED": 1, "STRICT": 0, "RELAY": 0,
         "FORGET_US": 0, "HEARTBEAT_MS": 10_000, "SILENCE_MS": 120_000}  # fmt: skip


class Sim:
    """The simulated library in this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.library = c.CDLL(str(root / "lib64" / "libcann_hixl.so"), os.RTLD_LOCAL)
        self.library.hixlsim_count.restype = c.c_int64
        self.acl = c.CDLL(str(root / "lib64" / "libascendcl.so"), os.RTLD_LOCAL)

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            assert self.library.hixlsim_set(name.encode(), str(value).encode()) == 0, (name, value)

    def count(self, name: str) -> int:
        return int(self.library.hixlsim_count(name.encode()))

    def break_links(self) -> None:
        self.library.hixlsim_break(b"")


@pytest.fixture
def sim() -> Iterator[Sim]:
    sim = Sim(hixlsim())
    sim.set(**QUIET)
    stale = sim.count("stale")
    yield sim
    sim.set(**QUIET)
    assert sim.count("stale") == stale, "a request was asked about after its last answer"
    assert [sim.count(name) for name in ("links", "regions", "live_requests")] == [0, 0, 0]


class Maker:
    def __init__(self, options: dict[str, object]) -> None:
        self.table = vt.load("hixl")
        self.options = options
        self.made: list[vt.Instance] = []

    def __call__(self, **options: object) -> vt.Instance:
        self.made.append(vt.Instance(self.table, {k: str(v) for k, v in {**self.options, **options}.items()}))
        return self.made[-1]

    def pair(self, **options: object) -> tuple[vt.Link, vt.Link]:
        return vt.join(self(**options), self(**options))

    def world(self, size: int = MIB, **options: object) -> World:
        """A pair with memory, after the first transfer: the connections see all memory that there is."""
        return warm(World(*self.pair(**options), size=size))


def warm(world: World) -> World:
    world.read(0, 0, 8).ok(world.left, world.right)
    vt.fill(world.here.view, 3)
    return world


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(sim: Sim, backend: str) -> Iterator[Maker]:
    with vt.no_leaks():
        maker = Maker({"library": sim.root, "backend": backend})
        yield maker
        for instance in maker.made:
            instance.close()


@pytest.fixture
def world(opened: Maker) -> World:
    return opened.world()


def only(*names: str) -> pytest.MarkDecorator:
    """Of one or two back-ends alone."""
    return pytest.mark.parametrize("backend", names, indirect=True)


def logs(world: World, text: str) -> list[str]:
    return [line for line in world.left.instance.logs + world.right.instance.logs if text in line]


def wait(true: Callable[[], object], world: World, what: str = "timed out") -> None:
    world.left.instance.until(true, world.left, world.right, what=what)


# ---- loading ---------------------------------------------------------------------------------------------------------


MISSING = """
import ctypes as c, sys
import vtable as vt

table = vt.load("hixl")
handle = c.c_void_p()
sink = vt.CSink(None, vt.POST(lambda *_: None), vt.EVENT(lambda *_: None))
for room in (4096, 100):
    error = c.create_string_buffer(room)
    assert table.open(None, 0, c.byref(sink), c.byref(handle), error, room) == -vt.UNSUPPORTED
    print(error.value.decode(), end="===")
"""


def test_a_missing_library_names_every_place_and_the_remedy(tmp_path: Path) -> None:
    """In a process of its own, for the loader finds what other tests have loaded."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND")}
    environment |= {"ASCEND_HOME_PATH": str(tmp_path / "kit"), "HOME": "/h"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", MISSING], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    text, short, _ = done.stdout.split("===")
    for place in (
        str(tmp_path / "kit" / "lib64"),
        "/usr/local/Ascend/cann/lib64",
        "/h/Ascend/ascend-toolkit/latest/lib64",
    ):
        assert f"{place}/libcann_hixl.so" in text
    assert "libcann_hixl.so: cannot open shared object file" in text  # the loader's own path
    assert "install CANN" in text
    assert "install CANN" in short, "the remedy comes before the list"


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libcann_hixl.so").write_bytes(b"nothing of the kind")
    with pytest.raises(vt.DriverError, match="Failed:.*libcann_hixl.so"):
        vt.Instance(vt.load("hixl"), {"library": str(tmp_path)})


def test_a_library_without_what_is_needed(tmp_path: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no C++ compiler to make a library with")
    source = tmp_path / "empty.cpp"
    source.write_text("namespace ge { struct AscendString { AscendString(const char *, unsigned long); }; }\n"
                      "ge::AscendString::AscendString(const char *, unsigned long) {}\n")  # fmt: skip
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcann_hixl.so")], check=True)
    with pytest.raises(vt.DriverError, match="has no AscendString.*CANN 8.5.0 or later"):
        vt.Instance(vt.load("hixl"), {"library": str(tmp_path)})


@pytest.mark.parametrize("where", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "root", "folder", "file"])
def test_where_the_library_is_found(sim: Sim, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    options = {}
    if where.startswith("ASCEND"):
        monkeypatch.setenv(where, str(sim.root))
    else:
        lib = sim.root / "lib64"
        options["library"] = str({"root": sim.root, "folder": lib, "file": lib / "libcann_hixl.so"}[where])
    vt.Instance(vt.load("hixl"), options).close()


@pytest.mark.parametrize("part", ["batch", "connect_async", "capability"])
def test_a_library_from_before_2026_lacks_parts(part: str) -> None:
    """In a process of its own: two libraries of one name in one process would share what is global in them."""
    options = {"library": str(hixlsim(without=(part,))), "backend": "cs"}
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import vtable as vt, conftest\n"
        f"world = conftest.World(*vt.join(*(vt.Instance(vt.load('hixl'), {options!r}) for _ in range(2))))\n"
        "for i in range(50): world.write(i, i, 1000)\n"
        "world.write(0, 0, world.size).ok(world.left, world.right)\n"
        "world.left.instance.until(lambda: not world.left.instance.ops, world.left)\n"
        "assert world.here.view == world.there.view\n"
        "print(world.left.vt.about(world.left.instance.handle).decode())\n"
        "for link in (world.left, world.right): link.instance.close()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    missing = {"batch": "batch query: no", "connect_async": "connect: no", "capability": "no GetCapability"}
    assert missing[part] in run.stdout


# ---- the binary interface --------------------------------------------------------------------------------------------


def test_symbols_are_those_of_the_table() -> None:
    """Each name that is looked up is one that the real library exports, by the table that the simulation is made from."""
    source = (SOURCES / "library.cpp").read_text()
    wanted = set(re.findall(r'"(_Z\w+)"', re.sub(r'"\s*\n\s*"', "", source)))
    lines = (ROOT / "tests" / "hixlsim" / "symbols.txt").read_text().splitlines()
    exported = {line.split()[0] for line in lines if line and not line.startswith("#")}
    texts = {name for name in wanted if "2ge12AscendString" in name and "4hixl" not in name}
    assert len(wanted) >= 19
    assert wanted - texts <= exported
    metadef = c.CDLL(str(hixlsim() / "lib64" / "libmetadef.so"))
    assert texts == {"_ZN2ge12AscendStringC1EPKcm", "_ZNK2ge12AscendString9GetStringEv"}
    assert all(hasattr(metadef, name) for name in texts)


def test_transfer_sync_cannot_be_called() -> None:
    """It would hold the link's lock, on one back-end everybody's, until it is done; nothing of HIXL is reached but by name."""
    code = Path(importlib.import_module("hixl_async.drivers._hixl").__file__).read_bytes()
    assert b"13TransferAsyncERKN2ge" in code
    assert b"TransferSync" not in code


@pytest.mark.parametrize("abi", [0, 1])
def test_sizes_and_offsets_under_both_abis(tmp_path: Path, abi: int) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no C++ compiler to ask")
    source = tmp_path / "layout.cpp"
    expected = {
        "MemDesc": 144, "TransferOpDesc": 24, "TransferArgs": 128, "GetTransferStatusArgs": 128, "TransferResult": 128,
        "NotifyDesc": 32, "Hixl": 8, "Text": 16, "MemType": 4, "TransferOp": 4, "TransferStatus": 4, "AsyncConnectStatus": 4,
        "FeatureType": 4, "Status": 4,
    }  # fmt: skip
    fields = {
        "MemDesc": {"len": 8, "reserved": 16},
        "TransferOpDesc": {"remote_addr": 8, "len": 16},
        "TransferArgs": {"reserved": 8},
        "GetTransferStatusArgs": {"skip_waiting": 4, "reserved": 5},
        "TransferResult": {"user_data": 8, "status": 16, "reserved": 20},
        "NotifyDesc": {"notify_msg": 16},
    }
    lines = [f'#include "{SOURCES}/abi.hpp"', "using namespace hx::abi;"]
    lines += [f'static_assert(sizeof({name}) == {size}, "{name}");' for name, size in expected.items()]
    lines += [
        f'static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");'
        for name, offsets in fields.items()
        for field, offset in offsets.items()
    ]
    lines.append('static_assert(alignof(GetTransferStatusArgs) == 4 && alignof(TransferResult) == 8, "alignment");')
    source.write_text("\n".join(lines))
    command = [
        compiler,
        "-std=c++17",
        "-Wno-invalid-offsetof",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        "-fsyntax-only",
        str(source),
    ]
    subprocess.run(command, check=True)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("colour", "red"), ("hixl_port", "65536"), ("hixl_port", "-1"), ("hixl_port", ""), ("hixl_ip", "localhost"),
        ("hixl_ip", "1.2.3"), ("hixl_ip", "::g"), ("hixl_ip", "0.0.0.0"), ("hixl_ip", "::"), ("hixl_ip", "224.0.0.1"),
        ("hixl_ip", "ff02::1"), ("hixl_ip", "::ffff:0.0.0.0"), ("hixl_ip", "255.255.255.255"),
        ("device", "x"), ("backend", "udp"), ("host_memory", "huge"), ("notify_via", "mail"),
        ("in_flight", "0"), ("library", ""), ("connect_timeout_ms", "0"), ("spin_us", "1e3"),
        ("AutoConnect", ""), ("AutoConnect", "2"), ("EnableUseFabricMem", "yes"), ("RdmaTrafficClass", "130"),
        ("RdmaTrafficClass", "256"), ("RdmaServiceLevel", "8"), ("adxl.RdmaServiceLevel", "-1"), ("BufferPool", "4"),
        ("BufferPool", "4:0"), ("adxl.BufferPool", ":"), ("LocalCommRes", "1.3"), ("LocalCommRes", '{"version":1.3}'),
        ("LocalCommRes", "[]"),
        ("GlobalResourceConfig", "[]"), ("GlobalResourceConfig", "{"), ("GlobalResourceConfig", '{"a":1}'),
        ("GlobalResourceConfig", '{"connect_pool.thread_num":65}'), ("GlobalResourceConfig", '{"connect_pool.thread_num":1.5}'),
        ("GlobalResourceConfig", '{"comm_resource_config.protocol_desc":"tcp:host"}'),
        ("GlobalResourceConfig", '{"comm_resource_config.protocol_desc":["roce:host",3]}'),
        ("GlobalResourceConfig", '{"fabric_memory.task_stream_num":2}'),
        ("GlobalResourceConfig", '{"fabric_memory":{"max_capacity":0}}'),
        ("GlobalResourceConfig", '{"fabric_memory.enable_aicpu_unfold":1}'),
        ("GlobalResourceConfig", '{"channel_pool.max_channel":10}'),
        ("GlobalResourceConfig", '{"channel_pool.high_waterline":0.3,"channel_pool.low_waterline":0.5}'),
        ("GlobalResourceConfig", '{"local_comm_res_path":""}'),
        ("GlobalResourceConfig", '{"a":' * 40 + "1" + "}" * 40),
    ],
)  # fmt: skip
def test_options_are_checked_before_anything_is_loaded(key: str, value: str) -> None:
    with pytest.raises(vt.DriverError, match=re.escape(key)) as caught:
        vt.Instance(vt.load("hixl"), {"library": "/nowhere", key: value})
    assert caught.value.status == vt.INVALID


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hixl_ip", "::1"), ("AutoConnect", "1"), ("EnableUseFabricMem", ""), ("RdmaTrafficClass", "132"),
        ("BufferPool", "4:8"), ("adxl.RdmaServiceLevel", "7"),
        ("LocalCommRes", '{"version":"1.3","endpoint_list":[{"protocol":"roce"}]}'),
        ("GlobalResourceConfig", '{"comm_resource_config.protocol_desc":["roce:host","hccs:device"]}'),
        ("GlobalResourceConfig", '{"connect_pool.thread_num":"4","comm_resource_config.qos":0}'),
        ("GlobalResourceConfig", '{"fabric_memory":{"task_stream_num":4,"enable_aicpu_unfold":false}}'),
        ("GlobalResourceConfig", '{"channel_pool.high_waterline":0.7,"channel_pool.low_waterline":0.5}'),
    ],
)  # fmt: skip
def test_options_that_make_sense(sim: Sim, key: str, value: str) -> None:
    try:
        vt.Instance(vt.load("hixl"), {"library": str(sim.root), key: value}).close()
    except vt.DriverError as error:
        if "no such address" not in str(error):  # where there is no IPv6
            raise


RES_13, RES_12 = '{"version":"1.3"}', '{"version":"1.2"}'
PROTOCOLS = '{"comm_resource_config.protocol_desc":"roce:device"}'


def facts(instance: vt.Instance) -> dict[str, str]:
    lines = instance.vt.about(instance.handle).decode().splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize(
    ("options", "npu", "backend"),
    [
        ({}, "Ascend910B3", "comm, by Ascend910B3"),
        ({}, "Ascend950PR_9599", "cs, by Ascend950PR_9599"),
        ({"backend": "comm"}, "Ascend910B3", "comm, by backend=comm"),
        ({"backend": "cs"}, "Ascend910B3", "cs, by backend=cs"),
        ({"backend": "fab"}, "Ascend950PR_9599", "fab, by backend=fab"),
        ({"EnableUseFabricMem": "1", "backend": "fab"}, "Ascend910B3", "fab, by EnableUseFabricMem=1"),
        ({"LocalCommRes": RES_13}, "Ascend910B3", "cs, by LocalCommRes of version 1.3"),
        ({"adxl.LocalCommRes": RES_13}, "Ascend910B3", "cs, by LocalCommRes of version 1.3"),
        ({"LocalCommRes": RES_12, "backend": "comm"}, "Ascend950PR_9599", "comm, by LocalCommRes of a version before 1.3"),
        ({"GlobalResourceConfig": PROTOCOLS}, "Ascend910B3", "cs, by comm_resource_config.protocol_desc"),
        ({"GlobalResourceConfig": PROTOCOLS, "LocalCommRes": RES_13, "backend": "cs"}, "Ascend910B3",
         "cs, by LocalCommRes of version 1.3"),
        ({"GlobalResourceConfig": '{"comm_resource_config.protocol_desc":[]}'}, "Ascend910B3", "comm, by Ascend910B3"),
        ({"EnableUseFabricMem": "0", "LocalCommRes": "", "GlobalResourceConfig": ""}, "Ascend910B3", "comm, by Ascend910B3"),
        ({"EnableUseFabricMem": "0", "backend": "cs"}, "Ascend910B3", "cs, by backend=cs"),
    ],
)  # fmt: skip
def test_the_back_end_is_the_one_that_hixl_makes(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], npu: str, backend: str
) -> None:
    """By the order of HIXL's own factory; that it came out so is seen by the batch query, which one back-end has."""
    monkeypatch.setenv("HIXLSIM_SOC", npu)
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), **options})
        left_to_the_npu = backend.endswith(npu)
        assert facts(instance)["back-end"] == ("cs on an Ascend 950, else comm" if left_to_the_npu else backend)
        instance.start()
        assert facts(instance)["back-end"] == backend
        assert ("in use" in facts(instance)["batch query"]) == backend.startswith("cs")
        instance.close()


@pytest.mark.parametrize(("asked", "made"), [("comm", "cs"), ("cs", "comm")])
def test_the_library_has_the_last_word(sim: Sim, monkeypatch: pytest.MonkeyPatch, asked: str, made: str) -> None:
    """It may choose otherwise in another version; whether it answers the batch query tells."""
    monkeypatch.setenv("HIXLSIM_BACKEND", made)
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), "backend": asked})
        instance.start()
        assert facts(instance)["back-end"] == f"{made}, by HIXL, whatever backend={asked} says"
        instance.close()


@pytest.mark.parametrize(("version", "backend"), [("1.3", "cs"), ("1.0", "comm")])
def test_a_local_comm_res_in_a_file_chooses_too(sim: Sim, tmp_path: Path, version: str, backend: str) -> None:
    file = tmp_path / "r\xe9sources"
    file.write_text(f'{{"version":"{version}"}}')
    config = f'{{"local_comm_res_path":"{file}"}}'.replace("\xe9", "\\u00e9")
    with vt.no_leaks():
        instance = vt.Instance(
            vt.load("hixl"), {"library": str(sim.root), "backend": backend, "GlobalResourceConfig": config}
        )
        instance.start()
        assert facts(instance)["back-end"].startswith(f"{backend}, by local_comm_res_path of")
        assert ("in use" in facts(instance)["batch query"]) == (backend == "cs")
        instance.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "comm", "LocalCommRes": RES_13}, "1.3 chooses the back-end cs, but backend=comm chooses comm;"),
        ({"backend": "comm", "adxl.LocalCommRes": RES_13}, "LocalCommRes of version 1.3 .* backend=comm"),
        ({"backend": "comm", "EnableUseFabricMem": "1"}, "EnableUseFabricMem=1 .* backend=comm"),
        ({"backend": "comm", "GlobalResourceConfig": PROTOCOLS}, "protocol_desc .* backend=comm"),
        ({"backend": "cs", "EnableUseFabricMem": "1"}, "EnableUseFabricMem=1 .* backend=cs"),
        ({"backend": "cs", "LocalCommRes": RES_12}, "LocalCommRes of a version before 1.3 .* backend=cs"),
        ({"backend": "fab", "LocalCommRes": RES_13}, "LocalCommRes of version 1.3 .* backend=fab"),
        ({"backend": "fab", "EnableUseFabricMem": "0"}, "backend=fab .* EnableUseFabricMem=0"),
        ({"LocalCommRes": RES_13, "EnableUseFabricMem": "1"}, "EnableUseFabricMem=1 .* LocalCommRes"),
        ({"LocalCommRes": RES_12, "GlobalResourceConfig": PROTOCOLS}, "LocalCommRes .*protocol_desc"),
        ({"LocalCommRes": RES_13, "adxl.LocalCommRes": RES_13}, "LocalCommRes and adxl.LocalCommRes are one option"),
        ({"backend": "cs", "BufferPool": "4:8"}, "BufferPool=4:8 .* backend=cs"),
        ({"EnableUseFabricMem": "1", "adxl.BufferPool": "4:8"}, "BufferPool=4:8 .* EnableUseFabricMem=1"),
        ({"GlobalResourceConfig": '{"local_comm_res_path":"/nowhere"}'}, "local_comm_res_path=/nowhere: No such file"),
        ({"GlobalResourceConfig": '{"local_comm_res_path":"/"}'}, "local_comm_res_path=/: it must be a regular file"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(options: dict[str, str], says: str) -> None:
    with pytest.raises(vt.DriverError, match=f"hixl: .*{says}") as caught:
        vt.Instance(vt.load("hixl"), {"library": "/nowhere", **options})
    assert caught.value.status == vt.INVALID
    if "local_comm_res_path" not in says:
        assert "leave one of them out" in str(caught.value)


def test_a_back_end_that_this_npu_does_not_have(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIXLSIM_SOC", "Ascend950PR_9599")
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), "backend": "comm"})
        with pytest.raises(vt.DriverError) as caught:
            instance.start()
        assert caught.value.status == vt.UNSUPPORTED
        assert b"backend=comm: on this NPU HIXL uses cs" in instance.vt.error_text(vt.UNSUPPORTED, caught.value.native)
        instance.close()


def test_what_initialize_refuses_is_reported(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIXLSIM_SOC", "Ascend950PR_9599")
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), "BufferPool": "4:8"})  # of comm alone
        with pytest.raises(vt.DriverError) as caught:
            instance.start()
        assert caught.value.status == vt.INVALID
        assert b"BufferPool" in instance.vt.error_text(caught.value.status, caught.value.native)
        instance.close()


def test_two_engines_on_one_port(opened: Maker) -> None:
    first = opened()
    first.start()
    port = re.search(r"listens at: 127.0.0.1:(\d+)", first.vt.about(first.handle).decode())[1]
    with pytest.raises(vt.DriverError, match=rf"hixl_port={port}: HIXL cannot listen at 127.0.0.1:{port}"):
        opened(hixl_port=port)


def test_an_address_of_another_machine(opened: Maker) -> None:
    with pytest.raises(vt.DriverError, match=r"hixl_ip=192\.0\.2\.1: this machine has no such address"):
        opened(hixl_ip="192.0.2.1")


@only("cs")
def test_a_port_that_is_lost_before_hixl_listens(opened: Maker) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    instance, first = opened(hixl_port=port), opened(hixl_port=port)
    first.start()
    with pytest.raises(vt.DriverError) as caught:
        instance.start()
    assert caught.value.status == vt.UNSUPPORTED, "there is no link that could be down"
    assert b"hixl_port" in instance.vt.error_text(caught.value.status, caught.value.native)
    assert any(f"127.0.0.1:{port} (hixl_ip, hixl_port)" in line for line in instance.logs)


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fifo", "random"])
def test_each_request_is_asked_until_its_one_answer(opened: Maker, sim: Sim, order: str) -> None:
    """Answers free the request, and on one back-end its handle is somebody else's at once."""
    sim.set(LATENCY_US=50, JITTER_US=400, ORDER=order)
    world = opened.world()
    chance = random.Random(3)
    places = list(range(256))
    for _ in range(8):
        chance.shuffle(places)
        for i in places:
            world.here.view[i * 4096] = chance.randrange(256)
        ops = [world.write(i * 4096, i * 4096, 4096) for i in places]
        for op in ops:
            op.ok(world.left, world.right)
        assert world.here.view == world.there.view
    assert sim.count("live_requests") == 0


@pytest.mark.parametrize("host", [False, True])
@only("cs")
def test_requests_of_many_links_recycle_each_others_handles(
    opened: Maker, sim: Sim, host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three engines at once write to three others: threads submit while others ask."""
    if host:
        monkeypatch.setenv("HIXLSIM_CS", "host")
    sim.set(LATENCY_US=20, JITTER_US=200, ORDER="random")
    a = opened()
    worlds = [warm(World(*vt.join(a, opened()))) for _ in range(3)]
    for turn in range(30):
        ops = [(w, w.write(i * 997, i * 997, 900 + turn)) for i in range(100) for w in worlds]
        for w, op in ops:
            op.ok(w.left)
    for w in worlds:
        for at in range(0, 100 * 997, 997):
            assert w.there.view[at : at + 929] == w.here.view[at : at + 929]


@only("cs")
def test_no_request_is_struck_out_in_anothers_place(opened: Maker, sim: Sim) -> None:
    """A query frees a request first and forgets its address later, and meanwhile nobody may be given the same one."""
    sim.set(FORGET_US=100, LATENCY_US=10, JITTER_US=400, ORDER="random")
    a = opened()
    worlds = [World(*vt.join(a, opened()), size=65536) for _ in range(8)]
    for w in worlds:
        vt.fill(w.here.view, 3)
    chance = random.Random(5)
    ops = []
    for _ in range(320):
        world, at = chance.choice(worlds), chance.randrange(60_000)
        ops.append((world, at, world.write(at, at, 1000)))
    for w, at, op in ops:
        op.ok(w.left)
        assert w.there.view[at : at + 1000] == w.here.view[at : at + 1000]


def shut_sockets(instance: vt.Instance) -> None:
    """The connections of others in this process with the HIXL of `instance`, as if it had died."""
    port = int(re.search(r"listens at: 127.0.0.1:(\d+)", instance.vt.about(instance.handle).decode())[1])
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as known:
                if known.family == socket.AF_INET and known.getpeername()[1] == port:
                    known.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@only("cs")
def test_requests_that_hixl_dropped_with_their_connection_are_not_taken_for_others(opened: Maker, sim: Sim) -> None:
    """With AutoConnect it cuts a connection by itself, and then their addresses are those of other links' requests."""
    sim.set(HEARTBEAT_MS=10)
    a = opened(AutoConnect=1)
    lost, well = (warm(World(*vt.join(a, opened(AutoConnect=1)))) for _ in range(2))
    sim.set(LATENCY_US=400_000)
    dropped = [lost.write(i * 8, i * 8, 8) for i in range(7)]
    wait(lambda: sim.count("live_requests") == 7, lost)
    shut_sockets(lost.right.instance)
    wait(lambda: sim.count("live_requests") == 0, lost)
    sim.set(LATENCY_US=2000)
    for _ in range(10):
        ops = [well.write(i * 64, i * 64, 64) for i in range(30)]
        assert settled(well, ops) == [vt.OK] * 30
    assert not any(op.completed for op in dropped), "an answer about another request was taken for theirs"
    a.vt.abandon(lost.left.handle, dropped[0].pointer)
    assert settled(lost, dropped) == [vt.TIMEOUT] + [vt.LINK] * 6
    sim.set(LATENCY_US=0)
    lost.write(0, 0, lost.size).ok(lost.left)


@only("cs")
def test_nothing_is_asked_about_after_hixl_dropped_it_for_a_failure(opened: Maker, sim: Sim) -> None:
    """The fixture `sim` counts questions about requests that are gone."""
    world = opened.world(AutoConnect=1)
    sim.set(LATENCY_US=200_000)
    ops = [world.write(i * 8, i * 8, 8) for i in range(10)]
    wait(lambda: sim.count("live_requests") == 10, world)
    sim.set(FAULTS="submit@1=507899")
    ops.append(world.write(0, 0, 8))
    assert settled(world, ops) == [vt.LINK] * 11
    sim.set(LATENCY_US=0)
    world.write(0, 0, world.size).ok(world.left)


def test_batch_queries_where_they_exist(world: World, sim: Sim, backend: str) -> None:
    """One question for all requests where the back-end answers it, one each elsewhere."""
    sim.set(LATENCY_US=300)
    before = sim.count("batches")
    ops = [world.write(i * 64, i * 64, 64) for i in range(512)]
    for op in ops:
        op.ok(world.left)
    assert (sim.count("batches") > before) == (backend == "cs")
    assert logs(world, f"back-end {backend}")


def test_a_request_holds_what_hixl_can_take(opened: Maker, sim: Sim) -> None:
    world = opened.world(request_descriptors=100)
    before = sim.count("submitted")
    rows = [(world.here, i * 8, world.remote, i * 8, 8) for i in range(1000)]
    world.left.submit(WRITE, rows).ok(world.left)
    assert sim.count("submitted") - before == 10
    assert world.there.view[:8000] == world.here.view[:8000]


def test_mixed_kinds_are_split(opened: Maker, sim: Sim, backend: str) -> None:
    """A request of several kinds of memory reads freed memory on one back-end."""
    left, right = opened.pair()
    world = World(left, right)
    device = c.c_void_p()
    assert sim.acl.aclrtSetDevice(0) == 0
    assert sim.acl.aclrtMalloc(c.byref(device), c.c_size_t(4 * MIB), 0) == 0
    try:
        block = (c.c_uint8 * (2 * MIB)).from_address(device.value)
        other = (c.c_uint8 * (2 * MIB)).from_address(device.value + 2 * MIB)
        vt.fill(memoryview(block).cast("B"), 9)
        ours = left.instance.register(block, kind=vt.DEVICE)
        theirs = left.imported(right.instance.register(other, kind=vt.DEVICE))
        sim.set(LATENCY_US=100, JITTER_US=500, ORDER="random")
        before = sim.count("submitted")
        rows = [
            (local, i * 100, remote, (2 * i + (local is ours)) * 100, 100)
            for i in range(400)
            for local, remote in (
                (ours, theirs),
                (ours, world.remote),
                (world.here, theirs),
                (world.here, world.remote),
            )
        ]
        assert left.submit(WRITE, rows).ok(left, right).bytes == 160_000
        assert sim.count("submitted") - before == 4
        seen, host = memoryview(other).cast("B"), world.there.view
        for i in range(400):
            at = 2 * i * 100
            assert (
                seen[at + 100 : at + 200]
                == host[at + 100 : at + 200]
                == memoryview(block).cast("B")[i * 100 : i * 100 + 100]
            )
            assert seen[at : at + 100] == host[at : at + 100] == world.here.view[i * 100 : i * 100 + 100]
    finally:
        for link in (left, right):
            link.stop().wait(left, right)
            link.instance.close()
        sim.acl.aclrtFree(device)


def test_a_busy_library_is_asked_again(world: World, sim: Sim, backend: str) -> None:
    # The one back-end that says FAILED instead is asked again while there are others in flight.
    sim.set(FAULTS="exhausted@2,3,5" if backend == "fab" else "exhausted@1,2,3,5", LATENCY_US=50_000)
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(8)]
    for op in ops:
        op.ok(world.left)
    assert world.there.view[:32768] == world.here.view[:32768]


@only("comm", "cs")
def test_a_library_that_stays_busy(opened: Maker, sim: Sim) -> None:
    world = opened.world(busy_ms=20)
    sim.set(FAULTS="exhausted")
    assert world.write(0, 0, 8).wait(world.left) == vt.BUSY
    sim.set(FAULTS="")
    world.write(0, 0, 8).ok(world.left)


@pytest.mark.parametrize("automatic", ["0", "1"])
def test_a_bad_address_hurts_nobody(opened: Maker, sim: Sim, automatic: str) -> None:
    """With AutoConnect a refused address ends the connection and all that is in flight on it."""
    world = opened.world(AutoConnect=automatic)
    sim.set(LATENCY_US=3000)
    op = world.write(0, 0, 4096)
    submitted = sim.count("submitted")
    for _ in range(3):
        with pytest.raises(vt.DriverError) as caught:
            world.write(0, world.size - 8, 16)
        assert caught.value.status == vt.RANGE
    op.ok(world.left)
    assert sim.count("submitted") - submitted <= 1


def test_both_directions_at_once(world: World) -> None:
    """A connection goes one way."""
    back = world.right.imported(world.here)
    vt.fill(world.there.view, 7)
    ops = [world.write(0, MIB // 2, MIB // 4), world.right.submit(WRITE, [(world.there, 0, back, MIB // 2, MIB // 4)])]
    for op in ops:
        op.ok(world.left, world.right)
    assert world.there.view[MIB // 2 : MIB // 4 * 3] == world.here.view[: MIB // 4]
    assert world.here.view[MIB // 2 : MIB // 4 * 3] == world.there.view[: MIB // 4]


# ---- failures --------------------------------------------------------------------------------------------------------


def settled(world: World, ops: list[vt.Op]) -> list[int]:
    wait(lambda: all(op.released for op in ops), world, "an op was not released")
    return [op.status for op in ops]


@pytest.mark.parametrize(
    "fault", ["transfer@3", "submit@3", "query@3", "submit@3=507899", "query@5=103902", "submit@3=103902"]
)
def test_a_failure_is_the_links_and_the_link_comes_back(world: World, sim: Sim, backend: str, fault: str) -> None:
    if fault == "submit@3" and backend == "fab":
        fault = "submit@3=507000"  # FAILED may mean that there are too many, and is taken for that
    sim.set(LATENCY_US=200, FAULTS=fault)
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(20)]
    pieces = dict(enumerate(ops))
    if fault == "transfer@3" and backend == "comm":  # there nobody hears of it
        wait(lambda: ops[1].released, world)
        world.left.instance.vt.abandon(world.left.handle, ops[2].pointer)
        wait(lambda: ops[2].released, world)
        assert pieces.pop(2).status == vt.TIMEOUT
    ops = [*pieces.values()]
    statuses = settled(world, ops)
    assert set(statuses) <= {vt.OK, vt.LINK}
    assert fault == "submit@3=103902" or 2 not in pieces or vt.LINK in statuses
    assert all(op.raw.scope == 0 for op in ops), "the link itself is up"
    for i, op in pieces.items():
        if op.status == vt.OK:
            assert world.there.view[i * 4096 : i * 4096 + 4096] == world.here.view[i * 4096 : i * 4096 + 4096]
        elif backend != "comm" or fault != "transfer@3":
            assert op.raw.native != 0
    sim.set(FAULTS="")
    world.write(0, 0, world.size).ok(world.left)
    assert world.there.view == world.here.view
    assert world.left.down is None


def test_a_failure_stays_with_its_link(opened: Maker, sim: Sim) -> None:
    a = opened()
    hurt, well = (warm(World(*vt.join(a, opened()))) for _ in range(2))
    sim.set(LATENCY_US=300_000)
    kept = [well.write(i * 4096, i * 4096, 4096) for i in range(10)]
    wait(lambda: sim.count("live_requests") == 10, well)
    sim.set(FAULTS="submit@1=507899")
    doomed = hurt.write(0, 0, 8)
    assert doomed.wait(hurt.left) == vt.LINK
    assert not kept[0].released
    assert settled(well, kept) == [vt.OK] * 10


def test_memory_is_held_until_the_connection_is_cut(world: World, sim: Sim) -> None:
    """COMPLETED comes at the failure, RELEASED when nothing can touch the memory any more."""
    sim.set(FAULTS="hang@1;disconnect_stall@1=1", LATENCY_US=100)
    ops = [world.write(0, 0, 4096), world.write(4096, 4096, 4096)]
    wait(lambda: sim.count("live_requests") == 2 or ops[1].released, world)
    world.left.instance.vt.abandon(world.left.handle, ops[0].pointer)
    wait(lambda: ops[0].completed, world)
    assert not ops[0].released, "Disconnect has not returned yet"
    assert ops[0].raw.status == vt.TIMEOUT
    settled(world, ops)
    assert ops[0].history == [vt.COMPLETED, vt.RELEASED]


@pytest.mark.parametrize("form", ["slow", "full"])
def test_memory_is_held_until_an_asynchronous_disconnect_is_over(opened: Maker, sim: Sim, form: str) -> None:
    """It may take longer than the timeout it was given, and there may be no room for it at first."""
    pool = '{"connect_pool.thread_num":1,"connect_pool.task_queue_capacity":1}'
    a = opened(connect_via="async", connect_timeout_ms=300, GlobalResourceConfig=pool)
    worlds = [warm(World(*vt.join(a, opened()))) for _ in range({"slow": 1, "full": 3}[form])]
    sim.set(FAULTS="hang;disconnect_stall@1=" + {"slow": "0.9", "full": "0.4"}[form], LATENCY_US=100)
    ops = [world.write(0, 0, 4096) for world in worlds]
    wait(lambda: sim.count("live_requests") == len(ops), worlds[0])
    for world, op in zip(worlds, ops, strict=True):
        world.left.instance.vt.abandon(world.left.handle, op.pointer)

    def over() -> bool:
        released = sum(op.released for op in ops)
        assert sim.count("live_requests") <= len(ops) - released, "released while HIXL may still read it"
        return released == len(ops)

    wait(over, worlds[0])
    assert [op.status for op in ops] == [vt.TIMEOUT] * len(ops)
    sim.set(FAULTS="", LATENCY_US=0)
    for world in worlds:
        world.write(0, 0, world.size).ok(world.left)
        assert world.there.view == world.here.view


def test_a_dead_stream_says_waiting_for_ever(world: World, sim: Sim) -> None:
    """There is no cancelling: the op is abandoned, the link cut, and everything on it told; then it goes on."""
    sim.set(FAULTS="hang@2", LATENCY_US=100)
    before = sim.count("submitted")
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(5)]
    assert ops[0].wait(world.left) == vt.OK
    wait(lambda: sim.count("submitted") - before == 5, world)
    assert world.left.cancel(ops[1]) == 0
    world.left.instance.vt.abandon(world.left.handle, ops[1].pointer)
    statuses = settled(world, ops)
    assert statuses[1] == vt.TIMEOUT
    assert set(statuses[2:]) <= {vt.OK, vt.LINK}
    sim.set(FAULTS="")
    world.write(0, 0, world.size).ok(world.left)
    assert world.there.view == world.here.view


def test_abandoned_before_it_began(opened: Maker, sim: Sim) -> None:
    world = opened.world(in_flight=1)
    sim.set(FAULTS="hang@1")
    first, second = world.write(0, 0, 8), world.write(8, 8, 8)
    wait(lambda: sim.count("live_requests") == 1, world)
    world.left.instance.vt.abandon(world.left.handle, second.pointer)
    assert second.wait(world.left) == vt.TIMEOUT
    assert not first.released, "nobody abandoned that one"
    world.left.instance.vt.abandon(world.left.handle, first.pointer)
    assert first.wait(world.left) == vt.TIMEOUT


@pytest.mark.parametrize("end", ["cancel", "abandon", "stop"])
@only("comm")
def test_what_is_ended_right_after_its_submission_ends(opened: Maker, sim: Sim, end: str) -> None:
    """Whenever the strand of the link looks, it finds the op before it finds the word that ends it."""
    a = opened()
    b = opened()
    world = warm(World(*vt.join(a, b)))
    for i in range({"cancel": 200, "abandon": 10, "stop": 20}[end]):
        ops = [world.write(k * 8, k * 8, 8) for k in range(i % 3 + 1)]
        if end == "cancel":
            early = world.left.cancel(ops[-1])
            assert (ops[-1].wait(world.left) == vt.CANCELLED) == bool(early)
        elif end == "abandon":
            a.vt.abandon(world.left.handle, ops[-1].pointer)
            assert ops[-1].wait(world.left) in (vt.OK, vt.TIMEOUT)
        else:
            world.left.stop().wait(world.left)
            assert all(op.released for op in ops)
            world.left.free()
            world = World(*vt.join(a, b), size=4096)


def test_a_link_that_cannot_be_made_again_is_down(world: World, sim: Sim) -> None:
    sim.set(FAULTS="connect;submit@1", LATENCY_US=100)
    ops = [world.write(i * 8, i * 8, 8) for i in range(10)]
    assert set(settled(world, ops)) <= {vt.OK, vt.LINK}
    wait(lambda: world.left.down, world)
    assert b"cannot be connected" in world.left.down.data
    assert world.left.down.status == vt.LINK
    with pytest.raises(vt.DriverError) as caught:
        world.write(0, 0, 8)
    assert caught.value.status == vt.LINK


def test_heartbeats_keep_links_and_silence_costs_none(opened: Maker, sim: Sim, backend: str) -> None:
    """COMM's server drops a client that said nothing for two minutes; who was only stopped goes on all the same."""
    sim.set(HEARTBEAT_MS=10, SILENCE_MS=60000)
    world = opened.world(notify_timeout_ms=50)
    sent = 0

    def one() -> None:
        nonlocal sent
        sent += 1
        world.left.submit(WRITE, [(world.here, 0, world.remote, 0, 4096)], note=(b"n", b"%d" % sent)).ok(
            world.left, world.right
        )

    one()
    sim.set(SILENCE_MS=0)
    if backend == "comm":
        while not logs(world, "control connection"):
            one()
            world.right.poll()
    sim.set(SILENCE_MS=60000)
    for _ in range(20):
        one()
    wait(lambda: len(world.right.notes()) == sent, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(1, sent + 1))
    assert world.left.down is None
    assert world.right.down is None


@only("comm", "fab")
def test_a_link_that_a_heartbeat_took_down(opened: Maker, sim: Sim) -> None:
    """With AutoConnect HIXL lets go of a dead peer by itself."""
    sim.set(HEARTBEAT_MS=10)
    world = opened.world(AutoConnect="1")
    assert sim.count("links") >= 1
    world.right.stop().wait(world.left, world.right)
    world.right.free()
    world.right.instance.close()
    world.left.instance.until(lambda: sim.count("links") == 0, world.left)
    assert world.left.stop().wait(world.left) == vt.OK


def test_nobody_listens(opened: Maker) -> None:
    a, b = opened(), opened()
    left, right = a.link(), b.link()
    card = vt.CCard.from_buffer_copy(right.card)
    right.stop().wait()
    b.close()
    with pytest.raises(vt.DriverError) as caught:
        left.connect(card)
    assert caught.value.status == vt.LINK
    assert caught.value.native != 0


@pytest.mark.parametrize("fault", ["connect@1=103903", "connect_late@1"])
def test_already_connected_is_normal(opened: Maker, sim: Sim, fault: str) -> None:
    """Once it is nobody's connection, once that of a Connect whose answer came too late."""
    sim.set(FAULTS=fault)
    world = opened.world()
    world.write(0, 0, 4096).ok(world.left)
    assert world.there.view[:4096] == world.here.view[:4096]


@pytest.mark.parametrize("call", ["stall@1=1.3", "connect_stall@1=1.3"])
def test_a_link_that_blocks_stalls_nobody(opened: Maker, sim: Sim, call: str) -> None:
    a = opened()
    if call.startswith("stall"):
        stuck, free = (warm(World(*vt.join(a, opened()))) for _ in range(2))
        sim.set(FAULTS=call)
        slow = stuck.write(0, 0, 8)
    else:
        free = warm(World(*vt.join(a, opened())))
        sim.set(FAULTS=call)
        left, right = a.link(50), opened().link(51)
        left.other, right.other = right, left
        slow = vt.Op(a)
        slow.accepted("link_connect", a.vt.link_connect(left.handle, c.byref(right.card), slow.pointer))
    sizes = [1, 4096, MIB // 2]
    for i in range(20):
        free.write(0, 0, sizes[i % 3]).ok(free.left)
        free.left.note(b"n", b"%d" % i).ok(free.left)
    free.right.instance.until(lambda: len(free.right.notes()) == 20, free.left, free.right)
    assert not slow.released, "the others had to wait"
    assert slow.wait() == vt.OK
    blocked = "TransferAsync" if call.startswith("stall") else "Connect"
    assert any(f"{blocked} lasts" in line for line in a.logs), a.logs
    free.left.instance.until(lambda: any("moves again" in line for line in a.logs))


@only("comm", "cs")
def test_abandoned_inside_a_call_that_does_not_come_back(opened: Maker, sim: Sim) -> None:
    """It may use the memory for as long as it lasts, and no Disconnect gets past it: one would only hold up other links."""
    a = opened()
    stuck, free = (warm(World(*vt.join(a, opened()))) for _ in range(2))
    sim.set(LATENCY_US=100_000)
    early = stuck.write(4096, 4096, 8)
    wait(lambda: sim.count("live_requests") == 1, stuck)
    sim.set(FAULTS="stall@1=60", LATENCY_US=0)
    inside, after = stuck.write(0, 0, 8), stuck.write(8, 8, 8)
    a.until(lambda: any("TransferAsync lasts" in line for line in a.logs))
    for op in (early, inside, after):
        a.vt.abandon(stuck.left.handle, op.pointer)
    for _ in range(20):
        free.write(0, 0, 4096).ok(free.left)
    assert not inside.released, "its memory is in use"
    stopped = stuck.left.stop()
    for _ in range(20):
        free.write(0, 0, 4096).ok(free.left)
    assert not stopped.released
    sim.set(FAULTS="")
    stopped.ok(stuck.left)
    assert {op.wait(stuck.left) for op in (early, inside, after)} <= {vt.OK, vt.TIMEOUT, vt.LINK}
    assert after.status in (vt.TIMEOUT, vt.LINK)
    a.until(lambda: any("TransferAsync took" in line for line in a.logs))
    free.write(0, 0, free.size).ok(free.left)


class Mute:
    """Where an engine should listen: accepts, and never says a word."""

    def __init__(self, port: int = 0) -> None:
        self.server = socket.create_server(("127.0.0.1", port), backlog=64)
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.close()


@pytest.mark.parametrize("via", ["threads", "async"])
@only("comm")
def test_an_engine_that_accepts_and_says_nothing(opened: Maker, via: str) -> None:
    """HIXL waits without a limit for its answer: a link that is not wanted any more, and the engine, end all the same."""
    a = opened(connect_via=via, connect_timeout_ms=100)
    free = warm(World(*vt.join(a, opened())))
    with Mute() as mute:
        left, right = a.link(50), free.right.instance.link(51)
        left.other, right.other = right, left
        size = right.card.len
        right.card.data[size - 64 : size] = mute.address.encode().ljust(64, b"\0")
        joining = vt.Op(a)
        joining.accepted("link_connect", a.vt.link_connect(left.handle, c.byref(right.card), joining.pointer))
        threading.Event().wait(0.3)
        free.write(0, 0, free.size).ok(free.left)
        assert not joining.released, "HIXL's time is up, but it waits"
        left.stop().ok(left)
        assert joining.wait() == vt.LINK
        assert any("Connect" in line and "no answer" in line for line in a.logs)
        free.write(0, 0, free.size).ok(free.left)
        left.free()
        a.close()


@only("comm")
def test_an_engine_that_falls_silent(opened: Maker) -> None:
    """Disconnect waits for its answer as well."""
    a, b = opened(connect_timeout_ms=100), opened()
    world = warm(World(*vt.join(a, b)))
    port = int(re.search(r"listens at: 127.0.0.1:(\d+)", b.vt.about(b.handle).decode())[1])
    b.close()
    with Mute(port):
        world.left.stop().ok(world.left)
        world.left.free()
        a.close()


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_that_comes_after_the_connection(world: World, sim: Sim) -> None:
    """HIXL shows a connection what was registered before: it is made anew, and what is in flight ends first."""
    sim.set(LATENCY_US=5000)
    ops = [world.write(i * 4096, i * 4096, 4096) for i in range(10)]
    here, there = world.left.instance.alloc(8192), world.right.instance.alloc(8192)
    vt.fill(here.view, 4)
    remote = world.left.imported(there)
    late = [world.left.submit(WRITE, [(here, i * 8, remote, i * 8, 8)]) for i in range(1024)]
    assert settled(world, ops + late) == [vt.OK] * (10 + 1024)
    assert there.view == here.view


@pytest.mark.parametrize("whose", ["ours", "theirs", "that of a signal"])
def test_memory_that_comes_late_on_one_side(world: World, whose: str) -> None:
    here = world.left.instance.alloc(8192) if whose == "ours" else world.here
    remote = world.remote if whose == "ours" else world.left.imported(world.right.instance.alloc(8192))
    if whose == "that of a signal":
        world.left.submit(signal=(remote, 8, 1)).ok(world.left)
    else:
        world.left.submit(WRITE, [(here, 0, remote, 0, 8192)]).ok(world.left)


def test_memory_is_registered_once_each(world: World, sim: Sim) -> None:
    """The same range twice is one handle to HIXL: letting go of one must not end the other."""
    buffer = (c.c_uint8 * 8192)()
    first, second = (world.left.instance.register(buffer) for _ in range(2))
    first.release()
    wait(lambda: not world.left.instance.ops, world)
    world.left.submit(WRITE, [(second, 0, world.remote, 0, 8192)]).ok(world.left)


def test_one_range_as_two_kinds_is_refused(world: World) -> None:
    """HIXL would take it, and then refuse every connection."""
    buffer = (c.c_uint8 * 8192)()
    world.left.instance.register(buffer)
    with pytest.raises(vt.DriverError) as caught:
        world.left.instance.register(buffer, kind=vt.DEVICE)
    assert caught.value.status == vt.INVALID


@only("cs")
def test_an_overlap_that_hixl_refuses_is_reported(world: World) -> None:
    buffer = (c.c_uint8 * 8192)()
    world.left.instance.register(buffer)
    part = (c.c_uint8 * 4096).from_buffer(buffer, 100)
    with pytest.raises(vt.DriverError) as caught:
        world.left.instance.register(part)
    assert caught.value.status == vt.INVALID
    assert caught.value.native == 103900


def test_memory_is_let_go_of_while_links_live(world: World, sim: Sim) -> None:
    """DeregisterMem is refused while there are connections: they pause when they are idle."""
    extra = [world.left.instance.alloc(4096 * (i + 1)) for i in range(5)]
    regions = sim.count("regions")
    for memory in extra:
        memory.release()
    wait(lambda: not world.left.instance.ops, world, "a memory was not let go of")
    assert sim.count("regions") == regions - 5
    world.write(0, 0, world.size).ok(world.left)
    assert world.there.view == world.here.view


def test_memory_is_let_go_of_under_constant_work(opened: Maker, sim: Sim) -> None:
    """Links that are never idle are held up for a moment; nothing of theirs fails."""
    world = opened.world()
    sim.set(LATENCY_US=1000)
    extra = world.left.instance.alloc(4096)
    ops = [world.write(0, 0, 4096) for _ in range(8)]
    extra.release()
    retiring = list(world.left.instance.ops.values())[-1]
    while not retiring.released:
        ops = [op for op in ops if not (op.released and op.ok())]
        while len(ops) < 8:
            ops.append(world.write(0, 0, 4096))
        world.left.take()
        ops[0].wait(world.left)
    assert settled(world, ops) == [vt.OK] * len(ops)


def test_work_waits_for_its_memory(opened: Maker, sim: Sim) -> None:
    """Registration is still under way when the transfer is submitted."""
    world = opened.world()
    buffer = (c.c_uint8 * 65536)()
    vt.fill(memoryview(buffer).cast("B"), 8)
    instance, handle = world.left.instance, c.c_void_p()
    sim.set(FAULTS="register_stall@1=20")
    assert instance.vt.mem_register(instance.handle, c.addressof(buffer), 65536, vt.HOST, 3, c.byref(handle)) == 0
    memory = vt.Memory(instance, handle.value, 65536, c.addressof(buffer), keep=buffer)
    instance.memories.add(memory)
    op = world.left.submit(WRITE, [(memory, 0, world.remote, 0, 65536)])
    world.write(0, 0, 8).ok(world.left)
    assert not op.released
    sim.set(FAULTS="")
    op.ok(world.left)
    assert world.there.view[:65536] == memoryview(buffer).cast("B")


def test_memory_that_cannot_be_registered(opened: Maker, sim: Sim) -> None:
    world = opened.world()
    sim.set(FAULTS="register=207001")
    instance, handle, address = world.left.instance, c.c_void_p(), c.c_void_p()
    assert instance.vt.mem_alloc(instance.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
    memory = vt.Memory(instance, handle.value, 4096, address.value)
    instance.memories.add(memory)
    with pytest.raises(vt.DriverError) as caught:
        instance.ready(memory)
    assert (caught.value.status, caught.value.native) == (vt.NOMEM, 207001)
    with pytest.raises(vt.DriverError) as caught:
        memory.export(MAY_READ)
    assert caught.value.status == vt.NOMEM
    with pytest.raises(vt.DriverError):
        world.left.submit(READ, [(memory, 0, world.remote, 0, 8)])


def test_memory_before_start(opened: Maker, sim: Sim) -> None:
    """It is registered once the engine is up, and cannot be exported before."""
    instance = opened()
    handle, address = c.c_void_p(), c.c_void_p()
    assert instance.vt.mem_alloc(instance.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
    memory = vt.Memory(instance, handle.value, 4096, address.value)
    instance.memories.add(memory)
    with pytest.raises(vt.DriverError) as caught:
        memory.export(MAY_READ)
    assert caught.value.status == vt.BUSY
    ready = vt.Op(instance)
    ready.accepted("mem_ready", instance.vt.mem_ready(memory.handle, ready.pointer))
    assert not ready.released
    instance.start()
    ready.ok()
    memory.export(MAY_READ | MAY_WRITE)


@only("cs")
def test_memory_of_an_engine_that_cannot_start(opened: Maker, sim: Sim) -> None:
    """Whoever waits for its registration hears of it."""
    sim.set(FAULTS="init=207001")
    instance = opened()
    handle, address = c.c_void_p(), c.c_void_p()
    assert instance.vt.mem_alloc(instance.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
    memory = vt.Memory(instance, handle.value, 4096, address.value)
    instance.memories.add(memory)
    ready = vt.Op(instance)
    ready.accepted("mem_ready", instance.vt.mem_ready(memory.handle, ready.pointer))
    with pytest.raises(vt.DriverError) as caught:
        instance.start()
    assert (caught.value.status, caught.value.native) == (vt.NOMEM, 207001)
    assert ready.wait() == vt.NOMEM


HOST_NIC = '{"version":"1.3","endpoint_list":[{"protocol":"roce","comm_id":"10.0.0.1","placement":"host"}]}'
BY_HOST_NIC = '{"comm_resource_config.protocol_desc":["roce:host"]}'


@pytest.mark.parametrize(
    ("options", "environment", "pinned"),
    [
        ({}, {}, True),
        ({"host_memory": "pages"}, {}, False),
        ({"LocalCommRes": HOST_NIC}, {"SOC": "Ascend950PR_9599"}, False),
        ({"GlobalResourceConfig": BY_HOST_NIC}, {"SOC": "Ascend950PR_9599"}, False),
        ({"LocalCommRes": HOST_NIC, "host_memory": "pinned"}, {"SOC": "Ascend950PR_9599"}, True),
        ({"LocalCommRes": HOST_NIC}, {"SOC": "Ascend910B3"}, True),
        ({}, {"SOC": "Ascend950PR_9599"}, True),
        # Whatever context another test has left on this thread.
        ({"LocalCommRes": HOST_NIC, "device": "0"}, {"DEVICES": "0", "MALLOC_HOST": "107002"}, False),
    ],
)
def test_what_host_memory_is_made_of(
    sim: Sim,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    environment: dict[str, str],
    pinned: bool,
) -> None:
    """Of what HIXL can register: page-locked by AscendCL, but a 950's NIC of the host takes no such memory."""
    for name, value in environment.items():
        monkeypatch.setenv(f"HIXLSIM_{name}", value)
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), **options})
        memory = instance.alloc(4096)
        assert bool(sim.acl.hixlsim_memory_kind(c.c_void_p(memory.address))) == pinned
        instance.close()


@only("comm")
def test_memory_that_cannot_be_locked_is_refused(opened: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than memory that HIXL refuses, or takes and cannot connect with."""
    instance = opened()
    instance.start()
    monkeypatch.setenv("HIXLSIM_MALLOC_HOST", "207001")
    with pytest.raises(vt.DriverError) as caught:
        instance.alloc(4096)
    assert caught.value.status == vt.NOMEM
    assert any("aclrtMallocHost of 0 MiB answered 207001" in line for line in instance.logs)


@only("cs")
def test_an_allocation_waits_for_no_call_of_hixl(opened: Maker, sim: Sim) -> None:
    """Although all threads of the driver are inside of one."""
    a = opened(threads=2)
    worlds = [warm(World(*vt.join(a, opened()))) for _ in range(2)]
    sim.set(FAULTS="stall@1,2=5")
    ops = [world.write(0, 0, 8) for world in worlds]
    for _ in range(50):  # in the meantime both have begun
        handle, address = c.c_void_p(), c.c_void_p()
        assert a.vt.mem_alloc(a.handle, 4096, 3, c.byref(handle), c.byref(address)) == 0
        a.memories.add(vt.Memory(a, handle.value, 4096, address.value))
    assert not any(op.released for op in ops)
    sim.set(FAULTS="")
    for world, op in zip(worlds, ops, strict=True):
        op.ok(world.left)


@only("comm")
def test_an_allocation_that_holds_up_the_loop_is_told(opened: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = opened()
    instance.alloc(4096)
    assert not any("aclrtMallocHost" in line for line in instance.logs)
    monkeypatch.setenv("HIXLSIM_MALLOC_HOST_MS", "120")
    instance.alloc(4096)
    assert any(re.search(r"aclrtMallocHost .* took \d{3,} ms", line) for line in instance.logs)
    opened(host_memory="pages").alloc(4096)
    assert not any("aclrtMallocHost" in line for line in opened.made[-1].logs)


# ---- notifications ---------------------------------------------------------------------------------------------------

ODD = [b"", b"\0", b"\0" * 20, b"\xff\xfe\x80", "\u00fc\ud7ff".encode(), bytes(range(256)), b'"\\{}', b"x" * 700, b"y" * 747,
       b"z" * 748, os.urandom(2000), os.urandom(2980), b"w" * 3100, os.urandom(60_000)]  # fmt: skip


@pytest.mark.parametrize("via", ["hixl", "control"])
def test_any_bytes_survive_in_order(opened: Maker, sim: Sim, via: str) -> None:
    """HIXL takes 1,024 bytes of UTF-8 without NUL, and one back-end ends the process for anything else."""
    world = opened.world(notify_via=via)
    before, carry, said = sim.count("notifies"), world.right.carry, []
    world.right.carry = lambda data: (said.append(data[0]), carry(data))
    sent = [(topic, text) for topic in (b"t", b"\0\xff", b"long" * 50) for text in ODD]
    ops = [world.left.note(*note) for note in sent]
    wait(lambda: len(world.right.notes()) == len(sent), world)
    assert world.right.notes() == sent
    for op in ops:
        op.ok(world.left)
    assert LOST not in said, "some came a second time, by the control connection"
    assert (sim.count("notifies") > before) == (via == "hixl")
    assert len(logs(world, "go by the control connection")) == (via == "hixl"), "said once"


def test_notifications_are_packed(world: World, sim: Sim) -> None:
    before = sim.count("notifies")
    for i in range(1000):
        world.left.instance.until(lambda: len(world.left.instance.ops) < 500, world.left, world.right)
        world.left.note(b"n", b"%d" % i)
    wait(lambda: len(world.right.notes()) == 1000, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(1000))
    assert sim.count("notifies") - before < 900


def test_a_queue_never_overflows(opened: Maker, sim: Sim) -> None:
    """Many senders, a receiver that takes nothing: what it has no room for stays with the sender."""
    b = opened()
    pairs = [vt.join(opened(pending_notes=5000), b) for _ in range(6)]
    n, before = 900, sim.count("notifies")
    for left, _ in pairs:
        for i in range(n):
            left.note(b"n", b"%d %s" % (i, b"x" * 700))
    for left, _ in pairs:
        left.instance.until(lambda: left.instance.stats().notes_sent >= 256, left)  # noqa: B023
    assert sim.count("notifies") - before <= 6 * 256, "sent although nobody had said that there was room"
    for left, right in pairs:
        left.instance.until(lambda: len(right.notes()) == n, left, right)  # noqa: B023
        assert [int(text.split()[0]) for _, text in right.notes()] == list(range(n))
        assert not any("control connection" in line for line in left.instance.logs)


def test_senders_are_told_apart(opened: Maker) -> None:
    """HIXL does not say who sent a notification."""
    b = opened()
    pairs = [vt.join(opened(), b) for _ in range(4)] + [vt.join(opened(), b)]
    for i, (left, _) in enumerate(pairs):
        for k in range(20):
            left.note(b"from", b"%d %d" % (i, k))
    for i, (left, right) in enumerate(pairs):
        left.instance.until(lambda: len(right.notes()) == 20, left, right)  # noqa: B023
        assert right.notes() == [(b"from", b"%d %d" % (i, k)) for k in range(20)]


def test_a_notification_is_sent_once_the_data_is_there(opened: Maker, sim: Sim) -> None:
    """Nothing orders a notification after a transfer but its COMPLETED."""
    world = opened.world()
    sim.set(LATENCY_US=2000, JITTER_US=2000, ORDER="random")
    for i in range(1, 30):
        world.here.view[:] = bytes([i]) * world.size
        world.write(0, 0, world.size, note=(b"n", b"%d" % i), signal=None)
        wait(lambda: len(world.right.notes()) == i, world)  # noqa: B023
        assert set(world.there.view[::4096]) == {i}


@only("cs", "comm")
def test_notifications_come_in_the_order_in_which_their_batches_finished(opened: Maker, sim: Sim) -> None:
    """T5 says no more: requests of one link may overtake each other, also by being asked about in turn."""
    world = opened.world()
    sim.set(LATENCY_US=100, JITTER_US=5000, ORDER="random")
    numbers = {}
    for i in range(100):
        numbers[world.write(i * 8, i * 8, 8, note=(b"n", b"%d" % i))] = i
        if i % 4 == 0:  # whose notification has nothing to wait for
            numbers[world.left.note(b"n", b"%d" % (1000 + i))] = 1000 + i
    wait(lambda: len(world.right.notes()) == len(numbers), world)
    wait(lambda: not world.left.instance.ops, world)
    seen = [int(text) for _, text in world.right.notes()]
    assert seen == [numbers[op] for op in world.left.instance.finished if op in numbers]
    data = [number for number in seen if number < 1000]
    assert data != sorted(data), "nothing overtook anything"


@pytest.mark.parametrize("fault", ["ack_lost@3", "notify@3", "notify@4=1", "ack_delay@3=0.3"])
@only("comm", "cs")
def test_a_way_for_notifications_that_broke(opened: Maker, sim: Sim, fault: str) -> None:
    """Spurious, late and missing answers: the rest goes by the control connection, nothing is lost, doubled or reordered."""
    world = opened.world(notify_timeout_ms=100)
    sim.set(FAULTS=fault)
    sent = []
    for i in range(200):
        sent.append((b"n", b"%d" % i))
        world.left.note(*sent[-1]).ok(world.left, world.right)
    wait(lambda: len(world.right.notes()) >= 200, world)
    assert world.right.notes() == sent
    assert len(logs(world, "notifications go by the control connection from here on")) == 1
    sim.set(FAULTS="")
    world.write(0, 0, world.size).ok(world.left)


@only("cs", "fab")
def test_a_full_receiver_is_asked_again(world: World, sim: Sim) -> None:
    sim.set(FAULTS="notify@2,3,7=203900")
    for i in range(20):
        world.left.note(b"n", b"%d" % i).ok(world.left)
    wait(lambda: len(world.right.notes()) == 20, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(20))
    assert not logs(world, "control connection")


def test_what_never_arrived_is_asked_for(world: World) -> None:
    """One that is long goes by the control connection, and is lost there; the next comes by HIXL."""
    carry, dropped = world.left.carry, []

    def lossy(data: bytes) -> None:
        if len(data) > 10_000 and not dropped:
            dropped.append(data)
        else:
            carry(data)

    world.left.carry = lossy
    sent = [(b"long", bytes(12_000)), (b"short", b"1"), (b"short", b"2")]
    for note in sent:
        world.left.note(*note).ok(world.left)
    wait(lambda: len(world.right.notes()) == 3, world)
    assert dropped
    assert world.right.notes() == sent


@pytest.mark.parametrize("via", ["hixl", "control"])
def test_large_notifications_do_not_flood_the_control_connection(opened: Maker, via: str) -> None:
    """It gives up a peer that lets more than 512 KiB wait."""
    world = opened.world(notify_via=via)
    sent = [(b"n", b"%03d" % i + bytes(60_000)) for i in range(40)]
    for note in sent:
        world.left.note(*note)
    world.left.instance.until(lambda: sum(map(len, world.right.inbox)) > 60_000)
    seen = 0
    while seen != (seen := sum(map(len, world.right.inbox))):
        threading.Event().wait(0.05)
    assert seen < 256 << 10
    wait(lambda: len(world.right.notes()) == 40, world)
    assert world.right.notes() == sent


def test_notifications_outlive_a_new_connection(world: World) -> None:
    """One back-end forgets what the peer has not fetched when the sender disconnects."""
    for i in range(50):
        world.left.note(b"n", b"%d" % i)
        if i % 10 == 5:
            there = world.right.instance.alloc(4096)
            world.left.submit(WRITE, [(world.here, 0, world.left.imported(there), 0, 4096)])
    wait(lambda: len(world.right.notes()) == 50 and not world.left.instance.ops, world)
    assert [int(text) for _, text in world.right.notes()] == list(range(50))


@only("comm")
def test_what_a_disconnect_took_along_is_sent_again_unasked(opened: Maker, sim: Sim) -> None:
    """The peer would miss it at last, and ask; but that takes it a second."""
    left, right = vt.join(opened(), opened(notes_poll_ms=1000))  # which fetches nothing before the connection is cut
    world = warm(World(left, right))
    said, carry = [], right.carry
    right.carry = lambda data: (said.append(data), carry(data))
    notifies = sim.count("notifies")
    for i in range(20):
        left.note(b"n", b"%d" % i).ok(left)
    assert sim.count("notifies") > notifies
    assert not right.notes()
    there = right.instance.alloc(4096)  # a new connection sees it, the old one does not
    left.submit(WRITE, [(world.here, 0, left.imported(there), 0, 4096)]).ok(left)
    wait(lambda: len(right.notes()) == 20, world)
    assert [int(text) for _, text in right.notes()] == list(range(20))
    assert not [data for data in said if data[0] == 3], "the peer had to ask"


def test_signals_wake_in_both_ways(opened: Maker) -> None:
    for via in ("hixl", "control"):
        world = opened.world(notify_via=via)
        for i in range(1, 20):
            before = world.right.signals()
            world.left.submit(signal=(world.remote, 8 * i, i)).ok(world.left)
            wait(lambda: world.right.signals() > before, world)  # noqa: B023
            assert int.from_bytes(world.there.view[8 * i : 8 * i + 8], "little") == i
        assert len(world.right.notes()) == 0


@pytest.mark.parametrize(
    "message",
    [b"", b"\x00", b"\x09", b"\x01", b"\x02\x01", b"\x02" + bytes(15), b"\x02" + b"\xff" * 16, b"\x04abc",
     b"\x04" + bytes(20), b"\x04" + (1).to_bytes(8, "little") + b"\0\0\0\0" + b"\xff\xff\xff\x7f" + b"\x05\0\0\0hello",
     b"\x04" + (1 << 40).to_bytes(8, "little") + b"\0\0\0\0" + b"\x06\0\0\0" + b"\x06\0\0\0helloo",
     b"\x04" + (1).to_bytes(8, "little") + b"\0\0\0\0" + b"\x06\0\0\0" + b"\x06\0\0\0" + b"\x02\xff\xff\0\0x"],
)  # fmt: skip
@only("cs")
def test_messages_that_make_no_sense_end_the_link(world: World, message: bytes) -> None:
    assert world.right.vt.message(world.right.handle, message, len(message)) == -vt.PROTOCOL
    wait(lambda: world.right.down, world)
    assert b"no sense" in world.right.down.data


@only("cs")
def test_a_hostile_sender_is_not_waited_for(world: World) -> None:
    """Numbers far ahead, and more than may be held for an earlier one."""
    piece = (
        b"\x04"
        + (2).to_bytes(8, "little")
        + b"\0\0\0\0"
        + (60_000).to_bytes(4, "little")
        + b"\x05\0\0\0"
        + b"\x02\0\0\0\0"
    )
    for i in range(2, 600):
        data = piece[:1] + i.to_bytes(8, "little") + piece[9:]
        if world.right.vt.message(world.right.handle, data, len(data)) != 0:
            break
    else:
        raise AssertionError("everything was taken")
    wait(lambda: world.right.down, world)


# ---- life ------------------------------------------------------------------------------------------------------------


def test_connect_by_the_asynchronous_form(opened: Maker, sim: Sim) -> None:
    world = opened.world(connect_via="async")
    world.write(0, 0, world.size).ok(world.left)
    there = world.right.instance.alloc(4096)
    world.left.submit(WRITE, [(world.here, 0, world.left.imported(there), 0, 4096)]).ok(world.left)
    assert there.view == world.here.view[:4096]
    left, right = opened(connect_via="async").link(), opened().link()
    card = vt.CCard.from_buffer_copy(right.card)
    right.stop().wait()
    right.instance.close()
    with pytest.raises(vt.DriverError):
        left.connect(card)


def test_a_link_with_oneself_is_refused(opened: Maker) -> None:
    instance = opened()
    left, right = instance.link(1), instance.link(2)
    with pytest.raises(vt.DriverError) as caught:
        left.connect(right.card)
    assert caught.value.status == vt.INVALID


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:0", "localhost:80", "127.0.0.1:99999", "[::1:80", "a" * 64]
)
@only("cs")
def test_a_card_with_no_address(opened: Maker, address: str) -> None:
    left, right = opened().link(), opened().link()
    size = right.card.len
    right.card.data[size - 64 : size] = address.encode().ljust(64, b"\0")[:64]
    with pytest.raises(vt.DriverError) as caught:
        left.connect(right.card)
    assert caught.value.status == vt.PROTOCOL


@pytest.mark.parametrize("what", ["shorter", "longer", "version", "magic", "no back-end", "unknown back-end"])
@only("comm")
def test_a_card_of_another_make(opened: Maker, what: str) -> None:
    """A driver of another version, or none at all: nothing of the card is believed."""
    left, right = opened().link(), opened().link()
    card = right.card
    before = bytes(card.data[: card.len])
    fields = list(struct.unpack("=IIQQQIHH64s", before))
    assert fields[7] == 1
    changes = {"magic": (0, 1), "version": (1, fields[1] + 1), "no back-end": (7, 0), "unknown back-end": (7, 4)}
    if what in changes:
        at, value = changes[what]
        fields[at] = value
        card.data[: card.len] = struct.pack("=IIQQQIHH64s", *fields)
    else:
        card.len += -8 if what == "shorter" else 8
    with pytest.raises(vt.DriverError) as caught:
        left.connect(card)
    assert caught.value.status == vt.PROTOCOL


@pytest.mark.parametrize("what", ["shorter", "longer", "magic", "version", "token", "number", "kind", "end"])
@only("comm")
def test_a_card_of_memory_of_another_make(world: World, what: str) -> None:
    card = world.there.export(MAY_READ)
    fields = list(struct.unpack("=IIQQQQII", bytes(card.data[: card.len])))
    assert fields[3:5] == [world.there.address, world.size]
    changes = {
        "magic": (0, 1), "version": (1, 99), "token": (2, 1), "number": (5, 0), "kind": (6, 2), "end": (4, (1 << 64) - 1)
    }  # fmt: skip
    if what in changes:
        at, value = changes[what]
        fields[at] = value
        card.data[: card.len] = struct.pack("=IIQQQQII", *fields)
    else:
        card.len += -8 if what == "shorter" else 8
    with pytest.raises(vt.DriverError) as caught:
        world.left.load(card, 4096, MAY_READ)
    assert caught.value.status == vt.PROTOCOL


@pytest.mark.parametrize(("ours", "theirs"), [("comm", "cs"), ("cs", "fab"), ("fab", "comm")])
def test_peers_of_different_back_ends(sim: Sim, ours: str, theirs: str) -> None:
    """HIXL is not asked: what it answers says nothing of the reason, and may take as long as a connect may."""
    with vt.no_leaks():
        a, b = (vt.Instance(vt.load("hixl"), {"library": str(sim.root), "backend": word}) for word in (ours, theirs))
        left, right = a.link(), b.link()
        with pytest.raises(vt.DriverError) as caught:
            left.connect(right.card)
        assert caught.value.status == vt.UNSUPPORTED
        text = a.vt.error_text(caught.value.status, caught.value.native).decode()
        assert f"is {ours} here and {theirs} at the peer" in text
        assert sim.count("links") == 0
        a.close()
        b.close()


def test_finalize_meets_no_other_call(opened: Maker, sim: Sim) -> None:
    """The simulated library ends the process if it does."""
    for i in range(8):
        left, right = opened.pair()
        world = World(left, right, size=65536)
        sim.set(LATENCY_US=i * 100)
        for k in range(100):
            world.write(k * 8, k * 8, 8, note=(b"n", b"x"))
        for link in (left, right):
            link.stop().wait(left, right)
            link.free()
        left.instance.close()
        right.instance.close()


@only("cs")
def test_finalize_waits_for_connections_that_end(opened: Maker, sim: Sim) -> None:
    """The simulated library ends the process if it does not."""
    left, right = opened.pair()
    sim.set(FAULTS="disconnect_stall=0.2")
    for link in (left, right):
        link.stop().wait(left, right)
        link.free()
    left.instance.close()
    right.instance.close()


def test_threads_have_a_context(opened: Maker, sim: Sim) -> None:
    """Strict, the library ends the process on a call by a thread whose context is gone; and the driver grows threads."""
    sim.set(STRICT=1)
    for _ in range(3):
        worlds = [opened.world(size=65536) for _ in range(2)]
        sim.set(FAULTS="stall@1=0.05")
        ops = [(w, w.write(i * 8, i * 8, 8, note=(b"n", b""))) for i in range(50) for w in worlds]
        for w, op in ops:
            op.ok(w.left, w.right)
        for w in worlds:
            for link in (w.left, w.right):
                link.stop().wait(w.left, w.right)
                link.instance.close()


def test_an_idle_engine_sleeps(opened: Maker) -> None:
    """It looks for notifications now and then, ever more seldom, and for nothing else."""
    world = opened.world()
    for i in range(20):
        world.write(0, 0, 8, note=(b"n", b"%d" % i)).ok(world.left, world.right)

    def switches() -> int:
        before = sum_of_switches()
        threading.Event().wait(0.1)
        return sum_of_switches() - before

    wait(lambda: switches() <= 20, world, "threads of an idle driver go on waking up")


def sum_of_switches() -> int:
    """Voluntary context switches of the driver's threads so far."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if not (task / "comm").read_text().startswith("hxa-hixl"):
                continue
            total += int(
                re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)[1]
            )
        except OSError:
            continue
    return total


# ---- soak ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_transfers(opened: Maker, sim: Sim, backend: str) -> None:
    """Random order, recycled handles, links that fail: every op ends once, nothing is left, and memory does not grow."""
    # Of requests; with each fails whatever its link has in flight, together about 1 % of all.
    # Where FAILED may mean that there are too many, another code says that the link is meant.
    fault = {"cs": "submit%0.003", "comm": "submit%0.0006", "fab": "submit%0.0006=507899"}[backend]
    n, block, depth = int(os.environ.get("HIXL_SOAK", "1000000")), 64, 32
    a = opened()
    worlds = [warm(World(*vt.join(a, opened()), size=depth * block)) for _ in range(2)]
    sim.set(LATENCY_US=1, JITTER_US=30, ORDER="random", SEED=7, FAULTS=fault)
    soak = Soak(a, worlds, depth, block)
    soak.run(n // 10)
    before = resident()
    soak.run(n)
    grown = resident() - before
    sim.set(FAULTS="")
    assert n // 200 < soak.failed < n // 20
    assert grown < 16 * MIB, f"grew by {grown / MIB:.1f} MiB"
    for world in worlds:
        assert world.left.down is None
        world.write(0, 0, world.size).ok(world.left)
        assert world.there.view == world.here.view


class Soak:
    """Keeps `depth` ops in flight on each link; what is posted is only counted, for a million Python objects take time."""

    def __init__(self, instance: vt.Instance, worlds: list[World], depth: int, block: int) -> None:
        self.instance, self.worlds = instance, worlds
        self.ops = [(vt.COp * depth)() for _ in worlds]
        self.keep = []
        self.slots: dict[int, tuple[World, object]] = {}
        self.state: dict[int, int] = {}
        self.free: list[int] = []
        self.lock = threading.Condition()
        self.succeeded = self.failed = 0
        for world, ops in zip(worlds, self.ops, strict=True):
            for i in range(depth):
                desc = vt.CDesc(world.here.handle, i * block, world.remote.handle, i * block, block)
                batch = vt.CBatch(verb=WRITE, n=1, desc=c.pointer(desc), bytes=block)
                self.keep.append((desc, batch))
                self.slots[c.addressof(ops[i])] = (world, batch)
        self.free = list(self.slots)

    def _post(self, _ctx: int, address: int, events: int) -> None:
        with self.lock:
            seen = self.state.get(address)
            if (
                seen is None
                or events & seen
                or not events
                or (events & vt.RELEASED and not (events | seen) & vt.COMPLETED)
            ):
                self.instance.violations.append(f"events {events} after {seen}")
                return
            self.state[address] = seen | events
            if events & vt.RELEASED:
                del self.state[address]
                status = vt.COp.from_address(address).status
                self.succeeded += status == vt.OK
                self.failed += status != vt.OK
                if status not in (vt.OK, vt.LINK):
                    self.instance.violations.append(f"status {status}")
                self.free.append(address)
                self.lock.notify()

    def run(self, n: int) -> None:
        """Lets `n` more transfers end; the instance's sink is ours meanwhile."""
        usual, self.instance._post = self.instance._post, self._post
        end = self.succeeded + self.failed + n
        submitted = self.succeeded + self.failed
        try:
            while True:
                with self.lock:
                    while not self.free and submitted < end:
                        assert self.lock.wait(vt.DEADLINE), "no transfer ends any more"
                    if submitted >= end:
                        assert self.lock.wait_for(lambda: not self.state, vt.DEADLINE), "a transfer does not end"
                        return
                    ready, self.free = self.free[: end - submitted], self.free[end - submitted :]
                    self.state.update(dict.fromkeys(ready, 0))
                for address in ready:
                    world, batch = self.slots[address]
                    c.memset(address, 0, c.sizeof(vt.COp))
                    answer = world.left.vt.submit(world.left.handle, c.byref(batch), vt.COp.from_address(address))
                    assert answer == vt.PENDING, answer
                submitted += len(ready)
        finally:
            self.instance._post = usual


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
