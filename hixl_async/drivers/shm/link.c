#include "link.h"

#include "doorbell.h"

/* ---- references ------------------------------------------------------------------------------------------------------ */

static void say_gone(hxa_link *link) {
    if (link->peer == NULL) return;
    shm_store_sc(&link->peer->gone, 1u);
    shm_bell_wake(link);
}

/* In place of link->stops: the stop is over, and nothing waits for it any more. */
static hxa_op over;

/* Once `over` is there the loop may free the link. */
void shm_link_unref(hxa_link *link) {
    if (shm_sub_sc(&link->refs, 1u) != 1) return;
    const hxa_sink *sink = &link->self->sink;
    say_gone(link);
    for (hxa_op *op = shm_swap_sc(&link->stops, &over), *next; op != NULL && op != &over; op = next) {
        next = shm_job_of(op)->next;
        hxa_finish(sink, op);
    }
}

int shm_link_wait_for_stop(hxa_link *link, hxa_op *op) {
    hxa_op *top = shm_load_sc(&link->stops);
    do {
        if (top == &over) return 0;
        shm_job_of(op)->next = top;
    } while (!__atomic_compare_exchange_n(&link->stops, &top, op, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return 1;
}

void shm_link_adopt(hxa_link *link, hxa_op *op) {
    op->status = op->native = 0;
    op->scope = HXA_SCOPE_LINK;
    op->failed = -1;
    op->bytes = 0;
    *shm_job_of(op) = (shm_job){.link = link, .state = SHM_FINAL};
}

void shm_link_break(hxa_link *link, int32_t status, const char *why) {
    if (__atomic_exchange_n(&link->down, 1, __ATOMIC_SEQ_CST)) return;
    uint32_t up = SHM_UP;
    __atomic_compare_exchange_n(&link->state, &up, SHM_DOWN, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    const hxa_event event = {
        .link = link->cookie,
        .kind = HXA_EVENT_LINK_DOWN,
        .status = status,
        .data = why,
        .data_len = (uint32_t)strlen(why),
    };
    link->self->sink.event(link->self->sink.ctx, &event);
    shm_pool_purge(&link->self->pool);
}

/* ---- touching the peer's memory -------------------------------------------------------------------------------------- */

/* Dekker: we count ourselves in, then look; the loop says "fenced", then looks at the count. */
int shm_link_enter(hxa_link *link) {
    shm_add_sc(&link->in_flight, 1u);
    if (shm_load_sc(&link->fenced) == 0 && shm_link_open(link)) return 1;
    shm_link_leave(link);
    return 0;
}

void shm_link_leave(hxa_link *link) {
    if (shm_sub_sc(&link->in_flight, 1u) == 1 && shm_load_sc(&link->fenced) == 1) shm_link_say_fenced(link);
}

void shm_link_say_fenced(hxa_link *link) {
    uint32_t asked = 1;
    if (!__atomic_compare_exchange_n(&link->fenced, &asked, 2, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return;
    shm_store_sc(&link->peer->fenced, 1u);
    shm_bell_wake(link);
}

int shm_link_pace(hxa_link *link, uint64_t bytes_per_second) {
    shm_store(&link->pace, bytes_per_second);
    shm_pool_look_again(&link->self->pool);
    return 0;
}
