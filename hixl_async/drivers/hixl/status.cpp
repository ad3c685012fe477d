#include "status.hpp"

#include <cstdio>
#include <cstring>

namespace hx {

int32_t status_of(uint32_t native) {
    switch (native) {
        case abi::SUCCESS: return HXA_OK;
        case abi::PARAM_INVALID: return HXA_E_INVALID;
        case abi::TIMEOUT: return HXA_E_TIMEOUT;
        case abi::NOT_CONNECTED: return HXA_E_LINK;
        case abi::UNSUPPORTED: return HXA_E_UNSUPPORTED;
        case abi::RESOURCE_EXHAUSTED: return HXA_E_BUSY;
        case 207001: return HXA_E_NOMEM;  // ACL_ERROR_RT_MEMORY_ALLOCATION
        case 507046:
        case 507047: return HXA_E_TIMEOUT;  // ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, ACL_ERROR_RT_EVENT_SYNC_TIMEOUT
        default: return HXA_E_LINK;
    }
}

namespace {

struct Remedy {
    uint32_t native;
    const char *text;
};

// The meaning of a code and the remedy.
constexpr Remedy REMEDIES[] = {
    {abi::PARAM_INVALID,
     "PARAM_INVALID: an option, address or length that HIXL refuses; memory must be registered on both sides and not "
     "overlap another registration; options must be known to HIXL and fit the back-end (BufferPool is for comm alone)"},
    {abi::TIMEOUT,
     "TIMEOUT: raise connect_timeout_ms or notify_timeout_ms (TLS needs 2 s and more), and see whether the peer hangs"},
    {abi::NOT_CONNECTED, "NOT_CONNECTED: the link was lost; the driver connects again, so repeat the transfer"},
    {abi::ALREADY_CONNECTED, "ALREADY_CONNECTED"},
    {abi::NOTIFY_FAILED, "NOTIFY_FAILED: use notify_via=control"},
    {abi::UNSUPPORTED,
     "UNSUPPORTED: this back-end or these two ends cannot do that; compare protocol_desc, TLS switch, CANN and driver "
     "versions of both"},
    {abi::RESOURCE_EXHAUSTED,
     "RESOURCE_EXHAUSTED: too many links are busy at once; lower in_flight, or raise "
     "comm_resource_config.max_active_channels"},
    {abi::FAILED,
     "FAILED: the reason is in HIXL's log (ASCEND_SLOG_PRINT_TO_STDOUT=1); not initialised, no listener at the address, "
     "port in use (hixl_port), memory that it does not take, or a failed transfer"},
    {107002, "ACL code 107002: no context on the thread; is the NPU visible, and the option device right?"},
    {207000,
     "ACL code 207000: the feature is not supported; fabric memory needs HDK 26 or aclrtMallocHost memory, and CANN 9"},
    {207001, "ACL code 207001: the NPU's memory, or memory that can be pinned, ran out"},
    {507011, "ACL code 507011: a kernel or copy failed on the NPU"},
    {507046, "ACL code 507046: waiting for a stream timed out"},
    {507047, "ACL code 507047: waiting for an event timed out"},
    {507899, "ACL code 507899: the NPU's driver failed; look at `npu-smi info` and dmesg"},
};

}  // namespace

const char *error_text(int32_t status, int32_t native) {
    static const char *const texts[] = {
        "done",
        "malformed argument",
        "outside the memory, or a notification longer than the driver takes",
        "the memory's rights forbid it",
        "HIXL cannot do that here",
        "memory ran out",
        "a bounded resource is in use; try again later",
        "the link failed",
        "cancelled before it began",
        "no answer in time",
        "the peer sent metadata or a message that no hixl driver of this version makes",
        "the operating system refused",
    };
    static thread_local char text[400];
    if (status < 0) status = -status;
    if (status < 0 || static_cast<size_t>(status) >= sizeof texts / sizeof *texts) return "unknown status";
    if (native == 0) return texts[status];
    if (status == HXA_E_SYSTEM) {
        std::snprintf(text, sizeof text, "%s (errno %d)", texts[status], native);
        return text;
    }
    if (native < 0 && native > -16) {
        const Backend ours = static_cast<Backend>(-native / 4), theirs = static_cast<Backend>(-native % 4);
        if (theirs == Backend::AUTO)
            std::snprintf(text, sizeof text,
                          "%s (backend=comm: on this NPU HIXL uses cs unless LocalCommRes has a version before 1.3; leave "
                          "backend out, or take cs)",
                          texts[status]);
        else
            std::snprintf(text, sizeof text,
                          "%s (HIXL's back-end is %s here and %s at the peer, and these cannot be linked; give both the "
                          "same option backend, or the same options of HIXL that choose it)",
                          texts[status], word_of(ours), word_of(theirs));
        return text;
    }
    for (const Remedy &remedy : REMEDIES) {
        if (remedy.native != static_cast<uint32_t>(native)) continue;
        std::snprintf(text, sizeof text, "%s (HIXL: %s)", texts[status], remedy.text);
        return text;
    }
    std::snprintf(text, sizeof text, "%s (ACL code %d; see CANN's documentation of aclError)", texts[status],
                  native);
    return text;
}

}  // namespace hx
