// Notifications and signal wakes of one link, as two ordered streams of numbered records.
//
// HIXL offers a queue of 4096 short texts per engine, of unknown senders, in any order, that loses what comes while it is
// full.  So a record is numbered, cut into pieces or packed with others into frames that are plain text, and sent only
// while the receiver has granted room for it.  The receiver puts records in order, and asks for those that never came;
// the sender keeps each until it was handed out.  A piece may come by HIXL or by the control connection.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "hxa_driver.h"
#include "sync.hpp"

namespace hx {

constexpr size_t FRAME_BYTES = 768;  // of pieces in one frame: 1024 characters of base64
constexpr size_t PIECE_HEAD = 20;
constexpr size_t BODY_HEAD = 5;      // flags, length of the topic
constexpr size_t MESSAGE_BYTES = 16 << 10;  // of pieces in one message of the control connection
constexpr uint32_t NOTE_BYTES = 65000;      // topic and note together
constexpr uint32_t FRAMES_MOST = 4;         // a record that needs more goes by the control connection
// Bytes of records that may be on their way: the control connection, which may have to carry all of them, gives up a
// peer that lets more than 512 KiB wait.
constexpr size_t KEPT_BYTES = 192 << 10;
constexpr uint32_t WINDOW = 256;            // frames that a peer may have under way to us
constexpr uint32_t WINDOW_LEAST = 16;       // with less all notifications go over the control connection
constexpr uint32_t QUEUE = 3584;            // all windows together: HIXL's queue of 4096, and some reserve
constexpr uint64_t LOST_AFTER = SECOND;  // a record that is missing this long is asked for again

// The part of the granted room that a record takes; both ends count alike.
uint32_t record_cost(size_t body);

std::string base64(const std::string &bytes);
bool unbase64(const char *text, size_t n, std::string &out);
// The `name` of a frame's notification, which addresses a link.
std::string frame_name(uint64_t tag);
bool frame_tag(const char *name, uint64_t &tag);

// One record of ours.
struct Entry {
    uint64_t seq = 0;  // given when it is sent
    uint32_t cost = 1;
    bool signal = false, note = false;
    hxa_op *op = nullptr;  // finishes when it is sent
    std::string body;
};
std::string entry_body(bool signal, bool note, const void *topic, size_t topic_len, const void *text, size_t text_len);
// Append the piece of `entry` that starts at `offset`, as much of it as `room` takes; return the next offset.
size_t add_piece(std::string &out, const Entry &entry, size_t offset, size_t room);

// The sending half.  The loop asks for room, threads add and take; each call holds the lock for a moment.
class Outbox {
  public:
    // Loop: take room for one more; return false if there is none.
    bool reserve(uint32_t cost);
    void unreserve(uint32_t cost);  // of an op that failed
    void grant(uint32_t window, uint64_t waiting);
    void add(Entry entry);
    void add_signal();  // joins one that waits
    // The next records that may be sent, oldest first, numbered and kept: as many as fit one frame, or one that is
    // larger.  An op that `claim` refuses was cancelled, and stays until `remove`.
    template <class Claim>
    std::vector<Entry> take(Claim claim);
    // The peer has handed out all up to `seq`, which took `cost` altogether.
    bool credit(uint64_t seq, uint64_t cost);
    std::vector<Entry> kept(uint64_t from);
    // Return the ops of all records that were never sent and that `claim` gets; the others are left.
    template <class Claim>
    std::vector<hxa_op *> clear(Claim claim);
    bool holds(const hxa_op *op);
    bool remove(hxa_op *op);  // of a record that waits
    uint64_t last() {
        Guard guard(lock_);
        return next_ - 1;
    }

  private:
    bool has_room(const Entry &entry) const {
        return sent_ + entry.cost <= credited_ + window_
               && (kept_.empty() || kept_bytes_ + entry.body.size() <= KEPT_BYTES);
    }

    Mutex lock_;
    std::deque<Entry> waiting_, kept_;
    size_t kept_bytes_ = 0;
    uint64_t next_ = 1;
    uint64_t sent_ = 0, credited_ = 0;  // cost, ever
    std::atomic<int64_t> reserved_{0};  // cost of all that was accepted, ever
    std::atomic<int64_t> returned_{0};
    uint32_t window_ = 0;
    uint64_t pending_ = 0;
};

template <class Claim>
std::vector<Entry> Outbox::take(Claim claim) {
    std::vector<Entry> out;
    Guard guard(lock_);
    size_t bytes = 0;
    for (auto at = waiting_.begin(); at != waiting_.end() && bytes <= FRAME_BYTES;) {
        Entry &entry = *at;
        if (!has_room(entry)) break;
        const size_t needed = PIECE_HEAD + entry.body.size();
        if (!out.empty() && bytes + needed > FRAME_BYTES) break;
        if (entry.op != nullptr && !claim(entry.op)) {
            ++at;
            continue;
        }
        entry.seq = next_++;
        sent_ += entry.cost;
        bytes += needed;
        kept_bytes_ += entry.body.size();
        out.push_back(entry);
        entry.op = nullptr;
        kept_.push_back(std::move(entry));
        at = waiting_.erase(at);
    }
    return out;
}

template <class Claim>
std::vector<hxa_op *> Outbox::clear(Claim claim) {
    std::vector<hxa_op *> out;
    Guard guard(lock_);
    for (auto entry = waiting_.begin(); entry != waiting_.end();) {
        if (entry->op != nullptr && !claim(entry->op)) {
            ++entry;
            continue;
        }
        if (entry->op != nullptr) out.push_back(entry->op);
        entry = waiting_.erase(entry);
    }
    return out;
}

// The receiving half.  Frames and messages are put in by any thread, the loop takes records out.
class Inbox {
  public:
    struct Record {
        bool signal, note;
        uint32_t topic_len;
        std::string body;  // topic and note, after the head
        uint32_t cost;
    };
    enum class Put { NOTHING, READY, MALFORMED };

    // Pieces as they came, by HIXL or the control connection.
    Put put(const std::string &pieces);
    bool take(Record &out);
    bool empty() {
        Guard guard(lock_);
        return ready_.empty();
    }
    // All up to `seq` were sent.
    void announced(uint64_t seq, uint64_t now);
    // The number of a record that is overdue, or 0.
    uint64_t overdue(uint64_t now);
    bool complete(uint64_t seq) {
        Guard guard(lock_);
        return next_ > seq;
    }
    // Loop: true, and what was handed out, once that is a quarter of `window`, or of the bytes.
    bool due_credit(uint32_t window, uint64_t &seq, uint64_t &cost);

  private:
    struct Partial {
        std::string body;
        std::map<uint32_t, uint32_t> ranges;  // offset -> end of what came
        bool whole() const {
            return ranges.size() == 1 && ranges.begin()->first == 0 && ranges.begin()->second == body.size();
        }
    };
    void add_range(Partial &partial, uint32_t start, uint32_t end);

    Mutex lock_;
    std::map<uint64_t, Partial> partial_;
    std::deque<Record> ready_;
    uint64_t next_ = 1;      // to become ready
    uint64_t expected_ = 0;  // the highest number that was announced or came
    uint64_t missing_since_ = 0;
    uint64_t bytes_ = 0;  // in partial_
    uint64_t handed_ = 0, handed_cost_ = 0, told_cost_ = 0;
    size_t handed_bytes_ = 0;  // since the last credit
};

}  // namespace hx
