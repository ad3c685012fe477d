#include "notes.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace hx {

namespace {

constexpr uint64_t AHEAD = 8192;           // numbers that may be waited for at once
constexpr uint64_t HELD_BYTES = 32 << 20;  // of records that wait for an earlier one
constexpr uint8_t HAS_SIGNAL = 1, HAS_NOTE = 2;
constexpr char ALPHABET[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr char NAME[] = "hxa1:";

void put32(std::string &out, uint32_t value) { out.append(reinterpret_cast<const char *>(&value), sizeof value); }
void put64(std::string &out, uint64_t value) { out.append(reinterpret_cast<const char *>(&value), sizeof value); }

template <class Number>
Number get(const char *from) {
    Number value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

}  // namespace

// ---- text -----------------------------------------------------------------------------------------------------------

std::string base64(const std::string &bytes) {
    std::string out;
    out.reserve((bytes.size() + 2) / 3 * 4);
    for (size_t i = 0; i < bytes.size(); i += 3) {
        const size_t n = std::min<size_t>(3, bytes.size() - i);
        uint32_t word = 0;
        for (size_t j = 0; j < 3; j++) word = word << 8 | (j < n ? static_cast<uint8_t>(bytes[i + j]) : 0);
        for (size_t j = 0; j < 4; j++) out += j <= n ? ALPHABET[word >> (18 - 6 * j) & 63] : '=';
    }
    return out;
}

bool unbase64(const char *text, size_t n, std::string &out) {
    static const struct Table {
        int8_t value[256];
        Table() {
            std::memset(value, -1, sizeof value);
            for (int8_t i = 0; i < 64; i++) value[static_cast<uint8_t>(ALPHABET[i])] = i;
        }
    } table;
    if (n % 4 != 0) return false;
    out.reserve(n / 4 * 3);
    for (size_t i = 0; i < n; i += 4) {
        const bool last = i + 4 == n;
        const size_t padding = last ? (text[i + 3] == '=') + (text[i + 2] == '=' && text[i + 3] == '=') : 0;
        uint32_t word = 0;
        for (size_t j = 0; j < 4; j++) {
            const int8_t value = j >= 4 - padding ? 0 : table.value[static_cast<uint8_t>(text[i + j])];
            if (value < 0) return false;
            word = word << 6 | static_cast<uint32_t>(value);
        }
        for (size_t j = 0; j < 3 - padding; j++) out += static_cast<char>(word >> (16 - 8 * j) & 255);
    }
    return true;
}

std::string frame_name(uint64_t tag) {
    char text[32];
    std::snprintf(text, sizeof text, "%s%016llx", NAME, static_cast<unsigned long long>(tag));
    return text;
}

bool frame_tag(const char *name, uint64_t &tag) {
    if (std::strncmp(name, NAME, sizeof NAME - 1) != 0) return false;
    const char *digits = name + sizeof NAME - 1;
    if (std::strlen(digits) != 16 || std::strspn(digits, "0123456789abcdef") != 16) return false;
    tag = 0;
    for (const char *c = digits; *c != '\0'; c++)
        tag = tag << 4 | static_cast<uint64_t>(*c <= '9' ? *c - '0' : *c - 'a' + 10);
    return true;
}

// ---- records --------------------------------------------------------------------------------------------------------

uint32_t record_cost(size_t body) {
    const size_t frames = (body + FRAME_BYTES - PIECE_HEAD - 1) / (FRAME_BYTES - PIECE_HEAD);
    return static_cast<uint32_t>(std::min<size_t>(std::max<size_t>(frames, 1), FRAMES_MOST));
}

std::string entry_body(bool signal, bool note, const void *topic, size_t topic_len, const void *text, size_t text_len) {
    std::string out;
    out.reserve(BODY_HEAD + topic_len + text_len);
    out += static_cast<char>((signal ? HAS_SIGNAL : 0) | (note ? HAS_NOTE : 0));
    put32(out, static_cast<uint32_t>(topic_len));
    if (topic_len != 0) out.append(static_cast<const char *>(topic), topic_len);
    if (text_len != 0) out.append(static_cast<const char *>(text), text_len);
    return out;
}

// A piece: number, offset, size of the whole body, bytes of it here, and these.
size_t add_piece(std::string &out, const Entry &entry, size_t offset, size_t room) {
    const size_t n = std::min(entry.body.size() - offset, room - PIECE_HEAD);
    put64(out, entry.seq);
    put32(out, static_cast<uint32_t>(offset));
    put32(out, static_cast<uint32_t>(entry.body.size()));
    put32(out, static_cast<uint32_t>(n));
    out.append(entry.body, offset, n);
    return offset + n;
}

// ---- sending --------------------------------------------------------------------------------------------------------

bool Outbox::reserve(uint32_t cost) {
    const int64_t open = reserved_.load(std::memory_order_relaxed) - returned_.load(std::memory_order_relaxed);
    if (open + cost > static_cast<int64_t>(window_ + pending_)) return false;
    reserved_.fetch_add(cost, std::memory_order_relaxed);
    return true;
}

void Outbox::unreserve(uint32_t cost) { reserved_.fetch_sub(cost, std::memory_order_relaxed); }

void Outbox::grant(uint32_t window, uint64_t waiting) {
    Guard guard(lock_);
    window_ = window;
    pending_ = waiting;
}

void Outbox::add(Entry entry) {
    Guard guard(lock_);
    waiting_.push_back(std::move(entry));
}

void Outbox::add_signal() {
    Guard guard(lock_);
    if (!waiting_.empty() && waiting_.back().signal && !waiting_.back().note) return;
    Entry entry;
    entry.signal = true;
    entry.body = entry_body(true, false, nullptr, 0, nullptr, 0);
    reserved_.fetch_add(entry.cost, std::memory_order_relaxed);
    waiting_.push_back(std::move(entry));
}

bool Outbox::credit(uint64_t seq, uint64_t cost) {
    Guard guard(lock_);
    if (seq >= next_ || cost > sent_) return false;
    while (!kept_.empty() && kept_.front().seq <= seq) {
        kept_bytes_ -= kept_.front().body.size();
        kept_.pop_front();
    }
    if (cost > credited_) {
        credited_ = cost;
        returned_.store(static_cast<int64_t>(cost), std::memory_order_relaxed);
    }
    return true;
}

std::vector<Entry> Outbox::kept(uint64_t from) {
    Guard guard(lock_);
    std::vector<Entry> out;
    for (const Entry &entry : kept_)
        if (entry.seq >= from) out.push_back(entry);
    return out;
}

bool Outbox::holds(const hxa_op *op) {
    Guard guard(lock_);
    return std::any_of(waiting_.begin(), waiting_.end(), [op](const Entry &entry) { return entry.op == op; });
}

bool Outbox::remove(hxa_op *op) {
    Guard guard(lock_);
    for (auto entry = waiting_.begin(); entry != waiting_.end(); ++entry) {
        if (entry->op != op) continue;
        waiting_.erase(entry);
        return true;
    }
    return false;
}

// ---- receiving ------------------------------------------------------------------------------------------------------

void Inbox::add_range(Partial &partial, uint32_t start, uint32_t end) {
    auto at = partial.ranges.upper_bound(start);
    if (at != partial.ranges.begin() && std::prev(at)->second >= start) {
        --at;
        start = at->first;
        end = std::max(end, at->second);
        at = partial.ranges.erase(at);
    }
    while (at != partial.ranges.end() && at->first <= end) {
        end = std::max(end, at->second);
        at = partial.ranges.erase(at);
    }
    partial.ranges.emplace_hint(at, start, end);
}

Inbox::Put Inbox::put(const std::string &pieces) {
    Guard guard(lock_);
    bool ready = false;
    for (size_t at = 0; at < pieces.size();) {
        if (pieces.size() - at < PIECE_HEAD) return Put::MALFORMED;
        const char *head = pieces.data() + at;
        const uint64_t seq = get<uint64_t>(head);
        const uint32_t offset = get<uint32_t>(head + 8), total = get<uint32_t>(head + 12), n = get<uint32_t>(head + 16);
        at += PIECE_HEAD;
        if (n > pieces.size() - at || total < BODY_HEAD || total > BODY_HEAD + NOTE_BYTES || n == 0 || offset > total
            || n > total - offset || seq == 0)
            return Put::MALFORMED;
        const char *bytes = pieces.data() + at;
        at += n;
        if (seq < next_) continue;  // it came before
        if (seq - next_ >= AHEAD) return Put::MALFORMED;
        Partial &partial = partial_[seq];
        if (partial.body.empty()) {
            partial.body.resize(total);
            bytes_ += total;
        }
        if (partial.body.size() != total || bytes_ > HELD_BYTES) return Put::MALFORMED;
        std::memcpy(&partial.body[offset], bytes, n);
        add_range(partial, offset, offset + n);
        expected_ = std::max(expected_, seq);
    }
    for (auto first = partial_.begin(); first != partial_.end() && first->first == next_ && first->second.whole();
         first = partial_.erase(first)) {
        std::string &body = first->second.body;
        const uint8_t flags = static_cast<uint8_t>(body[0]);
        const uint32_t topic_len = get<uint32_t>(body.data() + 1);
        if (topic_len > body.size() - BODY_HEAD || flags == 0 || (flags & ~(HAS_SIGNAL | HAS_NOTE)) != 0)
            return Put::MALFORMED;
        bytes_ -= body.size();
        const uint32_t cost = record_cost(body.size());
        body.erase(0, BODY_HEAD);
        ready_.push_back({(flags & HAS_SIGNAL) != 0, (flags & HAS_NOTE) != 0, topic_len, std::move(body), cost});
        next_++;
        missing_since_ = 0;
        ready = true;
    }
    return ready ? Put::READY : Put::NOTHING;
}

bool Inbox::take(Record &out) {
    Guard guard(lock_);
    if (ready_.empty()) return false;
    out = std::move(ready_.front());
    ready_.pop_front();
    handed_++;
    handed_cost_ += out.cost;
    handed_bytes_ += BODY_HEAD + out.body.size();
    return true;
}

void Inbox::announced(uint64_t seq, uint64_t now) {
    Guard guard(lock_);
    if (seq < next_ || seq - next_ >= AHEAD) return;
    expected_ = std::max(expected_, seq);
    if (missing_since_ == 0) missing_since_ = now;
}

uint64_t Inbox::overdue(uint64_t now) {
    Guard guard(lock_);
    if (expected_ < next_) return 0;
    if (missing_since_ == 0) missing_since_ = now;
    if (now - missing_since_ < LOST_AFTER) return 0;
    missing_since_ = now;
    return next_;
}

bool Inbox::due_credit(uint32_t window, uint64_t &seq, uint64_t &cost) {
    Guard guard(lock_);
    if (handed_cost_ - told_cost_ < std::max(window / 4, 1u) && handed_bytes_ < KEPT_BYTES / 4) return false;
    handed_bytes_ = 0;
    told_cost_ = handed_cost_;
    seq = handed_;
    cost = handed_cost_;
    return true;
}

}  // namespace hx
