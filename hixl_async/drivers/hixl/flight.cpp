// Requests: cut from ops, handed to HIXL, asked about until each has its one answer.
#include <algorithm>

#include "link.hpp"
#include "route.hpp"

namespace hx {

namespace {

constexpr int LAUNCHES = 64;        // between two looks at what is in flight,
constexpr uint64_t LAUNCHING = MS;  // which last no longer than this, where calls take their time
constexpr int MISSES = 4;           // requests that still wait, at either place of a look, before it ends
constexpr uint64_t BUSY_FIRST = 50 * US, BUSY_MOST = 10 * MS;
// Fabric memory takes a stream or more of 512 for each request of the engine, and when they are used up it says no more
// than FAILED.
constexpr uint32_t FABRIC_REQUESTS = 60;
constexpr uint64_t SWEEP_PATIENCE = 100 * MS;  // a batch query may be held up this long by calls of other links
constexpr uint32_t BOUNCES = 3;  // an op may find the link gone this often

}  // namespace

// ---- ops on their way in --------------------------------------------------------------------------------------------

void Route::submit(hxa_op *op) {
    hxa_op *top = inbox_.load(std::memory_order_relaxed);
    do job_of(op).next = top;
    while (!inbox_.compare_exchange_weak(top, op));
    wake();
}

void Route::take_inbox() {
    if (inbox_.load(std::memory_order_relaxed) == nullptr) return;
    hxa_op *op = inbox_.exchange(nullptr), *oldest = nullptr;
    while (op != nullptr) {
        hxa_op *next = job_of(op).next;
        job_of(op).next = oldest;
        oldest = op;
        op = next;
    }
    while (oldest != nullptr) {
        hxa_op *next = job_of(oldest).next;
        waiting_.push(oldest);
        oldest = next;
    }
    moved_ = now_;
}

// Memory that HIXL does not know yet is waited for; what an older connection cannot see, for a new one.
Route::Fit Route::fits(const hxa_batch &batch, Outcome &refusal) const {
    Fit fit = Fit::FINE;
    for (size_t i = 0; i < batch.n; i++) {
        const hxa_mem *ours = batch.desc[i].lmem;
        const uint32_t state = ours->state;
        if (state == hxa_mem::REFUSED) {
            refusal = ours->refusal;
            return Fit::REFUSED;
        }
        if (state == hxa_mem::PENDING) return Fit::PARK;
        if (ours->number > visible_local_ || batch.desc[i].rmem->number > visible_remote_) fit = Fit::CYCLE;
    }
    if (batch.signal != nullptr && batch.signal->number > visible_remote_) fit = Fit::CYCLE;
    return fit;
}

void Route::unpark() {
    for (hxa_op *op = parked_.first; op != nullptr;) {
        hxa_op *following = job_of(op).next;
        Outcome refusal;
        if ((job_of(op).claim & CLAIM) != CANCELLED && fits(*job_of(op).batch, refusal) != Fit::PARK) {
            parked_.remove(op);
            waiting_.push(op);
        }
        op = following;
    }
}

// Hands to HIXL what may go now; answers whether there is more that could go at once.
bool Route::launch() {
    if (!parked_.empty()) unpark();
    if (phase_ != Phase::UP || cutting_ || cycle_ || self_.recess != 0 || now_ < retry_at_) return false;
    for (int left = LAUNCHES; left > 0; left--) {
        if (waiting_.empty() || flights_ >= self_.options.in_flight) return false;
        if (broken_) return false;
        if (self_.fabric && self_.ledger.count.load(std::memory_order_relaxed) >= FABRIC_REQUESTS) {
            retry_at_ = now_ + BUSY_FIRST;
            return false;
        }
        if (left < LAUNCHES && clock_now() - now_ > LAUNCHING) break;
        hxa_op *op = waiting_.first;
        Job &job = job_of(op);
        uint32_t queued = QUEUED;
        if (job.stage == DATA && (job.claim & CLAIM) != STARTED) {
            Outcome refusal;
            const Fit fit = fits(*job.batch, refusal);
            if (fit == Fit::CYCLE) {
                cycle_ = true;
                return false;
            }
            const bool bare = job.batch->n == 0 && job.batch->signal == nullptr;
            // A bare notification can be cancelled for as long as it waits for room.
            if (fit == Fit::PARK
                || (!bare && !job.claim.compare_exchange_strong(queued, STARTED) && (queued & CLAIM) == CANCELLED)) {
                waiting_.pop();
                parked_.push(op);
                continue;
            }
            if ((job.claim & CLAIM) == QUEUED && !bare)
                job.claim.fetch_or(STARTED);  // ABANDONED as well: soon found here
            if (fit == Fit::REFUSED) {
                fail(op, refusal);
                continue;
            }
        }
        if (job.stage == DATA && job.cursor == CURSOR_END) {
            waiting_.pop();
            advance(op);
            continue;
        }
        switch (send(op)) {
            case Verdict::SENT:
                if (job.cursor == CURSOR_END) waiting_.pop();
                break;
            case Verdict::LATER: return false;
            case Verdict::OVER: break;
        }
    }
    return !waiting_.empty();
}

// The next request of an op: descriptors of one kind each side, no more than HIXL is given at once.
bool Route::build(hxa_op *op, Flight &flight) {
    Job &job = job_of(op);
    const hxa_batch &batch = *job.batch;
    descs_.clear();
    if (job.stage == SIGNAL) {
        {
            Guard guard(self_.slots_lock);
            if (self_.slots.empty()) return false;
            flight.slot = self_.slots.back();
            self_.slots.pop_back();
        }
        uint64_t *word = &self_.scratch[flight.slot];
        *word = batch.signal_value;
        descs_.push_back({reinterpret_cast<uintptr_t>(word), batch.signal->address + batch.signal_off, sizeof *word});
        job.cursor = CURSOR_END;
        return true;
    }
    uint64_t group = job.cursor >> 32, i = job.cursor & UINT32_MAX;
    const size_t most = self_.options.request_descriptors;
    for (; group < 4; group++, i = 0) {
        if ((job.groups >> group & 1) == 0) continue;
        for (; i < batch.n && descs_.size() < most; i++) {
            const hxa_desc &desc = batch.desc[i];
            if (desc.lmem->kind * 2 + desc.rmem->kind != group) continue;
            descs_.push_back({desc.lmem->address + desc.loff, desc.rmem->address + desc.roff, desc.len});
            flight.bytes += desc.len;
        }
        if (i < batch.n) break;
        // The end of a group ends the request, so that kinds are never mixed; skip to the next that there is.
        do group++;
        while (group < 4 && (job.groups >> group & 1) == 0);
        i = 0;
        break;
    }
    job.cursor = group >= 4 ? CURSOR_END : group << 32 | i;
    return true;
}

Route::Verdict Route::send(hxa_op *op) {
    Job &job = job_of(op);
    const uint64_t cursor = job.cursor;
    Flight *flight = self_.ledger.begin(this);
    if (!build(op, *flight)) {  // every word of the scratch page is on its way somewhere
        self_.ledger.end(flight);
        retry_at_ = now_ + BUSY_FIRST;
        return Verdict::LATER;
    }
    abi::TransferArgs arguments = {};
    arguments.user_data = reinterpret_cast<void *>(flight->token);
    const abi::TransferOp verb = job.stage == DATA && job.batch->verb == HXA_READ ? abi::READ : abi::WRITE;
    uint32_t native = abi::FAILED;
    {
        Gate::Transfer transfer(self_.gate);
        Call call(self_, "TransferAsync");
        if (call.allowed)
            native = self_.library.transfer_async(&self_.hixl, remote_, verb, descs_, arguments, flight->request);
    }
    if (native == abi::SUCCESS) {
        flight->op = op;
        flight->prev = last_;
        if (last_ != nullptr) last_->next = flight;
        else first_ = flight;
        last_ = flight;
        flights_++;
        job.parts++;
        moved_ = now_;
        busy_since_ = busy_ns_ = 0;
        bounces_ = 0;
        return Verdict::SENT;
    }
    if (flight->slot >= 0) {
        Guard guard(self_.slots_lock);
        self_.slots.push_back(flight->slot);
    }
    self_.ledger.end(flight);
    const Outcome outcome = outcome_of(native);
    // If others are in flight it may be their number; if it is the link, one of them will tell.
    const bool crowded =
        native == abi::FAILED && self_.fabric && self_.ledger.count.load(std::memory_order_relaxed) != 0;
    if (native == abi::RESOURCE_EXHAUSTED || crowded) {
        if (busy_since_ == 0) busy_since_ = now_;
        if (now_ - busy_since_ < self_.options.busy_ms * MS) {
            job.cursor = cursor;
            busy_ns_ = std::min(std::max(busy_ns_ * 2, BUSY_FIRST), BUSY_MOST);
            retry_at_ = now_ + busy_ns_;
            return Verdict::LATER;
        }
        fail(op, {HXA_E_BUSY, outcome.native, HXA_SCOPE_OP});
        return Verdict::OVER;
    }
    if (native == abi::PARAM_INVALID || native == abi::UNSUPPORTED) {  // this op's fault, and nobody else's
        fail(op, outcome);
        return Verdict::OVER;
    }
    if (native == abi::NOT_CONNECTED && job.parts == 0 && ++bounces_ < BOUNCES)
        job.cursor = cursor;  // nothing moved: once more
    else fail(op, {outcome.status == HXA_E_TIMEOUT ? HXA_E_TIMEOUT : HXA_E_LINK, outcome.native, HXA_SCOPE_OP});
    broken({HXA_E_LINK, outcome.native, HXA_SCOPE_OP});
    return Verdict::OVER;
}

// ---- answers --------------------------------------------------------------------------------------------------------

uint32_t Route::flights_of(const hxa_link *link) const {
    uint32_t n = 0;
    for (const Flight *flight = first_; flight != nullptr; flight = flight->next) n += job_of(flight->op).link == link;
    return n;
}

void Route::look() {
    // With AutoConnect HIXL may have dropped a request, and given its handle to another link's: only the batch query
    // says whose answer it has.
    const bool recycled = self_.batch != 0 && auto_connect_;
    const bool most = flights_ > 1 && flights_ * 2 >= self_.ledger.count.load(std::memory_order_relaxed);
    if (self_.batch != 0 && (most || recycled) && sweep()) swept_ = now_;
    else if (!recycled || now_ - std::min(swept_, now_) > SWEEP_PATIENCE) ask();
}

// One question for all requests of the engine; the answers of other routes are passed on.
bool Route::sweep() {
    results_.clear();
    {
        Gate::Sweep sweep(self_.gate);
        if (!sweep.mine) return false;
        Call call(self_, "GetTransferStatus");
        if (!call.allowed) return false;
        abi::GetTransferStatusArgs arguments = {};
        arguments.max_query_count = UINT32_MAX;
        arguments.skip_waiting = true;
        const uint32_t native = self_.library.transfer_statuses(&self_.hixl, arguments, results_);
        if (native != abi::SUCCESS) {
            if (native == abi::UNSUPPORTED) self_.batch = 0;
            return false;
        }
        seen_.clear();
        Guard guard(self_.ledger.lock);
        for (const abi::TransferResult &result : results_) {
            if (result.status == abi::WAITING) continue;
            Flight *flight = self_.ledger.find(reinterpret_cast<uint64_t>(result.user_data));
            if (flight == nullptr) continue;
            if (flight->route == this) {
                seen_.push_back({flight, flight->token, abi::SUCCESS, result.status});
                continue;
            }
            flight->answer = result.status;
            flight->route->answer(flight);
        }
    }
    take_answers();
    for (const Answer &answer : seen_)
        if (answer.flight->token == answer.token) landed(answer.flight, answer.native, answer.status);
    return true;
}

void Route::answer(Flight *flight) {
    Flight *top = answers_.load(std::memory_order_relaxed);
    do flight->answered = top;
    while (!answers_.compare_exchange_weak(top, flight));
    wake();
}

// What another route's batch query brought.  Flights end on this strand only, so that all on the stack are alive.
void Route::take_answers() {
    if (answers_.load(std::memory_order_relaxed) == nullptr) return;
    Flight *flight = answers_.exchange(nullptr), *oldest = nullptr;
    while (flight != nullptr) {
        Flight *next = flight->answered;
        flight->answered = oldest;
        oldest = flight;
        flight = next;
    }
    while (oldest != nullptr) {
        Flight *next = oldest->answered;
        landed(oldest, abi::SUCCESS, oldest->answer);
        oldest = next;
    }
}

// One by one: from the oldest, for that one is usually next, and somewhere further on, for it need not be.
void Route::ask() {
    seen_.clear();
    {
        Gate::Query query(self_.gate);
        take_answers();  // whoever has an answer must not be asked about again
        if (first_ == nullptr) return;
        Call call(self_, "GetTransferStatus");
        if (!call.allowed) return;
        bool failed = false;
        const auto question = [&](Flight *flight) {
            abi::TransferStatus status = abi::WAITING;
            const uint32_t native = self_.library.transfer_status(&self_.hixl, flight->request, status);
            if (native == abi::SUCCESS && status == abi::WAITING) return false;
            seen_.push_back({flight, flight->token, native, status});
            failed = failed || native != abi::SUCCESS || status != abi::COMPLETED;
            return true;
        };
        // Most back-ends forget all requests of a link at its first failure; on the one that recycles handles they
        // stay.
        const bool all = cutting_;
        const auto enough = [&](int misses) { return !all && (misses >= MISSES || failed); };
        Flight *flight = first_;
        for (int misses = 0; flight != nullptr && !enough(misses); flight = flight->next) misses += !question(flight);
        if (flight != nullptr && !failed) {
            // From the probe on, if it lies in the rest; `flight` is the first of that.
            Flight *at = probe_ != nullptr ? probe_ : flight;
            int misses = 0;
            for (; at != nullptr && !enough(misses); at = at->next) {
                const bool asked =
                    std::any_of(seen_.begin(), seen_.end(), [at](const Answer &answer) { return answer.flight == at; });
                if (!asked) misses += !question(at);
            }
            probe_ = at;
        }
    }
    for (const Answer &answer : seen_)
        if (answer.flight->token == answer.token) landed(answer.flight, answer.native, answer.status);
}

// Out of the list and the ledger; its handle may already be somebody else's.
void Route::end_flight(Flight *flight) {
    if (flight->prev != nullptr) flight->prev->next = flight->next;
    else first_ = flight->next;
    if (flight->next != nullptr) flight->next->prev = flight->prev;
    else last_ = flight->prev;
    if (probe_ == flight) probe_ = flight->next;
    if (flight->slot >= 0) {
        Guard guard(self_.slots_lock);
        self_.slots.push_back(flight->slot);
    }
    flights_--;
    self_.ledger.end(flight);
}

// The one answer about a request.
void Route::landed(Flight *flight, uint32_t native, abi::TransferStatus status) {
    hxa_op *op = flight->op;
    Job &job = job_of(op);
    const bool fine = native == abi::SUCCESS && status == abi::COMPLETED;
    const uint64_t bytes = flight->bytes;
    // One back-end reads its flag without a fence.
    std::atomic_thread_fence(std::memory_order_acquire);
    end_flight(flight);
    job.parts--;
    moved_ = now_;
    if (fine) {
        if (job.stage == SIGNAL) {
            self_.count.signals_sent++;
        } else {
            job.landed.fetch_add(bytes, std::memory_order_relaxed);
            (job.batch->verb == HXA_READ ? self_.count.bytes_read : self_.count.bytes_written) += bytes;
        }
        if (job.parts != 0) return;
        if (op->status != HXA_OK) finish(op, {});
        else if (job.cursor == CURSOR_END) advance(op);
        return;
    }
    const uint32_t code = native != abi::SUCCESS ? native : static_cast<uint32_t>(abi::FAILED);
    const Outcome outcome = {code == abi::TIMEOUT ? HXA_E_TIMEOUT : HXA_E_LINK, static_cast<int32_t>(code),
                             HXA_SCOPE_OP};
    fail(op, outcome);
    broken({HXA_E_LINK, static_cast<int32_t>(code), HXA_SCOPE_OP});
}

// The link is cut once all answers that are here already were looked at.
void Route::broken(const Outcome &outcome) {
    if (!broken_) breakage_ = outcome;
    broken_ = true;
}

// All data of an op is there: its signal, then its notification, then it is done.
void Route::advance(hxa_op *op) {
    Job &job = job_of(op);
    const hxa_batch &batch = *job.batch;
    hxa_link *link = job.link;
    if ((job.stage & STAGE) == DATA && batch.signal != nullptr) {
        job.stage = SIGNAL;
        job.cursor = 0;
        waiting_.push_front(op);
        return;
    }
    const bool signalled = batch.signal != nullptr;
    if (batch.topic == nullptr) {
        if (signalled) {
            link->out.add_signal();
            pump();
        }
        return finish(op, {});
    }
    job.stage = NOTE;
    Entry entry;
    entry.signal = signalled;
    entry.note = true;
    entry.op = op;
    entry.body = entry_body(signalled, true, batch.topic, batch.topic_len, batch.note, batch.note_len);
    entry.cost = record_cost(entry.body.size());
    link->out.add(std::move(entry));
    pump();
}

// Its first failure; it is finished once nothing of it is in flight.
void Route::fail(hxa_op *op, const Outcome &outcome) {
    Job &job = job_of(op);
    if (op->status == HXA_OK) {
        op->status = outcome.status;
        op->native = outcome.native;
        op->scope = outcome.scope;
    }
    if (job.cursor != CURSOR_END || job.parts == 0) {
        if (!waiting_.remove(op)) parked_.remove(op);
        job.cursor = CURSOR_END;
    }
    if (job.parts == 0) finish(op, outcome);
}

// It failed, and everybody may know; its memory is not free yet.
void Route::tell(hxa_op *op) {
    Job &job = job_of(op);
    if ((job.stage & TOLD) != 0) return;
    job.stage |= TOLD;
    op->bytes = job.landed.load(std::memory_order_relaxed);
    hxa_complete(&self_.sink, op);
}

}  // namespace hx
