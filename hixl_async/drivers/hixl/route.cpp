// The connection to one remote engine: made, cycled where memory came later, cut where something failed, given up.
#include "route.hpp"

#include <algorithm>

#include "link.hpp"

namespace hx {

namespace {

constexpr uint32_t JOIN_REFUSALS = 3;     // tries of a link that was never up
constexpr uint32_t REFUSALS = 5;          // tries of one that was
constexpr uint64_t PATIENCE = SECOND;     // of a stop or fence, where others use the connection too
constexpr uint64_t UNWANTED = SECOND;     // a call about a connection that nobody wants may take as long as this
constexpr int32_t GONE_TIMEOUT_MS = 200;  // of Disconnect from a process that is dead

uint64_t pause_after(uint32_t refusals) {
    static constexpr uint64_t PAUSES[] = {10 * MS, 50 * MS, 250 * MS, SECOND};
    return PAUSES[std::min<size_t>(refusals, sizeof PAUSES / sizeof *PAUSES) - 1];
}

// Between two questions: longer each time.
class Pause {
  public:
    void rest() {
        const struct timespec time = {0, static_cast<long>(next_)};
        nanosleep(&time, nullptr);
        next_ = std::min(next_ * 2, 10 * MS);
    }

  private:
    uint64_t next_ = 100 * US;
};

constexpr Outcome ENDED = {HXA_E_LINK, 0, HXA_SCOPE_LINK};
constexpr Outcome BROKEN = {HXA_E_LINK, static_cast<int32_t>(abi::FAILED), HXA_SCOPE_OP};

}  // namespace

// ---- lists of ops ---------------------------------------------------------------------------------------------------

void OpList::push(hxa_op *op) {
    job_of(op).next = nullptr;
    if (last != nullptr) job_of(last).next = op;
    else first = op;
    last = op;
}

void OpList::push_front(hxa_op *op) {
    job_of(op).next = first;
    first = op;
    if (last == nullptr) last = op;
}

hxa_op *OpList::pop() {
    hxa_op *op = first;
    first = job_of(op).next;
    if (first == nullptr) last = nullptr;
    return op;
}

bool OpList::remove(hxa_op *op) {
    hxa_op *before = nullptr;
    for (hxa_op *at = first; at != nullptr; before = at, at = job_of(at).next) {
        if (at != op) continue;
        if (before != nullptr) job_of(before).next = job_of(op).next;
        else first = job_of(op).next;
        if (last == op) last = before;
        return true;
    }
    return false;
}

// ---- any thread -----------------------------------------------------------------------------------------------------

Route::Route(hxa_instance &self, std::string name)
    : Strand(self.crew),
      id(std::move(name)),
      self_(self),
      remote_(self.library.text(id)),
      auto_connect_(self.options.auto_connect()),
      sockets_(id) {}

void Route::open() {
    // The control strand may outlive us in the crew's queue.
    std::weak_ptr<Route> weak = std::static_pointer_cast<Route>(shared_from_this());
    const auto work = [weak](uint64_t now) {
        const std::shared_ptr<Route> route = weak.lock();
        return route != nullptr ? route->deliver(now) : NEVER;
    };
    const auto notice = [weak](const char *call, uint64_t ns, bool over) {
        const std::shared_ptr<Route> route = weak.lock();
        if (route != nullptr) route->report(call, ns, over);
    };
    control_ = std::make_shared<Calls>(self_.crew, work, notice);
}

void Route::pump() { control_->wake(); }

void Route::know(uint64_t number) {
    uint64_t known = known_.load();
    while (known < number && !known_.compare_exchange_weak(known, number)) {}
}

void Route::attach(hxa_link *link, uint64_t registrations, hxa_op *op) {
    attaching_++;
    post([this, link, registrations, op] {
        attaching_--;
        if (peer_token_ != 0 && peer_token_ != link->peer_token) {  // another engine at the same address
            known_ = 0;
            visible_remote_ = 0;
            if (phase_ == Phase::UP) cut(BROKEN);
        }
        peer_token_ = link->peer_token;
        know(registrations);
        link->attached = true;
        link->joining = op;
        links_.push_back(link);
        connect_at_ = 0;
        control_->post([this, link] { senders_.push_back(link); });
    });
}

void Route::stop(hxa_link *link, bool dead, hxa_op *op) {
    post([this, link, dead, op] {
        link->stops.push_back(op);
        if (dead) link->dead = true;
        if (!link->attached) return left(link);
        if (link->stopping) {
            if (dead) link->patience = 0;
            return;
        }
        link->stopping = true;
        let_go(link, ENDED);
    });
}

void Route::fence(hxa_link *link) {
    post([this, link] {
        if (link->fencing || link->stopping) return;
        if (!link->attached) return self_.say(link, Word::FENCED);
        link->fencing = true;
        let_go(link, ENDED);
    });
}

void Route::reap(hxa_op *op) {
    post([this, op] {
        // Found in a list, it is alive, and if it is cancelled it is ours: nobody else finishes those.
        if (waiting_.remove(op) || parked_.remove(op)) return finish(op, {HXA_E_CANCELLED, 0, HXA_SCOPE_OP});
        control_->post([this, op] {
            for (hxa_link *link : senders_)
                if (link->out.remove(op)) return finish(op, {HXA_E_CANCELLED, 0, HXA_SCOPE_OP});
        });
    });
}

void Route::abandon(hxa_op *op) {
    // If our strand is inside the very call that does not come back, this waits for it, and so does the memory:
    // Disconnect would wait for the same lock, on one back-end with that of all links in its hands.
    post([this, op] {
        const Outcome outcome = {HXA_E_TIMEOUT, 0, HXA_SCOPE_OP};
        // The address may be another op's by now, which nobody has abandoned.
        const auto meant = [op](const hxa_op *other) { return other == op && (job_of(op).claim & ABANDONED) != 0; };
        for (OpList *list : {&waiting_, &parked_})
            for (hxa_op *at = list->first; at != nullptr; at = job_of(at).next)
                if (meant(at) && (job_of(at).claim & CLAIM) != CANCELLED) {
                    const bool flying = job_of(at).parts != 0;
                    fail(at, outcome);
                    return flying ? cut(BROKEN) : void();
                }
        for (Flight *flight = first_; flight != nullptr; flight = flight->next)
            if (meant(flight->op)) {
                fail(op, outcome);
                return cut(BROKEN);
            }
        control_->post([this, op, outcome, meant] {
            for (hxa_link *link : senders_)
                if (link->out.holds(op) && meant(op) && link->out.remove(op)) return finish(op, outcome);
        });
    });
}

// The end of an op, on whichever strand has it.
void Route::finish(hxa_op *op, const Outcome &outcome) {
    Job &job = job_of(op);
    if (!outcome.ok() && op->status == HXA_OK) {
        op->status = outcome.status;
        op->native = outcome.native;
        op->scope = outcome.scope;
    }
    // What fails before its notification was sent gives its room back.
    if (op->status != HXA_OK && job.batch->topic != nullptr)
        job.link->out.unreserve(record_cost(5 + static_cast<size_t>(job.batch->topic_len) + job.batch->note_len));
    if ((job.stage & TOLD) != 0) return hxa_release(&self_.sink, op);
    op->bytes = job.landed.load(std::memory_order_relaxed);
    hxa_finish(&self_.sink, op);
}

void Route::report(const char *call, uint64_t ns, bool over) {
    const double seconds = static_cast<double>(ns) / 1e9;
    self_.warn(nullptr,
              over ? text("hixl: %s moves again; %s took %.1f s", id.c_str(), call, seconds)
                   : text("hixl: %s: a call of %s lasts %.1f s by now; other links go on", id.c_str(), call, seconds));
}

void Route::stuck(const char *call, uint64_t ns) {
    report(call, ns, false);
}

void Route::moving(const char *call, uint64_t ns) {
    report(call, ns, true);
}

// ---- the strand -----------------------------------------------------------------------------------------------------

uint64_t Route::turn(uint64_t now) {
    uint64_t next = NEVER;
    now_ = now;
    run_tasks();
    take_inbox();
    const bool more = launch();
    if (broken_) cut(breakage_);
    if (flights_ != 0 && !cutting_) look();
    else take_answers();
    if (broken_) cut(breakage_);
    settle_links(now, next);
    drive(now, next);
    idle_ = flights_ == 0 && waiting_.empty();
    if (moved_ == now) crew_.stay_awake(now);
    if (more || (moved_ == now && !waiting_.empty())) return AGAIN;  // what landed made room, or has a signal to follow
    if (flights_ != 0 && !cutting_) next = std::min(next, rest(now));
    if (retry_at_ > now && !waiting_.empty()) next = std::min(next, retry_at_);
    return next;
}

// How long to sleep before looking again: not at all at first, then an eighth of the time that passed without news.
uint64_t Route::rest(uint64_t now) const {
    const uint64_t quiet = now - std::min(moved_, now);
    if (quiet < self_.options.spin_us * US) {
        for (int i = 0; i < 4; i++) relax();
        return AGAIN;
    }
    return now + std::min(std::max(quiet / 8, 2 * US), self_.options.poll_max_us * US);
}

bool Route::wanted() const {
    if (self_.recess != 0 || self_.finalizing != 0) return false;
    return std::any_of(links_.begin(), links_.end(), [](const hxa_link *link) {
        return !link->stopping && !link->lost && (!link->fencing || link->joining != nullptr);
    });
}

void Route::drive(uint64_t now, uint64_t &next) {
    if (phase_ == Phase::UP) {
        for (hxa_link *link : links_) {
            hxa_op *op = link->joining;
            if (op == nullptr) continue;
            link->joining = nullptr;
            uint32_t fresh = hxa_link::NEW;
            link->state.compare_exchange_strong(fresh, hxa_link::UP);
            hx::finish(self_.sink, op, {});
        }
        if (flights_ == 0 && (cycle_ || !wanted())) part();
        return;
    }
    if (phase_ != Phase::DOWN) return hurry(now, next);
    if (ended_) return;
    if (wanted()) {
        if (now >= connect_at_) join();
        else next = std::min(next, connect_at_);
        return;
    }
    if (!links_.empty() || attaching_ != 0) return;
    Guard guard(self_.lock);
    if (attaching_ != 0) return;
    const auto known = self_.routes.find(id);
    if (known != self_.routes.end() && known->second.get() == this) {
        ended_ = true;
        self_.routes.erase(known);  // whoever runs us holds another reference
    }
}

// Of a call that has had its time, and some more, what it reads from is shut.  Connect may rightly take its time twice,
// for the other engine does its part after ours.
void Route::hurry(uint64_t now, uint64_t &next) {
    uint64_t since = 0;
    const char *call = sockets_.call(since);
    const uint64_t patience = static_cast<uint64_t>(self_.options.connect_timeout_ms) * MS;
    const uint64_t most = wanted() ? (phase_ == Phase::JOINING ? 2 * patience + SECOND : patience)
                                   : std::min(patience, UNWANTED);
    if (call == nullptr) since = now;
    const uint64_t at = std::max(since + most, hurry_at_);
    if (call == nullptr || now < at) {
        next = std::min(next, at);
        return;
    }
    hurry_at_ = now + SECOND;
    next = std::min(next, hurry_at_);
    if (sockets_.shut() != 0)
        self_.warn(nullptr, text("hixl: %s: no answer to %s in %.1f s; its socket was shut", id.c_str(), call,
                                static_cast<double>(now - since) / 1e9));
}

// ---- connecting -----------------------------------------------------------------------------------------------------

// ConnectAsync, until it has happened or the time is up.  What may yet happen after that is undone.
uint32_t Route::connect_async(int32_t timeout_ms) {
    const uint64_t end = clock_now() + static_cast<uint64_t>(timeout_ms) * MS;
    uint32_t native = self_.library.connect_async(&self_.hixl, remote_, timeout_ms);
    for (Pause pause; native == abi::RESOURCE_EXHAUSTED && clock_now() < end; pause.rest())
        native = self_.library.connect_async(&self_.hixl, remote_, timeout_ms);
    if (native != abi::SUCCESS) return native;
    for (Pause pause; clock_now() < end + SECOND; pause.rest()) {
        abi::AsyncConnectStatus status = abi::NOT_CONNECT;
        if (self_.library.connect_status(&self_.hixl, remote_, status) != abi::SUCCESS) continue;
        if (status == abi::CONNECTED) return abi::SUCCESS;
        if (status == abi::CONNECT_FAILED) return abi::FAILED;  // its code is lost in this form
    }
    disconnect_async(timeout_ms);
    return abi::TIMEOUT;
}

// DisconnectAsync, and not back before it has happened, however long that takes and whatever is answered: until then
// HIXL uses the memory of what is in flight.
void Route::disconnect_async(int32_t timeout_ms) {
    for (Pause pause; self_.library.disconnect_async(&self_.hixl, remote_, timeout_ms) != abi::SUCCESS;) pause.rest();
    for (Pause pause;; pause.rest()) {
        abi::AsyncConnectStatus status = abi::DISCONNECT_PENDING;
        const uint32_t native = self_.library.connect_status(&self_.hixl, remote_, status);
        if (native == abi::SUCCESS && status == abi::NOT_CONNECT) return;
    }
}

uint32_t Route::connect_call() {
    Gate::Control control(self_.gate);
    Call call(self_, "Connect");
    if (!call.allowed) return abi::FAILED;
    Sockets::Watch watch(sockets_, "Connect");
    const int32_t timeout = self_.options.connect_timeout_ms;
    return by_async() ? connect_async(timeout) : self_.library.connect(&self_.hixl, remote_, timeout);
}

// Whatever it answers, our side of the connection is gone when it returns.
void Route::disconnect_call() {
    Gate::Control control(self_.gate);
    Call call(self_, "Disconnect");
    if (!call.allowed) return;
    Sockets::Watch watch(sockets_, "Disconnect");
    const int32_t timeout = gone_ != 0 ? GONE_TIMEOUT_MS : self_.options.connect_timeout_ms;
    if (by_async()) disconnect_async(timeout);
    else self_.library.disconnect(&self_.hixl, remote_, timeout);
}

// Whoever connects sees the memory that was registered before, on both sides.
void Route::join() {
    phase_ = Phase::JOINING;
    self_.connections++;  // HIXL has it before we hear of it
    const std::shared_ptr<Strand> self = shared_from_this();
    control_->post([this, self] {
        const uint64_t local = self_.registrations, remote = known_;
        uint32_t native = connect_call();
        if (native == abi::ALREADY_CONNECTED) {  // since when, and so seeing what, nobody knows
            disconnect_call();
            native = connect_call();
            if (native == abi::ALREADY_CONNECTED) native = abi::SUCCESS;
        }
        post([this, self, native, local, remote] { joined(native, local, remote); });
    });
}

void Route::joined(uint32_t native, uint64_t local, uint64_t remote) {
    if (native == abi::SUCCESS) {
        phase_ = Phase::UP;
        refusals_ = 0;
        cycle_ = false;
        visible_local_ = local;
        visible_remote_ = remote;
        up_ = 1;
        control_->post([this] {
            for (hxa_link *link : senders_)  // a broken way for notifications is a new one now
                if (link->breaks < 2 && !self_.options.notify_control && link->peer_window >= WINDOW_LEAST)
                    link->by_control = false;
        });
        return;
    }
    phase_ = Phase::DOWN;
    self_.connections--;
    refusals_++;
    connect_at_ = clock_now() + pause_after(refusals_);
    Outcome outcome = outcome_of(native);
    if (outcome.status != HXA_E_TIMEOUT && outcome.status != HXA_E_INVALID) outcome.status = HXA_E_LINK;
    outcome.scope = HXA_SCOPE_LINK;
    if (refusals_ >= JOIN_REFUSALS) {
        const std::vector<hxa_link *> links = links_;
        for (hxa_link *link : links) {
            hxa_op *op = link->joining;
            if (op == nullptr) continue;
            link->joining = nullptr;
            link->lost = true;
            hx::finish(self_.sink, op, outcome);
        }
    }
    if (refusals_ >= REFUSALS) give_up(outcome);
}

void Route::give_up(const Outcome &outcome) {
    const std::string why =
        text("hixl: %s cannot be connected with any more: %s", id.c_str(), error_text(outcome.status, outcome.native));
    refusals_ = 0;
    for (hxa_link *link : links_) {
        if (link->lost || link->stopping) continue;
        link->lost = true;
        let_go(link, outcome);
        link_end(link, 0, why);
    }
}

// Only while nothing is in flight, or to end what is.
void Route::part() {
    phase_ = Phase::PARTING;
    up_ = 0;
    gone_ = std::all_of(links_.begin(), links_.end(), [](const hxa_link *link) { return link->dead.load(); });
    const std::shared_ptr<Strand> self = shared_from_this();
    control_->post([this, self] {
        disconnect_call();
        // One back-end forgets what the peer has not fetched when the connection ends.
        if (self_.batch == 0)
            for (hxa_link *link : senders_)
                if (!link->by_control && !link->dead) by_control(link, link->out.kept(0));
        post([this, self] { parted(); });
    });
}

void Route::parted() {
    phase_ = Phase::DOWN;
    self_.connections--;
    if (self_.recess != 0) self_.memory->wake();
    cycle_ = false;
    connect_at_ = 0;
    if (!cutting_) return;
    cutting_ = false;
    take_answers();
    // Nothing reads or writes their memory any more.
    while (first_ != nullptr) {
        hxa_op *op = first_->op;
        end_flight(first_);
        if (--job_of(op).parts == 0) finish(op, BROKEN);
    }
}

// A failure is everybody's who has something in flight: nothing of it comes back by itself, and there is no other way
// to end it.
void Route::cut(const Outcome &outcome) {
    broken_ = false;
    if (cutting_ || phase_ != Phase::UP) return;
    cutting_ = true;
    // Some had finished before, and there are still answers about them, unless HIXL has cut the connection itself.
    if (self_.batch != 0 && !auto_connect_) ask();
    broken_ = false;
    for (Flight *flight = first_; flight != nullptr;) {
        Flight *following = flight->next;
        fail(flight->op, outcome);  // leaves flights alone
        tell(flight->op);
        flight = following;
    }
    part();
}

// ---- links that leave -----------------------------------------------------------------------------------------------

bool Route::shared(const hxa_link *link) const {
    return std::any_of(links_.begin(), links_.end(), [link](const hxa_link *other) {
        return other != link && !other->stopping && !other->lost && !other->fencing;
    });
}

// The link sends nothing any more; what is in flight may end by itself only where others would suffer.
void Route::let_go(hxa_link *link, const Outcome &outcome) {
    if (link->joining != nullptr && link->stopping) {
        hx::finish(self_.sink, link->joining, outcome);
        link->joining = nullptr;
    }
    fail_waiting(link, outcome);
    control_->post([this, link, outcome] { drop_notes(link, outcome); });
    link->patience = shared(link) && !link->dead ? clock_now() + PATIENCE : 0;
}

void Route::fail_waiting(hxa_link *link, const Outcome &outcome) {
    for (OpList *list : {&waiting_, &parked_}) {
        for (hxa_op *op = list->first; op != nullptr;) {
            hxa_op *following = job_of(op).next;
            uint32_t queued = QUEUED;
            Job &job = job_of(op);
            if (job.link == link
                && (job.claim.compare_exchange_strong(queued, STARTED) || (queued & CLAIM) != CANCELLED))
                fail(op, outcome);
            op = following;
        }
    }
}

void Route::settle_links(uint64_t now, uint64_t &next) {
    const std::vector<hxa_link *> links = links_;
    for (hxa_link *link : links) {
        if (link->leaving || (!link->stopping && !link->fencing)) continue;
        if (flights_of(link) != 0) {
            if (now >= link->patience) cut({HXA_E_LINK, 0, shared(link) ? HXA_SCOPE_OP : HXA_SCOPE_LINK});
            else next = std::min(next, link->patience);
            continue;
        }
        if (link->stopping) {
            link->leaving = true;
            control_->post([this, link] { farewell(link); });
        } else if (link->patience != NEVER) {
            link->patience = NEVER;
            control_->post([this, link] { self_.say(link, Word::FENCED); });  // after what was sent before
        }
    }
}

void Route::left(hxa_link *link) {
    links_.erase(std::remove(links_.begin(), links_.end(), link), links_.end());
    link->attached = false;
    std::vector<hxa_op *> stops;
    stops.swap(link->stops);
    // The link may be freed as soon as the first of them is finished.
    for (hxa_op *op : stops) hx::finish(self_.sink, op, {});
}

}  // namespace hx
