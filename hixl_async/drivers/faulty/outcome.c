#include "outcome.h"

#include "doorbell.h"
#include "steps.h"
#include "stop.h"

/* ---- with the lock held ----------------------------------------------------------------------------------------------- */

void faulty_outcome_set(faulty_operation *operation, int32_t status, int32_t native, uint32_t scope, int64_t failed) {
    hxa_op *op = operation->outer;
    op->status = status;
    op->native = native;
    op->scope = scope;
    op->failed = failed;
    op->bytes = status == HXA_OK ? operation->batch->bytes : operation->moved;
    operation->reported = 1;
}

void faulty_outcome_report(faulty_operation *operation) {
    const faulty_effects *effects = &operation->effects;
    const hxa_op *op = &operation->op;
    if (effects->fail && op->status == HXA_OK) {
        faulty_count(&operation->self->block->failed);
        faulty_outcome_set(operation, effects->status, effects->native, effects->scope, effects->index);
    } else faulty_outcome_set(operation, op->status, op->native, op->scope, faulty_steps_failed(operation));
}

int faulty_outcome_is_later(const faulty_operation *operation) {
    if (operation->effects.outcome_delay != 0 || operation->effects.pending || operation->effects.fail) return 1;
    return operation->batch->topic != NULL && operation->link->notes != 0;
}

void faulty_outcome_report_later(faulty_operation *operation) {
    hxa_link *link = operation->link;
    operation->stage = FAULTY_REPORTING;
    operation->accepted = 1;
    if (operation->effects.pending) faulty_count(&link->self->block->pending);
    uint64_t due = faulty_now() + operation->effects.outcome_delay;
    if (operation->batch->topic != NULL) {
        if (link->notes++ != 0 && due <= link->notes_due) due = link->notes_due + 1;
        link->notes_due = due;
    }
    faulty_timer_set(&link->self->timer, &operation->alarm, due);
}

void faulty_outcome_close(faulty_operation *operation) {
    if (operation->stage == FAULTY_REPORTING && operation->batch->topic != NULL) operation->link->notes--;
    operation->stage = FAULTY_OVER;
    operation->outer->scratch[0] = NULL;
    faulty_ring_remove(&operation->all);
    if (operation->landing && operation->op.status == HXA_OK && operation->step == operation->step_count)
        faulty_count(&operation->self->block->landed_late);
}

uint32_t faulty_outcome_end(faulty_operation *operation) {
    uint32_t events = HXA_RELEASED;
    if (!operation->reported) {
        faulty_outcome_report(operation);
        events |= HXA_COMPLETED;
    }
    faulty_outcome_close(operation);
    return events;
}

/* ---- without the lock ------------------------------------------------------------------------------------------------- */

void faulty_outcome_deliver(faulty_operation *operation, uint32_t events) {
    hxa_link *link = operation->link;
    hxa_instance *self = link->self;
    const int breaks = (events & HXA_COMPLETED) && operation->effects.fail && operation->effects.scope == HXA_SCOPE_LINK;
    self->outer.post(self->outer.ctx, operation->outer, events);
    if (breaks) {
        /* The loop breaks the link, because giving up may meet late operations, which only the loop ends. */
        faulty_store(&link->breaking, 1u);
        faulty_doorbell_ring(link);
    }
    if (!(events & HXA_RELEASED)) return;
    faulty_operation_free_later(operation);
    pthread_mutex_lock(&self->lock);
    self->timer.reserved--;
    link->live--;
    faulty_operation *stops = faulty_stops_take(link);
    pthread_mutex_unlock(&self->lock);
    faulty_stops_finish(self, stops);
}

/* ---- the end of a link ------------------------------------------------------------------------------------------------ */

/* With the lock held.  Return the events to deliver. */
static uint32_t give_up(faulty_operation *operation, int stop) {
    uint32_t events = 0;
    if (!operation->accepted) return 0;
    if (operation->stage == FAULTY_WAITING) {
        if (!operation->reported) {
            faulty_outcome_set(operation, HXA_E_LINK, 0, HXA_SCOPE_LINK, -1);
            events = HXA_COMPLETED;
        }
        if (operation->effects.late) operation->landing = 1;
        else {
            faulty_operation_unwait(operation);
            faulty_outcome_close(operation);
            events |= HXA_RELEASED;
        }
    } else if (operation->stage == FAULTY_REPORTING && stop) {
        faulty_operation_unwait(operation);
        events = faulty_outcome_end(operation);
    }
    return events;
}

void faulty_outcome_give_up(hxa_link *link, int stop) {
    hxa_instance *self = link->self;
    faulty_operation *chain = NULL, **end = &chain;
    pthread_mutex_lock(&self->lock);
    for (faulty_node *node = link->operations.next, *next; node != &link->operations; node = next) {
        next = node->next;
        faulty_operation *operation = faulty_operation_of(node);
        operation->events = give_up(operation, stop);
        if (operation->events == 0) continue;
        operation->chain = NULL;
        *end = operation;
        end = &operation->chain;
    }
    link->pool = link->pooled = 0;
    pthread_mutex_unlock(&self->lock);
    while (chain != NULL) {
        faulty_operation *next = chain->chain;
        faulty_outcome_deliver(chain, chain->events);
        chain = next;
    }
}

void faulty_outcome_break(hxa_link *link) {
    static const char why[] = "broken by the fault plan";
    hxa_instance *self = link->self;
    if (__atomic_exchange_n(&link->down, 1u, __ATOMIC_ACQ_REL)) return;
    faulty_count(&self->block->broken);
    faulty_outcome_give_up(link, 0);
    const hxa_event event = {
        .link = link->cookie, .kind = HXA_EVENT_LINK_DOWN, .status = HXA_E_LINK, .data = why, .data_len = sizeof why - 1};
    self->outer.event(self->outer.ctx, &event);
}
