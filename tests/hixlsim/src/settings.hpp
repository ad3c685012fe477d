// What the environment asks of the simulation (README.md lists it), and what happened, for tests to ask.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "api.hpp"

namespace sim {

// Places where something can be made to go wrong; the names are those of HIXLSIM_FAULTS.
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
// One value, named like its environment variable without HIXLSIM_; false: no such name, or nonsense.
bool set(const std::string &name, const std::string &value);
// Text of an environment variable HIXLSIM_<name>, or nothing.
std::string environment(const char *name);

// Is it this call's turn? The value that was given for the fault goes to `value`, if there was one.
bool faulty(Point point, double *value = nullptr);
// A fault whose value is a status: hixl::SUCCESS when it is not this call's turn.
hixl::Status failure(Point point, hixl::Status otherwise = hixl::FAILED);
// A fault whose value is a time: stays here for that many seconds, or until other faults are set.
void stall(Point point);

uint64_t random_below(uint64_t bound);

void add(Count what, int64_t amount = 1);
int64_t get(const std::string &name);

void log(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The caller broke a rule whose price in the real library is memory corruption.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace sim
