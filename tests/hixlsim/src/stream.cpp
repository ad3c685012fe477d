#include "stream.hpp"

#include <algorithm>

#include "settings.hpp"

namespace sim {

Clock::time_point Stream::schedule(size_t bytes) {
    const Settings &s = settings();
    const double speed = s.bytes_per_ns;
    const uint64_t jitter = s.jitter_ns;
    const auto busy = std::chrono::nanoseconds(speed > 0 ? static_cast<int64_t>(static_cast<double>(bytes) / speed) : 0);
    const auto delay = std::chrono::nanoseconds(s.latency_ns + (jitter == 0 ? 0 : random_below(jitter)));
    std::lock_guard<std::mutex> hold(timing_);
    busy_until_ = std::max(busy_until_, Clock::now()) + busy;
    const auto due = busy_until_ + delay;
    if (s.shuffle) {
        return due;
    }
    last_due_ = std::max(last_due_, due);  // jitter does not reorder
    return last_due_;
}

void Stream::run(Request &request) {
    std::lock_guard<std::mutex> hold(guard_);
    queued_.fetch_sub(1, std::memory_order_release);
    if (aborted_ || broken_ || state_of(request) != State::waiting) {
        return;
    }
    if (request.hangs) {
        broken_ = true;
        return;
    }
    const auto in_place = [this](const hixl::TransferOpDesc &op) {
        return op.len == 0 || (remote_regions.covers(op.remote_addr, op.len) &&
                               (!check_local || local_regions.covers(op.local_addr, op.len)));
    };
    const bool good = !request.breaks && !lost_ && std::all_of(request.ops.begin(), request.ops.end(), in_place) &&
                      remote_->move(request.op, request.ops);
    if (good) {
        add(Count::executed);
        request.state.store(State::done, std::memory_order_release);
    } else {
        break_(&request);
    }
}

void Stream::break_(Request *request) {
    switch (breaks_) {
        case Breaks::silently:
            broken_ = true;
            break;
        case Breaks::loudly:
            broken_ = true;
            flag_.store(true, std::memory_order_release);
            break;
        case Breaks::all:
            era_.fetch_add(1, std::memory_order_acq_rel);
            break;
        case Breaks::itself:
            if (request != nullptr) {
                request->state.store(State::failed, std::memory_order_release);
            }
            break;
    }
}

State Stream::state_of(const Request &request) const {
    const State state = request.state.load(std::memory_order_acquire);
    return state == State::waiting && breaks_ == Breaks::all && request.era != era() ? State::failed : state;
}

void Stream::abort() {
    std::lock_guard<std::mutex> hold(guard_);
    aborted_ = true;
}

void Stream::forsake(Request &request) {
    std::lock_guard<std::mutex> hold(guard_);
    State waiting = State::waiting;
    request.state.compare_exchange_strong(waiting, State::failed);
}

void Stream::lose(bool in_order) {
    std::lock_guard<std::mutex> hold(guard_);
    lost_ = true;
    left_in_order_ = left_in_order_ || in_order;
}

void Stream::bury(uint64_t region) {
    std::lock_guard<std::mutex> hold(guard_);
    remote_regions.bury(region);
}

void Stream::fail() {
    std::lock_guard<std::mutex> hold(guard_);
    break_(nullptr);
}

Worker::~Worker() { stop(); }

void Worker::stop() {
    {
        std::lock_guard<std::mutex> hold(guard_);
        stopping_ = true;
        bell_.notify_all();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
}

void Worker::submit(const RequestPtr &request) {
    constexpr size_t most_inline = 1 << 20;
    Stream &stream = *request->stream;
    size_t bytes = 0;
    for (const hixl::TransferOpDesc &op : request->ops) {
        bytes += op.len;
    }
    const bool alone = stream.idle();
    stream.queue();
    request->due = stream.schedule(bytes);
    // Without latency it is done at once, and the thread is spared.
    if (alone && bytes <= most_inline && request->due <= Clock::now()) {
        stream.run(*request);
        return;
    }
    std::lock_guard<std::mutex> hold(guard_);
    request->turn = ++turn_;
    const bool first = queue_.empty() || request->due < queue_.top()->due;
    queue_.push(request);
    if (!thread_.joinable()) {
        thread_ = std::thread([this] { run(); });
    } else if (first) {
        bell_.notify_one();
    }
}

void Worker::run() {
    std::unique_lock<std::mutex> hold(guard_);
    while (!stopping_) {
        if (queue_.empty()) {
            bell_.wait(hold);
        } else if (queue_.top()->due > Clock::now()) {
            bell_.wait_until(hold, queue_.top()->due);
        } else {
            const RequestPtr request = queue_.top();
            queue_.pop();
            hold.unlock();
            request->stream->run(*request);
            hold.lock();
        }
    }
}

}  // namespace sim
