#include "memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "endpoint.hpp"
#include "host_memory.hpp"
#include "link.hpp"
#include "operation.hpp"

namespace hx {

namespace {

constexpr uint64_t INTERVAL = MS, INTERVAL_MOST = 50 * MS;  // between two questions whether all links are idle
constexpr uint64_t PAUSE_AFTER = 500 * MS;                  // links that are never all idle are held up after this,
constexpr uint64_t PAUSE_FOR = 500 * MS;                    // for no longer than this,
constexpr uint64_t NO_PAUSE_MOST = 10 * SECOND;             // and then not again for an ever longer time

// HIXL takes the same range twice, but other overlaps only on one back-end.  With overlaps of two kinds it refuses the
// next Connect.
bool clashes(hxa_instance &self, uint64_t start, uint64_t size, uint32_t kind) {
    Guard guard(self.regions_lock);
    for (const hxa_mem *mem : self.regions)
        if (mem->kind != kind && mem->address < start + size && start < mem->address + mem->size) return true;
    return false;
}

void settle_waiters(hxa_instance &self, hxa_mem *mem, const Outcome &outcome) {
    std::vector<hxa_op *> waiters;
    waiters.swap(mem->waiters);
    for (hxa_op *op : waiters) finish(self.sink, op, outcome);
}

// HIXL does not know the memory any more.
void forget(hxa_instance &self, hxa_mem *mem) {
    {
        Guard guard(self.regions_lock);
        self.regions.erase(std::remove(self.regions.begin(), self.regions.end(), mem), self.regions.end());
    }
    settle_waiters(self, mem, {HXA_E_LINK, 0, HXA_SCOPE_OP});
    host_free(*mem);
    hxa_op *op = mem->retiring;
    delete mem;
    {
        Guard guard(self.over_lock);
        self.count.memories--;
        self.over_changed.all();
    }
    if (op != nullptr) finish(self.sink, op, {});
}

void wake_endpoints(hxa_instance &self) {
    for (const auto &endpoint : self.all_endpoints()) endpoint->wake();
}

// ---- the memory strand ----------------------------------------------------------------------------------------------

void register_one(hxa_instance &self, hxa_mem *mem) {
    abi::MemDesc about = {};
    about.addr = mem->address;
    about.len = mem->size;
    uint32_t native;
    {
        CallLock::Control control(self.call_lock);
        Call call(self, "RegisterMem");
        native = call.allowed
                     ? self.library.register_mem(&self.hixl, about,
                                            mem->kind == HXA_KIND_DEVICE ? abi::MEM_DEVICE : abi::MEM_HOST, mem->handle)
                     : abi::FAILED;
    }
    Outcome outcome = outcome_of(native);
    if (outcome.status == HXA_E_LINK) outcome.status = HXA_E_UNSUPPORTED;  // FAILED: it does not concern a link
    if (outcome.ok()) {
        self.handles[mem->handle]++;
        mem->number = self.registrations.fetch_add(1) + 1;
        mem->state = hxa_mem::READY;
    } else {
        mem->refusal = outcome;
        mem->state = hxa_mem::REFUSED;
    }
    settle_waiters(self, mem, outcome);
    wake_endpoints(self);  // ops may wait for it
}

// Refuse the memories that cannot be registered any more.  After the end the loop may release them at any time, hence
// the lock.
void refuse_unregistered(hxa_instance &self) {
    const Outcome outcome = self.start_failed ? self.start_failure : Outcome{HXA_E_LINK, 0, HXA_SCOPE_OP};
    std::vector<hxa_op *> waiters;
    {
        Guard guard(self.regions_lock);
        for (hxa_mem *mem : self.unregistered) {
            if (std::find(self.regions.begin(), self.regions.end(), mem) == self.regions.end()) continue;
            mem->refusal = outcome;
            mem->state = hxa_mem::REFUSED;
            waiters.insert(waiters.end(), mem->waiters.begin(), mem->waiters.end());
            mem->waiters.clear();
        }
        self.unregistered.clear();
    }
    for (hxa_op *op : waiters) finish(self.sink, op, outcome);
}

// Return true if HIXL has deregistered the memory, or never knew it.
bool deregister(hxa_instance &self, hxa_mem *mem) {
    if (mem->handle == nullptr || self.over || self.started == 0) return true;
    const auto known = self.handles.find(mem->handle);
    if (known == self.handles.end()) return true;
    if (known->second == 1) {
        // HIXL is asked once even while there are connections: one of the back-ends allows it.
        const bool alone = self.connections == 0;
        if (!alone && mem->asked) return false;
        mem->asked = true;
        CallLock::Control control(self.call_lock);
        Call call(self, "DeregisterMem");
        const bool gone = !call.allowed || self.library.deregister_mem(&self.hixl, mem->handle) == abi::SUCCESS;
        if (!gone && !alone) return false;
    }
    if (--known->second == 0) self.handles.erase(known);
    return true;
}

// Return true if some memory could not be deregistered yet.
bool release_retired(hxa_instance &self) {
    for (size_t i = 0; i < self.retired.size();) {
        hxa_mem *mem = self.retired[i];
        if (!deregister(self, mem)) {
            i++;
            continue;
        }
        self.retired.erase(self.retired.begin() + static_cast<std::ptrdiff_t>(i));
        forget(self, mem);
    }
    return !self.retired.empty();
}

void set_pause(hxa_instance &self, bool wanted) {
    self.pause.wanted = wanted;
    wake_endpoints(self);
}

void end_pause(hxa_instance &self) {
    if (self.pause.wanted != 0) set_pause(self, false);
    self.pause.since = self.pause.length = 0;
}

// HIXL refuses to deregister memory while there are outgoing connections, so that all of them have to be ended at one
// moment: when they happen to be idle, or, if that never comes, by holding them up for a while.
uint64_t pause_connections(hxa_instance &self, uint64_t now) {
    Pause &pause = self.pause;
    if (pause.since == 0) {
        pause.since = now;
        pause.interval = INTERVAL;
    }
    if (pause.wanted != 0) {
        if (now < pause.until) return now + INTERVAL;
        // Some transfer takes long.
        pause.length = std::min(std::max(pause.length * 2, SECOND), NO_PAUSE_MOST);
        pause.since = now + pause.length;
        pause.interval = INTERVAL;
        set_pause(self, false);
        return now + INTERVAL;
    }
    const auto endpoints = self.all_endpoints();
    const bool idle = std::all_of(endpoints.begin(), endpoints.end(), [](const auto &each) { return each->idle(); });
    if (idle || now > pause.since + PAUSE_AFTER) {
        pause.until = now + PAUSE_FOR;
        set_pause(self, true);
        return now + INTERVAL;
    }
    pause.interval = std::min(pause.interval * 2, INTERVAL_MOST);
    return now + pause.interval;
}

}  // namespace

// Register memory that came before start, and deregister memory that was released.
uint64_t memory_turn(hxa_instance &self, uint64_t now) {
    if (self.started != 0 && !self.over && !self.unregistered.empty()) {
        std::vector<hxa_mem *> taken;
        taken.swap(self.unregistered);
        for (hxa_mem *mem : taken) register_one(self, mem);
    }
    if (self.start_failed || self.over) refuse_unregistered(self);
    if (release_retired(self)) return pause_connections(self, now);
    end_pause(self);
    return NEVER;
}

// ---- the loop -------------------------------------------------------------------------------------------------------

namespace {

hxa_mem *adopt(hxa_instance *self, std::unique_ptr<hxa_mem> mem) {
    {
        Guard guard(self->regions_lock);
        self->regions.push_back(mem.get());
    }
    self->count.memories++;
    hxa_mem *out = mem.release();
    self->memory->post([self, out] {
        if (self->started != 0 && !self->over) register_one(*self, out);
        else self->unregistered.push_back(out);
    });
    return out;
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
    void *base = host_alloc(*self, size, *mem);
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

int mem_export(hxa_mem *mem, uint32_t rights, hxa_metadata *metadata) {
    if (mem->link != nullptr || rights == 0 || (rights & ~(HXA_RIGHT_READ | HXA_RIGHT_WRITE)) != 0)
        return -HXA_E_INVALID;
    if ((rights & ~mem->rights) != 0) return -HXA_E_RIGHTS;
    const uint32_t state = mem->state;
    if (state == hxa_mem::PENDING) return -HXA_E_BUSY;
    if (state == hxa_mem::REFUSED) return -mem->refusal.status;
    if (state == hxa_mem::RETIRED) return -HXA_E_INVALID;
    const MemMetadata about = {MEM_MAGIC, VERSION,     mem->self->token, mem->address,
                           mem->size, mem->number, mem->kind,        rights};
    std::memset(metadata, 0, sizeof *metadata);
    metadata->len = sizeof about;
    std::memcpy(metadata->data, &about, sizeof about);
    return 0;
}

// Nothing is mapped: HIXL and each transfer check the numbers of the peer's metadata.
int mem_import(hxa_link *link, const hxa_metadata *metadata, uint64_t size, uint32_t rights, hxa_mem **made, hxa_op *op) {
    (void)op;
    MemMetadata about;
    for (uint32_t i = 0; i < metadata->nfds; i++) close(metadata->fds[i]);
    if (link->state != hxa_link::UP || link->down != 0) return -HXA_E_LINK;
    if (size == 0 || rights == 0 || (rights & ~(HXA_RIGHT_READ | HXA_RIGHT_WRITE)) != 0) return -HXA_E_INVALID;
    if (metadata->len != sizeof about || metadata->nfds != 0) return -HXA_E_PROTOCOL;
    std::memcpy(&about, metadata->data, sizeof about);
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
    link->endpoint->has_registered(about.number);
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
