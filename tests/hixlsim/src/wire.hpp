// Frames over TCP between engines.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "api.hpp"

namespace sim {

using Clock = std::chrono::steady_clock;

inline Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

enum class Message : uint32_t {
    hello = 1,      // Hello -> Welcome: makes the server's half of a link; the connection stays as its control connection
    welcome,
    wire,           // a second connection of the link, that stands for the hardware; the link's number
    joined,         // the server knows it
    gone,           // server -> client on the wire: this region is registered no longer
    gone_ack,
    bye,            // server -> client on the wire: nothing of this engine is registered any longer
    notify,         // NotifyMessage -> Ack
    ack,
    heartbeat,
    part,           // COMM, on a connection of its own: this engine ends its link -> Ack
    put,            // on the wire, where one process may not touch another's memory: address, bytes -> Ack
    get,            // address, length -> bytes
    got,
};

// Writes and reads of plain numbers and strings, in the order in which they were written.
class Pack {
  public:
    Pack &number(uint64_t value) {
        text_.append(reinterpret_cast<const char *>(&value), sizeof value);
        return *this;
    }
    Pack &string(const std::string &value) {
        number(value.size());
        text_ += value;
        return *this;
    }
    const std::string &text() const { return text_; }

  private:
    std::string text_;
};

class Unpack {
  public:
    explicit Unpack(const std::string &text) : text_(text) {}
    uint64_t number();
    std::string string();
    bool good() const { return good_; }

  private:
    const std::string &text_;
    size_t at_ = 0;
    bool good_ = true;
};

struct Frame {
    Message type;
    std::string body;
};

enum class Took { frame, nothing, end, garbage };

class Connection {
  public:
    explicit Connection(int fd) : fd_(fd) {}
    ~Connection();
    Connection(const Connection &) = delete;
    Connection &operator=(const Connection &) = delete;

    int fd() const { return fd_; }
    // The peer sees the end; the descriptor stays open until the last user is gone.
    void shut();
    // 0, or the errno. Waits while the peer does not read, at most until the deadline.
    int send(Message type, const std::string &body, Clock::time_point deadline);
    // The beginning of a frame and no more: what a sender leaves behind that gave up in the middle.
    void send_half();
    // What has arrived, without waiting, and then frame by frame.
    Took take(Frame &frame);
    // Waits for one frame.
    Took wait(Frame &frame, Clock::time_point deadline);

    // Whose it is: the number of the link, and for the server's halves the client's name.
    uint64_t link = 0;
    std::string client;

  private:
    int write_all(const char *data, size_t size, Clock::time_point deadline);
    bool fill();
    Took parse(Frame &frame);

    const int fd_;
    std::mutex sending_;
    std::string buffer_;
};

using ConnectionPtr = std::shared_ptr<Connection>;

// FAILED when refused, TIMEOUT when time ran out.
hixl::Status dial(const std::string &ip, int port, Clock::time_point deadline, ConnectionPtr &connection);

// The engine's own thread: listens, reads frames, and does what was put off.
class Post {
  public:
    using Handler = std::function<bool(const ConnectionPtr &, Frame &)>;  // false: reads this connection no longer
    using Ender = std::function<void(const ConnectionPtr &)>;

    Post(Handler handler, Ender ender) : handler_(std::move(handler)), ender_(std::move(ender)) {}
    ~Post();

    bool start(const std::string &ip, int port);
    void stop();
    void watch(const ConnectionPtr &connection);
    void forget(const ConnectionPtr &connection);
    void later(Clock::time_point due, std::function<void()> work);

  private:
    struct Task {
        Clock::time_point due;
        std::function<void()> work;
    };

    void run();
    void accept_all();
    void read(const ConnectionPtr &connection);
    int next_wait();
    void wake();

    Handler handler_;
    Ender ender_;
    std::mutex guard_;
    std::unordered_map<int, ConnectionPtr> connections_;
    std::vector<Task> tasks_;
    std::atomic<bool> stopping_{false};
    int listener_ = -1;
    int poller_ = -1;
    int bell_ = -1;
    std::thread thread_;
};

}  // namespace sim
