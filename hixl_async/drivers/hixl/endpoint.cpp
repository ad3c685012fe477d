#include "endpoint.hpp"

#include <algorithm>

#include "doorbell.hpp"

namespace hx {

namespace {

constexpr uint32_t FIRST_REFUSALS = 3;  // tries of a link that was never up
constexpr uint32_t REFUSALS = 5;        // tries of one that was
constexpr uint64_t PATIENCE = SECOND;   // of a stop or fence, where others use the connection too

uint64_t pause_after(uint32_t refusals) {
    static constexpr uint64_t PAUSES[] = {10 * MS, 50 * MS, 250 * MS, SECOND};
    return PAUSES[std::min<size_t>(refusals, sizeof PAUSES / sizeof *PAUSES) - 1];
}

constexpr Outcome ENDED = {HXA_E_LINK, 0, HXA_SCOPE_LINK};
constexpr Outcome BROKEN = {HXA_E_LINK, static_cast<int32_t>(abi::FAILED), HXA_SCOPE_OP};

}  // namespace

// ---- any thread -----------------------------------------------------------------------------------------------------

Endpoint::Endpoint(hxa_instance &self, std::string name)
    : Strand(self.pool),
      id(std::move(name)),
      self_(self),
      remote_(self.library.text(id)),
      connection_(self, id, remote_),
      sender_(self, id, remote_),
      requests_(self, remote_, *this, sender_) {}

void Endpoint::open() {
    // The control strand may outlive the endpoint in the queue of the pool.
    std::weak_ptr<Endpoint> weak = std::static_pointer_cast<Endpoint>(shared_from_this());
    const auto work = [weak](uint64_t now) {
        const std::shared_ptr<Endpoint> endpoint = weak.lock();
        return endpoint != nullptr ? endpoint->sender_.deliver(now) : NEVER;
    };
    const auto notice = [weak](const char *call, uint64_t ns, bool over) {
        const std::shared_ptr<Endpoint> endpoint = weak.lock();
        if (endpoint != nullptr) endpoint->report(call, ns, over);
    };
    control_ = std::make_shared<FunctionStrand>(self_.pool, work, notice);
    sender_.run_on(control_);
}

void Endpoint::has_registered(uint64_t number) {
    uint64_t known = known_.load();
    while (known < number && !known_.compare_exchange_weak(known, number)) {}
}

void Endpoint::attach(hxa_link *link, uint64_t registrations, hxa_op *op) {
    attaching_++;
    post([this, link, registrations, op] {
        attaching_--;
        if (peer_token_ != 0 && peer_token_ != link->peer_token) {  // another engine at the same address
            known_ = 0;
            requests_.remote_changed();
            if (phase_ == Phase::UP) cut(BROKEN);
        }
        peer_token_ = link->peer_token;
        has_registered(registrations);
        link->attached = true;
        link->connecting = op;
        links_.push_back(link);
        connect_at_ = 0;
        control_->post([this, link] { sender_.add(link); });
    });
}

void Endpoint::stop(hxa_link *link, bool dead, hxa_op *op) {
    post([this, link, dead, op] {
        link->stops.push_back(op);
        if (dead) link->dead = true;
        if (!link->attached) return detach(link);
        if (link->stopping) {
            if (dead) link->patience = 0;
            return;
        }
        link->stopping = true;
        release_link(link, ENDED);
    });
}

void Endpoint::fence(hxa_link *link) {
    post([this, link] {
        if (link->fencing || link->stopping) return;
        if (!link->attached) return self_.send(link, Message::FENCED);
        link->fencing = true;
        release_link(link, ENDED);
    });
}

// An op that is found in a list is alive, and a cancelled one is finished only here.
void Endpoint::cancel(hxa_op *op) {
    post([this, op] {
        const Outcome outcome = {HXA_E_CANCELLED, 0, HXA_SCOPE_OP};
        if (requests_.take_back(op)) return finish_operation(self_.sink, op, outcome);
        control_->post([this, op, outcome] {
            if (sender_.take_back(op, false)) finish_operation(self_.sink, op, outcome);
        });
    });
}

// If the strand is inside the very call that does not return, this waits for the call, and so does the memory:
// Disconnect would wait for the same lock, and on one back-end hold that of all links meanwhile.
void Endpoint::abandon(hxa_op *op) {
    post([this, op] {
        switch (requests_.abandon(op)) {
            case RequestQueue::Found::IN_FLIGHT: return cut(BROKEN);
            case RequestQueue::Found::WAITING: return;
            case RequestQueue::Found::NO: break;
        }
        control_->post([this, op] {
            if (sender_.take_back(op, true)) finish_operation(self_.sink, op, {HXA_E_TIMEOUT, 0, HXA_SCOPE_OP});
        });
    });
}

void Endpoint::report(const char *call, uint64_t ns, bool over) {
    const double seconds = static_cast<double>(ns) / 1e9;
    self_.warn(nullptr,
               over ? text("hixl: %s moves again; %s took %.1f s", id.c_str(), call, seconds)
                    : text("hixl: %s: a call of %s lasts %.1f s by now; other links go on", id.c_str(), call, seconds));
}

// ---- the strand -----------------------------------------------------------------------------------------------------

uint64_t Endpoint::turn(uint64_t now) {
    uint64_t next = NEVER;
    requests_.begin_turn(now);
    run_tasks();
    requests_.take_submitted();
    const bool more = requests_.launch();
    cut_if_failed();
    requests_.poll();
    cut_if_failed();
    settle_links(now, next);
    drive(now, next);
    idle_ = requests_.idle();
    if (requests_.moved(now)) pool_.stay_awake(now);
    // Progress made room in HIXL, or has a signal that follows.
    if (more || (requests_.moved(now) && requests_.waiting())) return AGAIN;
    return std::min(next, requests_.next_turn(now));
}

bool Endpoint::wanted() const {
    if (self_.pause.wanted != 0 || self_.finalizing != 0) return false;
    return std::any_of(links_.begin(), links_.end(), [](const hxa_link *link) {
        return !link->stopping && !link->lost && (!link->fencing || link->connecting != nullptr);
    });
}

void Endpoint::drive(uint64_t now, uint64_t &next) {
    if (phase_ == Phase::UP) {
        finish_connecting();
        if (requests_.in_flight() == 0 && (requests_.needs_connection() || !wanted())) disconnect();
        return;
    }
    if (phase_ != Phase::DOWN) {
        next = std::min(next, connection_.shut_overdue(now, phase_ == Phase::CONNECTING, wanted()));
        return;
    }
    if (ended_) return;
    if (!wanted()) return leave_instance();
    if (now >= connect_at_) connect();
    else next = std::min(next, connect_at_);
}

void Endpoint::finish_connecting() {
    for (hxa_link *link : links_) {
        hxa_op *op = link->connecting;
        if (op == nullptr) continue;
        link->connecting = nullptr;
        uint32_t fresh = hxa_link::NEW;
        link->state.compare_exchange_strong(fresh, hxa_link::UP);
        finish(self_.sink, op, {});
    }
}

// An endpoint without links ends.
void Endpoint::leave_instance() {
    if (!links_.empty() || attaching_ != 0) return;
    Guard guard(self_.lock);
    if (attaching_ != 0) return;
    const auto known = self_.endpoints.find(id);
    if (known == self_.endpoints.end() || known->second.get() != this) return;
    ended_ = true;
    self_.endpoints.erase(known);  // the thread that runs this turn holds another reference
}

// ---- the connection: made, renewed for memory that came later, cut after a failure, given up ------------------------

void Endpoint::connect() {
    phase_ = Phase::CONNECTING;
    self_.connections++;  // HIXL has it before its call returns
    const std::shared_ptr<Strand> self = shared_from_this();
    control_->post([this, self] {
        // A connection sees the memory that was registered before it, on both sides.
        const uint64_t local = self_.registrations, remote = known_;
        const uint32_t native = connection_.connect();
        post([this, self, native, local, remote] { connected(native, local, remote); });
    });
}

void Endpoint::connected(uint32_t native, uint64_t local, uint64_t remote) {
    if (native != abi::SUCCESS) return refused(native);
    phase_ = Phase::UP;
    refusals_ = 0;
    requests_.connected(local, remote);
    sender_.set_connected(true);
    control_->post([this] { sender_.renew(); });
}

void Endpoint::refused(uint32_t native) {
    phase_ = Phase::DOWN;
    self_.connections--;
    refusals_++;
    connect_at_ = clock_now() + pause_after(refusals_);
    Outcome outcome = outcome_of(native);
    if (outcome.status != HXA_E_TIMEOUT && outcome.status != HXA_E_INVALID) outcome.status = HXA_E_LINK;
    outcome.scope = HXA_SCOPE_LINK;
    if (refusals_ >= FIRST_REFUSALS) {
        const std::vector<hxa_link *> links = links_;
        for (hxa_link *link : links) {
            hxa_op *op = link->connecting;
            if (op == nullptr) continue;
            link->connecting = nullptr;
            link->lost = true;
            finish(self_.sink, op, outcome);
        }
    }
    if (refusals_ >= REFUSALS) give_up(outcome);
}

void Endpoint::give_up(const Outcome &outcome) {
    const std::string why =
        text("hixl: %s cannot be connected with any more: %s", id.c_str(), error_text(outcome.status, outcome.native));
    refusals_ = 0;
    for (hxa_link *link : links_) {
        if (link->lost || link->stopping) continue;
        link->lost = true;
        release_link(link, outcome);
        end_link(link, 0, why);
    }
}

// Only while nothing is in flight, or to end what is.
void Endpoint::disconnect() {
    phase_ = Phase::DISCONNECTING;
    requests_.disconnected();
    sender_.set_connected(false);
    const bool dead = std::all_of(links_.begin(), links_.end(), [](const hxa_link *link) { return link->dead.load(); });
    const std::shared_ptr<Strand> self = shared_from_this();
    control_->post([this, self, dead] {
        connection_.disconnect(dead);
        sender_.resend_unfetched();
        post([this, self] { disconnected(); });
    });
}

void Endpoint::disconnected() {
    phase_ = Phase::DOWN;
    self_.connections--;
    if (self_.pause.wanted != 0) self_.memory->wake();
    connect_at_ = 0;
    if (!cutting_) return;
    cutting_ = false;
    requests_.release_all(BROKEN);  // HIXL does not read or write their memory any more
}

// A failure fails everything in flight on the connection: none of it finishes by itself, and there is no other way to
// end it.
void Endpoint::cut(const Outcome &outcome) {
    if (cutting_ || phase_ != Phase::UP) return;
    cutting_ = true;
    requests_.fail_all(outcome);
    disconnect();
}

void Endpoint::cut_if_failed() {
    Outcome failure;
    if (requests_.take_failure(failure)) cut(failure);
}

// ---- links that leave -----------------------------------------------------------------------------------------------

bool Endpoint::shared(const hxa_link *link) const {
    return std::any_of(links_.begin(), links_.end(), [link](const hxa_link *other) {
        return other != link && !other->stopping && !other->lost && !other->fencing;
    });
}

// The link sends nothing any more.  Requests in flight may end by themselves where cutting them would hurt other links.
void Endpoint::release_link(hxa_link *link, const Outcome &outcome) {
    if (link->connecting != nullptr && link->stopping) {
        finish(self_.sink, link->connecting, outcome);
        link->connecting = nullptr;
    }
    requests_.fail_waiting(link, outcome);
    control_->post([this, link, outcome] { sender_.drop(link, outcome); });
    link->patience = shared(link) && !link->dead ? clock_now() + PATIENCE : 0;
}

void Endpoint::settle_links(uint64_t now, uint64_t &next) {
    const std::vector<hxa_link *> links = links_;
    for (hxa_link *link : links) {
        if (link->leaving || (!link->stopping && !link->fencing)) continue;
        if (requests_.in_flight_of(link) != 0) {
            if (now >= link->patience) cut({HXA_E_LINK, 0, shared(link) ? HXA_SCOPE_OP : HXA_SCOPE_LINK});
            else next = std::min(next, link->patience);
        } else if (link->stopping) {
            link->leaving = true;
            control_->post([this, link] {
                sender_.remove(link);
                post([this, link] { detach(link); });
            });
        } else if (link->patience != NEVER) {
            link->patience = NEVER;
            control_->post([this, link] { self_.send(link, Message::FENCED); });  // after all that was sent before
        }
    }
}

void Endpoint::detach(hxa_link *link) {
    links_.erase(std::remove(links_.begin(), links_.end(), link), links_.end());
    link->attached = false;
    std::vector<hxa_op *> stops;
    stops.swap(link->stops);
    // The link may be freed as soon as the first of them is finished.
    for (hxa_op *op : stops) finish(self_.sink, op, {});
}

}  // namespace hx
