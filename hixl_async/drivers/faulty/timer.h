/* The timer thread and its alarms. */
#ifndef HXA_FAULTY_TIMER_H
#define HXA_FAULTY_TIMER_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "control.h"

typedef struct faulty_alarm {
    size_t slot;                                                  /* in the heap, + 1; 0: not set */
    uint64_t due, order, number;                                  /* the heap's key */
    /* On the timer thread, with the lock held, which it may give up meanwhile; it clears the alarm or sets it again. */
    void (*ring)(struct faulty_alarm *alarm);
} faulty_alarm;

typedef struct faulty_timer {
    pthread_mutex_t *lock;    /* of everything below; the instance's */
    pthread_cond_t wake;
    pthread_t thread;
    uint32_t running;         /* the thread lives; the loop's */
    uint32_t closing;
    faulty_alarm **heap;
    size_t size, room;
    size_t reserved;          /* alarms that may have to be set */
} faulty_timer;

static inline uint64_t faulty_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

FAULTY_INTERNAL void faulty_timer_init(faulty_timer *timer, pthread_mutex_t *lock);
FAULTY_INTERNAL void faulty_timer_free(faulty_timer *timer);
FAULTY_INTERNAL int faulty_timer_start(faulty_timer *timer);            /* without the lock, as stop; no error if it runs */
FAULTY_INTERNAL void faulty_timer_stop(faulty_timer *timer);
/* With the lock held.  Setting a reserved alarm cannot fail. */
FAULTY_INTERNAL int faulty_timer_reserve(faulty_timer *timer);
FAULTY_INTERNAL void faulty_timer_set(faulty_timer *timer, faulty_alarm *alarm, uint64_t due);
FAULTY_INTERNAL void faulty_timer_clear(faulty_timer *timer, faulty_alarm *alarm);

#endif /* HXA_FAULTY_TIMER_H */
