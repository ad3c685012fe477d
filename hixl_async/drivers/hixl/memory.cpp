// Memory of ours, registered with HIXL on a strand of its own, and imports, which are only numbers.
#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "link.hpp"
#include "route.hpp"

namespace hx {

namespace {

constexpr uint64_t RECESS_LOOK = MS, RECESS_LOOK_MOST = 50 * MS;
constexpr uint64_t RECESS_AFTER = 500 * MS;          // links that are never all idle are held up after this,
constexpr uint64_t RECESS_HOLD = 500 * MS;           // for no longer than this,
constexpr uint64_t RECESS_PAUSE_MOST = 10 * SECOND;  // and after that left alone for longer and longer

constexpr uint64_t SLOW_MS = 100;  // that an allocation may hold up the loop without a word

uint64_t page_size() {
    static const uint64_t size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return size;
}

// HIXL takes the same range twice, but other overlaps only on one back-end; of two kinds it refuses the next Connect.
bool clashes(hxa_instance &self, uint64_t start, uint64_t size, uint32_t kind) {
    Guard guard(self.regions_lock);
    for (const hxa_mem *mem : self.regions)
        if (mem->kind != kind && mem->address < start + size && start < mem->address + mem->size) return true;
    return false;
}

hxa_mem *adopt(hxa_instance *self, std::unique_ptr<hxa_mem> mem) {
    {
        Guard guard(self->regions_lock);
        self->regions.push_back(mem.get());
    }
    self->count.memories++;
    hxa_mem *out = mem.release();
    self->memory->post([self, out] {
        if (self->started != 0 && !self->over) self->register_one(out);
        else self->unregistered.push_back(out);
    });
    return out;
}

void settle_waiters(hxa_instance &self, hxa_mem *mem, const Outcome &outcome) {
    std::vector<hxa_op *> waiters;
    waiters.swap(mem->waiters);
    for (hxa_op *op : waiters) finish(self.sink, op, outcome);
}

// Nothing of HIXL's knows the memory any more.
void forget(hxa_instance &self, hxa_mem *mem) {
    {
        Guard guard(self.regions_lock);
        self.regions.erase(std::remove(self.regions.begin(), self.regions.end(), mem), self.regions.end());
    }
    settle_waiters(self, mem, {HXA_E_LINK, 0, HXA_SCOPE_OP});
    self.host_free(*mem, reinterpret_cast<void *>(mem->address));
    self.count.memories--;
    hxa_op *op = mem->retiring;
    delete mem;
    if (op != nullptr) finish(self.sink, op, {});
}

void retire(hxa_mem *mem, hxa_op *op) {
    hxa_instance *self = mem->self;
    self->memory->post([self, mem, op] {
        mem->retiring = op;
        mem->state = hxa_mem::RETIRED;
        self->unregistered.erase(std::remove(self->unregistered.begin(), self->unregistered.end(), mem),
                                 self->unregistered.end());
        self->retired.push_back(mem);
    });
}

}  // namespace

int mem_alloc(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **made, void **address) {
    if (size == 0 || (rights & ~(HXA_RIGHT_READ | HXA_RIGHT_WRITE)) != 0) return -HXA_E_INVALID;
    if (size > UINT64_MAX / 2) return -HXA_E_NOMEM;
    auto mem = std::make_unique<hxa_mem>();
    void *base = self->host_alloc(size, *mem);
    if (base == nullptr) return -HXA_E_NOMEM;
    mem->self = self;
    mem->address = reinterpret_cast<uint64_t>(base);
    mem->size = size;
    mem->kind = HXA_KIND_HOST;
    mem->rights = rights;
    *address = base;
    *made = adopt(self, std::move(mem));
    return 0;
}

int mem_register(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights, hxa_mem **made) {
    const uint64_t start = reinterpret_cast<uint64_t>(address);
    if (start == 0 || size == 0 || start + size < start || kind > HXA_KIND_DEVICE
        || (rights & ~(HXA_RIGHT_READ | HXA_RIGHT_WRITE)) != 0 || clashes(*self, start, size, kind))
        return -HXA_E_INVALID;
    auto mem = std::make_unique<hxa_mem>();
    mem->self = self;
    mem->address = start;
    mem->size = size;
    mem->kind = kind;
    mem->rights = rights;
    *made = adopt(self, std::move(mem));
    return 0;
}

int mem_export(hxa_mem *mem, uint32_t rights, hxa_card *card) {
    if (mem->link != nullptr || rights == 0 || (rights & ~(HXA_RIGHT_READ | HXA_RIGHT_WRITE)) != 0)
        return -HXA_E_INVALID;
    if ((rights & ~mem->rights) != 0) return -HXA_E_RIGHTS;
    const uint32_t state = mem->state;
    if (state == hxa_mem::PENDING) return -HXA_E_BUSY;
    if (state == hxa_mem::REFUSED) return -mem->refusal.status;
    if (state == hxa_mem::RETIRED) return -HXA_E_INVALID;
    const MemCard about = {MEM_MAGIC, VERSION,     mem->self->token, mem->address,
                           mem->size, mem->number, mem->kind,        rights};
    std::memset(card, 0, sizeof *card);
    card->len = sizeof about;
    std::memcpy(card->data, &about, sizeof about);
    return 0;
}

// Nothing is mapped: what a peer's card says is looked at when it is used, and by HIXL.
int mem_import(hxa_link *link, const hxa_card *card, uint64_t size, uint32_t rights, hxa_mem **made, hxa_op *op) {
    (void)op;
    MemCard about;
    for (uint32_t i = 0; i < card->nfds; i++) close(card->fds[i]);
    if (link->state != hxa_link::UP || link->down != 0) return -HXA_E_LINK;
    if (size == 0 || rights == 0 || (rights & ~(HXA_RIGHT_READ | HXA_RIGHT_WRITE)) != 0) return -HXA_E_INVALID;
    if (card->len != sizeof about || card->nfds != 0) return -HXA_E_PROTOCOL;
    std::memcpy(&about, card->data, sizeof about);
    if (about.magic != MEM_MAGIC || about.version != VERSION || about.token != link->peer_token
        || about.kind > HXA_KIND_DEVICE || about.address == 0 || about.address + about.size < about.address
        || about.number == 0)
        return -HXA_E_PROTOCOL;
    if (size > about.size) return -HXA_E_RANGE;
    if ((rights & ~about.rights) != 0) return -HXA_E_RIGHTS;
    auto mem = std::make_unique<hxa_mem>();
    mem->self = link->self;
    mem->link = link;
    mem->address = about.address;
    mem->size = size;
    mem->kind = about.kind;
    mem->rights = rights;
    mem->number = about.number;
    mem->state = hxa_mem::READY;
    link->route->know(about.number);
    link->self->count.memories++;
    *made = mem.release();
    return HXA_DONE;
}

void mem_release(hxa_mem *mem) {
    if (mem->link != nullptr) {
        mem->self->count.memories--;
        delete mem;
    } else if (mem->self->over) {
        forget(*mem->self, mem);
    } else {
        retire(mem, nullptr);
    }
}

int mem_ready(hxa_mem *mem, hxa_op *op) {
    const uint32_t state = mem->state;
    if (state == hxa_mem::READY) return HXA_DONE;
    if (state == hxa_mem::REFUSED) {
        op->native = mem->refusal.native;
        return -mem->refusal.status;
    }
    hxa_instance *self = mem->self;
    self->memory->post([self, mem, op] {
        if (mem->state == hxa_mem::READY) finish(self->sink, op, {});
        else if (mem->state == hxa_mem::REFUSED) finish(self->sink, op, mem->refusal);
        else mem->waiters.push_back(op);
    });
    return HXA_PENDING;
}

int mem_retire(hxa_mem *mem, hxa_op *op) {
    if (mem->link != nullptr) return -HXA_E_INVALID;
    retire(mem, op);
    return HXA_PENDING;
}

}  // namespace hx

// ---- the memory strand ----------------------------------------------------------------------------------------------

using namespace hx;

// On a thread with a context.  `base` stays null where it shall be pages of ours.
int hxa_instance::lock_pages(uint64_t size, void *&base) {
    for (enter(); context_state != 2; enter()) {  // somebody else is at it
        const struct timespec moment = {0, static_cast<long>(MS)};
        nanosleep(&moment, nullptr);
    }
    if (options.pages_on(library.acl.npu())) return 0;
    const int error = library.acl.malloc_host(&base, size);
    if (error != 0) base = nullptr;
    else std::memset(base, 0, size);
    return error;
}

// Host memory for HIXL comes from aclrtMallocHost where AscendCL is; a thread of its own asks, for the caller's has no
// context, and the crew's may all be inside HIXL.  The caller waits for it all the same, although it is the loop: it
// wants an address, and only aclrtMallocHost knows which.  Pages of our own, locked later by aclrtHostRegister, would not
// be the same: HIXL asks for aclrtMallocHost on A2 and A3, fabric memory for an allocation of AscendCL's, and kernels up
// to 5.10 take no others.
void *hxa_instance::host_alloc(uint64_t size, hxa_mem &mem) {
    if (library.acl.malloc_host != nullptr && options.host_memory != HostMemory::PAGES) {
        struct Work {
            hxa_instance *self;
            uint64_t size;
            void *base;
            int error;
        } work = {this, size, nullptr, 0};
        const auto entry = [](void *argument) -> void * {
            Work &mine = *static_cast<Work *>(argument);
            mine.error = mine.self->lock_pages(mine.size, mine.base);
            return nullptr;
        };
        const uint64_t begun = clock_now();
        pthread_t thread;
        if (make_thread(&thread, entry, &work) != 0) return nullptr;
        pthread_join(thread, nullptr);
        const uint64_t took = (clock_now() - begun) / MS;
        if (took >= SLOW_MS)
            warn(nullptr, text("hixl: aclrtMallocHost of %llu MiB took %llu ms, for which the event loop stood still; "
                              "allocate before there are peers, or register what another thread allocated",
                              static_cast<unsigned long long>(size >> 20), static_cast<unsigned long long>(took)));
        if (work.base != nullptr) {
            mem.pinned = true;
            return work.base;
        }
        // Without a device (a NIC of the host needs none) it has to be pages; with one HIXL would not take them.
        if (work.error != 0 && (context != nullptr || options.host_memory == HostMemory::PINNED)) {
            warn(nullptr, text("hixl: aclrtMallocHost of %llu MiB answered %d; allocate less at once, or take "
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

void hxa_instance::host_free(const hxa_mem &mem, void *address) {
    if (mem.pinned) library.acl.free_host(address);
    else if (mem.mapped != 0) munmap(address, mem.mapped);
}

void hxa_instance::register_one(hxa_mem *mem) {
    abi::MemDesc about = {};
    about.addr = mem->address;
    about.len = mem->size;
    uint32_t native;
    {
        Gate::Control control(gate);
        Call call(*this, "RegisterMem");
        native = call.allowed
                     ? library.register_mem(&hixl, about,
                                            mem->kind == HXA_KIND_DEVICE ? abi::MEM_DEVICE : abi::MEM_HOST, mem->handle)
                     : abi::FAILED;
    }
    Outcome outcome = outcome_of(native);
    if (outcome.status == HXA_E_LINK) outcome.status = HXA_E_UNSUPPORTED;  // FAILED: no link has to do with it
    if (outcome.ok()) {
        handles[mem->handle]++;
        mem->number = registrations.fetch_add(1) + 1;
        mem->state = hxa_mem::READY;
    } else {
        mem->refusal = outcome;
        mem->state = hxa_mem::REFUSED;
    }
    settle_waiters(*this, mem, outcome);
    for (const auto &route : all_routes()) route->wake();  // ops may wait for it
}

// There will be nobody to register them with.  After the end the loop may release them at any time, hence the lock.
void hxa_instance::refuse_unregistered() {
    const Outcome outcome = start_failed ? start_failure : Outcome{HXA_E_LINK, 0, HXA_SCOPE_OP};
    std::vector<hxa_op *> waiters;
    {
        Guard guard(regions_lock);
        for (hxa_mem *mem : unregistered) {
            if (std::find(regions.begin(), regions.end(), mem) == regions.end()) continue;
            mem->refusal = outcome;
            mem->state = hxa_mem::REFUSED;
            waiters.insert(waiters.end(), mem->waiters.begin(), mem->waiters.end());
            mem->waiters.clear();
        }
        unregistered.clear();
    }
    for (hxa_op *op : waiters) finish(sink, op, outcome);
}

// Registers what came before start, and deregisters what was let go of.  HIXL refuses that while there are outgoing
// links, so all of them have to be disconnected at one moment: when they happen to be idle, or, if that never comes, by
// holding them up for a while.
uint64_t hxa_instance::let_go(uint64_t now) {
    if (started != 0 && !over && !unregistered.empty()) {
        std::vector<hxa_mem *> taken;
        taken.swap(unregistered);
        for (hxa_mem *mem : taken) register_one(mem);
    }
    if (start_failed || over) refuse_unregistered();
    bool refused = false;
    for (size_t i = 0; i < retired.size();) {
        hxa_mem *mem = retired[i];
        bool gone = true;
        const auto known = mem->handle != nullptr && !over && started != 0 ? handles.find(mem->handle) : handles.end();
        if (known != handles.end() && known->second == 1) {
            // Asked once even while there are links: one of the back-ends allows it.
            const bool alone = connections == 0;
            gone = alone;
            if (alone || !mem->asked) {
                mem->asked = true;
                Gate::Control control(gate);
                Call call(*this, "DeregisterMem");
                gone = !call.allowed || library.deregister_mem(&hixl, mem->handle) == abi::SUCCESS || alone;
            }
        }
        if (!gone) {
            refused = true;
            i++;
            continue;
        }
        if (known != handles.end() && --known->second == 0) handles.erase(known);
        retired.erase(retired.begin() + static_cast<std::ptrdiff_t>(i));
        forget(*this, mem);
    }
    if (!refused) {
        if (recess != 0) {
            recess = 0;
            for (const auto &route : all_routes()) route->wake();
        }
        recess_since = 0;
        recess_pause = 0;
        return NEVER;
    }
    if (recess_since == 0) {
        recess_since = now;
        recess_look = RECESS_LOOK;
    }
    if (recess != 0) {
        if (now < recess_until) return now + RECESS_LOOK;
        // It did not come: somebody has work that takes long.
        recess = 0;
        recess_pause = std::min(std::max(recess_pause * 2, SECOND), RECESS_PAUSE_MOST);
        recess_since = now + recess_pause;
        recess_look = RECESS_LOOK;
        for (const auto &route : all_routes()) route->wake();
        return now + RECESS_LOOK;
    }
    bool idle = true;
    for (const auto &route : all_routes()) idle = idle && route->idle();
    if (idle || now > recess_since + RECESS_AFTER) {
        recess = 1;
        recess_until = now + RECESS_HOLD;
        for (const auto &route : all_routes()) route->wake();
        return now + RECESS_LOOK;
    }
    recess_look = std::min(recess_look * 2, RECESS_LOOK_MOST);
    return now + recess_look;
}
