#include "stop.h"

#include "fence.h"
#include "notes.h"

int shm_link_stop(hxa_link *link, int dead, hxa_op *op) {
    if (dead) {
        link->dead = 1;
        shm_fence_end(link);
    }
    const int first = shm_swap_sc(&link->state, (uint32_t)SHM_STOPPED) != SHM_STOPPED;
    if (first && shm_load_sc(&link->refs) == 1) {       /* nothing is under way, and only the loop could begin something */
        shm_link_unref(link);
        return HXA_DONE;
    }
    shm_link_adopt(link, op);
    if (!shm_link_wait_for_stop(link, op)) return HXA_DONE;
    if (!first) return HXA_PENDING;    /* `dead` is known now; the first stop and this one end together */
    shm_pool_purge(&link->self->pool);
    shm_notes_pump(link);
    shm_link_unref(link);
    return HXA_PENDING;
}
