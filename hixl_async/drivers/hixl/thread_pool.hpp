// A `ThreadPool` runs `Strand`s: serial pieces of work, each run by one thread at a time.
//
// HIXL's calls block, some for minutes, so that a thread may be lost to one of them at any time.  The pool starts with
// one thread, adds another when work waits while all are stuck inside calls, and lets surplus ones end.  A watchdog does
// that, and notifies a strand that has been in one call for a second; it sleeps while there is nothing to watch.
#pragma once

#include <pthread.h>

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "sync.hpp"

namespace hx {

// A thread that takes no signals: those are for the threads of the program.  0, or an errno.
int make_thread(pthread_t *handle, void *(*entry)(void *), void *argument);

class ThreadPool;
using Task = std::function<void()>;

class Strand : public std::enable_shared_from_this<Strand> {
  public:
    explicit Strand(ThreadPool &pool) : pool_(pool) {}
    virtual ~Strand() = default;
    Strand(const Strand &) = delete;
    Strand &operator=(const Strand &) = delete;

    // Any thread: there is something to do.  Costs one atomic operation if the strand is awake already.
    void wake();
    // Any thread: run this, after all that was posted before.
    void post(Task task);

    static constexpr uint64_t AGAIN = 0;

  protected:
    // One round of work, on a thread of the pool.  Return when to run again: AGAIN, NEVER (when woken), or a time.
    virtual uint64_t turn(uint64_t now);
    // By the watchdog: the strand has been in `call` for `ns`; it is out of it again.
    virtual void stuck(const char *call, uint64_t ns) { (void)call, (void)ns; }
    virtual void moving(const char *call, uint64_t ns) { (void)call, (void)ns; }
    // Run all tasks that were posted.
    void run_tasks();
    // Before posted tasks run: take what other threads put down before they posted.
    virtual void arrive() {}

    ThreadPool &pool_;

  private:
    friend class ThreadPool;
    enum : uint32_t { ASLEEP, READY, RUNNING, RERUN };
    std::atomic<uint32_t> state_{ASLEEP};
    std::atomic<uint32_t> posted_{0};
    uint64_t due_ = 0;  // under the pool's lock: the one timer that counts
    Mutex lock_;
    std::deque<Task> tasks_;  // under lock_
};

// A strand that runs a function each turn, after its tasks.
class FunctionStrand : public Strand {
  public:
    using Work = std::function<uint64_t(uint64_t now)>;
    using Notice = std::function<void(const char *call, uint64_t ns, bool over)>;
    explicit FunctionStrand(ThreadPool &pool, Work work = nullptr, Notice notice = nullptr)
        : Strand(pool),
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

class ThreadPool {
  public:
    // `enter` runs on each thread before it works, and again after `reenter`.
    ThreadPool(uint32_t limit, uint64_t spin_ns, Task enter);
    ~ThreadPool();

    uint32_t threads();
    // Join all threads; waiting work is dropped.
    void stop();
    void reenter() { epoch_.fetch_add(1); }
    // A thread of the pool expects more work soon: spin for it before sleeping.
    void stay_awake(uint64_t now) { awake_until_.store(now + spin_ns_, std::memory_order_relaxed); }
    // Return true if other work waits, so that a thread that spins should stop.
    bool wanted(uint64_t now) const {
        return pending_.load(std::memory_order_relaxed) != 0 || now >= next_timer_.load(std::memory_order_relaxed);
    }
    // One line for the log when a thread cannot be made.
    std::function<void(const char *)> complain;

  private:
    friend class Strand;
    friend class InCall;

    struct Thread {
        ThreadPool *pool = nullptr;
        pthread_t handle{};
        std::shared_ptr<Strand> strand;  // under the pool's lock: the one that it runs
        std::atomic<uint64_t> since{0};  // in a call since then; 0: in none
        std::atomic<const char *> call{nullptr};
        std::atomic<uint32_t> calls{0};  // those that were not quiet
        uint64_t epoch = 0;              // the thread's own
        bool ended = false;              // under the pool's lock: may be joined
        // The watchdog's.
        uint32_t seen = 0;    // `calls` at its last look
        uint64_t marked = 0;  // `since` of a call that it reported
        std::shared_ptr<Strand> marked_strand;
        const char *marked_call = nullptr;
    };
    struct Timer {
        uint64_t at;
        std::shared_ptr<Strand> strand;
        bool operator<(const Timer &other) const { return at > other.at; }
    };

    struct Notice {
        std::shared_ptr<Strand> strand;
        const char *call;
        uint64_t ns;
        bool moving;
    };

    void enqueue(std::shared_ptr<Strand> strand);
    void nudge();
    void start_watchdog();  // this and the next four under lock_
    void start_thread();
    void move_timers(uint64_t now);
    void reap();
    void look(uint64_t now, bool &active, bool &inside, std::vector<Notice> &notices);
    void work(Thread &self);
    void run(Thread &self, Strand &strand);
    void watch();
    static void *work_entry(void *thread);
    static void *watch_entry(void *pool);
    static thread_local Thread *current_;

    const uint32_t limit_;
    const uint64_t spin_ns_;
    const Task enter_;
    std::atomic<uint64_t> epoch_{1};
    std::atomic<uint32_t> pending_{0};  // strands in queue_
    std::atomic<uint64_t> next_timer_{NEVER};
    std::atomic<uint64_t> awake_until_{0};
    std::atomic<bool> watching_{false};  // the watchdog looks by itself
    std::atomic<uint32_t> count_{0};     // threads, with the watchdog

    Mutex lock_;
    Condition work_, alarm_;
    std::deque<std::shared_ptr<Strand>> queue_;
    std::priority_queue<Timer> timers_;
    std::list<Thread> threads_;
    uint32_t alive_ = 0, idle_ = 0;  // threads; those that sleep
    uint64_t keeper_until_ = NEVER;  // one of them sleeps no longer than this
    bool spinner_ = false;           // one of them spins for work
    bool alert_ = false;             // work came and no thread was free
    bool watchdog_ = false;          // its thread was made
    std::atomic<bool> stopping_{false};
    pthread_t watchdog_handle_{};
};

// The thread is inside a call of HIXL while this lives.  A quiet one does not wake the watchdog.
class InCall {
  public:
    explicit InCall(const char *name, bool quiet = false);
    ~InCall();
    InCall(const InCall &) = delete;
    InCall &operator=(const InCall &) = delete;
};

}  // namespace hx
