// The settings of the simulation from the environment (README.md lists them), and counters for tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "api.hpp"

namespace sim {

// The points where faults can be injected; the names are those of HIXLSIM_FAULTS.
enum class Point {
    init,
    register_,
    register_stall,
    connect,
    connect_stall,
    connect_late,
    disconnect,
    disconnect_stall,
    submit,
    stall,
    exhausted,
    transfer,
    hang,
    query,
    notify,
    ack_delay,
    ack_lost,
    count,
};

// Counted per process, whatever the engine.
enum class Count { submitted, executed, bytes, completed, failed, aborted, live_requests, links, regions, notifies, queries, batches, stale, count };

struct Settings {
    std::atomic<uint64_t> latency_ns{0};
    std::atomic<uint64_t> jitter_ns{0};
    std::atomic<double> bytes_per_ns{0};
    std::atomic<bool> shuffle{false};
    std::atomic<bool> strict{false};
    std::atomic<bool> log{false};
    std::atomic<bool> refuse_same_device{false};
    std::atomic<bool> aicpu{true};
    std::atomic<bool> relay_bytes{false};
    std::atomic<int> heartbeat_ms{10000};
    std::atomic<int> silence_ms{120000};
    std::atomic<int> comm_patience_ms{0};
    std::atomic<int> forget_us{0};
};

Settings &settings();

// The environment as it is now; at the first call of anything, and at each Initialize.
void read_environment();
// One value, named like its environment variable without HIXLSIM_; false: no such name, or an invalid value.
bool set(const std::string &name, const std::string &value);
// Text of an environment variable HIXLSIM_<name>, or nothing.
std::string environment(const char *name);

// True if the fault hits this call; its value goes to `value`, if it has one.
bool faulty(Point point, double *value = nullptr);
// A fault whose value is a status: hixl::SUCCESS if it does not hit this call.
hixl::Status failure(Point point, hixl::Status otherwise = hixl::FAILED);
// A fault whose value is a time: stays here for that many seconds, or until other faults are set.
void stall(Point point);

uint64_t random_below(uint64_t bound);

void add(Count what, int64_t amount = 1);
int64_t get(const std::string &name);

void log(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Abort: the caller broke a rule, which corrupts memory in the real library.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace sim
