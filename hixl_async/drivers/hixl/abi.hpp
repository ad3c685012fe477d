// Our own declarations of what libcann_hixl.so exports.  No CANN header is included, because the machine that builds this need
// not have any, and because theirs define a static map of strings whose layout depends on _GLIBCXX_USE_CXX11_ABI.
//
// Nothing below depends on that macro: the interface passes AscendString, std::vector and std::map only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace hx::abi {

// ge::AscendString is one std::shared_ptr<std::string>.  To copy and destroy it takes the control block only, so that
// the type of the string, which is not ours to know, does not matter.
struct Text {
    std::shared_ptr<void> held;
};

// ge::AscendString::GetString, of the library that was loaded.
inline const char *(*text_of)(const Text *) = nullptr;
bool operator<(const Text &a, const Text &b);

enum Status : uint32_t {
    SUCCESS = 0,
    PARAM_INVALID = 103900,
    TIMEOUT = 103901,
    NOT_CONNECTED = 103902,
    ALREADY_CONNECTED = 103903,
    NOTIFY_FAILED = 103904,
    UNSUPPORTED = 103905,
    RESOURCE_EXHAUSTED = 203900,
    FAILED = 503900
};

enum MemType : int32_t { MEM_DEVICE = 0, MEM_HOST = 1 };
enum TransferOp : int32_t { READ = 0, WRITE = 1 };
enum TransferStatus : int32_t { WAITING = 0, COMPLETED = 1, TIMED_OUT = 2, TRANSFER_FAILED = 3 };
enum AsyncConnectStatus : int32_t {
    NOT_CONNECT = 0,
    CONNECT_PENDING = 1,
    CONNECTING = 2,
    CONNECTED = 3,
    CONNECT_FAILED = 4,
    DISCONNECT_PENDING = 5,
    DISCONNECTING = 6
};
enum FeatureType : int32_t { AUTO_CONNECT = 0, CLIENT_SERVER_COMM = 1 };

struct MemDesc {
    uintptr_t addr;
    size_t len;
    uint8_t reserved[128];
};

struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    size_t len;
};

struct TransferArgs {
    void *user_data;  // up to 9.0: reserved as well
    uint8_t reserved[120];
};

struct GetTransferStatusArgs {
    uint32_t max_query_count;
    bool skip_waiting;
    uint8_t reserved[123];
};

struct TransferResult {
    void *req;
    void *user_data;
    TransferStatus status;
    uint8_t reserved[108];
};

struct NotifyDesc {
    Text name;
    Text notify_msg;
};

struct Hixl {
    void *impl;
};

using Options = std::map<Text, Text>;

static_assert(sizeof(void *) == 8, "LP64");
static_assert(sizeof(Text) == 16 && alignof(Text) == 8, "ge::AscendString");
static_assert(sizeof(MemDesc) == 144 && alignof(MemDesc) == 8 && offsetof(MemDesc, len) == 8
                  && offsetof(MemDesc, reserved) == 16,
              "hixl::MemDesc");
static_assert(sizeof(TransferOpDesc) == 24 && offsetof(TransferOpDesc, remote_addr) == 8
                  && offsetof(TransferOpDesc, len) == 16,
              "hixl::TransferOpDesc");
static_assert(sizeof(TransferArgs) == 128 && alignof(TransferArgs) == 8 && offsetof(TransferArgs, reserved) == 8,
              "hixl::TransferArgs");
static_assert(sizeof(GetTransferStatusArgs) == 128 && alignof(GetTransferStatusArgs) == 4
                  && offsetof(GetTransferStatusArgs, skip_waiting) == 4
                  && offsetof(GetTransferStatusArgs, reserved) == 5,
              "hixl::GetTransferStatusArgs");
static_assert(sizeof(TransferResult) == 128 && offsetof(TransferResult, user_data) == 8
                  && offsetof(TransferResult, status) == 16 && offsetof(TransferResult, reserved) == 20,
              "hixl::TransferResult");
static_assert(sizeof(NotifyDesc) == 32 && sizeof(Hixl) == 8, "hixl::NotifyDesc, hixl::Hixl");
static_assert(sizeof(MemType) == 4 && sizeof(TransferStatus) == 4 && sizeof(Status) == 4, "enums are 4 bytes");

// Member functions are called as functions that take the object first; references are passed as pointers.
using Construct = void (*)(Hixl *);
using Initialize = Status (*)(Hixl *, const Text &, const Options &);
using Finalize = void (*)(Hixl *);
using RegisterMem = Status (*)(Hixl *, const MemDesc &, MemType, void *&);
using DeregisterMem = Status (*)(Hixl *, void *);
using Connect = Status (*)(Hixl *, const Text &, int32_t);
using GetAsyncConnectStatus = Status (*)(Hixl *, const Text &, AsyncConnectStatus &);
using TransferAsync = Status (*)(Hixl *, const Text &, TransferOp, const std::vector<TransferOpDesc> &,
                                 const TransferArgs &, void *&);
using GetTransferStatus = Status (*)(Hixl *, void *const &, TransferStatus &);
using GetTransferStatuses = Status (*)(Hixl *, const GetTransferStatusArgs &, std::vector<TransferResult> &);
using SendNotify = Status (*)(Hixl *, const Text &, const NotifyDesc &, int32_t);
using GetNotifies = Status (*)(Hixl *, std::vector<NotifyDesc> &);
using GetCapability = Status (*)(FeatureType, int32_t &);
using MakeText = void (*)(Text *, const char *, size_t);
using TextOf = const char *(*)(const Text *);

}  // namespace hx::abi
