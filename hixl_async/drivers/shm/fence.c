#include "fence.h"

#include "doorbell.h"

static int came(const hxa_link *link) {
    return shm_load_sc(&link->own->fenced) != 0 || shm_load_sc(&link->own->gone) != 0;
}

int shm_link_fence(hxa_link *link, hxa_op *op) {
    if (link->peer == NULL || link->dead || came(link)) return HXA_DONE;
    if (link->fence != NULL) return -HXA_E_BUSY;
    shm_link_adopt(link, op);
    link->fence = op;
    shm_store_sc(&link->own->fence, 1u);
    shm_bell_wake(link);
    return HXA_PENDING;
}

static void answer(hxa_link *link) {
    if (shm_load(&link->fenced) == 0) {
        if (shm_load_sc(&link->peer->fence) == 0) return;
        shm_store_sc(&link->fenced, 1u);
        shm_pool_purge(&link->self->pool);
    }
    if (shm_load_sc(&link->in_flight) == 0) shm_link_say_fenced(link);
}

void shm_fence_poll(hxa_link *link) {
    answer(link);
    if (link->fence != NULL && came(link)) shm_fence_end(link);
}

int shm_fence_waits(const hxa_link *link) {
    if (link->fence != NULL && came(link)) return 1;
    return shm_load(&link->fenced) == 0 && shm_load_sc(&link->peer->fence) != 0;
}

void shm_fence_end(hxa_link *link) {
    hxa_op *op = link->fence;
    link->fence = NULL;
    if (op != NULL) hxa_finish(&link->self->sink, op);
}
