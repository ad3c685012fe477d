"""The options: the back-end that they select, and those that there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .probe import FAILED, PARAM_INVALID, SUCCESS, UNSUPPORTED, Hixl, Library

CS = {"LocalCommRes": '{"version": "1.3"}'}
FAB = {"EnableUseFabricMem": "1"}


def resources(**keys: object) -> dict[str, str]:
    return {"GlobalResourceConfig": json.dumps({key.replace("__", "."): value for key, value in keys.items()})}


def backend_of(hixl: Hixl) -> str:
    """Return the back-end, which shows in its answers."""
    if hixl.batch()[0] == SUCCESS:
        return "cs"
    return "fab" if hixl.register(4096, 0)[0] == PARAM_INVALID else "comm"


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "comm"),
        (FAB, "fab"),
        ({"EnableUseFabricMem": "0"}, "comm"),
        ({"EnableUseFabricMem": ""}, "comm"),
        ({**FAB, **CS}, "fab"),
        (CS, "cs"),
        ({"adxl.LocalCommRes": '{"version": "1.3"}'}, "cs"),
        ({"LocalCommRes": '{"version": "1.2"}'}, "comm"),
        ({"LocalCommRes": "{}"}, "comm"),
        ({"LocalCommRes": ""}, "comm"),
        (resources(comm_resource_config__protocol_desc="roce:device"), "cs"),
        (resources(comm_resource_config__protocol_desc=["hccs:device", "uboe:device"]), "cs"),
        (resources(comm_resource_config__protocol_desc=[]), "comm"),
        (
            {"LocalCommRes": '{"version": "1.2"}', **resources(comm_resource_config__protocol_desc="roce:device")},
            "comm",
        ),
    ],
)
def test_options_choose_the_backend(
    library: Library, objects: list[Hixl], options: dict[str, str], backend: str
) -> None:
    objects.append(Hixl(library))
    assert objects[0].initialize(options=options) == SUCCESS
    assert backend_of(objects[0]) == backend


@pytest.mark.parametrize("soc", ["Ascend950PR_9589", "Ascend910_9391"])
def test_a_new_soc_chooses_cs(library: Library, objects: list[Hixl], monkeypatch: pytest.MonkeyPatch, soc: str) -> None:
    monkeypatch.setenv("HIXLSIM_SOC", soc)
    objects.append(Hixl(library))
    assert objects[0].initialize() == SUCCESS
    assert backend_of(objects[0]) == ("cs" if "950" in soc else "comm")


GOOD: list[dict[str, str]] = [
    {"RdmaTrafficClass": "0"},
    {"adxl.RdmaTrafficClass": "252", "adxl.RdmaServiceLevel": "7"},
    {"RdmaServiceLevel": "0", "BufferPool": "0:0"},
    {"adxl.BufferPool": "0:0"},
    {"AutoConnect": "1"},
    resources(),
    resources(fabric_memory__max_capacity=1024, fabric_memory__start_address=0, fabric_memory__task_stream_num=1),
    resources(fabric_memory={"max_capacity": "1", "enable_aicpu_unfold": False, "task_stream_num": "8"}),
    resources(connect_pool__thread_num=64, connect_pool__task_queue_capacity="65535"),
    resources(
        comm_resource_config__qos=7,
        comm_resource_config__listen_port=65535,
        comm_resource_config__max_active_channels=128,
    ),
    resources(unknown=1),
]
BAD: list[dict[str, str]] = [
    {"autoconnect": "1"},
    {"domain_id": "1"},
    {"RdmaTrafficClass": "2"},
    {"RdmaTrafficClass": "256"},
    {"RdmaTrafficClass": "4x"},
    {"RdmaServiceLevel": "8"},
    {"RdmaServiceLevel": "-1"},
    {"AutoConnect": ""},
    {"AutoConnect": "2"},
    {"AutoConnect": "yes"},
    {"EnableUseFabricMem": "2"},
    {"BufferPool": "4"},
    {"BufferPool": "0:8"},
    {"BufferPool": "a:b"},
    {"GlobalResourceConfig": "[]"},
    {"GlobalResourceConfig": "{"},
    {"GlobalResourceConfig": "{} {}"},
    resources(fabric_memory__max_capacity=0),
    resources(fabric_memory__max_capacity=1025),
    resources(fabric_memory__start_address=1.5),
    resources(fabric_memory__task_stream_num=9),
    resources(fabric_memory__task_stream_num=2),  # unfolded, which is the default
    resources(fabric_memory__enable_aicpu_unfold="true"),
    resources(fabric_memory={"task_stream_num": 0}),
    resources(connect_pool__thread_num=65),
    resources(connect_pool__task_queue_capacity=0),
    resources(comm_resource_config__qos=8),
    resources(comm_resource_config__listen_port=65536),
    resources(comm_resource_config__max_active_channels=0),
    resources(comm_resource_config__protocol_desc=[1]),
    resources(local_comm_res_path=""),
    resources(local_comm_res_path=1),
    resources(local_comm_res_path="/nowhere"),
]


@pytest.mark.parametrize("options", GOOD)
def test_options_that_all_backends_take(
    backend: str, library: Library, objects: list[Hixl], options: dict[str, str]
) -> None:
    objects.append(Hixl(library))
    assert objects[0].initialize(options=options) == SUCCESS


@pytest.mark.parametrize("options", BAD)
def test_options_that_no_backend_takes(
    backend: str, library: Library, objects: list[Hixl], options: dict[str, str]
) -> None:
    objects.append(Hixl(library))
    assert objects[0].initialize(options=options) == PARAM_INVALID
    assert objects[0].connect("127.0.0.1:1") == FAILED


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({"BufferPool": "4:8"}, {"comm"}),
        ({"EnableUseFabricMem": "0"}, {"comm", "fab"}),
        ({"GlobalResourceConfig": ""}, {"cs", "fab"}),
        (resources(channel_pool__max_channel=10), {"cs", "fab"}),
        (
            resources(
                channel_pool__max_channel=10, channel_pool__high_waterline="0.9", channel_pool__low_waterline=0.5
            ),
            {"comm", "cs", "fab"},
        ),
        (resources(channel_pool__high_waterline=1.5), {"cs", "fab"}),
        (
            resources(channel_pool__max_channel=4, channel_pool__high_waterline=0.3, channel_pool__low_waterline=0.29),
            {"cs", "fab"},
        ),
        (
            {"LocalCommRes": '{"version": "1.3", "endpoint_list": [{"protocol": "tcp", "placement": "host"}]}'},
            {"comm", "fab"},
        ),
        (resources(comm_resource_config__protocol_desc="tcp:host"), {"comm", "fab"}),
    ],
)
def test_options_that_some_take(
    backend: str, library: Library, objects: list[Hixl], options: dict[str, str], takes: set[str]
) -> None:
    objects.append(Hixl(library))
    assert objects[0].initialize(options=options) == (SUCCESS if backend in takes else PARAM_INVALID)


def test_text_that_is_no_json_is_no_local_comm_res(library: Library, objects: list[Hixl]) -> None:
    objects.append(Hixl(library))
    assert objects[0].initialize(options={"LocalCommRes": "version 1.3"}) == PARAM_INVALID


@pytest.mark.parametrize("content", ['{"version": "1.3"}', ""])
def test_local_comm_res_may_be_a_file(library: Library, objects: list[Hixl], tmp_path: Path, content: str) -> None:
    path = tmp_path / "res.json"
    path.write_text(content)
    objects.append(Hixl(library))
    status = objects[0].initialize(options=resources(local_comm_res_path=str(path)))
    assert status == (SUCCESS if content else PARAM_INVALID)
    assert not content or backend_of(objects[0]) == "cs"


def test_the_environment_of_hccl_is_read(
    library: Library, objects: list[Hixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_RDMA_TC", "3")
    objects.append(Hixl(library))
    assert objects[0].initialize() == PARAM_INVALID
    assert objects[0].initialize(options={"RdmaTrafficClass": "132"}) == SUCCESS


def test_fabric_memory_without_its_kernel_is_unsupported(library: Library, objects: list[Hixl]) -> None:
    library.set("AICPU", 0)
    objects.append(Hixl(library))
    assert objects[0].initialize(options=FAB) == UNSUPPORTED
    assert objects[0].initialize(options={**FAB, **resources(fabric_memory__enable_aicpu_unfold=False)}) == SUCCESS


@pytest.mark.parametrize("id", ["localhost:1", "", "127.0.0.1:x", "1.2.3", "[::1"])
def test_engines_have_literal_addresses(backend: str, library: Library, objects: list[Hixl], id: str) -> None:
    objects.append(Hixl(library))
    assert objects[0].initialize(id) == PARAM_INVALID


def test_engines_of_a_device_agree_about_its_channels(library: Library, objects: list[Hixl]) -> None:
    objects += [Hixl(library), Hixl(library)]
    assert objects[0].initialize(options={**CS, **resources(comm_resource_config__max_active_channels=4)}) == SUCCESS
    assert objects[1].initialize(options=CS) == PARAM_INVALID
    objects[0].finalize()
    assert objects[1].initialize(options=CS) == SUCCESS


def test_a_device_must_be_set_on_the_thread(
    library: Library, objects: list[Hixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    objects += [Hixl(library), Hixl(library)]
    answers: list[int] = []

    def bare() -> None:
        answers.append(objects[0].initialize())
        monkeypatch.setenv("HIXLSIM_DEVICES", "0")
        answers.append(objects[1].initialize(options=CS))

    thread = threading.Thread(target=bare)
    thread.start()
    thread.join()
    assert answers == [107002, SUCCESS]


@pytest.mark.parametrize(
    ("ours", "theirs", "fit"), [("roce:host", "roce:host", True), ("roce:host", "ub_ctp:device", False)]
)
def test_endpoints_of_cs_have_to_meet(library: Library, objects: list[Hixl], ours: str, theirs: str, fit: bool) -> None:
    for each in (ours, theirs):
        objects.append(Hixl(library))
        assert objects[-1].initialize(options=resources(comm_resource_config__protocol_desc=each)) == SUCCESS
    assert objects[0].connect(objects[1]) == (SUCCESS if fit else PARAM_INVALID)
