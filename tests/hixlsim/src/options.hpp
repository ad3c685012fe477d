// The options of Initialize: the same parsing for all back-ends, then the choice of one, then its own whitelist.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "api.hpp"

namespace sim {

enum class Backend { comm, cs, fab };
using RawOptions = std::map<std::string, std::string>;

struct Options {
    RawOptions raw;
    bool auto_connect = false;
    bool fabric = false;
    bool unfold = true;
    uint64_t task_streams = 1;
    std::string comm_res;
    std::vector<std::string> protocols;
    int connect_threads = 2;
    int connect_queue = 128;
    uint64_t active_channels = 128;
    bool host_endpoint = false;
    std::set<std::string> endpoints;  // of CS, where they are given: "roce:host" and the like
    // channel_pool.*: evicts idle links, connects by itself, and knows no fail-fast.
    bool channel_pool = false;
    size_t max_channel = 512;
    size_t high_mark = 0;
    size_t low_mark = 0;

    hixl::Status parse(const RawOptions &options);
    hixl::Status choose(Backend &backend) const;
    hixl::Status check(Backend backend);
    // Is there a pair of endpoints for a link? The others are as the peer's endpoint_names() has them.
    bool meets(const std::string &others) const;
    std::string endpoint_names() const;
};

// "ip", "ip:port", "[ip6]:port"; literal addresses only. The port is 0 where there is none.
hixl::Status parse_engine(const std::string &text, std::string &ip, int &port);

}  // namespace sim
