#include "sockets.hpp"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "address.hpp"

namespace hx {

namespace {

// Return true if the descriptor is a socket whose other end is at `address`.
bool leads_to(int fd, const std::string &address) {
    struct sockaddr_storage peer;
    socklen_t size = sizeof peer;
    if (getpeername(fd, reinterpret_cast<struct sockaddr *>(&peer), &size) != 0) return false;
    char ip[INET6_ADDRSTRLEN];
    const void *raw;
    uint16_t port;
    if (peer.ss_family == AF_INET) {
        const auto &four = reinterpret_cast<const struct sockaddr_in &>(peer);
        raw = &four.sin_addr;
        port = four.sin_port;
    } else if (peer.ss_family == AF_INET6) {
        const auto &six = reinterpret_cast<const struct sockaddr_in6 &>(peer);
        raw = &six.sin6_addr;
        port = six.sin6_port;
    } else {
        return false;
    }
    return inet_ntop(peer.ss_family, raw, ip, sizeof ip) != nullptr && address_text(ip, ntohs(port)) == address;
}

// Call `with` for each such socket: a descriptor of our own, and its inode.
template <class With>
void each_to(const std::string &address, With with) {
    DIR *all = opendir("/proc/self/fd");
    if (all == nullptr) return;
    while (const struct dirent *entry = readdir(all)) {
        char *end;
        const long fd = std::strtol(entry->d_name, &end, 10);
        if (*end != '\0' || end == entry->d_name || !leads_to(static_cast<int>(fd), address)) continue;
        // The number may be another file's by now, so that a descriptor that only we close is asked again.
        const int ours = fcntl(static_cast<int>(fd), F_DUPFD_CLOEXEC, 0);
        if (ours < 0) continue;
        struct stat about;
        if (leads_to(ours, address) && fstat(ours, &about) == 0) with(ours, static_cast<uint64_t>(about.st_ino));
        close(ours);
    }
    closedir(all);
}

}  // namespace

Sockets::Sockets(const std::string &address) : address_(address) {
    // One address may be written in several ways.
    const size_t colon = address.rfind(':');
    std::string ip = address.substr(0, colon);
    if (!ip.empty() && ip.front() == '[') ip = ip.substr(1, ip.size() - 2);
    uint8_t raw[sizeof(struct in6_addr)];
    char usual[INET6_ADDRSTRLEN];
    const int family = ip.find(':') == std::string::npos ? AF_INET : AF_INET6;
    if (colon == std::string::npos || inet_pton(family, ip.c_str(), raw) != 1
        || inet_ntop(family, raw, usual, sizeof usual) == nullptr)
        return;
    address_ = address_text(usual, static_cast<uint16_t>(std::strtoul(address.c_str() + colon + 1, nullptr, 10)));
}

Sockets::Watch::Watch(Sockets &sockets, const char *call) : sockets_(sockets) {
    std::vector<uint64_t> before;
    each_to(sockets_.address_, [&](int, uint64_t inode) { before.push_back(inode); });
    Guard guard(sockets_.lock_);
    sockets_.before_.swap(before);
    sockets_.call_ = call;
    sockets_.since_ = clock_now();
}

Sockets::Watch::~Watch() {
    Guard guard(sockets_.lock_);
    sockets_.call_ = nullptr;
}

const char *Sockets::call(uint64_t &since) {
    Guard guard(lock_);
    since = since_;
    return call_;
}

// Under the lock, so that the call cannot end and its successor's socket be taken for its own.
uint32_t Sockets::shut() {
    Guard guard(lock_);
    if (call_ == nullptr) return 0;
    uint32_t n = 0;
    each_to(address_, [&](int fd, uint64_t inode) {
        if (std::find(before_.begin(), before_.end(), inode) == before_.end()) n += shutdown(fd, SHUT_RDWR) == 0;
    });
    return n;
}

}  // namespace hx
