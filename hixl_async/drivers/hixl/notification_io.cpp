#include "notification_io.hpp"

#include <algorithm>
#include <cstring>

#include "doorbell.hpp"
#include "operation.hpp"

namespace hx {

namespace {

constexpr uint64_t STALE = 2 * MS;  // this long after the last frame the receiver asks HIXL rarely, and is woken
constexpr uint64_t RETRY_FIRST = MS, RETRY_MOST = 50 * MS;
constexpr uint64_t FETCH_SOON = 20 * US;
constexpr uint64_t OVERDUE_INTERVAL = 100 * MS;
constexpr uint32_t LOSSES = 3;  // records that never came, before a link gives up on HIXL
constexpr size_t PIECE_BODY = FRAME_BYTES - PIECE_HEAD;

bool claim(hxa_op *op) {
    uint32_t queued = QUEUED;
    std::atomic<uint32_t> &word = operation_of(op).claim;
    while (!word.compare_exchange_strong(queued, queued | STARTED))
        if ((queued & CLAIM) == CANCELLED) return false;
    return (queued & CLAIM) != CANCELLED;
}

std::vector<std::string> frames_of(const std::vector<Entry> &entries) {
    std::vector<std::string> frames(1);
    for (const Entry &entry : entries)
        for (size_t offset = 0; offset < entry.body.size();) {
            if (frames.back().size() + PIECE_HEAD >= FRAME_BYTES) frames.emplace_back();
            offset = add_piece(frames.back(), entry, offset, FRAME_BYTES - frames.back().size());
        }
    return frames;
}

}  // namespace

NotificationSender::NotificationSender(hxa_instance &self, const std::string &id, const abi::Text &remote)
    : self_(self),
      id_(id),
      remote_(remote) {}

// ---- sending, on the control strand ---------------------------------------------------------------------------------

uint64_t NotificationSender::deliver(uint64_t now) {
    uint64_t next = NEVER;
    for (hxa_link *link : links_) deliver(link, now, next);
    return next;
}

void NotificationSender::deliver(hxa_link *link, uint64_t now, uint64_t &next) {
    for (;;) {
        if (!link->by_control && !connected_) return;
        if (link->retry_at > now) {
            next = std::min(next, link->retry_at);
            return;
        }
        std::vector<Entry> entries;
        entries.swap(link->held);
        if (entries.empty()) entries = link->out.take(claim);
        if (entries.empty()) return;
        const bool large = (entries[0].body.size() + PIECE_BODY - 1) / PIECE_BODY > FRAMES_MOST;
        if (large && !link->by_control && !link->logged_long) {
            link->logged_long = true;
            self_.log(link, text("hixl: notifications of more than %zu bytes go over the control connection",
                                 FRAMES_MOST * PIECE_BODY));
        }
        if (large || link->by_control) {
            by_control(link, entries);
        } else if (!by_hixl(link, entries, now)) {
            link->held = std::move(entries);
            next = std::min(next, link->retry_at);
            return;
        }
        for (const Entry &entry : entries) {
            self_.count.notes_sent += entry.note;
            if (entry.op != nullptr) finish_operation(self_.sink, entry.op, {});
        }
        now = clock_now();
    }
}

void NotificationSender::by_control(hxa_link *link, const std::vector<Entry> &entries) {
    std::string pieces;
    for (const Entry &entry : entries) {
        for (size_t offset = 0; offset < entry.body.size();) {
            if (pieces.size() + PIECE_HEAD >= MESSAGE_BYTES) {
                self_.send(link, Message::PIECES, pieces);
                pieces.clear();
            }
            offset = add_piece(pieces, entry, offset, MESSAGE_BYTES - pieces.size());
        }
    }
    if (!pieces.empty()) self_.send(link, Message::PIECES, pieces);
}

// Return false if HIXL has no room now.  Entries that it refuses for another reason go over the control connection.
bool NotificationSender::by_hixl(hxa_link *link, std::vector<Entry> &entries, uint64_t now) {
    abi::NotifyDesc frame;
    frame.name = self_.library.text(frame_name(link->peer_tag));
    const std::vector<std::string> frames = frames_of(entries);
    if (now - link->sent_at > STALE) self_.send(link, Message::WAKE, pack(entries.back().seq));
    link->sent_at = now;
    for (const std::string &pieces : frames) {
        frame.notify_msg = self_.library.text(base64(pieces));
        uint32_t native = abi::FAILED;
        {
            CallLock::Control control(self_.call_lock);
            Call call(self_, "SendNotify");
            if (call.allowed)
                native = self_.library.send_notify(&self_.hixl, remote_, frame, self_.options.notify_timeout_ms);
        }
        if (native == abi::SUCCESS) continue;
        if (native == abi::RESOURCE_EXHAUSTED && link->retry_ns < RETRY_MOST) {
            link->retry_ns = std::max(link->retry_ns * 2, RETRY_FIRST);
            link->retry_at = clock_now() + link->retry_ns;
            return false;
        }
        // The frame may have arrived all the same, and a late answer would be taken for the answer to the next frame, so
        // that this connection is not used for notifications again.
        link->breaks++;
        use_control(link, text("SendNotify answered %u (%s)", native,
                               error_text(status_of(native), static_cast<int32_t>(native))));
        by_control(link, entries);
        break;
    }
    link->retry_ns = link->retry_at = 0;
    return true;
}

void NotificationSender::use_control(hxa_link *link, const std::string &why) {
    if (link->by_control) return;
    link->by_control = true;
    self_.warn(link, "hixl: " + id_ + ": notifications go over the control connection from here on: " + why);
}

void NotificationSender::resend(hxa_link *link, uint64_t seq) {
    control_->post([this, link, seq] {
        if (std::find(links_.begin(), links_.end(), link) == links_.end()) return;
        if (!link->by_control && ++link->losses >= LOSSES) use_control(link, "some never arrived");
        by_control(link, link->out.kept(seq));
    });
}

// ---- links, on the control strand -----------------------------------------------------------------------------------

void NotificationSender::drop(hxa_link *link, const Outcome &outcome) {
    for (const Entry &entry : link->held)
        if (entry.op != nullptr) finish_operation(self_.sink, entry.op, outcome);
    link->held.clear();
    for (hxa_op *op : link->out.clear(claim)) finish_operation(self_.sink, op, outcome);
}

// The last messages of a link: all records that may not have arrived, then that nothing follows.
void NotificationSender::remove(hxa_link *link) {
    drop(link, {HXA_E_LINK, 0, HXA_SCOPE_LINK});
    links_.erase(std::remove(links_.begin(), links_.end(), link), links_.end());
    if (link->dead) return;
    by_control(link, link->out.kept(0));
    self_.send(link, Message::STOPPED, pack(link->out.last()));
}

bool NotificationSender::take_back(hxa_op *op, bool abandoned) {
    for (hxa_link *link : links_) {
        // While the outbox holds it the op is alive; its address may be another op's, which was not abandoned.
        if (abandoned && !(link->out.holds(op) && (operation_of(op).claim & ABANDONED) != 0)) continue;
        if (link->out.remove(op)) return true;
    }
    return false;
}

void NotificationSender::renew() {
    for (hxa_link *link : links_)
        if (link->breaks < 2 && !self_.options.notify_control && link->peer_window >= WINDOW_LEAST)
            link->by_control = false;
}

// One back-end forgets what the peer has not fetched when the connection ends.
void NotificationSender::resend_unfetched() {
    if (self_.batch != 0) return;
    for (hxa_link *link : links_)
        if (!link->by_control && !link->dead) by_control(link, link->out.kept(0));
}

// ---- fetching -------------------------------------------------------------------------------------------------------

namespace {

// Pass each frame to the link of its address.  Return the cookies and numbers of records that are overdue.
std::vector<std::pair<uint64_t, uint64_t>> take_frames(hxa_instance &self, uint64_t now,
                                                       const std::vector<abi::NotifyDesc> &frames) {
    std::vector<std::pair<uint64_t, uint64_t>> lost;
    Guard guard(self.lock);
    for (const abi::NotifyDesc &frame : frames) {
        uint64_t tag;
        std::string pieces;
        const char *message = self.library.text_of(&frame.notify_msg);
        if (!frame_tag(self.library.text_of(&frame.name), tag) || !unbase64(message, std::strlen(message), pieces))
            continue;
        const auto known = self.links.find(tag);
        if (known == self.links.end()) continue;  // of a link that is gone, or of an unknown sender
        switch (known->second->in.put(pieces)) {
            case Inbox::Put::READY: ring_doorbell(known->second); break;
            case Inbox::Put::MALFORMED: end_link(known->second, 0, "the peer sent malformed notifications"); break;
            case Inbox::Put::NOTHING: break;
        }
    }
    if (now < self.overdue_at) return lost;
    self.overdue_at = now + OVERDUE_INTERVAL;
    for (const auto &entry : self.links)
        if (const uint64_t seq = entry.second->in.overdue(now)) lost.emplace_back(entry.second->cookie, seq);
    return lost;
}

}  // namespace

// HIXL does not wake a receiver, so the driver asks HIXL: often while notifications come, and ever more rarely while none do.
uint64_t fetch_notifications(hxa_instance &self, uint64_t now) {
    if (self.started == 0 || self.finalizing != 0 || self.listeners == 0) return NEVER;
    std::vector<abi::NotifyDesc> frames;  // empty: the back-ends replace, append to, or swap it
    {
        Call call(self, "GetNotifies", true);
        if (call.allowed) self.library.get_notifies(&self.hixl, frames);
    }
    for (const auto &one : take_frames(self, now, frames)) {
        hxa_event out = {};
        const std::string data = std::string(1, static_cast<char>(Message::LOST)) + pack(one.second);
        out.link = one.first;
        out.kind = HXA_EVENT_MESSAGE;
        out.data = data.data();
        out.data_len = static_cast<uint32_t>(data.size());
        self.sink.event(self.sink.ctx, &out);
    }
    if (!frames.empty()) self.notes_at = now;
    const uint64_t quiet = now - std::min(self.notes_at.load(), now);
    return now + std::min(std::max(quiet / 8, FETCH_SOON), self.options.notes_poll_ms * MS);
}

}  // namespace hx
