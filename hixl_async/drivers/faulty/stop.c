#include "stop.h"

/* A stop is finished when the wrapped driver has finished it and the release of every operation is posted. */
faulty_operation *faulty_stops_take(hxa_link *link) {
    faulty_operation *chain = NULL;
    if (link->live != 0) return NULL;
    for (faulty_node *node = link->stops.next, *next; node != &link->stops; node = next) {
        next = node->next;
        faulty_operation *stop = faulty_operation_of(node);
        if (!(stop->seen & HXA_RELEASED)) continue;
        faulty_ring_remove(&stop->all);
        stop->chain = chain;
        chain = stop;
    }
    return chain;
}

void faulty_stops_finish(hxa_instance *self, faulty_operation *stops) {
    const hxa_sink outer = self->outer;
    while (stops != NULL) {
        faulty_operation *next = stops->chain;
        hxa_op *op = stops->outer;
        op->status = stops->op.status;
        op->native = stops->op.native;
        op->scope = HXA_SCOPE_LINK;
        op->failed = -1;
        faulty_operation_free_later(stops);
        outer.post(outer.ctx, op, HXA_COMPLETED | HXA_RELEASED);
        stops = next;
    }
}

/* With the lock held: return 1 while late operations still want to land. */
static int landing(const hxa_link *link) {
    for (const faulty_node *node = link->operations.next; node != &link->operations; node = node->next) {
        const faulty_operation *operation = (const faulty_operation *)(const void *)node;
        if (operation->stage == FAULTY_WAITING && operation->effects.late) return 1;
    }
    return 0;
}

static faulty_operation *next_stop(hxa_link *link) {
    faulty_operation *stop = NULL;
    pthread_mutex_lock(&link->self->lock);
    if (!landing(link))
        for (faulty_node *node = link->stops.next; node != &link->stops && stop == NULL; node = node->next)
            if (faulty_operation_of(node)->stage == FAULTY_WAITING) stop = faulty_operation_of(node);
    if (stop != NULL) stop->stage = FAULTY_SUBMITTED;
    pthread_mutex_unlock(&link->self->lock);
    return stop;
}

static void posted(faulty_operation *stop, uint32_t events) {
    hxa_instance *self = stop->self;
    pthread_mutex_lock(&self->lock);
    stop->seen |= events;
    faulty_operation *finished = faulty_stops_take(stop->link);
    pthread_mutex_unlock(&self->lock);
    faulty_stops_finish(self, finished);
}

void faulty_stops_issue(hxa_link *link) {
    hxa_instance *self = link->self;
    if (!link->stopping) return;
    for (faulty_operation *stop; (stop = next_stop(link)) != NULL;) {
        const int answer = self->table->link_stop(link->inner, (int)stop->dead, &stop->op);
        if (answer == HXA_PENDING) continue;
        if (answer < 0) stop->op.status = -answer;
        posted(stop, HXA_COMPLETED | HXA_RELEASED);
    }
}

int faulty_stop_add(hxa_link *link, int dead, hxa_op *op) {
    static const faulty_kind kind = {.posted = posted};
    faulty_operation *stop = faulty_operation_new(link->self, link, op, &kind);
    if (stop == NULL) return -HXA_E_NOMEM;
    stop->dead = dead != 0;
    pthread_mutex_lock(&link->self->lock);
    faulty_ring_add(&link->stops, &stop->all);
    pthread_mutex_unlock(&link->self->lock);
    return HXA_PENDING;
}
