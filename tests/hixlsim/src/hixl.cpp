// hixl::Hixl: the checks before any back-end, and the rules whose breach corrupts memory in the real library.
#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include "acl.hpp"
#include "connect_pool.hpp"
#include "engine.hpp"

namespace hixl {
namespace {

using sim::die;

constexpr size_t most_text = 1024;

// A call that may block, made by a thread that holds Python's lock, stops the whole interpreter.
void check_gil(const char *name) {
    using Check = int (*)();
    static const auto initialized = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    static const auto held = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    if (initialized != nullptr && held != nullptr && initialized() != 0 && held() != 0) {
        die("%s is called with the GIL held", name);
    }
}

}  // namespace

class Hixl::HixlImpl {
  public:
    std::unique_ptr<sim::Engine> engine;
    std::unique_ptr<sim::ConnectPool> pool;
    // The real one has no such guard; here a breach aborts with a message.
    std::atomic<int> calls{0};
    std::atomic<const char *> latest{""};
    std::atomic<bool> closing{false};
    std::atomic<void *> context{nullptr};  // of the thread that called Initialize

    void close() {
        if (engine != nullptr) {
            pool->stop();
            engine->finalize();
            engine.reset();
            pool.reset();
            context = nullptr;
        }
    }
};

namespace {

std::mutex alive_guard;
std::vector<sim::Engine *> &alive = *new std::vector<sim::Engine *>;

void remember(sim::Engine *engine) {
    std::lock_guard<std::mutex> hold(alive_guard);
    alive.push_back(engine);
}

// HIXLSIM_STRICT: requests whose last answer was given. In the real library they may be another's by now.
std::mutex answered_guard;
using Asked = std::pair<const sim::Engine *, void *>;  // some back-ends number the requests of each engine
std::set<Asked> &answered = *new std::set<Asked>;      // threads may outlive statics

void forget(sim::Engine *engine) {
    {
        std::lock_guard<std::mutex> hold(answered_guard);
        answered.erase(answered.lower_bound({engine, nullptr}), answered.lower_bound({engine + 1, nullptr}));
    }
    std::lock_guard<std::mutex> hold(alive_guard);
    for (auto each = alive.begin(); each != alive.end(); ++each) {
        if (*each == engine) {
            alive.erase(each);
            return;
        }
    }
}

void note_issued(const sim::Engine *engine, void *req) {
    if (sim::settings().strict) {
        std::lock_guard<std::mutex> hold(answered_guard);
        answered.erase({engine, req});
    }
}

void note_answered(const sim::Engine *engine, void *req, TransferStatus status) {
    if (sim::settings().strict && status != TransferStatus::WAITING) {
        std::lock_guard<std::mutex> hold(answered_guard);
        answered.insert({engine, req});
    }
}

void check_answered(const sim::Engine *engine, void *req) {
    if (sim::settings().strict) {
        std::lock_guard<std::mutex> hold(answered_guard);
        if (answered.count({engine, req}) != 0) {
            die("request %p is asked about again: its first answer that was not WAITING was its last", req);
        }
    }
}

// Around each call of an object.
template <typename Impl>
class Call {
  public:
    Call(Impl &impl, const char *name) : impl_(impl) {
        check_gil(name);
        impl_.calls.fetch_add(1);
        if (impl_.closing) {
            die("%s is called while Finalize runs", name);
        }
        impl_.latest = name;
        void *current = nullptr;
        if (sim::settings().strict && impl_.context != nullptr && (aclrtGetCurrentContext(&current) != 0 || current != impl_.context)) {
            die("%s is called by a thread without the context of Initialize", name);
        }
    }
    ~Call() { impl_.calls.fetch_sub(1); }

  private:
    Impl &impl_;
};

std::string text(const AscendString &string) { return string.GetString(); }

// The answer may come too late for the caller, about a link that is there.
Status connect(sim::Engine &engine, const std::string &remote, int timeout_ms) {
    const Status status = engine.connect(remote, timeout_ms);
    return status != SUCCESS ? status : sim::failure(sim::Point::connect_late, TIMEOUT);
}

}  // namespace

#define ENTER(name)                           \
    const Call<HixlImpl> call(*impl_, name);  \
    sim::Engine *engine = impl_->engine.get(); \
    if (engine == nullptr) {                  \
        return FAILED;                        \
    }

Hixl::Hixl() : impl_(new HixlImpl) { sim::read_environment(); }

Hixl::~Hixl() { Finalize(); }

Status Hixl::Initialize(const AscendString &local_engine, const std::map<AscendString, AscendString> &options) {
    const Call<HixlImpl> call(*impl_, "Initialize");
    const Status injected = sim::failure(sim::Point::init);
    if (injected != SUCCESS) {
        return injected;
    }
    sim::RawOptions raw;
    for (const auto &each : options) {
        raw[text(each.first)] = text(each.second);
    }
    sim::Options parsed;
    sim::Backend backend = sim::Backend::comm;
    if (parsed.parse(raw) != SUCCESS || parsed.choose(backend) != SUCCESS) {
        return PARAM_INVALID;
    }
    const std::string id = text(local_engine);
    sim::EnginePtr made = backend == sim::Backend::comm ? sim::make_comm(id) : backend == sim::Backend::cs ? sim::make_cs(id) : sim::make_fab(id);
    void *context = nullptr;
    aclrtGetCurrentContext(&context);
    const Status status = made->initialize(parsed);
    if (status != SUCCESS) {
        return status;
    }
    // A live object's engine is replaced silently, if the new one came up beside it; COMM hangs where it had links.
    if (impl_->engine != nullptr) {
        if (sim::settings().strict) {
            die("Initialize is called on an object that has an engine");
        }
        forget(impl_->engine.get());
        impl_->close();
    }
    impl_->context = context;
    remember(made.get());
    impl_->pool = std::make_unique<sim::ConnectPool>(made->options().connect_threads, made->options().connect_queue, context);
    impl_->engine = std::move(made);
    return SUCCESS;
}

void Hixl::Finalize() {
    if (impl_->engine == nullptr) {
        return;
    }
    check_gil("Finalize");
    if (impl_->closing.exchange(true)) {
        die("Finalize is called while Finalize runs");
    }
    if (impl_->calls != 0) {
        die("Finalize is called while %s runs", impl_->latest.load());
    }
    forget(impl_->engine.get());
    impl_->close();
    {
        std::lock_guard<std::mutex> hold(answered_guard);
        answered.clear();
    }
    impl_->closing = false;
}

Status Hixl::RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle) {
    ENTER("RegisterMem");
    return mem.addr == 0 ? PARAM_INVALID : engine->register_mem(mem, type, mem_handle);
}

Status Hixl::DeregisterMem(MemHandle mem_handle) {
    ENTER("DeregisterMem");
    return mem_handle == nullptr ? PARAM_INVALID : engine->deregister_mem(mem_handle);
}

Status Hixl::Connect(const AscendString &remote_engine, int32_t timeout_in_millis) {
    ENTER("Connect");
    return timeout_in_millis <= 0 ? PARAM_INVALID : connect(*engine, text(remote_engine), timeout_in_millis);
}

Status Hixl::Disconnect(const AscendString &remote_engine, int32_t timeout_in_millis) {
    ENTER("Disconnect");
    return timeout_in_millis <= 0 ? PARAM_INVALID : engine->disconnect(text(remote_engine), timeout_in_millis);
}

Status Hixl::ConnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis) {
    ENTER("ConnectAsync");
    if (timeout_in_millis <= 0) {
        return PARAM_INVALID;
    }
    const std::string remote = text(remote_engine);
    return impl_->pool->submit(remote, true, [engine, remote, timeout_in_millis] {
        const Status status = connect(*engine, remote, timeout_in_millis);  // the code is lost, but not that there was one
        return status == SUCCESS || status == ALREADY_CONNECTED ? AsyncConnectStatus::CONNECTED : AsyncConnectStatus::CONNECT_FAILED;
    });
}

Status Hixl::DisconnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis) {
    ENTER("DisconnectAsync");
    if (timeout_in_millis <= 0) {
        return PARAM_INVALID;
    }
    const std::string remote = text(remote_engine);
    return impl_->pool->submit(remote, false, [engine, remote, timeout_in_millis] {
        (void)engine->disconnect(remote, timeout_in_millis);
        return AsyncConnectStatus::NOT_CONNECT;
    });
}

Status Hixl::GetAsyncConnectStatus(const AscendString &remote_engine, AsyncConnectStatus &status) {
    ENTER("GetAsyncConnectStatus");
    status = impl_->pool->status(text(remote_engine));
    return SUCCESS;
}

Status Hixl::GetAsyncConnectStatus(std::map<AscendString, AsyncConnectStatus> &statuses) {
    ENTER("GetAsyncConnectStatus");
    statuses.clear();
    for (const auto &each : impl_->pool->all()) {
        statuses[AscendString(each.first.c_str())] = each.second;
    }
    return SUCCESS;
}

static bool has_null(const std::vector<TransferOpDesc> &op_descs) {
    for (const TransferOpDesc &op : op_descs) {
        if (op.local_addr == 0 || op.remote_addr == 0) {
            return true;
        }
    }
    return false;
}

Status Hixl::TransferSync(const AscendString &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &op_descs,
                          int32_t timeout_in_millis) {
    ENTER("TransferSync");
    if (timeout_in_millis <= 0 || has_null(op_descs)) {
        return PARAM_INVALID;
    }
    return engine->transfer_sync(text(remote_engine), operation, op_descs, timeout_in_millis);
}

Status Hixl::TransferAsync(const AscendString &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &op_descs,
                           const TransferArgs &optional_args, TransferReq &req) {
    ENTER("TransferAsync");
    if (has_null(op_descs)) {
        return PARAM_INVALID;
    }
    const Status status = engine->transfer_async(text(remote_engine), operation, op_descs, optional_args.user_data, req);
    if (status == SUCCESS) {
        note_issued(&*engine, req);
    }
    return status;
}

Status Hixl::GetTransferStatus(const TransferReq &req, TransferStatus &status) {
    ENTER("GetTransferStatus");
    sim::add(sim::Count::queries);
    if (req == nullptr) {
        return FAILED;
    }
    check_answered(&*engine, req);
    status = TransferStatus::WAITING;
    const Status answer = engine->status_of(req, status);
    if (answer != SUCCESS) {
        status = TransferStatus::FAILED;
    }
    note_answered(&*engine, req, status);
    return answer;
}

Status Hixl::GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results) {
    ENTER("GetTransferStatus");
    sim::add(sim::Count::queries);
    const Status answer = engine->status_of_all(args.max_query_count, args.skip_waiting, results);
    if (answer == SUCCESS) {
        sim::add(sim::Count::batches);
        for (const TransferResult &result : results) {
            note_answered(&*engine, result.req, result.status);
        }
    }
    return answer;
}

Status Hixl::SendNotify(const AscendString &remote_engine, const NotifyDesc &notify, int32_t timeout_in_millis) {
    ENTER("SendNotify");
    if (notify.name.GetLength() > most_text || notify.notify_msg.GetLength() > most_text || timeout_in_millis <= 0) {
        return PARAM_INVALID;
    }
    // As C strings: a NUL ends them.
    return engine->send_notify(text(remote_engine), {text(notify.name), text(notify.notify_msg)}, timeout_in_millis);
}

Status Hixl::GetNotifies(std::vector<NotifyDesc> &notifies) {
    ENTER("GetNotifies");
    if (sim::settings().strict && !notifies.empty()) {
        die("GetNotifies is given a vector that is not empty: each back-end does something else with what is in it");
    }
    return engine->get_notifies(notifies);
}

Status Hixl::GetCapability(FeatureType feature_type, int32_t &value) {
    if (feature_type < 0) {
        return PARAM_INVALID;
    }
    value = feature_type == AUTO_CONNECT || feature_type == CLIENT_SERVER_COMM;
    return SUCCESS;
}

}  // namespace hixl

// For tests: what the environment gave at the start may be changed later.
extern "C" {

HIXLSIM_API int hixlsim_set(const char *name, const char *value) {
    sim::read_environment();
    return sim::set(name, value) ? 0 : -1;
}

HIXLSIM_API int64_t hixlsim_count(const char *name) { return sim::get(name); }

// The hardware of all links to `remote` fails now; to any peer where it is empty.
HIXLSIM_API void hixlsim_break(const char *remote) {
    std::lock_guard<std::mutex> hold(hixl::alive_guard);
    for (sim::Engine *engine : hixl::alive) {
        engine->break_link(remote);
    }
}

}
