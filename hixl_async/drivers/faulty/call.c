#include "call.h"

#include <stdlib.h>
#include <unistd.h>

#include "link.h"
#include "timer.h"

/* ---- the report --------------------------------------------------------------------------------------------------------- */

/* With the lock held: the wrapped driver is done. */
static void report_later(faulty_operation *call) {
    hxa_instance *self = call->self;
    const faulty_effects *effects = &call->effects;
    call->stage = FAULTY_REPORTING;
    faulty_ring_add(&self->calls, &call->all);
    if (effects->hold || effects->late || effects->stuck) {
        faulty_count(&self->block->held);
        faulty_operation_hold(call);
        return;
    }
    if (effects->delay != 0 || effects->outcome_delay != 0) faulty_count(&self->block->delayed);
    faulty_timer_set(&self->timer, &call->alarm, faulty_now() + effects->delay + effects->outcome_delay);
}

/* With the lock held. */
static void close_call(faulty_operation *call) {
    call->stage = FAULTY_OVER;
    faulty_ring_remove(&call->all);
    call->self->timer.reserved--;
}

static void report(faulty_operation *call) {
    hxa_instance *self = call->self;
    hxa_op *op = call->outer;
    op->status = call->op.status;
    op->native = call->op.native;
    if (call->effects.fail && op->status == HXA_OK) {
        faulty_count(&self->block->failed);
        op->status = call->effects.status;
        op->native = call->effects.native;
    }
    const hxa_sink outer = self->outer;
    faulty_operation_free_later(call);
    outer.post(outer.ctx, op, HXA_COMPLETED | HXA_RELEASED);
}

/* Answer the core's op as the wrapped driver answers ours. */
static void forward(faulty_operation *call, uint32_t events) {
    hxa_instance *self = call->self;
    if (events & HXA_COMPLETED) {
        hxa_op *op = call->outer;
        op->status = call->op.status;
        op->native = call->op.native;
        op->scope = call->op.scope;
        op->failed = call->op.failed;
        op->bytes = call->op.bytes;
    }
    self->outer.post(self->outer.ctx, call->outer, events);
    if (events & HXA_RELEASED) faulty_operation_free_later(call);
}

static void posted(faulty_operation *call, uint32_t events) {
    hxa_instance *self = call->self;
    const int spoilt = call->effects.any != 0;
    pthread_mutex_lock(&self->lock);
    call->seen |= events;
    if (call->seen & HXA_RELEASED) {
        if (spoilt) report_later(call);
        else close_call(call);
    }
    pthread_mutex_unlock(&self->lock);
    if (!spoilt) forward(call, events);
}

static void due(faulty_operation *call) {
    hxa_instance *self = call->self;
    faulty_timer_clear(&self->timer, &call->alarm);
    close_call(call);
    pthread_mutex_unlock(&self->lock);
    report(call);
    pthread_mutex_lock(&self->lock);
}

static void released(faulty_operation *call) {
    faulty_operation_unwait(call);
    faulty_timer_set(&call->self->timer, &call->alarm, faulty_now());
}

static const faulty_kind kind = {.posted = posted, .due = due, .released = released};

faulty_operation *faulty_call_forward(hxa_link *link, hxa_op *op) {
    static const faulty_kind forwarded = {.posted = forward};
    return faulty_operation_new(link->self, link, op, &forwarded);
}

/* ---- the calls ---------------------------------------------------------------------------------------------------------- */

static faulty_operation *begin(hxa_instance *self, uint32_t verb, hxa_op *op) {
    faulty_operation *operation = faulty_operation_new(self, NULL, op, &kind);
    if (operation == NULL) return NULL;
    faulty_plan_verb(self->block, self->seed, verb, &operation->effects);
    /* After all work, when the oldest of the held operations is released. */
    operation->alarm.number = (UINT64_MAX >> 1) + ++self->call_count;
    if (!operation->effects.any || faulty_timer_start(&self->timer) == 0) {
        pthread_mutex_lock(&self->lock);
        const int status = faulty_timer_reserve(&self->timer);
        pthread_mutex_unlock(&self->lock);
        if (status == 0) return operation;
    }
    faulty_operation_free(operation);
    return NULL;
}

static int answered(faulty_operation *operation, int answer) {
    hxa_instance *self = operation->self;
    if (answer == HXA_PENDING) return answer;
    pthread_mutex_lock(&self->lock);
    const int later = answer == HXA_DONE && operation->effects.any;
    if (later) report_later(operation);
    else close_call(operation);
    pthread_mutex_unlock(&self->lock);
    if (later) return HXA_PENDING;
    if (answer < 0) operation->outer->native = operation->op.native;
    faulty_operation_free(operation);
    return answer;
}

int faulty_start(hxa_instance *self, hxa_op *op) {
    faulty_operation *operation = begin(self, FAULTY_START, op);
    if (operation == NULL) return -HXA_E_NOMEM;
    return answered(operation, self->table->start != NULL ? self->table->start(self->inner, &operation->op) : HXA_DONE);
}

int faulty_shutdown(hxa_instance *self, hxa_op *op) {
    faulty_operation *operation = begin(self, FAULTY_SHUTDOWN, op);
    if (operation == NULL) return -HXA_E_NOMEM;
    return answered(operation, self->table->shutdown != NULL ? self->table->shutdown(self->inner, &operation->op) : HXA_DONE);
}

int faulty_link_connect(hxa_link *link, const hxa_metadata *metadata, hxa_op *op) {
    faulty_operation *operation = begin(link->self, FAULTY_CONNECT, op);
    if (operation == NULL) {
        for (uint32_t i = 0; i < metadata->nfds && i < HXA_METADATA_FDS; i++) close(metadata->fds[i]);
        return -HXA_E_NOMEM;
    }
    return answered(operation, link->self->table->link_connect(link->inner, metadata, &operation->op));
}

int faulty_mem_ready(hxa_mem *mem, hxa_op *op) {
    hxa_instance *self = mem->self;
    faulty_operation *operation = begin(self, FAULTY_READY, op);
    if (operation == NULL) return -HXA_E_NOMEM;
    return answered(operation, self->table->mem_ready != NULL ? self->table->mem_ready(mem->inner, &operation->op) : HXA_DONE);
}

int faulty_mem_retire(hxa_mem *mem, hxa_op *op) {
    hxa_instance *self = mem->self;
    faulty_operation *operation = begin(self, FAULTY_RETIRE, op);
    if (operation == NULL) return -HXA_E_NOMEM;
    if (self->table->mem_retire != NULL) {
        const int answer = answered(operation, self->table->mem_retire(mem->inner, &operation->op));
        if (answer >= 0) free(mem);
        return answer;
    }
    /* The pages may be the wrapped driver's, so they go last, and on the loop's thread. */
    if (operation->effects.any) operation->mem = mem;
    else {
        self->table->mem_release(mem->inner);
        free(mem);
    }
    return answered(operation, HXA_DONE);
}

int faulty_link_fence(hxa_link *link, hxa_op *op) {
    faulty_operation *call = faulty_call_forward(link, op);
    if (call == NULL) return -HXA_E_NOMEM;
    const int answer = link->self->table->link_fence(link->inner, &call->op);
    if (answer == HXA_PENDING) return answer;
    if (answer < 0) op->native = call->op.native;
    faulty_operation_free(call);
    return answer;
}
