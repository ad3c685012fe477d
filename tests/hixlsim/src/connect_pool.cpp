#include "connect_pool.hpp"

#include <algorithm>

#include "acl.hpp"

namespace sim {

using S = hixl::AsyncConnectStatus;

hixl::Status ConnectPool::submit(const std::string &remote, bool connect, Job job) {
    std::lock_guard<std::mutex> hold(guard_);
    if (stopping_) {
        return hixl::FAILED;
    }
    if (tasks_.size() >= static_cast<size_t>(capacity_)) {
        return hixl::RESOURCE_EXHAUSTED;
    }
    set(remote, connect ? S::CONNECT_PENDING : S::DISCONNECT_PENDING);
    tasks_.push_back({remote, connect, std::move(job)});
    while (workers_.size() < static_cast<size_t>(threads_)) {
        workers_.emplace_back([this] { run(); });
    }
    bell_.notify_one();
    return hixl::SUCCESS;
}

S ConnectPool::status(const std::string &remote) {
    std::lock_guard<std::mutex> hold(guard_);
    const auto found = statuses_.find(remote);
    return found == statuses_.end() ? S::NOT_CONNECT : found->second;
}

std::map<std::string, S> ConnectPool::all() {
    std::lock_guard<std::mutex> hold(guard_);
    return statuses_;
}

void ConnectPool::stop() {
    {
        std::lock_guard<std::mutex> hold(guard_);
        stopping_ = true;
        bell_.notify_all();
    }
    for (std::thread &worker : workers_) {
        worker.join();
    }
    workers_.clear();
}

// The status is that of the job that was submitted last; the end of an older job does not change it.
void ConnectPool::set(const std::string &remote, S status) {
    const auto found = statuses_.find(remote);
    const S shown = found == statuses_.end() ? S::NOT_CONNECT : found->second;
    const bool of_connect = status == S::CONNECTING || status == S::CONNECTED || status == S::CONNECT_FAILED;
    const bool of_disconnect = status == S::DISCONNECTING || status == S::NOT_CONNECT;
    if ((of_connect && shown == S::DISCONNECT_PENDING) || (of_disconnect && shown == S::CONNECT_PENDING)) {
        return;
    }
    if (status == S::NOT_CONNECT) {
        statuses_.erase(remote);
    } else {
        statuses_[remote] = status;
    }
}

std::list<ConnectPool::Task>::iterator ConnectPool::next() {
    return std::find_if(tasks_.begin(), tasks_.end(), [this](const Task &task) { return busy_.count(task.remote) == 0; });
}

void ConnectPool::run() {
    if (context_ != nullptr) {
        aclrtSetCurrentContext(context_);
    }
    std::unique_lock<std::mutex> hold(guard_);
    for (;;) {
        bell_.wait(hold, [this] { return stopping_ || next() != tasks_.end(); });
        if (stopping_) {
            return;
        }
        const auto place = next();
        const Task task = std::move(*place);
        tasks_.erase(place);
        busy_.insert(task.remote);
        set(task.remote, task.connect ? S::CONNECTING : S::DISCONNECTING);
        hold.unlock();
        const S outcome = task.job();
        hold.lock();
        set(task.remote, outcome);
        busy_.erase(task.remote);
        bell_.notify_one();
    }
}

}  // namespace sim
