// Memory of ours, registered with HIXL on a strand of its own, and memory of peers, which is only numbers.
#pragma once

#include <atomic>
#include <vector>

#include "instance.hpp"

struct hxa_mem {
    enum State : uint32_t { PENDING, READY, REFUSED, RETIRED };
    hxa_instance *self = nullptr;
    hxa_link *link = nullptr;  // imported: whose; compared only
    uint64_t address = 0;
    uint64_t size = 0;
    uint64_t number = 0;  // when its registration succeeded; set before READY
    uint32_t kind = 0, rights = 0;
    std::atomic<uint32_t> state{PENDING};
    // Ours; the memory strand's.
    void *handle = nullptr;
    hx::Outcome refusal;            // why REFUSED; set before it
    std::vector<hxa_op *> waiters;  // mem_ready
    hxa_op *retiring = nullptr;
    bool asked = false;   // HIXL refused to deregister it once
    size_t mapped = 0;    // mem_alloc by mmap
    bool pinned = false;  // mem_alloc by aclrtMallocHost
};

namespace hx {

int mem_alloc(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **mem, void **address);
int mem_register(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights, hxa_mem **mem);
int mem_export(hxa_mem *mem, uint32_t rights, hxa_metadata *metadata);
int mem_import(hxa_link *link, const hxa_metadata *metadata, uint64_t size, uint32_t rights, hxa_mem **mem, hxa_op *op);
void mem_release(hxa_mem *mem);
int mem_ready(hxa_mem *mem, hxa_op *op);
int mem_retire(hxa_mem *mem, hxa_op *op);

// The memory strand's work.
uint64_t memory_turn(hxa_instance &self, uint64_t now);

}  // namespace hx
