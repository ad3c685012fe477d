#include "address.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "number.hpp"

namespace hx {

bool valid_address(const std::string &text) {
    const size_t colon = text.rfind(':');
    uint64_t port;
    if (colon == std::string::npos || !whole_number(text.substr(colon + 1), 1, 65535, port)) return false;
    std::string ip = text.substr(0, colon);
    unsigned char space[sizeof(struct in6_addr)];
    if (ip.size() > 2 && ip.front() == '[' && ip.back() == ']')
        return inet_pton(AF_INET6, ip.substr(1, ip.size() - 2).c_str(), space) == 1;
    return inet_pton(AF_INET, ip.c_str(), space) == 1;
}

std::string address_text(const std::string &ip, uint16_t port) {
    return (ip.find(':') != std::string::npos ? "[" + ip + "]" : ip) + ":" + std::to_string(port);
}

bool is_of_one_machine(const std::string &ip) {
    struct in_addr four;
    struct in6_addr six;
    if (inet_pton(AF_INET6, ip.c_str(), &six) == 1) {
        if (!IN6_IS_ADDR_V4MAPPED(&six)) return !IN6_IS_ADDR_UNSPECIFIED(&six) && !IN6_IS_ADDR_MULTICAST(&six);
        std::memcpy(&four, six.s6_addr + 12, sizeof four);
    } else inet_pton(AF_INET, ip.c_str(), &four);
    const uint32_t number = ntohl(four.s_addr);
    return number >> 24 != 0 && !IN_MULTICAST(number) && number != INADDR_BROADCAST;
}

int probe_address(const std::string &ip, uint16_t &port) {
    struct sockaddr_storage address = {};
    socklen_t size;
    struct sockaddr_in *four = reinterpret_cast<struct sockaddr_in *>(&address);
    struct sockaddr_in6 *six = reinterpret_cast<struct sockaddr_in6 *>(&address);
    if (inet_pton(AF_INET, ip.c_str(), &four->sin_addr) == 1) {
        address.ss_family = AF_INET;
        four->sin_port = htons(port);
        size = sizeof *four;
    } else {
        inet_pton(AF_INET6, ip.c_str(), &six->sin6_addr);
        address.ss_family = AF_INET6;
        six->sin6_port = htons(port);
        size = sizeof *six;
    }
    const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return errno;
    const int on = 1;
    // Connections of an engine that has ended do not count as a listener.
    if (port != 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int error = 0;
    if (bind(fd, reinterpret_cast<struct sockaddr *>(&address), size) != 0
        || getsockname(fd, reinterpret_cast<struct sockaddr *>(&address), &size) != 0)
        error = errno;
    else port = ntohs(address.ss_family == AF_INET ? four->sin_port : six->sin6_port);
    close(fd);
    return error;
}

}  // namespace hx
