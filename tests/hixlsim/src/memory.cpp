#include "memory.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "settings.hpp"

namespace sim {

void Regions::add(const RegionPtr &region) {
    const auto before = [](const RegionPtr &a, const RegionPtr &b) { return a->addr < b->addr; };
    all_.insert(std::upper_bound(all_.begin(), all_.end(), region, before), region);
}

const Region *Regions::find(uintptr_t at, bool living) const {
    auto after = std::upper_bound(all_.begin(), all_.end(), at, [](uintptr_t a, const RegionPtr &b) { return a < b->addr; });
    while (after != all_.begin()) {  // several where they overlap, which COMM allows
        --after;
        if (((*after)->lives || !living) && (*after)->holds(at, 1)) {
            return after->get();
        }
    }
    return nullptr;
}

bool Regions::covers(uintptr_t at, size_t size, bool living) const {
    if (size > UINTPTR_MAX - at) {
        return false;
    }
    while (size != 0) {
        const Region *region = find(at, living);
        if (region == nullptr) {
            return false;
        }
        const size_t here = std::min(size, region->len - (at - region->addr));
        at += here;
        size -= here;
    }
    return true;
}

int Regions::kind_at(uintptr_t at) const {
    const Region *region = find(at, false);
    return region == nullptr ? -1 : region->type;
}

void Regions::bury(uint64_t id) {
    for (const RegionPtr &region : all_) {
        if (region->id == id) {
            region->lives = false;
        }
    }
}

void Remote::probe(uintptr_t word, uint64_t expected) {
    uint64_t seen = 0;
    struct iovec here = {&seen, sizeof seen};
    struct iovec there = {reinterpret_cast<void *>(word), sizeof seen};
    const bool reached = process_vm_readv(pid_, &here, 1, &there, 1, 0) == sizeof seen && seen == expected;
    relay_ = !reached || settings().relay_bytes;
}

bool Remote::move(hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops) {
    if (!relay_) {
        return direct(op, ops);
    }
    constexpr size_t most = 16 << 20;
    for (const hixl::TransferOpDesc &each : ops) {
        for (size_t at = 0; at < each.len; at += most) {
            if (!relayed(op, {each.local_addr + at, each.remote_addr + at, std::min(most, each.len - at)})) {
                return false;
            }
        }
    }
    return true;
}

bool Remote::relayed(hixl::TransferOp op, const hixl::TransferOpDesc &part) {
    const auto deadline = after(30);
    if (relay_connection_ == nullptr && dial(ip_, port_, deadline, relay_connection_) != hixl::SUCCESS) {
        relay_connection_ = nullptr;
        return false;
    }
    Pack pack;
    pack.number(part.remote_addr);
    if (op == hixl::READ) {
        pack.number(part.len);
    } else {
        pack.string(std::string(reinterpret_cast<const char *>(part.local_addr), part.len));
    }
    Frame answer{};
    if (relay_connection_->send(op == hixl::READ ? Message::get : Message::put, pack.text(), deadline) != 0 ||
        relay_connection_->wait(answer, deadline) != Took::frame || answer.type != Message::got) {
        return false;
    }
    if (op == hixl::READ) {
        std::memcpy(reinterpret_cast<void *>(part.local_addr), answer.body.data(), std::min(part.len, answer.body.size()));
    }
    add(Count::bytes, static_cast<int64_t>(part.len));
    return op == hixl::WRITE || answer.body.size() == part.len;
}

bool Remote::direct(hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops) {
    constexpr size_t batch = 64;
    struct iovec here[batch];
    struct iovec there[batch];
    size_t at = 0;    // the first operation that is not done,
    size_t done = 0;  // and its bytes that are
    while (at != ops.size()) {
        size_t count = 0;
        size_t wanted = 0;
        for (size_t i = at; i != ops.size() && count != batch; ++i, ++count) {
            const size_t skip = i == at ? done : 0;
            here[count] = {reinterpret_cast<void *>(ops[i].local_addr + skip), ops[i].len - skip};
            there[count] = {reinterpret_cast<void *>(ops[i].remote_addr + skip), ops[i].len - skip};
            wanted += ops[i].len - skip;
        }
        const ssize_t moved = op == hixl::READ ? process_vm_readv(pid_, here, count, there, count, 0)
                                               : process_vm_writev(pid_, here, count, there, count, 0);
        if (moved < 0 || (moved == 0 && wanted != 0)) {
            log("cannot reach the memory of process %d: error %d", pid_, errno);
            return false;
        }
        add(Count::bytes, moved);
        auto left = static_cast<size_t>(moved);
        while (at != ops.size() && left >= ops[at].len - done) {
            left -= ops[at].len - done;
            done = 0;
            ++at;
        }
        done += left;
    }
    return true;
}

}  // namespace sim
