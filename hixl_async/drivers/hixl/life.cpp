#include "life.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "address.hpp"
#include "link.hpp"
#include "memory.hpp"
#include "notification_io.hpp"
#include "operation.hpp"

namespace hx {

namespace {

constexpr int PORTS_TO_TRY = 8;

// Return why HIXL could not listen, or an empty string: its own answer is only FAILED.
std::string listen_problem(const Options &options) {
    uint16_t port = options.port;
    const int error = probe_address(options.ip, port);
    if (error == EADDRNOTAVAIL) return text("hixl: hixl_ip=%s: this machine has no such address", options.ip.c_str());
    if (error != EADDRINUSE && error != EACCES) return "";  // HIXL may be able to
    return text("hixl: hixl_port=%u: HIXL cannot listen at %s: %s", options.port,
                address_text(options.ip, options.port).c_str(), std::strerror(error));
}

// Copy `from` to `to`, cut where its `size` bytes end, with a final zero.
void copy_text(const std::string &from, char *to, size_t size) {
    if (size == 0) return;
    const size_t n = from.size() < size ? from.size() : size - 1;
    std::memcpy(to, from.data(), n);
    to[n] = '\0';
}

// ---- start ----------------------------------------------------------------------------------------------------------

// Initialize at `hixl_port`, or at a free port: HIXL answers FAILED where one was taken meanwhile.
Outcome initialize_hixl(hxa_instance &self) {
    const Options &options = self.options;
    const Library &library = self.library;
    uint32_t native = abi::FAILED;
    for (int i = 0; i < PORTS_TO_TRY; i++) {
        uint16_t port = options.port;
        const int error = port == 0 ? probe_address(options.ip, port) : 0;
        if (error != 0) return {HXA_E_SYSTEM, error, HXA_SCOPE_OP};
        self.id = address_text(options.ip, port);
        abi::Options settings;
        for (const auto &entry : options.hixl) settings.emplace(library.text(entry.first), library.text(entry.second));
        Call call(self, "Initialize");
        native = library.initialize(&self.hixl, library.text(self.id), settings);
        if (native != abi::FAILED || options.port != 0) break;
    }
    Outcome outcome = outcome_of(native);
    if (outcome.ok()) return outcome;
    self.warn(nullptr, text("hixl: Initialize at %s (hixl_ip, hixl_port) answered %u", self.id.c_str(), native));
    if (outcome.status == HXA_E_LINK) outcome.status = HXA_E_UNSUPPORTED;  // there is no link yet
    return outcome;
}

// Only one of the back-ends answers the batch query, so that its answer decides.
void settle_backend(hxa_instance &self, const std::string &npu, uint32_t answer) {
    const std::string &chosen_by = self.options.chosen_by;
    self.backend = self.options.backend_on(npu);
    self.backend_by = !chosen_by.empty() ? chosen_by : npu.empty() ? "HIXL's default" : npu;
    const bool asked = self.library.transfer_statuses != nullptr, answers = asked && answer == abi::SUCCESS;
    if (answers ? self.backend != Backend::CS
                : asked && answer == abi::UNSUPPORTED && self.backend == Backend::CS) {
        self.backend = answers ? Backend::CS : Backend::COMM;
        self.backend_by = "HIXL, against " + self.backend_by;
    }
    self.fabric = self.backend == Backend::FAB;
}

// One batch query shows if HIXL answers any here, and so which back-end this is.
void try_batch_query(hxa_instance &self, const std::string &npu) {
    uint32_t answer = abi::UNSUPPORTED;
    const bool exists = self.library.transfer_statuses != nullptr;
    if (exists) {
        abi::GetTransferStatusArgs arguments = {};
        arguments.max_query_count = UINT32_MAX;
        arguments.skip_waiting = true;
        std::vector<abi::TransferResult> none;
        Call call(self, "GetTransferStatus");
        answer = self.library.transfer_statuses(&self.hixl, arguments, none);
    }
    self.batch = answer == abi::SUCCESS;
    settle_backend(self, npu, answer);
    self.call_lock.open(answer == abi::SUCCESS || !exists);
}

// The scratch page, from which signals are written.
Outcome make_scratch(hxa_instance &self) {
    constexpr size_t BYTES = SCRATCH_WORDS * sizeof(uint64_t);
    void *page = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return {HXA_E_NOMEM, 0, HXA_SCOPE_OP};
    self.scratch = static_cast<uint64_t *>(page);
    abi::MemDesc about = {};
    about.addr = reinterpret_cast<uintptr_t>(page);
    about.len = BYTES;
    void *handle = nullptr;
    uint32_t native;
    {
        Call call(self, "RegisterMem");
        native = self.library.register_mem(&self.hixl, about, abi::MEM_HOST, handle);
    }
    if (native == abi::SUCCESS) {
        Guard guard(self.slots_lock);
        for (int32_t i = SCRATCH_WORDS; i-- > 0;) self.slots.push_back(i);
    } else {
        self.warn(nullptr,
                  text("hixl: host memory cannot be registered (%u), so that signals cannot be sent", native));
    }
    return {};
}

Outcome initialize(hxa_instance &self) {
    if (self.closing != 0 || self.started != 0) return {HXA_E_INVALID, 0, HXA_SCOPE_OP};
    const std::string npu = self.library.acl.npu();
    if (self.options.backend == Backend::COMM && self.options.backend_on(npu) != Backend::COMM)
        return {HXA_E_UNSUPPORTED, native_of(Backend::COMM, Backend::AUTO), HXA_SCOPE_OP};
    if (!self.options.unknown.empty())
        self.warn(nullptr, "hixl: this driver does not know the options " + self.options.unknown
                               + "; HIXL gets them as they are");
    Outcome outcome = initialize_hixl(self);
    if (!outcome.ok()) return outcome;
    try_batch_query(self, npu);
    outcome = make_scratch(self);
    if (!outcome.ok()) return outcome;
    self.started = 1;
    self.log(nullptr, "hixl: " + self.library.path + " listens at " + self.id + ", back-end " + word_of(self.backend));
    return {};
}

void start(hxa_instance &self, hxa_op *op) {
    const Outcome outcome = initialize(self);
    if (!outcome.ok() && self.started == 0) {
        self.start_failure = outcome;
        self.start_failed = true;
    }
    self.memory->wake();  // it registers memory that came before, or refuses it
    finish(self.sink, op, outcome);
}

// ---- the end --------------------------------------------------------------------------------------------------------

// The life strand's work after a call of shutdown: Finalize, when no other call runs any more.
uint64_t end_instance(hxa_instance &self, uint64_t now) {
    if (!self.ending || self.over) return NEVER;
    if (self.started != 0) {
        if (self.connections != 0) return now + MS;
        self.finalizing = 1;
        if (self.inside != 0) return now + MS;
        InCall in("Finalize");
        self.library.finalize(&self.hixl);
    }
    self.finalizing = 1;
    self.over = true;
    self.memory->wake();
    for (hxa_op *op : self.enders) finish(self.sink, op, {});
    self.enders.clear();
    Guard guard(self.over_lock);
    self.over_told = true;
    self.over_changed.all();
    return NEVER;
}

// Memory that was released just now may not have reached the strand yet: wait a bounded time.
void await_released_memory(hxa_instance *self) {
    const uint64_t end = clock_now() + SECOND;
    Guard guard(self->over_lock);
    while (self->count.memories != 0 && clock_now() < end) self->over_changed.wait(self->over_lock, end);
}

}  // namespace

// ---- the table's calls ----------------------------------------------------------------------------------------------

int instance_open(const hxa_option *options, size_t n, const hxa_sink *sink, hxa_instance **made, char *error,
                  size_t error_len) {
    std::string reason;
    Options wanted;
    int status = wanted.parse(options, n, reason);
    Library library;
    if (status == 0) status = library.load(wanted.library, reason);
    if (status == 0 && wanted.host_memory == HostMemory::PINNED && library.acl.malloc_host == nullptr) {
        reason = "hixl: host_memory=pinned: there is no libascendcl.so with aclrtMallocHost beside " + library.path;
        status = -HXA_E_UNSUPPORTED;
    }
    if (status == 0 && !(reason = listen_problem(wanted)).empty()) status = -HXA_E_SYSTEM;
    if (status != 0) {
        copy_text(reason, error, error_len);
        return status;
    }
    *made = new hxa_instance(std::move(wanted), std::move(library), *sink,
                             {end_instance, memory_turn, fetch_notifications});
    return 0;
}

void instance_close(hxa_instance *self) {
    await_released_memory(self);
    if (self->started != 0) {
        self->closing = 1;
        self->life->post([self] { self->ending = true; });
        Guard guard(self->over_lock);
        while (!self->over_told) self->over_changed.wait(self->over_lock, NEVER);
    }
    self->pool.stop();
    self->library.destroy(&self->hixl);
    delete self;
}

// In the child there are no threads, and what HIXL holds is out of reach.
void instance_after_fork(hxa_instance *self) {
    for (const auto &entry : self->links)
        if (entry.second->fd >= 0) close(entry.second->fd);
}

void instance_limits(hxa_instance *self, hxa_limits *out) {
    (void)self;
    *out = {};
    out->descriptors = DESCRIPTORS;
    out->note_bytes = NOTE_BYTES;
    out->alignment = 1;
}

void instance_stats(hxa_instance *self, hxa_stats *out) {
    const Counters &count = self->count;
    *out = {};
    out->ops_queued = count.ops_queued;
    out->bytes_read = count.bytes_read;
    out->bytes_written = count.bytes_written;
    out->notes_sent = count.notes_sent;
    out->notes_received = count.notes_received;
    out->signals_sent = count.signals_sent;
    out->wakes_sent = count.wakes_sent;
    out->wakes_received = count.wakes_received;
    out->links = count.links;
    out->memories = count.memories;
    out->threads = self->pool.threads();
}

int instance_start(hxa_instance *self, hxa_op *op) {
    self->life->post([self, op] { start(*self, op); });
    return HXA_PENDING;
}

int instance_shutdown(hxa_instance *self, hxa_op *op) {
    self->closing = 1;
    self->life->post([self, op] {
        if (self->over) return finish(self->sink, op, {});
        self->ending = true;
        self->enders.push_back(op);
    });
    return HXA_PENDING;
}

}  // namespace hx
