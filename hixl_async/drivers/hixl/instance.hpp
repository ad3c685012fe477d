// One engine of HIXL: the state that its parts share.
//
// Threads.  The loop (T2) never calls HIXL and never waits for a thread that may be inside it: it pushes ops on a
// lock-free stack and posts tasks.  Everything of an endpoint belongs to its strand; what blocks runs on its second
// strand, `control`.  Locks are held for moments, never around a call of HIXL or of the sink.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "call_lock.hpp"
#include "hxa_driver.h"
#include "library.hpp"
#include "options.hpp"
#include "protocol.hpp"
#include "request.hpp"
#include "status.hpp"
#include "sync.hpp"
#include "thread_pool.hpp"

namespace hx {

class Endpoint;

constexpr size_t SCRATCH_WORDS = 8192;

struct Counters {
    std::atomic<uint64_t> ops_queued{0}, bytes_read{0}, bytes_written{0}, notes_sent{0}, notes_received{0},
        signals_sent{0}, wakes_sent{0}, wakes_received{0}, links{0}, memories{0};
};

// The work of an instance's own strands: they answer when to run again, see Strand::turn.
struct Duties {
    using Duty = uint64_t (*)(hxa_instance &self, uint64_t now);
    Duty life, memory, notifications;
};

// HIXL refuses DeregisterMem while there are connections; see memory.cpp.
struct Pause {
    std::atomic<uint32_t> wanted{0};  // all endpoints are to disconnect once they are idle
    // The memory strand's.
    uint64_t since = 0, until = 0, length = 0, interval = 0;
};

std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace hx

struct hxa_instance {
    hxa_instance(hx::Options options, hx::Library library, const hxa_sink &sink, const hx::Duties &duties);
    ~hxa_instance();

    hxa_sink sink;
    const hx::Options options;
    const hx::Library library;
    hx::abi::Hixl hixl{};
    hx::ThreadPool pool;
    hx::CallLock call_lock;
    hx::RequestTable requests;
    hx::Counters count;
    const uint64_t token;
    std::string id;  // set by start, before `started`, as the next three
    hx::Backend backend = hx::Backend::AUTO;
    std::string backend_by;  // what chose it
    bool fabric = false;     // it is FAB
    std::shared_ptr<hx::FunctionStrand> life, memory, notifications;

    hx::Outcome start_failure;  // why it never will be; set before `start_failed`
    std::atomic<bool> start_failed{false};
    std::atomic<uint32_t> started{0};     // Initialize is done
    std::atomic<uint32_t> closing{0};     // shutdown was asked for
    std::atomic<uint32_t> finalizing{0};  // no call may begin any more
    std::atomic<uint32_t> inside{0};      // calls that run
    std::atomic<uint32_t> batch{0};       // the batch query works
    std::atomic<uint64_t> registrations{0};
    std::atomic<uint32_t> connections{0};  // outgoing links of HIXL
    std::atomic<uint64_t> notes_at{0};     // when notifications last came or were announced
    std::atomic<uint32_t> listeners{0};    // links whose peers send by HIXL
    hx::Pause pause;

    hx::Mutex lock;
    std::map<std::string, std::shared_ptr<hx::Endpoint>> endpoints;  // under lock, as the next
    std::unordered_map<uint64_t, hxa_link *> links;                  // by tag
    uint32_t granted = 0;                                            // windows; the loop's

    // Words of the scratch page, from which signals are written.
    uint64_t *scratch = nullptr;
    hx::Mutex slots_lock;
    std::vector<int32_t> slots;

    // The context of threads that call HIXL: none, one thread makes it, it is made.
    enum ContextState : uint32_t { NO_CONTEXT, MAKING_CONTEXT, CONTEXT_MADE };
    std::atomic<void *> context{nullptr};
    std::atomic<uint32_t> context_state{NO_CONTEXT};

    // The life strand's.
    std::vector<hxa_op *> enders;  // shutdown
    bool ending = false;
    std::atomic<bool> over{false};  // nothing of HIXL is left
    hx::Mutex over_lock;
    hx::Condition over_changed;  // or memory was released
    bool over_told = false;      // under over_lock

    // The memory strand's.
    std::vector<hxa_mem *> unregistered, retired;
    std::map<void *, uint32_t> handles;  // HIXL gives one for the same range twice
    hx::Mutex regions_lock;
    std::vector<hxa_mem *> regions;  // ours and not yet released

    uint64_t overdue_at = 0;  // the notifications strand's

    void log(const hxa_link *link, const std::string &text);
    void warn(const hxa_link *link, const std::string &text);
    void event(const hxa_link *link, uint32_t kind, const std::string &data, int32_t status = HXA_OK);
    void send(const hxa_link *link, hx::Message message, const std::string &body = {});
    std::vector<std::shared_ptr<hx::Endpoint>> all_endpoints();
    // Give this thread the context; return at once while another thread makes it.
    void enter_context();
};

namespace hx {

// Around each call of HIXL: Finalize must not overlap it, and the watchdog watches it.
class Call {
  public:
    Call(hxa_instance &self, const char *name, bool quiet = false) : self_(self), in_(name, quiet) {
        self_.inside.fetch_add(1);
        allowed = self_.finalizing.load() == 0;
    }
    ~Call() { self_.inside.fetch_sub(1); }
    bool allowed;

  private:
    hxa_instance &self_;
    InCall in_;
};

}  // namespace hx
