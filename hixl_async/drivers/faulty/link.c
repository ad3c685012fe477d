/* Links: the inner driver's link, and what is ours around it. */
#include "faulty.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- life ------------------------------------------------------------------------------------------------------------- */

static void link_drop(hxa_link *link) {
    if (link->bell >= 0) close(link->bell);
    if (link->set >= 0) close(link->set);
    free(link);
}

static int watch(hxa_link *link, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(link->set, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : -HXA_E_NOMEM;
}

int faulty_link_new(hxa_instance *self, uint64_t cookie, hxa_link **made, hxa_card *card) {
    hxa_link *link = (hxa_link *)calloc(1, sizeof *link);
    if (link == NULL) return -HXA_E_NOMEM;
    link->self = self;
    link->cookie = cookie;
    link->bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    link->set = epoll_create1(EPOLL_CLOEXEC);
    faulty_ring_init(&link->flights);
    faulty_ring_init(&link->ripe);
    faulty_ring_init(&link->stops);
    int answer = link->bell < 0 || link->set < 0 ? -HXA_E_NOMEM : watch(link, link->bell);
    /* Our own address is the inner driver's cookie: its events lead us back here. */
    if (answer == 0) answer = self->table->link_new(self->inner, (uint64_t)(uintptr_t)link, &link->inner, card);
    if (answer != 0) {
        link_drop(link);
        return answer;
    }
    faulty_registry_add_link(link);
    *made = link;
    return 0;
}

void faulty_link_free(hxa_link *link) {
    hxa_instance *self = link->self;
    self->table->link_free(link->inner);
    faulty_registry_remove_link(link);
    link_drop(link);
    faulty_reap(self);
}

int faulty_link_fence(hxa_link *link, hxa_op *op) {
    faulty_flight *flight = faulty_flight_new(link->self, link, op, FAULTY_CALL);
    if (flight == NULL) return -HXA_E_NOMEM;
    const int answer = link->self->table->link_fence(link->inner, &flight->op);
    if (answer == HXA_PENDING) return answer;
    if (answer < 0) op->native = flight->op.native;
    free(flight);
    return answer;
}

/* ---- events ----------------------------------------------------------------------------------------------------------- */

int faulty_link_fd(hxa_link *link) {
    const int fd = link->self->table->link_fd(link->inner);
    if (fd >= 0 && watch(link, fd) != 0 && errno != EEXIST) return -1;
    return link->set;
}

int faulty_link_pace(hxa_link *link, uint64_t bytes_per_second) {
    const hxa_driver *table = link->self->table;
    return table->link_pace != NULL ? table->link_pace(link->inner, bytes_per_second) : -HXA_E_UNSUPPORTED;
}

void faulty_link_ring(hxa_link *link) {
    const uint64_t one = 1;
    ssize_t written;
    do written = write(link->bell, &one, sizeof one);
    while (written < 0 && errno == EINTR);
}

int faulty_poll(hxa_link *link, uint32_t budget) {
    uint64_t rings;
    const ssize_t got = read(link->bell, &rings, sizeof rings);
    (void)got;
    faulty_reap(link->self);
    if (faulty_load(&link->breaking)) faulty_link_break(link);
    const int ripe = faulty_pump(link, budget);
    return link->self->table->poll(link->inner, budget) || ripe;
}

/* The inner driver's sink; any thread.  Of a broken link nothing more is heard. */
void faulty_event(void *ctx, const hxa_event *event) {
    hxa_instance *self = (hxa_instance *)ctx;
    hxa_event ours = *event;
    const hxa_link *link = (const hxa_link *)(uintptr_t)event->link;
    if (link != NULL) {
        if (faulty_load(&link->down) && event->kind != HXA_EVENT_LOG) return;
        ours.link = link->cookie;
    }
    self->outer.event(self->outer.ctx, &ours);
}

void faulty_link_break(hxa_link *link) {
    static const char why[] = "broken by the fault plan";
    hxa_instance *self = link->self;
    if (__atomic_exchange_n(&link->down, 1u, __ATOMIC_ACQ_REL)) return;
    faulty_count(&self->block->broken);
    faulty_give_up(link, 0);
    const hxa_event event = {
        .link = link->cookie, .kind = HXA_EVENT_LINK_DOWN, .status = HXA_E_LINK, .data = why, .data_len = sizeof why - 1};
    self->outer.event(self->outer.ctx, &event);
}

/* ---- stop ------------------------------------------------------------------------------------------------------------- */

/* Finished stops, once every flight's release is posted; with the lock held. */
faulty_flight *faulty_stops_take(hxa_link *link) {
    faulty_flight *chain = NULL;
    if (link->live != 0) return NULL;
    for (faulty_node *node = link->stops.next, *next; node != &link->stops; node = next) {
        next = node->next;
        faulty_flight *stop = faulty_flight_of(node);
        if (!(stop->seen & HXA_RELEASED)) continue;
        faulty_ring_remove(&stop->all);
        stop->chain = chain;
        chain = stop;
    }
    return chain;
}

/* The link may be freed as soon as the last one is posted. */
void faulty_stops_finish(hxa_instance *self, faulty_flight *stops) {
    const hxa_sink outer = self->outer;
    while (stops != NULL) {
        faulty_flight *next = stops->chain;
        hxa_op *op = stops->outer;
        op->status = stops->op.status;
        op->native = stops->op.native;
        op->scope = HXA_SCOPE_LINK;
        op->failed = -1;
        faulty_bury(self, stops);
        outer.post(outer.ctx, op, HXA_COMPLETED | HXA_RELEASED);
        stops = next;
    }
}

/* Hands stops to the inner driver, unless late flights still want to land; on the loop's thread. */
void faulty_stops_issue(hxa_link *link) {
    hxa_instance *self = link->self;
    if (!link->stopping || faulty_stuck(link) != 0) return;
    for (;;) {
        faulty_flight *stop = NULL, *ready = NULL;
        pthread_mutex_lock(&self->lock);
        for (faulty_node *node = link->stops.next; node != &link->stops && stop == NULL; node = node->next)
            if (faulty_flight_of(node)->stage == FAULTY_WAITING) stop = faulty_flight_of(node);
        if (stop != NULL) stop->stage = FAULTY_SUBMITTED;
        pthread_mutex_unlock(&self->lock);
        if (stop == NULL) return;
        const int answer = self->table->link_stop(link->inner, (int)stop->held, &stop->op);
        if (answer == HXA_PENDING) continue;
        pthread_mutex_lock(&self->lock);
        if (answer < 0) stop->op.status = -answer;
        stop->seen = HXA_COMPLETED | HXA_RELEASED;
        ready = faulty_stops_take(link);
        pthread_mutex_unlock(&self->lock);
        faulty_stops_finish(self, ready);
    }
}

int faulty_link_stop(hxa_link *link, int dead, hxa_op *op) {
    hxa_instance *self = link->self;
    faulty_flight *stop = faulty_flight_new(self, link, op, FAULTY_STOP);
    if (stop == NULL) return -HXA_E_NOMEM;
    link->stopping = 1;
    faulty_give_up(link, 1);
    stop->stage = FAULTY_WAITING;
    stop->held = dead != 0;
    pthread_mutex_lock(&self->lock);
    faulty_ring_add(&link->stops, &stop->all);
    pthread_mutex_unlock(&self->lock);
    faulty_stops_issue(link);
    return HXA_PENDING;
}
