// The options of `open`.  This driver checks the values that it uses itself, before anything is loaded.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "hxa_driver.h"

namespace hx {

// HIXL has three engines behind one interface, and both ends of a link must have the same one.
enum class Backend : uint32_t { AUTO, COMM, CS, FAB };
const char *word_of(Backend backend);  // as the option `backend` has it

// The memory of mem_alloc.  AUTO is page-locked memory of AscendCL, except where HIXL cannot take it.
enum class HostMemory : uint32_t { AUTO, PINNED, PAGES };

struct Options {
    std::string library;           // file or folder; empty: the usual places
    std::string ip = "127.0.0.1";  // literal; peers connect to it
    uint16_t port = 0;             // 0: a free one
    int32_t device = -1;           // -1: that of the caller's context, else 0
    Backend backend = Backend::AUTO;  // what the options choose; AUTO: nothing, so that the NPU does
    std::string chosen_by;            // the option that does
    bool host_nic = false;            // a RoCE NIC of the host is among what the options let HIXL use
    HostMemory host_memory = HostMemory::AUTO;
    bool notify_control = false;  // notify_via=control
    bool connect_async = false;   // connect_via=async
    int32_t connect_timeout_ms = 5000;
    int32_t notify_timeout_ms = 1000;
    uint64_t busy_ms = 2000;  // how long RESOURCE_EXHAUSTED is retried
    uint64_t spin_us = 50;
    uint64_t poll_max_us = 500;   // longest sleep between two polls of transfers
    uint64_t notes_poll_ms = 20;  // longest sleep between two polls for notifications
    uint32_t in_flight = 512;     // requests per link that HIXL may hold
    uint32_t request_descriptors = 4096;
    uint64_t pending_notes = 1024;            // notifications per link that may wait for room
    uint32_t threads = 64;                    // most
    std::map<std::string, std::string> hixl;  // for Initialize, by HIXL's own keys
    std::string unknown;                      // those of them that HIXL does not document

    bool auto_connect() const;  // HIXL connects, and cuts what failed, by itself
    // Return 0, or -HXA_E_INVALID with the reason in `error`.
    int parse(const hxa_option *options, size_t n, std::string &error);
    // The back-end that HIXL uses on a kind of NPU, as AscendCL names it.
    Backend backend_on(const std::string &npu) const;
    // mem_alloc gives plain pages there: on a 950 HIXL takes no page-locked memory over a NIC of the host.
    bool pages_on(const std::string &npu) const;

  private:
    std::string choose();
    std::string given(const std::string &key) const;  // of HIXL, by any of its names; empty: it is not given
};

}  // namespace hx
