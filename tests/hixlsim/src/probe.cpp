// libhixlprobe.so: HIXL's interface as plain C, so that tests call it without a compiler. Compiled against api.hpp, as a user's
// program is against CANN's headers.
#include <cstddef>
#include <cstring>

#include "api.hpp"

using namespace hixl;

namespace {

std::vector<TransferOpDesc> descs(const uint64_t *triples, size_t count) {
    std::vector<TransferOpDesc> out;
    for (size_t i = 0; i < count; ++i) {
        out.push_back({triples[3 * i], triples[3 * i + 1], triples[3 * i + 2]});
    }
    return out;
}

struct Notifies {
    std::vector<NotifyDesc> all;
};

}  // namespace

extern "C" {

HIXLSIM_API Hixl *probe_new() { return new Hixl; }
HIXLSIM_API void probe_delete(Hixl *hixl) { delete hixl; }

HIXLSIM_API uint32_t probe_initialize(Hixl *hixl, const char *id, const char **options, size_t count) {
    std::map<AscendString, AscendString> map;
    for (size_t i = 0; i < count; ++i) {
        map[AscendString(options[2 * i])] = AscendString(options[2 * i + 1]);
    }
    return hixl->Initialize(AscendString(id), map);
}

HIXLSIM_API void probe_finalize(Hixl *hixl) { hixl->Finalize(); }

HIXLSIM_API uint32_t probe_register(Hixl *hixl, uint64_t addr, size_t len, int type, void **handle) {
    MemDesc mem{};
    mem.addr = addr;
    mem.len = len;
    return hixl->RegisterMem(mem, static_cast<MemType>(type), *handle);
}

HIXLSIM_API uint32_t probe_deregister(Hixl *hixl, void *handle) { return hixl->DeregisterMem(handle); }
HIXLSIM_API uint32_t probe_connect(Hixl *hixl, const char *to, int32_t ms) { return hixl->Connect(AscendString(to), ms); }
HIXLSIM_API uint32_t probe_disconnect(Hixl *hixl, const char *to, int32_t ms) { return hixl->Disconnect(AscendString(to), ms); }
HIXLSIM_API uint32_t probe_connect_async(Hixl *hixl, const char *to, int32_t ms) { return hixl->ConnectAsync(AscendString(to), ms); }
HIXLSIM_API uint32_t probe_disconnect_async(Hixl *hixl, const char *to, int32_t ms) { return hixl->DisconnectAsync(AscendString(to), ms); }

HIXLSIM_API uint32_t probe_async_status(Hixl *hixl, const char *to, int *status) {
    AsyncConnectStatus found{};
    const Status answer = hixl->GetAsyncConnectStatus(AscendString(to), found);
    *status = static_cast<int>(found);
    return answer;
}

HIXLSIM_API uint32_t probe_async_count(Hixl *hixl, size_t *count) {
    std::map<AscendString, AsyncConnectStatus> all;
    const Status answer = hixl->GetAsyncConnectStatus(all);
    *count = all.size();
    return answer;
}

HIXLSIM_API uint32_t probe_transfer_sync(Hixl *hixl, const char *to, int op, const uint64_t *triples, size_t count, int32_t ms) {
    return hixl->TransferSync(AscendString(to), static_cast<TransferOp>(op), descs(triples, count), ms);
}

HIXLSIM_API uint32_t probe_transfer_async(Hixl *hixl, const char *to, int op, const uint64_t *triples, size_t count, void *user_data,
                                          void **req) {
    TransferArgs args;
    args.user_data = user_data;
    return hixl->TransferAsync(AscendString(to), static_cast<TransferOp>(op), descs(triples, count), args, *req);
}

HIXLSIM_API uint32_t probe_status(Hixl *hixl, void *req, int *status) {
    TransferStatus found = TransferStatus::WAITING;
    const Status answer = hixl->GetTransferStatus(req, found);
    *status = static_cast<int>(found);
    return answer;
}

// Rows of request, user data, status. `room` rows fit.
HIXLSIM_API uint32_t probe_batch(Hixl *hixl, uint32_t most, int skip_waiting, uint64_t *rows, size_t room, size_t *count) {
    GetTransferStatusArgs args;
    args.max_query_count = most;
    args.skip_waiting = skip_waiting != 0;
    std::vector<TransferResult> results;
    const Status answer = hixl->GetTransferStatus(args, results);
    *count = results.size();
    for (size_t i = 0; i < results.size() && i < room; ++i) {
        rows[3 * i] = reinterpret_cast<uint64_t>(results[i].req);
        rows[3 * i + 1] = reinterpret_cast<uint64_t>(results[i].user_data);
        rows[3 * i + 2] = static_cast<uint64_t>(results[i].status);
    }
    return answer;
}

HIXLSIM_API uint32_t probe_send_notify(Hixl *hixl, const char *to, const char *name, size_t name_size, const char *text, size_t text_size,
                                       int32_t ms) {
    const NotifyDesc notify = {AscendString(name, name_size), AscendString(text, text_size)};
    return hixl->SendNotify(AscendString(to), notify, ms);
}

// The vector outlives a call, for what each back-end does with what is in it.
HIXLSIM_API Notifies *probe_notifies_new() { return new Notifies; }
HIXLSIM_API void probe_notifies_delete(Notifies *notifies) { delete notifies; }
HIXLSIM_API void probe_notifies_add(Notifies *notifies, const char *name, const char *text) {
    notifies->all.push_back({AscendString(name), AscendString(text)});
}
HIXLSIM_API uint32_t probe_get_notifies(Hixl *hixl, Notifies *notifies) { return hixl->GetNotifies(notifies->all); }
HIXLSIM_API size_t probe_notifies_count(Notifies *notifies) { return notifies->all.size(); }
HIXLSIM_API const char *probe_notify_name(Notifies *notifies, size_t at) { return notifies->all[at].name.GetString(); }
HIXLSIM_API const char *probe_notify_text(Notifies *notifies, size_t at) { return notifies->all[at].notify_msg.GetString(); }

HIXLSIM_API uint32_t probe_capability(int feature, int32_t *value) { return Hixl::GetCapability(static_cast<FeatureType>(feature), *value); }

#define PROBE_OFFSET(type, field)                  \
    if (std::strcmp(name, #type "." #field) == 0) { \
        return offsetof(type, field);              \
    }
#define PROBE_SIZE(type)                          \
    if (std::strcmp(name, #type) == 0) {          \
        return sizeof(type) * 16 + alignof(type); \
    }

// "Type.field": its offset; "Type": sixteen times its size and its alignment.
HIXLSIM_API size_t probe_layout(const char *name) {
    PROBE_OFFSET(MemDesc, addr)
    PROBE_OFFSET(MemDesc, len)
    PROBE_OFFSET(MemDesc, reserved)
    PROBE_OFFSET(TransferOpDesc, local_addr)
    PROBE_OFFSET(TransferOpDesc, remote_addr)
    PROBE_OFFSET(TransferOpDesc, len)
    PROBE_OFFSET(TransferArgs, user_data)
    PROBE_OFFSET(TransferArgs, reserved)
    PROBE_OFFSET(GetTransferStatusArgs, max_query_count)
    PROBE_OFFSET(GetTransferStatusArgs, skip_waiting)
    PROBE_OFFSET(GetTransferStatusArgs, reserved)
    PROBE_OFFSET(TransferResult, req)
    PROBE_OFFSET(TransferResult, user_data)
    PROBE_OFFSET(TransferResult, status)
    PROBE_OFFSET(TransferResult, reserved)
    PROBE_OFFSET(NotifyDesc, name)
    PROBE_OFFSET(NotifyDesc, notify_msg)
    PROBE_SIZE(MemDesc)
    PROBE_SIZE(TransferOpDesc)
    PROBE_SIZE(TransferArgs)
    PROBE_SIZE(GetTransferStatusArgs)
    PROBE_SIZE(TransferResult)
    PROBE_SIZE(NotifyDesc)
    PROBE_SIZE(Hixl)
    PROBE_SIZE(AscendString)
    PROBE_SIZE(MemType)
    PROBE_SIZE(TransferOp)
    PROBE_SIZE(TransferStatus)
    PROBE_SIZE(AsyncConnectStatus)
    PROBE_SIZE(FeatureType)
    return SIZE_MAX;
}

}
