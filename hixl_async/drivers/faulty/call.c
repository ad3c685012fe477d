/* Calls of transports that block: start, shutdown, link_connect, mem_ready, mem_retire; and what drivers say to each other.
 *
 * The wrapped driver is asked at once, where it has the call; the plan delays, holds or spoils the report.  So a driver
 * without such calls can be made to behave like one that has them.
 */
#include "faulty.h"

#include <stdlib.h>
#include <unistd.h>

/* ---- the report --------------------------------------------------------------------------------------------------------- */

/* The wrapped driver is done. */
void faulty_call_wait(faulty_flight *flight) {
    faulty_block *block = flight->self->block;
    const faulty_fate *fate = &flight->fate;
    flight->stage = FAULTY_REPORTING;
    faulty_ring_add(&flight->self->calls, &flight->all);
    if (fate->hold || fate->late || fate->stuck) {
        faulty_count(&block->held);
        faulty_hold(flight);
        return;
    }
    if (fate->delay != 0 || fate->outcome_delay != 0) faulty_count(&block->delayed);
    faulty_timer_add(flight, faulty_now() + fate->delay + fate->outcome_delay);
}

void faulty_call_close(faulty_flight *flight) {
    flight->stage = FAULTY_OVER;
    faulty_ring_remove(&flight->all);
    flight->self->work--;
}

void faulty_call_report(faulty_flight *flight) {
    hxa_instance *self = flight->self;
    hxa_op *op = flight->outer;
    op->status = flight->op.status;
    op->native = flight->op.native;
    if (flight->fate.fail && op->status == HXA_OK) {
        faulty_count(&self->block->failed);
        op->status = flight->fate.status;
        op->native = flight->fate.native;
    }
    const hxa_sink outer = self->outer;
    faulty_bury(self, flight);
    outer.post(outer.ctx, op, HXA_COMPLETED | HXA_RELEASED);
}

/* ---- the calls ---------------------------------------------------------------------------------------------------------- */

static faulty_flight *begin(hxa_instance *self, uint32_t verb, hxa_op *op) {
    faulty_flight *flight = faulty_flight_new(self, NULL, op, FAULTY_CALL);
    if (flight == NULL) return NULL;
    faulty_fate_of_call(self, verb, &flight->fate);
    /* After all work, where the oldest of what is held is asked for. */
    flight->number = (UINT64_MAX >> 1) + ++self->call_count;
    pthread_mutex_lock(&self->lock);
    const int status = faulty_timer_reserve(self);
    self->work += status == 0;
    pthread_mutex_unlock(&self->lock);
    if (status == 0 && (!flight->fate.any || faulty_timer_start(self) == 0)) return flight;
    if (status == 0) faulty_call_close(flight);
    free(flight);
    return NULL;
}

static int answered(faulty_flight *flight, int answer) {
    hxa_instance *self = flight->self;
    if (answer == HXA_PENDING) return answer;
    pthread_mutex_lock(&self->lock);
    const int later = answer == HXA_DONE && flight->fate.any;
    if (later) faulty_call_wait(flight);
    else faulty_call_close(flight);
    pthread_mutex_unlock(&self->lock);
    if (later) return HXA_PENDING;
    if (answer < 0) flight->outer->native = flight->op.native;
    free(flight);
    return answer;
}

int faulty_start(hxa_instance *self, hxa_op *op) {
    faulty_flight *flight = begin(self, FAULTY_START, op);
    if (flight == NULL) return -HXA_E_NOMEM;
    return answered(flight, self->table->start != NULL ? self->table->start(self->inner, &flight->op) : HXA_DONE);
}

int faulty_shutdown(hxa_instance *self, hxa_op *op) {
    faulty_flight *flight = begin(self, FAULTY_SHUTDOWN, op);
    if (flight == NULL) return -HXA_E_NOMEM;
    return answered(flight, self->table->shutdown != NULL ? self->table->shutdown(self->inner, &flight->op) : HXA_DONE);
}

int faulty_link_connect(hxa_link *link, const hxa_card *card, hxa_op *op) {
    faulty_flight *flight = begin(link->self, FAULTY_CONNECT, op);
    if (flight == NULL) {
        for (uint32_t i = 0; i < card->nfds && i < HXA_CARD_FDS; i++) close(card->fds[i]);
        return -HXA_E_NOMEM;
    }
    return answered(flight, link->self->table->link_connect(link->inner, card, &flight->op));
}

int faulty_mem_ready(hxa_mem *mem, hxa_op *op) {
    hxa_instance *self = mem->self;
    faulty_flight *flight = begin(self, FAULTY_READY, op);
    if (flight == NULL) return -HXA_E_NOMEM;
    return answered(flight, self->table->mem_ready != NULL ? self->table->mem_ready(mem->inner, &flight->op) : HXA_DONE);
}

int faulty_mem_retire(hxa_mem *mem, hxa_op *op) {
    hxa_instance *self = mem->self;
    faulty_flight *flight = begin(self, FAULTY_RETIRE, op);
    if (flight == NULL) return -HXA_E_NOMEM;
    if (self->table->mem_retire != NULL) {
        const int answer = answered(flight, self->table->mem_retire(mem->inner, &flight->op));
        if (answer >= 0) free(mem);
        return answer;
    }
    /* The pages may be the wrapped driver's, so they go last, and on the loop's thread. */
    if (flight->fate.any) flight->mem = mem;
    else {
        self->table->mem_release(mem->inner);
        free(mem);
    }
    return answered(flight, HXA_DONE);
}

/* ---- messages ----------------------------------------------------------------------------------------------------------- */

void faulty_say(hxa_link *link, const faulty_saying *saying) {
    hxa_instance *self = link->self;
    const hxa_event event = {
        .link = link->cookie, .kind = HXA_EVENT_MESSAGE, .data = saying->data, .data_len = saying->len};
    self->outer.event(self->outer.ctx, &event);
}

/* A driver that takes no messages shows them as notifications; what says nothing is nonsense. */
int faulty_message(hxa_link *link, const void *data, size_t len) {
    static const char topic[] = "faulty.said";
    hxa_instance *self = link->self;
    if (self->table->message != NULL) return self->table->message(link->inner, data, len);
    if (len == 0) return -HXA_E_PROTOCOL;
    const hxa_event event = {
        .link = link->cookie, .kind = HXA_EVENT_NOTE, .topic = topic, .topic_len = sizeof topic - 1, .data = data,
        .data_len = (uint32_t)len};
    self->outer.event(self->outer.ctx, &event);
    return 0;
}
