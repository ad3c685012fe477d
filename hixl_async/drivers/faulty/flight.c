/* Flights: what becomes of one accepted op.
 *
 * A flight is a row of legs, each one submit to the inner driver; most have one.  Before a leg there may be a gate: a time,
 * or a release from Python.  What lies behind a gate has not reached the inner driver, so bytes that are late really land late.
 */
#include "faulty.h"

#include <stdlib.h>

enum { RETRY_NS = 200000 };   /* after the inner driver was busy */

/* ---- life ------------------------------------------------------------------------------------------------------------- */

faulty_flight *faulty_flight_new(hxa_instance *self, hxa_link *link, hxa_op *outer, uint32_t kind) {
    faulty_reap(self);
    faulty_flight *flight = (faulty_flight *)calloc(1, sizeof *flight);
    if (flight == NULL) return NULL;
    faulty_ring_init(&flight->all);
    faulty_ring_init(&flight->ripe);
    flight->op.owner = flight;
    flight->op.failed = -1;
    flight->outer = outer;
    flight->self = self;
    flight->link = link;
    flight->kind = kind;
    flight->stage = kind == FAULTY_WORK ? FAULTY_WAITING : FAULTY_SUBMITTED;
    return flight;
}

static void flight_free(faulty_flight *flight) {
    if (flight->mem != NULL) {
        flight->self->table->mem_release(flight->mem->inner);
        free(flight->mem);
    }
    free(flight->desc);
    free(flight);
}

/* Any thread: the loop frees it later, for it may be looking at it right now (cancel, progress). */
void faulty_bury(hxa_instance *self, faulty_flight *flight) {
    faulty_flight *head = __atomic_load_n(&self->dead, __ATOMIC_RELAXED);
    do flight->chain = head;
    while (!__atomic_compare_exchange_n(&self->dead, &head, flight, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

void faulty_reap(hxa_instance *self) {
    if (__atomic_load_n(&self->dead, __ATOMIC_RELAXED) == NULL) return;
    faulty_flight *flight = __atomic_exchange_n(&self->dead, NULL, __ATOMIC_ACQUIRE);
    while (flight != NULL) {
        faulty_flight *next = flight->chain;
        flight_free(flight);
        flight = next;
    }
}

/* Copies the batch with our memories replaced by the inner driver's; a descriptor is divided where a stall wants it. */
static int translate(faulty_flight *flight, const hxa_batch *batch, uint64_t stall_bytes, size_t *cut) {
    size_t n = 0;
    uint64_t before = 0;
    *cut = 0;
    if (batch->n == 0) return 0;
    flight->desc = (hxa_desc *)malloc((batch->n + 1) * sizeof *flight->desc);
    if (flight->desc == NULL) return -HXA_E_NOMEM;
    for (size_t i = 0; i < batch->n; i++) {
        hxa_desc desc = batch->desc[i];
        if (desc.lmem != NULL) desc.lmem = desc.lmem->inner;
        desc.rmem = desc.rmem->inner;
        const uint64_t after = before + desc.len;
        if (stall_bytes > before && stall_bytes < after) {
            flight->desc[n] = desc;
            flight->desc[n++].len = stall_bytes - before;
            desc.loff += stall_bytes - before;
            desc.roff += stall_bytes - before;
            desc.len = after - stall_bytes;
            flight->split = n;
        }
        if (stall_bytes > before && stall_bytes <= after) *cut = stall_bytes == after ? n + 1 : n;
        flight->desc[n++] = desc;
        before = after;
    }
    return 0;
}

static void add_leg(faulty_flight *flight, size_t first, size_t end, uint32_t tail, uint32_t gate, uint64_t delay) {
    faulty_leg *leg = &flight->legs[flight->leg_count++];
    *leg = (faulty_leg){.first = first, .n = end - first, .tail = tail, .gate = gate, .delay = delay};
    for (size_t i = first; i < end; i++) leg->bytes += flight->desc[i].len;
}

static int plan_legs(faulty_flight *flight, const hxa_batch *batch) {
    faulty_fate *fate = &flight->fate;
    const uint32_t tail = batch->signal != NULL || batch->topic != NULL;
    uint64_t stall_bytes = 0;
    if (fate->stall != 0 && !fate->fail && batch->bytes != 0) {
        stall_bytes = (uint64_t)((double)batch->bytes * (double)(fate->stall - 1) / 1e6);
        if (stall_bytes >= batch->bytes) stall_bytes = batch->bytes - 1;
    }
    size_t cut;
    const int status = translate(flight, batch, stall_bytes, &cut);
    if (status != 0) return status;
    const size_t n = batch->n + (flight->split != 0);
    flight->batch = batch;
    if (fate->fail) {
        const size_t lands = fate->index <= 0 ? 0 : (uint64_t)fate->index < n ? (size_t)fate->index : n;
        if (lands != 0) add_leg(flight, 0, lands, 0, FAULTY_OPEN, 0);
        return 0;
    }
    if (cut != 0) add_leg(flight, 0, cut, 0, FAULTY_OPEN, 0);
    const uint32_t gate = cut != 0 ? FAULTY_HELD : FAULTY_OPEN;
    const int apart = tail && n != 0 && fate->note_delay != 0;
    add_leg(flight, cut, n, !apart, gate, 0);
    if (apart) add_leg(flight, n, n, 1, FAULTY_UNTIL, fate->note_delay);
    /* What comes before the first byte is a matter of the first gate. */
    if (n == 0) fate->delay += fate->note_delay;
    fate->hold |= fate->stall != 0 && batch->bytes != 0 && cut == 0;
    return 0;
}

static void load_leg(faulty_flight *flight) {
    const faulty_leg *leg = &flight->legs[flight->leg];
    flight->part = *flight->batch;
    flight->part.n = leg->n;
    flight->part.desc = leg->n != 0 ? flight->desc + leg->first : NULL;
    flight->part.bytes = leg->bytes;
    if (!leg->tail) {
        flight->part.signal = NULL;
        flight->part.topic = NULL;
    } else if (flight->part.signal != NULL) flight->part.signal = flight->part.signal->inner;
    flight->op.status = flight->op.native = 0;
    flight->op.scope = HXA_SCOPE_OP;
    flight->op.failed = -1;
    flight->op.bytes = 0;
    __atomic_store_n(&flight->op.events, 0, __ATOMIC_RELAXED);
}

/* ---- outcome; with the lock held -------------------------------------------------------------------------------------- */

static void conclude(faulty_flight *flight, int32_t status, int32_t native, uint32_t scope, int64_t failed) {
    hxa_op *op = flight->outer;
    op->status = status;
    op->native = native;
    op->scope = scope;
    op->failed = failed;
    op->bytes = status == HXA_OK ? flight->batch->bytes : flight->moved;
    flight->reported = 1;
}

static int64_t failed_index(const faulty_flight *flight) {
    if (flight->op.failed < 0) return -1;
    const size_t index = (size_t)flight->op.failed + flight->legs[flight->leg].first;
    return (int64_t)(flight->split != 0 && index >= flight->split ? index - 1 : index);
}

/* The outcome that the plan or the inner driver gave. */
static void report(faulty_flight *flight) {
    const faulty_fate *fate = &flight->fate;
    if (fate->fail && flight->op.status == HXA_OK) {
        faulty_count(&flight->link->self->block->failed);
        conclude(flight, fate->status, fate->native, fate->scope, fate->index);
    } else conclude(flight, flight->op.status, flight->op.native, flight->op.scope, failed_index(flight));
}

static int reports_later(const faulty_flight *flight) {
    if (flight->fate.outcome_delay != 0 || flight->fate.pending || flight->fate.fail) return 1;
    return flight->batch->topic != NULL && flight->link->notes != 0;
}

static void report_later(faulty_flight *flight) {
    flight->stage = FAULTY_REPORTING;
    flight->accepted = 1;
    if (flight->fate.pending) faulty_count(&flight->link->self->block->pending);
    hxa_link *link = flight->link;
    uint64_t due = faulty_now() + flight->fate.outcome_delay;
    if (flight->batch->topic != NULL) {
        if (link->notes++ != 0 && due <= link->notes_due) due = link->notes_due + 1;
        link->notes_due = due;
    }
    faulty_timer_add(flight, due);
}

/* The last time that the flight is found by its op, or by its link; deliver follows. */
static void close_flight(faulty_flight *flight) {
    if (flight->stage == FAULTY_REPORTING && flight->batch->topic != NULL) flight->link->notes--;
    flight->stage = FAULTY_OVER;
    flight->outer->scratch[0] = NULL;
    faulty_ring_remove(&flight->all);
    if (flight->landing && flight->op.status == HXA_OK && flight->leg == flight->leg_count)
        faulty_count(&flight->link->self->block->landed_late);
}

/* Reports, unless that is done, and closes: the events to deliver. */
uint32_t faulty_end(faulty_flight *flight) {
    uint32_t events = HXA_RELEASED;
    if (!flight->reported) {
        report(flight);
        events |= HXA_COMPLETED;
    }
    close_flight(flight);
    return events;
}

static void take_out(faulty_flight *flight) {
    faulty_timer_remove(flight);
    faulty_ring_remove(&flight->ripe);
    if (flight->held) {
        flight->held = 0;
        __atomic_fetch_sub(&flight->self->block->holding, 1, __ATOMIC_RELAXED);
    }
}

/* Without the lock: posts, and after a release lets the flight go. */
void faulty_deliver(faulty_flight *flight, uint32_t events) {
    hxa_link *link = flight->link;
    hxa_instance *self = link->self;
    const int breaks = (events & HXA_COMPLETED) && flight->fate.fail && flight->fate.scope == HXA_SCOPE_LINK;
    self->outer.post(self->outer.ctx, flight->outer, events);
    if (breaks) {
        /* The loop does it: give_up may meet late flights, which only the loop ends. */
        faulty_store(&link->breaking, 1u);
        faulty_link_ring(link);
    }
    if (!(events & HXA_RELEASED)) return;
    faulty_bury(self, flight);
    pthread_mutex_lock(&self->lock);
    self->work--;
    link->live--;
    faulty_flight *stops = faulty_stops_take(link);
    pthread_mutex_unlock(&self->lock);
    faulty_stops_finish(self, stops);
}

/* ---- gates; with the lock held ---------------------------------------------------------------------------------------- */

void faulty_ripen(faulty_flight *flight) { faulty_ring_add(&flight->link->ripe, &flight->ripe); }

void faulty_hold(faulty_flight *flight) {
    flight->held = 1;
    __atomic_fetch_add(&flight->self->block->holding, 1, __ATOMIC_RELAXED);
}

/* A release from Python. */
void faulty_ungate(faulty_flight *flight) {
    take_out(flight);
    if (flight->kind == FAULTY_CALL) faulty_timer_add(flight, faulty_now());
    else if (flight->leg == 0 && flight->end > faulty_now()) faulty_timer_add(flight, flight->end);
    else faulty_ripen(flight);
}

/* The gate before the next leg: 1 if it is closed. */
static int close_gate(faulty_flight *flight) {
    const faulty_leg *leg = &flight->legs[flight->leg];
    if (leg->gate == FAULTY_OPEN) return 0;
    flight->stage = FAULTY_WAITING;
    flight->accepted = 1;
    if (leg->gate == FAULTY_HELD) {
        faulty_count(&flight->link->self->block->stalled);
        faulty_hold(flight);
    } else faulty_timer_add(flight, faulty_now() + leg->delay);
    return 1;
}

static void enter_pool(faulty_flight *flight, uint64_t now) {
    hxa_link *link = flight->link;
    if (link->pool == 0) {
        link->pool = ++link->self->pools;
        link->pool_window = flight->fate.window;
        link->pool_due = now + flight->fate.within;
    }
    flight->pool = link->pool;
    faulty_timer_add(flight, link->pool_due);
    if (++link->pooled >= link->pool_window) faulty_pool_close(link);
}

/* Before the first leg: 1 if the flight has to wait. */
static int close_first_gate(faulty_flight *flight) {
    hxa_link *link = flight->link;
    faulty_block *block = link->self->block;
    const faulty_fate *fate = &flight->fate;
    const uint64_t now = faulty_now();
    flight->begun = flight->end = now;
    if (fate->bandwidth != 0 && flight->batch->bytes != 0) {
        faulty_count(&block->paced);
        if (link->wire < now) link->wire = now;
        link->wire += (uint64_t)((double)flight->batch->bytes * 1e9 / (double)fate->bandwidth);
        flight->end = link->wire;
    }
    flight->end += fate->delay;
    if (fate->delay != 0 || fate->outcome_delay != 0 || fate->note_delay != 0) faulty_count(&block->delayed);
    if (fate->hold || fate->late || fate->stuck) {
        faulty_count(fate->late ? &block->late : fate->stall ? &block->stalled : &block->held);
        faulty_hold(flight);
    } else if (fate->window > 1) enter_pool(flight, now);
    else if (flight->end > now) faulty_timer_add(flight, flight->end);
    else return 0;
    flight->accepted = 1;
    return 1;
}

/* ---- the loop --------------------------------------------------------------------------------------------------------- */

/* Submits leg after leg until the inner driver keeps one, a gate is closed (PENDING), all are done, or one is refused. */
static int run(faulty_flight *flight) {
    hxa_instance *self = flight->link->self;
    while (flight->leg < flight->leg_count) {
        pthread_mutex_lock(&self->lock);
        load_leg(flight);
        flight->seen = 0;
        flight->stage = FAULTY_SUBMITTED;
        pthread_mutex_unlock(&self->lock);
        const int answer = self->table->submit(flight->link->inner, &flight->part, &flight->op);
        if (answer == HXA_PENDING) return HXA_PENDING;     /* another thread may have ended it already */
        pthread_mutex_lock(&self->lock);
        if (answer < 0) {
            const int again = answer == -HXA_E_BUSY && flight->accepted && !flight->link->stopping;
            if (again) {
                flight->stage = FAULTY_WAITING;
                faulty_timer_add(flight, faulty_now() + RETRY_NS);
            }
            pthread_mutex_unlock(&self->lock);
            return again ? HXA_PENDING : answer;
        }
        flight->moved += flight->legs[flight->leg++].bytes;
        const int closed = flight->leg < flight->leg_count && close_gate(flight);
        pthread_mutex_unlock(&self->lock);
        if (closed) return HXA_PENDING;
    }
    return HXA_DONE;
}

/* Not accepted after all: as if it had never been. */
static int withdraw(faulty_flight *flight, int answer) {
    hxa_instance *self = flight->link->self;
    pthread_mutex_lock(&self->lock);
    if (answer < 0) {
        flight->outer->native = flight->op.native;
        flight->outer->failed = failed_index(flight);
    }
    flight->outer->scratch[0] = NULL;
    faulty_ring_remove(&flight->all);
    flight->link->live--;
    self->work--;
    pthread_mutex_unlock(&self->lock);
    flight_free(flight);
    return answer;
}

int faulty_submit(hxa_link *link, const hxa_batch *batch, hxa_op *op) {
    hxa_instance *self = link->self;
    if (faulty_load(&link->down) || link->stopping) return -HXA_E_LINK;
    faulty_fate fate;
    uint64_t number;
    faulty_fate_of(self, batch, &fate, &number);
    if (fate.busy) {
        faulty_count(&self->block->busy);
        return -HXA_E_BUSY;
    }
    if (fate.any && faulty_timer_start(self) != 0) return -HXA_E_NOMEM;
    faulty_flight *flight = faulty_flight_new(self, link, op, FAULTY_WORK);
    if (flight == NULL) return -HXA_E_NOMEM;
    flight->fate = fate;
    flight->number = number;
    pthread_mutex_lock(&self->lock);
    int status = faulty_timer_reserve(self);
    pthread_mutex_unlock(&self->lock);
    if (status == 0) status = plan_legs(flight, batch);
    if (status != 0) {
        flight_free(flight);
        return status;
    }
    pthread_mutex_lock(&self->lock);
    op->scratch[0] = flight;
    faulty_ring_add(&link->flights, &flight->all);
    link->live++;
    self->work++;
    if (fate.drop) {
        flight->accepted = 1;
        flight->fate.late = 0;         /* it never gets to the gate behind which late ones wait */
    }
    const int waits = !fate.drop && close_first_gate(flight);
    pthread_mutex_unlock(&self->lock);
    if (fate.drop) faulty_link_break(link);
    if (fate.drop || waits) return HXA_PENDING;
    const int answer = run(flight);
    if (answer == HXA_PENDING) return HXA_PENDING;
    if (answer < 0) return withdraw(flight, answer);
    pthread_mutex_lock(&self->lock);
    const int later = reports_later(flight);
    if (later) report_later(flight);
    pthread_mutex_unlock(&self->lock);
    return later ? HXA_PENDING : withdraw(flight, answer);
}

/* All legs of an accepted flight are done, or one was refused. */
static void finish(faulty_flight *flight, int answer) {
    hxa_instance *self = flight->link->self;
    pthread_mutex_lock(&self->lock);
    if (answer < 0) flight->op.status = -answer;
    if (answer == HXA_DONE && !flight->reported && reports_later(flight)) {
        report_later(flight);
        pthread_mutex_unlock(&self->lock);
        return;
    }
    const uint32_t events = faulty_end(flight);
    pthread_mutex_unlock(&self->lock);
    faulty_deliver(flight, events);
}

/* Submits what is ripe; 1 if more is. */
int faulty_pump(hxa_link *link, uint32_t budget) {
    hxa_instance *self = link->self;
    for (;;) {
        pthread_mutex_lock(&self->lock);
        const int more = !faulty_ring_empty(&link->ripe);
        faulty_flight *flight = more && budget != 0 ? faulty_ripe_of(link->ripe.next) : NULL;
        if (flight != NULL) {
            faulty_ring_remove(&flight->ripe);
            flight->stage = FAULTY_SUBMITTED;
        }
        pthread_mutex_unlock(&self->lock);
        if (flight == NULL) return more;
        budget--;
        const int answer = run(flight);
        if (answer != HXA_PENDING) finish(flight, answer);
    }
}

int faulty_cancel(hxa_link *link, hxa_op *op) {
    hxa_instance *self = link->self;
    uint32_t events = HXA_COMPLETED;
    faulty_reap(self);
    pthread_mutex_lock(&self->lock);
    faulty_flight *flight = (faulty_flight *)op->scratch[0];
    if (flight == NULL || flight->reported || flight->stage >= FAULTY_REPORTING || flight->fate.stuck) {
        pthread_mutex_unlock(&self->lock);
        return 0;
    }
    if (flight->stage == FAULTY_SUBMITTED) {
        pthread_mutex_unlock(&self->lock);
        return self->table->cancel != NULL ? self->table->cancel(link->inner, &flight->op) : 0;
    }
    conclude(flight, HXA_E_CANCELLED, 0, HXA_SCOPE_OP, -1);
    if (flight->fate.late) flight->landing = 1;
    else {
        take_out(flight);
        close_flight(flight);
        events |= HXA_RELEASED;
    }
    pthread_mutex_unlock(&self->lock);
    faulty_deliver(flight, events);
    return 1;
}

/* What is stuck ends here; what the wrapped driver has is its business, and all else ends by itself. */
int faulty_abandon(hxa_link *link, hxa_op *op) {
    hxa_instance *self = link->self;
    faulty_reap(self);
    pthread_mutex_lock(&self->lock);
    faulty_flight *flight = (faulty_flight *)op->scratch[0];
    const int inside = flight != NULL && flight->stage == FAULTY_SUBMITTED;
    const int ours = flight != NULL && flight->stage == FAULTY_WAITING && flight->fate.stuck;
    if (ours) {
        take_out(flight);
        conclude(flight, HXA_E_TIMEOUT, 0, HXA_SCOPE_OP, -1);
        close_flight(flight);
    }
    pthread_mutex_unlock(&self->lock);
    if (ours) faulty_deliver(flight, HXA_COMPLETED | HXA_RELEASED);
    else if (inside && self->table->abandon != NULL) return self->table->abandon(link->inner, &flight->op);
    return ours ? 0 : -HXA_E_UNSUPPORTED;
}

int faulty_waits(hxa_link *link, const hxa_op *op) {
    hxa_instance *self = link->self;
    pthread_mutex_lock(&self->lock);
    const faulty_flight *flight = (const faulty_flight *)op->scratch[0];
    const int inside = flight != NULL && flight->stage == FAULTY_SUBMITTED;
    pthread_mutex_unlock(&self->lock);
    return inside && self->table->waits != NULL && self->table->waits(link->inner, &flight->op);
}

uint64_t faulty_progress(hxa_link *link, const hxa_op *op) {
    hxa_instance *self = link->self;
    pthread_mutex_lock(&self->lock);
    const faulty_flight *flight = (const faulty_flight *)op->scratch[0];
    uint64_t moved = flight != NULL ? flight->moved : op->bytes;
    const int inside = flight != NULL && flight->stage == FAULTY_SUBMITTED;
    if (flight != NULL && flight->stage == FAULTY_WAITING && flight->fate.bandwidth != 0 && flight->leg == 0 && !flight->held) {
        /* A paced link is slow, not stalled: its bytes trickle. */
        const uint64_t now = faulty_now();
        moved = flight->batch->bytes;  /* all of it, where only the loop is late */
        if (now < flight->end)
            moved = (uint64_t)((double)flight->batch->bytes * (double)(now - flight->begun) / (double)(flight->end - flight->begun));
    }
    pthread_mutex_unlock(&self->lock);
    return inside ? moved + self->table->progress(link->inner, &flight->op) : moved;
}

/* ---- the way back ----------------------------------------------------------------------------------------------------- */

/* What the inner driver's event means for the core's op: the events to post, and whether the loop is needed. */
static uint32_t advance(faulty_flight *flight, int *ring) {
    const int bad = flight->op.status != HXA_OK, last = bad || flight->leg + 1 == flight->leg_count;
    uint32_t events = 0;
    if (last && !flight->reported && (flight->seen & HXA_COMPLETED) && (bad || !reports_later(flight))) {
        report(flight);
        events |= HXA_COMPLETED;
    }
    if (!(flight->seen & HXA_RELEASED)) return events;
    if (!bad) flight->moved += flight->legs[flight->leg++].bytes;
    if (!last) {
        if (!close_gate(flight)) {
            flight->stage = FAULTY_WAITING;
            faulty_ripen(flight);
            *ring = 1;
        }
        return events;
    }
    if (!flight->reported) {
        report_later(flight);
        return events;
    }
    close_flight(flight);
    return events | HXA_RELEASED;
}

/* A link or memory call: its op is answered as the inner driver answers it. */
static void answer_call(hxa_instance *self, faulty_flight *flight, uint32_t events) {
    if (events & HXA_COMPLETED) {
        hxa_op *op = flight->outer;
        op->status = flight->op.status;
        op->native = flight->op.native;
        op->scope = flight->op.scope;
        op->failed = flight->op.failed;
        op->bytes = flight->op.bytes;
    }
    self->outer.post(self->outer.ctx, flight->outer, events);
    if (events & HXA_RELEASED) faulty_bury(self, flight);
}

/* The inner driver's sink; any thread. */
void faulty_post(void *ctx, hxa_op *op, uint32_t events) {
    hxa_instance *self = (hxa_instance *)ctx;
    faulty_flight *flight = (faulty_flight *)op->owner;
    if (flight->kind == FAULTY_CALL) {
        pthread_mutex_lock(&self->lock);
        flight->seen |= events;
        const int released = (flight->seen & HXA_RELEASED) != 0, ours = flight->link == NULL;
        if (released && ours && flight->fate.any) faulty_call_wait(flight);
        else if (released && ours) faulty_call_close(flight);
        pthread_mutex_unlock(&self->lock);
        if (!ours || !flight->fate.any) answer_call(self, flight, events);
        return;
    }
    hxa_link *link = flight->link;
    faulty_flight *stops = NULL;
    int ring = 0;
    uint32_t out = 0;
    pthread_mutex_lock(&self->lock);
    flight->seen |= events;
    if (flight->kind == FAULTY_STOP) stops = faulty_stops_take(link);
    else {
        flight->accepted = 1;
        out = advance(flight, &ring);
        if (ring) faulty_link_ring(link);
    }
    pthread_mutex_unlock(&self->lock);
    if (out != 0) faulty_deliver(flight, out);
    faulty_stops_finish(self, stops);
}

/* ---- the end of a link ------------------------------------------------------------------------------------------------ */

/* The link is broken or stops: what the inner driver does not have ends here; late flights only report. */
void faulty_give_up(hxa_link *link, int stop) {
    hxa_instance *self = link->self;
    faulty_flight *chain = NULL, **end = &chain;
    pthread_mutex_lock(&self->lock);
    for (faulty_node *node = link->flights.next, *next; node != &link->flights; node = next) {
        next = node->next;
        faulty_flight *flight = faulty_flight_of(node);
        flight->events = 0;
        if (!flight->accepted) continue;
        if (flight->stage == FAULTY_WAITING) {
            if (!flight->reported) {
                conclude(flight, HXA_E_LINK, 0, HXA_SCOPE_LINK, -1);
                flight->events = HXA_COMPLETED;
            }
            if (flight->fate.late) flight->landing = 1;
            else {
                take_out(flight);
                close_flight(flight);
                flight->events |= HXA_RELEASED;
            }
        } else if (flight->stage == FAULTY_REPORTING && stop) {
            take_out(flight);
            flight->events = faulty_end(flight);
        }
        if (flight->events == 0) continue;
        flight->chain = NULL;
        *end = flight;
        end = &flight->chain;
    }
    link->pool = link->pooled = 0;
    pthread_mutex_unlock(&self->lock);
    while (chain != NULL) {
        faulty_flight *next = chain->chain;
        faulty_deliver(chain, chain->events);
        chain = next;
    }
}

/* Late flights that still want to land. */
size_t faulty_stuck(hxa_link *link) {
    size_t stuck = 0;
    pthread_mutex_lock(&link->self->lock);
    for (faulty_node *node = link->flights.next; node != &link->flights; node = node->next)
        stuck += faulty_flight_of(node)->stage == FAULTY_WAITING && faulty_flight_of(node)->fate.late;
    pthread_mutex_unlock(&link->self->lock);
    return stuck;
}
