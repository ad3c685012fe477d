#include "request_queue.hpp"

#include <algorithm>

#include "link.hpp"
#include "memory.hpp"

namespace hx {

namespace {

constexpr int LAUNCHES = 64;        // between two polls of the requests in flight,
constexpr uint64_t LAUNCHING = MS;  // for no longer than this, where calls take their time
constexpr int MISSES = 4;           // requests that still wait, at either place of a poll, before it ends
constexpr uint64_t BUSY_FIRST = 50 * US, BUSY_MOST = 10 * MS;
// Fabric memory takes a stream or more of 512 for each request of the engine, and answers FAILED when they are used up.
constexpr uint32_t FABRIC_REQUESTS = 60;
constexpr uint64_t BATCH_PATIENCE = 100 * MS;  // calls of other links may hold up a batch query this long
constexpr uint32_t BOUNCES = 3;                // an op may find the link gone this often

}  // namespace

RequestQueue::RequestQueue(hxa_instance &self, const abi::Text &remote, Strand &strand,
                           NotificationSender &notifications)
    : self_(self),
      remote_(remote),
      strand_(strand),
      notifications_(notifications),
      auto_connect_(self.options.auto_connect()) {}

// ---- the connection -------------------------------------------------------------------------------------------------

void RequestQueue::connected(uint64_t local, uint64_t remote) {
    connected_ = true;
    needs_connection_ = false;
    visible_local_ = local;
    visible_remote_ = remote;
}

bool RequestQueue::take_failure(Outcome &why) {
    if (!failed_) return false;
    failed_ = false;
    why = failure_;
    return true;
}

// A failed request costs the connection, once all answers that are here already were taken.
void RequestQueue::connection_failed(const Outcome &outcome) {
    if (!failed_) failure_ = outcome;
    failed_ = true;
}

void RequestQueue::fail_all(const Outcome &outcome) {
    connected_ = false;
    // Some had finished before, and HIXL still answers about them, unless it has cut the connection itself.
    if (self_.batch != 0 && !auto_connect_) poll_each(true);
    failed_ = false;
    for (Request *request = first_; request != nullptr;) {
        Request *following = request->next;
        fail(request->op, outcome);  // leaves requests alone
        report_failure(request->op);
        request = following;
    }
}

void RequestQueue::release_all(const Outcome &outcome) {
    take_answers();
    while (first_ != nullptr) {
        hxa_op *op = first_->op;
        end_request(first_);
        if (--operation_of(op).parts == 0) finish_operation(self_.sink, op, outcome);
    }
}

// ---- ops that were submitted --------------------------------------------------------------------------------------------

void RequestQueue::submit(hxa_op *op) {
    hxa_op *top = submitted_.load(std::memory_order_relaxed);
    do operation_of(op).next = top;
    while (!submitted_.compare_exchange_weak(top, op));
    strand_.wake();
}

void RequestQueue::take_submitted() {
    if (submitted_.load(std::memory_order_relaxed) == nullptr) return;
    hxa_op *op = submitted_.exchange(nullptr), *oldest = nullptr;
    while (op != nullptr) {
        hxa_op *next = operation_of(op).next;
        operation_of(op).next = oldest;
        oldest = op;
        op = next;
    }
    while (oldest != nullptr) {
        hxa_op *next = operation_of(oldest).next;
        waiting_.push(oldest);
        oldest = next;
    }
    moved_ = now_;
}

// Wait until HIXL knows the memory, or for a new connection if the old one cannot see it.
RequestQueue::Fit RequestQueue::fits(const hxa_batch &batch, Outcome &refusal) const {
    Fit fit = Fit::FINE;
    for (size_t i = 0; i < batch.n; i++) {
        const hxa_mem *ours = batch.desc[i].lmem;
        const uint32_t state = ours->state;
        if (state == hxa_mem::REFUSED) {
            refusal = ours->refusal;
            return Fit::REFUSED;
        }
        if (state == hxa_mem::PENDING) return Fit::PARK;
        if (ours->number > visible_local_ || batch.desc[i].rmem->number > visible_remote_) fit = Fit::NEEDS_CONNECTION;
    }
    if (batch.signal != nullptr && batch.signal->number > visible_remote_) fit = Fit::NEEDS_CONNECTION;
    return fit;
}

void RequestQueue::unpark() {
    for (hxa_op *op = parked_.first; op != nullptr;) {
        hxa_op *following = operation_of(op).next;
        Outcome refusal;
        if ((operation_of(op).claim & CLAIM) != CANCELLED && fits(*operation_of(op).batch, refusal) != Fit::PARK) {
            parked_.remove(op);
            waiting_.push(op);
        }
        op = following;
    }
}

// Claim an op before its first byte moves; return false if it was cancelled.
bool RequestQueue::claim(hxa_op *op) {
    std::atomic<uint32_t> &word = operation_of(op).claim;
    uint32_t queued = QUEUED;
    if (word.compare_exchange_strong(queued, STARTED)) return true;
    if ((queued & CLAIM) == CANCELLED) return false;
    if ((queued & CLAIM) == QUEUED) word.fetch_or(STARTED);  // ABANDONED as well: it ends soon
    return true;
}

// Return true if this op, the first that waits, may go now.
bool RequestQueue::admit(hxa_op *op) {
    Operation &operation = operation_of(op);
    if (operation.stage != DATA || (operation.claim & CLAIM) == STARTED) return true;
    Outcome refusal;
    const Fit fit = fits(*operation.batch, refusal);
    if (fit == Fit::NEEDS_CONNECTION) {
        needs_connection_ = true;
        return false;
    }
    // A bare notification can be cancelled for as long as it waits for room.
    const bool bare = operation.batch->n == 0 && operation.batch->signal == nullptr;
    if (fit == Fit::PARK || (!bare && !claim(op))) {
        waiting_.pop();
        parked_.push(op);
        return false;
    }
    if (fit == Fit::REFUSED) fail(op, refusal);
    return fit != Fit::REFUSED;
}

bool RequestQueue::launch() {
    if (!parked_.empty()) unpark();
    if (!connected_ || needs_connection_ || self_.pause.wanted != 0 || now_ < retry_at_) return false;
    for (int left = LAUNCHES; left > 0; left--) {
        if (waiting_.empty() || in_flight_ >= self_.options.in_flight || failed_) return false;
        if (self_.fabric && self_.requests.count.load(std::memory_order_relaxed) >= FABRIC_REQUESTS) {
            retry_at_ = now_ + BUSY_FIRST;
            return false;
        }
        if (left < LAUNCHES && clock_now() - now_ > LAUNCHING) break;
        hxa_op *op = waiting_.first;
        if (!admit(op)) {
            if (needs_connection_) return false;
            continue;
        }
        Operation &operation = operation_of(op);
        if (operation.stage == DATA && operation.cursor == CURSOR_END) {
            waiting_.pop();
            advance(op);
            continue;
        }
        switch (send(op)) {
            case Verdict::SENT:
                if (operation.cursor == CURSOR_END) waiting_.pop();
                break;
            case Verdict::LATER: return false;
            case Verdict::OVER: break;
        }
    }
    return !waiting_.empty();
}

// The next request of an op: descriptors of one kind each side, no more than HIXL is given at once.
bool RequestQueue::build(hxa_op *op, Request &request) {
    Operation &operation = operation_of(op);
    const hxa_batch &batch = *operation.batch;
    descs_.clear();
    if (operation.stage == SIGNAL) return build_signal(op, request);
    uint64_t group = operation.cursor >> 32, i = operation.cursor & UINT32_MAX;
    const size_t most = self_.options.request_descriptors;
    for (; group < 4; group++, i = 0) {
        if ((operation.groups >> group & 1) == 0) continue;
        for (; i < batch.n && descs_.size() < most; i++) {
            const hxa_desc &desc = batch.desc[i];
            if (desc.lmem->kind * 2 + desc.rmem->kind != group) continue;
            descs_.push_back({desc.lmem->address + desc.loff, desc.rmem->address + desc.roff, desc.len});
            request.bytes += desc.len;
        }
        if (i < batch.n) break;
        // The end of a group ends the request, so that kinds are never mixed; skip to the next that there is.
        do group++;
        while (group < 4 && (operation.groups >> group & 1) == 0);
        i = 0;
        break;
    }
    operation.cursor = group >= 4 ? CURSOR_END : group << 32 | i;
    return true;
}

// Make a request that writes a word of the scratch page to the peer; return false if all of them are in use.
bool RequestQueue::build_signal(hxa_op *op, Request &request) {
    Operation &operation = operation_of(op);
    const hxa_batch &batch = *operation.batch;
    {
        Guard guard(self_.slots_lock);
        if (self_.slots.empty()) return false;
        request.slot = self_.slots.back();
        self_.slots.pop_back();
    }
    uint64_t *word = &self_.scratch[request.slot];
    *word = batch.signal_value;
    descs_.push_back({reinterpret_cast<uintptr_t>(word), batch.signal->address + batch.signal_off, sizeof *word});
    operation.cursor = CURSOR_END;
    return true;
}

void RequestQueue::free_slot(Request *request) {
    if (request->slot < 0) return;
    Guard guard(self_.slots_lock);
    self_.slots.push_back(request->slot);
}

RequestQueue::Verdict RequestQueue::send(hxa_op *op) {
    Operation &operation = operation_of(op);
    const uint64_t cursor = operation.cursor;
    Request *request = self_.requests.begin(this);
    if (!build(op, *request)) {
        self_.requests.end(request);
        retry_at_ = now_ + BUSY_FIRST;
        return Verdict::LATER;
    }
    abi::TransferArgs arguments = {};
    arguments.user_data = reinterpret_cast<void *>(request->token);
    const abi::TransferOp verb = operation.stage == DATA && operation.batch->verb == HXA_READ ? abi::READ : abi::WRITE;
    uint32_t native = abi::FAILED;
    {
        CallLock::Transfer transfer(self_.call_lock);
        Call call(self_, "TransferAsync");
        if (call.allowed)
            native = self_.library.transfer_async(&self_.hixl, remote_, verb, descs_, arguments, request->handle);
    }
    if (native == abi::SUCCESS) {
        request->op = op;
        request->prev = last_;
        if (last_ != nullptr) last_->next = request;
        else first_ = request;
        last_ = request;
        in_flight_++;
        operation.parts++;
        moved_ = now_;
        busy_since_ = busy_ns_ = 0;
        bounces_ = 0;
        return Verdict::SENT;
    }
    free_slot(request);
    self_.requests.end(request);
    return refused(op, native, cursor);
}

// HIXL did not take the request that began at `cursor`.
RequestQueue::Verdict RequestQueue::refused(hxa_op *op, uint32_t native, uint64_t cursor) {
    Operation &operation = operation_of(op);
    const Outcome outcome = outcome_of(native);
    // With others in flight their number may be the reason.  If it is the link, one of them fails as well.
    const bool too_many =
        native == abi::FAILED && self_.fabric && self_.requests.count.load(std::memory_order_relaxed) != 0;
    if (native == abi::RESOURCE_EXHAUSTED || too_many) {
        if (busy_since_ == 0) busy_since_ = now_;
        if (now_ - busy_since_ < self_.options.busy_ms * MS) {
            operation.cursor = cursor;
            busy_ns_ = std::min(std::max(busy_ns_ * 2, BUSY_FIRST), BUSY_MOST);
            retry_at_ = now_ + busy_ns_;
            return Verdict::LATER;
        }
        fail(op, {HXA_E_BUSY, outcome.native, HXA_SCOPE_OP});
        return Verdict::OVER;
    }
    if (native == abi::PARAM_INVALID || native == abi::UNSUPPORTED) {  // only this op is to blame
        fail(op, outcome);
        return Verdict::OVER;
    }
    if (native == abi::NOT_CONNECTED && operation.parts == 0 && ++bounces_ < BOUNCES)
        operation.cursor = cursor;  // nothing moved: it is sent again
    else fail(op, {outcome.status == HXA_E_TIMEOUT ? HXA_E_TIMEOUT : HXA_E_LINK, outcome.native, HXA_SCOPE_OP});
    connection_failed({HXA_E_LINK, outcome.native, HXA_SCOPE_OP});
    return Verdict::OVER;
}

// ---- answers --------------------------------------------------------------------------------------------------------

uint32_t RequestQueue::in_flight_of(const hxa_link *link) const {
    uint32_t n = 0;
    for (const Request *request = first_; request != nullptr; request = request->next)
        n += operation_of(request->op).link == link;
    return n;
}

void RequestQueue::poll() {
    if (in_flight_ == 0 || !connected_) return take_answers();
    // With AutoConnect HIXL may have dropped a request, and given its handle to another link's: only the batch query
    // says whose answer it has.
    const bool recycled = self_.batch != 0 && auto_connect_;
    const bool most = in_flight_ > 1 && in_flight_ * 2 >= self_.requests.count.load(std::memory_order_relaxed);
    if (self_.batch != 0 && (most || recycled) && poll_batch()) batch_polled_ = now_;
    else if (!recycled || now_ - std::min(batch_polled_, now_) > BATCH_PATIENCE) poll_each(false);
}

// One question for all requests of the engine; the answers of other endpoints are passed on.
bool RequestQueue::poll_batch() {
    results_.clear();
    {
        CallLock::Sweep sweep(self_.call_lock);
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
        Guard guard(self_.requests.lock);
        for (const abi::TransferResult &result : results_) {
            if (result.status == abi::WAITING) continue;
            Request *request = self_.requests.find(reinterpret_cast<uint64_t>(result.user_data));
            if (request == nullptr) continue;
            if (request->queue == this) {
                seen_.push_back({request, request->token, abi::SUCCESS, result.status});
                continue;
            }
            request->answer = result.status;
            request->queue->answer(request);
        }
    }
    take_answers();
    take_seen();
    return true;
}

// A request that ended meanwhile has another token.
void RequestQueue::take_seen() {
    for (const Answer &answer : seen_)
        if (answer.request->token == answer.token) finished(answer.request, answer.native, answer.status);
}

void RequestQueue::answer(Request *request) {
    Request *top = answers_.load(std::memory_order_relaxed);
    do request->answered = top;
    while (!answers_.compare_exchange_weak(top, request));
    strand_.wake();
}

// The answers that other endpoints' batch queries brought.  Requests end on this strand only, so that all on the stack
// are alive.
void RequestQueue::take_answers() {
    if (answers_.load(std::memory_order_relaxed) == nullptr) return;
    Request *request = answers_.exchange(nullptr), *oldest = nullptr;
    while (request != nullptr) {
        Request *next = request->answered;
        request->answered = oldest;
        oldest = request;
        request = next;
    }
    while (oldest != nullptr) {
        Request *next = oldest->answered;
        finished(oldest, abi::SUCCESS, oldest->answer);
        oldest = next;
    }
}

// One by one: from the oldest, which is usually the next to finish, and from a place further on, because it need not be.
// With `all`, every one; else until a few of them still wait at each place.
void RequestQueue::poll_each(bool all) {
    seen_.clear();
    {
        CallLock::Query query(self_.call_lock);
        take_answers();  // a request that has its answer must not be asked about again
        if (first_ == nullptr) return;
        Call call(self_, "GetTransferStatus");
        if (!call.allowed) return;
        bool failed = false;
        const auto question = [&](Request *request) {
            abi::TransferStatus status = abi::WAITING;
            const uint32_t native = self_.library.transfer_status(&self_.hixl, request->handle, status);
            if (native == abi::SUCCESS && status == abi::WAITING) return false;
            seen_.push_back({request, request->token, native, status});
            failed = failed || native != abi::SUCCESS || status != abi::COMPLETED;
            return true;
        };
        // Most back-ends forget all requests of a link at its first failure; on the one that recycles handles they
        // stay.
        const auto enough = [&](int misses) { return !all && (misses >= MISSES || failed); };
        Request *request = first_;
        for (int misses = 0; request != nullptr && !enough(misses); request = request->next) misses += !question(request);
        if (request != nullptr && !failed) {
            // From the probe on, if it lies in the rest; `request` is the first of that.
            Request *at = probe_ != nullptr ? probe_ : request;
            int misses = 0;
            for (; at != nullptr && !enough(misses); at = at->next) {
                const bool asked =
                    std::any_of(seen_.begin(), seen_.end(), [at](const Answer &answer) { return answer.request == at; });
                if (!asked) misses += !question(at);
            }
            probe_ = at;
        }
    }
    take_seen();
}

// Remove a request from the list and the table.  Its handle may already be that of another request.
void RequestQueue::end_request(Request *request) {
    if (request->prev != nullptr) request->prev->next = request->next;
    else first_ = request->next;
    if (request->next != nullptr) request->next->prev = request->prev;
    else last_ = request->prev;
    if (probe_ == request) probe_ = request->next;
    free_slot(request);
    in_flight_--;
    self_.requests.end(request);
}

// The one answer about a request.
void RequestQueue::finished(Request *request, uint32_t native, abi::TransferStatus status) {
    hxa_op *op = request->op;
    Operation &operation = operation_of(op);
    const bool fine = native == abi::SUCCESS && status == abi::COMPLETED;
    const uint64_t bytes = request->bytes;
    // One back-end reads its flag without a fence.
    std::atomic_thread_fence(std::memory_order_acquire);
    end_request(request);
    operation.parts--;
    moved_ = now_;
    if (fine) {
        if (operation.stage == SIGNAL) {
            self_.count.signals_sent++;
        } else {
            operation.landed.fetch_add(bytes, std::memory_order_relaxed);
            (operation.batch->verb == HXA_READ ? self_.count.bytes_read : self_.count.bytes_written) += bytes;
        }
        if (operation.parts != 0) return;
        if (op->status != HXA_OK) finish_operation(self_.sink, op, {});
        else if (operation.cursor == CURSOR_END) advance(op);
        return;
    }
    const uint32_t code = native != abi::SUCCESS ? native : static_cast<uint32_t>(abi::FAILED);
    const Outcome outcome = {code == abi::TIMEOUT ? HXA_E_TIMEOUT : HXA_E_LINK, static_cast<int32_t>(code),
                             HXA_SCOPE_OP};
    fail(op, outcome);
    connection_failed({HXA_E_LINK, static_cast<int32_t>(code), HXA_SCOPE_OP});
}

// All data of an op is there: its signal, then its notification, then it is done.
void RequestQueue::advance(hxa_op *op) {
    Operation &operation = operation_of(op);
    const hxa_batch &batch = *operation.batch;
    hxa_link *link = operation.link;
    if ((operation.stage & STAGE) == DATA && batch.signal != nullptr) {
        operation.stage = SIGNAL;
        operation.cursor = 0;
        waiting_.push_front(op);
        return;
    }
    const bool signalled = batch.signal != nullptr;
    if (batch.topic == nullptr) {
        if (signalled) {
            link->out.add_signal();
            notifications_.wake();
        }
        return finish_operation(self_.sink, op, {});
    }
    operation.stage = NOTE;
    Entry entry;
    entry.signal = signalled;
    entry.note = true;
    entry.op = op;
    entry.body = entry_body(signalled, true, batch.topic, batch.topic_len, batch.note, batch.note_len);
    entry.cost = record_cost(entry.body.size());
    link->out.add(std::move(entry));
    notifications_.wake();
}

// Keep the first failure; the op is finished once nothing of it is in flight.
void RequestQueue::fail(hxa_op *op, const Outcome &outcome) {
    Operation &operation = operation_of(op);
    set_outcome(op, outcome);
    if (operation.cursor != CURSOR_END || operation.parts == 0) {
        if (!waiting_.remove(op)) parked_.remove(op);
        operation.cursor = CURSOR_END;
    }
    if (operation.parts == 0) finish_operation(self_.sink, op, outcome);
}

// The core may know of the failure although the memory is not free yet.
void RequestQueue::report_failure(hxa_op *op) {
    Operation &operation = operation_of(op);
    if ((operation.stage & REPORTED) != 0) return;
    operation.stage |= REPORTED;
    op->bytes = operation.landed.load(std::memory_order_relaxed);
    hxa_complete(&self_.sink, op);
}

// ---- ops that end early ---------------------------------------------------------------------------------------------

void RequestQueue::fail_waiting(const hxa_link *link, const Outcome &outcome) {
    for (OpList *list : {&waiting_, &parked_}) {
        for (hxa_op *op = list->first; op != nullptr;) {
            hxa_op *following = operation_of(op).next;
            uint32_t queued = QUEUED;
            Operation &operation = operation_of(op);
            if (operation.link == link
                && (operation.claim.compare_exchange_strong(queued, STARTED) || (queued & CLAIM) != CANCELLED))
                fail(op, outcome);
            op = following;
        }
    }
}

bool RequestQueue::take_back(hxa_op *op) { return waiting_.remove(op) || parked_.remove(op); }

RequestQueue::Found RequestQueue::abandon(hxa_op *op) {
    const Outcome outcome = {HXA_E_TIMEOUT, 0, HXA_SCOPE_OP};
    // The address may be another op's by now, which was not abandoned.
    const auto meant = [op](const hxa_op *other) {
        return other == op && (operation_of(op).claim & ABANDONED) != 0;
    };
    for (OpList *list : {&waiting_, &parked_})
        for (hxa_op *at = list->first; at != nullptr; at = operation_of(at).next)
            if (meant(at) && (operation_of(at).claim & CLAIM) != CANCELLED) {
                const bool in_flight = operation_of(at).parts != 0;
                fail(at, outcome);
                return in_flight ? Found::IN_FLIGHT : Found::WAITING;
            }
    for (Request *request = first_; request != nullptr; request = request->next)
        if (meant(request->op)) {
            fail(op, outcome);
            return Found::IN_FLIGHT;
        }
    return Found::NO;
}

// ---- time -----------------------------------------------------------------------------------------------------------

// The sleep before the next poll: none at first, then an eighth of the time that passed without progress.
uint64_t RequestQueue::rest(uint64_t now) const {
    const uint64_t quiet = now - std::min(moved_, now);
    if (quiet < self_.options.spin_us * US) {
        for (int i = 0; i < 4; i++) relax();
        return Strand::AGAIN;
    }
    return now + std::min(std::max(quiet / 8, 2 * US), self_.options.poll_max_us * US);
}

uint64_t RequestQueue::next_turn(uint64_t now) const {
    uint64_t next = NEVER;
    if (in_flight_ != 0 && connected_) next = std::min(next, rest(now));
    if (retry_at_ > now && !waiting_.empty()) next = std::min(next, retry_at_);
    return next;
}

}  // namespace hx
