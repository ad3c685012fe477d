#include "settings.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

namespace sim {
namespace {

const char *const point_names[] = {"init", "register", "register_stall", "connect", "connect_stall", "connect_late", "disconnect", "disconnect_stall", "submit",
                                   "stall", "exhausted", "transfer", "hang", "query", "notify", "ack_delay", "ack_lost"};
const char *const count_names[] = {"submitted", "executed", "bytes", "completed", "failed", "aborted", "live_requests", "links",
                                   "regions", "notifies", "queries", "batches", "stale"};
static_assert(sizeof point_names / sizeof *point_names == static_cast<size_t>(Point::count), "a name for each point");
static_assert(sizeof count_names / sizeof *count_names == static_cast<size_t>(Count::count), "a name for each count");

// point@3,7 the third and the seventh time; point@3+ from the third on; point%0.01 one in a hundred; =value.
struct Fault {
    std::set<uint64_t> turns;
    uint64_t from = UINT64_MAX;
    double rate = 0;
    bool valued = false;
    double value = 0;
    uint64_t seen = 0;
};

std::mutex guard;
Fault faults[static_cast<size_t>(Point::count)];
std::atomic<uint64_t> faults_set{0};
std::atomic<uint32_t> armed{0};  // a bit for each point, so that the usual case costs no lock
uint64_t dice = 1;
std::atomic<int64_t> counts[static_cast<size_t>(Count::count)];

uint64_t roll() {  // xorshift64*, under guard
    dice ^= dice >> 12;
    dice ^= dice << 25;
    dice ^= dice >> 27;
    return dice * 0x2545F4914F6CDD1DULL;
}

bool number(const std::string &text, double &value) {
    char *end = nullptr;
    value = std::strtod(text.c_str(), &end);
    return !text.empty() && *end == '\0';
}

bool parse_fault(const std::string &text, size_t &point, Fault &fault) {
    const size_t equals = text.find('=');
    const std::string head = text.substr(0, equals);
    if (equals != std::string::npos) {
        fault.valued = number(text.substr(equals + 1), fault.value);
        if (!fault.valued) {
            return false;
        }
    }
    const size_t split = head.find_first_of("@%");
    const std::string name = head.substr(0, split);
    for (point = 0; point < static_cast<size_t>(Point::count) && name != point_names[point]; ++point) {
    }
    if (point == static_cast<size_t>(Point::count)) {
        return false;
    }
    if (split == std::string::npos) {
        fault.from = 1;  // always
        return true;
    }
    const std::string tail = head.substr(split + 1);
    if (head[split] == '%') {
        return number(tail, fault.rate);
    }
    if (tail.empty()) {
        return false;
    }
    std::istringstream turns(tail);
    std::string turn;
    while (std::getline(turns, turn, ',')) {
        const bool onwards = !turn.empty() && turn.back() == '+';
        const uint64_t at = std::strtoull(turn.c_str(), nullptr, 10);
        if (at == 0) {
            return false;
        }
        onwards ? void(fault.from = at) : void(fault.turns.insert(at));
    }
    return true;
}

bool set_faults(const std::string &text) {
    Fault parsed[static_cast<size_t>(Point::count)];
    uint32_t bits = 0;
    std::istringstream parts(text);
    std::string part;
    while (std::getline(parts, part, ';')) {
        size_t point = 0;
        Fault fault;
        if (part.empty()) {
            continue;
        }
        if (!parse_fault(part, point, fault)) {
            return false;
        }
        parsed[point] = fault;
        bits |= 1U << point;
    }
    std::lock_guard<std::mutex> hold(guard);
    for (size_t point = 0; point < static_cast<size_t>(Point::count); ++point) {
        faults[point] = parsed[point];
    }
    armed.store(bits);
    ++faults_set;
    return true;
}

}  // namespace

Settings &settings() {
    static Settings all;
    return all;
}

std::string environment(const char *name) {
    const char *text = std::getenv((std::string("HIXLSIM_") + name).c_str());
    return text == nullptr ? std::string() : text;
}

bool set(const std::string &name, const std::string &value) {
    Settings &s = settings();
    if (name == "FAULTS") {
        return set_faults(value);
    }
    if (name == "ORDER") {
        s.shuffle = value == "random";
        return value == "random" || value == "fifo";
    }
    double n = 0;
    if (!number(value, n) || n < 0) {
        return false;
    }
    const std::map<std::string, std::atomic<bool> *> flags = {
        {"STRICT", &s.strict}, {"LOG", &s.log}, {"AICPU", &s.aicpu}, {"RELAY", &s.relay_bytes}, {"REFUSE_SAME_DEVICE", &s.refuse_same_device}};
    const std::map<std::string, std::atomic<int> *> times = {
        {"HEARTBEAT_MS", &s.heartbeat_ms}, {"SILENCE_MS", &s.silence_ms}, {"COMM_PATIENCE_MS", &s.comm_patience_ms},
        {"FORGET_US", &s.forget_us}};
    if (name == "LATENCY_US") {
        s.latency_ns = static_cast<uint64_t>(n * 1000);
    } else if (name == "JITTER_US") {
        s.jitter_ns = static_cast<uint64_t>(n * 1000);
    } else if (name == "GBPS") {
        s.bytes_per_ns = n;  // a gigabyte per second is a byte per nanosecond
    } else if (name == "SEED") {
        std::lock_guard<std::mutex> hold(guard);
        dice = (static_cast<uint64_t>(n) + 1) * 0x9E3779B97F4A7C15ULL;
    } else if (flags.count(name) != 0) {
        *flags.at(name) = n != 0;
    } else if (times.count(name) != 0) {
        *times.at(name) = static_cast<int>(n);
    } else {
        return false;
    }
    return true;
}

void read_environment() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (const char *name : {"LATENCY_US", "JITTER_US", "GBPS", "ORDER", "SEED", "STRICT", "LOG", "AICPU", "RELAY",
                                 "REFUSE_SAME_DEVICE", "HEARTBEAT_MS", "SILENCE_MS", "COMM_PATIENCE_MS", "FORGET_US", "FAULTS"}) {
            const std::string value = environment(name);
            if (!value.empty() && !set(name, value)) {
                die("HIXLSIM_%s=%s is not valid", name, value.c_str());
            }
        }
        const char *loud = std::getenv("ASCEND_SLOG_PRINT_TO_STDOUT");
        if (loud != nullptr && std::strcmp(loud, "1") == 0) {
            settings().log = true;
        }
    });
}

bool faulty(Point point, double *value) {
    const auto index = static_cast<size_t>(point);
    if ((armed.load(std::memory_order_relaxed) & (1U << index)) == 0) {
        return false;
    }
    std::lock_guard<std::mutex> hold(guard);
    Fault &fault = faults[index];
    ++fault.seen;
    const bool now = fault.seen >= fault.from || fault.turns.count(fault.seen) != 0 ||
                     (fault.rate > 0 && static_cast<double>(roll() >> 11) * 0x1p-53 < fault.rate);
    if (now && value != nullptr && fault.valued) {
        *value = fault.value;
    }
    return now;
}

hixl::Status failure(Point point, hixl::Status otherwise) {
    double value = otherwise;
    return faulty(point, &value) ? static_cast<hixl::Status>(value) : hixl::SUCCESS;
}

void stall(Point point) {
    double seconds = 1;
    const uint64_t set = faults_set;
    if (!faulty(point, &seconds)) {
        return;
    }
    const auto over = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < over && faults_set == set) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
}

uint64_t random_below(uint64_t bound) {
    std::lock_guard<std::mutex> hold(guard);
    return bound == 0 ? 0 : roll() % bound;
}

void add(Count what, int64_t amount) { counts[static_cast<size_t>(what)].fetch_add(amount, std::memory_order_relaxed); }

int64_t get(const std::string &name) {
    for (size_t i = 0; i < static_cast<size_t>(Count::count); ++i) {
        if (name == count_names[i]) {
            return counts[i].load();
        }
    }
    return -1;
}

void log(const char *format, ...) {
    if (!settings().log.load(std::memory_order_relaxed)) {
        return;
    }
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::fprintf(stdout, "[HIXL] %s\n", text);
    std::fflush(stdout);
}

void die(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "hixlsim: %s\n", text);
    std::fflush(stderr);
    std::abort();
}

}  // namespace sim
