// Addresses of HIXL engines: "ip:port" or "[ip]:port".
#pragma once

#include <cstdint>
#include <string>

namespace hx {

// Return true for a literal address and a port from 1, because HIXL asks no name server.
bool valid_address(const std::string &text);
std::string address_text(const std::string &ip, uint16_t port);
// Return true if a peer can connect to it: not the address of all interfaces, of none, or of a group.
bool is_of_one_machine(const std::string &ip);
// Return 0 if a socket can listen there, or the errno.  Port 0 becomes one that is free now; it may be taken before HIXL
// listens.
int probe_address(const std::string &ip, uint16_t &port);

}  // namespace hx
