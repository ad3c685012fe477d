// libascendcl.so, and libacl_rt.so by another name: devices that are only numbers, and "device" memory that is marked host memory.
#include "acl.hpp"

#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

struct Context {
    int32_t device;
};

struct Block {
    size_t size;
    int kind;
};

std::mutex guard;
std::map<uintptr_t, Block> blocks;
std::set<Context *> contexts;
std::map<int32_t, Context *> primary;
thread_local Context *current = nullptr;

uint32_t device_count() {
    const char *text = std::getenv("HIXLSIM_DEVICES");
    return text == nullptr ? 8U : static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
}

bool exists(int32_t device) { return device >= 0 && static_cast<uint32_t>(device) < device_count(); }

int allocate(void **memory, size_t size, int kind, size_t align) {
    if (memory == nullptr || size == 0) {
        return acl::PARAM_INVALID;
    }
    const size_t room = (size + align - 1) / align * align;
    void *block = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) {
        return acl::MEMORY_ALLOCATION;
    }
    std::lock_guard<std::mutex> hold(guard);
    blocks[reinterpret_cast<uintptr_t>(block)] = {room, kind};
    *memory = block;
    return acl::OK;
}

int release(void *memory, int kind) {
    std::lock_guard<std::mutex> hold(guard);
    const auto found = blocks.find(reinterpret_cast<uintptr_t>(memory));
    if (found == blocks.end() || found->second.kind != kind) {
        return acl::PARAM_INVALID;
    }
    munmap(memory, found->second.size);
    blocks.erase(found);
    return acl::OK;
}

}  // namespace

int aclInit(const char *) { return acl::OK; }
int aclFinalize() { return acl::OK; }

int aclrtSetDevice(int32_t device) {
    if (!exists(device)) {
        return acl::INVALID_DEVICE;
    }
    std::lock_guard<std::mutex> hold(guard);
    Context *&context = primary[device];
    if (context == nullptr) {
        context = new Context{device};
        contexts.insert(context);
    }
    current = context;
    return acl::OK;
}

int aclrtResetDevice(int32_t device) { return exists(device) ? acl::OK : acl::INVALID_DEVICE; }

int aclrtGetDevice(int32_t *device) {
    if (current == nullptr) {
        return acl::CONTEXT_NULL;
    }
    std::lock_guard<std::mutex> hold(guard);
    if (contexts.count(current) == 0) {
        return acl::CONTEXT_NULL;
    }
    *device = current->device;
    return acl::OK;
}

int aclrtGetDeviceCount(uint32_t *count) {
    *count = device_count();
    return acl::OK;
}

int aclrtCreateContext(void **context, int32_t device) {
    if (!exists(device)) {
        return acl::INVALID_DEVICE;
    }
    std::lock_guard<std::mutex> hold(guard);
    current = new Context{device};
    contexts.insert(current);
    *context = current;
    return acl::OK;
}

int aclrtDestroyContext(void *context) {
    std::lock_guard<std::mutex> hold(guard);
    auto *known = static_cast<Context *>(context);
    if (contexts.erase(known) == 0) {
        return acl::PARAM_INVALID;
    }
    if (current == known) {
        current = nullptr;
    }
    delete known;
    return acl::OK;
}

int aclrtGetCurrentContext(void **context) {
    *context = current;
    return current == nullptr ? acl::CONTEXT_NULL : acl::OK;
}

int aclrtSetCurrentContext(void *context) {
    if (context == nullptr) {
        return acl::PARAM_INVALID;
    }
    current = static_cast<Context *>(context);
    return acl::OK;
}

int aclrtMalloc(void **memory, size_t size, int) { return allocate(memory, size, 2, size_t{2} << 20); }
int aclrtFree(void *memory) { return release(memory, 2); }

// Page-locking takes time, and may fail.
int aclrtMallocHost(void **memory, size_t size) {
    const char *error = std::getenv("HIXLSIM_MALLOC_HOST");
    const char *delay = std::getenv("HIXLSIM_MALLOC_HOST_MS");
    if (delay != nullptr) {
        std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(delay)));
    }
    return error != nullptr ? std::atoi(error) : allocate(memory, size, 1, 4096);
}
int aclrtFreeHost(void *memory) { return release(memory, 1); }

int aclrtMemcpy(void *to, size_t room, const void *from, size_t count, int) {
    if (to == nullptr || from == nullptr || count > room) {
        return acl::PARAM_INVALID;
    }
    std::memcpy(to, from, count);
    return acl::OK;
}

const char *aclrtGetSocName() {
    const char *text = std::getenv("HIXLSIM_SOC");
    return text == nullptr ? "Ascend910B3" : text;
}

int hixlsim_memory_kind(const void *address) {
    std::lock_guard<std::mutex> hold(guard);
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    auto after = blocks.upper_bound(wanted);
    if (after == blocks.begin()) {
        return 0;
    }
    --after;
    return wanted - after->first < after->second.size ? after->second.kind : 0;
}

int hixlsim_context_lives(void *context) {
    std::lock_guard<std::mutex> hold(guard);
    return contexts.count(static_cast<Context *>(context)) != 0;
}
