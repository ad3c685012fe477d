#include "instance.hpp"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>

#include "hxa_retry.h"
#include "link.hpp"

namespace hx {

namespace {

uint64_t random_word() {
    uint64_t word;
    if (HXA_RETRY(getrandom(&word, sizeof word, 0)) != sizeof word)
        word = clock_now() ^ static_cast<uint64_t>(getpid()) << 40;
    return word;
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

}  // namespace hx

using namespace hx;

hxa_instance::hxa_instance(Options wanted, Library loaded, const hxa_sink &to, const Duties &duties)
    : sink(to),
      options(std::move(wanted)),
      library(std::move(loaded)),
      pool(options.threads, options.spin_us * US, [this] { enter_context(); }),
      token(random_word()) {
    pool.complain = [this](const char *line) { warn(nullptr, line); };
    const auto strand = [this](Duties::Duty duty) {
        return std::make_shared<FunctionStrand>(pool, [this, duty](uint64_t now) { return duty(*this, now); });
    };
    life = strand(duties.life);
    memory = strand(duties.memory);
    notifications = strand(duties.notifications);
    // The driver works in the context of the caller, unless a device was asked for.
    void *current = nullptr;
    if (library.acl.there() && options.device < 0 && library.acl.get_context(&current) == 0 && current != nullptr) {
        context = current;
        context_state = CONTEXT_MADE;
    }
    library.construct(&hixl);
}

hxa_instance::~hxa_instance() {
    pool.stop();
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

void hxa_instance::send(const hxa_link *link, Message word, const std::string &body) {
    event(link, HXA_EVENT_MESSAGE, std::string(1, static_cast<char>(word)) + body);
}

std::vector<std::shared_ptr<Endpoint>> hxa_instance::all_endpoints() {
    std::vector<std::shared_ptr<Endpoint>> out;
    Guard guard(lock);
    for (const auto &entry : endpoints) out.push_back(entry.second);
    return out;
}

// HIXL wants the context of Initialize on every thread that calls it.  Without one it leaves its own private one behind,
// which dangles after Finalize.
void hxa_instance::enter_context() {
    const Acl &acl = library.acl;
    if (!acl.there()) return;
    uint32_t none = NO_CONTEXT;
    if (context_state.compare_exchange_strong(none, MAKING_CONTEXT)) {
        if (acl.init != nullptr) acl.init(nullptr);  // a second call only answers that it is one
        const int32_t device = options.device < 0 ? 0 : options.device;
        void *made = nullptr;
        const int error = acl.set_device(device);
        if (error == 0 && acl.get_context(&made) == 0) context = made;
        else
            warn(nullptr, text("hixl: aclrtSetDevice(%d) answered %d; working without a context (no NPU visible?)",
                              device, error));
        context_state = CONTEXT_MADE;
        pool.reenter();  // threads that came meanwhile have none yet
    }
    if (context_state == CONTEXT_MADE && context != nullptr) acl.set_context(context);
}
