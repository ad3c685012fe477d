// FAB: fabric memory. Requests are numbers; a broken stream is detected; notifications need no link and are never answered.
#include <algorithm>
#include <stdexcept>

#include "acl.hpp"
#include "engine.hpp"
#include "json.hpp"

namespace sim {
namespace {

using hixl::ALREADY_CONNECTED;
using hixl::FAILED;
using hixl::NOT_CONNECTED;
using hixl::PARAM_INVALID;
using hixl::SUCCESS;
using hixl::TIMEOUT;
using hixl::TransferStatus;

constexpr int auto_connect_ms = 3000;
constexpr uint64_t streams_per_engine = 512;
constexpr size_t most_notifies = 4096;

struct Link : Joint {
    std::mutex transfer;
    bool over = false;
    std::unordered_map<uint64_t, RequestPtr> requests;
};

using LinkPtr = std::shared_ptr<Link>;

class Fab : public Engine {
  public:
    explicit Fab(const std::string &id) : Engine(Backend::fab, id) {}

    Status deregister_mem(hixl::MemHandle handle) override {
        const Borrowed context(context_);
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            if (!links_.empty()) {
                return FAILED;
            }
        }
        return Engine::deregister_mem(handle);
    }

    Status connect(const std::string &remote, int timeout_ms) override {
        const Borrowed context(context_);
        return connect_now(remote, timeout_ms);
    }

    Status disconnect(const std::string &remote, int) override {
        const Borrowed context(context_);
        stall(Point::disconnect_stall);
        const Status status = disconnect_now(remote);
        return status != SUCCESS ? status : failure(Point::disconnect);
    }

    Status transfer_sync(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops,
                         int timeout_ms) override {
        const Borrowed context(context_);
        LinkPtr link;
        Status status = prepare(remote, ops, link);
        if (status != SUCCESS) {
            return status;
        }
        status = run_sync(*link, op, ops, timeout_ms);
        return status == SUCCESS ? status : disconnect_on_error(remote, status);
    }

    Status transfer_async(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops, const void *,
                          hixl::TransferReq &req) override {
        const Borrowed context(context_);
        req = nullptr;
        LinkPtr link;
        Status status = prepare(remote, ops, link);
        const uint64_t id = next_request_++;
        if (status == SUCCESS) {
            status = link == nullptr ? NOT_CONNECTED : submit(link, id, op, ops);
        }
        if (status != SUCCESS) {
            return disconnect_on_error(remote, status);
        }
        req = reinterpret_cast<void *>(id);
        return SUCCESS;
    }

    Status status_of(hixl::TransferReq req, TransferStatus &status) override {
        const Borrowed context(context_);
        const auto id = reinterpret_cast<uint64_t>(req);
        const LinkPtr link = link_of(id);
        if (link == nullptr) {
            add(Count::stale);
            return PARAM_INVALID;
        }
        const Status answer = query(*link, id, status);
        return answer == SUCCESS && status == TransferStatus::FAILED ? disconnect_on_error(link->remote, answer) : answer;
    }

    Status send_notify(const std::string &remote, const Pending &notify, int timeout_ms) override {
        const Borrowed context(context_);
        std::string ip;
        int port = 0;
        const auto deadline = after(timeout_ms / 1000.0);
        ConnectionPtr fresh;
        Status status = parse_engine(remote, ip, port);
        status = status == SUCCESS ? dial(ip, port, deadline, fresh) : status;
        if (status != SUCCESS) {
            return status;
        }
        if (!is_utf8(notify.name) || !is_utf8(notify.text)) {
            throw std::runtime_error("invalid UTF-8");  // through the frames of the caller, which does not catch it
        }
        const Status injected = failure(Point::notify);
        if (injected != SUCCESS) {
            return injected;
        }
        fresh->send(Message::notify, Pack().string(notify.name).string(notify.text).text(), deadline);
        return SUCCESS;
    }

    Status get_notifies(std::vector<hixl::NotifyDesc> &notifies) override {
        const Borrowed context(context_);
        std::lock_guard<std::mutex> hold(notifies_guard_);
        notifies.swap(notifies_);  // the previous contents of the caller's vector come back next time
        return SUCCESS;
    }

    void break_link(const std::string &remote) override {
        std::lock_guard<std::mutex> hold(links_guard_);
        for (const auto &each : links_) {
            if (remote.empty() || each.first == remote) {
                each.second->stream->fail();
            }
        }
    }

  protected:
    Status begin() override {
        const uint64_t each = options_.unfold ? 2 : options_.task_streams;
        slots_ = std::make_unique<Slots>(streams_per_engine / each);
        return SUCCESS;
    }

    void end() override {
        std::map<std::string, LinkPtr> links;
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            links.swap(links_);
        }
        for (const auto &each : links) {
            end_link(each.second);
        }
    }

    Status admit(const Region &region, hixl::MemHandle &same) override {
        const Status status = region.len == 0 ? PARAM_INVALID : check_overlap(region, same);
        any_host_ = any_host_ || (status == SUCCESS && region.type == hixl::MEM_HOST);
        return status;
    }

    bool heard(const ConnectionPtr &, Half *, Frame &frame) override {
        if (frame.type != Message::notify) {
            return true;
        }
        Unpack body(frame.body);
        const std::string name = body.string();
        const std::string text = body.string();
        std::lock_guard<std::mutex> hold(notifies_guard_);
        if (notifies_.size() < most_notifies) {  // beyond that it is lost silently
            notifies_.push_back({hixl::AscendString(name.c_str()), hixl::AscendString(text.c_str())});
            add(Count::notifies);
        }
        return true;
    }

    void beat() override {
        if (!options_.auto_connect) {
            return;
        }
        std::map<std::string, LinkPtr> links;
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            links = links_;
        }
        for (const auto &each : links) {
            if (each.second->control->send(Message::heartbeat, "H", after(1)) != 0) {
                disconnect_now(each.first);
            }
        }
    }

  private:
    LinkPtr find(const std::string &remote) {
        std::lock_guard<std::mutex> hold(links_guard_);
        const auto found = links_.find(remote);
        return found == links_.end() ? nullptr : found->second;
    }

    LinkPtr link_of(uint64_t id) {
        std::lock_guard<std::mutex> hold(routes_guard_);
        const auto found = routes_.find(id);
        return found == routes_.end() ? nullptr : found->second;
    }

    Status connect_now(const std::string &remote, int timeout_ms) {
        if (find(remote) != nullptr) {
            return ALREADY_CONNECTED;
        }
        std::lock_guard<std::mutex> one(connecting_);
        stall(Point::connect_stall);
        const auto link = std::make_shared<Link>();
        const Status injected = failure(Point::connect);
        const Breaks breaks = options_.unfold ? Breaks::all : Breaks::itself;
        const Status status = injected != SUCCESS ? injected : join(remote, timeout_ms, breaks, true, *link);
        if (status != SUCCESS) {
            return status;
        }
        link->stream->check_local = false;
        std::lock_guard<std::mutex> hold(links_guard_);
        if (!links_.emplace(remote, link).second) {
            part(*link);
            return ALREADY_CONNECTED;
        }
        return SUCCESS;
    }

    Status disconnect_now(const std::string &remote) {
        LinkPtr link;
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            const auto found = links_.find(remote);
            if (found == links_.end()) {
                return NOT_CONNECTED;
            }
            link = found->second;
            links_.erase(found);
        }
        end_link(link);
        return SUCCESS;
    }

    void end_link(const LinkPtr &link) {
        std::lock_guard<std::mutex> hold(link->transfer);
        link->over = true;
        part(*link);
        add(Count::aborted, static_cast<int64_t>(link->requests.size()));
        purge(*link);
    }

    Status disconnect_on_error(const std::string &remote, Status status) {
        if (options_.auto_connect) {
            (void)disconnect_now(remote);
        }
        return status;
    }

    Status prepare(const std::string &remote, const std::vector<hixl::TransferOpDesc> &ops, LinkPtr &link) {
        if (ops.empty()) {
            return PARAM_INVALID;
        }
        if (options_.auto_connect) {
            const Status status = connect_now(remote, auto_connect_ms);
            if (status != SUCCESS && status != ALREADY_CONNECTED) {
                return status;
            }
        }
        link = find(remote);
        return link == nullptr ? NOT_CONNECTED : SUCCESS;
    }

    // Remote addresses are translated. Local ones are where host memory was ever registered and the first is host memory: then
    // all of them, and a list that mixes the kinds is refused or not by what comes first.
    Status check(Link &link, const std::vector<hixl::TransferOpDesc> &ops) {
        const bool translated = any_host_ && hixlsim_memory_kind(reinterpret_cast<void *>(ops[0].local_addr)) != 2;
        const Regions locals = translated ? snapshot() : Regions();
        for (const hixl::TransferOpDesc &op : ops) {
            if (op.len == 0 || !link.stream->remote_regions.covers(op.remote_addr, op.len, false) ||
                (translated && !locals.covers(op.local_addr, op.len))) {
                return PARAM_INVALID;
            }
        }
        return SUCCESS;
    }

    bool take_slot(const Link &link) { return (options_.unfold && !link.requests.empty()) || slots_->take(); }

    Status submit(const LinkPtr &link, uint64_t id, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops) {
        std::lock_guard<std::mutex> hold(link->transfer);
        stall(Point::stall);
        if (link->over) {
            return NOT_CONNECTED;
        }
        const Status checked = check(*link, ops);
        if (checked != SUCCESS) {
            return checked;
        }
        if (faulty(Point::exhausted) || !take_slot(*link)) {
            return FAILED;  // the others say RESOURCE_EXHAUSTED
        }
        const RequestPtr request = make(link->stream, op, ops);
        link->requests[id] = request;
        add(Count::live_requests);
        const Status injected = failure(Point::submit);
        if (injected != SUCCESS) {
            options_.unfold ? purge(*link) : release(*link, id);
            return injected;
        }
        {
            std::lock_guard<std::mutex> table(routes_guard_);
            routes_[id] = link;
        }
        worker_.submit(request);
        return SUCCESS;
    }

    Status query(Link &link, uint64_t id, TransferStatus &status) {
        std::lock_guard<std::mutex> hold(link.transfer);
        const auto found = link.requests.find(id);
        if (found == link.requests.end()) {
            return PARAM_INVALID;
        }
        const Status injected = failure(Point::query);
        if (injected != SUCCESS) {
            release(link, id);
            add(Count::failed);
            return injected;
        }
        switch (link.stream->state_of(*found->second)) {
            case State::waiting:
                status = TransferStatus::WAITING;
                break;
            case State::done:
                status = TransferStatus::COMPLETED;
                add(Count::completed);
                release(link, id);
                break;
            case State::failed:
                status = TransferStatus::FAILED;
                add(Count::failed);
                // Unfolded requests share a stream: the siblings go with this one, those that are through as well.
                options_.unfold ? purge(link) : release(link, id);
                break;
        }
        return SUCCESS;
    }

    void release(Link &link, uint64_t id) {
        {
            std::lock_guard<std::mutex> hold(routes_guard_);
            routes_.erase(id);
        }
        if (link.requests.erase(id) != 0) {
            add(Count::live_requests, -1);
            if (!options_.unfold || link.requests.empty()) {
                slots_->give();
            }
        }
    }

    void purge(Link &link) {
        while (!link.requests.empty()) {
            release(link, link.requests.begin()->first);
        }
    }

    Status run_sync(Link &link, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops, int timeout_ms) {
        std::lock_guard<std::mutex> hold(link.transfer);
        stall(Point::stall);
        const Status checked = link.over ? NOT_CONNECTED : check(link, ops);
        if (checked != SUCCESS) {
            return checked;
        }
        const RequestPtr request = make(link.stream, op, ops);
        worker_.submit(request);
        if (!wait(*request, after(timeout_ms / 1000.0))) {
            link.stream->forsake(*request);
            purge(link);
            return TIMEOUT;
        }
        return link.stream->state_of(*request) == State::done ? SUCCESS : FAILED;
    }

    std::mutex links_guard_;
    std::map<std::string, LinkPtr> links_;
    std::mutex connecting_;
    std::mutex routes_guard_;
    std::unordered_map<uint64_t, LinkPtr> routes_;
    std::atomic<uint64_t> next_request_{1};
    std::unique_ptr<Slots> slots_;
    std::atomic<bool> any_host_{false};
    std::mutex notifies_guard_;
    std::vector<hixl::NotifyDesc> notifies_;
};

}  // namespace

EnginePtr make_fab(const std::string &id) { return std::make_unique<Fab>(id); }

}  // namespace sim
