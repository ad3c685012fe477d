// COMM: the HCCL communicator, default on A2 and A3. Requests are numbers; a dead stream is never detected; notifications are
// queued with the link that brought them.
#include <algorithm>
#include <cerrno>

#include "engine.hpp"
#include "json.hpp"

namespace sim {
namespace {

using hixl::ALREADY_CONNECTED;
using hixl::FAILED;
using hixl::NOT_CONNECTED;
using hixl::PARAM_INVALID;
using hixl::RESOURCE_EXHAUSTED;
using hixl::SUCCESS;
using hixl::TIMEOUT;
using hixl::TransferStatus;

constexpr int connect_when_transfer_ms = 3000;
constexpr uint64_t streams_per_engine = 512;
constexpr size_t most_notifies = 4096;
constexpr Status broken_pipe = 1;  // a raw value that leaks out of the library

// HCCL cannot create two communicators at a time.
std::mutex creating;

bool is_fatal(Status status) {
    return status != SUCCESS && status != PARAM_INVALID && status != NOT_CONNECTED && status != ALREADY_CONNECTED &&
           status != hixl::UNSUPPORTED && status != RESOURCE_EXHAUSTED;
}

struct Link : Joint {
    std::mutex launch;  // held by every submit and every query, and by a synchronous transfer throughout
    bool unavailable = false;
    bool parted = false;
    std::unordered_map<uint64_t, RequestPtr> requests;
};

using LinkPtr = std::shared_ptr<Link>;

class Comm : public Engine {
  public:
    explicit Comm(const std::string &id) : Engine(Backend::comm, id) {}

    Status connect(const std::string &remote, int timeout_ms) override {
        const Borrowed context(context_);
        if (options_.channel_pool) {
            std::lock_guard<std::mutex> hold(connecting_);
            return connect_now(remote, timeout_ms);
        }
        return connect_now(remote, timeout_ms);
    }

    Status disconnect(const std::string &remote, int timeout_ms) override {
        const Borrowed context(context_);
        return disconnect_now(remote, timeout_ms);
    }

    Status transfer_sync(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops,
                         int timeout_ms) override {
        if (ops.empty()) {
            return PARAM_INVALID;
        }
        const Borrowed context(context_);
        const LinkPtr link = link_for_transfer(remote, timeout_ms);
        if (link == nullptr) {
            return NOT_CONNECTED;
        }
        const Status status = run_sync(*link, op, ops, timeout_ms);
        return status == SUCCESS ? status : disconnect_on_error(remote, timeout_ms, status);
    }

    Status transfer_async(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops, const void *,
                          hixl::TransferReq &req) override {
        if (ops.empty()) {
            return PARAM_INVALID;
        }
        const Borrowed context(context_);
        const LinkPtr link = link_for_transfer(remote, connect_when_transfer_ms);
        if (link == nullptr) {
            return NOT_CONNECTED;
        }
        const uint64_t id = next_request_++;
        req = reinterpret_cast<void *>(id);
        const Status status = submit(*link, id, op, ops);
        if (status != SUCCESS) {
            return disconnect_on_error(remote, connect_when_transfer_ms, status);
        }
        std::lock_guard<std::mutex> hold(requests_guard_);
        requests_[id] = remote;
        return SUCCESS;
    }

    Status status_of(hixl::TransferReq req, TransferStatus &status) override {
        const Borrowed context(context_);
        std::lock_guard<std::mutex> hold(requests_guard_);  // for the whole query, and so for all links
        const auto id = reinterpret_cast<uint64_t>(req);
        const auto found = requests_.find(id);
        if (found == requests_.end()) {
            add(Count::stale);
            return PARAM_INVALID;
        }
        const std::string remote = found->second;
        const LinkPtr link = find(remote);
        if (link == nullptr) {
            requests_.erase(found);
            return NOT_CONNECTED;
        }
        const Status answer = query(*link, id, status);
        if (answer != SUCCESS || status != TransferStatus::WAITING) {
            requests_.erase(found);
        }
        return answer == SUCCESS ? answer : disconnect_on_error(remote, connect_when_transfer_ms, answer);
    }

    Status send_notify(const std::string &remote, const Pending &notify, int timeout_ms) override {
        const LinkPtr link = find(remote);
        if (link == nullptr) {
            return NOT_CONNECTED;
        }
        if (!is_utf8(notify.name) || !is_utf8(notify.text)) {
            return PARAM_INVALID;
        }
        const uint64_t id = next_notify_++;
        const auto deadline = after(timeout_ms / 1000.0);
        const Status injected = failure(Point::notify, TIMEOUT);
        if (injected != SUCCESS) {
            link->control->send_half();
            return injected;
        }
        const int error = link->control->send(Message::notify, Pack().number(id).string(notify.name).string(notify.text).text(), deadline);
        if (error != 0) {
            return error == EPIPE || error == EBADF ? broken_pipe : error == ETIMEDOUT ? TIMEOUT : FAILED;
        }
        std::unique_lock<std::mutex> hold(acks_guard_);
        const bool acked = acks_bell_.wait_until(hold, deadline, [this, id] { return acks_.count(id) != 0; });
        acks_.erase(id);
        return acked ? SUCCESS : TIMEOUT;
    }

    Status get_notifies(std::vector<hixl::NotifyDesc> &notifies) override {
        std::lock_guard<std::mutex> hold(halves_guard_);
        std::map<std::string, Half *> by_client;
        for (auto &each : halves_) {
            by_client[each.second.client] = &each.second;
        }
        for (const auto &each : by_client) {
            for (const Pending &notify : each.second->notifies) {
                notifies.push_back({hixl::AscendString(notify.name.c_str()), hixl::AscendString(notify.text.c_str())});
            }
            each.second->notifies.clear();
        }
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
    void end() override {
        std::map<std::string, LinkPtr> links;
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            links = links_;
        }
        for (const auto &each : links) {
            destroy(each.first);
        }
    }

    Status admit(const Region &region, hixl::MemHandle &same) override {
        for (const auto &each : memory_) {
            const Region &other = *each.second;
            if (other.addr == region.addr && other.len == region.len && other.type == region.type) {
                same = each.first;
            }
        }
        return SUCCESS;
    }

    bool heard(const ConnectionPtr &from, Half *half, Frame &frame) override {
        Unpack body(frame.body);
        if (frame.type == Message::ack) {
            std::lock_guard<std::mutex> hold(acks_guard_);
            acks_.insert(body.number());  // a late one is never removed
            acks_bell_.notify_all();
            return true;
        }
        if (frame.type == Message::part) {
            const std::string client = body.string();
            replace(client);
            from->send(Message::ack, Pack().number(SUCCESS).text(), after(1));
            return true;
        }
        if (frame.type != Message::notify || half == nullptr) {
            return true;
        }
        const uint64_t id = body.number();
        const Pending notify = {body.string(), body.string()};
        if (half->notifies.size() >= most_notifies) {
            return false;  // and with that, nothing of this link is read any more
        }
        half->notifies.push_back(notify);
        add(Count::notifies);
        double late = 0;
        if (faulty(Point::ack_lost)) {
            return true;
        }
        const auto answer = [from, id] { from->send(Message::ack, Pack().number(id).text(), after(1)); };
        faulty(Point::ack_delay, &late) ? post_->later(after(late), answer) : answer();
        return true;
    }

    void beat() override {
        std::vector<std::pair<std::string, LinkPtr>> links;
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            links.assign(links_.begin(), links_.end());
        }
        for (const auto &each : links) {
            const int error = each.second->control->send(Message::heartbeat, "H", after(1));
            if ((error == EPIPE || error == EBADF) && options_.auto_connect) {
                destroy(each.first);
            }
        }
        const auto silent = Clock::now() - std::chrono::milliseconds(settings().silence_ms);
        std::lock_guard<std::mutex> hold(halves_guard_);
        for (auto each = halves_.begin(); each != halves_.end();) {
            each = each->second.heard < silent ? drop(each) : std::next(each);
        }
    }

    // The earlier half of a client of this name is dropped, with everything that it had not delivered.
    void replace(const std::string &client) override {
        for (auto each = halves_.begin(); each != halves_.end();) {
            each = each->second.client == client ? drop(each) : std::next(each);
        }
    }

  private:
    std::map<uint64_t, Half>::iterator drop(std::map<uint64_t, Half>::iterator half) {
        post_->forget(half->second.control);
        half->second.control->shut();
        return halves_.erase(half);
    }

    LinkPtr find(const std::string &remote) {
        std::lock_guard<std::mutex> hold(links_guard_);
        const auto found = links_.find(remote);
        return found == links_.end() ? nullptr : found->second;
    }

    LinkPtr link_for_transfer(const std::string &remote, int timeout_ms) {
        if (options_.auto_connect || options_.channel_pool) {
            std::lock_guard<std::mutex> hold(connecting_);
            if (find(remote) == nullptr) {
                (void)connect_now(remote, timeout_ms);
            }
        }
        return find(remote);
    }

    Status connect_now(const std::string &remote, int timeout_ms) {
        if (find(remote) != nullptr) {
            return ALREADY_CONNECTED;
        }
        const auto deadline = after(timeout_ms / 1000.0);
        while (options_.channel_pool && link_count() >= options_.max_channel) {
            if (Clock::now() >= deadline) {
                return RESOURCE_EXHAUSTED;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        const auto link = std::make_shared<Link>();
        const Status injected = failure(Point::connect);
        const Status status = injected != SUCCESS ? injected : join(remote, timeout_ms, Breaks::silently, false, *link);
        if (status != SUCCESS) {
            return status;
        }
        {
            std::lock_guard<std::mutex> hold(creating);
            stall(Point::connect_stall);
        }
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            if (!links_.emplace(remote, link).second) {
                part(*link);
                return ALREADY_CONNECTED;
            }
        }
        post_->watch(link->control);
        if (options_.channel_pool && link_count() > options_.high_mark) {
            evict(remote);
        }
        return SUCCESS;
    }

    // Links with nothing in flight go until the low mark is reached; the next transfer connects them again.
    void evict(const std::string &but) {
        std::vector<std::string> idle;
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            for (const auto &each : links_) {
                std::lock_guard<std::mutex> launch(each.second->launch);
                if (each.first != but && each.second->requests.empty()) {
                    idle.push_back(each.first);
                }
            }
        }
        for (const std::string &each : idle) {
            if (link_count() <= options_.low_mark) {
                return;
            }
            disconnect_now(each, connect_when_transfer_ms);
        }
    }

    size_t link_count() {
        std::lock_guard<std::mutex> hold(links_guard_);
        return links_.size();
    }

    Status disconnect_now(const std::string &remote, int timeout_ms) {
        if (find(remote) == nullptr) {
            return NOT_CONNECTED;
        }
        stall(Point::disconnect_stall);
        std::string ip;
        int port = 0;
        parse_engine(remote, ip, port);
        const auto deadline = after(timeout_ms / 1000.0);
        ConnectionPtr fresh;
        const bool told = dial(ip, port, deadline, fresh) == SUCCESS && fresh->send(Message::part, Pack().string(id_).text(), deadline) == 0;
        destroy(remote);
        Frame answer{};
        if (told && (fresh->wait(answer, answer_by(deadline)) != Took::frame || answer.type != Message::ack)) {
            return FAILED;
        }
        return failure(Point::disconnect);
    }

    Status disconnect_on_error(const std::string &remote, int timeout_ms, Status status) {
        if (!options_.auto_connect) {
            return status;
        }
        const Status ended = disconnect_now(remote, timeout_ms);
        return ended == SUCCESS ? status : ended;
    }

    // The table of links is locked throughout, also for the pause: every other call waits.
    void destroy(const std::string &remote) {
        std::lock_guard<std::mutex> hold(links_guard_);
        const auto found = links_.find(remote);
        if (found == links_.end()) {
            return;
        }
        Link &link = *found->second;
        {
            std::lock_guard<std::mutex> launch(link.launch);
            part(link);
            if (link.unavailable || !link.requests.empty()) {
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
            }
            add(Count::aborted, static_cast<int64_t>(link.requests.size()));
            purge(link);
            link.parted = true;
            link.unavailable = false;
        }
        links_.erase(found);
    }

    void purge(Link &link) {
        add(Count::live_requests, -static_cast<int64_t>(link.requests.size()));
        if (!link.requests.empty()) {
            slots_.give();
        }
        link.requests.clear();
    }

    // One failed request ends all requests of the link, and the link itself.
    void fail_link(Link &link, Status status) {
        link.stream->abort();
        purge(link);
        link.unavailable = link.unavailable || is_fatal(status);
    }

    bool fails_fast(const Link &link) const { return link.unavailable && (options_.auto_connect || !options_.channel_pool); }

    Status submit(Link &link, uint64_t id, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops) {
        std::lock_guard<std::mutex> hold(link.launch);
        stall(Point::stall);
        if (fails_fast(link) || link.parted) {
            return FAILED;
        }
        if (faulty(Point::exhausted) || (link.requests.empty() && !slots_.take())) {
            return RESOURCE_EXHAUSTED;
        }
        const RequestPtr request = make(link.stream, op, ops);
        link.requests[id] = request;
        add(Count::live_requests);
        const Status injected = failure(Point::submit);
        if (injected != SUCCESS) {
            fail_link(link, injected);
            return injected;
        }
        worker_.submit(request);
        return SUCCESS;
    }

    Status query(Link &link, uint64_t id, TransferStatus &status) {
        std::lock_guard<std::mutex> hold(link.launch);
        const auto found = link.requests.find(id);
        if (fails_fast(link) || found == link.requests.end()) {
            release(link, id);
            return FAILED;
        }
        const Status injected = failure(Point::query);
        if (injected != SUCCESS) {
            release(link, id);
            add(Count::failed);
            return injected;
        }
        status = TransferStatus::WAITING;
        if (link.stream->state_of(*found->second) == State::done) {
            status = TransferStatus::COMPLETED;
            add(Count::completed);
            release(link, id);
        }
        return SUCCESS;
    }

    void release(Link &link, uint64_t id) {
        if (link.requests.erase(id) != 0) {
            add(Count::live_requests, -1);
            if (link.requests.empty()) {
                slots_.give();
            }
        }
    }

    Status run_sync(Link &link, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops, int timeout_ms) {
        std::lock_guard<std::mutex> hold(link.launch);
        stall(Point::stall);
        if (fails_fast(link) || link.parted) {
            return FAILED;
        }
        const RequestPtr request = make(link.stream, op, ops);
        worker_.submit(request);
        if (!wait(*request, after(timeout_ms / 1000.0))) {
            fail_link(link, TIMEOUT);
            return TIMEOUT;
        }
        return SUCCESS;
    }

    std::mutex links_guard_;
    std::map<std::string, LinkPtr> links_;
    std::mutex connecting_;
    std::mutex requests_guard_;
    std::unordered_map<uint64_t, std::string> requests_;
    std::atomic<uint64_t> next_request_{1};
    Slots slots_{streams_per_engine};
    std::atomic<uint64_t> next_notify_{1};
    std::mutex acks_guard_;
    std::condition_variable acks_bell_;
    std::set<uint64_t> acks_;
};

}  // namespace

EnginePtr make_comm(const std::string &id) { return std::make_unique<Comm>(id); }

}  // namespace sim
