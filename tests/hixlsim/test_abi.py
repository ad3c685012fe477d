"""The binary interface: the symbols that a caller compiled against CANN links to, and the layout of its structures."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from .build import PARTS, SOURCES, build, compiler, symbols
from .probe import PARAM_INVALID, SUCCESS, Library

# As published, and not as our own table has them.
HIXL = [
    "_ZN4hixl4HixlC1Ev",
    "_ZN4hixl4HixlD1Ev",
    "_ZN4hixl4Hixl8FinalizeEv",
    "_ZN4hixl4Hixl10InitializeERKN2ge12AscendStringERKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE",
    "_ZN4hixl4Hixl11RegisterMemERKNS_7MemDescENS_7MemTypeERPv",
    "_ZN4hixl4Hixl13DeregisterMemEPv",
    "_ZN4hixl4Hixl7ConnectERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl10DisconnectERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl12ConnectAsyncERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl15DisconnectAsyncERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl21GetAsyncConnectStatusERKN2ge12AscendStringERNS_18AsyncConnectStatusE",
    "_ZN4hixl4Hixl12TransferSyncERKN2ge12AscendStringENS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EEi",
    "_ZN4hixl4Hixl13TransferAsyncERKN2ge12AscendStringENS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EERKNS_12TransferArgsERPv",
    "_ZN4hixl4Hixl17GetTransferStatusERKPvRNS_14TransferStatusE",
    "_ZN4hixl4Hixl17GetTransferStatusERKNS_21GetTransferStatusArgsERSt6vectorINS_14TransferResultESaIS5_EE",
    "_ZN4hixl4Hixl10SendNotifyERKN2ge12AscendStringERKNS_10NotifyDescEi",
    "_ZN4hixl4Hixl11GetNotifiesERSt6vectorINS_10NotifyDescESaIS2_EE",
    "_ZN4hixl4Hixl13GetCapabilityENS_11FeatureTypeERi",
]
METADEF = [
    "_ZN2ge12AscendStringC1EPKc",
    "_ZN2ge12AscendStringC1EPKcm",
    "_ZNK2ge12AscendString9GetStringEv",
    "_ZNK2ge12AscendString9GetLengthEv",
    "_ZNK2ge12AscendString4FindERKS0_",
    "_ZNK2ge12AscendString4HashEv",
    "_ZNK2ge12AscendStringltERKS0_",
    "_ZNK2ge12AscendStringgtERKS0_",
    "_ZNK2ge12AscendStringleERKS0_",
    "_ZNK2ge12AscendStringgeERKS0_",
    "_ZNK2ge12AscendStringeqERKS0_",
    "_ZNK2ge12AscendStringneERKS0_",
]

LAYOUT = {
    "AscendString": (16, 8, {}),
    "MemDesc": (144, 8, {"addr": 0, "len": 8, "reserved": 16}),
    "TransferOpDesc": (24, 8, {"local_addr": 0, "remote_addr": 8, "len": 16}),
    "TransferArgs": (128, 8, {"user_data": 0, "reserved": 8}),
    "GetTransferStatusArgs": (128, 4, {"max_query_count": 0, "skip_waiting": 4, "reserved": 5}),
    "TransferResult": (128, 8, {"req": 0, "user_data": 8, "status": 16, "reserved": 20}),
    "NotifyDesc": (32, 8, {"name": 0, "notify_msg": 16}),
    "Hixl": (8, 8, {}),
    **dict.fromkeys(("MemType", "TransferOp", "TransferStatus", "AsyncConnectStatus", "FeatureType"), (4, 4, {})),
}

# A program that uses all of the interface, as one of CANN's users would write it.
CALLER = """
#include "api.hpp"
#include <cstdio>
using namespace hixl;
int main() {
    int32_t value = 0;
    Hixl hixl;
    std::map<AscendString, AscendString> options;
    options[AscendString("AutoConnect")] = AscendString("0", 1);
    std::map<AscendString, AsyncConnectStatus> all;
    std::vector<TransferResult> results;
    std::vector<NotifyDesc> notifies;
    AsyncConnectStatus async;
    TransferStatus status;
    TransferReq req = nullptr;
    MemHandle handle = nullptr;
    const AscendString to("127.0.0.1:1");
    const Status got[] = {
        hixl.RegisterMem({1, 1}, MEM_HOST, handle), hixl.DeregisterMem(handle), hixl.Connect(to), hixl.Disconnect(to),
        hixl.ConnectAsync(to), hixl.DisconnectAsync(to), hixl.GetAsyncConnectStatus(to, async), hixl.GetAsyncConnectStatus(all),
        hixl.TransferSync(to, READ, {{1, 1, 1}}), hixl.TransferAsync(to, WRITE, {{1, 1, 1}}, TransferArgs(), req),
        hixl.GetTransferStatus(req, status), hixl.GetTransferStatus(GetTransferStatusArgs(), results),
        hixl.SendNotify(to, {to, to}), hixl.GetNotifies(notifies)};
    for (Status each : got) {
        std::printf("%u ", each);
    }
    std::printf("%u ", hixl.Initialize(to, {{AscendString("nonsense"), to}}));
    std::printf("%u %s %zu", Hixl::GetCapability(AUTO_CONNECT, value), to.GetString(), to.GetLength());
    return 0;
}
"""


def exported(library: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listed.splitlines()}


@pytest.fixture(scope="module")
def root() -> Path:
    return build()


def test_the_published_names_are_exported_and_nothing_else(root: Path) -> None:
    names = exported(root / "lib64" / "libcann_hixl.so")
    assert set(HIXL) <= names
    assert {name for name in names if not name.startswith("hixlsim_")} == set(symbols())
    assert set(METADEF) <= exported(root / "lib64" / "libmetadef.so")
    loaded = ctypes.CDLL(str(root / "lib64" / "libcann_hixl.so"))
    assert all(hasattr(loaded, name) for name in HIXL)


@pytest.mark.parametrize("part", PARTS)
def test_an_older_library_lacks_a_part(part: str) -> None:
    names = exported(build(without=(part,)) / "lib64" / "libcann_hixl.so")
    belongs = {name for name, owner in symbols().items() if owner == part}
    assert belongs
    assert not belongs & names
    assert set(symbols()) - belongs <= names


@pytest.mark.parametrize("name", LAYOUT)
def test_structures_lie_as_published(loaded: Library, name: str) -> None:
    size, align, offsets = LAYOUT[name]
    assert divmod(loaded.layout(name.encode()), 16) == (size, align)
    for field, offset in offsets.items():
        assert loaded.layout(f"{name}.{field}".encode()) == offset, field


def test_both_values_of_the_string_abi_need_the_same_symbols_and_get_the_same_answers(
    root: Path, tmp_path: Path
) -> None:
    source = tmp_path / "caller.cpp"
    source.write_text(CALLER)
    seen = []
    for abi in (0, 1):
        program = tmp_path / f"caller{abi}"
        flags = [
            "-std=c++17",
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-I{SOURCES}",
            f"-L{root / 'lib64'}",
            f"-Wl,-rpath,{root / 'lib64'}",
        ]
        subprocess.run([*compiler(), *flags, source, "-o", program, "-lcann_hixl", "-lmetadef"], check=True)
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", program], capture_output=True, text=True, check=True
        ).stdout
        needs = {line.split()[-1] for line in listed.splitlines() if "hixl" in line or "AscendString" in line}
        answers = subprocess.run(
            [program], capture_output=True, text=True, check=True, env={**os.environ, "HIXLSIM_DEVICES": "0"}
        ).stdout
        seen.append((needs, answers))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) > 20
    assert seen[0][1] == "503900 " * 14 + "103900 0 127.0.0.1:1 11"


def test_capabilities(loaded: Library) -> None:
    value = ctypes.c_int32(7)
    assert [loaded.capability(feature, ctypes.byref(value)) for feature in (-1, 0)] == [PARAM_INVALID, SUCCESS]
    assert value.value == 1
    assert (loaded.capability(1, ctypes.byref(value)), value.value) == (SUCCESS, 1)
    assert (loaded.capability(2, ctypes.byref(value)), value.value) == (SUCCESS, 0)


def test_a_toolkit_has_its_version_file(root: Path) -> None:
    assert (root / "share" / "info" / "hixl" / "version.info").read_text() == "Version=9.2.0-simulated\n"
    assert (root / "lib64" / "libacl_rt.so").exists()
