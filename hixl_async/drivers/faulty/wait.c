#include "wait.h"

#include "link.h"
#include "reorder.h"

int faulty_wait_first(faulty_operation *operation) {
    hxa_link *link = operation->link;
    faulty_block *block = link->self->block;
    const faulty_effects *effects = &operation->effects;
    const uint64_t now = faulty_now();
    operation->begun = operation->end = now;
    if (effects->bandwidth != 0 && operation->batch->bytes != 0) {
        faulty_count(&block->paced);
        if (link->wire < now) link->wire = now;
        link->wire += (uint64_t)((double)operation->batch->bytes * 1e9 / (double)effects->bandwidth);
        operation->end = link->wire;
    }
    operation->end += effects->delay;
    if (effects->delay != 0 || effects->outcome_delay != 0 || effects->note_delay != 0) faulty_count(&block->delayed);
    if (effects->hold || effects->late || effects->stuck) {
        faulty_count(effects->late ? &block->late : effects->stall ? &block->stalled : &block->held);
        faulty_operation_hold(operation);
    } else if (effects->window > 1) faulty_reorder_enter(operation, now);
    else if (operation->end > now) faulty_timer_set(&link->self->timer, &operation->alarm, operation->end);
    else return 0;
    operation->accepted = 1;
    return 1;
}

int faulty_wait_next(faulty_operation *operation) {
    hxa_instance *self = operation->self;
    const faulty_step *step = &operation->steps[operation->step];
    if (step->wait == FAULTY_OPEN) return 0;
    operation->stage = FAULTY_WAITING;
    operation->accepted = 1;
    if (step->wait == FAULTY_HELD) {
        faulty_count(&self->block->stalled);
        faulty_operation_hold(operation);
    } else faulty_timer_set(&self->timer, &operation->alarm, faulty_now() + step->delay);
    return 1;
}

void faulty_wait_over(faulty_operation *operation) { faulty_ring_add(&operation->link->ready, &operation->ready); }
