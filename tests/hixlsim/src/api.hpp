// The public interface of HIXL and of ge::AscendString, declared anew from the facts of its ABI: names, sizes and offsets are what a
// caller that was compiled against CANN's headers expects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define HIXLSIM_API __attribute__((visibility("default")))

namespace ge {

class AscendString {
  public:
    AscendString() = default;
    HIXLSIM_API explicit AscendString(const char *text);
    HIXLSIM_API AscendString(const char *text, size_t length);

    HIXLSIM_API const char *GetString() const;
    HIXLSIM_API size_t GetLength() const;
    HIXLSIM_API size_t Find(const AscendString &other) const;
    HIXLSIM_API size_t Hash() const;
    HIXLSIM_API bool operator<(const AscendString &other) const;
    HIXLSIM_API bool operator>(const AscendString &other) const;
    HIXLSIM_API bool operator<=(const AscendString &other) const;
    HIXLSIM_API bool operator>=(const AscendString &other) const;
    HIXLSIM_API bool operator==(const AscendString &other) const;
    HIXLSIM_API bool operator!=(const AscendString &other) const;

  private:
    std::shared_ptr<std::string> text_;
};

}  // namespace ge

namespace hixl {

using ge::AscendString;
using Status = uint32_t;
using TransferReq = void *;
using MemHandle = void *;

constexpr Status SUCCESS = 0;
constexpr Status PARAM_INVALID = 103900;
constexpr Status TIMEOUT = 103901;
constexpr Status NOT_CONNECTED = 103902;
constexpr Status ALREADY_CONNECTED = 103903;
constexpr Status UNSUPPORTED = 103905;
constexpr Status RESOURCE_EXHAUSTED = 203900;
constexpr Status FAILED = 503900;

enum FeatureType : int32_t { AUTO_CONNECT = 0, CLIENT_SERVER_COMM = 1 };
enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
enum class TransferStatus { WAITING, COMPLETED, TIMEOUT, FAILED };
enum class AsyncConnectStatus {
    NOT_CONNECT,
    CONNECT_PENDING,
    CONNECTING,
    CONNECTED,
    CONNECT_FAILED,
    DISCONNECT_PENDING,
    DISCONNECTING,
};

struct MemDesc {
    uintptr_t addr;
    size_t len;
    uint8_t reserved[128] = {};
};

struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    size_t len;
};

struct TransferArgs {
    const void *user_data = nullptr;
    uint8_t reserved[120] = {};
};

struct GetTransferStatusArgs {
    uint32_t max_query_count = UINT32_MAX;
    bool skip_waiting = false;
    uint8_t reserved[123] = {};
};

struct TransferResult {
    TransferReq req = nullptr;
    const void *user_data = nullptr;
    TransferStatus status = TransferStatus::WAITING;
    uint8_t reserved[108] = {};
};

struct NotifyDesc {
    AscendString name;
    AscendString notify_msg;
};

class HIXLSIM_API Hixl {
  public:
    Hixl();
    ~Hixl();
    Status Initialize(const AscendString &local_engine, const std::map<AscendString, AscendString> &options);
    void Finalize();
    Status RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle);
    Status DeregisterMem(MemHandle mem_handle);
    Status Connect(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status Disconnect(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status ConnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status DisconnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis = 1000);
    Status GetAsyncConnectStatus(const AscendString &remote_engine, AsyncConnectStatus &status);
    Status GetAsyncConnectStatus(std::map<AscendString, AsyncConnectStatus> &statuses);
    Status TransferSync(const AscendString &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &op_descs,
                        int32_t timeout_in_millis = 1000);
    Status TransferAsync(const AscendString &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &op_descs,
                         const TransferArgs &optional_args, TransferReq &req);
    Status GetTransferStatus(const TransferReq &req, TransferStatus &status);
    Status GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results);
    Status SendNotify(const AscendString &remote_engine, const NotifyDesc &notify, int32_t timeout_in_millis = 1000);
    Status GetNotifies(std::vector<NotifyDesc> &notifies);
    static Status GetCapability(FeatureType feature_type, int32_t &value);

  private:
    class HixlImpl;
    std::unique_ptr<HixlImpl> impl_;
};

#define HIXLSIM_LAYOUT(type, size, align) static_assert(sizeof(type) == (size) && alignof(type) == (align), #type)
HIXLSIM_LAYOUT(AscendString, 16, 8);
HIXLSIM_LAYOUT(MemDesc, 144, 8);
HIXLSIM_LAYOUT(TransferOpDesc, 24, 8);
HIXLSIM_LAYOUT(TransferArgs, 128, 8);
HIXLSIM_LAYOUT(GetTransferStatusArgs, 128, 4);
HIXLSIM_LAYOUT(TransferResult, 128, 8);
HIXLSIM_LAYOUT(NotifyDesc, 32, 8);
HIXLSIM_LAYOUT(Hixl, 8, 8);
static_assert(offsetof(GetTransferStatusArgs, skip_waiting) == 4 && offsetof(TransferResult, status) == 16, "offsets");
static_assert(sizeof(MemType) == 4 && sizeof(TransferOp) == 4 && sizeof(TransferStatus) == 4, "enums");

}  // namespace hixl
