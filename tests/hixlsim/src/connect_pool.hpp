// Asynchronous connects and disconnects: one after another for one peer, in parallel for different ones.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "api.hpp"

namespace sim {

class ConnectPool {
  public:
    using Job = std::function<hixl::AsyncConnectStatus()>;

    ConnectPool(int threads, int capacity, void *context) : threads_(threads), capacity_(capacity), context_(context) {}
    ~ConnectPool() { stop(); }

    hixl::Status submit(const std::string &remote, bool connect, Job job);
    hixl::AsyncConnectStatus status(const std::string &remote);
    std::map<std::string, hixl::AsyncConnectStatus> all();
    // Jobs that have not begun are dropped.
    void stop();

  private:
    struct Task {
        std::string remote;
        bool connect;
        Job job;
    };

    void run();
    std::list<Task>::iterator next();
    void set(const std::string &remote, hixl::AsyncConnectStatus status);

    const int threads_;
    const int capacity_;
    void *const context_;
    std::mutex guard_;
    std::condition_variable bell_;
    std::list<Task> tasks_;
    std::set<std::string> busy_;
    std::map<std::string, hixl::AsyncConnectStatus> statuses_;
    std::vector<std::thread> workers_;
    bool stopping_ = false;
};

}  // namespace sim
