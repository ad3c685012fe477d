// Registered memory: what an engine has, what it knows of its peers', and moving bytes between processes.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "api.hpp"
#include "wire.hpp"

namespace sim {

struct Region {
    uintptr_t addr;
    size_t len;
    hixl::MemType type;
    uint64_t id;
    std::atomic<bool> lives{true};

    Region(uintptr_t a, size_t l, hixl::MemType t, uint64_t i) : addr(a), len(l), type(t), id(i) {}
    bool holds(uintptr_t at, size_t size) const { return at >= addr && size <= len && at - addr <= len - size; }
};

using RegionPtr = std::shared_ptr<Region>;

// Those of one moment. A range may span neighbours that touch.
class Regions {
  public:
    void add(const RegionPtr &region);
    // Those that were deregistered since count only where `living` is false, for peers that do not know yet.
    bool covers(uintptr_t at, size_t size, bool living = true) const;
    // The memory kind at an address, or -1.
    int kind_at(uintptr_t at) const;
    void bury(uint64_t id);
    const std::vector<RegionPtr> &all() const { return all_; }

  private:
    const Region *find(uintptr_t at, bool living) const;

    std::vector<RegionPtr> all_;  // by address
};

// The memory of another process: reached directly where the kernel allows that, otherwise through the engine that serves it.
class Remote {
  public:
    Remote(pid_t pid, std::string ip, int port) : pid_(pid), ip_(std::move(ip)), port_(port) {}
    // `word` is the address there of a known number. The kernel refuses where ptrace is forbidden.
    void probe(uintptr_t word, uint64_t expected);
    // False when the process is gone, or an address is not there.
    bool move(hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops);

  private:
    bool direct(hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops);
    bool relayed(hixl::TransferOp op, const hixl::TransferOpDesc &part);

    const pid_t pid_;
    const std::string ip_;
    const int port_;
    bool relay_ = false;
    ConnectionPtr relay_connection_;
};

}  // namespace sim
