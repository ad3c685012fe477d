#include "link.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "doorbell.h"
#include "operation.h"
#include "outcome.h"
#include "registry.h"
#include "stop.h"
#include "work.h"

/* ---- life ------------------------------------------------------------------------------------------------------------- */

static void link_drop(hxa_link *link) {
    if (link->doorbell >= 0) close(link->doorbell);
    if (link->set >= 0) close(link->set);
    free(link);
}

static int watch(hxa_link *link, int fd) {
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(link->set, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : -HXA_E_NOMEM;
}

int faulty_link_new(hxa_instance *self, uint64_t cookie, hxa_link **made, hxa_metadata *metadata) {
    hxa_link *link = (hxa_link *)calloc(1, sizeof *link);
    if (link == NULL) return -HXA_E_NOMEM;
    link->self = self;
    link->cookie = cookie;
    link->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    link->set = epoll_create1(EPOLL_CLOEXEC);
    faulty_ring_init(&link->operations);
    faulty_ring_init(&link->ready);
    faulty_ring_init(&link->stops);
    int answer = link->doorbell < 0 || link->set < 0 ? -HXA_E_NOMEM : watch(link, link->doorbell);
    /* The wrapped driver's cookie is the address of our link, so that its events lead back to it. */
    if (answer == 0) answer = self->table->link_new(self->inner, (uint64_t)(uintptr_t)link, &link->inner, metadata);
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
    faulty_operation_free_dead(self);
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

int faulty_poll(hxa_link *link, uint32_t budget) {
    faulty_doorbell_clear(link);
    faulty_operation_free_dead(link->self);
    if (faulty_load(&link->breaking)) faulty_outcome_break(link);
    const int more = faulty_submit_ready(link, budget);
    return link->self->table->poll(link->inner, budget) || more;
}

/* Of a broken link only log lines are passed on. */
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

/* ---- stop ------------------------------------------------------------------------------------------------------------- */

int faulty_link_stop(hxa_link *link, int dead, hxa_op *op) {
    const int answer = faulty_stop_add(link, dead, op);
    if (answer < 0) return answer;
    link->stopping = 1;
    faulty_outcome_give_up(link, 1);
    faulty_stops_issue(link);
    return HXA_PENDING;
}
