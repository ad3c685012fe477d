// What the parts of the HIXL driver share.
//
//   ../_hixl.cpp   the table
//   abi            our mirror of HIXL's types;  library: finding and loading it;  options, json: what `open` takes
//   status         codes and what to do about them
//   crew           threads, strands, the watchdog;  gate: which calls exclude each other
//   instance       one engine: its life, its context, statistics;  about: what people may want to know of it
//   memory         mem_*: registered here, imported from peers; letting go of them
//   route          the way to one remote engine: connecting, cycling, failing;  sockets: ending calls that wait for it
//   flight         requests of a route: submitting, asking, finishing
//   link           link_*: one peer's use of a route; cards, messages, stop, fence, poll
//   notes          numbered records in frames;  courier: sending and fetching them
//
// Threads.  The loop (T2) never calls HIXL and never waits for a thread that may be inside it: it pushes ops on a
// lock-free stack and posts tasks.  Everything of a route belongs to its strand; what blocks runs on its second strand,
// `control`. Locks are held for moments, never around a call of HIXL or of the sink.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "crew.hpp"
#include "gate.hpp"
#include "hxa_driver.h"
#include "library.hpp"
#include "notes.hpp"
#include "options.hpp"
#include "status.hpp"
#include "sync.hpp"

namespace hx {

class Route;

constexpr uint64_t DESCRIPTORS = 1 << 16;  // most in one batch
constexpr uint32_t WINDOW = 256;           // frames that a peer may have under way to us
constexpr uint32_t WINDOW_LEAST = 16;      // less is not worth the way by HIXL
constexpr uint32_t QUEUE = 3584;           // all windows together: HIXL's queue of 4096, and some air

// ---- cards: what travels in hxa_card.data ---------------------------------------------------------------------------

constexpr uint32_t VERSION = 2, LINK_MAGIC = 0x4b4e4c48, MEM_MAGIC = 0x4d454d48;
constexpr size_t ID_BYTES = 64;

struct LinkCard {
    uint32_t magic, version;
    uint64_t token;          // of the engine: its life, not its address
    uint64_t tag;            // how frames for this link are addressed
    uint64_t registrations;  // memories that whoever connects now can see
    uint32_t window;         // frames that we may have under way to it
    uint16_t control;        // its notifications come by the control connection
    uint16_t backend;        // Backend: ours must be the same
    char id[ID_BYTES];       // "ip:port" of HIXL
};

struct MemCard {
    uint32_t magic, version;
    uint64_t token;
    uint64_t address, size, number;
    uint32_t kind, rights;
};

// ---- messages to the driver at the other end ------------------------------------------------------------------------

enum class Word : uint8_t {
    WAKE = 1,    // seq: notifications up to it are on their way by HIXL
    CREDIT = 2,  // seq, cost: all up to it were handed out
    LOST = 3,    // seq: this one never came
    PIECES = 4,  // notifications themselves
    FENCE = 5,   // let go of my memory
    FENCED = 6,  // I did, and shall not touch it again
    GOODBYE = 7  // I stopped the link, and shall not touch your memory again
};

// ---- ops ------------------------------------------------------------------------------------------------------------

enum Claim : uint32_t { QUEUED = 0, STARTED = 1, CANCELLED = 2, CLAIM = 3, ABANDONED = 4 };
enum Stage : uint8_t { DATA = 0, SIGNAL = 1, NOTE = 2, STAGE = 3, TOLD = 128 };

// One accepted op, in its scratch words.
struct Job {
    hxa_op *next;  // in one list at a time
    hxa_link *link;
    const hxa_batch *batch;
    std::atomic<uint64_t> landed;  // bytes
    uint64_t cursor;               // the next descriptor: group of kinds << 32 | index
    std::atomic<uint32_t> claim;   // QUEUED until the first byte may move, or it is CANCELLED; and ABANDONED
    uint16_t parts;                // requests in flight
    uint8_t groups;                // bit (local kind * 2 + remote kind): there are such descriptors
    uint8_t stage;
};
static_assert(sizeof(Job) <= sizeof(hxa_op::scratch), "a job fits into the scratch words");

inline Job &job_of(hxa_op *op) { return *reinterpret_cast<Job *>(op->scratch); }
inline const Job &job_of(const hxa_op *op) { return *reinterpret_cast<const Job *>(op->scratch); }
constexpr uint64_t CURSOR_END = UINT64_MAX;

// First in, first out, through Job::next.
struct OpList {
    hxa_op *first = nullptr, *last = nullptr;
    bool empty() const { return first == nullptr; }
    void push(hxa_op *op);
    void push_front(hxa_op *op);
    hxa_op *pop();
    bool remove(hxa_op *op);
};

// ---- requests -------------------------------------------------------------------------------------------------------

// One request inside HIXL.  Handles are recycled there, so that this is what a request is known by here.
struct Flight {
    void *request = nullptr;
    hxa_op *op = nullptr;
    Route *route = nullptr;
    Flight *next = nullptr, *prev = nullptr;  // of the route, oldest first
    Flight *answered = nullptr;               // the next on the route's stack of answers
    uint64_t token = 0;                       // under the ledger's lock; 0: free
    uint64_t bytes = 0;
    abi::TransferStatus answer = abi::WAITING;
    int32_t slot = -1;   // of the scratch page
    uint32_t index = 0;  // in the ledger
};

// All flights of an engine, by tokens that HIXL carries along as user_data.
class Ledger {
  public:
    Flight *begin(Route *route);
    void end(Flight *flight);
    // Under `lock`: the flight of a token, or nullptr if it ended.
    Flight *find(uint64_t token);
    Mutex lock;
    std::atomic<uint32_t> count{0};

  private:
    std::deque<Flight> all_;
    std::vector<Flight *> free_;
    uint64_t generation_ = 0;
};

// ---- counters -------------------------------------------------------------------------------------------------------

struct Counters {
    std::atomic<uint64_t> ops_queued{0}, bytes_read{0}, bytes_written{0}, notes_sent{0}, notes_received{0},
        signals_sent{0}, wakes_sent{0}, wakes_received{0}, links{0}, memories{0};
};

// ---- strands that ask other objects ---------------------------------------------------------------------------------

class Calls : public Strand {  // runs a function each turn, after its tasks
  public:
    using Work = std::function<uint64_t(uint64_t now)>;
    using Notice = std::function<void(const char *call, uint64_t ns, bool over)>;
    explicit Calls(Crew &crew, Work work = nullptr, Notice notice = nullptr)
        : Strand(crew),
          work_(std::move(work)),
          notice_(std::move(notice)) {}

  protected:
    uint64_t turn(uint64_t now) override {
        run_tasks();
        return work_ ? work_(now) : NEVER;
    }
    void stuck(const char *call, uint64_t ns) override {
        if (notice_) notice_(call, ns, false);
    }
    void moving(const char *call, uint64_t ns) override {
        if (notice_) notice_(call, ns, true);
    }

  private:
    const Work work_;
    const Notice notice_;
};

void finish(const hxa_sink &sink, hxa_op *op, const Outcome &outcome);
inline std::string pack(uint64_t value) { return std::string(reinterpret_cast<const char *>(&value), sizeof value); }
std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace hx

// ---- memory ---------------------------------------------------------------------------------------------------------

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
    bool asked = false;   // HIXL refused to let go of it once
    size_t mapped = 0;    // mem_alloc by mmap
    bool pinned = false;  // mem_alloc by aclrtMallocHost
};

// ---- links ----------------------------------------------------------------------------------------------------------

struct hxa_link {
    enum State : uint32_t { NEW, UP, STOPPED };
    hxa_instance *self = nullptr;
    uint64_t cookie = 0;
    uint64_t tag = 0, peer_tag = 0, peer_token = 0;
    uint32_t window = 0, peer_window = 0;
    bool peer_control = false;         // the peer sends by the control connection
    std::shared_ptr<hx::Route> route;  // from link_connect on

    std::atomic<uint32_t> state{NEW};
    std::atomic<uint32_t> fenced{0};  // the peer wants us to stay away
    std::atomic<uint32_t> down{0};    // LINK_DOWN was reported, or is about to

    hx::Outbox out;
    hx::Inbox in;
    int fd = -1;  // eventfd: poll has work
    std::atomic<uint32_t> armed{1};

    // The end, as poll shall tell it.
    hx::Mutex lock;
    bool end_pending = false;
    uint64_t end_after = 0;  // once all notifications up to this are handed out
    std::string end_text;

    // The loop's.
    hxa_op *fence = nullptr;
    bool peer_away = false;  // it said FENCED or GOODBYE, or is dead
    bool stopped = false;    // a stop has finished

    // The route's strand's.
    bool attached = false, stopping = false, leaving = false, fencing = false;
    bool lost = false;              // given up
    std::atomic<bool> dead{false};  // the caller's word
    hxa_op *joining = nullptr;      // link_connect
    std::vector<hxa_op *> stops;
    uint64_t patience = hx::NEVER;  // a stop or fence waits this long for requests before the link is cut

    // The control strand's.
    bool by_control = false;  // sends by the control connection
    bool told_long = false;   // and said so, of a long one
    uint32_t losses = 0, breaks = 0;
    uint64_t sent_at = 0;
    uint64_t retry_at = 0, retry_ns = 0;
    std::vector<hx::Entry> held;  // numbered, and refused for lack of room
};

// ---- the engine -----------------------------------------------------------------------------------------------------

struct hxa_instance {
    hxa_instance(hx::Options options, hx::Library library, const hxa_sink &sink);
    ~hxa_instance();

    hxa_sink sink;
    const hx::Options options;
    const hx::Library library;
    hx::abi::Hixl hixl{};
    hx::Crew crew;
    hx::Gate gate;
    hx::Ledger ledger;
    hx::Counters count;
    const uint64_t token;
    std::string id;  // set by start, before `started`, as the next three
    hx::Backend backend = hx::Backend::AUTO;
    std::string backend_by;  // what chose it
    bool fabric = false;     // it is FAB
    std::shared_ptr<hx::Calls> life, memory, notes;

    hx::Outcome start_failure;  // why it never will be; set before `start_failed`
    std::atomic<bool> start_failed{false};
    std::atomic<uint32_t> started{0};     // Initialize is done
    std::atomic<uint32_t> closing{0};     // shutdown was asked for
    std::atomic<uint32_t> finalizing{0};  // no call may begin any more
    std::atomic<uint32_t> inside{0};      // calls that run
    std::atomic<uint32_t> batch{0};       // the batch query works
    std::atomic<uint64_t> registrations{0};
    std::atomic<uint32_t> connections{0};  // outgoing links of HIXL
    std::atomic<uint32_t> recess{0};       // all routes are to disconnect once they are idle
    std::atomic<uint64_t> notes_at{0};     // when notifications were last heard of
    std::atomic<uint32_t> listeners{0};    // links whose peers send by HIXL

    hx::Mutex lock;
    std::map<std::string, std::shared_ptr<hx::Route>> routes;  // under lock, as the next
    std::unordered_map<uint64_t, hxa_link *> links;            // by tag
    uint32_t granted = 0;                                      // windows; the loop's

    // Words of the scratch page, from which signals are written.
    uint64_t *scratch = nullptr;
    hx::Mutex slots_lock;
    std::vector<int32_t> slots;

    // The context of threads that call HIXL; see instance.cpp.
    std::atomic<void *> context{nullptr};
    std::atomic<uint32_t> context_state{0};

    // The life strand's.
    std::vector<hxa_op *> enders;  // shutdown
    bool ending = false;
    std::atomic<bool> over{false};  // nothing of HIXL is left
    hx::Mutex over_lock;
    hx::Condition over_changed;
    bool over_told = false;  // under over_lock

    // The memory strand's.
    std::vector<hxa_mem *> unregistered, retired;
    std::map<void *, uint32_t> handles;  // HIXL gives one for the same range twice
    uint64_t overdue_at = 0;             // the notes strand's
    uint64_t recess_since = 0, recess_until = 0, recess_pause = 0, recess_look = 0;
    hx::Mutex regions_lock;
    std::vector<hxa_mem *> regions;  // ours and not yet let go of

    void log(const hxa_link *link, const std::string &text);
    void warn(const hxa_link *link, const std::string &text);
    void event(const hxa_link *link, uint32_t kind, const std::string &data, int32_t status = HXA_OK);
    void say(const hxa_link *link, hx::Word word, const std::string &body = {});
    std::vector<std::shared_ptr<hx::Route>> all_routes();
    void *host_alloc(uint64_t size, hxa_mem &mem);
    int lock_pages(uint64_t size, void *&base);
    void host_free(const hxa_mem &mem, void *address);
    // memory.cpp
    void register_one(hxa_mem *mem);
    void refuse_unregistered();
    uint64_t let_go(uint64_t now);
    // courier.cpp
    uint64_t fetch(uint64_t now);
    // instance.cpp
    void enter();
    void begin(hxa_op *op);
    hx::Outcome initialize();
    void settle_backend(const std::string &npu, uint32_t answer);
    uint64_t end(uint64_t now);
};

namespace hx {

// Around each call of HIXL: Finalize must meet no other, and the watchdog wants to know.
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
