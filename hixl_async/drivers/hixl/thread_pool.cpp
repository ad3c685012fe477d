#include "thread_pool.hpp"

#include <signal.h>
#include <sys/prctl.h>

#include <utility>

namespace hx {

namespace {

constexpr uint64_t STUCK = 3 * MS;    // a thread that is longer in a call does not count as a thread that works
constexpr uint64_t STALLED = SECOND;  // longer than this in a call is worth a line in the log
constexpr uint64_t SURPLUS = 2 * SECOND;  // idle threads but one end after this
constexpr uint64_t ACTIVE = 100 * MS;     // the watchdog looks often for this long after the last call
constexpr uint64_t OFTEN = 2 * MS, SELDOM = 20 * MS;

}  // namespace

int make_thread(pthread_t *handle, void *(*entry)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(handle, nullptr, entry, argument);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
}

thread_local ThreadPool::Thread *ThreadPool::current_ = nullptr;

// ---- strands --------------------------------------------------------------------------------------------------------

void Strand::wake() {
    uint32_t state = state_.load();
    for (;;) {
        // The state is written even where it stays the same: the next turn then sees what was put down before.
        const uint32_t next = state == ASLEEP ? READY : state == RUNNING ? RERUN : state;
        if (state_.compare_exchange_weak(state, next)) break;
    }
    if (state == ASLEEP) pool_.enqueue(shared_from_this());
}

void Strand::post(Task task) {
    {
        Guard guard(lock_);
        tasks_.push_back(std::move(task));
        posted_.store(1);
    }
    wake();
}

void Strand::run_tasks() {
    while (posted_.load(std::memory_order_relaxed) != 0) {
        std::deque<Task> taken;
        {
            Guard guard(lock_);
            taken.swap(tasks_);
            posted_.store(0);
        }
        arrive();
        for (Task &task : taken) task();
    }
}

uint64_t Strand::turn(uint64_t) {
    run_tasks();
    return NEVER;
}

// ---- calls ----------------------------------------------------------------------------------------------------------

InCall::InCall(const char *name, bool quiet) {
    ThreadPool::Thread *thread = ThreadPool::current_;
    if (thread == nullptr) return;
    thread->call.store(name, std::memory_order_relaxed);
    if (!quiet) thread->calls.store(thread->calls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    // Dekker's pattern: the watchdog clears `watching_` and looks once more before it sleeps without a limit.
    thread->since.store(clock_now());
    if (!quiet && !thread->pool->watching_.load()) thread->pool->nudge();
}

InCall::~InCall() {
    if (ThreadPool::current_ != nullptr) ThreadPool::current_->since.store(0, std::memory_order_release);
}

// ---- threads --------------------------------------------------------------------------------------------------------

ThreadPool::ThreadPool(uint32_t limit, uint64_t spin_ns, Task enter) : limit_(limit), spin_ns_(spin_ns), enter_(std::move(enter)) {}

ThreadPool::~ThreadPool() { stop(); }

uint32_t ThreadPool::threads() { return count_.load(); }

void ThreadPool::enqueue(std::shared_ptr<Strand> strand) {
    Guard guard(lock_);
    if (stopping_) return;
    queue_.push_back(std::move(strand));
    pending_.store(static_cast<uint32_t>(queue_.size()), std::memory_order_relaxed);
    if (alive_ == 0) start_thread();
    if (spinner_) return;
    if (idle_ > 0) {
        work_.one();
    } else if (!alert_) {  // all are busy; if their calls last, the watchdog adds another thread
        alert_ = true;
        start_watchdog();
    }
}

void ThreadPool::nudge() {
    Guard guard(lock_);
    start_watchdog();
}

void ThreadPool::start_watchdog() {
    if (watching_ || stopping_) return;
    if (!watchdog_) {
        if (make_thread(&watchdog_handle_, watch_entry, this) != 0) return;  // there is a next time
        watchdog_ = true;
        count_.fetch_add(1);
    }
    watching_ = true;
    alarm_.one();
}

void ThreadPool::start_thread() {
    if (alive_ >= limit_ || stopping_) return;
    threads_.emplace_back();
    Thread &thread = threads_.back();
    thread.pool = this;
    if (make_thread(&thread.handle, work_entry, &thread) != 0) {
        threads_.pop_back();
        if (alive_ == 0 && complain) complain("hixl: no thread can be made; no transfer moves until one can");
        return;
    }
    alive_++;
    count_.fetch_add(1);
}

void ThreadPool::move_timers(uint64_t now) {
    while (!timers_.empty() && timers_.top().at <= now) {
        const std::shared_ptr<Strand> strand = timers_.top().strand;
        const uint64_t at = timers_.top().at;
        timers_.pop();
        if (strand->due_ != at) continue;
        strand->due_ = 0;
        uint32_t asleep = Strand::ASLEEP;
        if (strand->state_.compare_exchange_strong(asleep, Strand::READY)) queue_.push_back(strand);
    }
    pending_.store(static_cast<uint32_t>(queue_.size()), std::memory_order_relaxed);
    next_timer_.store(timers_.empty() ? NEVER : timers_.top().at, std::memory_order_relaxed);
}

void *ThreadPool::work_entry(void *argument) {
    Thread &self = *static_cast<Thread *>(argument);
    pthread_setname_np(pthread_self(), "hxa-hixl");
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // sleeps of microseconds are meant
    current_ = &self;
    self.pool->work(self);
    current_ = nullptr;
    return nullptr;
}

void ThreadPool::work(Thread &self) {
    lock_.lock();
    while (!stopping_) {
        uint64_t now = clock_now();
        move_timers(now);
        if (!queue_.empty()) {
            std::shared_ptr<Strand> strand = std::move(queue_.front());
            queue_.pop_front();
            pending_.store(static_cast<uint32_t>(queue_.size()), std::memory_order_relaxed);
            if (!queue_.empty() && idle_ > 0) work_.one();
            self.strand = strand;
            lock_.unlock();
            run(self, *strand);
            lock_.lock();
            self.strand.reset();  // not the last reference: `strand` goes when the lock is released again
            lock_.unlock();
            strand.reset();
            lock_.lock();
            continue;
        }
        if (!spinner_ && now < awake_until_.load(std::memory_order_relaxed)) {
            spinner_ = true;
            lock_.unlock();
            do {
                for (int i = 0; i < 8; i++) relax();
                now = clock_now();
            } while (!wanted(now) && now < awake_until_.load(std::memory_order_relaxed));
            lock_.lock();
            spinner_ = false;
            continue;
        }
        // One of the sleepers keeps the time, the others are surplus.
        uint64_t until = alive_ > 1 ? now + SURPLUS : NEVER;
        const bool keeper = !timers_.empty() && timers_.top().at < keeper_until_;
        if (keeper) keeper_until_ = until = timers_.top().at;
        idle_++;
        work_.wait(lock_, until);
        idle_--;
        if (keeper && keeper_until_ == until) keeper_until_ = NEVER;
        if (!keeper && until != NEVER && alive_ > 1 && queue_.empty() && clock_now() >= until) break;
    }
    alive_--;
    count_.fetch_sub(1);
    self.ended = true;
    lock_.unlock();
}

void ThreadPool::run(Thread &self, Strand &strand) {
    const uint64_t epoch = epoch_.load();
    if (self.epoch != epoch) {
        self.epoch = epoch;
        enter_();
    }
    for (;;) {
        strand.state_.exchange(Strand::RUNNING);  // this turn sees what was put down before any wake so far
        const uint64_t now = clock_now();
        const uint64_t at = strand.turn(now);
        uint32_t running = Strand::RUNNING;
        if (at == NEVER) {
            if (strand.state_.compare_exchange_strong(running, Strand::ASLEEP)) return;
        } else if (at != Strand::AGAIN) {
            Guard guard(lock_);
            strand.due_ = at;
            timers_.push({at, strand.shared_from_this()});
            next_timer_.store(timers_.top().at, std::memory_order_relaxed);
            if (strand.state_.compare_exchange_strong(running, Strand::ASLEEP)) return;
            strand.due_ = 0;
        }
        if (!wanted(now) && !stopping_) continue;
        // Others want the thread: to the end of the queue.
        strand.state_.exchange(Strand::READY);
        Guard guard(lock_);
        queue_.push_back(strand.shared_from_this());
        pending_.store(static_cast<uint32_t>(queue_.size()), std::memory_order_relaxed);
        return;
    }
}

void ThreadPool::stop() {
    lock_.lock();
    stopping_ = true;
    work_.all();
    alarm_.all();
    lock_.unlock();
    if (watchdog_) {
        pthread_join(watchdog_handle_, nullptr);
        count_.fetch_sub(1);
        watchdog_ = false;
    }
    for (Thread &thread : threads_) pthread_join(thread.handle, nullptr);  // none is added any more
    threads_.clear();
    queue_.clear();
    while (!timers_.empty()) timers_.pop();
}

// ---- the watchdog ---------------------------------------------------------------------------------------------------

void *ThreadPool::watch_entry(void *pool) {
    pthread_setname_np(pthread_self(), "hxa-hixl-watch");
    static_cast<ThreadPool *>(pool)->watch();
    return nullptr;
}

void ThreadPool::reap() {
    for (auto thread = threads_.begin(); thread != threads_.end();) {
        if (!thread->ended) {
            ++thread;
            continue;
        }
        pthread_join(thread->handle, nullptr);
        thread = threads_.erase(thread);
    }
}

void ThreadPool::look(uint64_t now, bool &active, bool &inside, std::vector<Notice> &notices) {
    uint32_t stuck = 0;
    for (Thread &thread : threads_) {
        const uint64_t since = thread.since.load();
        const uint32_t calls = thread.calls.load(std::memory_order_relaxed);
        active = active || calls != thread.seen;
        thread.seen = calls;
        inside = inside || since != 0;
        if (thread.marked != 0 && thread.marked != since) {
            notices.push_back({std::move(thread.marked_strand), thread.marked_call, now - thread.marked, true});
            thread.marked = 0;
            thread.marked_strand.reset();
        }
        if (since == 0 || now < since) continue;
        stuck += now - since > STUCK;
        if (now - since > STALLED && thread.marked == 0 && thread.strand != nullptr) {
            thread.marked = since;
            thread.marked_strand = thread.strand;
            thread.marked_call = thread.call.load(std::memory_order_relaxed);
            notices.push_back({thread.strand, thread.marked_call, now - since, false});
        }
    }
    if (queue_.empty()) return;
    if (idle_ > 0) work_.one();
    else if (stuck >= alive_) start_thread();
}

void ThreadPool::watch() {
    std::vector<Notice> notices;
    uint64_t active_until = 0;
    lock_.lock();
    while (!stopping_) {
        const uint64_t now = clock_now();
        bool active = alert_, inside = false;
        reap();
        move_timers(now);  // the thread that would have done it may be stuck
        look(now, active, inside, notices);
        if (!notices.empty()) {
            lock_.unlock();
            for (const Notice &notice : notices) {
                if (notice.moving) notice.strand->moving(notice.call, notice.ns);
                else notice.strand->stuck(notice.call, notice.ns);
            }
            notices.clear();
            lock_.lock();
            continue;
        }
        if (active) active_until = now + ACTIVE;
        uint64_t until = now + (now < active_until ? OFTEN : SELDOM);
        if (now >= active_until && !inside && queue_.empty()) {
            watching_ = false;
            look(now, active, inside, notices);
            if (active || inside || !notices.empty()) {
                watching_ = true;
                continue;
            }
            until = NEVER;
        }
        if (now >= active_until || queue_.empty() || idle_ > 0) alert_ = false;
        alarm_.wait(lock_, until);
    }
    lock_.unlock();
}

}  // namespace hx
