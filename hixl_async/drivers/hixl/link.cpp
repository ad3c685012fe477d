#include "link.hpp"

#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "address.hpp"
#include "doorbell.hpp"
#include "endpoint.hpp"
#include "hxa_retry.h"
#include "memory.hpp"
#include "operation.hpp"

namespace hx {

namespace {

template <class Number>
bool take(const char *&at, const char *end, Number &out) {
    if (static_cast<size_t>(end - at) < sizeof out) return false;
    std::memcpy(&out, at, sizeof out);
    at += sizeof out;
    return true;
}

// The number of frames of a new peer that may be under way to us.  All windows together fit HIXL's queue.
uint32_t grant(hxa_instance &self) {
    const uint32_t left = QUEUE - self.granted;
    const uint32_t window = std::min(WINDOW, left / 4);
    return window < WINDOW_LEAST ? 0 : window;
}

void end_fence(hxa_link *link, const Outcome &outcome) {
    hxa_op *op = link->fence;
    link->fence = nullptr;
    if (op != nullptr) finish(link->self->sink, op, outcome);
}

constexpr Outcome LINK_ENDED = {HXA_E_LINK, 0, HXA_SCOPE_LINK};

}  // namespace

int link_new(hxa_instance *self, uint64_t cookie, hxa_link **made, hxa_metadata *metadata) {
    if (self->started == 0) return -HXA_E_BUSY;
    auto link = std::make_unique<hxa_link>();
    link->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (link->fd < 0) return -HXA_E_NOMEM;
    link->self = self;
    link->cookie = cookie;
    if (HXA_RETRY(getrandom(&link->tag, sizeof link->tag, 0)) != sizeof link->tag)
        link->tag = clock_now() ^ cookie << 48;
    link->window = grant(*self);
    self->granted += link->window;
    LinkMetadata about = {};
    about.magic = LINK_MAGIC;
    about.version = VERSION;
    about.token = self->token;
    about.tag = link->tag;
    about.registrations = self->registrations;
    about.window = link->window;
    about.control = self->options.notify_control;
    about.backend = static_cast<uint16_t>(self->backend);
    std::memcpy(about.id, self->id.c_str(), std::min(self->id.size(), ID_BYTES - 1));
    std::memset(metadata, 0, sizeof *metadata);
    metadata->len = sizeof about;
    std::memcpy(metadata->data, &about, sizeof about);
    {
        Guard guard(self->lock);
        self->links[link->tag] = link.get();
    }
    self->count.links++;
    *made = link.release();
    return 0;
}

int link_connect(hxa_link *link, const hxa_metadata *metadata, hxa_op *op) {
    hxa_instance &self = *link->self;
    LinkMetadata about;
    for (uint32_t i = 0; i < metadata->nfds; i++) close(metadata->fds[i]);
    if (link->state != hxa_link::NEW || link->endpoint != nullptr) return -HXA_E_INVALID;
    if (metadata->len != sizeof about || metadata->nfds != 0) return -HXA_E_PROTOCOL;
    std::memcpy(&about, metadata->data, sizeof about);
    // HIXL never gets an invalid address: with AutoConnect it would take down other links.
    if (about.magic != LINK_MAGIC || about.version != VERSION || about.token == 0 || about.window > QUEUE
        || about.control > 1 || about.backend == 0 || about.backend > static_cast<uint16_t>(Backend::FAB)
        || about.id[ID_BYTES - 1] != '\0' || !valid_address(about.id))
        return -HXA_E_PROTOCOL;
    const Backend theirs = static_cast<Backend>(about.backend);
    if (theirs != self.backend) {  // HIXL would answer FAILED, or wait for an answer that the other cannot give
        op->native = native_of(self.backend, theirs);
        return -HXA_E_UNSUPPORTED;
    }
    const std::string id = about.id;
    if (id == self.id) return -HXA_E_INVALID;  // HIXL refuses a connection with itself
    link->peer_tag = about.tag;
    link->peer_token = about.token;
    link->peer_window = about.window;
    link->peer_control = about.control != 0;
    link->by_control = self.options.notify_control || about.window < WINDOW_LEAST;
    link->out.grant(std::max(about.window, WINDOW_LEAST), self.options.pending_notes);
    {
        // Attached under the lock, so that the endpoint does not end before.
        Guard guard(self.lock);
        std::shared_ptr<Endpoint> &endpoint = self.endpoints[id];
        if (endpoint == nullptr) {
            endpoint = std::make_shared<Endpoint>(self, id);
            endpoint->open();
        }
        link->endpoint = endpoint;
        endpoint->attach(link, about.registrations, op);
    }
    if (!link->peer_control) {
        self.listeners++;
        self.notifications->wake();
    }
    return HXA_PENDING;
}

int link_fd(hxa_link *link) { return link->fd; }

// ---- what came ------------------------------------------------------------------------------------------------------

int link_poll(hxa_link *link, uint32_t budget) {
    hxa_instance &self = *link->self;
    if (clear_doorbell(link)) self.count.wakes_received++;
    uint32_t n = 0;
    Inbox::Record record;
    while (n < budget && link->in.take(record)) {
        if (record.signal) {
            n++;
            self.event(link, HXA_EVENT_SIGNAL, {});
        }
        if (!record.note) continue;
        n++;
        hxa_event out = {};
        out.link = link->cookie;
        out.kind = HXA_EVENT_NOTE;
        out.topic = record.body.data();
        out.topic_len = record.topic_len;
        out.data = record.body.data() + record.topic_len;
        out.data_len = static_cast<uint32_t>(record.body.size()) - record.topic_len;
        self.count.notes_received++;
        self.sink.event(self.sink.ctx, &out);
    }
    uint64_t seq, cost;
    if (link->in.due_credit(std::max(link->window, WINDOW_LEAST), seq, cost) && link->down == 0)
        self.send(link, Message::CREDIT, pack(seq) + pack(cost));
    if (!link->in.empty()) return 1;
    std::string why;
    bool ended = false;
    {
        Guard guard(link->lock);
        ended = link->end_pending && link->down == 0 && link->in.complete(link->end_after);
        why = link->end_text;
    }
    if (ended) {
        link->down = 1;
        self.event(link, HXA_EVENT_LINK_DOWN, why, HXA_E_LINK);
    }
    // From here on a thread that puts something in rings; what came before is seen now.
    link->armed = 1;
    if (link->in.empty() || link->armed.exchange(0) == 0) return 0;
    return 1;
}

int link_message(hxa_link *link, const void *data, size_t len) {
    hxa_instance &self = *link->self;
    const char *at = static_cast<const char *>(data), *end = at + len;
    uint8_t word;
    uint64_t seq = 0, cost = 0;
    bool fine = take(at, end, word);
    switch (static_cast<Message>(fine ? word : 0)) {
        case Message::WAKE:
            fine = take(at, end, seq);
            if (fine) {
                link->in.announced(seq, clock_now());
                self.notes_at = clock_now();
                self.notifications->wake();
            }
            break;
        case Message::CREDIT:
            fine = take(at, end, seq) && take(at, end, cost) && link->out.credit(seq, cost);
            if (fine && link->endpoint != nullptr) link->endpoint->wake_sender();
            break;
        case Message::LOST:
            fine = take(at, end, seq) && link->endpoint != nullptr;
            if (fine && link->state == hxa_link::UP) link->endpoint->resend(link, seq);
            break;
        case Message::PIECES: {
            const Inbox::Put put = link->in.put(std::string(at, end));
            fine = put != Inbox::Put::MALFORMED;
            if (put == Inbox::Put::READY) ring_doorbell(link);
            break;
        }
        case Message::FENCE:
            link->fenced = 1;
            if (link->endpoint == nullptr) self.send(link, Message::FENCED);
            else if (link->state != hxa_link::STOPPED) link->endpoint->fence(link);  // else STOPPED answers
            break;
        case Message::FENCED:
            link->peer_away = true;
            end_fence(link, {});
            break;
        case Message::STOPPED:
            fine = take(at, end, seq);
            if (!fine) break;
            link->peer_away = true;
            end_fence(link, {});
            link->in.announced(seq, clock_now());
            end_link(link, seq, "the peer stopped the link");
            break;
        default: fine = false;
    }
    if (fine) return 0;
    end_link(link, 0, "the peer's driver sent a malformed message");
    return -HXA_E_PROTOCOL;
}

// ---- the end --------------------------------------------------------------------------------------------------------

int link_stop(hxa_link *link, int dead, hxa_op *op) {
    link->state = hxa_link::STOPPED;
    if (dead) {
        link->peer_away = true;
        end_fence(link, {});
    }
    if (link->endpoint == nullptr) return HXA_DONE;
    link->endpoint->stop(link, dead != 0, op);
    return HXA_PENDING;
}

int link_fence(hxa_link *link, hxa_op *op) {
    if (link->peer_away || link->endpoint == nullptr) return HXA_DONE;
    if (link->fence != nullptr) return -HXA_E_BUSY;
    link->fence = op;
    link->self->send(link, Message::FENCE);
    return HXA_PENDING;
}

void link_free(hxa_link *link) {
    hxa_instance &self = *link->self;
    end_fence(link, LINK_ENDED);
    if (link->endpoint != nullptr && !link->peer_control) self.listeners--;
    self.granted -= link->window;
    {
        Guard guard(self.lock);
        self.links.erase(link->tag);
    }
    close(link->fd);
    self.count.links--;
    delete link;
}

// ---- work -----------------------------------------------------------------------------------------------------------

namespace {

bool is_inside(const hxa_mem *mem, uint64_t offset, uint64_t length) {
    return offset <= mem->size && length <= mem->size - offset;
}

// Everything is checked before anything is taken.
int check(const hxa_link *link, const hxa_batch *batch, hxa_op *op, uint8_t &groups) {
    if (batch->verb > HXA_WRITE) return -HXA_E_INVALID;
    if (batch->n == 0 && batch->signal == nullptr && batch->topic == nullptr) return -HXA_E_INVALID;
    if (batch->n > DESCRIPTORS) return -HXA_E_INVALID;
    const uint32_t right = batch->verb == HXA_READ ? HXA_RIGHT_READ : HXA_RIGHT_WRITE;
    groups = 0;
    for (size_t i = 0; i < batch->n; i++) {
        const hxa_desc &desc = batch->desc[i];
        const hxa_mem *ours = desc.lmem, *theirs = desc.rmem;
        op->failed = static_cast<int64_t>(i);
        if (ours == nullptr || ours->link != nullptr || ours->self != link->self || theirs == nullptr
            || theirs->link != link || desc.len == 0)
            return -HXA_E_INVALID;
        if (!is_inside(ours, desc.loff, desc.len) || !is_inside(theirs, desc.roff, desc.len)) return -HXA_E_RANGE;
        if ((theirs->rights & right) == 0) return -HXA_E_RIGHTS;
        if (ours->state == hxa_mem::REFUSED) {
            op->native = ours->refusal.native;
            return -ours->refusal.status;
        }
        groups |= static_cast<uint8_t>(1u << (ours->kind * 2 + theirs->kind));
    }
    op->failed = -1;
    if (batch->signal != nullptr) {
        if (batch->signal->link != link || batch->signal_off % 8 != 0) return -HXA_E_INVALID;
        if (!is_inside(batch->signal, batch->signal_off, 8)) return -HXA_E_RANGE;
        if ((batch->signal->rights & HXA_RIGHT_WRITE) == 0) return -HXA_E_RIGHTS;
    }
    if (batch->topic != nullptr && static_cast<uint64_t>(batch->topic_len) + batch->note_len > NOTE_BYTES)
        return -HXA_E_RANGE;
    return 0;
}

}  // namespace

int submit(hxa_link *link, const hxa_batch *batch, hxa_op *op) {
    if (link->state != hxa_link::UP || link->fenced != 0 || link->down != 0) return -HXA_E_LINK;
    uint8_t groups;
    const int status = check(link, batch, op, groups);
    if (status != 0) return status;
    if (batch->topic != nullptr && !link->out.reserve(note_cost(*batch))) return -HXA_E_BUSY;
    Operation &operation = *new (op->scratch) Operation();
    operation.link = link;
    operation.batch = batch;
    operation.groups = groups;
    operation.cursor = batch->n == 0 ? CURSOR_END : 0;
    op->status = HXA_OK;
    op->native = 0;
    op->scope = HXA_SCOPE_OP;
    op->failed = -1;
    op->bytes = 0;
    link->self->count.ops_queued++;
    link->endpoint->submit(op);
    return HXA_PENDING;
}

int cancel(hxa_link *link, hxa_op *op) {
    uint32_t queued = QUEUED;
    if (!operation_of(op).claim.compare_exchange_strong(queued, CANCELLED)) return 0;
    link->endpoint->cancel(op);
    return 1;
}

uint64_t progress(hxa_link *link, const hxa_op *op) {
    (void)link;
    return operation_of(op).landed.load(std::memory_order_relaxed);
}

int abandon(hxa_link *link, hxa_op *op) {
    operation_of(op).claim.fetch_or(ABANDONED);
    link->endpoint->abandon(op);
    return 0;
}

}  // namespace hx
