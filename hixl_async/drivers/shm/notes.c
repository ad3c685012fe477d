#include "notes.h"

#include "doorbell.h"
#include "op.h"
#include "ring.h"

static void give_up(hxa_op *op, int32_t status) {
    __atomic_fetch_or(&shm_job_of(op)->state, SHM_FINAL, __ATOMIC_SEQ_CST);
    op->status = status;
    op->scope = status == HXA_E_LINK ? HXA_SCOPE_LINK : HXA_SCOPE_OP;
    shm_op_finish(op);
}

/* End those that are cancelled, or all if the link is not up any more. */
static void sweep(hxa_link *link, int all) {
    hxa_op *op = link->waiting.first;
    link->waiting.first = link->waiting.last = NULL;
    for (hxa_op *next; op != NULL; op = next) {
        next = shm_job_of(op)->next;
        if (all) give_up(op, HXA_E_LINK);
        else if (shm_load_sc(&shm_job_of(op)->state) == SHM_CANCELLED) give_up(op, HXA_E_CANCELLED);
        else shm_queue_push(&link->waiting, op);
    }
}

static int room(hxa_link *link, const hxa_batch *batch) {
    const uint64_t payload = (uint64_t)batch->topic_len + batch->note_len;
    int answer = shm_ring_room(link->peer, link->peer_capacity, link->head, &link->tail_seen, payload);
    if (answer == SHM_RING_FULL) {
        /* Dekker, twice: the peer moves tail, then looks whether we want room; our loop arms, then asks shm_notes_ready. */
        shm_store_sc(&link->starved, 1u);
        shm_store_sc(&link->peer->want_space, 1u);
        answer = shm_ring_room(link->peer, link->peer_capacity, link->head, &link->tail_seen, payload);
    }
    if (answer == SHM_RING_OK) shm_store(&link->starved, 0u);
    if (answer == SHM_RING_CORRUPT) shm_link_break(link, HXA_E_PROTOCOL, "the peer claims to have read what was never sent");
    return answer;
}

static void put(hxa_link *link, const hxa_batch *batch) {
    shm_ring_put(link->peer, link->peer_capacity, &link->head, batch->topic, batch->topic_len, batch->note, batch->note_len);
    shm_add(&link->self->others.notes_sent, 1);
}

static void work(hxa_link *link) {
    for (hxa_op *op = shm_stack_take(&link->incoming), *next; op != NULL; op = next) {
        next = shm_job_of(op)->next;
        shm_queue_push(&link->waiting, op);
    }
    if (shm_swap_sc(&link->scrub, 0u) != 0) sweep(link, 0);
    uint32_t sent = 0;
    while (link->waiting.first != NULL && shm_load_acq(&link->state) == SHM_UP) {
        hxa_op *op = link->waiting.first;
        const hxa_batch *batch = (const hxa_batch *)shm_job_of(op)->what;
        if (room(link, batch) != SHM_RING_OK) break;
        link->waiting.first = shm_job_of(op)->next;
        op->status = shm_op_decide(op);
        if (op->status == 0) {
            put(link, batch);
            sent++;
        }
        shm_op_finish(op);
    }
    if (sent != 0) shm_bell_wake(link);
    if (shm_load_acq(&link->state) != SHM_UP) sweep(link, 1);
    if (link->waiting.first == NULL) shm_store(&link->starved, 0u);
}

/* Give up the role of sender, unless another thread has asked since the last look. */
static void leave(hxa_link *link) {
    uint32_t seen = shm_load_sc(&link->busy);
    if (seen == 1 && __atomic_compare_exchange_n(&link->busy, &seen, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return;
    do {
        seen = shm_load_sc(&link->busy);
        work(link);
    } while (!__atomic_compare_exchange_n(&link->busy, &seen, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

void shm_notes_pump(hxa_link *link) {
    shm_add_sc(&link->refs, 1u);       /* the last op may end here, and with it the link's stop */
    if (shm_add_sc(&link->busy, 1u) == 0) {
        shm_add_sc(&link->busy, 1u);   /* as if another had come: leave works before it goes */
        leave(link);
    }
    shm_link_unref(link);
}

void shm_notes_queue(hxa_link *link, hxa_op *op) {
    shm_stack_push(&link->incoming, op);
    shm_notes_pump(link);
}

int shm_notes_send(hxa_link *link, const hxa_batch *batch, hxa_op *op) {
    uint32_t idle = 0;
    int sent = 0;
    if (__atomic_compare_exchange_n(&link->busy, &idle, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        if (link->waiting.first == NULL && shm_load_acq(&link->incoming) == NULL && room(link, batch) == SHM_RING_OK) {
            put(link, batch);
            shm_bell_wake(link);
            sent = 1;
        }
        leave(link);
        if (sent) return HXA_DONE;
    }
    shm_op_accept(op, link, batch, SHM_COPY);
    shm_store(&op->bytes, batch->bytes);
    if (batch->signal != NULL) shm_job_of(op)->state = SHM_FINAL;       /* the signal is out: too late to cancel */
    shm_notes_queue(link, op);
    return HXA_PENDING;
}

int shm_notes_ready(hxa_link *link) {
    return shm_load_sc(&link->starved) != 0 && shm_load_sc(&link->peer->tail) != shm_load(&link->tail_seen);
}
