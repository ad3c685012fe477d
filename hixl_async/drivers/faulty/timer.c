/* The timer thread: sleeps until the earliest alarm is due, and rings it. */
#include "timer.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "hxa_driver.h"

/* ---- the heap: earliest first; with the lock held ---------------------------------------------------------------------- */

static int before(const faulty_alarm *a, const faulty_alarm *b) {
    if (a->due != b->due) return a->due < b->due;
    if (a->order != b->order) return a->order < b->order;
    return a->number < b->number;
}

static void put(faulty_timer *timer, size_t at, faulty_alarm *alarm) {
    timer->heap[at] = alarm;
    alarm->slot = at + 1;
}

static void sift(faulty_timer *timer, size_t at, faulty_alarm *alarm) {
    for (size_t up; at != 0 && before(alarm, timer->heap[up = (at - 1) / 2]); at = up) put(timer, at, timer->heap[up]);
    for (size_t down; (down = 2 * at + 1) < timer->size; at = down) {
        if (down + 1 < timer->size && before(timer->heap[down + 1], timer->heap[down])) down++;
        if (!before(timer->heap[down], alarm)) break;
        put(timer, at, timer->heap[down]);
    }
    put(timer, at, alarm);
}

int faulty_timer_reserve(faulty_timer *timer) {
    if (timer->reserved == timer->room) {
        const size_t room = timer->room ? 2 * timer->room : 64;
        faulty_alarm **heap = (faulty_alarm **)realloc(timer->heap, room * sizeof *heap);
        if (heap == NULL) return -HXA_E_NOMEM;
        timer->heap = heap;
        timer->room = room;
    }
    timer->reserved++;
    return 0;
}

void faulty_timer_clear(faulty_timer *timer, faulty_alarm *alarm) {
    if (alarm->slot == 0) return;
    const size_t at = alarm->slot - 1;
    faulty_alarm *last = timer->heap[--timer->size];
    alarm->slot = 0;
    if (last != alarm) sift(timer, at, last);
}

void faulty_timer_set(faulty_timer *timer, faulty_alarm *alarm, uint64_t due) {
    faulty_timer_clear(timer, alarm);
    alarm->due = due;
    sift(timer, timer->size++, alarm);
    if (alarm->slot == 1) pthread_cond_signal(&timer->wake);
}

/* ---- the thread -------------------------------------------------------------------------------------------------------- */

static void wait_until(faulty_timer *timer, uint64_t due) {
    const struct timespec until = {.tv_sec = (time_t)(due / 1000000000u), .tv_nsec = (long)(due % 1000000000u)};
    pthread_cond_timedwait(&timer->wake, timer->lock, &until);
}

static void *run(void *arg) {
    faulty_timer *timer = (faulty_timer *)arg;
    prctl(PR_SET_NAME, "hxa-faulty");
    prctl(PR_SET_TIMERSLACK, 1);       /* plans have delays of a few microseconds */
    pthread_mutex_lock(timer->lock);
    while (!timer->closing) {
        faulty_alarm *first = timer->size != 0 ? timer->heap[0] : NULL;
        if (first == NULL) pthread_cond_wait(&timer->wake, timer->lock);
        else if (first->due > faulty_now()) wait_until(timer, first->due);
        else first->ring(first);
    }
    pthread_mutex_unlock(timer->lock);
    return NULL;
}

void faulty_timer_init(faulty_timer *timer, pthread_mutex_t *lock) {
    timer->lock = lock;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&timer->wake, &clock);
    pthread_condattr_destroy(&clock);
}

void faulty_timer_free(faulty_timer *timer) {
    pthread_cond_destroy(&timer->wake);
    free(timer->heap);
}

int faulty_timer_start(faulty_timer *timer) {
    if (timer->running) return 0;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int error = pthread_create(&timer->thread, NULL, run, timer);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    timer->running = error == 0;
    return error == 0 ? 0 : -HXA_E_NOMEM;
}

void faulty_timer_stop(faulty_timer *timer) {
    if (!timer->running) return;
    pthread_mutex_lock(timer->lock);
    timer->closing = 1;
    pthread_cond_signal(&timer->wake);
    pthread_mutex_unlock(timer->lock);
    pthread_join(timer->thread, NULL);
    timer->running = 0;
}
