#include "host_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace hx {

namespace {

constexpr uint64_t SLOW_MS = 100;  // an allocation may hold up the loop this long without a line in the log

uint64_t page_size() {
    static const uint64_t size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return size;
}

// Make the context of this thread first.  `base` stays null where plain pages are wanted.
int lock_pages(hxa_instance &self, uint64_t size, void *&base) {
    for (self.enter_context(); self.context_state != hxa_instance::CONTEXT_MADE; self.enter_context())
        sleep_for(MS);  // another thread makes it
    if (self.options.pages_on(self.library.acl.npu())) return 0;
    const int error = self.library.acl.malloc_host(&base, size);
    if (error != 0) base = nullptr;
    else std::memset(base, 0, size);
    return error;
}

}  // namespace

// Where AscendCL is, host memory comes from aclrtMallocHost.  A thread of its own calls it, because the caller's has no
// context, and the pool's may all be inside HIXL.  The caller, which is the loop, waits for it all the same: it wants an
// address, and only aclrtMallocHost knows which.  Pages of our own, locked later by aclrtHostRegister, would not do: HIXL
// asks for aclrtMallocHost on A2 and A3, fabric memory for an allocation by AscendCL, and kernels up to 5.10 take no
// others.
void *host_alloc(hxa_instance &self, uint64_t size, hxa_mem &mem) {
    if (self.library.acl.malloc_host != nullptr && self.options.host_memory != HostMemory::PAGES) {
        struct Work {
            hxa_instance *self;
            uint64_t size;
            void *base;
            int error;
        } work = {&self, size, nullptr, 0};
        const auto entry = [](void *argument) -> void * {
            Work &mine = *static_cast<Work *>(argument);
            mine.error = lock_pages(*mine.self, mine.size, mine.base);
            return nullptr;
        };
        const uint64_t begun = clock_now();
        pthread_t thread;
        if (make_thread(&thread, entry, &work) != 0) return nullptr;
        pthread_join(thread, nullptr);
        const uint64_t took = (clock_now() - begun) / MS;
        if (took >= SLOW_MS)
            self.warn(nullptr, text("hixl: aclrtMallocHost of %llu MiB took %llu ms, and the event loop stood still meanwhile; "
                              "allocate before there are peers, or register what another thread allocated",
                              static_cast<unsigned long long>(size >> 20), static_cast<unsigned long long>(took)));
        if (work.base != nullptr) {
            mem.pinned = true;
            return work.base;
        }
        // Without a device, which a NIC of the host does not need, only pages are left; with one HIXL would not take them.
        if (work.error != 0 && (self.context != nullptr || self.options.host_memory == HostMemory::PINNED)) {
            self.warn(nullptr, text("hixl: aclrtMallocHost of %llu MiB answered %d; allocate less at once, or take "
                              "host_memory=pages where HIXL can use them",
                              static_cast<unsigned long long>(size >> 20), work.error));
            return nullptr;
        }
    }
    mem.mapped = static_cast<size_t>((size + page_size() - 1) / page_size() * page_size());
    void *base = mmap(nullptr, mem.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base != MAP_FAILED) return base;
    mem.mapped = 0;
    return nullptr;
}

void host_free(const hxa_mem &mem) {
    void *address = reinterpret_cast<void *>(mem.address);
    if (mem.pinned) mem.self->library.acl.free_host(address);
    else if (mem.mapped != 0) munmap(address, mem.mapped);
}

}  // namespace hx
