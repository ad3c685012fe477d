// The simulated hardware: requests of a link run one after another, take their time, and finish or break the link.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <vector>

#include "memory.hpp"

namespace sim {

// What one failed request does to the others of its link.
enum class Breaks {
    silently,   // COMM, and CS over a host NIC: nothing of this link ever completes again, without an error
    loudly,     // CS on a device: the same, but an error flag is set
    all,        // FAB unfolded: those that were in flight fail; later ones work
    itself,     // FAB on the host
};

enum class State { waiting, done, failed };

class Stream;

struct Request {
    std::atomic<State> state{State::waiting};
    hixl::TransferOp op;
    std::vector<hixl::TransferOpDesc> ops;
    std::shared_ptr<Stream> stream;
    Clock::time_point due;
    uint64_t turn = 0;
    uint64_t era = 0;  // of the stream, when it was submitted
    bool breaks = false;
    bool hangs = false;
    // The engine's own.
    void *handle = nullptr;
    bool mixed = false;  // CS over UB: of several memory kinds, and so of several parts,
    bool half = false;   // of which the first was seen to be through, and freed
};

using RequestPtr = std::shared_ptr<Request>;

class Stream {
  public:
    Stream(Breaks breaks, std::unique_ptr<Remote> remote) : breaks_(breaks), remote_(std::move(remote)) {}

    // When this request will be through, by latency and bandwidth.
    Clock::time_point schedule(size_t bytes);
    bool idle() const { return queued_.load(std::memory_order_acquire) == 0; }
    void queue() { queued_.fetch_add(1, std::memory_order_relaxed); }
    void run(Request &request);
    // After this no byte moves any more.
    void abort();
    // Drops this request.
    void forsake(Request &request);
    // The peer's engine is over, in good order, or its process is.
    void lose(bool in_order);
    bool left_in_order() const { return left_in_order_.load(std::memory_order_acquire); }
    void bury(uint64_t region);
    // Returns when no request is running.
    void fence() { std::lock_guard<std::mutex> hold(guard_); }
    // Fault injection: as if the next request had failed.
    void fail();
    bool broken_loudly() const { return flag_.load(std::memory_order_acquire); }
    State state_of(const Request &request) const;
    uint64_t era() const { return era_.load(std::memory_order_acquire); }

    Regions remote_regions;
    Regions local_regions;
    bool check_local = true;

  private:
    void break_(Request *request);

    const Breaks breaks_;
    std::unique_ptr<Remote> remote_;
    std::mutex guard_;
    bool aborted_ = false;
    bool broken_ = false;
    bool lost_ = false;
    std::atomic<bool> left_in_order_{false};
    std::atomic<bool> flag_{false};
    std::atomic<uint64_t> era_{0};
    std::atomic<size_t> queued_{0};
    std::mutex timing_;
    Clock::time_point busy_until_;
    Clock::time_point last_due_;
};

// Runs the requests of all links of an engine when they are due.
class Worker {
  public:
    ~Worker();
    void submit(const RequestPtr &request);
    void stop();

  private:
    struct Later {
        bool operator()(const RequestPtr &a, const RequestPtr &b) const {
            return a->due != b->due ? a->due > b->due : a->turn > b->turn;
        }
    };

    void run();

    std::mutex guard_;
    std::condition_variable bell_;
    std::priority_queue<RequestPtr, std::vector<RequestPtr>, Later> queue_;
    uint64_t turn_ = 0;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace sim
