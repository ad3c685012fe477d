#include "connection.hpp"

#include <algorithm>

namespace hx {

namespace {

constexpr int32_t DEAD_TIMEOUT_MS = 200;  // of Disconnect from a process that is dead
constexpr uint64_t UNWANTED = SECOND;     // a call for a connection that is not wanted any more may take this long

// Between two queries: longer each time.
class Backoff {
  public:
    void rest() {
        sleep_for(next_);
        next_ = std::min(next_ * 2, 10 * MS);
    }

  private:
    uint64_t next_ = 100 * US;
};

}  // namespace

Connection::Connection(hxa_instance &self, const std::string &id, const abi::Text &remote)
    : self_(self),
      id_(id),
      remote_(remote),
      sockets_(id) {}

bool Connection::by_async() const { return self_.options.connect_async && self_.library.connect_async != nullptr; }

// ConnectAsync, until it has happened or the time is up.  A connection that comes after that is ended again.
uint32_t Connection::connect_async(int32_t timeout_ms) {
    const uint64_t end = clock_now() + static_cast<uint64_t>(timeout_ms) * MS;
    uint32_t native = self_.library.connect_async(&self_.hixl, remote_, timeout_ms);
    for (Backoff backoff; native == abi::RESOURCE_EXHAUSTED && clock_now() < end; backoff.rest())
        native = self_.library.connect_async(&self_.hixl, remote_, timeout_ms);
    if (native != abi::SUCCESS) return native;
    for (Backoff backoff; clock_now() < end + SECOND; backoff.rest()) {
        abi::AsyncConnectStatus status = abi::NOT_CONNECT;
        if (self_.library.connect_status(&self_.hixl, remote_, status) != abi::SUCCESS) continue;
        if (status == abi::CONNECTED) return abi::SUCCESS;
        if (status == abi::CONNECT_FAILED) return abi::FAILED;  // its code is lost in this form
    }
    disconnect_async(timeout_ms);
    return abi::TIMEOUT;
}

// DisconnectAsync.  It returns once that has happened, however long it takes and whatever HIXL answers: until then HIXL
// uses the memory of requests in flight.
void Connection::disconnect_async(int32_t timeout_ms) {
    for (Backoff backoff; self_.library.disconnect_async(&self_.hixl, remote_, timeout_ms) != abi::SUCCESS;)
        backoff.rest();
    for (Backoff backoff;; backoff.rest()) {
        abi::AsyncConnectStatus status = abi::DISCONNECT_PENDING;
        const uint32_t native = self_.library.connect_status(&self_.hixl, remote_, status);
        if (native == abi::SUCCESS && status == abi::NOT_CONNECT) return;
    }
}

uint32_t Connection::connect_once() {
    CallLock::Control control(self_.call_lock);
    Call call(self_, "Connect");
    if (!call.allowed) return abi::FAILED;
    Sockets::Watch watch(sockets_, "Connect");
    const int32_t timeout = self_.options.connect_timeout_ms;
    return by_async() ? connect_async(timeout) : self_.library.connect(&self_.hixl, remote_, timeout);
}

uint32_t Connection::connect() {
    uint32_t native = connect_once();
    if (native != abi::ALREADY_CONNECTED) return native;
    // It is unknown since when, and so which memory the connection sees.
    disconnect(false);
    native = connect_once();
    return native == abi::ALREADY_CONNECTED ? static_cast<uint32_t>(abi::SUCCESS) : native;
}

void Connection::disconnect(bool dead) {
    CallLock::Control control(self_.call_lock);
    Call call(self_, "Disconnect");
    if (!call.allowed) return;
    Sockets::Watch watch(sockets_, "Disconnect");
    const int32_t timeout = dead ? DEAD_TIMEOUT_MS : self_.options.connect_timeout_ms;
    if (by_async()) disconnect_async(timeout);
    else self_.library.disconnect(&self_.hixl, remote_, timeout);
}

// Connect may take its time twice, because the other engine does its part after ours.
uint64_t Connection::shut_overdue(uint64_t now, bool connecting, bool wanted) {
    uint64_t since = 0;
    const char *call = sockets_.call(since);
    const uint64_t patience = static_cast<uint64_t>(self_.options.connect_timeout_ms) * MS;
    const uint64_t most = !wanted ? std::min(patience, UNWANTED) : connecting ? 2 * patience + SECOND : patience;
    if (call == nullptr) since = now;
    const uint64_t at = std::max(since + most, shut_at_);
    if (call == nullptr || now < at) return at;
    shut_at_ = now + SECOND;
    if (sockets_.shut() != 0)
        self_.warn(nullptr, text("hixl: %s: no answer to %s in %.1f s; its socket was shut", id_.c_str(), call,
                                 static_cast<double>(now - since) / 1e9));
    return shut_at_;
}

}  // namespace hx
