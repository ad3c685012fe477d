// libcann_hixl.so and the libraries beside it: finding and loading them, and a typed function for each symbol in use.
#pragma once

#include <string>

#include "abi.hpp"

namespace hx {

// AscendCL, as far as threads and host memory need it; absent where libcann_hixl.so does without.
struct Acl {
    int (*init)(const char *) = nullptr;
    int (*set_device)(int32_t) = nullptr;
    int (*get_context)(void **) = nullptr;
    int (*set_context)(void *) = nullptr;
    int (*malloc_host)(void **, size_t) = nullptr;
    int (*free_host)(void *) = nullptr;
    const char *(*soc_name)() = nullptr;

    bool there() const { return set_device != nullptr; }
    // The kind of NPU; empty where there is none.
    std::string npu() const {
        const char *name = soc_name != nullptr ? soc_name() : nullptr;
        return name != nullptr ? name : "";
    }
};

struct Library {
    abi::Construct construct = nullptr, destroy = nullptr;
    abi::Initialize initialize = nullptr;
    abi::Finalize finalize = nullptr;
    abi::RegisterMem register_mem = nullptr;
    abi::DeregisterMem deregister_mem = nullptr;
    abi::Connect connect = nullptr, disconnect = nullptr;
    abi::TransferAsync transfer_async = nullptr;
    abi::GetTransferStatus transfer_status = nullptr;
    abi::SendNotify send_notify = nullptr;
    abi::GetNotifies get_notifies = nullptr;
    abi::MakeText make_text = nullptr;
    abi::TextOf text_of = nullptr;
    // Added in 2026; each may be missing by itself.
    abi::GetTransferStatuses transfer_statuses = nullptr;
    abi::Connect connect_async = nullptr, disconnect_async = nullptr;
    abi::GetAsyncConnectStatus connect_status = nullptr;
    abi::GetCapability capability = nullptr;
    Acl acl;
    std::string path;  // of libcann_hixl.so

    // Load from `wanted`, a file or folder, or from the usual places where it is empty.  Return 0, or
    // -HXA_E_UNSUPPORTED with every attempt in `error`.  Libraries stay loaded: their threads may outlive the instances.
    int load(const std::string &wanted, std::string &error);

    abi::Text text(const std::string &value) const {
        abi::Text out;
        make_text(&out, value.data(), value.size());
        return out;
    }
};

}  // namespace hx
