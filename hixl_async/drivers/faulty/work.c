#include "work.h"

#include "doorbell.h"
#include "outcome.h"
#include "reorder.h"
#include "steps.h"
#include "stop.h"
#include "wait.h"

enum { RETRY_NS = 200000 };   /* after the wrapped driver was busy */

/* ---- submitting; the loop's thread ------------------------------------------------------------------------------------- */

/* Submit step after step until the wrapped driver keeps one or the next has to wait (PENDING), all are done, or one is refused. */
static int run(faulty_operation *operation) {
    hxa_instance *self = operation->self;
    while (operation->step < operation->step_count) {
        pthread_mutex_lock(&self->lock);
        faulty_steps_load(operation);
        operation->seen = 0;
        operation->stage = FAULTY_SUBMITTED;
        pthread_mutex_unlock(&self->lock);
        const int answer = self->table->submit(operation->link->inner, &operation->part, &operation->op);
        if (answer == HXA_PENDING) return HXA_PENDING;     /* another thread may have freed it already */
        pthread_mutex_lock(&self->lock);
        if (answer < 0) {
            const int again = answer == -HXA_E_BUSY && operation->accepted && !operation->link->stopping;
            if (again) {
                operation->stage = FAULTY_WAITING;
                faulty_timer_set(&self->timer, &operation->alarm, faulty_now() + RETRY_NS);
            }
            pthread_mutex_unlock(&self->lock);
            return again ? HXA_PENDING : answer;
        }
        operation->moved += operation->steps[operation->step++].bytes;
        const int waits = operation->step < operation->step_count && faulty_wait_next(operation);
        pthread_mutex_unlock(&self->lock);
        if (waits) return HXA_PENDING;
    }
    return HXA_DONE;
}

/* It is over inside the call, or refused: the core gets no event for it. */
static int withdraw(faulty_operation *operation, int answer) {
    hxa_instance *self = operation->self;
    pthread_mutex_lock(&self->lock);
    if (answer < 0) {
        operation->outer->native = operation->op.native;
        operation->outer->failed = faulty_steps_failed(operation);
    }
    operation->outer->scratch[0] = NULL;
    faulty_ring_remove(&operation->all);
    operation->link->live--;
    self->timer.reserved--;
    pthread_mutex_unlock(&self->lock);
    faulty_operation_free(operation);
    return answer;
}

/* Add the operation to its link.  Return 1 if it has to wait, or a negative status. */
static int begin(faulty_operation *operation) {
    hxa_link *link = operation->link;
    hxa_instance *self = operation->self;
    pthread_mutex_lock(&self->lock);
    int waits = faulty_timer_reserve(&self->timer);
    if (waits == 0) {
        operation->outer->scratch[0] = operation;
        faulty_ring_add(&link->operations, &operation->all);
        link->live++;
        if (operation->effects.drop) {
            operation->accepted = 1;
            operation->effects.late = 0;         /* it is lost together with the link, before it could be late */
        } else waits = faulty_wait_first(operation);
    }
    pthread_mutex_unlock(&self->lock);
    return waits;
}

static const faulty_kind kind;

_Thread_local const char *faulty_refusal;

int faulty_submit(hxa_link *link, const hxa_batch *batch, hxa_op *op) {
    hxa_instance *self = link->self;
    faulty_refusal = NULL;
    if (faulty_load(&link->down) || link->stopping) return -HXA_E_LINK;
    faulty_effects effects;
    uint64_t number;
    faulty_plan_batch(self->block, self->seed, batch, &effects, &number);
    if (effects.busy) {
        faulty_count(&self->block->busy);
        faulty_refusal = "the fault plan refused it";
        return -HXA_E_BUSY;
    }
    if (effects.any && faulty_timer_start(&self->timer) != 0) return -HXA_E_NOMEM;
    faulty_operation *operation = faulty_operation_new(self, link, op, &kind);
    if (operation == NULL) return -HXA_E_NOMEM;
    operation->effects = effects;
    operation->alarm.number = number;
    const int status = faulty_steps_plan(operation, batch);
    const int waits = status == 0 ? begin(operation) : status;
    if (waits < 0) {
        faulty_operation_free(operation);
        return waits;
    }
    if (effects.drop) faulty_outcome_break(link);
    if (effects.drop || waits) return HXA_PENDING;
    const int answer = run(operation);
    if (answer == HXA_PENDING) return HXA_PENDING;
    if (answer < 0) return withdraw(operation, answer);
    pthread_mutex_lock(&self->lock);
    const int later = faulty_outcome_is_later(operation);
    if (later) faulty_outcome_report_later(operation);
    pthread_mutex_unlock(&self->lock);
    return later ? HXA_PENDING : withdraw(operation, answer);
}

/* All steps of an accepted operation are done, or one was refused. */
static void finish(faulty_operation *operation, int answer) {
    hxa_instance *self = operation->self;
    pthread_mutex_lock(&self->lock);
    if (answer < 0) operation->op.status = -answer;
    if (answer == HXA_DONE && !operation->reported && faulty_outcome_is_later(operation)) {
        faulty_outcome_report_later(operation);
        pthread_mutex_unlock(&self->lock);
        return;
    }
    const uint32_t events = faulty_outcome_end(operation);
    pthread_mutex_unlock(&self->lock);
    faulty_outcome_deliver(operation, events);
}

int faulty_submit_ready(hxa_link *link, uint32_t budget) {
    hxa_instance *self = link->self;
    for (;;) {
        pthread_mutex_lock(&self->lock);
        const int more = !faulty_ring_empty(&link->ready);
        faulty_operation *operation = more && budget != 0 ? faulty_ready_of(link->ready.next) : NULL;
        if (operation != NULL) {
            faulty_ring_remove(&operation->ready);
            operation->stage = FAULTY_SUBMITTED;
        }
        pthread_mutex_unlock(&self->lock);
        if (operation == NULL) return more;
        budget--;
        const int answer = run(operation);
        if (answer != HXA_PENDING) finish(operation, answer);
    }
}

/* ---- ending early, and questions; the loop's thread --------------------------------------------------------------------- */

int faulty_cancel(hxa_link *link, hxa_op *op) {
    hxa_instance *self = link->self;
    uint32_t events = HXA_COMPLETED;
    faulty_operation_free_dead(self);
    pthread_mutex_lock(&self->lock);
    faulty_operation *operation = (faulty_operation *)op->scratch[0];
    if (operation == NULL || operation->reported || operation->stage >= FAULTY_REPORTING || operation->effects.stuck) {
        pthread_mutex_unlock(&self->lock);
        return 0;
    }
    if (operation->stage == FAULTY_SUBMITTED) {
        pthread_mutex_unlock(&self->lock);
        return self->table->cancel != NULL ? self->table->cancel(link->inner, &operation->op) : 0;
    }
    faulty_outcome_set(operation, HXA_E_CANCELLED, 0, HXA_SCOPE_OP, -1);
    if (operation->effects.late) operation->landing = 1;
    else {
        faulty_operation_unwait(operation);
        faulty_outcome_close(operation);
        events |= HXA_RELEASED;
    }
    pthread_mutex_unlock(&self->lock);
    faulty_outcome_deliver(operation, events);
    return 1;
}

/* Only an operation that is stuck ends here.  The wrapped driver abandons what it has, and everything else ends by itself. */
int faulty_abandon(hxa_link *link, hxa_op *op) {
    hxa_instance *self = link->self;
    faulty_operation_free_dead(self);
    pthread_mutex_lock(&self->lock);
    faulty_operation *operation = (faulty_operation *)op->scratch[0];
    const int inside = operation != NULL && operation->stage == FAULTY_SUBMITTED;
    const int ours = operation != NULL && operation->stage == FAULTY_WAITING && operation->effects.stuck;
    if (ours) {
        faulty_operation_unwait(operation);
        faulty_outcome_set(operation, HXA_E_TIMEOUT, 0, HXA_SCOPE_OP, -1);
        faulty_outcome_close(operation);
    }
    pthread_mutex_unlock(&self->lock);
    if (ours) faulty_outcome_deliver(operation, HXA_COMPLETED | HXA_RELEASED);
    else if (inside && self->table->abandon != NULL) return self->table->abandon(link->inner, &operation->op);
    return ours ? 0 : -HXA_E_UNSUPPORTED;
}

int faulty_waits(hxa_link *link, const hxa_op *op) {
    hxa_instance *self = link->self;
    pthread_mutex_lock(&self->lock);
    const faulty_operation *operation = (const faulty_operation *)op->scratch[0];
    const int inside = operation != NULL && operation->stage == FAULTY_SUBMITTED;
    pthread_mutex_unlock(&self->lock);
    return inside && self->table->waits != NULL && self->table->waits(link->inner, &operation->op);
}

/* A paced link is slow, not stalled, so that bytes count as they would pass the wire. */
static uint64_t paced(const faulty_operation *operation) {
    const uint64_t now = faulty_now(), bytes = operation->batch->bytes;
    if (now >= operation->end) return bytes;         /* only the loop is late */
    return (uint64_t)((double)bytes * (double)(now - operation->begun) / (double)(operation->end - operation->begun));
}

uint64_t faulty_progress(hxa_link *link, const hxa_op *op) {
    hxa_instance *self = link->self;
    pthread_mutex_lock(&self->lock);
    const faulty_operation *operation = (const faulty_operation *)op->scratch[0];
    uint64_t moved = operation != NULL ? operation->moved : op->bytes;
    const int inside = operation != NULL && operation->stage == FAULTY_SUBMITTED;
    if (operation != NULL && operation->stage == FAULTY_WAITING && operation->step == 0 && !operation->held && operation->effects.bandwidth != 0)
        moved = paced(operation);
    pthread_mutex_unlock(&self->lock);
    return inside ? moved + self->table->progress(link->inner, &operation->op) : moved;
}

/* ---- events of the wrapped driver, alarms and releases ---------------------------------------------------------------- */

/* With the lock held: return the events that follow for the core's op; *submits: the loop has to submit the next step. */
static uint32_t advance(faulty_operation *operation, int *submits) {
    const int bad = operation->op.status != HXA_OK, last = bad || operation->step + 1 == operation->step_count;
    uint32_t events = 0;
    if (last && !operation->reported && (operation->seen & HXA_COMPLETED) && (bad || !faulty_outcome_is_later(operation))) {
        faulty_outcome_report(operation);
        events |= HXA_COMPLETED;
    }
    if (!(operation->seen & HXA_RELEASED)) return events;
    if (!bad) operation->moved += operation->steps[operation->step++].bytes;
    if (!last) {
        if (!faulty_wait_next(operation)) {
            operation->stage = FAULTY_WAITING;
            faulty_wait_over(operation);
            *submits = 1;
        }
        return events;
    }
    if (!operation->reported) {
        faulty_outcome_report_later(operation);
        return events;
    }
    faulty_outcome_close(operation);
    return events | HXA_RELEASED;
}

static void posted(faulty_operation *operation, uint32_t events) {
    hxa_instance *self = operation->self;
    int submits = 0;
    pthread_mutex_lock(&self->lock);
    operation->seen |= events;
    operation->accepted = 1;
    const uint32_t out = advance(operation, &submits);
    if (submits) faulty_doorbell_ring(operation->link);
    pthread_mutex_unlock(&self->lock);
    if (out != 0) faulty_outcome_deliver(operation, out);
}

static void due(faulty_operation *operation) {
    hxa_instance *self = operation->self;
    if (operation->pool != 0) {
        faulty_reorder_due(operation);
        return;
    }
    faulty_timer_clear(&self->timer, &operation->alarm);
    if (operation->stage == FAULTY_WAITING) {
        faulty_wait_over(operation);
        faulty_doorbell_ring(operation->link);
        return;
    }
    const uint32_t events = faulty_outcome_end(operation);
    pthread_mutex_unlock(&self->lock);
    faulty_outcome_deliver(operation, events);
    pthread_mutex_lock(&self->lock);
}

/* For good: an operation that is held whole and stalls, too, needs no second release. */
static void released(faulty_operation *operation) {
    faulty_operation_unwait(operation);
    for (uint32_t i = operation->step + 1; i < operation->step_count; i++)
        if (operation->steps[i].wait == FAULTY_HELD) operation->steps[i].wait = FAULTY_OPEN;
    if (operation->step == 0 && operation->end > faulty_now()) {
        faulty_timer_set(&operation->self->timer, &operation->alarm, operation->end);
    } else {
        faulty_wait_over(operation);
        faulty_doorbell_ring(operation->link);
    }
}

static const faulty_kind kind = {.posted = posted, .due = due, .released = released};
