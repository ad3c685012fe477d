// Whole numbers in text.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace hx {

inline bool whole_number(const std::string &text, uint64_t least, uint64_t most, uint64_t &out) {
    if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
    errno = 0;
    out = std::strtoull(text.c_str(), nullptr, 10);
    return errno == 0 && out >= least && out <= most;
}

}  // namespace hx
