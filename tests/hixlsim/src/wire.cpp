#include "wire.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "settings.hpp"

namespace sim {
namespace {

constexpr uint32_t magic = 0x4C584948;
constexpr uint64_t most_body = 64 << 20;

struct Head {
    uint32_t magic;
    uint32_t type;
    uint64_t size;
};

int left_ms(Clock::time_point deadline) {
    if (deadline == Clock::time_point::max()) {
        return -1;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

bool ready(int fd, short events, Clock::time_point deadline) {
    struct pollfd one = {fd, events, 0};
    int count = 0;
    do {
        count = poll(&one, 1, left_ms(deadline));
    } while (count < 0 && errno == EINTR);
    return count > 0;
}

socklen_t address(const std::string &ip, int port, struct sockaddr_storage &out) {
    std::memset(&out, 0, sizeof out);
    auto *four = reinterpret_cast<struct sockaddr_in *>(&out);
    if (inet_pton(AF_INET, ip.c_str(), &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons(static_cast<uint16_t>(port));
        return sizeof *four;
    }
    auto *six = reinterpret_cast<struct sockaddr_in6 *>(&out);
    inet_pton(AF_INET6, ip.c_str(), &six->sin6_addr);
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<uint16_t>(port));
    return sizeof *six;
}

void plain(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

}  // namespace

uint64_t Unpack::number() {
    uint64_t value = 0;
    if (!good_ || text_.size() - at_ < sizeof value) {
        good_ = false;
        return 0;
    }
    std::memcpy(&value, text_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
}

std::string Unpack::string() {
    const uint64_t size = number();
    if (!good_ || text_.size() - at_ < size) {
        good_ = false;
        return {};
    }
    at_ += size;
    return text_.substr(at_ - size, size);
}

Connection::~Connection() { close(fd_); }

void Connection::shut() { shutdown(fd_, SHUT_RDWR); }

int Connection::write_all(const char *data, size_t size, Clock::time_point deadline) {
    while (size != 0) {
        const ssize_t sent = ::send(fd_, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            data += sent;
            size -= static_cast<size_t>(sent);
        } else if (errno == EAGAIN) {
            if (!ready(fd_, POLLOUT, deadline)) {
                return ETIMEDOUT;
            }
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

int Connection::send(Message type, const std::string &body, Clock::time_point deadline) {
    const Head head = {magic, static_cast<uint32_t>(type), body.size()};
    std::lock_guard<std::mutex> hold(sending_);
    // In two parts, as the real one: that is how it learns in the middle of a message that its peer is gone.
    const int error = write_all(reinterpret_cast<const char *>(&head), sizeof head, deadline);
    return error != 0 ? error : write_all(body.data(), body.size(), deadline);
}

void Connection::send_half() {
    const Head head = {magic, static_cast<uint32_t>(Message::notify), 64};
    std::lock_guard<std::mutex> hold(sending_);
    write_all(reinterpret_cast<const char *>(&head), sizeof head, after(1));
}

bool Connection::fill() {  // false: the end
    char chunk[65536];
    for (;;) {
        const ssize_t size = recv(fd_, chunk, sizeof chunk, MSG_DONTWAIT);
        if (size > 0) {
            buffer_.append(chunk, static_cast<size_t>(size));
            if (static_cast<size_t>(size) < sizeof chunk) {
                return true;
            }
        } else if (size == 0 || (errno != EINTR && errno != EAGAIN)) {
            return false;
        } else if (errno == EAGAIN) {
            return true;
        }
    }
}

Took Connection::parse(Frame &frame) {
    Head head = {};
    if (buffer_.size() < sizeof head) {
        return Took::nothing;
    }
    std::memcpy(&head, buffer_.data(), sizeof head);
    if (head.magic != magic || head.size > most_body) {
        return Took::garbage;
    }
    if (buffer_.size() - sizeof head < head.size) {
        return Took::nothing;
    }
    frame.type = static_cast<Message>(head.type);
    frame.body = buffer_.substr(sizeof head, head.size);
    buffer_.erase(0, sizeof head + head.size);
    return Took::frame;
}

Took Connection::take(Frame &frame) {
    const Took first = parse(frame);
    if (first != Took::nothing) {
        return first;
    }
    const bool open = fill();
    const Took second = parse(frame);
    return second == Took::nothing && !open ? Took::end : second;
}

Took Connection::wait(Frame &frame, Clock::time_point deadline) {
    for (;;) {
        const Took took = take(frame);
        if (took != Took::nothing || !ready(fd_, POLLIN, deadline)) {
            return took;
        }
    }
}

hixl::Status dial(const std::string &ip, int port, Clock::time_point deadline, ConnectionPtr &connection) {
    struct sockaddr_storage to {};
    const socklen_t size = address(ip, port, to);
    const int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return hixl::FAILED;
    }
    plain(fd);
    connection = std::make_shared<Connection>(fd);
    if (connect(fd, reinterpret_cast<struct sockaddr *>(&to), size) == 0) {
        return hixl::SUCCESS;
    }
    if (errno != EINPROGRESS) {
        return hixl::FAILED;
    }
    if (!ready(fd, POLLOUT, deadline)) {
        return hixl::TIMEOUT;
    }
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    return error == 0 ? hixl::SUCCESS : hixl::FAILED;
}

Post::~Post() { stop(); }

bool Post::start(const std::string &ip, int port) {
    if (port > 0) {
        struct sockaddr_storage at {};
        const socklen_t size = address(ip, port, at);
        const int on = 1;
        listener_ = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(listener_, reinterpret_cast<struct sockaddr *>(&at), size) != 0 || listen(listener_, 1024) != 0) {
            log("cannot listen on %s:%d: %s", ip.c_str(), port, std::strerror(errno));
            close(listener_);
            listener_ = -1;
            return false;
        }
    }
    poller_ = epoll_create1(EPOLL_CLOEXEC);
    bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    for (const int fd : {listener_, bell_}) {
        struct epoll_event event {};
        event.events = EPOLLIN;
        event.data.fd = fd;
        if (fd >= 0) {
            epoll_ctl(poller_, EPOLL_CTL_ADD, fd, &event);
        }
    }
    thread_ = std::thread([this] { run(); });
    return true;
}

void Post::stop() {
    if (!thread_.joinable()) {
        return;
    }
    stopping_ = true;
    wake();
    thread_.join();
    for (const int fd : {listener_, poller_, bell_}) {
        if (fd >= 0) {
            close(fd);
        }
    }
    connections_.clear();
    tasks_.clear();
}

void Post::wake() {
    const uint64_t one = 1;
    (void)!write(bell_, &one, sizeof one);
}

void Post::watch(const ConnectionPtr &connection) {
    std::lock_guard<std::mutex> hold(guard_);
    connections_[connection->fd()] = connection;
    struct epoll_event event {};
    event.events = EPOLLIN;
    event.data.fd = connection->fd();
    epoll_ctl(poller_, EPOLL_CTL_ADD, connection->fd(), &event);
}

void Post::forget(const ConnectionPtr &connection) {
    std::lock_guard<std::mutex> hold(guard_);
    const auto found = connections_.find(connection->fd());
    if (found != connections_.end() && found->second == connection) {
        epoll_ctl(poller_, EPOLL_CTL_DEL, connection->fd(), nullptr);
        connections_.erase(found);
    }
}

void Post::later(Clock::time_point due, std::function<void()> work) {
    std::lock_guard<std::mutex> hold(guard_);
    tasks_.push_back({due, std::move(work)});
    wake();
}

int Post::next_wait() {
    std::vector<Task> due;
    Clock::time_point first = Clock::time_point::max();
    {
        std::lock_guard<std::mutex> hold(guard_);
        const auto now = Clock::now();
        for (auto task = tasks_.begin(); task != tasks_.end();) {
            if (task->due <= now) {
                due.push_back(std::move(*task));
                task = tasks_.erase(task);
            } else {
                first = std::min(first, task->due);
                ++task;
            }
        }
    }
    std::stable_sort(due.begin(), due.end(), [](const Task &a, const Task &b) { return a.due < b.due; });
    for (const Task &task : due) {
        task.work();
    }
    return due.empty() ? left_ms(first) : 0;
}

void Post::accept_all() {
    for (;;) {
        const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            return;
        }
        plain(fd);
        watch(std::make_shared<Connection>(fd));
    }
}

void Post::read(const ConnectionPtr &connection) {
    Frame frame{};
    for (;;) {
        const Took took = connection->take(frame);
        if (took == Took::nothing) {
            return;
        }
        if (took != Took::frame) {
            forget(connection);
            ender_(connection);
            return;
        }
        if (!handler_(connection, frame)) {
            forget(connection);
            return;
        }
    }
}

void Post::run() {
    struct epoll_event events[64];
    while (!stopping_) {
        const int count = epoll_wait(poller_, events, 64, next_wait());
        for (int i = 0; i < count && !stopping_; ++i) {
            const int fd = events[i].data.fd;
            if (fd == bell_) {
                uint64_t rung = 0;
                (void)!::read(bell_, &rung, sizeof rung);
            } else if (fd == listener_) {
                accept_all();
            } else {
                ConnectionPtr connection;
                {
                    std::lock_guard<std::mutex> hold(guard_);
                    const auto found = connections_.find(fd);
                    connection = found == connections_.end() ? nullptr : found->second;
                }
                if (connection != nullptr) {
                    read(connection);
                }
            }
        }
    }
}

}  // namespace sim
