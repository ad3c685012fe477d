"""The options of the hixl driver, its own and those of HIXL."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import vtable as vt
from hixl_rig import (
    Maker,
    Sim,
    backend_fixture,  # noqa: F401
    facts,
    only,
    opened_fixture,  # noqa: F401
    sim_fixture,  # noqa: F401
)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hixl_port", "65536"), ("hixl_port", "-1"), ("hixl_port", ""), ("hixl_ip", "localhost"),
        ("hixl_ip", "1.2.3"), ("hixl_ip", "::g"), ("hixl_ip", "0.0.0.0"), ("hixl_ip", "::"), ("hixl_ip", "224.0.0.1"),
        ("hixl_ip", "ff02::1"), ("hixl_ip", "::ffff:0.0.0.0"), ("hixl_ip", "255.255.255.255"),
        ("device", "x"), ("backend", "udp"), ("host_memory", "huge"), ("notify_via", "mail"),
        ("in_flight", "0"), ("library", ""), ("connect_timeout_ms", "0"), ("spin_us", "1e3"),
        ("in_flight", "true"),
        ("AutoConnect", ""), ("AutoConnect", "2"), ("EnableUseFabricMem", "yes"), ("LocalCommRes", "1.3"),
        ("LocalCommRes", '{"version":1.3}'), ("LocalCommRes", "[]"),
        ("GlobalResourceConfig", "[]"), ("GlobalResourceConfig", "{"),
        ("GlobalResourceConfig", '{"comm_resource_config.protocol_desc":["roce:host",3]}'),
        ("GlobalResourceConfig", '{"comm_resource_config.protocol_desc":7}'),
        ("GlobalResourceConfig", '{"local_comm_res_path":""}'),
        ("GlobalResourceConfig", '{"a":' * 40 + "1" + "}" * 40),
    ],
)  # fmt: skip
def test_options_that_the_driver_uses_are_checked_before_anything_is_loaded(key: str, value: str) -> None:
    with pytest.raises(vt.DriverError, match=re.escape(key)) as caught:
        vt.Instance(vt.load("hixl"), {"library": "/nowhere", key: value})
    assert caught.value.status == vt.INVALID


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hixl_ip", "::1"), ("AutoConnect", "1"), ("AutoConnect", "true"),
        ("adxl.AutoConnect", "false"), ("EnableUseFabricMem", ""), ("RdmaTrafficClass", "132"),
        ("BufferPool", "4:8"), ("adxl.RdmaServiceLevel", "7"),
        ("LocalCommRes", '{"version":"1.3","endpoint_list":[{"protocol":"roce"}]}'),
        ("GlobalResourceConfig", '{"comm_resource_config.protocol_desc":["roce:host","hccs:device"]}'),
        ("GlobalResourceConfig", '{"connect_pool.thread_num":"4","comm_resource_config.qos":0}'),
        ("GlobalResourceConfig", '{"fabric_memory":{"task_stream_num":4,"enable_aicpu_unfold":false}}'),
        ("GlobalResourceConfig", '{"channel_pool.high_waterline":0.7,"channel_pool.low_waterline":0.5}'),
    ],
)  # fmt: skip
def test_options_that_are_accepted(sim: Sim, key: str, value: str) -> None:
    try:
        vt.Instance(vt.load("hixl"), {"library": str(sim.root), key: value}).close()
    except vt.DriverError as error:
        if "no such address" not in str(error):  # where there is no IPv6
            raise


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("RdmaTrafficClass", "130"), ("RdmaTrafficClass", "true"),
        ("adxl.RdmaServiceLevel", "-1"), ("BufferPool", "4"), ("adxl.BufferPool", ":"),
        ("GlobalResourceConfig", '{"connect_pool.thread_num":65}'),
        ("GlobalResourceConfig", '{"fabric_memory.task_stream_num":2}'),
    ],
)  # fmt: skip
def test_other_values_are_checked_by_hixl(sim: Sim, key: str, value: str) -> None:
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), key: value})
        with pytest.raises(vt.DriverError) as caught:
            instance.start()
        assert caught.value.status == vt.INVALID
        assert b"option" in instance.vt.error_text(caught.value.status, caught.value.native)
        assert not any("does not know" in line for line in instance.logs), "HIXL documents this one"
        instance.close()


def test_options_that_the_driver_does_not_know_reach_hixl(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next CANN may have more of them."""
    monkeypatch.setenv("HIXLSIM_OPTIONS", "NextOption=7,adxl.AnotherOption=on")
    with vt.no_leaks():
        options = {"library": str(sim.root), "NextOption": "7", "adxl.AnotherOption": "on"}
        instance = vt.Instance(vt.load("hixl"), options)
        instance.start()
        warnings = [line for line in instance.logs if "does not know" in line]
        assert len(warnings) == 1
        assert "NextOption" in warnings[0]
        assert "adxl.AnotherOption" in warnings[0]
        instance.close()


def test_a_misspelt_option_is_named(sim: Sim) -> None:
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), "in_fligth": "7"})
        with pytest.raises(vt.DriverError) as caught:
            instance.start()
        assert caught.value.status == vt.INVALID
        assert [line for line in instance.logs if "in_fligth" in line]
        instance.close()


RES_13, RES_12 = '{"version":"1.3"}', '{"version":"1.2"}'
PROTOCOLS = '{"comm_resource_config.protocol_desc":"roce:device"}'


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
    """In the order of HIXL's own factory.  The batch query, which one back-end has, shows the result."""
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
def test_the_library_decides_which_back_end_it_is(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, asked: str, made: str
) -> None:
    """Another version may choose another one, as its answer to the batch query shows."""
    monkeypatch.setenv("HIXLSIM_BACKEND", made)
    with vt.no_leaks():
        instance = vt.Instance(vt.load("hixl"), {"library": str(sim.root), "backend": asked})
        instance.start()
        assert facts(instance)["back-end"] == f"{made}, by HIXL, against backend={asked}"
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
