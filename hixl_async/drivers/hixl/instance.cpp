// One engine of HIXL: opening, Initialize, Finalize, the context of its threads.
#include "instance.hpp"

#include <netinet/in.h>
#include <arpa/inet.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "route.hpp"

namespace hx {

namespace {

constexpr size_t SCRATCH_WORDS = 8192;
constexpr int PORTS_TO_TRY = 8;

uint64_t random_word() {
    uint64_t word;
    if (getrandom(&word, sizeof word, 0) != sizeof word) word = clock_now() ^ static_cast<uint64_t>(getpid()) << 40;
    return word;
}

// 0 if somebody can listen there, or the errno.  Port 0 becomes one that is free now; somebody may take it before HIXL
// does.
int probe(const std::string &ip, uint16_t &port) {
    struct sockaddr_storage address = {};
    socklen_t size;
    struct sockaddr_in *four = reinterpret_cast<struct sockaddr_in *>(&address);
    struct sockaddr_in6 *six = reinterpret_cast<struct sockaddr_in6 *>(&address);
    if (inet_pton(AF_INET, ip.c_str(), &four->sin_addr) == 1) {
        address.ss_family = AF_INET;
        four->sin_port = htons(port);
        size = sizeof *four;
    } else {
        inet_pton(AF_INET6, ip.c_str(), &six->sin6_addr);
        address.ss_family = AF_INET6;
        six->sin6_port = htons(port);
        size = sizeof *six;
    }
    const int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return errno;
    const int on = 1;
    if (port != 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // connections of before are no listener
    int error = 0;
    if (bind(fd, reinterpret_cast<struct sockaddr *>(&address), size) != 0
        || getsockname(fd, reinterpret_cast<struct sockaddr *>(&address), &size) != 0)
        error = errno;
    else port = ntohs(address.ss_family == AF_INET ? four->sin_port : six->sin6_port);
    close(fd);
    return error;
}

// Empty, or why HIXL could not listen: it would say no more than FAILED.
std::string place_problem(const Options &options) {
    uint16_t port = options.port;
    const int error = probe(options.ip, port);
    if (error == EADDRNOTAVAIL) return text("hixl: hixl_ip=%s: this machine has no such address", options.ip.c_str());
    if (error != EADDRINUSE && error != EACCES) return "";  // HIXL may fare better
    return text("hixl: hixl_port=%u: HIXL cannot listen at %s: %s", options.port,
                address_text(options.ip, options.port).c_str(), std::strerror(error));
}

// As much of it as there is room for.
void copy_text(const std::string &from, char *to, size_t size) {
    if (size == 0) return;
    const size_t n = from.size() < size ? from.size() : size - 1;
    std::memcpy(to, from.data(), n);
    to[n] = '\0';
}

}  // namespace

std::string text(const char *format, ...) {
    char space[400];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(space, sizeof space, format, arguments);
    va_end(arguments);
    return space;
}

void finish(const hxa_sink &sink, hxa_op *op, const Outcome &outcome) {
    op->status = outcome.status;
    op->native = outcome.native;
    op->scope = outcome.scope;
    hxa_finish(&sink, op);
}

// ---- ledger ---------------------------------------------------------------------------------------------------------

namespace {
constexpr unsigned INDEX_BITS = 24;
}

Flight *Ledger::begin(Route *route) {
    Guard guard(lock);
    if (free_.empty()) {
        all_.emplace_back();
        all_.back().index = static_cast<uint32_t>(all_.size() - 1);
        free_.push_back(&all_.back());
    }
    Flight *flight = free_.back();
    free_.pop_back();
    const uint32_t index = flight->index;
    *flight = Flight();
    flight->index = index;
    flight->route = route;
    flight->token = ++generation_ << INDEX_BITS | index;
    count.fetch_add(1, std::memory_order_relaxed);
    return flight;
}

void Ledger::end(Flight *flight) {
    Guard guard(lock);
    flight->token = 0;
    free_.push_back(flight);
    count.fetch_sub(1, std::memory_order_relaxed);
}

Flight *Ledger::find(uint64_t token) {
    const uint64_t index = token & ((1u << INDEX_BITS) - 1);
    if (token == 0 || index >= all_.size()) return nullptr;
    Flight *flight = &all_[index];
    return flight->token == token ? flight : nullptr;
}

}  // namespace hx

// ---- the object -----------------------------------------------------------------------------------------------------

using namespace hx;

hxa_instance::hxa_instance(Options wanted, Library loaded, const hxa_sink &to)
    : sink(to),
      options(std::move(wanted)),
      library(std::move(loaded)),
      crew(options.threads, options.spin_us * US, [this] { enter(); }),
      token(random_word()) {
    crew.complain = [this](const char *line) { warn(nullptr, line); };
    life = std::make_shared<Calls>(crew, [this](uint64_t now) { return end(now); });
    memory = std::make_shared<Calls>(crew, [this](uint64_t now) { return let_go(now); });
    notes = std::make_shared<Calls>(crew, [this](uint64_t now) { return fetch(now); });
    // A context of the caller's is the one to work in, unless a device was asked for.
    void *current = nullptr;
    if (library.acl.there() && options.device < 0 && library.acl.get_context(&current) == 0 && current != nullptr) {
        context = current;
        context_state = 2;
    }
    library.construct(&hixl);
}

hxa_instance::~hxa_instance() {
    crew.stop();
    if (scratch != nullptr) munmap(scratch, SCRATCH_WORDS * sizeof(uint64_t));
}

void hxa_instance::event(const hxa_link *link, uint32_t kind, const std::string &data, int32_t status) {
    hxa_event out = {};
    out.link = link != nullptr ? link->cookie : 0;
    out.kind = kind;
    out.status = status;
    out.data = data.data();
    out.data_len = static_cast<uint32_t>(data.size());
    sink.event(sink.ctx, &out);
}

void hxa_instance::log(const hxa_link *link, const std::string &line) { event(link, HXA_EVENT_LOG, line); }

void hxa_instance::warn(const hxa_link *link, const std::string &line) { event(link, HXA_EVENT_LOG, line, 1); }

void hxa_instance::say(const hxa_link *link, Word word, const std::string &body) {
    event(link, HXA_EVENT_MESSAGE, std::string(1, static_cast<char>(word)) + body);
}

std::vector<std::shared_ptr<Route>> hxa_instance::all_routes() {
    std::vector<std::shared_ptr<Route>> out;
    Guard guard(lock);
    for (const auto &entry : routes) out.push_back(entry.second);
    return out;
}

// On each thread of the crew: HIXL wants the context of Initialize on every thread that calls it, and without one
// leaves its own private one behind, which dangles after Finalize.
void hxa_instance::enter() {
    const Acl &acl = library.acl;
    if (!acl.there()) return;
    uint32_t first = 0;
    if (context_state.compare_exchange_strong(first, 1)) {
        if (acl.init != nullptr) acl.init(nullptr);  // a second time it only says so
        const int32_t device = options.device < 0 ? 0 : options.device;
        void *made = nullptr;
        const int error = acl.set_device(device);
        if (error == 0 && acl.get_context(&made) == 0) context = made;
        else
            warn(nullptr, text("hixl: aclrtSetDevice(%d) answered %d; working without a context (no NPU visible?)",
                              device, error));
        context_state = 2;
        crew.reenter();  // threads that came meanwhile have none yet
    }
    if (context_state == 2 && context != nullptr) acl.set_context(context);
}

// ---- start ----------------------------------------------------------------------------------------------------------

Outcome hxa_instance::initialize() {
    if (closing != 0 || started != 0) return {HXA_E_INVALID, 0, HXA_SCOPE_OP};
    const std::string npu = library.acl.npu();
    if (options.backend == Backend::COMM && options.backend_on(npu) != Backend::COMM)
        return {HXA_E_UNSUPPORTED, native_of(Backend::COMM, Backend::AUTO), HXA_SCOPE_OP};
    uint32_t native = abi::FAILED;
    for (int i = 0; i < PORTS_TO_TRY; i++) {
        uint16_t port = options.port;
        const int error = port == 0 ? probe(options.ip, port) : 0;
        if (error != 0) return {HXA_E_SYSTEM, error, HXA_SCOPE_OP};
        id = address_text(options.ip, port);
        abi::Options settings;
        for (const auto &entry : options.hixl) settings.emplace(library.text(entry.first), library.text(entry.second));
        Call call(*this, "Initialize");
        native = library.initialize(&hixl, library.text(id), settings);
        if (native != abi::FAILED || options.port != 0) break;  // FAILED: the port was taken meanwhile
    }
    if (native != abi::SUCCESS) {
        warn(nullptr, text("hixl: Initialize at %s (hixl_ip, hixl_port) answered %u", id.c_str(), native));
        Outcome outcome = outcome_of(native);
        if (outcome.status == HXA_E_LINK) outcome.status = HXA_E_UNSUPPORTED;  // there is no link yet
        return outcome;
    }

    // One batch query tells whether there are any here, and with it what requests are.
    uint32_t answer = abi::UNSUPPORTED;
    if (library.transfer_statuses != nullptr) {
        abi::GetTransferStatusArgs arguments = {};
        arguments.max_query_count = UINT32_MAX;
        arguments.skip_waiting = true;
        std::vector<abi::TransferResult> none;
        Call call(*this, "GetTransferStatus");
        answer = library.transfer_statuses(&hixl, arguments, none);
    }
    const bool able = answer == abi::SUCCESS;
    batch = able;
    settle_backend(npu, answer);
    gate.open(able || library.transfer_statuses == nullptr);

    void *page =
        mmap(nullptr, SCRATCH_WORDS * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return {HXA_E_NOMEM, 0, HXA_SCOPE_OP};
    scratch = static_cast<uint64_t *>(page);
    abi::MemDesc about = {};
    about.addr = reinterpret_cast<uintptr_t>(page);
    about.len = SCRATCH_WORDS * sizeof(uint64_t);
    void *handle = nullptr;
    {
        Call call(*this, "RegisterMem");
        native = library.register_mem(&hixl, about, abi::MEM_HOST, handle);
    }
    if (native == abi::SUCCESS) {
        Guard guard(slots_lock);
        for (int32_t i = SCRATCH_WORDS; i-- > 0;) slots.push_back(i);
    } else {
        warn(nullptr, text("hixl: host memory cannot be registered (%u), so that signals cannot be sent", native));
    }
    started = 1;
    log(nullptr, "hixl: " + library.path + " listens at " + id + ", back-end " + word_of(backend));
    return {};
}

// Only one of the back-ends answers the batch query, so that its answer has the last word.
void hxa_instance::settle_backend(const std::string &npu, uint32_t answer) {
    backend = options.backend_on(npu);
    backend_by = !options.chosen_by.empty() ? options.chosen_by : npu.empty() ? "HIXL's default" : npu;
    const bool asked = library.transfer_statuses != nullptr, answers = asked && answer == abi::SUCCESS;
    if (answers ? backend != Backend::CS : asked && answer == abi::UNSUPPORTED && backend == Backend::CS) {
        backend = answers ? Backend::CS : Backend::COMM;
        backend_by = "HIXL, whatever " + backend_by + " says";
    }
    fabric = backend == Backend::FAB;
}

void hxa_instance::begin(hxa_op *op) {
    const Outcome outcome = initialize();
    if (!outcome.ok() && started == 0) {
        start_failure = outcome;
        start_failed = true;
    }
    memory->wake();  // what was registered before, or refused
    finish(sink, op, outcome);
}

// ---- the end --------------------------------------------------------------------------------------------------------

// The life strand, once shutdown was asked for: Finalize, when nobody is inside another call any more.
uint64_t hxa_instance::end(uint64_t now) {
    if (!ending || over) return NEVER;
    if (started != 0) {
        if (connections != 0) return now + MS;
        finalizing = 1;
        if (inside != 0) return now + MS;
        InCall in("Finalize");
        library.finalize(&hixl);
    }
    finalizing = 1;
    over = true;
    memory->wake();
    for (hxa_op *op : enders) finish(sink, op, {});
    enders.clear();
    Guard guard(over_lock);
    over_told = true;
    over_changed.all();
    return NEVER;
}

namespace hx {

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
    if (status == 0 && !(reason = place_problem(wanted)).empty()) status = -HXA_E_SYSTEM;
    if (status != 0) {
        copy_text(reason, error, error_len);
        return status;
    }
    *made = new hxa_instance(std::move(wanted), std::move(library), *sink);
    return 0;
}

void instance_close(hxa_instance *self) {
    for (int i = 0; i < 1000 && self->count.memories != 0; i++) {  // released just now, and on their way to the strand
        const struct timespec moment = {0, static_cast<long>(MS)};
        nanosleep(&moment, nullptr);
    }
    if (self->started != 0) {
        self->closing = 1;
        self->life->post([self] { self->ending = true; });
        Guard guard(self->over_lock);
        while (!self->over_told) self->over_changed.wait(self->over_lock, NEVER);
    }
    self->crew.stop();
    self->library.destroy(&self->hixl);
    delete self;
}

// In the child.  Threads did not come along; what HIXL holds is out of reach.
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
    out->threads = self->crew.threads();
}

int instance_start(hxa_instance *self, hxa_op *op) {
    self->life->post([self, op] { self->begin(op); });
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
