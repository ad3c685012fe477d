/* The timer thread: sleeps until the earliest flight is due, then marks it ripe or delivers its report. */
#include "faulty.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

/* ---- the heap: earliest first; with the lock held ---------------------------------------------------------------------- */

static int before(const faulty_flight *a, const faulty_flight *b) {
    if (a->due != b->due) return a->due < b->due;
    if (a->order != b->order) return a->order < b->order;
    return a->number < b->number;
}

static void put(hxa_instance *self, size_t at, faulty_flight *flight) {
    self->heap[at] = flight;
    flight->slot = at + 1;
}

static void sift(hxa_instance *self, size_t at, faulty_flight *flight) {
    for (size_t up; at != 0 && before(flight, self->heap[up = (at - 1) / 2]); at = up) put(self, at, self->heap[up]);
    for (size_t down; (down = 2 * at + 1) < self->heap_size; at = down) {
        if (down + 1 < self->heap_size && before(self->heap[down + 1], self->heap[down])) down++;
        if (!before(self->heap[down], flight)) break;
        put(self, at, self->heap[down]);
    }
    put(self, at, flight);
}

/* Room for one more flight, taken when it is made, so that adding it later can't fail. */
int faulty_timer_reserve(hxa_instance *self) {
    if (self->work < self->heap_room) return 0;
    const size_t room = self->heap_room ? 2 * self->heap_room : 64;
    faulty_flight **heap = (faulty_flight **)realloc(self->heap, room * sizeof *heap);
    if (heap == NULL) return -HXA_E_NOMEM;
    self->heap = heap;
    self->heap_room = room;
    return 0;
}

void faulty_timer_remove(faulty_flight *flight) {
    if (flight->slot == 0) return;
    hxa_instance *self = flight->self;
    const size_t at = flight->slot - 1;
    faulty_flight *last = self->heap[--self->heap_size];
    flight->slot = 0;
    if (last != flight) sift(self, at, last);
}

void faulty_timer_add(faulty_flight *flight, uint64_t due) {
    hxa_instance *self = flight->self;
    faulty_timer_remove(flight);
    flight->due = due;
    sift(self, self->heap_size++, flight);
    if (flight->slot == 1) pthread_cond_signal(&self->wake);
}

/* ---- reordering -------------------------------------------------------------------------------------------------------- */

/* Everything that was collected is due now, in an order that is never the one of the submits. */
void faulty_pool_close(hxa_link *link) {
    hxa_instance *self = link->self;
    const uint64_t now = faulty_now(), pool = link->pool, n = link->pooled;
    const uint64_t turn = n > 1 ? 1 + faulty_random(self->seed, UINT64_MAX, pool) % (n - 1) : 0;
    const int mirror = (int)(faulty_random(self->seed, UINT64_MAX - 1, pool) & 1);
    uint64_t place = 0;
    for (faulty_node *node = link->flights.next; node != &link->flights; node = node->next) {
        faulty_flight *flight = faulty_flight_of(node);
        if (flight->pool != pool || flight->stage != FAULTY_WAITING || flight->slot == 0) continue;
        /* A rotation by 1..n-1 moves every flight; mirrored it is still not the identity, except for the pair. */
        uint64_t order = (place + turn) % n;
        if (mirror && n > 2) order = n - 1 - (place + turn - 1) % n;
        flight->order = order;
        flight->pool = 0;
        faulty_timer_add(flight, now);
        place++;
    }
    __atomic_fetch_add(&self->block->reordered, place, __ATOMIC_RELAXED);
    link->pool = link->pooled = 0;
}

/* ---- the thread -------------------------------------------------------------------------------------------------------- */

static void wait_until(hxa_instance *self, uint64_t due) {
    const struct timespec until = {.tv_sec = (time_t)(due / 1000000000u), .tv_nsec = (long)(due % 1000000000u)};
    pthread_cond_timedwait(&self->wake, &self->lock, &until);
}

static void *timer(void *arg) {
    hxa_instance *self = (hxa_instance *)arg;
    prctl(PR_SET_NAME, "hxa-faulty");
    prctl(PR_SET_TIMERSLACK, 1);       /* delays of a few microseconds are meant */
    pthread_mutex_lock(&self->lock);
    while (!self->closing) {
        if (self->heap_size == 0) {
            pthread_cond_wait(&self->wake, &self->lock);
            continue;
        }
        faulty_flight *flight = self->heap[0];
        if (flight->due > faulty_now()) {
            wait_until(self, flight->due);
            continue;
        }
        if (flight->pool != 0) {
            if (flight->pool == flight->link->pool) faulty_pool_close(flight->link);
            flight->pool = 0;
            continue;
        }
        faulty_timer_remove(flight);
        if (flight->stage == FAULTY_WAITING) {
            faulty_ripen(flight);
            faulty_link_ring(flight->link);
            continue;
        }
        if (flight->kind == FAULTY_CALL) {
            faulty_call_close(flight);
            pthread_mutex_unlock(&self->lock);
            faulty_call_report(flight);
        } else {
            const uint32_t events = faulty_end(flight);
            pthread_mutex_unlock(&self->lock);
            faulty_deliver(flight, events);
        }
        pthread_mutex_lock(&self->lock);
    }
    pthread_mutex_unlock(&self->lock);
    return NULL;
}

int faulty_timer_start(hxa_instance *self) {
    if (self->running) return 0;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int error = pthread_create(&self->timer, NULL, timer, self);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    self->running = error == 0;
    return error == 0 ? 0 : -HXA_E_NOMEM;
}

void faulty_timer_stop(hxa_instance *self) {
    if (!self->running) return;
    pthread_mutex_lock(&self->lock);
    self->closing = 1;
    pthread_cond_signal(&self->wake);
    pthread_mutex_unlock(&self->lock);
    pthread_join(self->timer, NULL);
    self->running = 0;
}
