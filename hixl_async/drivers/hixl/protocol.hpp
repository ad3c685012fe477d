// The protocol between the drivers at the two ends of a link: metadata first, then messages by the control connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hx {

constexpr uint32_t VERSION = 2, LINK_MAGIC = 0x4b4e4c48, MEM_MAGIC = 0x4d454d48;
constexpr size_t ID_BYTES = 64;

struct LinkMetadata {
    uint32_t magic, version;
    uint64_t token;          // of the engine, as long as it lives: another one may get the same address later
    uint64_t tag;            // the address of frames for this link
    uint64_t registrations;  // memories that a connection made now can see
    uint32_t window;         // frames that we may have under way to it
    uint16_t control;        // its notifications come by the control connection
    uint16_t backend;        // Backend: ours must be the same
    char id[ID_BYTES];       // "ip:port" of HIXL
};

struct MemMetadata {
    uint32_t magic, version;
    uint64_t token;
    uint64_t address, size, number;
    uint32_t kind, rights;
};

enum class Message : uint8_t {
    WAKE = 1,    // seq: notifications up to it are on their way by HIXL
    CREDIT = 2,  // seq, cost: all up to it were handed out
    LOST = 3,    // seq: this one never came
    PIECES = 4,  // notifications themselves
    FENCE = 5,   // release my memory
    FENCED = 6,  // I did, and shall not touch it again
    STOPPED = 7  // seq, the last: I stopped the link, and shall not touch your memory again
};

inline std::string pack(uint64_t value) { return std::string(reinterpret_cast<const char *>(&value), sizeof value); }

}  // namespace hx
