// A mutex, a condition with the monotonic clock, and that clock.  The standard library's timed waits are not understood
// by every thread sanitizer, and fall back to the wall clock on old systems.
#pragma once

#include <pthread.h>
#include <time.h>

#include <cerrno>
#include <cstdint>

namespace hx {

constexpr uint64_t US = 1000, MS = 1000 * US, SECOND = 1000 * MS;
constexpr uint64_t NEVER = UINT64_MAX;

inline uint64_t clock_now() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * SECOND + static_cast<uint64_t>(now.tv_nsec);
}

// Sleep for all of `ns`, however many signals come.
inline void sleep_for(uint64_t ns) {
    const uint64_t end = clock_now() + ns;
    const struct timespec until = {static_cast<time_t>(end / SECOND), static_cast<long>(end % SECOND)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {}
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Mutex {
  public:
    Mutex() { pthread_mutex_init(&raw_, nullptr); }
    ~Mutex() { pthread_mutex_destroy(&raw_); }
    Mutex(const Mutex &) = delete;
    Mutex &operator=(const Mutex &) = delete;
    void lock() { pthread_mutex_lock(&raw_); }
    void unlock() { pthread_mutex_unlock(&raw_); }

  private:
    friend class Condition;
    pthread_mutex_t raw_;
};

class Guard {
  public:
    explicit Guard(Mutex &mutex) : mutex_(mutex) { mutex_.lock(); }
    ~Guard() { mutex_.unlock(); }
    Guard(const Guard &) = delete;
    Guard &operator=(const Guard &) = delete;

  private:
    Mutex &mutex_;
};

class Condition {
  public:
    Condition() {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&raw_, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    ~Condition() { pthread_cond_destroy(&raw_); }
    Condition(const Condition &) = delete;
    Condition &operator=(const Condition &) = delete;
    void one() { pthread_cond_signal(&raw_); }
    void all() { pthread_cond_broadcast(&raw_); }
    void wait(Mutex &mutex, uint64_t until) {
        if (until == NEVER) {
            pthread_cond_wait(&raw_, &mutex.raw_);
            return;
        }
        const struct timespec end = {static_cast<time_t>(until / SECOND), static_cast<long>(until % SECOND)};
        pthread_cond_timedwait(&raw_, &mutex.raw_, &end);
    }

  private:
    pthread_cond_t raw_;
};

}  // namespace hx
