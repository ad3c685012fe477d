// HIXL's calls that make and end the connection with one remote engine.  They block.
#pragma once

#include <string>

#include "instance.hpp"
#include "sockets.hpp"

namespace hx {

class Connection {
  public:
    Connection(hxa_instance &self, const std::string &id, const abi::Text &remote);

    // One thread at a time.  Return SUCCESS, or the code of the last call.
    uint32_t connect();
    // Our side of the connection is gone when it returns.  `dead`: the process at the other end is.
    void disconnect(bool dead);

    // The endpoint's strand: shut the sockets of a call that is overdue.  Return when to call it again.
    uint64_t shut_overdue(uint64_t now, bool connecting, bool wanted);

  private:
    bool by_async() const;
    uint32_t connect_once();
    uint32_t connect_async(int32_t timeout_ms);
    void disconnect_async(int32_t timeout_ms);

    hxa_instance &self_;
    const std::string id_;
    const abi::Text remote_;
    Sockets sockets_;
    uint64_t shut_at_ = 0;
};

}  // namespace hx
