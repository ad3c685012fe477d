// CS: client and server over endpoints. Requests are addresses, and used again; ranges are checked; one lock for all of a link.
#include <algorithm>

#include "acl.hpp"
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

constexpr int auto_connect_ms = 3000;
constexpr size_t most_host_requests = 4096;
constexpr size_t most_notifies = 4096;

// Where requests live: freed memory comes back at the next request, as it does from malloc, which keeps a little for each thread
// and gives the rest to any of them.
class Handles {
  public:
    void *take() {
        if (!own_.free.empty()) {
            return pop(own_.free);
        }
        std::lock_guard<std::mutex> hold(guard_);
        if (free_.empty()) {
            blocks_.push_back(std::make_unique<char[]>(64));
            return blocks_.back().get();
        }
        return pop(free_);
    }

    void give(void *handle) {
        if (own_.free.size() < 7) {
            own_.free.push_back(handle);
        } else {
            give_all({handle});
        }
    }

    void give_all(const std::vector<void *> &some) {
        std::lock_guard<std::mutex> hold(guard_);
        free_.insert(free_.end(), some.begin(), some.end());
    }

  private:
    struct Own {
        std::vector<void *> free;
        ~Own();
    };

    static void *pop(std::vector<void *> &free) {
        void *handle = free.back();
        free.pop_back();
        return handle;
    }

    static thread_local Own own_;
    std::mutex guard_;
    std::vector<std::unique_ptr<char[]>> blocks_;
    std::vector<void *> free_;
};

thread_local Handles::Own Handles::own_;
Handles &handles = *new Handles;  // threads may outlive statics

Handles::Own::~Own() { handles.give_all(free); }

// The pool of a device, shared by the engines of the process, which must agree about its size.
std::shared_ptr<Slots> device_slots(int32_t device, uint64_t limit) {
    static std::mutex guard;
    static std::map<int32_t, std::weak_ptr<Slots>> pools;
    std::lock_guard<std::mutex> hold(guard);
    std::shared_ptr<Slots> pool = pools[device].lock();
    if (pool == nullptr) {
        pool = std::make_shared<Slots>(limit);
        pools[device] = pool;
    }
    return pool->limit() == limit ? pool : nullptr;
}

struct Link : Joint {
    std::mutex guard;
    bool connected = false;
    bool latched = false;
    bool over = false;
    std::unordered_map<void *, RequestPtr> requests;
};

using LinkPtr = std::shared_ptr<Link>;

struct Owner {
    std::weak_ptr<Link> link;
    const void *user_data;
    std::list<void *>::iterator place;
};

class Cs : public Engine {
  public:
    explicit Cs(const std::string &id) : Engine(Backend::cs, id) {}

    Status deregister_mem(hixl::MemHandle handle) override {
        const Borrowed context(context_);
        {
            std::lock_guard<std::mutex> hold(memory_guard_);
            if (memory_.count(handle) == 0) {
                return SUCCESS;
            }
        }
        {
            std::lock_guard<std::mutex> hold(links_guard_);
            if (!links_.empty()) {
                return FAILED;
            }
        }
        return Engine::deregister_mem(handle);
    }

    Status connect(const std::string &remote, int timeout_ms) override {
        if (remote == id_) {
            return PARAM_INVALID;
        }
        const Borrowed context(context_);
        LinkPtr link;
        return get_or_create(remote, timeout_ms, link);
    }

    Status disconnect(const std::string &remote, int) override {
        const Borrowed context(context_);
        stall(Point::disconnect_stall);
        const Status status = destroy(remote);
        return status != SUCCESS ? status : failure(Point::disconnect);
    }

    Status transfer_sync(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops,
                         int timeout_ms) override {
        const Borrowed context(context_);
        LinkPtr link;
        const Status found = find_for_transfer(remote, timeout_ms, link);
        if (found != SUCCESS) {
            return found;
        }
        const Status status = run_sync(*link, op, ops, timeout_ms);
        return status == SUCCESS ? status : disconnect_on_error(remote, status);
    }

    Status transfer_async(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops,
                          const void *user_data, hixl::TransferReq &req) override {
        const Borrowed context(context_);
        LinkPtr link;
        const Status found = find_for_transfer(remote, auto_connect_ms, link);
        if (found != SUCCESS) {
            return found;
        }
        const Status status = submit(*link, op, ops, req);
        if (status != SUCCESS) {
            return disconnect_on_error(remote, status);
        }
        // It is in the index only from here on: a disconnect in between has lost it.
        std::lock_guard<std::mutex> hold(index_guard_);
        erase_locked(req);
        order_.push_back(req);
        index_[req] = {link, user_data, std::prev(order_.end())};
        return SUCCESS;
    }

    Status status_of(hixl::TransferReq req, TransferStatus &status) override {
        LinkPtr link;
        {
            std::lock_guard<std::mutex> hold(index_guard_);
            const auto found = index_.find(req);
            link = found == index_.end() ? nullptr : found->second.link.lock();
            if (link == nullptr) {
                erase_locked(req);
                add(Count::stale);
                return PARAM_INVALID;
            }
        }
        const Status answer = query(*link, req, status);
        if (answer != SUCCESS) {
            erase(req);
            return disconnect_on_error(link->remote, answer);
        }
        if (status != TransferStatus::WAITING) {
            linger();
            erase(req);  // by now the address may be another request's
        }
        return SUCCESS;
    }

    Status status_of_all(uint32_t most, bool skip_waiting, std::vector<hixl::TransferResult> &results) override {
        results.clear();
        std::set<std::string> ended;
        for (const Known &known : all_known()) {
            if (results.size() >= most) {
                break;
            }
            hixl::TransferResult result;
            result.req = known.req;
            result.user_data = known.user_data;
            result.status = TransferStatus::FAILED;
            if (ended.count(known.link->remote) == 0) {
                const Status answer = query(*known.link, known.req, result.status);
                if (answer != SUCCESS) {
                    result.status = TransferStatus::FAILED;
                    ended.insert(known.link->remote);
                    (void)disconnect_on_error(known.link->remote, answer);
                }
            }
            if (result.status != TransferStatus::WAITING) {
                linger();
                erase(known.req);
            }
            if (result.status != TransferStatus::WAITING || !skip_waiting) {
                results.push_back(result);
            }
        }
        return SUCCESS;
    }

    Status send_notify(const std::string &remote, const Pending &notify, int timeout_ms) override {
        const Borrowed context(context_);
        const LinkPtr link = find(remote);
        if (link == nullptr) {
            return NOT_CONNECTED;
        }
        std::lock_guard<std::mutex> hold(link->guard);  // until the answer is there: nothing else of this link moves
        if (!is_utf8(notify.name) || !is_utf8(notify.text)) {
            return PARAM_INVALID;
        }
        const Status injected = failure(Point::notify);
        if (injected != SUCCESS) {
            return injected;
        }
        const auto deadline = after(timeout_ms / 1000.0);
        if (link->over) {
            return FAILED;
        }
        if (!link->stream->left_in_order() && link->control->send(Message::notify, Pack().string(notify.name).string(notify.text).text(), deadline) != 0) {
            return FAILED;
        }
        if (link->stream->left_in_order()) {
            // An engine that is over leaves its end of the connection open, and does not read it any more.
            std::this_thread::sleep_until(deadline);
            return TIMEOUT;
        }
        Frame answer{};
        const Took took = link->control->wait(answer, deadline);
        if (took != Took::frame) {
            return took == Took::nothing ? TIMEOUT : FAILED;
        }
        return static_cast<Status>(Unpack(answer.body).number());  // whichever notification it answers
    }

    Status get_notifies(std::vector<hixl::NotifyDesc> &notifies) override {
        const Borrowed context(context_);
        std::lock_guard<std::mutex> hold(notifies_guard_);
        notifies = std::move(notifies_);
        notifies_.clear();
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
        slots_ = device_slots(device_, options_.active_channels);
        return slots_ == nullptr ? PARAM_INVALID : SUCCESS;
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
        slots_ = nullptr;
    }

    Status admit(const Region &region, hixl::MemHandle &same) override { return check_overlap(region, same); }

    bool heard(const ConnectionPtr &from, Half *half, Frame &frame) override {
        if (frame.type != Message::notify || half == nullptr) {
            return true;
        }
        Unpack body(frame.body);
        const std::string name = body.string();
        const std::string text = body.string();
        Status result = SUCCESS;
        {
            std::lock_guard<std::mutex> hold(notifies_guard_);
            if (notifies_.size() >= most_notifies) {
                result = RESOURCE_EXHAUSTED;
            } else {
                notifies_.push_back({hixl::AscendString(name.c_str()), hixl::AscendString(text.c_str())});
                add(Count::notifies);
            }
        }
        double late = 0;
        if (faulty(Point::ack_lost)) {
            return true;
        }
        const auto answer = [from, result] { from->send(Message::ack, Pack().number(result).text(), after(1)); };
        faulty(Point::ack_delay, &late) ? post_->later(after(late), answer) : answer();
        return true;
    }

    // A dead peer is detected only with AutoConnect.
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
            bool dead = false;
            {
                std::lock_guard<std::mutex> hold(each.second->guard);
                dead = !each.second->stream->left_in_order() && each.second->control->send(Message::heartbeat, "H", after(1)) != 0;
            }
            if (dead) {
                destroy(each.first);
            }
        }
    }

  private:
    struct Known {
        void *req;
        LinkPtr link;
        const void *user_data;
    };

    // All requests in the order in which they were submitted.
    std::vector<Known> all_known() {
        std::vector<Known> known;
        std::lock_guard<std::mutex> hold(index_guard_);
        known.reserve(order_.size());
        for (auto each = order_.begin(); each != order_.end();) {
            const auto owner = index_.find(*each);
            const LinkPtr link = owner->second.link.lock();
            if (link == nullptr) {
                index_.erase(owner);
                each = order_.erase(each);
            } else {
                known.push_back({*each, link, owner->second.user_data});
                ++each;
            }
        }
        return known;
    }

    LinkPtr find(const std::string &remote) {
        std::lock_guard<std::mutex> hold(links_guard_);
        const auto found = links_.find(remote);
        return found == links_.end() ? nullptr : found->second;
    }

    std::shared_ptr<std::mutex> connecting(const std::string &remote) {
        std::lock_guard<std::mutex> hold(links_guard_);
        auto &guard = connecting_[remote];
        if (guard == nullptr) {
            guard = std::make_shared<std::mutex>();
        }
        return guard;
    }

    Status find_for_transfer(const std::string &remote, int timeout_ms, LinkPtr &link) {
        link = find(remote);
        if (link != nullptr) {
            return SUCCESS;
        }
        if (!options_.auto_connect) {
            return NOT_CONNECTED;
        }
        if (remote == id_) {
            return PARAM_INVALID;
        }
        const Status status = get_or_create(remote, timeout_ms, link);
        return status == ALREADY_CONNECTED ? SUCCESS : status;
    }

    // A region without length, or the same start twice, cannot be given to the link.
    bool can_import() {
        std::lock_guard<std::mutex> hold(memory_guard_);
        std::set<uintptr_t> starts;
        return std::all_of(memory_.begin(), memory_.end(),
                           [&starts](const auto &each) { return each.second->len != 0 && starts.insert(each.second->addr).second; });
    }

    Status get_or_create(const std::string &remote, int timeout_ms, LinkPtr &link) {
        const auto guard = connecting(remote);
        std::lock_guard<std::mutex> hold(*guard);
        link = find(remote);
        if (link != nullptr) {
            return ALREADY_CONNECTED;
        }
        stall(Point::connect_stall);
        const auto made = std::make_shared<Link>();
        const Breaks breaks = options_.host_endpoint ? Breaks::silently : Breaks::loudly;
        const Status injected = failure(Point::connect);
        const Status status = injected != SUCCESS ? injected : join(remote, timeout_ms, breaks, true, *made);
        if (status != SUCCESS) {
            return status;
        }
        if (!can_import()) {
            part(*made);
            return PARAM_INVALID;
        }
        made->connected = true;
        std::lock_guard<std::mutex> table(links_guard_);
        links_[remote] = made;
        link = made;
        return SUCCESS;
    }

    Status destroy(const std::string &remote) {
        const auto guard = connecting(remote);
        std::lock_guard<std::mutex> hold(*guard);
        LinkPtr link;
        {
            std::lock_guard<std::mutex> table(links_guard_);
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
        {
            std::lock_guard<std::mutex> hold(index_guard_);
            for (auto each = order_.begin(); each != order_.end();) {
                const auto known = index_.find(*each);
                const LinkPtr owner = known->second.link.lock();
                if (owner == nullptr || owner == link) {
                    index_.erase(known);
                    each = order_.erase(each);
                } else {
                    ++each;
                }
            }
        }
        std::lock_guard<std::mutex> hold(link->guard);
        link->over = true;
        part(*link);
        add(Count::aborted, static_cast<int64_t>(link->requests.size()));
        while (!link->requests.empty()) {
            release(*link, link->requests.begin()->first);
        }
    }

    Status disconnect_on_error(const std::string &remote, Status status) {
        if (options_.auto_connect && find(remote) != nullptr) {
            const Status ended = destroy(remote);
            return ended == SUCCESS ? status : ended;
        }
        return status;
    }

    Status check(Link &link, const std::vector<hixl::TransferOpDesc> &ops) {
        if (ops.empty()) {
            return PARAM_INVALID;
        }
        if (!link.connected || link.over) {
            return link.over ? FAILED : NOT_CONNECTED;
        }
        if (link.latched) {
            return FAILED;
        }
        const bool good = std::all_of(ops.begin(), ops.end(), [&link](const hixl::TransferOpDesc &op) {
            return op.len != 0 && link.stream->remote_regions.covers(op.remote_addr, op.len, false) &&
                   link.stream->local_regions.covers(op.local_addr, op.len, false);
        });
        return good ? SUCCESS : PARAM_INVALID;
    }

    Status latch(Link &link, Status status) {
        link.latched = link.latched || status == FAILED || status == TIMEOUT;
        return status;
    }

    Status submit(Link &link, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops, hixl::TransferReq &req) {
        std::lock_guard<std::mutex> hold(link.guard);
        stall(Point::stall);
        const Status checked = check(link, ops);
        if (checked != SUCCESS) {
            return checked;
        }
        const Status injected = failure(Point::submit);
        if (injected != SUCCESS) {
            return latch(link, injected);
        }
        const bool host = options_.host_endpoint;
        const bool full = faulty(Point::exhausted);
        if (!host && (full || (link.requests.empty() && !slots_->take()))) {
            return RESOURCE_EXHAUSTED;
        }
        const RequestPtr request = make(link.stream, op, ops);
        worker_.submit(request);
        if (host && (full || link.requests.size() >= most_host_requests)) {
            return RESOURCE_EXHAUSTED;  // and the bytes are on their way all the same
        }
        request->mixed = over_ub() && is_mixed(link, ops);
        request->handle = handles.take();
        link.requests[request->handle] = request;
        add(Count::live_requests);
        req = request->handle;
        return SUCCESS;
    }

    Status query(Link &link, void *req, TransferStatus &status) {
        std::lock_guard<std::mutex> hold(link.guard);
        const auto found = link.requests.find(req);
        if (found == link.requests.end()) {
            status = TransferStatus::FAILED;
            return PARAM_INVALID;
        }
        const Status injected = failure(Point::query);
        if (injected != SUCCESS) {
            release(link, req);
            add(Count::failed);
            return injected;
        }
        Request &request = *found->second;
        if (request.mixed && link.stream->state_of(request) == State::done) {
            // It is split by kind; the part that finishes first is freed, and asked again at the next query.
            if (request.half) {
                release(link, req);
                return PARAM_INVALID;
            }
            request.half = true;
            status = TransferStatus::WAITING;
            return SUCCESS;
        }
        if (link.stream->state_of(request) == State::done) {
            status = TransferStatus::COMPLETED;
            add(Count::completed);
            release(link, req);
            return SUCCESS;
        }
        if (!options_.host_endpoint && (link.latched || link.stream->broken_loudly())) {
            link.latched = true;
            status = TransferStatus::FAILED;
            add(Count::failed);
            release(link, req);
            return SUCCESS;
        }
        status = TransferStatus::WAITING;
        return SUCCESS;
    }

    bool over_ub() const {
        return std::any_of(options_.endpoints.begin(), options_.endpoints.end(),
                           [](const std::string &name) { return name.compare(0, 6, "ub_ctp") == 0; });
    }

    static bool is_mixed(const Link &link, const std::vector<hixl::TransferOpDesc> &ops) {
        std::set<std::pair<int, int>> kinds;
        for (const hixl::TransferOpDesc &op : ops) {
            kinds.insert({link.stream->local_regions.kind_at(op.local_addr), link.stream->remote_regions.kind_at(op.remote_addr)});
        }
        return kinds.size() > 1;
    }

    void release(Link &link, void *req) {
        link.requests.erase(req);
        handles.give(req);
        add(Count::live_requests, -1);
        if (link.requests.empty() && !options_.host_endpoint) {
            slots_->give();
        }
    }

    Status run_sync(Link &link, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops, int timeout_ms) {
        std::lock_guard<std::mutex> hold(link.guard);
        stall(Point::stall);
        const Status checked = check(link, ops);
        if (checked != SUCCESS) {
            return checked;
        }
        const RequestPtr request = make(link.stream, op, ops);
        worker_.submit(request);
        if (!wait(*request, after(timeout_ms / 1000.0))) {
            return latch(link, TIMEOUT);
        }
        return link.stream->state_of(*request) == State::done ? SUCCESS : latch(link, FAILED);
    }

    // Between the two steps by which a request is forgotten.
    static void linger() {
        const int us = settings().forget_us;
        if (us > 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(us));
        }
    }

    void erase_locked(void *req) {
        const auto found = index_.find(req);
        if (found != index_.end()) {
            order_.erase(found->second.place);
            index_.erase(found);
        }
    }

    void erase(void *req) {
        std::lock_guard<std::mutex> hold(index_guard_);
        erase_locked(req);
    }

    std::mutex links_guard_;
    std::map<std::string, LinkPtr> links_;
    std::map<std::string, std::shared_ptr<std::mutex>> connecting_;
    std::mutex index_guard_;
    std::list<void *> order_;
    std::unordered_map<void *, Owner> index_;
    std::shared_ptr<Slots> slots_;
    std::mutex notifies_guard_;
    std::vector<hixl::NotifyDesc> notifies_;
};

}  // namespace

EnginePtr make_cs(const std::string &id) { return std::make_unique<Cs>(id); }

}  // namespace sim
