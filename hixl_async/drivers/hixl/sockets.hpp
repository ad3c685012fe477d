// The sockets over which this process talks to one HIXL engine.
//
// On one back-end (COMM) Connect and Disconnect read an answer without a time limit: an engine that accepts and never
// answers would hold them for ever, and with them the link, the thread and Finalize.  HIXL has no call that ends them,
// but the socket that they read from can be shut from outside, which they take for an engine that is gone.
#pragma once

#include <string>
#include <vector>

#include "sync.hpp"

namespace hx {

class Sockets {
  public:
    explicit Sockets(const std::string &address);  // "ip:port", or "[ip]:port"

    class Watch {  // around a call that opens one
      public:
        Watch(Sockets &sockets, const char *call);
        ~Watch();

      private:
        Sockets &sockets_;
    };
    // The call that is under way, and when it began; nullptr: none.
    const char *call(uint64_t &since);
    // Shut the sockets that were opened since then; return their number.
    uint32_t shut();

  private:
    std::string address_;
    Mutex lock_;
    const char *call_ = nullptr;
    uint64_t since_ = 0;
    std::vector<uint64_t> before_;  // inodes of those that were there already
};

}  // namespace hx
