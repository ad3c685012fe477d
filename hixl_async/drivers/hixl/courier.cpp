// Sending and fetching notifications: what blocks of it runs on a route's control strand, fetching on the engine's own.
#include <algorithm>

#include "link.hpp"
#include "route.hpp"

namespace hx {

namespace {

constexpr uint64_t STALE = 2 * MS;  // so long after the last frame the receiver looks seldom, and is woken
constexpr uint64_t RETRY_FIRST = MS, RETRY_MOST = 50 * MS;
constexpr uint64_t FETCH_SOON = 20 * US;
constexpr uint64_t OVERDUE_LOOK = 100 * MS;
constexpr uint32_t LOSSES = 3;  // records that never came, before a link gives up on HIXL

bool claim(hxa_op *op) {
    uint32_t queued = QUEUED;
    std::atomic<uint32_t> &word = job_of(op).claim;
    while (!word.compare_exchange_strong(queued, queued | STARTED))
        if ((queued & CLAIM) == CANCELLED) return false;
    return (queued & CLAIM) != CANCELLED;
}

}  // namespace

// ---- sending, on the control strand ---------------------------------------------------------------------------------

uint64_t Route::deliver(uint64_t now) {
    uint64_t next = NEVER;
    for (hxa_link *link : senders_) deliver(link, now, next);
    return next;
}

void Route::deliver(hxa_link *link, uint64_t now, uint64_t &next) {
    for (;;) {
        if (!link->by_control && up_ == 0) return;  // between two connections
        if (link->retry_at > now) {
            next = std::min(next, link->retry_at);
            return;
        }
        std::vector<Entry> entries;
        entries.swap(link->held);
        if (entries.empty()) entries = link->out.take(claim);
        if (entries.empty()) return;
        const bool large =
            (entries[0].body.size() + FRAME_BYTES - PIECE_HEAD - 1) / (FRAME_BYTES - PIECE_HEAD) > FRAMES_MOST;
        if (large && !link->by_control && !link->told_long) {
            link->told_long = true;
            self_.log(link, text("hixl: notifications of more than %zu bytes go by the control connection",
                                 FRAMES_MOST * (FRAME_BYTES - PIECE_HEAD)));
        }
        if (large || link->by_control) {
            by_control(link, entries);
        } else if (!by_hixl(link, entries, now)) {
            link->held = std::move(entries);
            next = std::min(next, link->retry_at);
            return;
        }
        sent(link, entries, {});
        now = clock_now();
    }
}

void Route::sent(hxa_link *link, const std::vector<Entry> &entries, const Outcome &outcome) {
    (void)link;
    for (const Entry &entry : entries) {
        self_.count.notes_sent += entry.note;
        if (entry.op != nullptr) finish(entry.op, outcome);
    }
}

void Route::by_control(hxa_link *link, const std::vector<Entry> &entries) {
    std::string pieces;
    for (const Entry &entry : entries) {
        for (size_t offset = 0; offset < entry.body.size();) {
            if (pieces.size() + PIECE_HEAD >= MESSAGE_BYTES) {
                self_.say(link, Word::PIECES, pieces);
                pieces.clear();
            }
            offset = add_piece(pieces, entry, offset, MESSAGE_BYTES - pieces.size());
        }
    }
    if (!pieces.empty()) self_.say(link, Word::PIECES, pieces);
}

// False: HIXL has no room now.  What it does not take for another reason goes by the control connection.
bool Route::by_hixl(hxa_link *link, std::vector<Entry> &entries, uint64_t now) {
    abi::NotifyDesc frame;
    frame.name = self_.library.text(frame_name(link->peer_tag));
    std::vector<std::string> frames(1);
    for (const Entry &entry : entries)
        for (size_t offset = 0; offset < entry.body.size();) {
            if (frames.back().size() + PIECE_HEAD >= FRAME_BYTES) frames.emplace_back();
            offset = add_piece(frames.back(), entry, offset, FRAME_BYTES - frames.back().size());
        }
    if (now - link->sent_at > STALE) self_.say(link, Word::WAKE, pack(entries.back().seq));
    link->sent_at = now;
    for (const std::string &pieces : frames) {
        frame.notify_msg = self_.library.text(base64(pieces));
        uint32_t native = abi::FAILED;
        {
            Gate::Control control(self_.gate);
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
        // It may have arrived all the same, and an answer that comes late would be taken for that to the next: never
        // again here.
        link->breaks++;
        switch_over(link, text("SendNotify answered %u (%s)", native,
                               error_text(status_of(native), static_cast<int32_t>(native))));
        by_control(link, entries);
        break;
    }
    link->retry_ns = link->retry_at = 0;
    return true;
}

void Route::switch_over(hxa_link *link, const std::string &why) {
    if (link->by_control) return;
    link->by_control = true;
    self_.warn(link, "hixl: " + id + ": notifications go by the control connection from here on: " + why);
}

void Route::resend(hxa_link *link, uint64_t seq) {
    control_->post([this, link, seq] {
        if (std::find(senders_.begin(), senders_.end(), link) == senders_.end()) return;
        if (!link->by_control && ++link->losses >= LOSSES) switch_over(link, "some never arrived");
        by_control(link, link->out.kept(seq));
    });
}

void Route::drop_notes(hxa_link *link, const Outcome &outcome) {
    for (const Entry &entry : link->held)
        if (entry.op != nullptr) finish(entry.op, outcome);
    link->held.clear();
    for (hxa_op *op : link->out.clear(claim)) finish(op, outcome);
}

// The last words over a link: whatever may not have arrived, then that nothing follows.
void Route::farewell(hxa_link *link) {
    drop_notes(link, {HXA_E_LINK, 0, HXA_SCOPE_LINK});
    senders_.erase(std::remove(senders_.begin(), senders_.end(), link), senders_.end());
    if (!link->dead) {
        by_control(link, link->out.kept(0));
        self_.say(link, Word::GOODBYE, pack(link->out.last()));
    }
    post([this, link] { left(link); });
}

}  // namespace hx

// ---- fetching -------------------------------------------------------------------------------------------------------

using namespace hx;

// HIXL has no wake-up: it is asked often while something comes, and ever more seldom when nothing does.
uint64_t hxa_instance::fetch(uint64_t now) {
    if (started == 0 || finalizing != 0 || listeners == 0) return NEVER;
    std::vector<abi::NotifyDesc> frames;  // empty: the back-ends replace, append to, or swap it
    {
        Call call(*this, "GetNotifies", true);
        if (call.allowed) library.get_notifies(&hixl, frames);
    }
    std::vector<std::pair<uint64_t, uint64_t>> lost;  // cookie, number
    uint64_t next_look = NEVER;
    {
        Guard guard(lock);
        for (const abi::NotifyDesc &frame : frames) {
            uint64_t tag;
            std::string pieces;
            const char *message = library.text_of(&frame.notify_msg);
            if (!frame_tag(library.text_of(&frame.name), tag) || !unbase64(message, std::strlen(message), pieces))
                continue;
            const auto known = links.find(tag);
            if (known == links.end()) continue;  // of a link that is gone, or nobody we know
            switch (known->second->in.put(pieces)) {
                case Inbox::Put::READY: link_ring(known->second); break;
                case Inbox::Put::NONSENSE: link_end(known->second, 0, "the peer's notifications make no sense"); break;
                case Inbox::Put::NOTHING: break;
            }
        }
        if (now >= overdue_at) {
            overdue_at = now + OVERDUE_LOOK;
            for (const auto &entry : links)
                if (const uint64_t seq = entry.second->in.overdue(now, next_look))
                    lost.emplace_back(entry.second->cookie, seq);
        }
    }
    for (const auto &one : lost) {
        hxa_event out = {};
        const std::string data = std::string(1, static_cast<char>(Word::LOST)) + pack(one.second);
        out.link = one.first;
        out.kind = HXA_EVENT_MESSAGE;
        out.data = data.data();
        out.data_len = static_cast<uint32_t>(data.size());
        sink.event(sink.ctx, &out);
    }
    if (!frames.empty()) notes_at = now;
    const uint64_t quiet = now - std::min(notes_at.load(), now);
    return now + std::min(std::max(quiet / 8, FETCH_SOON), options.notes_poll_ms * MS);
}
