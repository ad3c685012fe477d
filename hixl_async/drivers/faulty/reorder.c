#include "reorder.h"

#include "link.h"

/* Everything that was collected is due now, in an order that is never the one of the submits. */
static void close_pool(hxa_link *link) {
    hxa_instance *self = link->self;
    const uint64_t now = faulty_now(), pool = link->pool, n = link->pooled;
    const uint64_t turn = n > 1 ? 1 + faulty_random(self->seed, UINT64_MAX, pool) % (n - 1) : 0;
    const int mirror = (int)(faulty_random(self->seed, UINT64_MAX - 1, pool) & 1);
    uint64_t place = 0;
    for (faulty_node *node = link->operations.next; node != &link->operations; node = node->next) {
        faulty_operation *operation = faulty_operation_of(node);
        if (operation->pool != pool || operation->stage != FAULTY_WAITING || operation->alarm.slot == 0) continue;
        /* A rotation by 1..n-1 moves every operation.  Mirrored it still differs from the order of the submits, except for a pair. */
        uint64_t order = (place + turn) % n;
        if (mirror && n > 2) order = n - 1 - (place + turn - 1) % n;
        operation->alarm.order = order;
        operation->pool = 0;
        faulty_timer_set(&self->timer, &operation->alarm, now);
        place++;
    }
    __atomic_fetch_add(&self->block->reordered, place, __ATOMIC_RELAXED);
    link->pool = link->pooled = 0;
}

void faulty_reorder_enter(faulty_operation *operation, uint64_t now) {
    hxa_link *link = operation->link;
    if (link->pool == 0) {
        link->pool = ++link->self->pools;
        link->pool_window = operation->effects.window;
        link->pool_due = now + operation->effects.within;
    }
    operation->pool = link->pool;
    faulty_timer_set(&link->self->timer, &operation->alarm, link->pool_due);
    if (++link->pooled >= link->pool_window) close_pool(link);
}

void faulty_reorder_due(faulty_operation *operation) {
    if (operation->pool == operation->link->pool) close_pool(operation->link);
    operation->pool = 0;
}
